"""Constants and device functions that several kernels share."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparge.masks import geometry, segments, visibility
from sparge.numerics import quantization as quant

BLOCK_Q = tl.constexpr(geometry.BLOCK_Q)
BLOCK_K = tl.constexpr(geometry.BLOCK_K)

KEY_GROUPS = tl.constexpr(quant.KEY_GROUPS)

MIXED = tl.constexpr(quant.MIXED)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_FP8_MAX = tl.constexpr(math.log2(quant.FP8_MAX))
"""Log2 of E4M3's largest number, which P is multiplied by before it is rounded."""
INT32_AS_FLOAT = tl.constexpr(0x4B400000)
"""The bits of the float 1.5 * 2^23. If an INT32 accumulator starts at this number and |sum| is below 2^22, as
127 * 127 * 256 is, it has the bits of the float 1.5 * 2^23 + sum. INT8 products then need no conversion to float, which
costs as much as an exponential."""
FLOAT_OFFSET = tl.constexpr(12582912.0)
"""1.5 * 2^23, the offset of INT8 products that start at `INT32_AS_FLOAT`."""
INT8_MAX = tl.constexpr(quant.INT8_MAX)
FP16_MAX = tl.constexpr(quant.FP16_MAX)
FP8_MAX = tl.constexpr(quant.FP8_MAX)
FP8_RANGE = tl.constexpr(quant.FP8_RANGE)
FP8_RANGE_FACTOR = tl.constexpr(2.0**quant.FP8_RANGE)
FAR = tl.constexpr(13.0)
"""A group of keys is far below a row's maximum if its maximum is more than this many log2 units lower. FP8 may lose
such a group."""
FP16_ROOM = tl.constexpr(quant.FP16_ROOM)
ROW_REF_RANGE = tl.constexpr(quant.ROW_REF_RANGE)
SMALLEST_SCALE = tl.constexpr(1e-30)
"""Replaces a scale of 0. Hidden scores are -inf before scaling, and 0 times -inf would be NaN."""
SMALLEST_NORM = tl.constexpr(1e-12)
"""Lower bound of the norm that a token is divided by to become a unit vector, so that a token of zeros stays 0."""
NOWHERE = tl.constexpr(visibility.NOWHERE)
"""The first visible key of a block without visible keys."""

SEGMENT_COLUMNS = tl.constexpr(segments.TABLE_COLUMNS)
Q_START, Q_LEN = tl.constexpr(segments.Q_START), tl.constexpr(segments.Q_LEN)
KV_START, KV_LEN = tl.constexpr(segments.KV_START), tl.constexpr(segments.KV_LEN)
FIRST_ROW, TOP_LEVEL = tl.constexpr(segments.FIRST_ROW), tl.constexpr(segments.TOP_LEVEL)
SHIFT = tl.constexpr(segments.SHIFT)


def kernel(function: Callable[..., None], jit: Callable[..., Any] = triton.jit) -> Any:
    """Declare a kernel that `launch` can launch: Triton does not specialize it on the values of its numbers."""
    others = ("_desc", "_ptr", "_ptrs", "_strides")
    names = inspect.signature(function).parameters
    return jit(function, do_not_specialize=[name for name in names if not name.isupper() and not name.endswith(others)])


@triton.jit
def split_program(program, programs_of_head, heads):
    """Return the index of a program within its head, batch * heads + head (int64), the batch and the head."""
    flat_head = (program // programs_of_head).to(tl.int64)
    return program % programs_of_head, flat_head, flat_head // heads, flat_head % heads


@triton.jit
def head_base(ptr, strides, batch, head):
    """Return the pointer to a head of a tensor; ``strides`` starts with the strides of batch and head."""
    return ptr + batch * strides[0] + head * strides[1]


@triton.jit
def segment_queries(segments_ptr, batch):
    """Return the index of the first query of a segment in the pack (int64), and the number of queries."""
    segment = segments_ptr + batch * SEGMENT_COLUMNS
    return tl.load(segment + Q_START).to(tl.int64), tl.load(segment + Q_LEN)


@triton.jit
def segment_keys(segments_ptr, batch):
    """Return the index of the first key of a segment in the pack (int64), and the number of keys."""
    segment = segments_ptr + batch * SEGMENT_COLUMNS
    return tl.load(segment + KV_START).to(tl.int64), tl.load(segment + KV_LEN)


@triton.jit
def segment_number(segments_ptr, batch, COLUMN: tl.constexpr):
    """Load an entry of a segment's row in the table: FIRST_ROW, TOP_LEVEL or SHIFT."""
    return tl.load(segments_ptr + batch * SEGMENT_COLUMNS + COLUMN)


@triton.jit
def segment_sizes(segments_ptr, batch, first_offset, last_offset):
    """Return a segment's q_len, kv_len and window offsets. The arguments are the offsets of the longest segment."""
    _, q_len = segment_queries(segments_ptr, batch)
    _, kv_len = segment_keys(segments_ptr, batch)
    shift = segment_number(segments_ptr, batch, SHIFT)
    return q_len, kv_len, first_offset + shift, last_offset + shift


@triton.jit
def is_finite(values):
    """Return which float32 numbers are neither NaN nor infinite."""
    return tl.abs(values) < float("inf")


@triton.jit
def fp8_token_order(position):
    """Return the token at a position of the transposed FP8 values, permuted in groups of 16: 0 1 8 9 2 3 10 11 ...

    In the accumulator layout, a thread has columns 2t, 2t + 1, 2t + 8, 2t + 9 of the scores. As the left operand of the
    FP8 product, it must supply columns 4t to 4t + 3 of P. With values in this order, the thread already has the right
    columns, and no data moves between threads.
    """
    within = position % 16
    return position - within + (within // 4) * 2 + within % 2 + (within // 2 % 2) * 8


@triton.jit
def in_fp8_token_order(probability):
    """Return a tile [M, N] with its columns in `fp8_token_order`. No data moves between threads."""
    rows: tl.constexpr = probability.shape[0]
    columns: tl.constexpr = probability.shape[1]
    grouped = tl.reshape(probability, (rows, columns // 16, 2, 4, 2))
    return tl.reshape(tl.permute(grouped, (0, 1, 3, 2, 4)), (rows, columns))


@triton.jit
def by_group(raw, ROWS: tl.constexpr):
    """Return scores of a key block [M, 64] as [M, 8, KEY_GROUPS, 2]. A thread has one group, so no data moves."""
    return tl.reshape(raw, (ROWS, BLOCK_K // (2 * KEY_GROUPS), KEY_GROUPS, 2))


@triton.jit
def mix(tokens):
    """Return `quantization.mix` of tokens [N, D]. No data moves if a thread has 8 adjacent channels."""
    rows: tl.constexpr = tokens.shape[0]
    width: tl.constexpr = tokens.shape[1]
    sign = tl.where(tl.arange(0, width) % 4 == 3, -1.0 / MIXED, 1.0 / MIXED)
    sums = tl.reshape(tokens * sign[None, :], (rows, width // MIXED, 2, 2, 2))
    for _ in tl.static_range(3):
        first, second = tl.split(sums)
        sums = tl.permute(tl.join(first + second, first - second), (0, 1, 4, 2, 3))
    return tl.reshape(sums, (rows, width))


@triton.jit
def sampled_query(block, sample, first_seen, q_len, SAMPLES: tl.constexpr):
    """Return the position of an evenly spaced sample among the queries of a block, from ``first_seen`` on."""
    start = block * BLOCK_Q
    stop = tl.minimum(start + BLOCK_Q, q_len)
    seen_start = tl.maximum(start, first_seen)
    count = stop - seen_start
    pick = seen_start + (2 * sample + 1) * count // (2 * SAMPLES)
    return tl.where(count > 0, pick, start)


@triton.jit
def row_order(rows, SAMPLES: tl.constexpr):
    """Return the query block (from 0) and the sample that each row of a tile of samples represents.

    In a matrix product, a thread has rows r and r + 8 of 16. One half of a block's samples is in rows 0 to 7 and the
    other half in rows 8 to 15, so that sums over samples first add numbers of the same thread.
    """
    if SAMPLES == 1 or SAMPLES > 16:
        block = rows // SAMPLES
        sample = rows % SAMPLES
    else:
        half: tl.constexpr = SAMPLES // 2
        within = rows % 8
        block = rows // 16 * (16 // SAMPLES) + within // half
        sample = rows // 8 % 2 * half + within % half
    return block, sample


class Lengths(NamedTuple):
    """Lengths of a sequence or segment. Query i sees keys from i + first_offset to i + last_offset."""

    q_len: Any
    kv_len: Any
    first_offset: Any
    last_offset: Any


class TokenHead(NamedTuple):
    """Pointers to a head's tokens and their flags. Tokens ``first`` to ``stop`` - 1 are present unless hidden."""

    base: Any
    stride: Any
    seen_base: Any
    seen_stride: Any
    first: Any
    stop: Any


@triton.jit
def token_head(token_ptr, seen_ptr, token_strides, seen_strides, batch, head, span):
    """Return the `TokenHead` of tokens [B, H, S, D] and flags [B, H, S], given a `key_span` or `query_span`."""
    start, first, stop = span
    base = head_base(token_ptr, token_strides, batch, head) + start * token_strides[2]
    seen_base = head_base(seen_ptr, seen_strides, batch, head)
    return TokenHead(base, token_strides[2], seen_base, seen_strides[2], first, stop)


@triton.jit
def key_span(segments_ptr, batch, first_key, kv_len, PACKED: tl.constexpr):
    """Return the index in memory of a sequence's first key, the first key that some query sees, and the end of keys."""
    if PACKED:
        start, kv_len = segment_keys(segments_ptr, batch)
        first_key = tl.maximum(first_key + segment_number(segments_ptr, batch, SHIFT), 0)
    else:
        start = 0
    return start, first_key, kv_len


@triton.jit
def query_span(segments_ptr, batch, first_query, q_len, PACKED: tl.constexpr):
    """Return the index in memory of a sequence's first query, the first one that sees a key, and the end of queries."""
    if PACKED:
        start, q_len = segment_queries(segments_ptr, batch)
        first_query = tl.maximum(first_query - segment_number(segments_ptr, batch, SHIFT), 0)
    else:
        start = 0
    return start, first_query, q_len


@triton.jit
def load_tokens(head, tokens, DIM: tl.constexpr, PADDED: tl.constexpr, HAS_SEEN: tl.constexpr):
    """Load tokens [N, PADDED] of a `TokenHead` in float32, 0 if absent, and return which tokens are present, [N].

    HAS_SEEN: tokens have flags.
    """
    present = (tokens >= head.first) & (tokens < head.stop)
    if HAS_SEEN:
        present = present & (tl.load(head.seen_base + tokens * head.seen_stride, mask=present, other=0) != 0)
    channels = tl.arange(0, PADDED)
    inside = present[:, None]
    if DIM != PADDED:
        inside = inside & (channels < DIM)[None, :]
    token_ptrs = head.base + tokens.to(tl.int64)[:, None] * head.stride + channels[None, :]
    return tl.load(token_ptrs, mask=inside, other=0.0).to(tl.float32), present


@triton.jit
def self_similarity(tokens, count):
    """Return |mean of the unit vectors|^2 over the ``count`` present tokens of a tile [N, D]; absent tokens are 0."""
    norm = tl.sqrt(tl.sum(tokens * tokens, 1))
    units = tokens / tl.maximum(norm, SMALLEST_NORM)[:, None]
    mean = tl.sum(units, 0) / count
    return tl.sum(mean * mean)
