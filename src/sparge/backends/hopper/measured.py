"""A row whose maxima are measured, tile by tile: 8 bits where they are not guessed, 16 bits, and thresholds."""

from __future__ import annotations

from sparge.backends.hopper.arithmetic import ROWS, TOP_CODE, halves, hide, lane_sum, probabilities, tile_max, units_of
from sparge.backends.hopper.gluon import gl, jit, mbarrier, warpgroup_mma_wait
from sparge.backends.hopper.products import await_stage, note_of, start_scores, start_sums, start_values
from sparge.backends.triton.primitives import BLOCK_K, LOG2_E, LOG2_FP8_MAX, SMALLEST_SCALE

SLACK = gl.constexpr(8.0)
"""Octaves that P may exceed 1 by, where the output is rescaled rarely. Float16 holds almost 16."""


def _multiply_unless_one(count: int) -> gl.constexpr:
    """So many numbers times as many factors, unless those of all threads of the warp are 1.

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
def _rescale(output, decay, FORM: gl.constexpr):
    """The output times the decay of its rows."""
    factors = gl.convert_layout(decay, FORM.output_rows)[:, None]
    if FORM.rescales_rarely:
        return gl.inline_asm_elementwise(
            MULTIPLY, IN_PLACE, [output, factors], dtype=gl.float32, is_pure=False, pack=AT_ONCE
        )
    else:
        return output * factors


@jit
def _start_tile_products(
    first, second, first_unit, second_unit, top, decay, values, place, ones, state, FORM: gl.constexpr
):
    """P of a tile, and P V and the sums of codes on their way. Exact sums are complete at once.

    Args:
        first, second: raw scores of the two key blocks.
        values, place: V in shared memory, from ``place`` on.
        state: output; product and sums of codes, of which only the registers are taken; row sums.

    Returns:
        P V, pending; the sums of codes, pending (else any number); the row sums.
    """
    output, product, tile_sum, row_sum = state
    first_p, first_sum = probabilities(first, first_unit, top, values.dtype, FORM)
    if FORM.fp8_values:
        partial = start_values(first_p, values.index(place), product, True, FORM)
    else:
        partial = start_values(first_p, values.index(place), _rescale(output, decay, FORM), False, FORM)
    second_p = first_p
    if FORM.blocks == 2:
        second_p, second_sum = probabilities(second, second_unit, top, values.dtype, FORM)
        partial = start_values(second_p, values.index(place + 1), partial, False, FORM)
        first_sum = first_sum + second_sum
    if FORM.codes:
        sums = start_sums(first_p, ones, tile_sum, True, FORM)
        if FORM.blocks == 2:
            sums = start_sums(second_p, ones, sums, False, FORM)
        return partial, sums, row_sum
    else:
        lanes: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
        return partial, tile_sum, row_sum * gl.convert_layout(decay, lanes)[:, None] + first_sum


@jit
def _wait_for_tile(pending, state, PENDING: gl.constexpr, FORM: gl.constexpr):
    """Wait for what `_start_tile_products` started, not for the last PENDING products since. Returns the state."""
    partial, partial_sum, row_sum = pending
    output, product, tile_sum, _ = state
    if FORM.codes:
        product, tile_sum = warpgroup_mma_wait(PENDING, deps=[partial, partial_sum])
    elif FORM.fp8_values:
        product = warpgroup_mma_wait(PENDING, deps=[partial])
    else:
        output = warpgroup_mma_wait(PENDING, deps=[partial])
    return output, product, tile_sum, row_sum


@jit
def _add_tile(state, decay, FORM: gl.constexpr):
    """Add a fresh product and sums of codes. Returns the state."""
    output, product, tile_sum, row_sum = state
    if FORM.fp8_values:
        output = output * gl.convert_layout(decay, FORM.output_rows)[:, None] + product
    if FORM.codes:
        row_sum = row_sum * gl.convert_layout(decay, FORM.sum_rows)[:, None] + tile_sum
    return output, product, tile_sum, row_sum


@jit
def measure_row(operands, notes, barriers, row, turn, scale, threshold_ptr, FORM: gl.constexpr):
    """A row's tiles, each with its maximum.

    The tensor cores add FP8 products in 13 bits: there, each tile gets a fresh accumulator, added in float32 while the
    next scores are computed. 16-bit products are added in place.

    Args:
        operands: Q of this row; all stages of K and V; a tile of ones.
        notes: what the producer wrote beside the stages: units, block numbers, how many tiles need a mask.
        row: its first query here; sizes of the problem; blocks it visits.
        turn: the next stage that is used, counted over all rows.
        scale: of unquantised scores.
        threshold_ptr: of the row's head.

    Returns:
        Output; row sums; the score they count from, the maximum as a rule, in steps; the next turn.
    """
    query, keys, values, ones = operands
    units, blocks, masked = notes
    _, _, full, free = barriers
    first_query, sizes, count = row
    _, _, q_len, _, _, _, _ = sizes
    # Scores count steps: octaves, or eighths of one where P is a code. P = 1 is stored as the largest number.
    steps: gl.constexpr = FORM.steps
    one: gl.constexpr = TOP_CODE if FORM.codes else LOG2_FP8_MAX if FORM.fp8_values else 0.0
    stage = turn % FORM.stages
    await_stage(full, turn, True, FORM)
    pending = start_scores(query, keys.index(stage), FORM)
    more = count > FORM.blocks
    next_stage = gl.where(more, (turn + 1) % FORM.stages, stage)
    await_stage(full, turn + 1, more, FORM)

    query_unit = gl.maximum(gl.abs(scale) * LOG2_E, SMALLEST_SCALE)
    threshold = 0.0
    if FORM.has_threshold:
        threshold = gl.load(threshold_ptr) * (LOG2_E * steps)
    row_top = gl.full((ROWS,), float("-inf"), gl.float32, FORM.rows)
    output = gl.full((ROWS, FORM.value_dim), 0.0, gl.float32, FORM.output)
    product = output if FORM.fp8_values else gl.to_tensor(0.0)
    if FORM.codes:
        row_sum = gl.full((ROWS, 8), 0.0, gl.float32, FORM.sums)
        tile_sum = row_sum
    else:
        row_sum = lane_sum(gl.full((ROWS, BLOCK_K), 0.0, gl.float32, FORM.probability), FORM.k_width)
        tile_sum = gl.to_tensor(0.0)
    first_unit, second_unit = units_of(units, stage, query_unit, FORM)
    masked_tiles = note_of(masked, stage, FORM)
    for position in range(0, gl.maximum(count, 1), FORM.blocks):
        place = stage * FORM.blocks
        scores = warpgroup_mma_wait(0, deps=[pending])
        if masked_tiles != 0:
            scores = hide(scores, blocks, place, first_query, sizes, FORM)
        first, second = halves(scores, FORM.blocks)
        local_max = tile_max(first, second, first_unit, second_unit, FORM)
        if FORM.rescales_rarely:
            new_top = gl.where(local_max - row_top > SLACK, local_max, row_top)
        else:
            new_top = gl.maximum(row_top, local_max)
        safe_top = gl.where(new_top == float("-inf"), 0.0, new_top)
        decay = gl.exp2((row_top - safe_top) * (1.0 / steps))
        if FORM.codes:
            decay = decay + (first_unit + second_unit) * 0.0  # NaN, because codes cannot carry one
        row_top = new_top

        state = (output, product, tile_sum, row_sum)
        if FORM.has_threshold:
            gap = gl.where(local_max == float("-inf"), float("-inf"), local_max - new_top)
            is_below = gap < threshold
            if not FORM.quantized:  # a maximum ignores NaN, and NaN must not be skipped
                broken = gl.max((scores != scores).to(gl.int32), 1)
                is_below = is_below & (gl.convert_layout(broken, FORM.rows) == 0)
            is_below = is_below | (first_query + gl.arange(0, ROWS, FORM.rows) >= q_len)
            if gl.min(is_below.to(gl.int32), 0) == 0:  # one answer for the warpgroup
                pending_tile = _start_tile_products(
                    first, second, first_unit, second_unit, safe_top - one, decay, values, place, ones, state, FORM
                )
                finished = _wait_for_tile(pending_tile, state, 0, FORM)
                output, product, tile_sum, row_sum = _add_tile(finished, decay, FORM)
            pending = start_scores(query, keys.index(next_stage), FORM)
        else:
            pending_tile = _start_tile_products(
                first, second, first_unit, second_unit, safe_top - one, decay, values, place, ones, state, FORM
            )
            # After the last tile this repeats its scores, which nobody reads.
            pending = start_scores(query, keys.index(next_stage), FORM)
            output, product, tile_sum, row_sum = _wait_for_tile(pending_tile, state, 1, FORM)
        mbarrier.arrive(free.index(stage), count=1)
        turn += 1
        stage = next_stage
        more = position + 2 * FORM.blocks < count
        next_stage = gl.where(more, (turn + 1) % FORM.stages, stage)
        await_stage(full, turn + 1, more, FORM)
        if position + FORM.blocks < count:
            first_unit, second_unit = units_of(units, stage, query_unit, FORM)
            masked_tiles = note_of(masked, stage, FORM)
        if not FORM.has_threshold:
            output, product, tile_sum, row_sum = _add_tile((output, product, tile_sum, row_sum), decay, FORM)
    scores = warpgroup_mma_wait(0, deps=[pending])
    return output, row_sum, row_top, turn
