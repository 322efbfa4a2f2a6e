"""One pass over K and V: mean and variance of every key block for the scores, sums and maxima for quantization, and the
means that replace skipped blocks.

The pass is memory-bound. Few threads per program and elementwise partial sums avoid data exchange between threads: with
8 warps per block, the pass took three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import buffer_like, first_key, launch, padded, segments_argument, strides_of
from sparge.backends.gpu.primitives import (
    BLOCK_K,
    LOG2_E,
    is_finite,
    kernel,
    key_span,
    load_tokens,
    split_program,
    token_head,
)
from sparge.backends.gpu.stages import configs
from sparge.backends.gpu.stages.arguments import seen_keys
from sparge.call import Call
from sparge.masks.geometry import ceil_div
from sparge.masks.visibility import SeenTokens
from sparge.options import scores

VARIANCE_SHARE = tl.constexpr(scores.VARIANCE_SHARE)
SUM, SQUARE = tl.constexpr(0), tl.constexpr(1)
"""Rows of a chunk's sums of keys, [2, D]: sum and sum of squares."""


@triton.jit
def _has_non_finite(values):
    return tl.min(is_finite(values).to(tl.int32)) == 0


@triton.jit
def _sums(head, block, center, DIM: tl.constexpr, PADDED: tl.constexpr, SPEC: tl.constexpr):
    """Return the sums of y = x - center and of y^2 over a block's tokens x, the largest |y|, and the token count.

    The first three are partial results, [SLAB, PADDED]; the caller reduces them over SLAB. Slabs of a few tokens are
    added elementwise, so that threads exchange data only once per block. The compiler removes results that the caller
    does not use.

    Args:
        head: `TokenHead`.
        center: [1, PADDED], or None for 0.
    """
    SLAB: tl.constexpr = SPEC.slab
    total = tl.zeros((SLAB, PADDED), tl.float32)
    square = tl.zeros((SLAB, PADDED), tl.float32)
    largest = tl.zeros((SLAB, PADDED), tl.float32)
    start = block * BLOCK_K
    count = tl.maximum(tl.minimum(start + BLOCK_K, head.stop) - tl.maximum(start, head.first), 0)
    seen = tl.zeros((SLAB,), tl.int32)
    for step in tl.static_range(BLOCK_K // SLAB):
        tokens = block * BLOCK_K + step * SLAB + tl.arange(0, SLAB)
        values, present = load_tokens(head, tokens, DIM, PADDED, SPEC.has_seen)
        if SPEC.has_seen:
            seen += present.to(tl.int32)
        if center is not None:
            values = tl.where(present[:, None], values - center, 0.0)
        total += values
        square += values * values
        largest = tl.maximum(largest, tl.abs(values))
    if SPEC.has_seen:
        count = tl.sum(seen)
    return total, square, largest, count


@triton.jit
def _largest_value(head, chunk, FINITE: tl.constexpr, SPEC: tl.constexpr):
    """Return the largest |v| of each channel of a chunk, [VALUE_DIM]. FINITE: ignore numbers that are not finite."""
    SLAB: tl.constexpr = SPEC.slab
    VALUE_DIM_PADDED: tl.constexpr = SPEC.value_dim_padded
    largest = tl.zeros((SLAB, VALUE_DIM_PADDED), tl.float32)
    for step in range(SPEC.blocks * BLOCK_K // SLAB):
        tokens = chunk * SPEC.blocks * BLOCK_K + step * SLAB + tl.arange(0, SLAB)
        values, _ = load_tokens(head, tokens, SPEC.value_dim, VALUE_DIM_PADDED, SPEC.has_seen)
        size = tl.abs(values)
        if FINITE:
            size = tl.where(is_finite(values), size, 0.0)
        largest = tl.maximum(largest, size)
    return tl.max(largest, 0)


@triton.jit
def _finite_part(head, chunk, SPEC: tl.constexpr):
    """Return sum and sum of squares [HEAD_DIM] over a chunk's keys that are finite in every channel, and their number.

    This is slow, but rarely needed.
    """
    SLAB: tl.constexpr = SPEC.slab
    HEAD_DIM_PADDED: tl.constexpr = SPEC.head_dim_padded
    total = tl.zeros((HEAD_DIM_PADDED,), tl.float32)
    square = tl.zeros((HEAD_DIM_PADDED,), tl.float32)
    count = 0
    for step in range(SPEC.blocks * BLOCK_K // SLAB):
        tokens = chunk * SPEC.blocks * BLOCK_K + step * SLAB + tl.arange(0, SLAB)
        values, present = load_tokens(head, tokens, SPEC.head_dim, HEAD_DIM_PADDED, SPEC.has_seen)
        usable = present & (tl.min(is_finite(values).to(tl.int32), 1) != 0)
        kept = tl.where(usable[:, None], values, 0.0)
        total += tl.sum(kept, 0)
        square += tl.sum(kept * kept, 0)
        count += tl.sum(usable.to(tl.int32))
    return total, square, count


class BlockStatistics(NamedTuple):
    """Statistics of key blocks, which the scores read, each [B * Hkv, kv_blocks, D padded] bfloat16."""

    # mean_high, mean_low: high and low part of the mean, which is their sum
    mean_high: Any
    mean_low: Any
    variance: Any


class BlockMeans(NamedTuple):
    """The means that replace skipped blocks: float32 if they will be quantized, otherwise in the dtype of K."""

    # key, value: [B, Hkv, kv_blocks, D | Dv padded]
    key: Any
    value: Any
    bias: Any  # [B, Hkv, kv_blocks] float32, log2 of the number of keys of each block; NaN if a mean is not finite
    usable: Any  # [B, Hkv, kv_blocks] int8, whether the bias is finite


class ChunkSums(NamedTuple):
    """Sums and maxima of every chunk, from which `reduce` computes scales."""

    key: Any  # [B * Hkv, chunks, 2, D padded] float32, sum and sum of squares
    key_count: Any  # [B * Hkv, chunks] int32, number of keys in the sums
    value_max: Any  # [B * Hkv, chunks, Dv padded] float32


@dataclass(frozen=True)
class SummarizeSpec:
    """Compile-time values of `summarize_kernel`."""

    # head_dim, value_dim: channels of K and V, also padded to powers of two
    head_dim: int
    value_dim: int
    head_dim_padded: int
    value_dim_padded: int
    has_seen: bool  # some keys are hidden
    # with_means, with_variance, with_blocks, with_sums, with_value: which results are requested
    with_means: bool
    with_variance: bool
    with_blocks: bool
    with_sums: bool
    with_value: bool
    packed: bool  # batch elements are segments of a pack
    blocks: int  # key blocks of a chunk
    slab: int  # tokens that are added elementwise


@kernel
def summarize_kernel(
    key_ptr,
    value_ptr,
    seen_ptr,
    statistics_ptrs,
    mean_ptrs,
    sum_ptrs,
    segments_ptr,
    key_strides,
    value_strides,
    seen_strides,
    scale,
    kv_heads,
    kv_len,
    kv_blocks,
    first_key,
    chunks,
    SPEC: tl.constexpr,
):
    """Compute statistics of every key block j and partial sums of every chunk of BLOCKS blocks, over seen tokens.

        mean_j     = scale log2 e  sum k / n            as a high and a low bfloat16 number (16 significant bits)
        variance_j = scale^2 / 4 log2 e  (sum k^2 / n - (sum k / n)^2)      as one bfloat16 number
        means of K and V = sum k / n, sum v / n;  bias = log2 n;      0, 0 and NaN where either mean is not finite
        sums       = sum k, sum k^2 and n               of tokens that are finite in every channel
        value_max  = largest finite |v|                 of each channel

    Grid: chunks of every head of K and V, in one dimension. No query sees keys before ``first_key``.

    Reads
        key, value         [B, Hkv, Sk, D | Dv]
        seen               [B, Hkv, Sk] bool (SPEC.has_seen)
        segments           `Segments.table` (SPEC.packed)
    Writes
        statistics_ptrs    `BlockStatistics` (SPEC.with_means; variance: SPEC.with_variance, which needs with_means)
        mean_ptrs          `BlockMeans` (SPEC.with_blocks)
        sum_ptrs           `ChunkSums` (SPEC.with_sums; value_max: SPEC.with_value)
    """
    HEAD_DIM: tl.constexpr = SPEC.head_dim
    HEAD_DIM_PADDED: tl.constexpr = SPEC.head_dim_padded
    VALUE_DIM: tl.constexpr = SPEC.value_dim
    VALUE_DIM_PADDED: tl.constexpr = SPEC.value_dim_padded

    # Prologue
    chunk, flat_head, batch, head = split_program(tl.program_id(0), chunks, kv_heads)
    channels = tl.arange(0, HEAD_DIM_PADDED)
    value_channels = tl.arange(0, VALUE_DIM_PADDED)
    span = key_span(segments_ptr, batch, first_key, kv_len, SPEC.packed)
    key_head = token_head(key_ptr, seen_ptr, key_strides, seen_strides, batch, head, span)
    value_head = token_head(value_ptr, seen_ptr, value_strides, seen_strides, batch, head, span)
    part = flat_head * chunks + chunk

    value_max = tl.zeros((VALUE_DIM_PADDED,), tl.float32)
    if SPEC.with_means or SPEC.with_sums or SPEC.with_blocks:
        key_sum = tl.zeros((HEAD_DIM_PADDED,), tl.float32)
        key_square = tl.zeros((HEAD_DIM_PADDED,), tl.float32)
        key_count = 0

        # Main loop over the key blocks of the chunk
        for step in range(SPEC.blocks):
            block = chunk * SPEC.blocks + step
            partial_sum, square, _, count = _sums(key_head, block, None, HEAD_DIM, HEAD_DIM_PADDED, SPEC)
            total = tl.sum(partial_sum, 0)  # [HEAD_DIM]
            squares = tl.sum(square, 0)
            key_sum += total
            key_square += squares
            key_count += count
            share = 1.0 / tl.maximum(count, 1).to(tl.float32)
            mean = total * share
            row = flat_head * kv_blocks + block
            inside = channels < tl.where(block < kv_blocks, HEAD_DIM_PADDED, 0)
            if SPEC.with_blocks:  # the means that replace the block
                value_total, _, largest, _ = _sums(value_head, block, None, VALUE_DIM, VALUE_DIM_PADDED, SPEC)
                value_max = tl.maximum(value_max, tl.max(largest, 0))
                value_mean = tl.sum(value_total, 0) * share
                invalid = _has_non_finite(mean) | _has_non_finite(value_mean)
                key_block = tl.where(invalid, 0.0, mean).to(mean_ptrs.key.dtype.element_ty)
                tl.store(mean_ptrs.key + row * HEAD_DIM_PADDED + channels, key_block, mask=inside)
                value_block = tl.where(invalid, 0.0, value_mean).to(mean_ptrs.value.dtype.element_ty)
                value_inside = value_channels < tl.where(block < kv_blocks, VALUE_DIM_PADDED, 0)
                tl.store(mean_ptrs.value + row * VALUE_DIM_PADDED + value_channels, value_block, mask=value_inside)
                bias = tl.where(count == BLOCK_K, 6.0, tl.log2(count.to(tl.float32)))
                tl.store(mean_ptrs.bias + row, tl.where(invalid, float("nan"), bias), mask=block < kv_blocks)
                usable = (count > 0) & (invalid == 0)
                tl.store(mean_ptrs.usable + row, usable.to(tl.int8), mask=block < kv_blocks)
            if SPEC.with_means:  # the statistics that scores read
                if SPEC.with_variance:
                    variance = squares * share - mean * mean
                    if key_ptr.dtype.element_ty == tl.float32:
                        # float32 sums are precise enough for squares of 16-bit numbers; float32 K is centered first.
                        _, square, _, count = _sums(key_head, block, mean[None, :], HEAD_DIM, HEAD_DIM_PADDED, SPEC)
                        variance = tl.sum(square, 0) * share
                    variance = tl.maximum(variance, 0.0)
                # NaN instead of infinity, so that every score of this block is NaN.
                mean = tl.where(is_finite(mean), mean * (scale * LOG2_E), float("nan"))
                mean_high = mean.to(tl.bfloat16)
                offsets = row * HEAD_DIM_PADDED + channels
                tl.store(statistics_ptrs.mean_high + offsets, mean_high, mask=inside)
                mean_low_ptrs = statistics_ptrs.mean_low + offsets
                tl.store(mean_low_ptrs, (mean - mean_high.to(tl.float32)).to(tl.bfloat16), mask=inside)
                if SPEC.with_variance:
                    shared_variance = variance * (VARIANCE_SHARE * scale * scale * LOG2_E)
                    tl.store(statistics_ptrs.variance + offsets, shared_variance.to(tl.bfloat16), mask=inside)

        # Sums of the chunk, for quantization
        if SPEC.with_sums:
            if _has_non_finite(key_sum):
                key_sum, key_square, key_count = _finite_part(key_head, chunk, SPEC)
            key_part = sum_ptrs.key + part * 2 * HEAD_DIM_PADDED + channels
            tl.store(key_part + SUM * HEAD_DIM_PADDED, key_sum)
            tl.store(key_part + SQUARE * HEAD_DIM_PADDED, key_square)
            tl.store(sum_ptrs.key_count + part, key_count)

    # Maxima of V
    if SPEC.with_value:
        if not SPEC.with_blocks:
            value_max = _largest_value(value_head, chunk, False, SPEC)
        if _has_non_finite(value_max):
            value_max = _largest_value(value_head, chunk, True, SPEC)
        tl.store(sum_ptrs.value_max + part * VALUE_DIM_PADDED + value_channels, value_max)


def key_value_statistics(
    key: Tensor,
    value: Tensor,
    call: Call,
    seen: SeenTokens | None,
    *,
    means: bool,
    variance: bool,
    sums: bool,
    value_max: bool,
    sums_of_blocks: bool,
    blocks_for: torch.dtype | None = None,
) -> tuple[BlockStatistics, BlockMeans, ChunkSums]:
    """Launch `summarize_kernel`, which reads K once, and V if its maxima or means are requested.

    Tensors that are not requested are placeholders, which are never read.

    Args:
        means, variance: whether to compute the mean and the variance of every key block.
        sums: whether to compute the sums of every chunk.
        value_max: whether to compute the maxima of V.
        sums_of_blocks: whether each chunk is a single block, so that there is one sum per block.
        blocks_for: dtype of the means that replace skipped blocks; None if skipped blocks are dropped.
    """
    shape, options = call.shape, configs.stage_config("summarize")
    width, value_width = padded(shape.head_dim), padded(shape.value_dim)
    heads = shape.batch * shape.kv_heads
    blocks = 1 if sums_of_blocks else options.blocks
    chunks = ceil_div(shape.kv_blocks, blocks)
    per_block = (heads, shape.kv_blocks, width)
    with_blocks, of_heads = blocks_for is not None, (shape.batch, shape.kv_heads, shape.kv_blocks)
    statistics = BlockStatistics(
        mean_high=buffer_like(key, means, *per_block, dtype=torch.bfloat16),
        mean_low=buffer_like(key, means, *per_block, dtype=torch.bfloat16),
        variance=buffer_like(key, variance, *per_block, dtype=torch.bfloat16),
    )
    block_means = BlockMeans(
        key=buffer_like(key, with_blocks, *of_heads, width, dtype=blocks_for or key.dtype),
        value=buffer_like(key, with_blocks, *of_heads, value_width, dtype=blocks_for or key.dtype),
        bias=buffer_like(key, with_blocks, *of_heads),
        usable=buffer_like(key, with_blocks, *of_heads, dtype=torch.int8),
    )
    chunk_sums = ChunkSums(
        key=buffer_like(key, sums, heads, chunks, 2, width),
        key_count=buffer_like(key, sums, heads, chunks, dtype=torch.int32),
        value_max=buffer_like(key, value_max, heads, chunks, value_width),
    )
    keys_seen, seen_strides, has_seen = seen_keys(seen, call, key)
    launch(
        summarize_kernel,
        chunks * heads,
        key_ptr=key,
        value_ptr=value,
        seen_ptr=keys_seen,
        statistics_ptrs=statistics,
        mean_ptrs=block_means,
        sum_ptrs=chunk_sums,
        segments_ptr=segments_argument(call, key),
        key_strides=strides_of(key),
        value_strides=strides_of(value),
        seen_strides=seen_strides,
        scale=call.scale,
        kv_heads=shape.kv_heads,
        kv_len=shape.kv_len,
        kv_blocks=shape.kv_blocks,
        first_key=first_key(call),
        chunks=chunks,
        SPEC=SummarizeSpec(
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            head_dim_padded=width,
            value_dim_padded=value_width,
            has_seen=has_seen,
            with_means=means,
            with_variance=variance,
            with_blocks=with_blocks,
            with_sums=sums,
            with_value=value_max,
            packed=call.segments is not None,
            blocks=blocks,
            slab=options.slab,
        ),
        num_warps=options.warps,
    )
    return statistics, block_means, chunk_sums
