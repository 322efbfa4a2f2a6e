"""Tiles whose scores INT8 would round too far (`eight_bits.is_coarse`): the same attention from Q and K themselves.

    s = scale (q . k) - lse_shift          what the codes of smoothed keys stand for, in float32

A tile of queries is coarse by its largest scale times the largest of the head's keys: a branch in the steps of the main
loop would cost ordinary calls 5 %. A coarse tile takes none of these steps and walks its list here, one key block at a
time, reading Q from the cache once more for every block. It is slow, and happens where logits reach hundreds of nats
or a token is a thousand times as large as the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparge.backends.gpu.primitives import (
    BLOCK_K,
    FP8_RANGE,
    FP8_RANGE_FACTOR,
    REACH,
    in_fp8_token_order,
)
from sparge.backends.triton.softmax import Sums, apply_mask, load_values, may_see

CHANNELS = tl.constexpr(64)
"""Channels of Q and K that are multiplied at a time."""


class ExactRow(NamedTuple):
    """The queries of a program, and the blocks they keep.

    Attributes:
        query_base, query_stride: where the head's queries begin, and the distance of one from the next.
        query_positions: [M].
        shift: [M], what smoothing takes from the scores, in log2 units.
        scale: of the scores, with log2 e.
        indices_base: where the list of kept blocks begins; not read where all are kept.
        first_block: the first of all that are visible.
        count: how many there are.
        q_len, kv_len, first_offset, last_offset: of the call.
    """

    query_base: Any
    query_stride: Any
    query_positions: Any
    shift: Any
    scale: Any
    indices_base: Any
    first_block: Any
    count: Any
    q_len: Any
    kv_len: Any
    first_offset: Any
    last_offset: Any


class ExactHead(NamedTuple):
    """Where a head's keys, its values (codes), its mask and what that leaves to be seen begin, and their strides."""

    key_base: Any
    key_stride: Any
    value_base: Any
    value_stride: Any
    mask_base: Any
    mask_strides: Any
    seen_base: Any
    seen_stride: Any


@triton.jit
def _exact_scores(
    row,
    key_base,
    key_stride,
    key_positions,
    kv_len,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Scores of 64 keys in log2 units [M, 64], less what smoothing takes from them.

    16-bit keys are multiplied as they are; float32 ones in three TF32 products, of which 16-bit queries need two.
    """
    width: tl.constexpr = min(HEAD_DIM_PADDED, CHANNELS)
    is_wide: tl.constexpr = key_base.dtype.element_ty == tl.float32
    query_ptrs = row.query_base + row.query_positions.to(tl.int64)[:, None] * row.query_stride
    key_ptrs = key_base + key_positions.to(tl.int64)[:, None] * key_stride
    scores = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for first in tl.range(0, HEAD_DIM, width, num_stages=1):
        channels = first + tl.arange(0, width)
        inside = (channels < HEAD_DIM)[None, :]
        is_query = (row.query_positions < row.q_len)[:, None] & inside
        is_key = (key_positions < kv_len)[:, None] & inside
        query = tl.load(query_ptrs + channels[None, :], mask=is_query, other=0.0)
        key = tl.load(key_ptrs + channels[None, :], mask=is_key, other=0.0)
        scores = tl.dot(query.to(key.dtype), key.T, scores, input_precision="tf32x3" if is_wide else "tf32")
    return scores * row.scale - row.shift[:, None]


@triton.jit
def _weigh(sums, scores, HAS_FP8_VALUES: tl.constexpr, LOG2_UNIT: tl.constexpr):
    """`Sums` with the row sums of a tile's P, and log2 of P [M, 64] as it is stored; P V is yet to be added."""
    local_max = tl.max(scores, 1)
    row_max = tl.maximum(sums.row_max, local_max)
    origin = row_max
    if HAS_FP8_VALUES:
        origin = tl.maximum(local_max, row_max - REACH)
    safe_origin = tl.where(origin == float("-inf"), 0.0, origin)
    exponent = (scores - safe_origin[:, None]) + LOG2_UNIT  # in this order: P must not exceed what 1 is stored as
    decay = tl.exp2(sums.origin - safe_origin)
    row_sum = sums.row_sum * decay + tl.sum(tl.exp2(exponent), 1)
    return Sums(sums.accumulator * decay[:, None], row_sum, row_max, origin), exponent


@triton.jit
def _add_product(sums, exponent, value, HAS_FP8_VALUES: tl.constexpr, LOG2_UNIT: tl.constexpr):
    """`Sums` with P V of a tile. FP8 takes what lies far below the largest P as a part of its own."""
    accumulator = sums.accumulator
    if HAS_FP8_VALUES:
        is_far = (exponent > LOG2_UNIT - FP8_RANGE) == 0  # NaN is
        lower = tl.where(is_far, tl.exp2(exponent + FP8_RANGE), 0.0).to(value.dtype)
        accumulator += tl.dot(in_fp8_token_order(lower), value) * (1.0 / FP8_RANGE_FACTOR)
        upper = tl.where(is_far, 0.0, tl.exp2(exponent)).to(value.dtype)
        accumulator += tl.dot(in_fp8_token_order(upper), value)
    else:
        accumulator = tl.dot(tl.exp2(exponent).to(value.dtype), value, accumulator)
    return Sums(accumulator, sums.row_sum, sums.row_max, sums.origin)


@triton.jit
def add_coarse(
    sums,
    row,
    head,
    threshold,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    HAS_FP8_VALUES: tl.constexpr,
    LOG2_UNIT: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
    MASK: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    LOWEST: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """`Sums` with all blocks of a coarse tile added, and how many products were skipped: see `attention_kernel`."""
    channels = tl.arange(0, VALUE_DIM_PADDED).to(tl.int64)
    skipped = 0
    for place in tl.range(0, row.count, num_stages=1):
        block = row.first_block + place if ALL_BLOCKS else tl.load(row.indices_base + place)
        key_positions = block * BLOCK_K + tl.arange(0, BLOCK_K)
        scores = _exact_scores(
            row, head.key_base, head.key_stride, key_positions, row.kv_len, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_M
        )
        allowed = may_see(
            row.query_positions, key_positions, row.kv_len, row.first_offset, row.last_offset, HAS_FIRST, HAS_LAST
        )
        if MASK != "none":
            scores = apply_mask(
                scores,
                allowed,
                row.query_positions,
                key_positions,
                head.mask_base,
                head.mask_strides[2],
                head.mask_strides[3],
                row.q_len,
                row.kv_len,
                MASK,
                MASK_PER_QUERY,
                LOWEST,
            )
        else:
            scores = tl.where(allowed, scores, float("-inf"))
        needed = True
        if HAS_THRESHOLD:
            local_max = tl.max(scores, 1)
            gap = tl.where(local_max == float("-inf"), float("-inf"), local_max - tl.maximum(sums.row_max, local_max))
            broken = tl.max((scores != scores).to(tl.int32), 1)  # a maximum ignores NaN, and NaN must not be skipped
            below = ((gap < threshold) & (broken == 0)) | (row.query_positions >= row.q_len)
            is_skipped = tl.min(below.to(tl.int32))
            needed = is_skipped == 0
            skipped += is_skipped
        if needed:
            sums, exponent = _weigh(sums, scores, HAS_FP8_VALUES, LOG2_UNIT)
            keys = key_positions.to(tl.int64)
            if HAS_FP8_VALUES:
                value = tl.load(head.value_base + keys[None, :] + channels[:, None] * head.value_stride).T
            else:
                value = load_values(
                    head.value_base + keys[:, None] * head.value_stride + channels[None, :],
                    channels,
                    key_positions,
                    row.kv_len,
                    row.first_offset,
                    head.seen_base,
                    head.seen_stride,
                    VALUE_DIM,
                    VALUE_DIM_PADDED,
                    HAS_FIRST,
                    MASK != "none",
                )
            sums = _add_product(sums, exponent, value, HAS_FP8_VALUES, LOG2_UNIT)
    return sums, skipped


@triton.jit
def add_coarse_means(
    sums,
    row,
    bias_base,
    key_base,
    value_base,
    value_stride,
    kv_blocks,
    begin,
    end,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HAS_FP8_VALUES: tl.constexpr,
    LOG2_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """`means.add_means` of a coarse tile; mean keys are float32, [kv_blocks, D padded] from ``key_base`` on."""
    channels = tl.arange(0, VALUE_DIM_PADDED).to(tl.int64)
    for first in tl.range(begin, end, BLOCK_K, num_stages=1):
        blocks = first + tl.arange(0, BLOCK_K)
        scores = _exact_scores(row, key_base, HEAD_DIM_PADDED, blocks, kv_blocks, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_M)
        sums, exponent = _weigh(sums, scores + tl.load(bias_base + blocks)[None, :], HAS_FP8_VALUES, LOG2_UNIT)
        if HAS_FP8_VALUES:
            value = tl.load(value_base + blocks[None, :] + channels[:, None] * value_stride).T
        else:
            present = (blocks < kv_blocks)[:, None] & (channels < VALUE_WIDTH)[None, :]
            value = tl.load(value_base + blocks[:, None] * value_stride + channels[None, :], mask=present, other=0.0)
        sums = _add_product(sums, exponent, value, HAS_FP8_VALUES, LOG2_UNIT)
    return sums
