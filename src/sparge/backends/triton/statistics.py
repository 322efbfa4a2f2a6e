"""What K and V look like, block by block: statistics for the scores, and what the codes need to be scaled by.

    summarize       one pass over K and V: mean and variance of every key block, partial sums of K and maxima of |V|
    reduce          partial sums -> mean key, partial maxima -> value scales; in a fixed order, so results repeat
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

from sparge.backends.triton import configs
from sparge.backends.triton.launch import buffer_like, launch, padded, seen_argument, strides_of
from sparge.backends.triton.primitives import BLOCK_K, LOG2_E, is_finite, load_tokens, self_similarity
from sparge.geometry import Shape, ceil_div
from sparge.visibility import Visibility

LENGTHS = ["kv_heads", "kv_len", "kv_blocks", "chunks"]


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
def _finite_sum(
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
    """Sum and number of a chunk's tokens that are finite in every channel; the rare path, so it may be slow."""
    total = tl.zeros((PADDED,), tl.float32)
    count = 0
    for step in range(BLOCKS * BLOCK_K // SLAB):
        tokens = chunk * BLOCKS * BLOCK_K + step * SLAB + tl.arange(0, SLAB)
        values, present = load_tokens(base, stride, seen_base, seen_stride, tokens, 0, kv_len, DIM, PADDED, HAS_SEEN)
        usable = present & (tl.min(is_finite(values).to(tl.int32), 1) != 0)
        total += tl.sum(tl.where(usable[:, None], values, 0.0), 0)
        count += tl.sum(usable.to(tl.int32))
    return total, count


@triton.jit(do_not_specialize=LENGTHS)
def summarize_kernel(
    key_ptr,
    value_ptr,
    seen_ptr,
    mean_high_ptr,
    mean_low_ptr,
    variance_ptr,
    key_sum_ptr,
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
            key_sum += total
            key_count += count
            if WITH_STATISTICS:
                share = 1.0 / tl.maximum(count, 1).to(tl.float32)
                mean = total * share
                variance = tl.sum(square, 0) * share - mean * mean
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
                key_sum, key_count = _finite_sum(
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
            tl.store(key_sum_ptr + part * HEAD_DIM_PADDED + channels, key_sum)
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


@triton.jit(do_not_specialize=LENGTHS)
def reduce_kernel(
    key_sum_ptr,
    key_count_ptr,
    value_max_ptr,
    key_mean_ptr,
    value_scale_ptr,
    chunks,
    HEAD_DIM_PADDED: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    WITH_VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: slices of COLUMNS channels of every head. Sums in one order whatever the machine does."""
    slices: tl.constexpr = (max(HEAD_DIM_PADDED, VALUE_DIM_PADDED) + COLUMNS - 1) // COLUMNS
    flat_head = (tl.program_id(0) // slices).to(tl.int64)
    channels = tl.program_id(0) % slices * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    count = tl.zeros((ROWS,), tl.int32)
    largest = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, chunks, ROWS):
        part = start + tl.arange(0, ROWS)
        rows = (flat_head * chunks + part)[:, None]
        inside = (part < chunks)[:, None]
        of_key = inside & (channels < HEAD_DIM_PADDED)[None, :]
        total += tl.load(key_sum_ptr + rows * HEAD_DIM_PADDED + channels[None, :], mask=of_key, other=0.0)
        count += tl.load(key_count_ptr + flat_head * chunks + part, mask=part < chunks, other=0)
        if WITH_VALUE:
            of_value = inside & (channels < VALUE_DIM_PADDED)[None, :]
            found = tl.load(value_max_ptr + rows * VALUE_DIM_PADDED + channels[None, :], mask=of_value, other=0.0)
            largest = tl.maximum(largest, found)
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(count), 1).to(tl.float32)
    tl.store(key_mean_ptr + flat_head * HEAD_DIM_PADDED + channels, mean, mask=channels < HEAD_DIM_PADDED)
    if WITH_VALUE:
        scale = tl.max(largest, 0) / 448.0
        scale = tl.where(scale < 1e-36, 1.0, scale)  # smaller ones have no reciprocal, and their channel rounds to 0
        tl.store(value_scale_ptr + flat_head * VALUE_DIM_PADDED + channels, scale, mask=channels < VALUE_DIM_PADDED)


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
        value_scale: (B * Hkv, D_v padded) float32.
        key_similarity: (B * Hkv, kv_blocks) float32, None without a judge.
    """

    mean_high: Tensor
    mean_low: Tensor
    variance: Tensor
    key_mean: Tensor
    value_scale: Tensor
    key_similarity: Tensor | None = None


def summarize(
    key: Tensor,
    value: Tensor,
    shape: Shape,
    seen: Visibility | None,
    *,
    scale: float,
    is_causal: bool,
    statistics: bool,
    smoothing: bool,
    value_scales: bool,
    judge: bool,
) -> Summary:
    """Read K, and V if its scales are wanted, once."""
    if not (statistics or smoothing or value_scales):
        return Summary(key, key, key, key, key)
    width, value_width = padded(shape.head_dim), padded(shape.value_dim)
    heads = shape.batch * shape.kv_heads
    blocks = 1 if judge else configs.SUMMARIZE_BLOCKS  # the judge needs the sum of every block
    chunks = ceil_div(shape.kv_blocks, blocks)
    smoothing = smoothing or judge
    per_block = (heads, shape.kv_blocks, width)
    summary = Summary(
        mean_high=buffer_like(key, statistics, *per_block, dtype=torch.bfloat16),
        mean_low=buffer_like(key, statistics, *per_block, dtype=torch.bfloat16),
        variance=buffer_like(key, statistics, *per_block, dtype=torch.bfloat16),
        key_mean=buffer_like(key, smoothing, heads, width),
        value_scale=buffer_like(key, value_scales, heads, value_width),
    )
    key_sum = buffer_like(key, smoothing, heads, chunks, width)
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
        key_sum_ptr=key_sum,
        key_count_ptr=key_count,
        value_max_ptr=value_max,
        key_strides=strides_of(key),
        value_strides=strides_of(value),
        seen_strides=seen_strides,
        scale=scale,
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
        SLAB=configs.SUMMARIZE_SLAB,
        num_warps=configs.SUMMARIZE_WARPS,
    )
    if smoothing:
        launch(
            reduce_kernel,
            heads * ceil_div(max(width, value_width), configs.REDUCE_COLUMNS),
            key_sum_ptr=key_sum,
            key_count_ptr=key_count,
            value_max_ptr=value_max,
            key_mean_ptr=summary.key_mean,
            value_scale_ptr=summary.value_scale,
            chunks=chunks,
            HEAD_DIM_PADDED=width,
            VALUE_DIM_PADDED=value_width,
            WITH_VALUE=value_scales,
            ROWS=configs.REDUCE_ROWS,
            COLUMNS=configs.REDUCE_COLUMNS,
        )
    if not judge:
        return summary
    center, center_strides = summary.key_mean, (width, 0)
    if is_causal:  # a block is smoothed by the mean up to its own end: it must not know the future
        center = key_sum.cumsum(1) / key_count.cumsum(1).clamp(min=1)[..., None]
        center_strides = (chunks * width, width)
    similarity = buffer_like(key, True, heads, shape.kv_blocks)
    launch(
        key_similarity_kernel,
        shape.kv_blocks * heads,
        key_ptr=key,
        seen_ptr=keys_seen,
        center_ptr=center,
        similarity_ptr=similarity,
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
    return replace(summary, key_similarity=similarity)
