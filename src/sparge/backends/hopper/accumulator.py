"""Sums over the stages of a tile: P V and the row sums of P, both relative to the row reference.

The tensor cores add FP8 products with 13 fraction bits. With FP8 values, each stage therefore uses a fresh accumulator,
which is added in float32 while the tensor cores compute the next S. 16-bit products are accumulated in place.
"""

from __future__ import annotations

from sparge.backends.gpu.gluon import (
    aggregate,
    gl,
    jit,
    shared_memory_descriptor,
    warpgroup_mma_accumulator,
    warpgroup_mma_wait,
)
from sparge.backends.hopper.mma import issue_pv, issue_row_sums, split_blocks
from sparge.backends.hopper.softmax import any_above, max_by_lane, part_of_scores, probabilities
from sparge.backends.hopper.spec import ROWS

LARGEST_SUM_FP16 = gl.constexpr(2.0**15)
"""Limit of a lane's sum of P in one stage. A single P may be that large, and float16 ends at 2^16."""
LARGEST_SUM_BF16 = gl.constexpr(2.0**22)
"""Limit for bfloat16 P. The limit times the sum of all values, or times the number of keys, must fit in float32."""


@aggregate
class MmaOperands:
    """Operands of a tile's matrix products in shared memory: this consumer's Q, all stages of K and V, and a tile of
    FP8 ones for row sums.
    """

    query: shared_memory_descriptor
    keys: shared_memory_descriptor
    values: shared_memory_descriptor
    ones: shared_memory_descriptor


@aggregate
class Accumulator:
    """Sums over the stages so far, and registers for the products of one stage."""

    output: gl.tensor  # P V, [64, value_dim]
    stage_output: gl.tensor  # P V of one stage, if FP8
    stage_sum: gl.tensor  # row sums of one stage, [64, 8], if the tensor cores compute them
    row_sum: gl.tensor  # row sums of P, [64, 8] with equal columns, or one per lane, [64, 4]


@aggregate
class Pending:
    """Products of one stage in flight: P V and, if the tensor cores compute them, the row sums.

    ``row_sum`` is `Accumulator.row_sum`; it already includes this stage if it is computed from exponentials.
    """

    output: gl.tensor | warpgroup_mma_accumulator
    stage_sum: gl.tensor | warpgroup_mma_accumulator
    row_sum: gl.tensor


@jit
def empty_accumulator(SPEC: gl.constexpr):
    """Return an accumulator of zeros. Tensors that SPEC does not need are scalars."""
    output = gl.full((ROWS, SPEC.value_dim), 0.0, gl.float32, SPEC.output_layout)
    stage_output = output if SPEC.fp8_values else gl.to_tensor(0.0)
    if SPEC.exponential_free:
        row_sum = gl.full((ROWS, 8), 0.0, gl.float32, SPEC.sums_layout)
        stage_sum = row_sum
    else:
        row_sum = gl.full((ROWS, 4), 0.0, gl.float32, SPEC.lane_layout)
        stage_sum = gl.to_tensor(0.0)
    return Accumulator(output, stage_output, stage_sum, row_sum)


@jit
def _rescale(output, decay, SPEC: gl.constexpr):
    """Multiply each row of the output by its decay."""
    return output * gl.convert_layout(decay, SPEC.output_row_layout)[:, None]


@jit
def _stage_probabilities(scores, scales, p_ref, P_TYPE: gl.constexpr, SPEC: gl.constexpr):
    """Return P of a stage by key block, and each lane's sum of it, [64, 4] (0 if exponential-free)."""
    first, second = split_blocks(scores, SPEC.blocks)  # 2 x [64, 64]
    first_p, lane_sum = probabilities(first, scales.first, p_ref, P_TYPE, SPEC)
    second_p = first_p
    if SPEC.blocks == 2:
        second_p, second_sum = probabilities(second, scales.second, p_ref, P_TYPE, SPEC)
        lane_sum = lane_sum + second_sum
    return first_p, second_p, lane_sum


@jit
def _issue_pv_of_stage(first_p, second_p, operands, stage, output, FRESH: gl.constexpr, SPEC: gl.constexpr):
    """Issue P V of a stage's key blocks, added to ``output``, or to zero if FRESH."""
    place = stage * SPEC.blocks
    output = issue_pv(first_p, operands.values.index(place), output, FRESH, SPEC)
    if SPEC.blocks == 2:
        output = issue_pv(second_p, operands.values.index(place + 1), output, False, SPEC)
    return output


@jit
def _issue_products(scores, scales, p_ref, operands, stage, pending, FRESH: gl.constexpr, SPEC: gl.constexpr):
    """Compute P of a stage by key block, issue its products, and return them.

    Args:
        scores: raw, [64, keys].
        p_ref: [64], the score that P is relative to, lowered by the stored value of P = 1.
        pending: the accumulators to add to. If FRESH, their contents are ignored and only their registers are reused.
    """
    output, stage_sum, row_sum = pending.output, pending.stage_sum, pending.row_sum
    first_p, second_p, lane_sum = _stage_probabilities(scores, scales, p_ref, operands.values.dtype, SPEC)
    output = _issue_pv_of_stage(first_p, second_p, operands, stage, output, FRESH, SPEC)
    if SPEC.exponential_free:
        stage_sum = issue_row_sums(first_p, operands.ones, stage_sum, FRESH, SPEC)
        if SPEC.blocks == 2:
            stage_sum = issue_row_sums(second_p, operands.ones, stage_sum, False, SPEC)
    else:
        row_sum = row_sum + lane_sum
    return Pending(output=output, stage_sum=stage_sum, row_sum=row_sum)


@jit
def issue_stage(scores, scales, p_ref, decay, operands, stage, accumulator, SPEC: gl.constexpr):
    """Issue a stage's products, and return them.

    Sums that are accumulated in place are multiplied by ``decay`` [64] first. With FP8 values, the products go to a
    fresh accumulator, which `add_stage` adds to the sums.
    """
    output, row_sum = accumulator.stage_output, accumulator.row_sum
    if not SPEC.exponential_free:
        row_sum = row_sum * decay[:, None]
    if not SPEC.fp8_values:
        output = _rescale(accumulator.output, decay, SPEC)
    pending = Pending(output=output, stage_sum=accumulator.stage_sum, row_sum=row_sum)
    return _issue_products(scores, scales, p_ref, operands, stage, pending, SPEC.fp8_values, SPEC)


@jit
def issue_stage_without_maximum(scores, scales, row_ref, operands, stage, accumulator, SPEC: gl.constexpr):
    """Issue a stage's products with the previous row reference, unless a sum of P exceeds the 16-bit range.

    If a sum exceeds it, as in the first stage of every tile, the warp computes the maxima of its rows, rescales their
    output and recomputes P. Returns the products and the row reference, [64].
    """
    output, row_sum = accumulator.output, accumulator.row_sum
    P_TYPE: gl.constexpr = operands.values.dtype
    p_ref = row_ref - SPEC.stored_one
    first_p, second_p, lane_sum = _stage_probabilities(scores, scales, p_ref, P_TYPE, SPEC)
    if any_above(lane_sum, LARGEST_SUM_FP16 if P_TYPE.is_fp16() else LARGEST_SUM_BF16):
        new_ref = gl.maximum(gl.max(max_by_lane(scores, scales, SPEC), 1), row_ref)
        decay = gl.exp2(row_ref - new_ref)
        output = _rescale(output, decay, SPEC)
        row_sum = row_sum * decay[:, None]
        row_ref = new_ref
        p_ref = row_ref - SPEC.stored_one
        first_p, second_p, lane_sum = _stage_probabilities(scores, scales, p_ref, P_TYPE, SPEC)
    output = _issue_pv_of_stage(first_p, second_p, operands, stage, output, False, SPEC)
    pending = Pending(output=output, stage_sum=accumulator.stage_sum, row_sum=row_sum + lane_sum)
    return pending, row_ref


@jit
def wait_for_stage(pending, accumulator, LATER: gl.constexpr, SPEC: gl.constexpr):
    """Wait for the pending products of a stage, and return the accumulator.

    Args:
        LATER: number of products issued after them, which may still be in flight.
    """
    output, stage_output, stage_sum = accumulator.output, accumulator.stage_output, accumulator.stage_sum
    if SPEC.exponential_free:
        stage_output, stage_sum = warpgroup_mma_wait(LATER, deps=[pending.output, pending.stage_sum])
    elif SPEC.fp8_values:
        stage_output = warpgroup_mma_wait(LATER, deps=[pending.output])
    else:
        output = warpgroup_mma_wait(LATER, deps=[pending.output])
    return Accumulator(output, stage_output, stage_sum, pending.row_sum)


@jit
def add_stage(accumulator, decay, SPEC: gl.constexpr):
    """Multiply the output and the row sums by ``decay`` [64], add a stage's fresh products, and return the accumulator.

    Sums that `issue_stage` accumulates in place are left unchanged.
    """
    output, row_sum = accumulator.output, accumulator.row_sum
    if SPEC.fp8_values:
        factors = gl.convert_layout(decay, SPEC.output_row_layout)[:, None]
        output = output * factors + accumulator.stage_output
    if SPEC.exponential_free:
        factors = gl.convert_layout(decay, SPEC.sums_row_layout)[:, None]
        row_sum = row_sum * factors + accumulator.stage_sum
    return Accumulator(output, accumulator.stage_output, accumulator.stage_sum, row_sum)


@jit
def add_lower_part(scores, scales, edge, row_ref, operands, stage, accumulator, SPEC: gl.constexpr):
    """Add the part of a stage whose scores are at most ``edge`` [64]. Returns the other scores, and the accumulator.

    Needed if FP8 cannot represent both a peak and the keys around it: the lower part gets ``edge`` as its own row
    reference. This is rare, so nothing is overlapped.
    """
    decay = gl.exp2((row_ref - edge) * (1.0 / SPEC.units_per_log2))
    lower = part_of_scores(scores, scales, edge, False, SPEC)
    p_ref = edge - SPEC.stored_one
    pending = issue_stage(lower, scales, p_ref, decay, operands, stage, accumulator, SPEC)
    accumulator = add_stage(wait_for_stage(pending, accumulator, 0, SPEC), decay, SPEC)
    return part_of_scores(scores, scales, edge, True, SPEC), accumulator
