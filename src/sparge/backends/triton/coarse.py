"""Attention from unquantized Q and K, for tiles whose scores INT8 would round too coarsely (`quantization.is_coarse`).

    s = scale (q . k) - lse_shift          the scores of smoothed keys, in float32

A tile is coarse if its largest query scale times the largest key scale of the head exceeds a limit. This is checked
once per tile, because a branch in the main loop would make ordinary calls 5 % slower. A coarse tile does not run the
main loop. It visits its key blocks here, one at a time, and reads Q from the cache again for every block. This is slow.
It happens if logits reach hundreds of nats, or if one token is 1000 times as large as the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparge.backends.gpu.primitives import BLOCK_K, FP8_RANGE, FP8_RANGE_FACTOR, in_fp8_token_order
from sparge.backends.triton.arguments import RunningSums
from sparge.backends.triton.means import load_mean_values
from sparge.backends.triton.scores import apply_mask, may_see
from sparge.backends.triton.softmax import is_negligible, load_seen_values, next_row_ref
from sparge.backends.triton.tiles import block_at

CHANNELS = tl.constexpr(64)
"""Channels of Q and K that are multiplied at a time."""


class ExactQueries(NamedTuple):
    """The unquantized queries of a program."""

    # base, stride: pointer to the head's first query, and the stride of a token
    base: Any
    stride: Any
    positions: Any  # [BLOCK_M]
    shift: Any  # [BLOCK_M], `lse_shift` in log2 units
    scale: Any  # softmax scale times log2 e


@triton.jit
def _exact_scores(queries, key_base, key_stride, key_positions, q_len, kv_len, SPEC: tl.constexpr):
    """Return smoothed scores of 64 keys in log2 units, [BLOCK_M, 64].

    16-bit keys take one product, float32 keys three TF32 products.
    """
    WIDTH: tl.constexpr = SPEC.head_dim_padded if SPEC.head_dim_padded < CHANNELS else CHANNELS
    PRECISION: tl.constexpr = "tf32x3" if key_base.dtype.element_ty == tl.float32 else "tf32"
    BLOCK_M: tl.constexpr = SPEC.block_m
    query_ptrs = queries.base + queries.positions.to(tl.int64)[:, None] * queries.stride
    key_ptrs = key_base + key_positions.to(tl.int64)[:, None] * key_stride
    scores = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for first in tl.range(0, SPEC.head_dim, WIDTH, num_stages=1):
        channels = first + tl.arange(0, WIDTH)
        inside = (channels < SPEC.head_dim)[None, :]
        is_query = (queries.positions < q_len)[:, None] & inside
        is_key = (key_positions < kv_len)[:, None] & inside
        query = tl.load(query_ptrs + channels[None, :], mask=is_query, other=0.0)  # [BLOCK_M, WIDTH]
        key = tl.load(key_ptrs + channels[None, :], mask=is_key, other=0.0)  # [64, WIDTH]
        scores = tl.dot(query.to(key.dtype), key.T, scores, input_precision=PRECISION)
    return scores * queries.scale - queries.shift[:, None]


@triton.jit
def _add_to_row_sums(sums, scores, SPEC: tl.constexpr):
    """Add a tile to the row sums, but not to P V. Return `RunningSums`, and log2 of scaled P, [BLOCK_M, 64]."""
    local_max = tl.max(scores, 1)
    row_max = tl.maximum(sums.row_max, local_max)
    row_ref, safe_ref = next_row_ref(row_max, local_max, SPEC)
    exponent = (scores - safe_ref[:, None]) + SPEC.log2_one  # this order keeps rounding from raising P above 1
    decay = tl.exp2(sums.row_ref - safe_ref)
    row_sum = sums.row_sum * decay + tl.sum(tl.exp2(exponent), 1)
    return RunningSums(sums.accumulator * decay[:, None], row_sum, row_max, row_ref), exponent


@triton.jit
def _add_product(sums, exponent, value, SPEC: tl.constexpr):
    """Return `RunningSums` with P V of a tile added. In FP8, P far below the maximum is a separate product."""
    accumulator = sums.accumulator
    if SPEC.has_fp8_values:
        is_far = (exponent > SPEC.log2_one - FP8_RANGE) == 0  # true for NaN
        lower = tl.where(is_far, tl.exp2(exponent + FP8_RANGE), 0.0).to(value.dtype)
        accumulator += tl.dot(in_fp8_token_order(lower), value) * (1.0 / FP8_RANGE_FACTOR)
        upper = tl.where(is_far, 0.0, tl.exp2(exponent)).to(value.dtype)
        accumulator += tl.dot(in_fp8_token_order(upper), value)
    else:
        accumulator = tl.dot(tl.exp2(exponent).to(value.dtype), value, accumulator)
    return RunningSums(accumulator, sums.row_sum, sums.row_max, sums.row_ref)


@triton.jit
def add_coarse(sums, queries, head, mask, blocks, lengths, threshold, SPEC: tl.constexpr):
    """Return `RunningSums` with all kept blocks of a coarse tile added, and the number of skipped P V products.

    Args:
        queries: `ExactQueries`.
        head: `Head` with unquantized keys.
    """
    channels = tl.arange(0, SPEC.value_dim_padded).to(tl.int64)
    skipped = 0
    for index in tl.range(0, blocks.count, num_stages=1):
        # Scores
        block = block_at(blocks, index, SPEC)
        key_positions = block * BLOCK_K + tl.arange(0, BLOCK_K)
        scores = _exact_scores(
            queries, head.key_base, head.key_stride, key_positions, lengths.q_len, lengths.kv_len, SPEC
        )
        allowed = may_see(queries.positions, key_positions, lengths, SPEC)
        if SPEC.mask != "none":
            scores = apply_mask(scores, allowed, queries.positions, key_positions, mask, lengths, SPEC)
        else:
            scores = tl.where(allowed, scores, float("-inf"))

        # Softmax and P V
        is_needed = True
        if SPEC.has_threshold:
            local_max = tl.max(scores, 1)
            row_max = tl.maximum(sums.row_max, local_max)
            is_skipped = is_negligible(scores, local_max, row_max, threshold, queries.positions, lengths.q_len)
            is_needed = is_skipped == 0
            skipped += is_skipped
        if is_needed:
            sums, exponent = _add_to_row_sums(sums, scores, SPEC)
            keys = key_positions.to(tl.int64)
            if SPEC.has_fp8_values:
                value = tl.load(head.value_base + keys[None, :] + channels[:, None] * head.value_stride).T
            else:
                value_ptrs = head.value_base + keys[:, None] * head.value_stride + channels[None, :]
                value = load_seen_values(value_ptrs, key_positions, mask, lengths, SPEC)
            sums = _add_product(sums, exponent, value, SPEC)
    return sums, skipped


@triton.jit
def add_coarse_means(sums, queries, means, q_len, SPEC: tl.constexpr):
    """Return `RunningSums` with the means of skipped blocks added: `means.add_means` for coarse tiles."""
    for first in tl.range(means.begin, means.end, BLOCK_K, num_stages=1):
        blocks = first + tl.arange(0, BLOCK_K)
        scores = _exact_scores(
            queries, means.exact_key_base, SPEC.head_dim_padded, blocks, q_len, means.kv_blocks, SPEC
        )
        sums, exponent = _add_to_row_sums(sums, scores + tl.load(means.bias_base + blocks)[None, :], SPEC)
        sums = _add_product(sums, exponent, load_mean_values(means, blocks, SPEC), SPEC)
    return sums
