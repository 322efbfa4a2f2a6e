"""Find the visible tokens under a bool mask over keys, for windows without a left bound.

    keys_kernel       keys that some query sees, and the first one in each block
    queries_kernel    queries that see a key: all queries from the first one on

`visibility.find_visibility` and `visibility.first_seen_keys` are the specification. A mask is read in place with its
strides. Results have the mask's own batch and heads. `mask_blocks` reads all other masks.
"""

from __future__ import annotations

import torch
import triton.language as tl

from sparge.backends.gpu.launch import buffer_like, launch
from sparge.backends.gpu.primitives import BLOCK_K, NOWHERE, head_base, kernel, split_program
from sparge.backends.gpu.stages.mask_blocks import MaskFacts
from sparge.call import Call
from sparge.masks.geometry import ceil_div
from sparge.masks.visibility import SeenTokens
from sparge.masks.window import last_offset

BLOCKS, QUERIES = tl.constexpr(16), tl.constexpr(4096)
"""Key blocks per program of `keys_kernel`, queries per program of `queries_kernel`."""
WARPS = 4


@kernel
def keys_kernel(
    mask_ptr,
    seen_ptr,
    first_seen_ptr,
    mask_strides,
    key_heads,
    group,
    kv_len,
    pitch,
    chunks,
):
    """Reduce BLOCKS key blocks of a mask over the query heads that share a head of K.

    Grid: chunks of BLOCKS key blocks of every head of K, in one dimension. The batch, ``key_heads`` and ``group`` are
    those of the mask, which may be broadcast. Rows of first_seen have ``pitch`` entries.

    Reads
        mask          [B, H, Sk | 1] bool
    Writes
        seen          [B, key_heads, Sk] int8: the key is visible in some head of the group
        first_seen    [B * H, pitch] int32: the first visible key of each block, NOWHERE if there is none
    """
    chunk, flat_key_head, batch, key_head = split_program(tl.program_id(0), chunks, key_heads)
    first_head = key_head * group
    blocks = chunk * BLOCKS + tl.arange(0, BLOCKS)
    keys = blocks[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]  # [BLOCKS, BLOCK_K]
    inside = keys < kv_len
    is_seen = tl.zeros((BLOCKS, BLOCK_K), tl.int8)
    for member in range(group):
        head = first_head + member
        mask_ptrs = head_base(mask_ptr, mask_strides, batch, head) + keys.to(tl.int64) * mask_strides[2]
        is_shown = tl.load(mask_ptrs, mask=inside, other=0) != 0
        is_seen = is_seen | is_shown.to(tl.int8)
        first = tl.min(tl.where(is_shown, keys, NOWHERE), 1)
        flat_head = flat_key_head * group + member
        tl.store(first_seen_ptr + flat_head * pitch + blocks, first, mask=blocks < pitch)
    tl.store(seen_ptr + flat_key_head * kv_len + keys, is_seen, mask=inside)


@kernel
def queries_kernel(
    first_seen_ptr,
    seen_ptr,
    first_query_ptr,
    q_len,
    last_offset,
    pitch,
    chunks,
    HAS_LAST: tl.constexpr,
):
    """Find the first query of a head that sees a key, and mark which of QUERIES queries see one.

    Grid: chunks of QUERIES queries of every head of the mask, in one dimension.

    Reads
        first_seen     [B * H, pitch] int32
    Writes
        seen           [B * H, Sq] int8
        first_query    [B * H] int32: the first query that sees a key, Sq if there is none; 0 without a right bound
    """
    # First visible key of the head
    chunk = tl.program_id(0) % chunks
    flat_head = (tl.program_id(0) // chunks).to(tl.int64)
    first_key = tl.full((), NOWHERE, tl.int32)
    for start in range(0, pitch, 1024):
        blocks = start + tl.arange(0, 1024)
        first_keys = tl.load(first_seen_ptr + flat_head * pitch + blocks, mask=blocks < pitch, other=NOWHERE)
        first_key = tl.minimum(first_key, tl.min(first_keys, 0))

    # The first query that sees this key, and all later queries
    first_query = tl.zeros((), tl.int64)
    if HAS_LAST:
        first_query = tl.minimum(tl.maximum(first_key.to(tl.int64) - last_offset, 0), q_len)
    queries = chunk * QUERIES + tl.arange(0, QUERIES)
    sees = (queries >= first_query) & (first_key < NOWHERE)
    tl.store(seen_ptr + flat_head * q_len + queries, sees.to(tl.int8), mask=queries < q_len)
    if chunk == 0:
        tl.store(first_query_ptr + flat_head, first_query.to(tl.int32))


def has_key_mask(call: Call) -> bool:
    """Return whether `key_mask` handles a call: it has a bool mask over keys, and its window has no left bound."""
    mask = call.attn_mask
    return mask is not None and mask.shape[2] == 1 and mask.dtype == torch.bool and call.window.left is None


def key_mask(call: Call) -> MaskFacts:
    """Return the visible tokens and the first visible keys of a call's mask."""
    shape, mask = call.shape, call.attn_mask
    assert mask is not None
    batch, heads = mask.shape[:2]
    key_heads = 1 if heads == 1 else shape.kv_heads
    stride_batch, stride_head, _, stride_key = mask.expand(-1, -1, -1, shape.kv_len).stride()
    pitch = ceil_div(shape.kv_blocks, 16) * 16  # kernels are compiled again for other alignments
    keys = buffer_like(mask, True, batch, key_heads, shape.kv_len, dtype=torch.int8)
    first_seen = buffer_like(mask, True, batch, heads, pitch, dtype=torch.int32)
    chunks = ceil_div(pitch, BLOCKS.value)
    launch(
        keys_kernel,
        chunks * batch * key_heads,
        mask_ptr=mask,
        seen_ptr=keys,
        first_seen_ptr=first_seen,
        mask_strides=(stride_batch, stride_head, stride_key),
        key_heads=key_heads,
        group=heads // key_heads,
        kv_len=shape.kv_len,
        pitch=pitch,
        chunks=chunks,
        num_warps=WARPS,
    )
    queries = buffer_like(mask, True, batch, heads, shape.q_len, dtype=torch.int8)
    first_query = buffer_like(mask, True, batch, heads, dtype=torch.int32)
    chunks, last = ceil_div(shape.q_len, QUERIES.value), last_offset(call.window, shape)
    launch(
        queries_kernel,
        chunks * batch * heads,
        first_seen_ptr=first_seen,
        seen_ptr=queries,
        first_query_ptr=first_query,
        q_len=shape.q_len,
        last_offset=last or 0,
        pitch=pitch,
        chunks=chunks,
        HAS_LAST=last is not None,
        num_warps=WARPS,
    )
    all_heads = (shape.batch, shape.heads)
    return MaskFacts(
        tokens=SeenTokens(keys=keys.view(torch.bool), queries=queries.view(torch.bool)),
        first_seen=first_seen.expand(*all_heads, -1)[..., : shape.kv_blocks],
        first_query=first_query.expand(all_heads),
    )
