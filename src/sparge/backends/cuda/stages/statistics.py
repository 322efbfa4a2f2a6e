"""What K and V look like, block by block: statistics for the scores, and what the codes need to be scaled by.

    size            of the channels of some queries of every block, a sixteenth of Q
    summarize       one pass over K and V: mean and variance of every key block, and parts: sums, maxima of |V|
    reduce          parts -> mean key, factors that balance channels, value scales; in a fixed order, so results repeat
    key_similarity  only with a judge: how much the tokens of a key block agree

The pass is bound by memory. Few threads per program and elementwise partial sums keep exchanges between threads out of
it: 8 warps per block took three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge import eight_bits, geometry
from sparge.backends.cuda.launch import buffer_like, first_query, launch, padded, seen_argument, strides_of
from sparge.backends.cuda.primitives import (
    BLOCK_K,
    BLOCK_Q,
    FLOAT_OFFSET,
    LOG2_E,
    is_finite,
    load_tokens,
    self_similarity,
)
from sparge.backends.cuda.stages import configs
from sparge.call import Call
from sparge.geometry import ceil_div
from sparge.visibility import Visibility

LENGTHS = [
    "heads",
    "kv_heads",
    "q_len",
    "kv_len",
    "q_blocks",
    "kv_blocks",
    "chunks",
    "query_parts",
    "first_query",
]
SUM, SQUARE = tl.constexpr(0), tl.constexpr(1)
"""Rows of a chunk's part of K, [2, D]."""
LOG, VOTES = tl.constexpr(0), tl.constexpr(1)
"""Rows of a query block's part, [2, D]: log2 of a channel's size times votes; votes."""
SAMPLES = tl.constexpr(eight_bits.BALANCE_QUERIES)


@triton.jit
def _sums(
    base,
    stride,
    seen_base,
    seen_stride,
    block,
    kv_len,
    center,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    CENTERED: tl.constexpr,
    SLAB: tl.constexpr,
):
    """Partial sums of x - center and of its squares over a key block, [SLAB, PADDED] each, and its number of tokens.

    Slabs of a few tokens are added elementwise, which leaves one exchange between threads per block.
    """
    total = tl.zeros((SLAB, PADDED), tl.float32)
    square = tl.zeros((SLAB, PADDED), tl.float32)
    count = tl.minimum(tl.maximum(kv_len - block * BLOCK_K, 0), BLOCK_K)
    seen = tl.zeros((SLAB,), tl.int32)
    for step in tl.static_range(BLOCK_K // SLAB):
        tokens = block * BLOCK_K + step * SLAB + tl.arange(0, SLAB)
        values, present = load_tokens(base, stride, seen_base, seen_stride, tokens, 0, kv_len, DIM, PADDED, HAS_SEEN)
        if HAS_SEEN:
            seen += present.to(tl.int32)
        if CENTERED:
            values = tl.where(present[:, None], values - center, 0.0)
        total += values
        square += values * values
    if HAS_SEEN:
        count = tl.sum(seen)
    return total, square, count


@triton.jit
def _largest(
    base,
    stride,
    seen_base,
    seen_stride,
    chunk,
    kv_len,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    FINITE: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLAB: tl.constexpr,
):
    """Largest |x| of each channel of a chunk, [PADDED]; FINITE leaves out what is not finite."""
    largest = tl.zeros((SLAB, PADDED), tl.float32)
    for step in range(BLOCKS * BLOCK_K // SLAB):
        tokens = chunk * BLOCKS * BLOCK_K + step * SLAB + tl.arange(0, SLAB)
        values, _ = load_tokens(base, stride, seen_base, seen_stride, tokens, 0, kv_len, DIM, PADDED, HAS_SEEN)
        size = tl.abs(values)
        if FINITE:
            size = tl.where(is_finite(values), size, 0.0)
        largest = tl.maximum(largest, size)
    return tl.max(largest, 0)


@triton.jit
def _finite_part(
    base,
    stride,
    seen_base,
    seen_stride,
    chunk,
    kv_len,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLAB: tl.constexpr,
):
    """Sum and squares [PADDED] and number of a chunk's tokens that are finite in every channel; rare, so maybe slow."""
    total = tl.zeros((PADDED,), tl.float32)
    square = tl.zeros((PADDED,), tl.float32)
    count = 0
    for step in range(BLOCKS * BLOCK_K // SLAB):
        tokens = chunk * BLOCKS * BLOCK_K + step * SLAB + tl.arange(0, SLAB)
        values, present = load_tokens(base, stride, seen_base, seen_stride, tokens, 0, kv_len, DIM, PADDED, HAS_SEEN)
        usable = present & (tl.min(is_finite(values).to(tl.int32), 1) != 0)
        kept = tl.where(usable[:, None], values, 0.0)
        total += tl.sum(kept, 0)
        square += tl.sum(kept * kept, 0)
        count += tl.sum(usable.to(tl.int32))
    return total, square, count


@triton.jit(do_not_specialize=LENGTHS)
def size_kernel(
    query_ptr,
    seen_ptr,
    query_part_ptr,
    query_strides,
    seen_strides,
    heads,
    q_len,
    q_blocks,
    first_query,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
):
    """Grid: query blocks of every head. The largest |q| of each channel among SAMPLES queries: `eight_bits.balance`."""
    row = tl.program_id(0).to(tl.int64)
    flat_head = row // q_blocks
    batch = flat_head // heads
    head = flat_head % heads
    channels = tl.arange(0, HEAD_DIM_PADDED)
    start = tl.maximum(tl.minimum(tl.program_id(0) % q_blocks * BLOCK_Q, q_len - BLOCK_Q), 0)
    tokens = start + (2 * tl.arange(0, SAMPLES) + 1) * tl.minimum(q_len, BLOCK_Q) // (2 * SAMPLES)
    values, _ = load_tokens(
        query_ptr + batch * query_strides[0] + head * query_strides[1],
        query_strides[2],
        seen_ptr + batch * seen_strides[0] + head * seen_strides[1],
        seen_strides[2],
        tokens,
        first_query,
        q_len,
        HEAD_DIM,
        HEAD_DIM_PADDED,
        HAS_SEEN,
    )
    usable = (tl.min(is_finite(values).to(tl.int32), 1) != 0) & (tl.max(tl.abs(values), 1) > 0.0)
    size = tl.max(tl.where(usable[:, None], tl.abs(values), 0.0), 0)
    votes = tl.where(size > 0.0, tl.sum(usable.to(tl.int32)).to(tl.float32), 0.0)
    part = query_part_ptr + row * 2 * HEAD_DIM_PADDED + channels
    tl.store(part + LOG * HEAD_DIM_PADDED, votes * tl.log2(tl.where(size > 0.0, size, 1.0)))
    tl.store(part + VOTES * HEAD_DIM_PADDED, votes)


@triton.jit(do_not_specialize=LENGTHS)
def summarize_kernel(
    key_ptr,
    value_ptr,
    seen_ptr,
    mean_high_ptr,
    mean_low_ptr,
    variance_ptr,
    key_part_ptr,
    key_count_ptr,
    value_max_ptr,
    key_strides,
    value_strides,
    seen_strides,
    scale,
    kv_heads,
    kv_len,
    kv_blocks,
    chunks,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    WITH_STATISTICS: tl.constexpr,
    WITH_SUM: tl.constexpr,
    WITH_VALUE: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLAB: tl.constexpr,
):
    """Grid: chunks of BLOCKS key blocks of every head.

    Means and variances are stored for `predict.score_kernel`: times the softmax scale and log2 e, the mean in two
    bfloat16 numbers (16 bits), the variance, which enters at second order, in one.
    """
    chunk = tl.program_id(0) % chunks
    flat_head = (tl.program_id(0) // chunks).to(tl.int64)
    batch = flat_head // kv_heads
    head = flat_head % kv_heads
    channels = tl.arange(0, HEAD_DIM_PADDED)
    value_channels = tl.arange(0, VALUE_DIM_PADDED)
    key_base = key_ptr + batch * key_strides[0] + head * key_strides[1]
    value_base = value_ptr + batch * value_strides[0] + head * value_strides[1]
    seen_base = seen_ptr + batch * seen_strides[0] + head * seen_strides[1]
    part = flat_head * chunks + chunk

    if WITH_STATISTICS or WITH_SUM:
        key_sum = tl.zeros((HEAD_DIM_PADDED,), tl.float32)
        key_square = tl.zeros((HEAD_DIM_PADDED,), tl.float32)
        key_count = 0
        for step in range(BLOCKS):
            block = chunk * BLOCKS + step
            first, square, count = _sums(
                key_base,
                key_strides[2],
                seen_base,
                seen_strides[2],
                block,
                kv_len,
                0.0,
                HEAD_DIM,
                HEAD_DIM_PADDED,
                HAS_SEEN,
                False,
                SLAB,
            )
            total = tl.sum(first, 0)
            squares = tl.sum(square, 0)
            key_sum += total
            key_square += squares
            key_count += count
            if WITH_STATISTICS:
                share = 1.0 / tl.maximum(count, 1).to(tl.float32)
                mean = total * share
                variance = squares * share - mean * mean
                if key_ptr.dtype.element_ty == tl.float32:
                    # Squares of 16-bit numbers fit into float32 sums; those of float32 numbers must be centred first.
                    _, square, count = _sums(
                        key_base,
                        key_strides[2],
                        seen_base,
                        seen_strides[2],
                        block,
                        kv_len,
                        mean[None, :],
                        HEAD_DIM,
                        HEAD_DIM_PADDED,
                        HAS_SEEN,
                        True,
                        SLAB,
                    )
                    variance = tl.sum(square, 0) * share
                variance = tl.maximum(variance, 0.0)
                # NaN, not infinity, so that a score of these keys can be nothing else.
                mean = tl.where(is_finite(mean), mean * (scale * LOG2_E), float("nan"))
                mean_high = mean.to(tl.bfloat16)
                offsets = (flat_head * kv_blocks + block) * HEAD_DIM_PADDED + channels
                inside = channels < tl.where(block < kv_blocks, HEAD_DIM_PADDED, 0)
                tl.store(mean_high_ptr + offsets, mean_high, mask=inside)
                tl.store(mean_low_ptr + offsets, (mean - mean_high.to(tl.float32)).to(tl.bfloat16), mask=inside)
                half_variance = variance * (0.5 * scale * scale * LOG2_E)
                tl.store(variance_ptr + offsets, half_variance.to(tl.bfloat16), mask=inside)
        if WITH_SUM:
            if tl.min(is_finite(key_sum).to(tl.int32)) == 0:
                key_sum, key_square, key_count = _finite_part(
                    key_base,
                    key_strides[2],
                    seen_base,
                    seen_strides[2],
                    chunk,
                    kv_len,
                    HEAD_DIM,
                    HEAD_DIM_PADDED,
                    HAS_SEEN,
                    BLOCKS,
                    SLAB,
                )
            key_part = key_part_ptr + part * 2 * HEAD_DIM_PADDED + channels
            tl.store(key_part + SUM * HEAD_DIM_PADDED, key_sum)
            tl.store(key_part + SQUARE * HEAD_DIM_PADDED, key_square)
            tl.store(key_count_ptr + part, key_count)

    if WITH_VALUE:
        value_max = _largest(
            value_base,
            value_strides[2],
            seen_base,
            seen_strides[2],
            chunk,
            kv_len,
            VALUE_DIM,
            VALUE_DIM_PADDED,
            HAS_SEEN,
            False,
            BLOCKS,
            SLAB,
        )
        if tl.min(is_finite(value_max).to(tl.int32)) == 0:
            value_max = _largest(
                value_base,
                value_strides[2],
                seen_base,
                seen_strides[2],
                chunk,
                kv_len,
                VALUE_DIM,
                VALUE_DIM_PADDED,
                HAS_SEEN,
                True,
                BLOCKS,
                SLAB,
            )
        tl.store(value_max_ptr + part * VALUE_DIM_PADDED + value_channels, value_max)


@triton.jit
def _load_part(part_ptr, first, part, kind, parts, channels, DIM: tl.constexpr):
    """One kind of number of some of ``parts`` parts from ``first`` on, [len(part), len(channels)]; 0 beyond them."""
    inside = (part < parts)[:, None] & (channels < DIM)[None, :]
    rows = (first + part) * 2 + kind
    return tl.load(part_ptr + rows[:, None] * DIM + channels[None, :], mask=inside, other=0.0)


@triton.jit
def _load_unit(part_ptr, first, unit, kind, parts, channels, DIM: tl.constexpr, MEMBERS: tl.constexpr):
    """The same of units of MEMBERS parts, added in the order in which `summarize_kernel` adds blocks."""
    total = tl.zeros((unit.shape[0], channels.shape[0]), tl.float32)
    for member in tl.static_range(MEMBERS):
        total += _load_part(part_ptr, first, unit * MEMBERS + member, kind, parts, channels, DIM)
    return total


@triton.jit
def _load_count(count_ptr, first, unit, parts, MEMBERS: tl.constexpr):
    """Tokens of units of MEMBERS parts."""
    total = tl.zeros((unit.shape[0],), tl.int32)
    for member in tl.static_range(MEMBERS):
        part = unit * MEMBERS + member
        total += tl.load(count_ptr + first + part, mask=part < parts, other=0)
    return total


@triton.jit(do_not_specialize=LENGTHS)
def reduce_kernel(
    query_part_ptr,
    key_part_ptr,
    key_count_ptr,
    value_max_ptr,
    key_mean_ptr,
    balance_ptr,
    value_scale_ptr,
    chunks,
    query_parts,
    HEAD_DIM_PADDED: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    WITH_VALUE: tl.constexpr,
    MEMBERS: tl.constexpr,
    GATHERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: slices of COLUMNS channels of every head. Sums in one order whatever the machine does.

    MEMBERS parts are a unit, whatever the blocks of a part: the same numbers with a judge and without. GATHERED units
    together are one vote about the size of a key channel (`eight_bits.balance`).
    """
    slices: tl.constexpr = (max(HEAD_DIM_PADDED, VALUE_DIM_PADDED) + COLUMNS - 1) // COLUMNS
    flat_head = (tl.program_id(0) // slices).to(tl.int64)
    channels = tl.program_id(0) % slices * COLUMNS + tl.arange(0, COLUMNS)
    first_part = flat_head * chunks
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    count = tl.zeros((ROWS,), tl.int32)
    for start in range(0, chunks, ROWS * MEMBERS):
        unit = start // MEMBERS + tl.arange(0, ROWS)
        total += _load_unit(key_part_ptr, first_part, unit, SUM, chunks, channels, HEAD_DIM_PADDED, MEMBERS)
        count += _load_count(key_count_ptr, first_part, unit, chunks, MEMBERS)
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(count), 1).to(tl.float32)
    tl.store(key_mean_ptr + flat_head * HEAD_DIM_PADDED + channels, mean, mask=channels < HEAD_DIM_PADDED)

    key_log = tl.zeros((ROWS, COLUMNS), tl.float32)
    key_votes = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, chunks, ROWS * GATHERED * MEMBERS):
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        square = tl.zeros((ROWS, COLUMNS), tl.float32)
        count = tl.zeros((ROWS,), tl.int32)
        for member in tl.static_range(GATHERED):
            unit = start // MEMBERS + tl.arange(0, ROWS) * GATHERED + member
            total += _load_unit(key_part_ptr, first_part, unit, SUM, chunks, channels, HEAD_DIM_PADDED, MEMBERS)
            square += _load_unit(key_part_ptr, first_part, unit, SQUARE, chunks, channels, HEAD_DIM_PADDED, MEMBERS)
            count += _load_count(key_count_ptr, first_part, unit, chunks, MEMBERS)
        share = 1.0 / tl.maximum(count, 1).to(tl.float32)[:, None]
        # Of k - mean. What rounding leaves of a constant channel is no size.
        size = (square - 2.0 * mean[None, :] * total) * share + mean[None, :] * mean[None, :]
        is_size = is_finite(size) & (size > 1e-6 * square * share)  # squares of 1e19 are not finite
        votes = tl.where(is_size, count[:, None].to(tl.float32), 0.0)
        key_log += votes * 0.5 * tl.log2(tl.where(is_size, size, 1.0))
        key_votes += votes
    query_log = tl.zeros((ROWS, COLUMNS), tl.float32)
    query_votes = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, query_parts, ROWS):
        part = start + tl.arange(0, ROWS)
        first = flat_head * query_parts
        query_log += _load_part(query_part_ptr, first, part, LOG, query_parts, channels, HEAD_DIM_PADDED)
        query_votes += _load_part(query_part_ptr, first, part, VOTES, query_parts, channels, HEAD_DIM_PADDED)
    of_key = tl.sum(key_votes, 0)
    of_query = tl.sum(query_votes, 0)
    ratio = tl.sum(key_log, 0) / tl.maximum(of_key, 1.0) - tl.sum(query_log, 0) / tl.maximum(of_query, 1.0)
    eighths = tl.where((of_key > 0.0) & (of_query > 0.0), ratio * 4.0, 0.0)
    exponent = ((eighths + FLOAT_OFFSET) - FLOAT_OFFSET) * 0.125  # rounds
    tl.store(balance_ptr + flat_head * HEAD_DIM_PADDED + channels, tl.exp2(exponent), mask=channels < HEAD_DIM_PADDED)

    if WITH_VALUE:
        largest = tl.zeros((ROWS, COLUMNS), tl.float32)
        inside = channels < VALUE_DIM_PADDED
        for start in range(0, chunks, ROWS):
            part = start + tl.arange(0, ROWS)
            pointers = value_max_ptr + (flat_head * chunks + part)[:, None] * VALUE_DIM_PADDED + channels[None, :]
            largest = tl.maximum(largest, tl.load(pointers, mask=(part < chunks)[:, None] & inside[None, :], other=0.0))
        scale = tl.max(largest, 0) / 448.0
        scale = tl.where(scale < 1e-36, 1.0, scale)  # smaller ones have no reciprocal, and their channel rounds to 0
        tl.store(value_scale_ptr + flat_head * VALUE_DIM_PADDED + channels, scale, mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def key_similarity_kernel(
    key_ptr,
    seen_ptr,
    center_ptr,
    similarity_ptr,
    key_strides,
    seen_strides,
    center_strides,
    kv_heads,
    kv_len,
    kv_blocks,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
):
    """Grid: key blocks of every head. ``center`` is the mean key to smooth by, per head or per block of it."""
    block = tl.program_id(0) % kv_blocks
    flat_head = (tl.program_id(0) // kv_blocks).to(tl.int64)
    batch = flat_head // kv_heads
    head = flat_head % kv_heads
    tokens = block * BLOCK_K + tl.arange(0, BLOCK_K)
    channels = tl.arange(0, HEAD_DIM_PADDED)
    key_base = key_ptr + batch * key_strides[0] + head * key_strides[1]
    seen_base = seen_ptr + batch * seen_strides[0] + head * seen_strides[1]
    key, present = load_tokens(
        key_base, key_strides[2], seen_base, seen_strides[2], tokens, 0, kv_len, HEAD_DIM, HEAD_DIM_PADDED, HAS_SEEN
    )
    center = tl.load(center_ptr + flat_head * center_strides[0] + block * center_strides[1] + channels)
    key = tl.where(present[:, None], key - center[None, :], 0.0)
    count = tl.maximum(tl.sum(present.to(tl.int32)), 1).to(tl.float32)
    tl.store(similarity_ptr + flat_head * kv_blocks + block, self_similarity(key, count))


@dataclass(frozen=True)
class Summary:
    """What one pass over K and V leaves. A tensor that was not asked for is a stand-in nobody reads.

    Attributes:
        mean_high, mean_low, variance: (B * Hkv, kv_blocks, D padded) bfloat16, see `summarize_kernel`.
        key_mean: (B * Hkv, D padded) float32, the smoothing mean.
        balance: (B * Hkv, D padded) float32, what queries are multiplied by, and keys divided.
        value_scale: (B * Hkv, D_v padded) float32.
        key_similarity: (B * Hkv, kv_blocks) float32, None without a judge.
    """

    mean_high: Tensor
    mean_low: Tensor
    variance: Tensor
    key_mean: Tensor
    balance: Tensor
    value_scale: Tensor
    key_similarity: Tensor | None = None


def _sizes(query: Tensor, call: Call, seen: Visibility | None) -> Tensor:
    """Parts of every query block, (B * H, q_blocks, 2, D padded) float32."""
    shape = call.shape
    width, programs = padded(shape.head_dim), shape.batch * shape.heads * shape.q_blocks
    query_part = buffer_like(query, True, programs, 2, width)
    queries_seen, seen_strides = seen_argument(
        seen.queries if seen else None, (shape.batch, shape.heads, shape.q_len), query
    )
    launch(
        size_kernel,
        programs,
        query_ptr=query,
        seen_ptr=queries_seen,
        query_part_ptr=query_part,
        query_strides=strides_of(query),
        seen_strides=seen_strides,
        heads=shape.heads,
        q_len=shape.q_len,
        q_blocks=shape.q_blocks,
        first_query=first_query(call),
        HEAD_DIM=shape.head_dim,
        HEAD_DIM_PADDED=width,
        HAS_SEEN=seen is not None and seen.queries is not None,
        num_warps=1,
    )
    return query_part


def summarize(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    seen: Visibility | None,
    *,
    statistics: bool,
    smoothing: bool,
    value_scales: bool,
    similarity: bool,
) -> Summary:
    """Read K, and V if its scales are wanted, once, and some queries if Q and K are to be rounded."""
    if not (statistics or smoothing or value_scales):
        return Summary(*[key] * 6)
    shape = call.shape
    width, value_width = padded(shape.head_dim), padded(shape.value_dim)
    heads = shape.batch * shape.kv_heads
    config, reduce_config = configs.summarize_config(), configs.reduce_config()
    blocks = 1 if similarity else config.blocks  # similarity needs the sum of every block
    chunks = ceil_div(shape.kv_blocks, blocks)
    smoothing = smoothing or similarity
    per_block = (heads, shape.kv_blocks, width)
    summary = Summary(
        mean_high=buffer_like(key, statistics, *per_block, dtype=torch.bfloat16),
        mean_low=buffer_like(key, statistics, *per_block, dtype=torch.bfloat16),
        variance=buffer_like(key, statistics, *per_block, dtype=torch.bfloat16),
        key_mean=buffer_like(key, smoothing, heads, width),
        balance=buffer_like(key, smoothing, heads, width),
        value_scale=buffer_like(key, value_scales, heads, value_width),
    )
    key_part = buffer_like(key, smoothing, heads, chunks, 2, width)
    key_count = buffer_like(key, smoothing, heads, chunks, dtype=torch.int32)
    value_max = buffer_like(key, value_scales, heads, chunks, value_width)
    keys_seen, seen_strides = seen_argument(
        seen.keys if seen else None, (shape.batch, shape.kv_heads, shape.kv_len), key
    )
    has_seen = seen is not None and seen.keys is not None
    launch(
        summarize_kernel,
        chunks * heads,
        key_ptr=key,
        value_ptr=value,
        seen_ptr=keys_seen,
        mean_high_ptr=summary.mean_high,
        mean_low_ptr=summary.mean_low,
        variance_ptr=summary.variance,
        key_part_ptr=key_part,
        key_count_ptr=key_count,
        value_max_ptr=value_max,
        key_strides=strides_of(key),
        value_strides=strides_of(value),
        seen_strides=seen_strides,
        scale=call.scale,
        kv_heads=shape.kv_heads,
        kv_len=shape.kv_len,
        kv_blocks=shape.kv_blocks,
        chunks=chunks,
        HEAD_DIM=shape.head_dim,
        VALUE_DIM=shape.value_dim,
        HEAD_DIM_PADDED=width,
        VALUE_DIM_PADDED=value_width,
        HAS_SEEN=has_seen,
        WITH_STATISTICS=statistics,
        WITH_SUM=smoothing,
        WITH_VALUE=value_scales,
        BLOCKS=blocks,
        SLAB=config.slab,
        num_warps=config.warps,
    )
    if smoothing:
        launch(
            reduce_kernel,
            heads * ceil_div(max(width, value_width), reduce_config.columns),
            query_part_ptr=_sizes(query, call, seen),
            key_part_ptr=key_part,
            key_count_ptr=key_count,
            value_max_ptr=value_max,
            key_mean_ptr=summary.key_mean,
            balance_ptr=summary.balance,
            value_scale_ptr=summary.value_scale,
            chunks=chunks,
            query_parts=shape.group * shape.q_blocks,
            HEAD_DIM_PADDED=width,
            VALUE_DIM_PADDED=value_width,
            WITH_VALUE=value_scales,
            MEMBERS=config.blocks // blocks,
            GATHERED=eight_bits.BALANCE_KEYS // (config.blocks * geometry.BLOCK_K),
            ROWS=reduce_config.rows,
            COLUMNS=reduce_config.columns,
            num_warps=reduce_config.warps,
        )
    if not similarity:
        return summary
    center, center_strides = summary.key_mean, (width, 0)
    if call.is_causal:  # a block is smoothed by the mean up to its own end: it must not know the future
        center = key_part[:, :, SUM.value].cumsum(1) / key_count.cumsum(1).clamp(min=1)[..., None]
        center_strides = (chunks * width, width)
    key_similarity = buffer_like(key, True, heads, shape.kv_blocks)
    launch(
        key_similarity_kernel,
        shape.kv_blocks * heads,
        key_ptr=key,
        seen_ptr=keys_seen,
        center_ptr=center,
        similarity_ptr=key_similarity,
        key_strides=strides_of(key),
        seen_strides=seen_strides,
        center_strides=center_strides,
        kv_heads=shape.kv_heads,
        kv_len=shape.kv_len,
        kv_blocks=shape.kv_blocks,
        HEAD_DIM=shape.head_dim,
        HEAD_DIM_PADDED=width,
        HAS_SEEN=has_seen,
    )
    return replace(summary, key_similarity=key_similarity)
