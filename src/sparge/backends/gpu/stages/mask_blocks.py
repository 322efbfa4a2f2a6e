"""What a mask with entries says of blocks and tokens, before anything is scored: one pass in tiles of 128 x 64.

    mask_kernel      which blocks are visible, and wholly so; keys and queries that are seen; biases of blocks
    sample_kernel    which queries stand for their block; their own biases, where there are any

Bool masks of keys alone need none of this (`visibility.first_seen_keys`), unless a window has a left bound. A mask is
read in place with its strides, 0 where it is broadcast; what comes out is as small as the mask's own batch and heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import (
    buffer_like,
    launch,
    power_of_two,
    window_flags,
    window_offsets,
    zeros_like,
)
from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q, LOG2_E
from sparge.backends.gpu.stages import configs
from sparge.call import Call
from sparge.masks import geometry
from sparge.masks.geometry import ceil_div
from sparge.masks.visibility import SeenTokens
from sparge.masks.window import Window

NUMBERS = [
    "heads",
    "key_heads",
    "q_len",
    "kv_len",
    "first_offset",
    "last_offset",
    "rows",
    "kv_blocks",
    "pitch",
    "chunks",
]
HIDDEN, PARTLY, WHOLLY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What a row of blocks sees of a block: nothing, something; everything, and no bias applies."""
LARGEST_BIAS = tl.constexpr(1e38)
"""In octaves: finite numbers stay finite when others are added to them."""


@triton.jit
def _entries(
    mask_base,
    stride_q,
    stride_k,
    queries,
    keys,
    q_len,
    kv_len,
    first_offset,
    last_offset,
    MASK: tl.constexpr,
    LOWEST: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
    REACHES: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Of queries [M] and keys [N]: who sees whom [M, N], who would if the window had no left bound, and the bias.

    The second is the first unless REACHES. Nothing outside of the window is read. INSIDE: all tokens exist, and all is
    within the window; what is read without a mask is read in wide pieces.
    """
    pointers = mask_base + queries.to(tl.int64)[:, None] * stride_q + keys.to(tl.int64)[None, :] * stride_k
    if INSIDE:
        entries = tl.load(pointers)
    else:
        reached = (queries < q_len)[:, None] & (keys < kv_len)[None, :]
        if HAS_LAST:
            reached = reached & (keys[None, :] <= queries[:, None] + last_offset)
        seen = reached
        if HAS_FIRST:
            seen = seen & (keys[None, :] >= queries[:, None] + first_offset)
        if not REACHES:
            reached = seen
        entries = tl.load(pointers, mask=reached, other=0)
    bias = entries.to(tl.float32)
    shown = entries != 0 if MASK == "bool" else (bias <= LOWEST) == 0  # NaN stays visible, and so propagates
    if INSIDE:
        return shown, shown, bias
    else:
        return seen & shown, reached & shown, bias


@triton.jit
def _tile_facts(
    mask_base,
    stride_q,
    stride_k,
    queries,
    keys,
    q_len,
    kv_len,
    first_offset,
    last_offset,
    MASK: tl.constexpr,
    LOWEST: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
    REACHES: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Of a tile: how many keys each query sees, and how many without a bias [M]; which keys are seen [N]; whether some
    query reaches some key (REACHES); log2 of the mean of exp(bias) (WITH_BIAS).
    """
    seen, reached, bias = _entries(
        mask_base,
        stride_q,
        stride_k,
        queries,
        keys,
        q_len,
        kv_len,
        first_offset,
        last_offset,
        MASK,
        LOWEST,
        HAS_FIRST,
        HAS_LAST,
        REACHES,
        INSIDE,
    )
    of_queries = tl.sum(seen.to(tl.int32), 1)
    plain = of_queries
    if MASK != "bool":
        plain = tl.sum((seen & (bias == 0.0)).to(tl.int32), 1)
    of_keys = tl.max(seen.to(tl.int32), 0)
    meets = tl.max(of_keys, 0)
    if REACHES:
        meets = tl.max(tl.max(reached.to(tl.int32), 1), 0)
    mean = 0.0
    if WITH_BIAS:
        largest = tl.max(tl.max(tl.where(seen, bias, float("-inf")), 1), 0)
        largest = tl.where(largest == float("-inf"), 0.0, largest)
        total = tl.sum(tl.sum(tl.where(seen, tl.exp(bias - largest), 0.0), 1), 0)
        mean = _log_mean(largest, total, tl.sum(of_queries, 0))
    return of_queries, plain, of_keys, meets, mean


@triton.jit
def _log_mean(largest, total, count):
    """log2 of the mean of exp(bias): ``total`` is the sum of exp(bias - largest); 0 where nothing was summed.

    NaN where a bias is NaN or infinite.
    """
    mean = (largest + tl.log(total / tl.maximum(count, 1).to(tl.float32))) * LOG2_E
    bounded = tl.where(mean > LARGEST_BIAS, LARGEST_BIAS, tl.where(mean < -LARGEST_BIAS, -LARGEST_BIAS, mean))
    return tl.where(count == 0, 0.0, bounded)


@triton.jit(do_not_specialize=NUMBERS)
def mask_kernel(
    mask_ptr,
    kind_ptr,
    column_ptr,
    key_ptr,
    query_ptr,
    bias_ptr,
    mask_strides,
    heads,
    key_heads,
    q_len,
    kv_len,
    first_offset,
    last_offset,
    rows,
    kv_blocks,
    pitch,
    chunks,
    MASK: tl.constexpr,
    LOWEST: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
    SINK: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Facts about BLOCKS blocks of a row of blocks.

    Grid: chunks of BLOCKS key blocks of every row of blocks of every head of the mask, in one dimension. What is 0
    before is written by several programs, each the same 1. ``heads`` are the mask's own, its batch too. Rows of kind
    and bias have ``pitch`` entries.

    Reads
        mask      [B, H, Sq | 1, Sk | 1] bool or additive (MASK)
    Writes
        kind      [B * H, rows, kv_blocks] int8: HIDDEN, PARTLY or WHOLLY
        column    [B * H, kv_blocks] int8 (SINK), 0 before: some query reaches some key, a left bound aside
        key       [B, key_heads, Sk] int8, 0 before: some query of some head sees it
        query     [B * H, Sq] int8, 0 before: it sees some key
        bias      [B * H, rows, kv_blocks] float32 (WITH_BIAS): log2 mean exp(mask) over what is visible, -inf if HIDDEN
    """
    reaches: tl.constexpr = SINK and HAS_FIRST
    chunk = tl.program_id(0) % chunks
    flat_row = tl.program_id(0) // chunks
    row = flat_row % rows
    flat_head = (flat_row // rows).to(tl.int64)
    batch = flat_head // heads
    head = flat_head % heads
    mask_base = mask_ptr + batch * mask_strides[0] + head * mask_strides[1]
    key_base = key_ptr + (batch * key_heads + head * key_heads // heads) * kv_len
    queries = row * BLOCK_Q + tl.arange(0, BLOCK_Q)
    queries_end = row * BLOCK_Q + BLOCK_Q
    one_per_key = tl.full((BLOCK_K,), 1, tl.int8)
    seeing = tl.zeros((BLOCK_Q,), tl.int32)
    for step in range(BLOCKS):
        block = chunk * BLOCKS + step
        keys = block * BLOCK_K + tl.arange(0, BLOCK_K)
        exists = block < kv_blocks
        inside = (queries_end <= q_len) & (block * BLOCK_K + BLOCK_K <= kv_len)
        if HAS_LAST:
            inside = inside & (block * BLOCK_K + BLOCK_K - 1 <= row * BLOCK_Q + last_offset)
        if HAS_FIRST:
            inside = inside & (block * BLOCK_K >= queries_end - 1 + first_offset)
        if inside:
            of_queries, plain, of_keys, meets, mean = _tile_facts(
                mask_base,
                mask_strides[2],
                mask_strides[3],
                queries,
                keys,
                q_len,
                kv_len,
                first_offset,
                last_offset,
                MASK,
                LOWEST,
                HAS_FIRST,
                HAS_LAST,
                reaches,
                WITH_BIAS,
                True,
            )
        else:
            of_queries, plain, of_keys, meets, mean = _tile_facts(
                mask_base,
                mask_strides[2],
                mask_strides[3],
                queries,
                keys,
                q_len,
                kv_len,
                first_offset,
                last_offset,
                MASK,
                LOWEST,
                HAS_FIRST,
                HAS_LAST,
                reaches,
                WITH_BIAS,
                False,
            )
        seeing += of_queries
        whole = tl.min(((plain == BLOCK_K) | (queries >= q_len)).to(tl.int32), 0) != 0
        some = tl.max(of_keys, 0) != 0
        place = (flat_head * rows + row) * pitch + block
        tl.store(kind_ptr + place, tl.where(whole, WHOLLY, tl.where(some, PARTLY, HIDDEN)).to(tl.int8), mask=exists)
        tl.store(key_base + keys, one_per_key, mask=of_keys != 0)
        if SINK:
            tl.store(column_ptr + flat_head * kv_blocks + block, 1, mask=meets != 0)
        if WITH_BIAS:
            tl.store(bias_ptr + place, tl.where(some, mean, float("-inf")), mask=exists)
    tl.store(query_ptr + flat_head * q_len + queries, tl.full((BLOCK_Q,), 1, tl.int8), mask=seeing != 0)


@triton.jit(do_not_specialize=NUMBERS)
def sample_kernel(
    mask_ptr,
    kind_ptr,
    query_ptr,
    pick_ptr,
    bias_ptr,
    mask_strides,
    query_strides,
    heads,
    q_len,
    kv_len,
    first_offset,
    last_offset,
    rows,
    kv_blocks,
    pitch,
    chunks,
    SAMPLES: tl.constexpr,
    SAMPLES_PADDED: tl.constexpr,
    LOWEST: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Evenly spaced queries among those of a block that see a key, as `reference.prediction.sample_queries` has it.

    Grid: chunks of BLOCKS key blocks (one without biases) of every row of blocks of every head of the mask, in one
    dimension.

    Reads
        mask      [B, H, Sq | 1, Sk] additive (WITH_BIAS)
        kind      [B * H, rows, kv_blocks] int8 (WITH_BIAS) and query [B, H, Sq] int8, of `mask_kernel`
    Writes
        pick      [B * H, rows, SAMPLES] int32
        bias      [B * H, rows, SAMPLES, kv_blocks] float32 (WITH_BIAS): log2 mean exp(mask) over what a query sees, 0
                  if that is nothing, -inf if its block is HIDDEN
    """
    chunk = tl.program_id(0) % chunks
    flat_row = (tl.program_id(0) // chunks).to(tl.int64)
    row = (flat_row % rows).to(tl.int32)
    flat_head = flat_row // rows
    batch = flat_head // heads
    head = flat_head % heads
    queries = row * BLOCK_Q + tl.arange(0, BLOCK_Q)
    query_base = query_ptr + batch * query_strides[0] + head * query_strides[1]
    seen = tl.load(query_base + queries * query_strides[2], mask=queries < q_len, other=0).to(tl.int32)
    count = tl.sum(seen, 0)
    samples = tl.arange(0, SAMPLES_PADDED)
    rank = (2 * samples + 1) * count // (2 * SAMPLES)
    before = (tl.cumsum(seen, 0)[None, :] <= rank[:, None]).to(tl.int32)  # the query of that rank comes later
    pick = row * BLOCK_Q + tl.where((count > 0) & (samples < SAMPLES), tl.sum(before, 1), 0)
    if chunk == 0:
        tl.store(pick_ptr + flat_row * SAMPLES + samples, pick, mask=samples < SAMPLES)
    if WITH_BIAS:
        mask_base = mask_ptr + batch * mask_strides[0] + head * mask_strides[1]
        for step in range(BLOCKS):
            block = chunk * BLOCKS + step
            seen_keys, _, bias = _entries(
                mask_base,
                mask_strides[2],
                mask_strides[3],
                pick,
                block * BLOCK_K + tl.arange(0, BLOCK_K),
                q_len,
                kv_len,
                first_offset,
                last_offset,
                "additive",
                LOWEST,
                HAS_FIRST,
                HAS_LAST,
                False,
                False,
            )
            largest = tl.max(tl.where(seen_keys, bias, float("-inf")), 1)
            largest = tl.where(largest == float("-inf"), 0.0, largest)
            total = tl.sum(tl.where(seen_keys, tl.exp(bias - largest[:, None]), 0.0), 1)
            mean = _log_mean(largest, total, tl.sum(seen_keys.to(tl.int32), 1))
            kind = tl.load(kind_ptr + flat_row * pitch + block, mask=block < kv_blocks, other=HIDDEN)
            mean = tl.where(kind != HIDDEN, mean, float("-inf"))
            places = (flat_row * SAMPLES + samples) * pitch + block
            tl.store(bias_ptr + places, mean, mask=samples < tl.where(block < kv_blocks, SAMPLES, 0))


@dataclass(frozen=True)
class MaskBlocks:
    """A mask with entries as the stages read it. Tensors are expanded to the call's batch, heads and rows.

    Attributes:
        tokens: keys and queries that are seen.
        kind: (B, H, q_blocks, kv_blocks) int8, `HIDDEN`, `PARTLY` or `WHOLLY`.
        column: (B, H, kv_blocks) int8, blocks that some query reaches, a left bound aside; None where no row keeps the
            sink.
        pick: (B, H, q_blocks, samples) int32, the queries that stand for their block; None where means of queries do.
        bias: (B, H, q_blocks, samples, kv_blocks) float32, what the mask adds to scores, in octaves, -inf where the
            block is hidden; None where it adds nothing.
    """

    tokens: SeenTokens
    kind: Tensor
    column: Tensor | None
    pick: Tensor | None
    bias: Tensor | None


def mask_blocks(call: Call, *, scored: int, are_means: bool = False) -> MaskBlocks:
    """Read a call's mask.

    Args:
        scored: how many queries stand for a block, 0 where nothing is scored.
        are_means: they are means, else samples.
    """
    shape, mask = call.shape, call.attn_mask
    assert mask is not None
    batch, heads, q_len, _ = mask.shape
    if call.window != Window():
        q_len = shape.q_len
    mask = mask.expand(-1, -1, q_len, shape.kv_len)
    is_bool = mask.dtype == torch.bool
    rows, key_heads = ceil_div(q_len, geometry.BLOCK_Q), 1 if heads == 1 else shape.kv_heads
    sink = scored > 0 and call.selection.keeps_sink(call.is_causal)
    is_alike = q_len < shape.q_len  # all queries see the same, so that the bias of a block is that of its queries
    has_bias = scored > 0 and not is_bool
    has_block_bias = has_bias and (are_means or is_alike)
    pitch = ceil_div(shape.kv_blocks, 16) * 16  # kernels are compiled anew for other alignments
    kind = buffer_like(mask, True, batch, heads, rows, pitch, dtype=torch.int8)
    column = zeros_like(mask, batch, heads, shape.kv_blocks, dtype=torch.int8) if sink else None
    keys = zeros_like(mask, batch, key_heads, shape.kv_len, dtype=torch.int8)
    queries = zeros_like(mask, batch, heads, q_len, dtype=torch.int8)
    bias = buffer_like(mask, has_block_bias, batch, heads, rows, 1, pitch)
    setting = configs.mask_config()
    chunks = ceil_div(shape.kv_blocks, setting.blocks)
    numbers = {"q_len": q_len, "kv_len": shape.kv_len, **window_offsets(call)}
    lowest = 0.0 if is_bool else torch.finfo(mask.dtype).min
    launch(
        mask_kernel,
        chunks * rows * batch * heads,
        mask_ptr=mask,
        kind_ptr=kind,
        column_ptr=kind if column is None else column,
        key_ptr=keys,
        query_ptr=queries,
        bias_ptr=bias,
        mask_strides=mask.stride(),
        heads=heads,
        key_heads=key_heads,
        **numbers,
        rows=rows,
        kv_blocks=shape.kv_blocks,
        pitch=pitch,
        chunks=chunks,
        MASK="bool" if is_bool else "additive",
        LOWEST=lowest,
        **window_flags(call),
        SINK=sink,
        WITH_BIAS=has_block_bias,
        BLOCKS=setting.blocks,
        num_warps=setting.warps,
    )
    queries = queries.expand(-1, -1, shape.q_len)
    pick = None
    if scored and not are_means:
        pick = buffer_like(mask, True, batch, heads, shape.q_blocks, scored, dtype=torch.int32)
        has_sampled_bias = has_bias and not is_alike
        if has_sampled_bias:
            bias = buffer_like(mask, True, batch, heads, shape.q_blocks, scored, pitch)
        sample_chunks = chunks if has_sampled_bias else 1
        launch(
            sample_kernel,
            sample_chunks * shape.q_blocks * batch * heads,
            mask_ptr=mask,
            kind_ptr=kind,
            query_ptr=queries,
            pick_ptr=pick,
            bias_ptr=bias,
            mask_strides=mask.stride(),
            query_strides=queries.stride(),
            heads=heads,
            **numbers | {"q_len": shape.q_len},
            rows=shape.q_blocks,
            kv_blocks=shape.kv_blocks,
            pitch=pitch,
            chunks=sample_chunks,
            SAMPLES=scored,
            SAMPLES_PADDED=power_of_two(scored),
            LOWEST=lowest,
            **window_flags(call),
            WITH_BIAS=has_sampled_bias,
            BLOCKS=setting.blocks,
            num_warps=setting.warps,
        )
    whole = (shape.batch, shape.heads)
    return MaskBlocks(
        tokens=SeenTokens(keys=keys.view(torch.bool), queries=queries.view(torch.bool)),
        kind=kind[..., : shape.kv_blocks].expand(*whole, shape.q_blocks, -1),
        column=None if column is None else column.expand(*whole, -1),
        pick=None if pick is None else pick.expand(*whole, -1, -1),
        bias=bias[..., : shape.kv_blocks].expand(*whole, shape.q_blocks, scored, -1) if has_bias else None,
    )
