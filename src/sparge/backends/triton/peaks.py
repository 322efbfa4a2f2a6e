"""Correction of P V where FP8 loses small probabilities beside a peak.

P is stored relative to the maximum of a step, and FP8 reaches 15 powers of two below it. Keys further down are lost, at
most 127 for each step that holds a peak. In a short sequence these keys are a visible share of the tail, so every step
is checked. In a long one only peaks that many queries share matter, such as attention sinks. Their blocks are marked
beforehand (`gpu.stages.peaks`).

The kernel adds the loss after its main loop, once the steps to repeat are known: a branch in the loop cost 6 % of its
speed, a vote of all threads 33 % (docs/lab/hopper.md). Hopper's kernel computes such steps in two parts.
"""

from __future__ import annotations

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
from sparge.backends.triton.scores import apply_mask, block_scores, group_maxima, may_see, raw_scores
from sparge.backends.triton.softmax import block_probability
from sparge.backends.triton.tiles import kept_block

STEPS = tl.constexpr(64)
"""Steps whose flags fit into one integer."""
ALL_BUT_SIGN = tl.constexpr(2**63 - 1)


@triton.jit
def far_group_bits(group_max, local_max, step):
    """Return [BLOCK_M, KEY_GROUPS]: bit ``step`` is set where a group is too far below its row maximum for FP8."""
    is_far = (local_max[:, None] - group_max > FAR) & (group_max > float("-inf"))
    return is_far.to(tl.int64) << step


@triton.jit
def _either(first, second):
    return first | second


@triton.jit
def _marked_step_bits(head, blocks, first, SPEC: tl.constexpr):
    """Return an integer with one bit for each of 64 steps from place ``first`` on: a block of the step is marked."""
    BLOCKS: tl.constexpr = SPEC.blocks
    places = first + tl.arange(0, STEPS * BLOCKS)
    numbers = blocks.first + places
    if not SPEC.all_blocks:
        numbers = tl.load(blocks.indices_base + places, mask=places < blocks.count, other=0)
    is_marked = tl.load(head.key_scale_base + numbers * KEY_GROUPS, mask=places < blocks.count, other=0.0) < 0
    has_marked = tl.max(tl.reshape(is_marked.to(tl.int64), (STEPS, BLOCKS)), 1)
    return tl.sum(has_marked << tl.arange(0, STEPS), 0)


@triton.jit
def _scores_again(queries, head, mask, blocks, place, lengths, SPEC: tl.constexpr):
    """Return the key positions [64] of a block of the list, the unit of its raw scores, its scores and row maxima.

    Scores are raw without a mask. At the end of the list and beyond, all of them are -inf.
    """
    BLOCK_M: tl.constexpr = SPEC.block_m
    within = tl.arange(0, BLOCK_K)
    channels = tl.arange(0, SPEC.head_dim_padded)
    block = kept_block(blocks, tl.minimum(place, blocks.count - 1), SPEC)
    keys = within + block.to(tl.int64) * BLOCK_K
    key_ptrs = head.key_base + keys[:, None] * SPEC.head_dim_padded + channels[None, :]
    raw = raw_scores(queries.tile, key_ptrs, BLOCK_M, BLOCK_K)  # [BLOCK_M, 64]
    key_scale = tl.abs(tl.load(head.key_scale_base + block * KEY_GROUPS + tl.arange(0, KEY_GROUPS)))
    unit = queries.scale[:, None] * key_scale[None, :]  # [BLOCK_M, KEY_GROUPS]
    key_positions = within + block * BLOCK_K
    allowed = may_see(queries.positions, key_positions, lengths, SPEC) & (place < blocks.count)
    if SPEC.mask != "none":
        scores = block_scores(raw, unit, BLOCK_M)
        scores = apply_mask(scores, allowed, queries.positions, key_positions, mask, lengths, SPEC)
        return keys, unit, scores, tl.max(scores, 1)
    else:
        raw = tl.where(allowed, raw, float("-inf"))
        return keys, unit, raw, tl.max(group_maxima(raw, unit, BLOCK_M), 1)


@triton.jit
def _lost_probability(scores, unit, p_ref, SPEC: tl.constexpr):
    """Return the rounding loss of FP8 for each small P, in units of 2^-FP8_RANGE, as the left operand of P V."""
    if SPEC.mask != "none":
        probability = tl.exp2(scores - p_ref[:, None])
    else:
        probability = block_probability(scores, unit, p_ref, SPEC.block_m)
    loss = (probability - probability.to(tl.float8e4nv).to(tl.float32)) * FP8_RANGE_FACTOR
    is_small = probability < FP8_MAX / FP8_RANGE_FACTOR
    return in_fp8_token_order(tl.where(is_small, loss, 0.0).to(tl.float8e4nv))


@triton.jit
def _lost_in_step(queries, head, mask, blocks, place, row_ref, lengths, SPEC: tl.constexpr):
    """Return the part of a step's P V that FP8 lost, [BLOCK_M, VALUE_DIM], relative to ``row_ref``."""
    keys, unit, scores, step_max = _scores_again(queries, head, mask, blocks, place, lengths, SPEC)
    if SPEC.blocks == 2:
        last_keys, last_unit, last_scores, last_max = _scores_again(
            queries, head, mask, blocks, place + 1, lengths, SPEC
        )
        step_max = tl.maximum(step_max, last_max)
    channels = tl.arange(0, SPEC.value_dim_padded).to(tl.int64)[:, None] * head.value_stride
    p_ref = tl.where(step_max == float("-inf"), 0.0, step_max) - LOG2_FP8_MAX
    value_ptrs = head.value_base + channels + keys[None, :]
    result = tl.dot(_lost_probability(scores, unit, p_ref, SPEC), tl.load(value_ptrs).T)
    if SPEC.blocks == 2:
        value = tl.load(head.value_base + channels + last_keys[None, :]).T
        result += tl.dot(_lost_probability(last_scores, last_unit, p_ref, SPEC), value)
    factor = tl.where(step_max == float("-inf"), 0.0, tl.exp2(step_max - row_ref - FP8_RANGE))
    return result * factor[:, None]


@triton.jit
def add_lost(accumulator, row_ref, far_steps, queries, head, mask, blocks, lengths, SPEC: tl.constexpr):
    """Return P V [BLOCK_M, VALUE_DIM] including the part that FP8 lost. Row sums, taken before P is rounded, do not
    change.

    Args:
        row_ref: [BLOCK_M], of ``accumulator``.
        far_steps: all `far_group_bits` of the main loop, if SPEC.peaks is "every_tile".
    """
    for first in tl.range(0, blocks.count, STEPS * SPEC.blocks, num_stages=1):
        if SPEC.peaks == "every_tile":  # one iteration: a short sequence has at most 64 steps
            steps = tl.reduce(tl.reduce(far_steps, 1, _either), 0, _either)
        else:
            steps = _marked_step_bits(head, blocks, first, SPEC)
        place = first
        while steps != 0:
            if (steps & 1) != 0:
                accumulator += _lost_in_step(queries, head, mask, blocks, place, row_ref, lengths, SPEC)
            steps = (steps >> 1) & ALL_BUT_SIGN
            place += SPEC.blocks
    return accumulator
