"""Attention to the means that replace skipped blocks, in tiles of 64 means after the kept blocks.

A mean is a key with a bias: log2 of the number of keys that it replaces, or -inf if its block is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q, KEY_GROUPS, head_base
from sparge.backends.triton.arguments import Head, RunningSums
from sparge.backends.triton.scores import block_scores, raw_scores
from sparge.backends.triton.softmax import add_product, next_row_ref


class Means(NamedTuple):
    """Means of a head's key blocks, as keys and values."""

    head: Any  # `Head`, with the strides of a block (FP8 values: of a channel)
    exact_key_base: Any  # unquantized means of K, [kv_blocks, HEAD_DIM] float32
    bias_base: Any  # the query block's biases, in log2 units. NaN for a mean that is not finite.
    # begin, end: range of the blocks that a mean may replace. ``begin`` is a multiple of 64.
    begin: Any
    end: Any
    kv_blocks: Any  # blocks of the sequence or segment


@triton.jit
def head_means(mean_ptrs, strides, tile, padded_kv_blocks, kv_blocks, bias_columns, lengths, SPEC: tl.constexpr):
    """Return the `Means` of a tile. Memory is laid out for ``padded_kv_blocks`` means per head."""
    begin = 0
    end = kv_blocks
    first_query = tile.q_block * BLOCK_Q
    if SPEC.has_last:
        end = tl.minimum(kv_blocks, tl.maximum(first_query + lengths.last_offset + BLOCK_K, 0) // BLOCK_K)
    if SPEC.has_first:
        last_query = tl.minimum(first_query + BLOCK_Q, lengths.q_len) - 1
        begin = tl.maximum(last_query + lengths.first_offset, 0) // (BLOCK_K * BLOCK_K) * BLOCK_K
    head = Head(
        key_base=head_base(mean_ptrs.key, strides.mean_key, tile.batch, tile.kv_head),
        key_stride=strides.mean_key[2],
        key_scale_base=mean_ptrs.key_scale + tile.flat_kv_head * tl.cdiv(padded_kv_blocks, BLOCK_K) * KEY_GROUPS,
        value_base=head_base(mean_ptrs.value, strides.mean_value, tile.batch, tile.kv_head),
        value_stride=strides.mean_value[2],
    )
    exact_key_base = mean_ptrs.exact_key + tile.flat_kv_head * padded_kv_blocks * SPEC.head_dim_padded
    return Means(head, exact_key_base, mean_ptrs.bias + tile.flat_q_block * bias_columns, begin, end, kv_blocks)


@triton.jit
def load_mean_values(means, blocks, SPEC: tl.constexpr):
    """Load the mean values of 64 blocks, [64, VALUE_DIM]."""
    channels = tl.arange(0, SPEC.value_dim_padded).to(tl.int64)
    if SPEC.has_fp8_values:
        value = tl.load(means.head.value_base + blocks[None, :] + channels[:, None] * means.head.value_stride).T
    else:
        present = (blocks < means.kv_blocks)[:, None] & (channels < SPEC.mean_width)[None, :]
        value_ptrs = means.head.value_base + blocks[:, None] * means.head.value_stride + channels[None, :]
        value = tl.load(value_ptrs, mask=present, other=0.0)
    return value


@triton.jit
def add_means(sums, queries, means, SPEC: tl.constexpr):
    """Return `RunningSums` with the means of skipped blocks added."""
    BLOCK_M: tl.constexpr = SPEC.block_m
    channels = tl.arange(0, SPEC.head_dim_padded)
    accumulator, row_sum, row_max, row_ref = sums
    for first in range(means.begin, means.end, BLOCK_K):
        # Scores
        blocks = first + tl.arange(0, BLOCK_K)
        bias = tl.load(means.bias_base + blocks)  # [64]
        key_ptrs = means.head.key_base + blocks[:, None] * means.head.key_stride + channels[None, :]
        if SPEC.is_quantized:
            groups = means.head.key_scale_base + first // BLOCK_K * KEY_GROUPS + tl.arange(0, KEY_GROUPS)
            unit = queries.scale[:, None] * tl.load(groups)[None, :]  # [BLOCK_M, KEY_GROUPS]
            scores = block_scores(raw_scores(queries.tile, key_ptrs, BLOCK_M, BLOCK_K), unit, BLOCK_M)
        else:
            key = tl.load(key_ptrs, mask=(blocks < means.kv_blocks)[:, None], other=0.0)
            scores = tl.dot(queries.tile, key.T, input_precision=SPEC.dot_precision) * queries.scale
        scores += bias[None, :]  # [BLOCK_M, 64]

        # Softmax
        local_max = tl.max(scores, 1)
        row_max = tl.maximum(row_max, local_max)
        new_ref, safe_ref = next_row_ref(row_max, local_max, SPEC)
        probability = tl.exp2(scores - (safe_ref - SPEC.log2_one)[:, None])  # [BLOCK_M, 64]
        decay = tl.exp2(row_ref - safe_ref)
        row_sum = row_sum * decay + tl.sum(probability, 1)
        row_ref = new_ref

        # P V
        value = load_mean_values(means, blocks, SPEC)
        accumulator = add_product(accumulator, decay, probability.to(value.dtype), value, SPEC)
    return RunningSums(accumulator, row_sum, row_max, row_ref)
