"""Compute the scaling factors of each head from partial results of chunks and query blocks.

    size_kernel      size of each channel of Q, from 1/16 of the queries of a block
    reduce_kernel    parts of chunks and query blocks -> mean key, factors that balance Q and K, value scales

All sums have a fixed order, so results are deterministic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import buffer_like, first_query, launch, padded, segments_argument, strides_of
from sparge.backends.gpu.primitives import (
    BLOCK_Q,
    FLOAT_OFFSET,
    FP8_MAX,
    is_finite,
    kernel,
    load_tokens,
    query_span,
    segment_queries,
    split_program,
    token_head,
)
from sparge.backends.gpu.stages import configs
from sparge.backends.gpu.stages.arguments import seen_queries
from sparge.backends.gpu.stages.key_value_statistics import SQUARE, SUM, ChunkSums
from sparge.call import Call
from sparge.masks import geometry
from sparge.masks.geometry import ceil_div
from sparge.masks.visibility import SeenTokens
from sparge.numerics import quantization as quant

LOG, WEIGHT = tl.constexpr(0), tl.constexpr(1)
"""Rows of a query block's ``query_part``, [2, D]: weight times log2 of each channel's size, and the weight."""
SAMPLES = tl.constexpr(quant.BALANCE_QUERIES)
SMALLEST_SIZE = tl.constexpr(1e-6)
"""Smallest mean square of a smoothed channel relative to its mean square before smoothing. Smaller ones are rounding
errors of a constant channel, and are ignored."""
SMALLEST_VALUE_SCALE = tl.constexpr(1e-36)
"""Smaller scales have no finite reciprocal. They are replaced by 1, so that the channel rounds to 0."""


@kernel
def size_kernel(
    query_ptr,
    seen_ptr,
    query_part_ptr,
    segments_ptr,
    query_strides,
    seen_strides,
    heads,
    q_len,
    q_blocks,
    first_query,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Compute the size of each channel of Q in a block: the largest |q| among SAMPLES queries (`quantization.balance`).

        size = largest |q| of the samples that are finite and not 0;  weight = number of these samples
        query_part = weight log2 size, weight;  both 0 where size is 0

    Grid: query blocks of every head, in one dimension. Queries before ``first_query`` see no key. If the last block is
    short, samples are also taken from queries before it.

    Reads query [B, H, Sq, D], seen [B, H, Sq] bool (HAS_SEEN) and `Segments.table` (PACKED); writes query_part
    [B * H, q_blocks, 2, D padded] float32.
    """
    flat_q_block = tl.program_id(0).to(tl.int64)
    block, _, batch, head = split_program(tl.program_id(0), q_blocks, heads)
    span = query_span(segments_ptr, batch, first_query, q_len, PACKED)
    query_head = token_head(query_ptr, seen_ptr, query_strides, seen_strides, batch, head, span)
    q_len = query_head.stop
    if PACKED and block * BLOCK_Q >= q_len:
        return

    # Sample the block
    start = tl.maximum(tl.minimum(block * BLOCK_Q, q_len - BLOCK_Q), 0)
    tokens = start + (2 * tl.arange(0, SAMPLES) + 1) * tl.minimum(q_len, BLOCK_Q) // (2 * SAMPLES)
    values, _ = load_tokens(query_head, tokens, HEAD_DIM, HEAD_DIM_PADDED, HAS_SEEN)  # [SAMPLES, HEAD_DIM]

    # Reduce the samples
    usable = (tl.min(is_finite(values).to(tl.int32), 1) != 0) & (tl.max(tl.abs(values), 1) > 0.0)
    size = tl.max(tl.where(usable[:, None], tl.abs(values), 0.0), 0)  # [HEAD_DIM]
    weights = tl.where(size > 0.0, tl.sum(usable.to(tl.int32)).to(tl.float32), 0.0)
    channels = tl.arange(0, HEAD_DIM_PADDED)
    part = query_part_ptr + flat_q_block * 2 * HEAD_DIM_PADDED + channels
    tl.store(part + LOG * HEAD_DIM_PADDED, weights * tl.log2(tl.where(size > 0.0, size, 1.0)))
    tl.store(part + WEIGHT * HEAD_DIM_PADDED, weights)


def query_sizes(query: Tensor, call: Call, seen: SeenTokens | None) -> Tensor:
    """Return ``query_part`` of every query block, (B * H, q_blocks, 2, D padded) float32."""
    shape = call.shape
    width, programs = padded(shape.head_dim), shape.batch * shape.heads * shape.q_blocks
    query_part = buffer_like(query, True, shape.batch * shape.heads, shape.q_blocks, 2, width)
    queries_seen, seen_strides, has_seen = seen_queries(seen, call, query)
    launch(
        size_kernel,
        programs,
        query_ptr=query,
        seen_ptr=queries_seen,
        query_part_ptr=query_part,
        segments_ptr=segments_argument(call, query),
        query_strides=strides_of(query),
        seen_strides=seen_strides,
        heads=shape.heads,
        q_len=shape.q_len,
        q_blocks=shape.q_blocks,
        first_query=first_query(call),
        HEAD_DIM=shape.head_dim,
        HEAD_DIM_PADDED=width,
        HAS_SEEN=has_seen,
        PACKED=call.segments is not None,
        num_warps=1,
    )
    return query_part


class Scales(NamedTuple):
    """Scaling factors of each head."""

    key_mean: Any  # [B * Hkv, D padded] float32, the smoothing mean
    balance: Any  # [B * Hkv, D padded] float32; queries are multiplied by it, keys divided
    value: Any  # [B * Hkv, Dv padded] float32, scales of FP8 values
    # [B * Hkv] int32, a head's largest key scale that is not NaN, as float32 bits; written by quantization
    largest_key: Any


@triton.jit
def _load_part(part_ptr, first, part, kind, parts, channels, DIM: tl.constexpr):
    """Load row ``kind`` of parts ``first + part``, [len(part), len(channels)]; 0 for indices >= ``parts``."""
    inside = (part < parts)[:, None] & (channels < DIM)[None, :]
    rows = (first + part) * 2 + kind
    return tl.load(part_ptr + rows[:, None] * DIM + channels[None, :], mask=inside, other=0.0)


@triton.jit
def _load_unit(part_ptr, first, unit, kind, parts, channels, DIM: tl.constexpr, UNIT: tl.constexpr):
    """Return the sums of units, each of UNIT parts, added in the order in which `summarize_kernel` adds blocks."""
    total = tl.zeros((unit.shape[0], channels.shape[0]), tl.float32)
    for index in tl.static_range(UNIT):
        total += _load_part(part_ptr, first, unit * UNIT + index, kind, parts, channels, DIM)
    return total


@triton.jit
def _load_count(count_ptr, first, unit, parts, UNIT: tl.constexpr):
    """Return the number of tokens of each unit of UNIT parts."""
    total = tl.zeros((unit.shape[0],), tl.int32)
    for index in tl.static_range(UNIT):
        part = unit * UNIT + index
        total += tl.load(count_ptr + first + part, mask=part < parts, other=0)
    return total


@kernel
def reduce_kernel(
    query_part_ptr,
    sum_ptrs,
    scale_ptrs,
    segments_ptr,
    chunks,
    query_parts,
    kv_heads,
    q_blocks,
    HEAD_DIM_PADDED: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    WITH_VALUE: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Reduce the parts of all chunks and query blocks of a head to one number per channel.

        mean    = sum k / n
        size^2  = sum (k - mean)^2 / n                    of each group of `quantization.BALANCE_KEYS` keys
        balance = 2^(round(8 r) / 8)    with r = (mean of log2 size of K - mean of log2 size of Q) / 2, where the means
                  are weighted by the numbers of tokens
        value_scale = largest |v| / 448

    Grid: slices of COLUMNS channels of every head of K and V, in one dimension. A part has the sums of one chunk. UNIT
    parts form a unit, and GROUP units a group of keys. Units have equally many blocks in all calls, so results do not
    depend on the number of blocks in a chunk. ROWS units or groups are added at a time.

    Reads
        query_part     [B * H, q_blocks, 2, D padded] float32, from `size_kernel`; ``query_parts`` parts per group
        sum_ptrs       `ChunkSums` (value_max: WITH_VALUE)
        segments       `Segments.table` (PACKED): in a shorter segment, only the first of a head's q_blocks parts exist
    Writes
        scale_ptrs     `Scales` (value: WITH_VALUE). largest_key is 0, the initial value of the maximum in
                       `quantize_key_value_kernel`
    """
    slices: tl.constexpr = (max(HEAD_DIM_PADDED, VALUE_DIM_PADDED) + COLUMNS - 1) // COLUMNS
    flat_head = (tl.program_id(0) // slices).to(tl.int64)
    channels = tl.program_id(0) % slices * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(scale_ptrs.largest_key + flat_head, 0)

    # Mean key
    first_part = flat_head * chunks
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    count = tl.zeros((ROWS,), tl.int32)
    for start in range(0, chunks, ROWS * UNIT):
        unit = start // UNIT + tl.arange(0, ROWS)
        total += _load_unit(sum_ptrs.key, first_part, unit, SUM, chunks, channels, HEAD_DIM_PADDED, UNIT)
        count += _load_count(sum_ptrs.key_count, first_part, unit, chunks, UNIT)
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(count), 1).to(tl.float32)
    tl.store(scale_ptrs.key_mean + flat_head * HEAD_DIM_PADDED + channels, mean, mask=channels < HEAD_DIM_PADDED)

    # Sizes of the channels of K
    key_log = tl.zeros((ROWS, COLUMNS), tl.float32)
    key_weights = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, chunks, ROWS * GROUP * UNIT):
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        square = tl.zeros((ROWS, COLUMNS), tl.float32)
        count = tl.zeros((ROWS,), tl.int32)
        for index in tl.static_range(GROUP):
            unit = start // UNIT + tl.arange(0, ROWS) * GROUP + index
            total += _load_unit(sum_ptrs.key, first_part, unit, SUM, chunks, channels, HEAD_DIM_PADDED, UNIT)
            square += _load_unit(sum_ptrs.key, first_part, unit, SQUARE, chunks, channels, HEAD_DIM_PADDED, UNIT)
            count += _load_count(sum_ptrs.key_count, first_part, unit, chunks, UNIT)
        share = 1.0 / tl.maximum(count, 1).to(tl.float32)[:, None]
        # Mean square of k - mean
        size = (square - 2.0 * mean[None, :] * total) * share + mean[None, :] * mean[None, :]
        is_size = is_finite(size) & (size > SMALLEST_SIZE * square * share)  # sums of squares of 1e19 overflow
        weights = tl.where(is_size, count[:, None].to(tl.float32), 0.0)
        key_log += weights * 0.5 * tl.log2(tl.where(is_size, size, 1.0))
        key_weights += weights

    # Sizes of the channels of Q
    query_log = tl.zeros((ROWS, COLUMNS), tl.float32)
    query_weights = tl.zeros((ROWS, COLUMNS), tl.float32)
    parts = query_parts
    segment_blocks = q_blocks
    if PACKED:
        _, q_len = segment_queries(segments_ptr, flat_head // kv_heads)
        segment_blocks = tl.cdiv(q_len, BLOCK_Q)
        parts = query_parts // q_blocks * segment_blocks
    for start in range(0, parts, ROWS):
        part = start + tl.arange(0, ROWS)
        if PACKED:
            part = part // segment_blocks * q_blocks + part % segment_blocks
        first = flat_head * query_parts
        query_log += _load_part(query_part_ptr, first, part, LOG, query_parts, channels, HEAD_DIM_PADDED)
        query_weights += _load_part(query_part_ptr, first, part, WEIGHT, query_parts, channels, HEAD_DIM_PADDED)

    # Balance: powers of two in steps of 1/8
    key_weight = tl.sum(key_weights, 0)  # [COLUMNS]
    query_weight = tl.sum(query_weights, 0)
    ratio = tl.sum(key_log, 0) / tl.maximum(key_weight, 1.0) - tl.sum(query_log, 0) / tl.maximum(query_weight, 1.0)
    eighths = tl.where((key_weight > 0.0) & (query_weight > 0.0), ratio * 4.0, 0.0)
    exponent = ((eighths + FLOAT_OFFSET) - FLOAT_OFFSET) * 0.125  # adding the offset rounds to an integer
    tl.store(
        scale_ptrs.balance + flat_head * HEAD_DIM_PADDED + channels, tl.exp2(exponent), mask=channels < HEAD_DIM_PADDED
    )

    # Value scales
    if WITH_VALUE:
        largest = tl.zeros((ROWS, COLUMNS), tl.float32)
        inside = channels < VALUE_DIM_PADDED
        for start in range(0, chunks, ROWS):
            part = start + tl.arange(0, ROWS)
            max_ptrs = sum_ptrs.value_max + (flat_head * chunks + part)[:, None] * VALUE_DIM_PADDED + channels[None, :]
            largest = tl.maximum(largest, tl.load(max_ptrs, mask=(part < chunks)[:, None] & inside[None, :], other=0.0))
        scale = tl.max(largest, 0) / FP8_MAX
        scale = tl.where(scale < SMALLEST_VALUE_SCALE, 1.0, scale)
        tl.store(scale_ptrs.value + flat_head * VALUE_DIM_PADDED + channels, scale, mask=inside)


def reduce_parts(
    query_part: Tensor, sums: ChunkSums, call: Call, *, value_scales: bool, sums_of_blocks: bool
) -> Scales:
    """Return the mean key, the factors that balance channels, and the value scales of every head.

    Args:
        query_part: returned by `query_sizes`.
        sums_of_blocks: whether ``sums`` has one entry per block.
    """
    shape, config, unit = call.shape, configs.stage_config("reduce"), configs.stage_config("summarize").blocks
    width, value_width = padded(shape.head_dim), padded(shape.value_dim)
    heads = shape.batch * shape.kv_heads
    scales = Scales(
        key_mean=buffer_like(query_part, True, heads, width),
        balance=buffer_like(query_part, True, heads, width),
        value=buffer_like(sums.value_max, value_scales, heads, value_width),
        largest_key=buffer_like(query_part, True, heads, dtype=torch.int32),
    )
    launch(
        reduce_kernel,
        heads * ceil_div(max(width, value_width), config.columns),
        query_part_ptr=query_part,
        sum_ptrs=sums,
        scale_ptrs=scales,
        segments_ptr=segments_argument(call, query_part),
        chunks=sums.key_count.shape[1],
        query_parts=shape.group * shape.q_blocks,
        kv_heads=shape.kv_heads,
        q_blocks=shape.q_blocks,
        HEAD_DIM_PADDED=width,
        VALUE_DIM_PADDED=value_width,
        WITH_VALUE=value_scales,
        UNIT=unit if sums_of_blocks else 1,
        GROUP=quant.BALANCE_KEYS // (unit * geometry.BLOCK_K),
        PACKED=call.segments is not None,
        ROWS=config.rows,
        COLUMNS=config.columns,
        num_warps=config.warps,
    )
    return scales
