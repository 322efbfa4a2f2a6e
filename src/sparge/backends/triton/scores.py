"""Scores of a tile of queries against one or two key blocks, in log2 units.

    raw_scores -> group_maxima -> softmax.block_probability      INT8 without a mask: scores stay integers until P
    raw_scores -> block_scores -> apply_mask                     INT8 with a mask

Raw scores are INT8 products as floats: 1.5 * 2^23 plus an integer. ``unit`` [BLOCK_M, KEY_GROUPS] is the factor that
converts these integers to log2 units; the keys of a group share a scale (`quantization.KEY_GROUPS`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparge.backends.gpu.primitives import BLOCK_K, FLOAT_OFFSET, INT32_AS_FLOAT, KEY_GROUPS, LOG2_E, by_group
from sparge.backends.gpu.stages.mask_blocks import FULL


class StepScores(NamedTuple):
    """Scores of one step of the main loop. N is 64 times the blocks of a step."""

    tile: Any  # [BLOCK_M, N]: scores with a mask; otherwise raw scores, or unscaled Q K^T without quantization
    # unit, last_unit: units of the first and the second block (INT8)
    unit: Any
    last_unit: Any
    group_max: Any  # [BLOCK_M, groups], maxima of groups of keys (INT8)
    local_max: Any  # [BLOCK_M], row maxima


@triton.jit
def raw_scores(query, key_ptrs, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr):
    """Return INT8 products of Q and a tile of K as floats offset by 1.5 * 2^23, [BLOCK_M, COLUMNS]."""
    start_bits = tl.full((BLOCK_M, COLUMNS), INT32_AS_FLOAT, tl.int32)
    raw = tl.dot(query, tl.load(key_ptrs).T, acc=start_bits, out_dtype=tl.int32)
    return raw.to(tl.float32, bitcast=True)


@triton.jit
def score_unit(query_scale, key_scale_base, block):
    """Return the unit of a key block's raw scores, [BLOCK_M, KEY_GROUPS]."""
    key_scale = tl.load(key_scale_base + tl.arange(0, KEY_GROUPS) + block * KEY_GROUPS)
    return query_scale[:, None] * tl.abs(key_scale)[None, :]  # the sign marks shared peaks


@triton.jit
def halves(tile, BLOCK_M: tl.constexpr):
    """Split a tile [BLOCK_M, 128] into its two key blocks [BLOCK_M, 64]."""
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_M, 2, BLOCK_K)), (0, 2, 1)))


@triton.jit
def side_by_side(first, last, BLOCK_M: tl.constexpr):
    """Join two key blocks [BLOCK_M, 64] to one tile [BLOCK_M, 128]."""
    return tl.reshape(tl.permute(tl.join(first, last), (0, 2, 1)), (BLOCK_M, 2 * BLOCK_K))


@triton.jit
def group_maxima(raw, unit, BLOCK_M: tl.constexpr):
    """Return the maxima over each group of keys of a block's raw scores, in log2 units, [BLOCK_M, KEY_GROUPS]."""
    return (tl.max(tl.max(by_group(raw, BLOCK_M), 3), 1) - FLOAT_OFFSET) * unit


@triton.jit
def block_scores(raw, unit, BLOCK_M: tl.constexpr):
    """Convert a key block's raw scores to log2 units, [BLOCK_M, 64]."""
    return tl.reshape((by_group(raw, BLOCK_M) - FLOAT_OFFSET) * unit[:, None, :, None], (BLOCK_M, BLOCK_K))


@triton.jit
def may_see(query_positions, key_positions, lengths, SPEC: tl.constexpr):
    """Return which keys exist and are inside of the query's window, [BLOCK_M, N] bool."""
    allowed = (key_positions < lengths.kv_len)[None, :] & (query_positions >= 0)[:, None]
    if SPEC.has_last:
        allowed = allowed & (key_positions[None, :] <= query_positions[:, None] + lengths.last_offset)
    if SPEC.has_first:
        allowed = allowed & (key_positions[None, :] >= query_positions[:, None] + lengths.first_offset)
    return allowed


@triton.jit
def apply_mask(scores, allowed, query_positions, key_positions, mask, lengths, SPEC: tl.constexpr):
    """Return scores [BLOCK_M, N] with the bias of an additive mask added, and -inf where a key is hidden."""
    present = (key_positions < lengths.kv_len)[None, :]
    offsets = key_positions.to(tl.int64)[None, :] * mask.stride_k
    if SPEC.mask_per_query:
        offsets = offsets + query_positions.to(tl.int64)[:, None] * mask.stride_q
        present = present & (query_positions < lengths.q_len)[:, None]
    entries = tl.load(mask.base + offsets, mask=present, other=0)  # [BLOCK_M | 1, N]
    if SPEC.mask == "bool":
        allowed = allowed & (entries != 0)
    else:
        bias = entries.to(tl.float32)
        allowed = allowed & ((bias <= SPEC.lowest) == 0)  # NaN stays visible, and so propagates
        scores = scores + bias * LOG2_E
    return tl.where(allowed, scores, float("-inf"))


@triton.jit
def step_scores(queries, head, mask, step, lengths, SPEC: tl.constexpr):
    """Return the `StepScores` of one step."""
    BLOCK_M: tl.constexpr = SPEC.block_m
    COLUMNS: tl.constexpr = BLOCK_K * SPEC.blocks
    HAS_TWO_UNITS: tl.constexpr = SPEC.blocks == 2 and SPEC.is_quantized
    # Q K^T
    within = tl.arange(0, COLUMNS) % BLOCK_K
    channels = tl.arange(0, SPEC.head_dim_padded)
    key_ptrs = head.key_base + (step.offsets * head.key_stride)[:, None]
    key_ptrs = key_ptrs + within[:, None] * head.key_stride + channels[None, :]  # [N, HEAD_DIM]
    if SPEC.is_quantized:
        tile = raw_scores(queries.tile, key_ptrs, BLOCK_M, COLUMNS)
        unit = score_unit(queries.scale, head.key_scale_base, step.block)
        last_unit = unit
        if HAS_TWO_UNITS:
            last_unit = score_unit(queries.scale, head.key_scale_base, step.last_block)
    else:
        key_present = (step.key_positions < lengths.kv_len)[:, None]
        if SPEC.head_dim != SPEC.head_dim_padded:
            key_present = key_present & (channels < SPEC.head_dim)[None, :]
        key = tl.load(key_ptrs, mask=key_present, other=0.0)
        tile = tl.dot(queries.tile, key.T, input_precision=SPEC.dot_precision)
        unit = queries.scale
        last_unit = unit

    # Visibility, and row maxima
    if SPEC.mask != "none":
        tile = block_scores(tile, unit, BLOCK_M) if SPEC.is_quantized else tile * queries.scale
        is_full = False
        if SPEC.has_kinds:
            is_full = tl.load(mask.kind_base + step.block) == FULL
            if SPEC.blocks == 2:
                is_full = is_full & (tl.load(mask.kind_base + step.last_block) == FULL) & (step.is_short == 0)
        if is_full == 0:
            allowed = may_see(queries.positions, step.key_positions, lengths, SPEC)
            tile = apply_mask(tile, allowed, queries.positions, step.key_positions, mask, lengths, SPEC)
        group_max = tl.max(tl.max(by_group(tile, BLOCK_M), 3), 1) if SPEC.blocks == 1 else tile
        local_max = tl.max(group_max, 1)
    else:
        if step.is_full == 0:  # rare: most blocks need no element mask
            allowed = may_see(queries.positions, step.key_positions, lengths, SPEC)
            tile = tl.where(allowed, tile, float("-inf"))
        if HAS_TWO_UNITS:
            first, last = halves(tile, BLOCK_M)
            group_max = group_maxima(first, unit, BLOCK_M)
            group_max = tl.maximum(group_max, group_maxima(last, last_unit, BLOCK_M))
            local_max = tl.max(group_max, 1)
        elif SPEC.is_quantized:
            group_max = group_maxima(tile, unit, BLOCK_M)
            local_max = tl.max(group_max, 1)
        else:
            group_max = tile
            local_max = tl.max(tile, 1) * queries.scale
    return StepScores(tile, unit, last_unit, group_max, local_max)
