"""What FP8 loses beside a peak, and when it is looked for.

P is stored relative to the maximum of a tile and reaches 15 octaves below it. The keys that lie further down are lost,
127 at most for each tile that holds a peak. In a short sequence that is a share of the tail that can be seen: every
tile is looked through. In a long one only peaks that many queries share make up a share, attention sinks for
example. They are marked beforehand (`cuda.stages.peaks`).

Triton's kernel adds what was lost after its walk, when it knows which steps to take again: a branch in its steps took a
sixteenth of its speed, an answer of all threads a third (docs/lab/hopper.md). Hopper's takes such tiles in two parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparge.backends.gpu.primitives import (
    BLOCK_K,
    FAR,
    FP8_MAX,
    FP8_RANGE,
    FP8_RANGE_FACTOR,
    KEY_GROUPS,
    LOG2_FP8_MAX,
    in_fp8_token_order,
)
from sparge.backends.triton.softmax import (
    apply_mask,
    block_probability,
    block_scores,
    largest_of_groups,
    may_see,
    raw_scores,
)

STEPS = tl.constexpr(64)
"""Of a row: a number has so many bits."""
ALL_BUT_SIGN = tl.constexpr(2**63 - 1)


class Row(NamedTuple):
    """The queries of a program, and the blocks they keep.

    Attributes:
        query: codes [M, D].
        query_scale, query_positions: [M].
        indices_base: where the list of kept blocks begins; not read where all are kept.
        first_block: the first of all that are visible.
        count: how many there are.
        q_len, kv_len, first_offset, last_offset: of the call.
    """

    query: Any
    query_scale: Any
    query_positions: Any
    indices_base: Any
    first_block: Any
    count: Any
    q_len: Any
    kv_len: Any
    first_offset: Any
    last_offset: Any


class Head(NamedTuple):
    """Where a head's keys, their scales, its values [D_v, keys] and its mask begin, and the strides of both latter."""

    key_base: Any
    key_scale_base: Any
    value_base: Any
    value_stride: Any
    mask_base: Any
    mask_strides: Any


@triton.jit
def bits_of_far(group_max, local_max, step):
    """Bit ``step`` where all keys of a group [M, groups] lie too far below their row's maximum for FP8 to hold both."""
    is_far = (local_max[:, None] - group_max > FAR) & (group_max > float("-inf"))
    return is_far.to(tl.int64) << step


@triton.jit
def _either(first, second):
    return first | second


@triton.jit
def _bits_of_marked(row, head, first, ALL_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr):
    """A bit for each of 64 steps from place ``first`` of a row's list on: whether one of its blocks is marked."""
    places = first + tl.arange(0, STEPS * BLOCKS)
    blocks = row.first_block + places
    if not ALL_BLOCKS:
        blocks = tl.load(row.indices_base + places, mask=places < row.count, other=0)
    is_marked = tl.load(head.key_scale_base + blocks * KEY_GROUPS, mask=places < row.count, other=0.0) < 0
    has_marked = tl.max(tl.reshape(is_marked.to(tl.int64), (STEPS, BLOCKS)), 1)
    return tl.sum(has_marked << tl.arange(0, STEPS), 0)


@triton.jit
def _block_again(
    row,
    head,
    place,
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
    MASK: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    LOWEST: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A key block of a row's list: keys, what an integer is worth, scores (raw without a mask), their maximum.

    At the list's end, or beyond, all scores are -inf.
    """
    width: tl.constexpr = row.query.shape[1]
    block = tl.minimum(place, row.count - 1)
    block = row.first_block + block if ALL_BLOCKS else tl.load(row.indices_base + block)
    within = tl.arange(0, BLOCK_K)
    keys = within + block.to(tl.int64) * BLOCK_K
    raw = raw_scores(row.query, head.key_base + keys[:, None] * width + tl.arange(0, width)[None, :], BLOCK_M, BLOCK_K)
    key_scale = tl.abs(tl.load(head.key_scale_base + block * KEY_GROUPS + tl.arange(0, KEY_GROUPS)))
    unit = row.query_scale[:, None] * key_scale[None, :]
    key_positions = within + block * BLOCK_K
    allowed = may_see(
        row.query_positions, key_positions, row.kv_len, row.first_offset, row.last_offset, HAS_FIRST, HAS_LAST
    )
    allowed = allowed & (place < row.count)
    if MASK != "none":
        scores = apply_mask(
            block_scores(raw, unit, BLOCK_M),
            allowed,
            row.query_positions,
            key_positions,
            head.mask_base,
            head.mask_strides[2],
            head.mask_strides[3],
            row.q_len,
            row.kv_len,
            MASK,
            MASK_PER_QUERY,
            LOWEST,
        )
        return keys, unit, scores, tl.max(scores, 1)
    else:
        raw = tl.where(allowed, raw, float("-inf"))
        return keys, unit, raw, tl.max(largest_of_groups(raw, unit, BLOCK_M), 1)


@triton.jit
def _lost(scores, unit, one, MASK: tl.constexpr, BLOCK_M: tl.constexpr):
    """What FP8 loses of each P far below the largest, in units of 2^-FP8_RANGE, as the left operand of P V."""
    probability = tl.exp2(scores - one[:, None]) if MASK != "none" else block_probability(scores, unit, one, BLOCK_M)
    rest = (probability - probability.to(tl.float8e4nv).to(tl.float32)) * FP8_RANGE_FACTOR
    is_far = probability < FP8_MAX / FP8_RANGE_FACTOR
    return in_fp8_token_order(tl.where(is_far, rest, 0.0).to(tl.float8e4nv))


@triton.jit
def _lost_in_step(
    row,
    head,
    place,
    origin,
    VALUE_DIM_PADDED: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
    MASK: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    LOWEST: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """What FP8 lost of the P V of a step, [M, D_v], counting from ``origin``."""
    keys, unit, scores, step_max = _block_again(
        row, head, place, HAS_FIRST, HAS_LAST, MASK, MASK_PER_QUERY, LOWEST, ALL_BLOCKS, BLOCK_M
    )
    if BLOCKS == 2:
        last_keys, last_unit, last_scores, last_max = _block_again(
            row, head, place + 1, HAS_FIRST, HAS_LAST, MASK, MASK_PER_QUERY, LOWEST, ALL_BLOCKS, BLOCK_M
        )
        step_max = tl.maximum(step_max, last_max)
    channels = tl.arange(0, VALUE_DIM_PADDED).to(tl.int64)[:, None] * head.value_stride
    one = tl.where(step_max == float("-inf"), 0.0, step_max) - LOG2_FP8_MAX
    result = tl.dot(_lost(scores, unit, one, MASK, BLOCK_M), tl.load(head.value_base + channels + keys[None, :]).T)
    if BLOCKS == 2:
        value = tl.load(head.value_base + channels + last_keys[None, :]).T
        result += tl.dot(_lost(last_scores, last_unit, one, MASK, BLOCK_M), value)
    factor = tl.where(step_max == float("-inf"), 0.0, tl.exp2(step_max - origin - FP8_RANGE))
    return result * factor[:, None]


@triton.jit
def add_lost(
    accumulator,
    origin,
    far_steps,
    row,
    head,
    VALUE_DIM_PADDED: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
    MASK: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    LOWEST: tl.constexpr,
    PEAKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A row's P V with what FP8 lost beside peaks. Row sums are taken before P is rounded, and need nothing.

    Args:
        origin: [M], the score that P V counts from.
        far_steps: all `bits_of_far` of the walk, where PEAKS is "every_tile".
        row: `Row`.
        head: `Head`.
    """
    for first in tl.range(0, row.count, STEPS * BLOCKS, num_stages=1):
        if PEAKS == "every_tile":  # once: there are no more steps than bits
            steps = tl.reduce(tl.reduce(far_steps, 1, _either), 0, _either)
        else:
            steps = _bits_of_marked(row, head, first, ALL_BLOCKS, BLOCKS)
        place = first
        while steps != 0:
            if (steps & 1) != 0:
                accumulator += _lost_in_step(
                    row,
                    head,
                    place,
                    origin,
                    VALUE_DIM_PADDED,
                    HAS_FIRST,
                    HAS_LAST,
                    MASK,
                    MASK_PER_QUERY,
                    LOWEST,
                    ALL_BLOCKS,
                    BLOCK_M,
                    BLOCKS,
                )
            steps = (steps >> 1) & ALL_BUT_SIGN
            place += BLOCKS
    return accumulator
