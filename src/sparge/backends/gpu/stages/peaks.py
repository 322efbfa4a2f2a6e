"""Mark key blocks that have a shared peak: a key with scores far above nearby keys for many queries.

A few INT8 queries of each head are multiplied by all INT8 keys before attention. A block with a shared peak is marked
by the sign of its scales, which the attention kernels load anyway. See `gpu.peak_handling`.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import launch, padded, segments_argument
from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q, FAR, KEY_GROUPS, by_group, kernel, segment_sizes
from sparge.backends.gpu.stages import configs
from sparge.backends.gpu.stages.arguments import WindowSpec, sizes_of, spec_of
from sparge.call import Call
from sparge.masks.geometry import ceil_div

SAMPLES = tl.constexpr(64)
"""Number of evenly spaced sample queries for each head of K and V, from all query heads of its group."""
NEEDED = tl.constexpr(16)
"""A peak is shared if this many samples have it, or half of a query head's samples if these are fewer. Peaks of fewer
queries are ignored. With 4 instead of 16, one sixth of the blocks of a video would be marked instead of 0.4 %."""


@kernel
def mark_peaks_kernel(
    query_ptr,
    key_ptr,
    query_scale_ptr,
    key_scale_ptr,
    segments_ptr,
    heads,
    group,
    q_len,
    kv_len,
    first_offset,
    last_offset,
    q_blocks,
    kv_blocks,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Mark key blocks that have a shared peak, by the sign of their scales.

    For a query, a group of 16 keys is far if its largest score is more than FAR log2 units below the largest score of
    the block, and a block has a peak if one of its groups is far. The peak is shared if the block has a peak for enough
    sample queries: half of the samples of a query head, but at most NEEDED. With a left bound of the window
    (SPEC.has_first), only samples that see the block count.

    Grid: chunks of BLOCKS key blocks of every head of K and V, in one dimension. The first blocks come first, because
    quantization wrote them last and they may still be in the cache.

    Reads
        query          [B * H, q_blocks * 128, D padded] int8 and query_scale [B * H, q_blocks * 128] float32
        key            [B * Hkv, kv_blocks * 64, D padded] int8
        segments       `Segments.table` (SPEC.packed)
    Reads and writes
        key_scale      [B * Hkv, kv_blocks, 4] float32, negative if the block has a shared peak
    """
    # Prologue
    program = tl.program_id(0)
    parts = tl.cdiv(kv_blocks, BLOCKS)
    first = program % parts * BLOCKS
    flat_kv_head = (program // parts).to(tl.int64)
    segment_blocks = kv_blocks
    if SPEC.packed:
        batch = program // parts // (heads // group)
        q_len, kv_len, first_offset, last_offset = segment_sizes(segments_ptr, batch, first_offset, last_offset)
        segment_blocks = tl.cdiv(kv_len, BLOCK_K)

    # Load the sample queries
    sample = tl.arange(0, SAMPLES)
    per_head = tl.maximum(SAMPLES // group, 1)
    place = sample // group
    is_sample = place < per_head
    position = tl.minimum(place, per_head - 1) * 2 + 1
    position = (position.to(tl.int64) * q_len // (2 * per_head)).to(tl.int32)
    head = flat_kv_head * group + sample % group  # batch * heads + head
    row = head * q_blocks * BLOCK_Q + position
    channels = tl.arange(0, HEAD_DIM_PADDED)
    query = tl.load(query_ptr + row[:, None] * HEAD_DIM_PADDED + channels[None, :])  # [SAMPLES, HEAD_DIM]
    query_scale = tl.load(query_scale_ptr + row)
    needed = tl.minimum(tl.maximum(per_head // 2, 2), NEEDED)
    last_key = tl.full((SAMPLES,), kv_len - 1, tl.int32)
    if SPEC.has_last:
        last_key = tl.minimum(last_key, position + last_offset)
    within = tl.arange(0, BLOCK_K)

    # Main loop over key blocks
    for block in tl.range(first, tl.minimum(first + BLOCKS, segment_blocks), 1, num_stages=STAGES):
        flat_block = flat_kv_head * kv_blocks + block
        keys = within + flat_block * BLOCK_K
        key = tl.load(key_ptr + keys[:, None] * HEAD_DIM_PADDED + channels[None, :])
        scale_ptrs = key_scale_ptr + flat_block * KEY_GROUPS + tl.arange(0, KEY_GROUPS)
        key_scale = tl.abs(tl.load(scale_ptrs))
        raw = tl.dot(query, key.T, out_dtype=tl.int32).to(tl.float32)  # [SAMPLES, 64]
        key_positions = (within + block * BLOCK_K)[None, :]
        raw = tl.where(key_positions <= last_key[:, None], raw, float("-inf"))
        if SPEC.has_first:
            first_key = position + first_offset
            raw = tl.where(key_positions >= first_key[:, None], raw, float("-inf"))
            sees = is_sample & (block * BLOCK_K <= last_key) & (block * BLOCK_K + BLOCK_K > first_key)
            needed = tl.minimum(tl.maximum(tl.sum(sees.to(tl.int32), 0) // (2 * group), 1), NEEDED)
        group_max = tl.max(tl.max(by_group(raw, SAMPLES), 3), 1) * (query_scale[:, None] * key_scale[None, :])
        gap = tl.max(group_max, 1)[:, None] - group_max
        is_far = (gap > FAR) & (group_max > float("-inf"))
        has_peak = (tl.max(is_far.to(tl.int32), 1) != 0) & is_sample
        is_shared = tl.sum(has_peak.to(tl.int32), 0) >= needed
        tl.store(scale_ptrs, tl.where(is_shared, -key_scale, key_scale))


def mark_peaks(query_int8: Tensor, query_scale: Tensor, key_int8: Tensor, key_scale: Tensor, call: Call) -> None:
    """Make the scales of key blocks that have a shared peak negative.

    Args:
        query_int8, query_scale: returned by `quantize.summarize_query`.
        key_int8, key_scale: returned by `quantize.quantize_key_value`.
    """
    shape = call.shape
    config = configs.stage_config("peaks")
    launch(
        mark_peaks_kernel,
        ceil_div(shape.kv_blocks, config.blocks) * shape.batch * shape.kv_heads,
        query_ptr=query_int8,
        key_ptr=key_int8,
        query_scale_ptr=query_scale,
        key_scale_ptr=key_scale,
        segments_ptr=segments_argument(call, key_scale),
        **sizes_of(call),
        HEAD_DIM_PADDED=padded(shape.head_dim),
        BLOCKS=config.blocks,
        STAGES=config.stages,
        SPEC=WindowSpec(**spec_of(call)),
        num_warps=config.warps,
    )
