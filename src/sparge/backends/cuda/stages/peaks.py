"""Key blocks that hold a shared peak: a key that lies far above its neighbors for many queries (`cuda.peak_handling`).

A few queries of each head are multiplied with all keys, in codes, while keys are quantized. A block that is found is
marked by the sign of its scales, which the attention kernels load anyway.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparge.backends.cuda.primitives import BLOCK_K, BLOCK_Q, FAR, by_group

SAMPLES = tl.constexpr(64)
"""Queries that are looked at for each head of K and V, evenly spaced and spread over the heads that share it."""
NEEDED = tl.constexpr(16)
"""A peak is shared if half of a head's samples have it, or so many. Peaks seen by fewer queries are ignored: a video,
where each query has neighbors, would be full of them (a sixth of the blocks for 4 of 64 samples, .4 % for 16)."""


@triton.jit
def holds_shared_peak(
    key,
    key_scale,
    block,
    flat_kv_head,
    query_ptr,
    query_scale_ptr,
    group,
    q_len,
    kv_len,
    first_offset,
    last_offset,
    q_blocks,
    HEAD_DIM_PADDED: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
):
    """Whether a key block holds a peak for enough of the sampled queries.

    A group of 16 keys is far where its largest score lies more than FAR octaves below the block's. A block holds a peak
    for a query of which some group is far, and a shared one if it does so for enough of the sampled queries: half of a
    head's, NEEDED at most. Of a window's blocks (HAS_FIRST) only queries near them can tell: half of those that see it.

    Args:
        key, key_scale: codes [64, D padded] int8 and their scales [KEY_GROUPS].
        query_ptr, query_scale_ptr: [B * H, q_blocks * 128, D padded] int8 and [B * H, q_blocks * 128] float32.
    """
    sample = tl.arange(0, SAMPLES)
    per_head = tl.maximum(SAMPLES // group, 1)
    place = sample // group
    is_sample = place < per_head
    position = tl.minimum(place, per_head - 1) * 2 + 1
    position = (position.to(tl.int64) * q_len // (2 * per_head)).to(tl.int32)
    head = flat_kv_head * group + sample % group  # of all batches
    row = head * q_blocks * BLOCK_Q + position
    channels = tl.arange(0, HEAD_DIM_PADDED)
    query = tl.load(query_ptr + row[:, None] * HEAD_DIM_PADDED + channels[None, :])
    query_scale = tl.load(query_scale_ptr + row)
    needed = tl.minimum(tl.maximum(per_head // 2, 2), NEEDED)
    last_key = tl.full((SAMPLES,), 0, tl.int32) + (kv_len - 1)
    if HAS_LAST:
        last_key = tl.minimum(last_key, position + last_offset)
    raw = tl.dot(query, key.T, out_dtype=tl.int32).to(tl.float32)
    key_positions = (tl.arange(0, BLOCK_K) + block * BLOCK_K)[None, :]
    raw = tl.where(key_positions <= last_key[:, None], raw, float("-inf"))
    if HAS_FIRST:
        first_key = position + first_offset
        raw = tl.where(key_positions >= first_key[:, None], raw, float("-inf"))
        sees = is_sample & (block * BLOCK_K <= last_key) & (block * BLOCK_K + BLOCK_K > first_key)
        needed = tl.minimum(tl.maximum(tl.sum(sees.to(tl.int32), 0) // (2 * group), 1), NEEDED)
    group_max = tl.max(tl.max(by_group(raw, SAMPLES), 3), 1) * (query_scale[:, None] * key_scale[None, :])
    gap = tl.max(group_max, 1)[:, None] - group_max
    is_far = (gap > FAR) & (group_max > float("-inf"))
    has_peak = (tl.max(is_far.to(tl.int32), 1) != 0) & is_sample
    return tl.sum(has_peak.to(tl.int32), 0) >= needed
