"""Correction of P V if FP8 loses small probabilities beside a peak.

P is relative to the maximum of a step, and FP8 covers 15 powers of two below the maximum. Keys further below are lost:
at most 127 for each step that contains a peak. In a short sequence, these keys have a noticeable share of the
attention, so every step is checked. In a long sequence, only peaks that many queries share matter, such as attention
sinks. Their blocks are marked beforehand (`gpu.stages.peaks`).

After its main loop, the kernel recomputes the affected steps and adds what was lost. A branch in the loop made the
kernel 6 % slower, a vote of all threads 33 % (docs/lab/hopper.md). The Hopper kernel computes such steps in two parts
instead.
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
from sparge.backends.triton.tiles import block_at

STEPS = tl.constexpr(64)
"""Steps whose flags fit into one integer."""
ALL_BUT_SIGN = tl.constexpr(2**63 - 1)
"""Mask that turns an arithmetic shift to the right into a logical one."""


@triton.jit
def far_group_bits(group_max, local_max, step):
    """Return int64 [BLOCK_M, KEY_GROUPS] with bit ``step`` set if a group is too far below its row maximum for FP8."""
    is_far = (local_max[:, None] - group_max > FAR) & (group_max > float("-inf"))
    return is_far.to(tl.int64) << step


@triton.jit
def _bitwise_or(first, second):
    return first | second


@triton.jit
def _marked_step_bits(head, blocks, first, SPEC: tl.constexpr):
    """Return an integer with one bit for each of 64 steps from list index ``first`` on, set if a block is marked."""
    BLOCKS: tl.constexpr = SPEC.blocks
    indices = first + tl.arange(0, STEPS * BLOCKS)
    numbers = blocks.first + indices
    if not SPEC.all_blocks:
        numbers = tl.load(blocks.indices_base + indices, mask=indices < blocks.count, other=0)
    is_marked = tl.load(head.key_scale_base + numbers * KEY_GROUPS, mask=indices < blocks.count, other=0.0) < 0
    has_marked = tl.max(tl.reshape(is_marked.to(tl.int64), (STEPS, BLOCKS)), 1)
    return tl.sum(has_marked << tl.arange(0, STEPS), 0)


@triton.jit
def _recompute_scores(queries, head, mask, blocks, index, lengths, SPEC: tl.constexpr):
    """Return key positions [64], score unit, scores [BLOCK_M, 64] and row maxima of the block at a list index.

    Without a mask, the scores are raw. Beyond the end of the list, all scores are -inf.
    """
    BLOCK_M: tl.constexpr = SPEC.block_m
    # Q K^T
    within = tl.arange(0, BLOCK_K)
    channels = tl.arange(0, SPEC.head_dim_padded)
    block = block_at(blocks, tl.minimum(index, blocks.count - 1), SPEC)
    keys = within + block.to(tl.int64) * BLOCK_K
    key_ptrs = head.key_base + keys[:, None] * SPEC.head_dim_padded + channels[None, :]
    raw = raw_scores(queries.tile, key_ptrs, BLOCK_M, BLOCK_K)  # [BLOCK_M, 64]
    key_scale = tl.abs(tl.load(head.key_scale_base + block * KEY_GROUPS + tl.arange(0, KEY_GROUPS)))
    unit = queries.scale[:, None] * key_scale[None, :]  # [BLOCK_M, KEY_GROUPS]

    # Visibility, and row maxima
    key_positions = within + block * BLOCK_K
    allowed = may_see(queries.positions, key_positions, lengths, SPEC) & (index < blocks.count)
    if SPEC.mask != "none":
        scores = block_scores(raw, unit, BLOCK_M)
        scores = apply_mask(scores, allowed, queries.positions, key_positions, mask, lengths, SPEC)
        return keys, unit, scores, tl.max(scores, 1)
    else:
        raw = tl.where(allowed, raw, float("-inf"))
        return keys, unit, raw, tl.max(group_maxima(raw, unit, BLOCK_M), 1)


@triton.jit
def _probability_loss(scores, unit, p_ref, SPEC: tl.constexpr):
    """Return what FP8 rounding removes from each small P, times 2^FP8_RANGE, as the left operand of P V."""
    if SPEC.mask != "none":
        probability = tl.exp2(scores - p_ref[:, None])
    else:
        probability = block_probability(scores, unit, p_ref, SPEC.block_m)
    loss = (probability - probability.to(tl.float8e4nv).to(tl.float32)) * FP8_RANGE_FACTOR
    is_small = probability < FP8_MAX / FP8_RANGE_FACTOR
    return in_fp8_token_order(tl.where(is_small, loss, 0.0).to(tl.float8e4nv))


@triton.jit
def _step_loss(queries, head, mask, blocks, index, row_ref, lengths, SPEC: tl.constexpr):
    """Return the part of P V that FP8 lost in the step at an index, [BLOCK_M, VALUE_DIM], relative to ``row_ref``."""
    keys, unit, scores, step_max = _recompute_scores(queries, head, mask, blocks, index, lengths, SPEC)
    if SPEC.blocks == 2:
        last_keys, last_unit, last_scores, last_max = _recompute_scores(
            queries, head, mask, blocks, index + 1, lengths, SPEC
        )
        step_max = tl.maximum(step_max, last_max)
    channels = tl.arange(0, SPEC.value_dim_padded).to(tl.int64)[:, None] * head.value_stride
    p_ref = tl.where(step_max == float("-inf"), 0.0, step_max) - LOG2_FP8_MAX
    value_ptrs = head.value_base + channels + keys[None, :]
    result = tl.dot(_probability_loss(scores, unit, p_ref, SPEC), tl.load(value_ptrs).T)
    if SPEC.blocks == 2:
        value = tl.load(head.value_base + channels + last_keys[None, :]).T
        result += tl.dot(_probability_loss(last_scores, last_unit, p_ref, SPEC), value)
    factor = tl.where(step_max == float("-inf"), 0.0, tl.exp2(step_max - row_ref - FP8_RANGE))
    return result * factor[:, None]


@triton.jit
def add_fp8_loss(accumulator, row_ref, far_steps, queries, head, mask, blocks, lengths, SPEC: tl.constexpr):
    """Return the accumulator [BLOCK_M, VALUE_DIM] plus the part of P V that FP8 lost.

    Row sums need no correction, because they add P before rounding.

    Args:
        row_ref: [BLOCK_M], row reference of the accumulator.
        far_steps: `far_group_bits` of all steps of the main loop, if SPEC.peaks is "every_tile".
    """
    for first in tl.range(0, blocks.count, STEPS * SPEC.blocks, num_stages=1):
        if SPEC.peaks == "every_tile":  # one iteration: a short sequence has at most 64 steps
            steps = tl.reduce(tl.reduce(far_steps, 1, _bitwise_or), 0, _bitwise_or)
        else:
            steps = _marked_step_bits(head, blocks, first, SPEC)
        index = first
        while steps != 0:
            if (steps & 1) != 0:
                accumulator += _step_loss(queries, head, mask, blocks, index, row_ref, lengths, SPEC)
            steps = (steps >> 1) & ALL_BUT_SIGN
            index += SPEC.blocks
    return accumulator
