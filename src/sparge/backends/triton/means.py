"""The means of skipped blocks: further tiles of the attention kernel, 64 means each, with a weight for every row."""

from __future__ import annotations

import triton
import triton.language as tl

from sparge.backends.gpu.primitives import (
    BLOCK_K,
    BLOCK_Q,
    FP16_ROOM,
    KEY_GROUPS,
    LOG2_FP8_MAX,
    REACH,
    in_fp8_token_order,
)
from sparge.backends.triton.softmax import Sums, block_scores, raw_scores


@triton.jit
def add_means(
    sums,
    query,
    query_scale,
    bias_base,
    key_base,
    key_stride,
    key_scale_base,
    value_base,
    value_stride,
    kv_blocks,
    begin,
    end,
    HEAD_DIM_PADDED: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    QUANTIZATION: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """`Sums` with the means of blocks ``begin``, a multiple of 64, to ``end``, of ``kv_blocks``, added.

    Args:
        bias_base: of the row of blocks, -inf for a mean that does not enter, NaN for one that is not finite.
        key_base, key_scale_base, value_base: of the head's means, or of their codes.
        VALUE_WIDTH: channels of a mean value in memory.
    """
    is_quantized: tl.constexpr = QUANTIZATION != "none"
    has_fp8_values: tl.constexpr = QUANTIZATION == "int8_fp8"
    p_dtype: tl.constexpr = tl.float8e4nv if has_fp8_values else value_base.dtype.element_ty
    log2_unit: tl.constexpr = LOG2_FP8_MAX if has_fp8_values else FP16_ROOM if p_dtype == tl.float16 else 0.0
    accumulator, row_sum, row_max, origin = sums
    offs_n = tl.arange(0, BLOCK_K)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    offs_dv = tl.arange(0, VALUE_DIM_PADDED).to(tl.int64)
    for first in range(begin, end, BLOCK_K):
        blocks = first + offs_n
        present = (blocks < kv_blocks)[:, None]
        bias = tl.load(bias_base + blocks)
        key_ptrs = key_base + blocks[:, None] * key_stride + offs_d[None, :]
        if is_quantized:
            groups = key_scale_base + first // BLOCK_K * KEY_GROUPS + tl.arange(0, KEY_GROUPS)
            unit = query_scale[:, None] * tl.load(groups)[None, :]
            scores = block_scores(raw_scores(query, key_ptrs, BLOCK_M, BLOCK_K), unit, BLOCK_M)
        else:
            key = tl.load(key_ptrs, mask=present, other=0.0)
            scores = tl.dot(query, key.T, input_precision=DOT_PRECISION) * query_scale
        scores += bias[None, :]

        local_max = tl.max(scores, 1)
        row_max = tl.maximum(row_max, local_max)
        new_origin = row_max
        if has_fp8_values:
            new_origin = tl.maximum(local_max, row_max - REACH)
        safe_origin = tl.where(new_origin == float("-inf"), 0.0, new_origin)
        probability = tl.exp2(scores - (safe_origin - log2_unit)[:, None])
        decay = tl.exp2(origin - safe_origin)
        row_sum = row_sum * decay + tl.sum(probability, 1)
        origin = new_origin
        if has_fp8_values:
            value = tl.load(value_base + blocks[None, :] + offs_dv[:, None] * value_stride).T
            accumulator = accumulator * decay[:, None] + tl.dot(in_fp8_token_order(probability.to(p_dtype)), value)
        else:
            value_present = present & (offs_dv < VALUE_WIDTH)[None, :]
            value_ptrs = value_base + blocks[:, None] * value_stride + offs_dv[None, :]
            value = tl.load(value_ptrs, mask=value_present, other=0.0)
            accumulator = tl.dot(
                probability.to(p_dtype), value, accumulator * decay[:, None], input_precision=DOT_PRECISION
            )
    return Sums(accumulator, row_sum, row_max, origin)


@triton.jit
def blocks_with_means(
    q_block, q_len, kv_blocks, first_offset, last_offset, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr
):
    """The first tile of means that a row of blocks may have some of, a multiple of 64, and the end of these blocks."""
    begin = 0
    end = kv_blocks
    first_query = q_block * BLOCK_Q
    if HAS_LAST:
        end = tl.minimum(kv_blocks, tl.maximum(first_query + last_offset + BLOCK_K, 0) // BLOCK_K)
    if HAS_FIRST:
        last_query = tl.minimum(first_query + BLOCK_Q, q_len) - 1
        begin = tl.maximum(last_query + first_offset, 0) // (BLOCK_K * BLOCK_K) * BLOCK_K
    return begin, end
