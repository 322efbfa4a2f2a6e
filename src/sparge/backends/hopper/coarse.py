"""Scores from unquantized Q and K, for stages that INT8 would round too coarsely (`quantization.is_coarse`).

    s = scale (q . k) - lse_shift          the same score that quantized, smoothed keys represent, in float32

The producer flags such a stage (`COARSE`) if its largest scales exceed a limit. The consumers then read Q and K from
global memory, 16 channels at a time, as operands of the synchronous matrix instruction (mma), whose accumulator has the
same layout as that of the warpgroup instruction (wgmma). This is slow. It happens if logits reach hundreds of nats, or
if one token is 1000 times as large as the others. All inputs are kernel arguments or in shared memory, so other stages
need no registers for it.
"""

from __future__ import annotations

from sparge.backends.gpu import primitives
from sparge.backends.gpu.gluon import aggregate, gl, jit, mma_v2
from sparge.backends.gpu.primitives import BLOCK_K, KV_START, LOG2_E, Q_START, SEGMENT_COLUMNS
from sparge.backends.hopper.aggregates import MEANS
from sparge.backends.hopper.mma import join_blocks
from sparge.backends.hopper.scheduler import load_coordinates, load_number
from sparge.backends.hopper.spec import ROWS

head_base = jit(primitives.head_base.fn)

CHANNELS = gl.constexpr(16)
"""Channels of Q and K that are multiplied at a time."""
TF32_BITS = gl.constexpr(-(2**13))
"""Mask of the float32 bits that TF32 keeps."""


@aggregate
class Tokens:
    """Tokens in global memory: pointer to the first token, stride, and index of the last token.

    Indices beyond the last token read the last token; their scores are masked.
    """

    base: gl.tensor
    stride: gl.tensor | gl.constexpr
    last: gl.tensor


@jit
def _part_of(numbers, is_rest):
    """Return the part of float32 numbers that TF32 represents, or the remainder (``is_rest``)."""
    upper = (numbers.to(gl.int32, bitcast=True) & TF32_BITS).to(gl.float32, bitcast=True)
    return gl.where(is_rest, numbers - upper, upper)


@jit
def _load_channels(pointers, is_channel, SPEC: gl.constexpr):
    """Load channels of tokens, 0 beyond the last channel."""
    if SPEC.exact_dim % CHANNELS == 0:
        return gl.load(pointers)
    else:
        return gl.load(pointers, mask=is_channel, other=0.0)


@jit
def _block_products(queries, keys, zero, SPEC: gl.constexpr):
    """Compute q . k of 64 queries and 64 keys, [64, 64], from float32 or 16-bit keys.

    Args:
        queries, keys: `Tokens`, of which the first 64 are used.
        zero: 0 as a run-time value. With a constant, the compiler would hoist the address computations out of the main
            loop and keep their results in registers.
    """
    query_base, key_base = queries.base, keys.base
    is_wide: gl.constexpr = key_base.dtype.element_ty == gl.float32
    query_layout: gl.constexpr = gl.DotOperandLayout(0, SPEC.exact_layout, 1 if is_wide else 2)
    key_layout: gl.constexpr = gl.DotOperandLayout(1, SPEC.exact_layout, 1 if is_wide else 2)
    query_rows = gl.minimum(zero + gl.arange(0, ROWS, gl.SliceLayout(1, query_layout)), queries.last)
    key_rows = gl.minimum(zero + gl.arange(0, BLOCK_K, gl.SliceLayout(0, key_layout)), keys.last)
    scores = gl.full((ROWS, BLOCK_K), 0.0, gl.float32, SPEC.exact_layout)  # [64, 64]
    # Three TF32 passes for float32 keys: high Q x high K, low Q x high K, high Q x low K
    width: gl.constexpr = (SPEC.exact_dim + CHANNELS - 1) // CHANNELS * CHANNELS
    passes: gl.constexpr = 3 if is_wide else 1
    for step in range(0, passes * width, CHANNELS):
        first = step + zero
        if is_wide:
            first = step % width + zero
        query_channels = first + gl.arange(0, CHANNELS, gl.SliceLayout(0, query_layout))[None, :]
        key_channels = first + gl.arange(0, CHANNELS, gl.SliceLayout(1, key_layout))[:, None]
        query_ptrs = query_base + ((query_rows * queries.stride)[:, None] + query_channels)
        key_ptrs = key_base + ((key_rows * keys.stride)[None, :] + key_channels)
        query = _load_channels(query_ptrs, query_channels < SPEC.exact_dim, SPEC)  # [64, CHANNELS]
        key = _load_channels(key_ptrs, key_channels < SPEC.exact_dim, SPEC)  # [CHANNELS, 64]
        query = query.to(key.dtype)
        if is_wide:
            query = _part_of(query, step // width == 1)
            key = _part_of(key, step // width == 2)
        scores = mma_v2(query, key, scores, input_precision="tf32")
    return scores


@jit
def _tokens_from(tokens, first):
    """Return `Tokens` that start at index ``first``."""
    return Tokens(base=tokens.base + first.to(gl.int64) * tokens.stride, stride=tokens.stride, last=tokens.last - first)


@jit
def _products(queries, keys, metadata, stage, zero, SPEC: gl.constexpr):
    """Compute q . k of a stage's key blocks, [64, keys], given all keys of a head."""
    place = stage * SPEC.blocks
    first_key = load_number(metadata.block.index(place), SPEC) * BLOCK_K
    first = _block_products(queries, _tokens_from(keys, first_key), zero, SPEC)
    second = first
    if SPEC.blocks == 2:
        second_key = load_number(metadata.block.index(place + 1), SPEC) * BLOCK_K
        second = _block_products(queries, _tokens_from(keys, second_key), zero, SPEC)
    return join_blocks(first, second, SPEC)


@jit
def exact_scores(exact, metadata, tile, stage, flags, SPEC: gl.constexpr):
    """Compute scores of a stage from unquantized Q and K or block means, float32 [64, keys] in score units."""
    # Coordinates
    sizes = exact.sizes
    first_query, lengths = tile.first_query, tile.lengths
    coordinates = load_coordinates(metadata, tile.query_stage, sizes, SPEC)  # reloaded to save registers
    zero = coordinates.head >> 31  # see `_block_products`
    batch = coordinates.batch.to(gl.int64)
    query_base = head_base(exact.ptrs.query, exact.query_strides, batch, coordinates.head.to(gl.int64))
    key_base = head_base(exact.ptrs.key, exact.key_strides, batch, coordinates.kv_head.to(gl.int64))
    if SPEC.packed:
        segment_ptr = exact.segments_ptr + batch * SEGMENT_COLUMNS
        query_base += gl.load(segment_ptr + Q_START).to(gl.int64) * exact.query_strides[2]
        key_base += gl.load(segment_ptr + KV_START).to(gl.int64) * exact.key_strides[2]
    queries = Tokens(query_base, exact.query_strides[2], lengths.q_len - 1)
    queries = _tokens_from(queries, first_query)

    # Products
    keys = Tokens(key_base, exact.key_strides[2], lengths.kv_len - 1)
    if SPEC.means:
        if (flags & MEANS) != 0:
            flat_kv_head = batch * (sizes.heads // sizes.group) + coordinates.kv_head
            mean_base = exact.ptrs.mean_key + flat_kv_head * sizes.kv_blocks * SPEC.mean_stride
            means = Tokens(base=mean_base, stride=gl.to_tensor(SPEC.mean_stride), last=lengths.kv_blocks - 1)
            scores = _products(queries, means, metadata, stage, zero, SPEC)
        else:
            scores = _products(queries, keys, metadata, stage, zero, SPEC)
    else:
        scores = _products(queries, keys, metadata, stage, zero, SPEC)

    # Scale, and subtract the part of the scores that smoothing of K removes
    rows = gl.minimum(zero + gl.arange(0, ROWS, gl.SliceLayout(1, SPEC.scores_layout)), queries.last)
    shift = gl.load(exact.lse_shift_ptr + (coordinates.flat_head.to(gl.int64) * sizes.q_len + first_query) + rows)
    unit = LOG2_E * SPEC.units_per_log2
    return scores * (exact.softmax_scale * unit) - (shift * unit)[:, None]
