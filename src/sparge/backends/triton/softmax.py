"""Online softmax: from the scores of a step to P, and to the running sums of P and P V.

    row_ref' = max(row_max, local_max)                          FP8: max(local_max, new row_max - ROW_REF_RANGE)
    P        = 2^(scores - row_ref' + log2_one)
    row_sum' = row_sum 2^(row_ref - row_ref') + row sum of P    likewise the accumulator, with P V

FP8 covers 15 powers of two, less than the range between an attention sink and a long tail. With FP8 values, `row_ref`
therefore follows the maximum of the latest step, so that FP8 has to cover the scores of a step, not of a whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparge.backends.gpu.primitives import BLOCK_K, FLOAT_OFFSET, ROW_REF_RANGE, by_group, in_fp8_token_order
from sparge.backends.triton.arguments import RunningSums
from sparge.backends.triton.scores import halves, side_by_side


@triton.jit
def empty_sums(SPEC: tl.constexpr):
    """Return the `RunningSums` before the first step."""
    BLOCK_M: tl.constexpr = SPEC.block_m
    VALUE_DIM_PADDED: tl.constexpr = SPEC.value_dim_padded
    accumulator = tl.zeros((BLOCK_M, VALUE_DIM_PADDED), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return RunningSums(accumulator, row_sum, row_max, row_max)


@triton.jit
def next_row_ref(row_max, local_max, SPEC: tl.constexpr):
    """Return the row reference of a step, [BLOCK_M], and a copy with -inf replaced by 0, which is safe to subtract.

    Args:
        row_max: running maximum, including the maximum of this step, ``local_max``.
    """
    row_ref = row_max
    if SPEC.has_fp8_values:
        row_ref = tl.maximum(local_max, row_max - ROW_REF_RANGE)
    return row_ref, tl.where(row_ref == float("-inf"), 0.0, row_ref)


@triton.jit
def is_negligible(scores, local_max, row_max, threshold, query_positions, q_len):
    """Return 1 if every row's scores of a step are below the row maximum by more than a threshold, else 0.

    Args:
        scores: [BLOCK_M, N], only checked for NaN: NaN must not be skipped, and a maximum ignores it.
        row_max: running maximum, including the maximum of this step, ``local_max``.
    """
    gap = tl.where(local_max == float("-inf"), float("-inf"), local_max - row_max)
    has_nan = tl.max((scores != scores).to(tl.int32), 1)
    below = ((gap < threshold) & (has_nan == 0)) | (query_positions >= q_len)
    return tl.min(below.to(tl.int32))


@triton.jit
def block_probability(raw, unit, p_ref, BLOCK_M: tl.constexpr):
    """Return P = 2^(score - p_ref) of a key block's raw scores [BLOCK_M, 64]; ``p_ref`` is [BLOCK_M].

    Rounding could raise the largest P above the maximum of FP8, and P V would saturate, but not the row sum. The
    subtrahend is as large as the offset of raw scores, so rounding it (once, in the fma) changes it by up to 0.75 of a
    unit; the row maximum was rounded by up to 0.25. One more unit is therefore subtracted, which is much less than the
    error of rounding Q and K.
    """
    subtrahend = tl.fma(unit, FLOAT_OFFSET + 1.0, p_ref[:, None])  # [BLOCK_M, KEY_GROUPS]
    exponent = by_group(raw, BLOCK_M) * unit[:, None, :, None] - subtrahend[:, None, :, None]
    return tl.reshape(tl.exp2(exponent), (BLOCK_M, BLOCK_K))


@triton.jit
def step_probability(scores, query_scale, p_ref, P_DTYPE: tl.constexpr, SPEC: tl.constexpr):
    """Return P of a step [BLOCK_M, N], and its row sums [BLOCK_M] before rounding.

    P of two INT8 blocks is rounded to ``P_DTYPE`` before the blocks are joined, so that fewer bytes move between
    threads.
    """
    BLOCK_M: tl.constexpr = SPEC.block_m
    if SPEC.mask != "none":
        probability = tl.exp2(scores.tile - p_ref[:, None])
        total = tl.sum(probability, 1)
    elif SPEC.blocks == 2 and SPEC.is_quantized:
        first_raw, last_raw = halves(scores.tile, BLOCK_M)
        first = block_probability(first_raw, scores.unit, p_ref, BLOCK_M)
        last = block_probability(last_raw, scores.last_unit, p_ref, BLOCK_M)
        total = tl.sum(first + last, 1)
        probability = side_by_side(first.to(P_DTYPE), last.to(P_DTYPE), BLOCK_M)
    elif SPEC.is_quantized:
        probability = block_probability(scores.tile, scores.unit, p_ref, BLOCK_M)
        total = tl.sum(probability, 1)
    else:
        probability = tl.exp2(scores.tile * query_scale - p_ref[:, None])
        total = tl.sum(probability, 1)
    return probability, total


@triton.jit
def load_fp8_values(head, step, SPEC: tl.constexpr):
    """Load the FP8 values of a step [N, VALUE_DIM], which are stored transposed."""
    within = tl.arange(0, BLOCK_K * SPEC.blocks) % BLOCK_K
    channels = tl.arange(0, SPEC.value_dim_padded).to(tl.int64)  # int64: the stride of a channel is the number of keys
    value_ptrs = head.value_base + step.offsets[None, :] + within[None, :] + channels[:, None] * head.value_stride
    return tl.load(value_ptrs).T


@triton.jit
def load_step_values(head, mask, step, lengths, SPEC: tl.constexpr):
    """Load the 16-bit or float32 values of a step [N, VALUE_DIM]."""
    within = tl.arange(0, BLOCK_K * SPEC.blocks) % BLOCK_K
    channels = tl.arange(0, SPEC.value_dim_padded).to(tl.int64)
    value_ptrs = head.value_base + (step.offsets * head.value_stride)[:, None]
    value_ptrs = value_ptrs + within[:, None] * head.value_stride + channels[None, :]
    return load_seen_values(value_ptrs, step.key_positions, mask, lengths, SPEC)


@triton.jit
def load_seen_values(value_ptrs, key_positions, mask, lengths, SPEC: tl.constexpr):
    """Load 16-bit or float32 values [N, VALUE_DIM], 0 for keys that no query sees.

    Unseen values may be NaN, which would reach the output, because 0 times NaN is NaN.
    """
    channels = tl.arange(0, SPEC.value_dim_padded).to(tl.int64)
    in_range = key_positions < lengths.kv_len
    present = in_range[:, None]
    if SPEC.value_dim != SPEC.value_dim_padded:
        present = present & (channels < SPEC.value_dim)[None, :]
    if SPEC.has_first:
        present = present & (key_positions >= lengths.first_offset)[:, None]
    if SPEC.mask != "none":
        seen = tl.load(mask.seen_base + key_positions * mask.seen_stride, mask=in_range, other=0)
        present = present & (seen != 0)[:, None]
    return tl.load(value_ptrs, mask=present, other=0.0)


@triton.jit
def add_product(accumulator, decay, probability, value, SPEC: tl.constexpr):
    """Return accumulator * decay + P V, [BLOCK_M, VALUE_DIM].

    FP8 tensor cores add with 13 fraction bits, so each step has a fresh accumulator, which is added in float32.
    """
    if SPEC.has_fp8_values:
        product = tl.dot(in_fp8_token_order(probability), value)
        return accumulator * decay[:, None] + product
    else:
        return tl.dot(probability, value, accumulator * decay[:, None], input_precision=SPEC.dot_precision)
