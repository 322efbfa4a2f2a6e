"""From products to P: what the attention kernel computes of a tile between its two matrix products.

    raw_scores -> largest_of_groups -> block_probability       INT8, no mask: scores stay raw until P
    raw_scores -> block_scores -> apply_mask           INT8 with a mask

A tile is one or two key blocks of 64. Raw scores are INT8 products as floats above 1.5 * 2^23; a group is the keys that
share a scale (`eight_bits.KEY_GROUPS`); scores count octaves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparge.backends.gpu.primitives import BLOCK_K, FLOAT_OFFSET, INT32_AS_FLOAT, LOG2_E, by_group


class Sums(NamedTuple):
    """What the online softmax of a tile of queries has added up: see `attention_kernel`."""

    accumulator: Any
    row_sum: Any
    row_max: Any
    origin: Any


@triton.jit
def raw_scores(query, key_ptrs, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr):
    """INT8 products of Q and a tile of K [M, N] as floats above 1.5 * 2^23."""
    start_bits = tl.full((BLOCK_M, COLUMNS), INT32_AS_FLOAT, tl.int32)
    raw = tl.dot(query, tl.load(key_ptrs).T, acc=start_bits, out_dtype=tl.int32)
    return raw.to(tl.float32, bitcast=True)


@triton.jit
def halves(tile, BLOCK_M: tl.constexpr):
    """A tile [M, 128] as its two key blocks [M, 64]."""
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_M, 2, BLOCK_K)), (0, 2, 1)))


@triton.jit
def side_by_side(first, last, BLOCK_M: tl.constexpr):
    """Two key blocks [M, 64] as one tile [M, 128]."""
    return tl.reshape(tl.permute(tl.join(first, last), (0, 2, 1)), (BLOCK_M, 2 * BLOCK_K))


@triton.jit
def largest_of_groups(raw, unit, BLOCK_M: tl.constexpr):
    """Maximum of each group of a key block's INT8 scores, [M, groups], in octaves; ``unit`` is an integer's worth."""
    return (tl.max(tl.max(by_group(raw, BLOCK_M), 3), 1) - FLOAT_OFFSET) * unit


@triton.jit
def block_scores(raw, unit, BLOCK_M: tl.constexpr):
    """A key block's INT8 scores in octaves, [M, 64]."""
    return tl.reshape((by_group(raw, BLOCK_M) - FLOAT_OFFSET) * unit[:, None, :, None], (BLOCK_M, BLOCK_K))


@triton.jit
def block_probability(raw, unit, origin, BLOCK_M: tl.constexpr):
    """P of a key block's INT8 scores [M, 64] relative to a score ``origin`` [M].

    What is subtracted is of the size of the offset and rounded (once: fma), by up to three quarters of an integer, and
    the maximum by a quarter. One integer more keeps P within FP8's range: above it P V would cut off what the row sum
    counts. Q and K are rounded by far more.
    """
    subtrahend = tl.fma(unit, FLOAT_OFFSET + 1.0, origin[:, None])
    exponent = by_group(raw, BLOCK_M) * unit[:, None, :, None] - subtrahend[:, None, :, None]
    return tl.reshape(tl.exp2(exponent), (BLOCK_M, BLOCK_K))


@triton.jit
def may_see(
    query_positions,
    key_positions,
    kv_len,
    first_offset,
    last_offset,
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
):
    """[M, N]: the key exists and lies neither before the query's first one nor behind its last one."""
    allowed = (key_positions < kv_len)[None, :] & (query_positions >= 0)[:, None]
    if HAS_LAST:
        allowed = allowed & (key_positions[None, :] <= query_positions[:, None] + last_offset)
    if HAS_FIRST:
        allowed = allowed & (key_positions[None, :] >= query_positions[:, None] + first_offset)
    return allowed


@triton.jit
def apply_mask(
    scores,
    allowed,
    query_positions,
    key_positions,
    mask_base,
    mask_stride_q,
    mask_stride_k,
    q_len,
    kv_len,
    MASK: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    LOWEST: tl.constexpr,
):
    """Scores [M, N] in log2 units with a mask's bias added and what it hides at -inf."""
    present = (key_positions < kv_len)[None, :]
    offsets = key_positions.to(tl.int64)[None, :] * mask_stride_k
    if MASK_PER_QUERY:
        offsets = offsets + query_positions.to(tl.int64)[:, None] * mask_stride_q
        present = present & (query_positions < q_len)[:, None]
    entries = tl.load(mask_base + offsets, mask=present, other=0)
    if MASK == "bool":
        allowed = allowed & (entries != 0)
    else:
        bias = entries.to(tl.float32)
        allowed = allowed & ((bias <= LOWEST) == 0)  # NaN stays visible, and so propagates
        scores = scores + bias * LOG2_E
    return tl.where(allowed, scores, float("-inf"))


@triton.jit
def load_values(
    pointers,
    channels,
    key_positions,
    kv_len,
    first_offset,
    seen_base,
    seen_stride,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_SEEN: tl.constexpr,
):
    """16-bit values of a tile [N, D_v], 0 where nobody sees them: they may hold anything, and 0 times NaN is NaN."""
    in_range = key_positions < kv_len
    present = in_range[:, None]
    if VALUE_DIM != VALUE_DIM_PADDED:
        present = present & (channels < VALUE_DIM)[None, :]
    if HAS_FIRST:
        present = present & (key_positions >= first_offset)[:, None]
    if HAS_SEEN:
        seen = tl.load(seen_base + key_positions * seen_stride, mask=in_range, other=0)
        present = present & (seen != 0)[:, None]
    return tl.load(pointers, mask=present, other=0.0)
