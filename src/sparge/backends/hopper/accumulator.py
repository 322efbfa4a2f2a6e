"""What a consumer adds up over the stages of a tile: P V and the row sums of P, both counting from one score per row.

The tensor cores add FP8 products in 13 bits: there, each stage gets a fresh accumulator, added in float32 while the
next scores are computed. 16-bit products are added in place.
"""

from __future__ import annotations

from sparge.backends.hopper.gluon import (
    aggregate,
    gl,
    jit,
    shared_memory_descriptor,
    warpgroup_mma_accumulator,
    warpgroup_mma_wait,
)
from sparge.backends.hopper.mma import issue_pv, issue_row_sums
from sparge.backends.hopper.softmax import part_of_scores, probabilities, split_blocks
from sparge.backends.hopper.spec import ROWS


@aggregate
class MmaOperands:
    """Operands of a tile's matrix products in shared memory: this consumer's Q, all stages of K and V, FP8 ones."""

    query: shared_memory_descriptor
    keys: shared_memory_descriptor
    values: shared_memory_descriptor
    ones: shared_memory_descriptor


@aggregate
class Accumulator:
    """Sums over the stages so far, and registers that the tensor cores write one stage's own into.

    Fields:
        output: P V, [64, value_dim].
        stage_output: P V of one stage, if it is FP8.
        stage_sum: the row sums of one stage, [64, 8], if the tensor cores compute them.
        row_sum: row sums of P, [64, 8], all columns alike; or each lane's own, [64, 4].
    """

    output: gl.tensor
    stage_output: gl.tensor
    stage_sum: gl.tensor
    row_sum: gl.tensor


@aggregate
class Pending:
    """Products of one stage that were issued: P V and, if the tensor cores compute them, the row sums.

    Row sums of exponentials, ``row_sum``, are not pending but complete.
    """

    output: gl.tensor | warpgroup_mma_accumulator
    stage_sum: gl.tensor | warpgroup_mma_accumulator
    row_sum: gl.tensor


def _multiply_unless_one(count: int) -> gl.constexpr:
    """Assembly for so many numbers times as many factors, unless those of all threads of the warp are 1.

    The numbers are of two rows, two and two in turns: two factors tell about all.
    """
    products = "\n".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return gl.constexpr(
        f"""{{
        .reg .pred is_needed;
        setp.neu.f32 is_needed, ${2 * count}, 0f3F800000;
        setp.neu.or.f32 is_needed, ${2 * count + 2}, 0f3F800000, is_needed;
        vote.sync.any.pred is_needed, is_needed, 0xffffffff;
        @!is_needed bra done;
        {products}
        done:
        }}"""
    )


AT_ONCE = gl.constexpr(32)
"""Numbers of one thread that are multiplied or not."""
MULTIPLY = _multiply_unless_one(AT_ONCE.value)
IN_PLACE = gl.constexpr(
    ",".join(["=&f"] * AT_ONCE.value + [str(i) for i in range(AT_ONCE.value)] + ["f"] * AT_ONCE.value)
)


@jit
def empty_accumulator(SPEC: gl.constexpr):
    """An accumulator of zeros; what a spec does not need is one number."""
    output = gl.full((ROWS, SPEC.value_dim), 0.0, gl.float32, SPEC.output_layout)
    stage_output = output if SPEC.fp8_values else gl.to_tensor(0.0)
    if SPEC.exponential_free:
        row_sum = gl.full((ROWS, 8), 0.0, gl.float32, SPEC.sums_layout)
        stage_sum = row_sum
    else:
        row_sum = gl.full((ROWS, 4), 0.0, gl.float32, SPEC.lane_layout)
        stage_sum = gl.to_tensor(0.0)
    return Accumulator(output=output, stage_output=stage_output, stage_sum=stage_sum, row_sum=row_sum)


@jit
def _rescale(output, decay, SPEC: gl.constexpr):
    """The output times the decay of its rows."""
    factors = gl.convert_layout(decay, SPEC.output_row_layout)[:, None]
    if SPEC.rescales_rarely:
        return gl.inline_asm_elementwise(
            MULTIPLY, IN_PLACE, [output, factors], dtype=gl.float32, is_pure=False, pack=AT_ONCE
        )
    else:
        return output * factors


@jit
def _issue_products(
    scores, query_scale, key_scales, origin, operands, stage, pending, FRESH: gl.constexpr, SPEC: gl.constexpr
):
    """Compute P of a stage by key blocks, issue their products, and return them.

    Args:
        scores: raw, [64, keys].
        origin: [64], the score that P counts from, less what P = 1 is stored as.
        pending: what is added to; with FRESH the products only take their registers from it.
    """
    values = operands.values
    output, stage_sum, row_sum = pending.output, pending.stage_sum, pending.row_sum
    place = stage * SPEC.blocks
    first, second = split_blocks(scores, SPEC.blocks)
    first_p, first_sum = probabilities(first, query_scale, key_scales.first, origin, values.dtype, SPEC)
    output = issue_pv(first_p, values.index(place), output, FRESH, SPEC)
    second_p = first_p
    if SPEC.blocks == 2:
        second_p, second_sum = probabilities(second, query_scale, key_scales.second, origin, values.dtype, SPEC)
        output = issue_pv(second_p, values.index(place + 1), output, False, SPEC)
        first_sum = first_sum + second_sum
    if SPEC.exponential_free:
        stage_sum = issue_row_sums(first_p, operands.ones, stage_sum, FRESH, SPEC)
        if SPEC.blocks == 2:
            stage_sum = issue_row_sums(second_p, operands.ones, stage_sum, False, SPEC)
    else:
        row_sum = row_sum + first_sum
    return Pending(output=output, stage_sum=stage_sum, row_sum=row_sum)


@jit
def issue_stage(scores, query_scale, key_scales, origin, decay, operands, stage, accumulator, SPEC: gl.constexpr):
    """Issue a stage's products: FP8 ones are fresh, others go on from the output times ``decay`` [64]."""
    output, row_sum = accumulator.stage_output, accumulator.row_sum
    if not SPEC.exponential_free:
        row_sum = row_sum * decay[:, None]
    if not SPEC.fp8_values:
        output = _rescale(accumulator.output, decay, SPEC)
    pending = Pending(output=output, stage_sum=accumulator.stage_sum, row_sum=row_sum)
    return _issue_products(scores, query_scale, key_scales, origin, operands, stage, pending, SPEC.fp8_values, SPEC)


@jit
def wait_for_stage(pending, accumulator, LATER: gl.constexpr, SPEC: gl.constexpr):
    """Wait for what `issue_stage` issued, not for the LATER products since. Returns the accumulator."""
    output, stage_output, stage_sum = accumulator.output, accumulator.stage_output, accumulator.stage_sum
    if SPEC.exponential_free:
        stage_output, stage_sum = warpgroup_mma_wait(LATER, deps=[pending.output, pending.stage_sum])
    elif SPEC.fp8_values:
        stage_output = warpgroup_mma_wait(LATER, deps=[pending.output])
    else:
        output = warpgroup_mma_wait(LATER, deps=[pending.output])
    return Accumulator(output=output, stage_output=stage_output, stage_sum=stage_sum, row_sum=pending.row_sum)


@jit
def add_stage(accumulator, decay, SPEC: gl.constexpr):
    """Add a stage's fresh products to the output and row sums times ``decay`` [64]. Returns the accumulator."""
    output, row_sum = accumulator.output, accumulator.row_sum
    if SPEC.fp8_values:
        factors = gl.convert_layout(decay, SPEC.output_row_layout)[:, None]
        output = output * factors + accumulator.stage_output
    if SPEC.exponential_free:
        factors = gl.convert_layout(decay, SPEC.sums_row_layout)[:, None]
        row_sum = row_sum * factors + accumulator.stage_sum
    return Accumulator(
        output=output,
        stage_output=accumulator.stage_output,
        stage_sum=accumulator.stage_sum,
        row_sum=row_sum,
    )


@jit
def add_lower_part(scores, query_scale, key_scales, edge, row_origin, operands, stage, accumulator, SPEC: gl.constexpr):
    """Add what lies below ``edge`` [64] of a stage, relative to it. Returns the scores above, and the accumulator.

    A peak and the keys around it may be more than FP8 holds. It happens seldom, so nothing is overlapped.
    """
    decay = gl.exp2((row_origin - edge) * (1.0 / SPEC.steps_per_octave))
    lower = part_of_scores(scores, query_scale, key_scales, edge, False, SPEC)
    origin = edge - SPEC.steps_of_one
    pending = issue_stage(lower, query_scale, key_scales, origin, decay, operands, stage, accumulator, SPEC)
    accumulator = add_stage(wait_for_stage(pending, accumulator, 0, SPEC), decay, SPEC)
    return part_of_scores(scores, query_scale, key_scales, edge, True, SPEC), accumulator
