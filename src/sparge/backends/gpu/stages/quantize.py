"""Quantize K and V in one pass; quantize Q and compute its other statistics in another.

    quantize_key_value    smoothed K in INT8 with four scales per 64 tokens; V in FP8, transposed, with one scale per
                          channel, or in FP16
    summarize_query       Q in INT8 with one scale per token; LSE shift; block means; similarity

`numerics.quantization` is the specification. Inputs are read in place with their strides. Hidden tokens are read as 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import (
    buffer_like,
    first_key,
    first_query,
    launch,
    padded,
    seen_argument,
    segments_argument,
    strides_of,
)
from sparge.backends.gpu.primitives import (
    BLOCK_K,
    BLOCK_Q,
    FLOAT_OFFSET,
    FP16_MAX,
    INT8_MAX,
    KEY_GROUPS,
    LOG2_E,
    MIXED,
    fp8_token_order,
    is_finite,
    kernel,
    key_span,
    load_tokens,
    mix,
    query_span,
    self_similarity,
    split_program,
    token_head,
)
from sparge.backends.gpu.stages import configs
from sparge.backends.gpu.stages.arguments import seen_queries
from sparge.backends.gpu.stages.reduce import Scales
from sparge.call import Call
from sparge.masks import geometry
from sparge.masks.visibility import SeenTokens
from sparge.numerics import quantization as quant

LARGEST_SCALE = tl.constexpr(1e15)
"""Limit of the scales of Q and K, so that their product stays within float32. Its reciprocal is the smallest scale."""
SMALLEST_UNIT = tl.constexpr(1e-20)
"""Smallest query scale after multiplication by the softmax scale. Hidden scores are -inf before scaling, and 0 times
-inf is NaN."""


class QuantizedKeyValue(NamedTuple):
    """K and V, padded with zeros to whole blocks."""

    key: Tensor  # (B, Hkv, kv_blocks * 64, D padded) int8
    key_scale: Tensor  # (B, Hkv, kv_blocks, 4) float32; NaN where a key of the group is not finite
    # (B, Hkv, Dv padded, kv_blocks * 64) FP8, tokens in `fp8_token_order`; or (B, Hkv, kv_blocks * 64, Dv padded) FP16;
    # or the caller's V
    value: Tensor


class QuerySummary(NamedTuple):
    """The results of one pass over Q. Tensors that were not requested are placeholders, which are never read."""

    quantized: Tensor  # (B, H, q_blocks * 128, D padded) int8
    # (B * H, q_blocks * 128) float32, times |softmax scale| log2 e; NaN where the query is not finite
    scale: Tensor
    lse_shift: Tensor  # (B * H, Sq) float32, softmax scale times q . mean key
    # (B * H, q_blocks, parts, D padded) float32, means of equal parts of a block; the mean of the block for a part
    # without visible queries
    mean: Tensor
    similarity: Tensor  # (B * H, q_blocks) float32


@triton.jit
def _absolute_max(values, AXIS: tl.constexpr):
    """Return the largest |x| along an axis. Bits are compared as integers, so NaN is propagated."""
    return tl.max(tl.abs(values).to(tl.int32, bitcast=True), AXIS).to(tl.float32, bitcast=True)


@triton.jit
def _scale_of(largest):
    """Return the INT8 scale of values whose largest magnitude is ``largest``, and the factor that quantizes them.

    The scale is bounded, so that the product of two scales is finite. It is NaN if ``largest`` is not finite.
    """
    scale = largest / INT8_MAX
    bounded = tl.minimum(tl.maximum(scale, 1.0 / LARGEST_SCALE), LARGEST_SCALE)
    return tl.where(is_finite(scale), bounded, float("nan")), 1.0 / tl.maximum(scale, 1.0 / LARGEST_SCALE)


@triton.jit
def _to_int8(values, factor):
    """Return values * factor as INT8. Adding 1.5 * 2^23 rounds to even and leaves the result in the low byte."""
    return (values * factor + FLOAT_OFFSET).to(tl.int32, bitcast=True).to(tl.int8)


@kernel
def quantize_key_value_kernel(
    key_ptr,
    value_ptr,
    seen_ptr,
    scale_ptrs,
    result_ptrs,
    segments_ptr,
    key_strides,
    value_strides,
    seen_strides,
    kv_heads,
    kv_len,
    kv_blocks,
    first_key,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    PACKED: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
):
    """Quantize a key block and its values.

        key   = round(mix((k - mean) / balance) / key_scale),  key_scale = largest of 16 keys / 127
        value = v / value_scale in FP8 (VALUE_FORMAT "fp8"), v in FP16 ("fp16"), or nothing ("none")

    Grid: key blocks of every head, in one dimension, from the last to the first, because the last blocks may still be
    in the cache after `summarize_kernel`. No query sees keys before ``first_key``.

    Reads
        key, value           [B, Hkv, Sk, D | Dv]
        seen                 [B, Hkv, Sk] bool (HAS_SEEN)
        scale_ptrs           `reduce.Scales`; value for "fp8"
        segments             `Segments.table` (PACKED)
    Writes
        result_ptrs          `QuantizedKeyValue`
        scale_ptrs           largest_key, by atomic maximum: the head's largest scale that is not NaN, as float32 bits
    """
    # Prologue
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    block, flat_head, batch, head = split_program(program, kv_blocks, kv_heads)
    positions = tl.arange(0, BLOCK_K)
    tokens = block * BLOCK_K + positions
    channels = tl.arange(0, HEAD_DIM_PADDED)
    value_channels = tl.arange(0, VALUE_DIM_PADDED)
    rows = flat_head * kv_blocks * BLOCK_K + tokens  # [64], of a buffer [B * Hkv * kv_blocks * 64, D]
    span = key_span(segments_ptr, batch, first_key, kv_len, PACKED)
    key_head = token_head(key_ptr, seen_ptr, key_strides, seen_strides, batch, head, span)
    value_head = token_head(value_ptr, seen_ptr, value_strides, seen_strides, batch, head, span)
    if PACKED and block * BLOCK_K >= key_head.stop:
        return

    # K: smooth, balance, mix, round
    key, present = load_tokens(key_head, tokens, HEAD_DIM, HEAD_DIM_PADDED, HAS_SEEN)
    mean = tl.load(scale_ptrs.key_mean + flat_head * HEAD_DIM_PADDED + channels)
    factor = 1.0 / tl.load(scale_ptrs.balance + flat_head * HEAD_DIM_PADDED + channels)
    key = mix(tl.where(present[:, None], (key - mean[None, :]) * factor[None, :], 0.0))  # [64, HEAD_DIM]
    # One scale per group of 16 keys: in a matrix product, a thread has the keys of one group, (key mod 8) div 2.
    largest = tl.reshape(_absolute_max(key, 1).to(tl.int32, bitcast=True), (BLOCK_K // 8, KEY_GROUPS, 2))
    scales, factors = _scale_of(tl.max(tl.max(largest, 2), 0).to(tl.float32, bitcast=True))  # [KEY_GROUPS]
    spread = tl.broadcast_to(factors[None, :, None], (BLOCK_K // 8, KEY_GROUPS, 2))
    key_int8 = _to_int8(key, tl.reshape(spread, (BLOCK_K,))[:, None])
    tl.store(result_ptrs.key + rows[:, None] * HEAD_DIM_PADDED + channels[None, :], key_int8)
    tl.store(result_ptrs.key_scale + (flat_head * kv_blocks + block) * KEY_GROUPS + tl.arange(0, KEY_GROUPS), scales)
    largest_scale = tl.max(tl.where(scales == scales, scales, 0.0), 0)
    tl.atomic_max(scale_ptrs.largest_key + flat_head, largest_scale.to(tl.int32, bitcast=True), sem="relaxed")

    # V: FP8 transposed, or FP16
    if VALUE_FORMAT != "none":
        ordered = tokens
        if VALUE_FORMAT == "fp8":
            ordered = block * BLOCK_K + fp8_token_order(positions)
        value, _ = load_tokens(value_head, ordered, VALUE_DIM, VALUE_DIM_PADDED, HAS_SEEN)
        if VALUE_FORMAT == "fp8":
            unit = 1.0 / tl.load(scale_ptrs.value + flat_head * VALUE_DIM_PADDED + value_channels)
            scaled = tl.where(is_finite(value), value * unit[None, :], float("nan"))
            columns = (flat_head * VALUE_DIM_PADDED + value_channels) * kv_blocks * BLOCK_K
            tl.store(result_ptrs.value + columns[:, None] + tokens[None, :], scaled.to(tl.float8e4nv).T)
        else:
            bounded = tl.where(is_finite(value), tl.minimum(tl.maximum(value, -FP16_MAX), FP16_MAX), value)
            value_ptrs = result_ptrs.value + rows[:, None] * VALUE_DIM_PADDED + value_channels[None, :]
            tl.store(value_ptrs, bounded.to(tl.float16))


@kernel
def quantize_query_kernel(
    query_ptr,
    seen_ptr,
    key_mean_ptr,
    balance_ptr,
    result_ptrs,
    segments_ptr,
    query_strides,
    seen_strides,
    scale,
    heads,
    kv_heads,
    q_len,
    q_blocks,
    first_query,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    WITH_INT8: tl.constexpr,
    PARTS: tl.constexpr,
    WITH_SIMILARITY: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Quantize a query block, and compute its means and its similarity.

        quantized  = round(sign(c) mix(q balance) / s),  s = the query's largest / 127,  c = softmax scale
        scale      = s |c| log2 e 8, where 8 is the divisor of `mix`. The sign of c is in the quantized values, because
                     the attention kernel takes row maxima before scaling
        lse_shift  = c q . mean key, which smoothing subtracts from every score of a query
        similarity = |mean of the unit vectors q / |q||^2

    Grid: query blocks of every head, in one dimension. Queries before ``first_query`` see no key.

    Reads
        query                [B, H, Sq, D]
        seen                 [B, H, Sq] bool (HAS_SEEN)
        key_mean, balance    [B * Hkv, D padded] float32 (WITH_INT8), from `reduce_kernel`
        segments             `Segments.table` (PACKED)
    Writes `QuerySummary`: ``quantized``, ``scale`` and ``lse_shift`` (WITH_INT8), ``mean`` (PARTS > 0), ``similarity``
    (WITH_SIMILARITY).
    """
    # Prologue
    block, flat_head, batch, head = split_program(tl.program_id(0), q_blocks, heads)
    places = tl.arange(0, BLOCK_Q)
    if PARTS > 1:  # the first query of every part, then the second of every part: sums over a part stay inside threads
        places = places % PARTS * (BLOCK_Q // PARTS) + places // PARTS
    positions = block * BLOCK_Q + places
    channels = tl.arange(0, HEAD_DIM_PADDED)
    shifts = result_ptrs.lse_shift + flat_head * q_len
    span = query_span(segments_ptr, batch, first_query, q_len, PACKED)
    query_head = token_head(query_ptr, seen_ptr, query_strides, seen_strides, batch, head, span)
    q_len = query_head.stop
    if PACKED and block * BLOCK_Q >= q_len:
        return
    query, present = load_tokens(query_head, positions, HEAD_DIM, HEAD_DIM_PADDED, HAS_SEEN)

    # Means of the block, or of its parts
    flat_q_block = flat_head * q_blocks + block
    count = tl.maximum(tl.sum(present.to(tl.int32)), 1).to(tl.float32)
    if PARTS == 1:
        tl.store(result_ptrs.mean + flat_q_block * HEAD_DIM_PADDED + channels, tl.sum(query, 0) / count)
    elif PARTS > 1:
        size: tl.constexpr = BLOCK_Q // PARTS
        counts = tl.sum(tl.reshape(present.to(tl.int32), (size, PARTS)), 0)
        sums = tl.sum(tl.reshape(query, (size, PARTS, HEAD_DIM_PADDED)), 0)
        means = sums / tl.maximum(counts, 1).to(tl.float32)[:, None]
        means = tl.where(counts[:, None] > 0, means, (tl.sum(sums, 0) / count)[None, :])
        offsets = (flat_q_block * PARTS + tl.arange(0, PARTS))[:, None] * HEAD_DIM_PADDED + channels[None, :]
        tl.store(result_ptrs.mean + offsets, means)

    # Balance, mix, round
    if WITH_INT8:
        kv_head = batch * kv_heads + head // (heads // kv_heads)
        factors = tl.load(balance_ptr + kv_head * HEAD_DIM_PADDED + channels)
        balanced = query * factors[None, :]
        mean = tl.load(key_mean_ptr + kv_head * HEAD_DIM_PADDED + channels)
        shift = tl.sum(balanced * (mean / factors)[None, :], 1) * scale
        tl.store(shifts + positions, shift, mask=positions < q_len)
        mixed = mix(balanced)
        int8_scale, int8_factor = _scale_of(_absolute_max(mixed, 1))  # [128]
        query_int8 = _to_int8(mixed, (tl.where(scale < 0, -1.0, 1.0) * int8_factor)[:, None])
        rows = flat_q_block * BLOCK_Q + places
        tl.store(result_ptrs.quantized + rows[:, None] * HEAD_DIM_PADDED + channels[None, :], query_int8)
        unit = int8_scale * tl.abs(scale) * (LOG2_E * MIXED)
        tl.store(result_ptrs.scale + rows, tl.where(unit < SMALLEST_UNIT, SMALLEST_UNIT, unit))  # keeps NaN
    if WITH_SIMILARITY:
        tl.store(result_ptrs.similarity + flat_q_block, self_similarity(query, count))


def summarize_query(
    query: Tensor,
    scales: Scales,
    call: Call,
    seen: SeenTokens | None,
    *,
    quantized: bool,
    parts: int,
    similarity: bool,
) -> QuerySummary:
    """Compute the `QuerySummary` in one pass over Q.

    Args:
        scales: returned by `reduce.reduce_parts`, read if Q is quantized.
        quantized: whether to quantize Q.
        parts: number of equal parts of a block whose means are computed.
        similarity: whether to compute the similarity of each block.
    """
    shape = call.shape
    width = padded(shape.head_dim)
    heads = shape.batch * shape.heads
    length = shape.q_blocks * geometry.BLOCK_Q
    summary = QuerySummary(
        quantized=buffer_like(query, quantized, shape.batch, shape.heads, length, width, dtype=torch.int8),
        scale=buffer_like(query, quantized, heads, length),
        lse_shift=buffer_like(query, quantized, heads, shape.q_len),
        mean=buffer_like(query, parts > 0, heads, shape.q_blocks, parts, width),
        similarity=buffer_like(query, similarity, heads, shape.q_blocks),
    )
    if not (quantized or parts or similarity):
        return summary
    queries_seen, seen_strides, has_seen = seen_queries(seen, call, query)
    launch(
        quantize_query_kernel,
        shape.q_blocks * heads,
        query_ptr=query,
        seen_ptr=queries_seen,
        key_mean_ptr=scales.key_mean,
        balance_ptr=scales.balance,
        result_ptrs=summary,
        segments_ptr=segments_argument(call, query),
        query_strides=strides_of(query),
        seen_strides=seen_strides,
        scale=call.scale,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        q_len=shape.q_len,
        q_blocks=shape.q_blocks,
        first_query=first_query(call),
        HEAD_DIM=shape.head_dim,
        HEAD_DIM_PADDED=width,
        HAS_SEEN=has_seen,
        WITH_INT8=quantized,
        PARTS=parts,
        WITH_SIMILARITY=similarity,
        PACKED=call.segments is not None,
        num_warps=configs.stage_config("quantize_query", width).warps,
    )
    return summary


def quantize_key_value(
    key: Tensor, value: Tensor, scales: Scales, call: Call, seen: Tensor | None, *, are_means: bool = False
) -> QuantizedKeyValue:
    """Quantize K, and V unless it is FP16 already.

    Args:
        key, value: (B, Hkv, Sk, width), K and V of the call; or the means that replace skipped blocks, one per block.
        scales: returned by `reduce.reduce_parts`.
        seen: (B | 1, Hkv | 1, Sk) bool, visible keys under the mask or usable means; None without a mask.
    """
    shape = call.shape
    width, value_width = padded(shape.head_dim), padded(shape.value_dim)
    heads = (shape.batch, shape.kv_heads)
    kv_len, is_packed = shape.kv_len, call.segments is not None
    if are_means:
        kv_len, is_packed = shape.kv_blocks, False
    kv_blocks = geometry.ceil_div(kv_len, geometry.BLOCK_K)
    length = kv_blocks * geometry.BLOCK_K
    rounded_value, kind = value, "none"
    if call.has_fp8_values:
        rounded_value, kind = buffer_like(key, True, *heads, value_width, length, dtype=torch.float8_e4m3fn), "fp8"
    elif value.dtype != torch.float16 or is_packed:
        rounded_value, kind = buffer_like(key, True, *heads, length, value_width, dtype=torch.float16), "fp16"
    quantized = QuantizedKeyValue(
        key=buffer_like(key, True, *heads, length, width, dtype=torch.int8),
        key_scale=buffer_like(key, True, *heads, kv_blocks, quant.KEY_GROUPS),
        value=rounded_value,
    )
    keys_seen, seen_strides = seen_argument(seen, (*heads, kv_len), key)
    launch(
        quantize_key_value_kernel,
        kv_blocks * shape.batch * shape.kv_heads,
        key_ptr=key,
        value_ptr=value,
        seen_ptr=keys_seen,
        scale_ptrs=scales,
        result_ptrs=quantized,
        segments_ptr=segments_argument(call, key),
        key_strides=strides_of(key),
        value_strides=strides_of(value),
        seen_strides=seen_strides,
        kv_heads=shape.kv_heads,
        kv_len=kv_len,
        kv_blocks=kv_blocks,
        first_key=0 if are_means else first_key(call),
        HEAD_DIM=shape.head_dim,
        VALUE_DIM=shape.value_dim,
        HEAD_DIM_PADDED=width,
        VALUE_DIM_PADDED=value_width,
        HAS_SEEN=seen is not None,
        PACKED=is_packed,
        VALUE_FORMAT=kind,
        num_warps=configs.stage_config("quantize_key_value").warps,
    )
    return quantized
