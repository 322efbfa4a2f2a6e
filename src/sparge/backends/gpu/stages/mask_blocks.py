"""Reduce a mask to facts about blocks and tokens, in one pass over tiles of 128 x 64.

    mask_kernel      partial and full blocks, visible keys, queries that see a key, biases of blocks
    sample_kernel    the queries that represent their block, and their biases

`key_mask` reads bool masks over keys instead, unless the window has a left bound. A mask is read in place with its
strides, which are 0 in broadcast dimensions. Results have the mask's own batch and heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import buffer_like, launch, power_of_two, window_offsets, zeros_like
from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q, LOG2_E, Lengths, head_base, kernel, split_program
from sparge.backends.gpu.stages import configs
from sparge.backends.gpu.stages.arguments import WindowSpec, spec_of
from sparge.call import Call
from sparge.masks import geometry
from sparge.masks.geometry import ceil_div
from sparge.masks.visibility import SeenTokens
from sparge.masks.window import Window

HIDDEN, PARTIAL, FULL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Kinds of blocks: no query sees a key; neither hidden nor full; every query sees every key without a bias."""
LARGEST_BIAS = tl.constexpr(1e38)
"""Limit of biases in log2 units, so that sums of finite numbers stay finite."""


@dataclass(frozen=True)
class MaskSpec(WindowSpec):
    """Compile-time values of the mask kernels."""

    mask: str  # "bool" or "additive"
    lowest: float  # lowest finite number of an additive mask's dtype, which hides a key like -inf
    with_reachable: bool  # `Facts.reachable` ignores the left bound of the window
    with_bias: bool  # biases are computed
    blocks: int  # key blocks of a program


class TileFacts(NamedTuple):
    """Facts about a tile of M queries and N keys."""

    seen_keys: Any  # [M], number of keys that each query sees
    unbiased_keys: Any  # [M], number of seen keys without a bias
    is_seen: Any  # [N], 1 for keys that some query sees
    reachable: Any  # 1 if some query sees some key; SPEC.with_reachable: the left bound of the window does not count
    mean: Any  # log2 of the mean of exp(bias) over visible entries (SPEC.with_bias)


@triton.jit
def _entries(mask_base, mask_strides, queries, keys, lengths, INSIDE: tl.constexpr, SPEC: tl.constexpr):
    """Load mask entries of a tile. Return visibility, visibility without the left bound, and biases, each [M, N].

    Without SPEC.with_reachable, the first two are the same. Entries outside of the window are not read. INSIDE: all
    tokens exist and are inside of the window; entries are then read without a load mask, which allows wide loads.
    """
    entry_ptrs = (
        mask_base + queries.to(tl.int64)[:, None] * mask_strides[2] + keys.to(tl.int64)[None, :] * mask_strides[3]
    )
    if INSIDE:
        entries = tl.load(entry_ptrs)
    else:
        reachable = (queries < lengths.q_len)[:, None] & (keys < lengths.kv_len)[None, :]
        if SPEC.has_last:
            reachable = reachable & (keys[None, :] <= queries[:, None] + lengths.last_offset)
        seen = reachable
        if SPEC.has_first:
            seen = seen & (keys[None, :] >= queries[:, None] + lengths.first_offset)
        if not SPEC.with_reachable:
            reachable = seen
        entries = tl.load(entry_ptrs, mask=reachable, other=0)
    bias = entries.to(tl.float32)
    # NaN stays visible, and so propagates
    is_shown = entries != 0 if SPEC.mask == "bool" else (bias <= SPEC.lowest) == 0
    if INSIDE:
        return is_shown, is_shown, bias
    else:
        return seen & is_shown, reachable & is_shown, bias


@triton.jit
def _tile_facts(mask_base, mask_strides, queries, keys, lengths, INSIDE: tl.constexpr, SPEC: tl.constexpr):
    """Return the `TileFacts` of a tile of queries [M] and keys [N]. INSIDE: see `_entries`."""
    seen, reachable, bias = _entries(mask_base, mask_strides, queries, keys, lengths, INSIDE, SPEC)
    seen_keys = tl.sum(seen.to(tl.int32), 1)
    unbiased_keys = seen_keys
    if SPEC.mask != "bool":
        unbiased_keys = tl.sum((seen & (bias == 0.0)).to(tl.int32), 1)
    is_seen = tl.max(seen.to(tl.int32), 0)
    some_reachable = tl.max(is_seen, 0)
    if SPEC.with_reachable:
        some_reachable = tl.max(tl.max(reachable.to(tl.int32), 1), 0)
    mean = 0.0
    if SPEC.with_bias:
        largest = tl.max(tl.max(tl.where(seen, bias, float("-inf")), 1), 0)
        largest = tl.where(largest == float("-inf"), 0.0, largest)
        total = tl.sum(tl.sum(tl.where(seen, tl.exp(bias - largest), 0.0), 1), 0)
        mean = _log_mean(largest, total, tl.sum(seen_keys, 0))
    return TileFacts(seen_keys, unbiased_keys, is_seen, some_reachable, mean)


@triton.jit
def _log_mean(largest, total, count):
    """Return log2 of the mean of exp(bias); 0 if ``count`` is 0, NaN if a bias is NaN or infinite.

    Args:
        total: sum of exp(bias - largest).
    """
    mean = (largest + tl.log(total / tl.maximum(count, 1).to(tl.float32))) * LOG2_E
    bounded = tl.where(mean > LARGEST_BIAS, LARGEST_BIAS, tl.where(mean < -LARGEST_BIAS, -LARGEST_BIAS, mean))
    return tl.where(count == 0, 0.0, bounded)


@kernel
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
    q_blocks,
    kv_blocks,
    pitch,
    chunks,
    SINK: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Write facts about SPEC.blocks key blocks of a query block.

    Grid: chunks of SPEC.blocks key blocks of every query block of every head of the mask, in one dimension. The batch
    and ``heads`` are those of the mask. Rows of kind and bias have ``pitch`` entries. Results that several programs
    write to are cleared beforehand; programs only write ones.

    Reads
        mask      [B, H, Sq | 1, Sk | 1] bool or additive (SPEC.mask)
    Writes
        kind      [B * H, q_blocks, kv_blocks] int8: HIDDEN, PARTIAL or FULL
        column    [B * H, kv_blocks] int8, cleared: 1 if some query sees some key, ignoring left bounds (SINK)
        key       [B, key_heads, Sk] int8, cleared: 1 if some query of some head sees the key
        query     [B * H, Sq] int8, cleared: 1 if the query sees some key
        bias      [B * H, q_blocks, kv_blocks] float32: log2 of the mean of exp(mask) over visible entries, -inf if
                  HIDDEN (SPEC.with_bias)
    """
    # Prologue
    chunk = tl.program_id(0) % chunks
    q_block, flat_head, batch, head = split_program(tl.program_id(0) // chunks, q_blocks, heads)
    mask_base = head_base(mask_ptr, mask_strides, batch, head)
    key_base = key_ptr + (batch * key_heads + head * key_heads // heads) * kv_len
    lengths = Lengths(q_len, kv_len, first_offset, last_offset)
    queries = q_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    queries_end = q_block * BLOCK_Q + BLOCK_Q
    one_per_key = tl.full((BLOCK_K,), 1, tl.int8)
    seeing = tl.zeros((BLOCK_Q,), tl.int32)

    # Main loop over key blocks
    for step in range(SPEC.blocks):
        block = chunk * SPEC.blocks + step
        keys = block * BLOCK_K + tl.arange(0, BLOCK_K)
        exists = block < kv_blocks
        inside = (queries_end <= q_len) & (block * BLOCK_K + BLOCK_K <= kv_len)
        if SPEC.has_last:
            inside = inside & (block * BLOCK_K + BLOCK_K - 1 <= q_block * BLOCK_Q + last_offset)
        if SPEC.has_first:
            inside = inside & (block * BLOCK_K >= queries_end - 1 + first_offset)
        if inside:
            facts = _tile_facts(mask_base, mask_strides, queries, keys, lengths, True, SPEC)
        else:
            facts = _tile_facts(mask_base, mask_strides, queries, keys, lengths, False, SPEC)
        seeing += facts.seen_keys
        is_full = tl.min(((facts.unbiased_keys == BLOCK_K) | (queries >= q_len)).to(tl.int32), 0) != 0
        is_visible = tl.max(facts.is_seen, 0) != 0
        place = (flat_head * q_blocks + q_block) * pitch + block
        kind = tl.where(is_full, FULL, tl.where(is_visible, PARTIAL, HIDDEN))
        tl.store(kind_ptr + place, kind.to(tl.int8), mask=exists)
        tl.store(key_base + keys, one_per_key, mask=facts.is_seen != 0)
        if SINK:
            tl.store(column_ptr + flat_head * kv_blocks + block, 1, mask=facts.reachable != 0)
        if SPEC.with_bias:
            tl.store(bias_ptr + place, tl.where(is_visible, facts.mean, float("-inf")), mask=exists)

    # Epilogue: queries that see a key
    tl.store(query_ptr + flat_head * q_len + queries, tl.full((BLOCK_Q,), 1, tl.int8), mask=seeing != 0)


@kernel
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
    q_blocks,
    kv_blocks,
    pitch,
    chunks,
    SAMPLES: tl.constexpr,
    SAMPLES_PADDED: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Choose evenly spaced samples of a block's queries that see a key, as `reference.prediction.sample_queries` does.

    Grid: chunks of SPEC.blocks key blocks (one chunk without biases) of every query block of every head of the mask,
    in one dimension.

    Reads
        mask      [B, H, Sq | 1, Sk] additive (SPEC.with_bias)
        kind      [B * H, q_blocks, kv_blocks] int8 (SPEC.with_bias) and query [B, H, Sq] int8, from `mask_kernel`
    Writes
        pick      [B * H, q_blocks, SAMPLES] int32
        bias      [B * H, q_blocks, SAMPLES, kv_blocks] float32 (SPEC.with_bias): log2 of the mean of exp(mask) over
                  the keys that the query sees, 0 if there are none, -inf if the block is HIDDEN
    """
    # Prologue
    chunk = tl.program_id(0) % chunks
    flat_q_block = (tl.program_id(0) // chunks).to(tl.int64)
    q_block, _flat_head, batch, head = split_program(tl.program_id(0) // chunks, q_blocks, heads)
    lengths = Lengths(q_len, kv_len, first_offset, last_offset)

    # Choose samples by their rank among the queries that see a key
    queries = q_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    query_base = head_base(query_ptr, query_strides, batch, head)
    seen = tl.load(query_base + queries * query_strides[2], mask=queries < q_len, other=0).to(tl.int32)
    count = tl.sum(seen, 0)
    samples = tl.arange(0, SAMPLES_PADDED)
    rank = (2 * samples + 1) * count // (2 * SAMPLES)  # [SAMPLES]
    before = (tl.cumsum(seen, 0)[None, :] <= rank[:, None]).to(tl.int32)  # [SAMPLES, 128], queries before that rank
    pick = q_block * BLOCK_Q + tl.where((count > 0) & (samples < SAMPLES), tl.sum(before, 1), 0)
    if chunk == 0:
        tl.store(pick_ptr + flat_q_block * SAMPLES + samples, pick, mask=samples < SAMPLES)

    # Biases of the samples
    if SPEC.with_bias:
        mask_base = head_base(mask_ptr, mask_strides, batch, head)
        for step in range(SPEC.blocks):
            block = chunk * SPEC.blocks + step
            keys = block * BLOCK_K + tl.arange(0, BLOCK_K)
            seen_keys, _, bias = _entries(mask_base, mask_strides, pick, keys, lengths, False, SPEC)  # [SAMPLES, 64]
            largest = tl.max(tl.where(seen_keys, bias, float("-inf")), 1)
            largest = tl.where(largest == float("-inf"), 0.0, largest)
            total = tl.sum(tl.where(seen_keys, tl.exp(bias - largest[:, None]), 0.0), 1)
            mean = _log_mean(largest, total, tl.sum(seen_keys.to(tl.int32), 1))
            kind = tl.load(kind_ptr + flat_q_block * pitch + block, mask=block < kv_blocks, other=HIDDEN)
            mean = tl.where(kind != HIDDEN, mean, float("-inf"))
            places = (flat_q_block * SAMPLES + samples) * pitch + block
            tl.store(bias_ptr + places, mean, mask=samples < tl.where(block < kv_blocks, SAMPLES, 0))


@dataclass(frozen=True)
class MaskFacts:
    """Facts about a mask, expanded to the call's batch, heads and query blocks. Facts that no stage needs are None."""

    tokens: SeenTokens  # visible keys, and queries that see a key
    # `key_mask` only. first_seen, first_query: as `visibility.first_seen_keys` returns them
    first_seen: Tensor | None = None
    first_query: Tensor | None = None
    # `mask_blocks` only
    kind: Tensor | None = None  # (B, H, q_blocks, kv_blocks) int8, `HIDDEN`, `PARTIAL` or `FULL`
    column: Tensor | None = None  # (B, H, kv_blocks) int8, 1 for blocks that some query sees, ignoring left bounds
    pick: Tensor | None = None  # (B, H, q_blocks, samples) int32, the sampled queries
    # (B, H, q_blocks, samples, kv_blocks) float32, bias added to block scores, in log2 units, -inf for hidden blocks
    bias: Tensor | None = None


def mask_blocks(call: Call, *, scored: int, are_means: bool = False) -> MaskFacts:
    """Return the `MaskFacts` of a call's mask, for all masks that `key_mask` does not handle.

    Args:
        scored: number of queries that represent a block, 0 if nothing is scored.
        are_means: whether blocks are represented by means of queries instead of samples.
    """
    shape, mask = call.shape, call.attn_mask
    assert mask is not None
    batch, heads, q_len, _ = mask.shape
    if call.window != Window():
        q_len = shape.q_len
    mask = mask.expand(-1, -1, q_len, shape.kv_len)
    is_bool = mask.dtype == torch.bool
    q_blocks, key_heads = ceil_div(q_len, geometry.BLOCK_Q), 1 if heads == 1 else shape.kv_heads
    sink = scored > 0 and call.selection.keeps_sink(call.is_causal)
    is_shared = q_len < shape.q_len  # all queries share the mask: a block's bias is also the bias of each query
    has_bias = scored > 0 and not is_bool
    has_block_bias = has_bias and (are_means or is_shared)
    pitch = ceil_div(shape.kv_blocks, 16) * 16  # kernels are compiled again for other alignments
    kind = buffer_like(mask, True, batch, heads, q_blocks, pitch, dtype=torch.int8)
    column = zeros_like(mask, batch, heads, shape.kv_blocks, dtype=torch.int8) if sink else None
    keys = zeros_like(mask, batch, key_heads, shape.kv_len, dtype=torch.int8)
    queries = zeros_like(mask, batch, heads, q_len, dtype=torch.int8)
    bias = buffer_like(mask, has_block_bias, batch, heads, q_blocks, 1, pitch)
    config = configs.stage_config("mask")
    chunks = ceil_div(shape.kv_blocks, config.blocks)
    lengths = {"q_len": q_len, "kv_len": shape.kv_len, **window_offsets(call)}
    spec = MaskSpec(
        mask="bool" if is_bool else "additive",
        lowest=0.0 if is_bool else torch.finfo(mask.dtype).min,
        **spec_of(call),
        with_reachable=sink and call.window.left is not None,
        with_bias=has_block_bias,
        blocks=config.blocks,
    )
    launch(
        mask_kernel,
        chunks * q_blocks * batch * heads,
        mask_ptr=mask,
        kind_ptr=kind,
        column_ptr=kind if column is None else column,
        key_ptr=keys,
        query_ptr=queries,
        bias_ptr=bias,
        mask_strides=mask.stride(),
        heads=heads,
        key_heads=key_heads,
        **lengths,
        q_blocks=q_blocks,
        kv_blocks=shape.kv_blocks,
        pitch=pitch,
        chunks=chunks,
        SINK=sink,
        SPEC=spec,
        num_warps=config.warps,
    )
    queries = queries.expand(-1, -1, shape.q_len)
    pick = None
    if scored and not are_means:
        pick = buffer_like(mask, True, batch, heads, shape.q_blocks, scored, dtype=torch.int32)
        has_sampled_bias = has_bias and not is_shared
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
            **lengths | {"q_len": shape.q_len},
            q_blocks=shape.q_blocks,
            kv_blocks=shape.kv_blocks,
            pitch=pitch,
            chunks=sample_chunks,
            SAMPLES=scored,
            SAMPLES_PADDED=power_of_two(scored),
            SPEC=replace(spec, mask="additive", with_reachable=False, with_bias=has_sampled_bias),
            num_warps=config.warps,
        )
    all_heads = (shape.batch, shape.heads)
    return MaskFacts(
        tokens=SeenTokens(keys=keys.view(torch.bool), queries=queries.view(torch.bool)),
        kind=kind[..., : shape.kv_blocks].expand(*all_heads, shape.q_blocks, -1),
        column=None if column is None else column.expand(*all_heads, -1),
        pick=None if pick is None else pick.expand(*all_heads, -1, -1),
        bias=bias[..., : shape.kv_blocks].expand(*all_heads, shape.q_blocks, scored, -1) if has_bias else None,
    )
