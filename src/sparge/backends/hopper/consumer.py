"""How a consumer walks a row: scores, their maximum, P, products, and the output they are added to.

for each tile:   wait for S  ->  maximum  ->  P  ->  start P V  ->  start the next S
                 ->  wait for P V  ->  give the stage back  ->  add P V to the output
"""

from __future__ import annotations

from sparge.backends.cuda.primitives import FP8_RANGE, LOG2_E, REACH
from sparge.backends.hopper import spec as form
from sparge.backends.hopper.gluon import gl, jit, mbarrier, warpgroup_mma_wait
from sparge.backends.hopper.mma import await_stage, note_of, start_scores, start_sums, start_values
from sparge.backends.hopper.producer import BROKEN, PLAIN, SINK
from sparge.backends.hopper.softmax import (
    LOWEST,
    ROWS,
    TOP_CODE,
    any_far_below,
    halves,
    hide,
    key_unit_of,
    probabilities,
    tile_max,
    tile_part,
)

SLACK = gl.constexpr(form.SLACK)


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
def _tile_units(units, stage, FORM: gl.constexpr):
    """What a code of a tile's first and second key block is worth; twice the same if there is one."""
    place = stage * FORM.blocks
    first = key_unit_of(units, place, FORM)
    if FORM.blocks == 2:
        return first, key_unit_of(units, place + 1, FORM)
    else:
        return first, first


@jit
def _start_products(
    scores, row_unit, key_units, top, values, stage, ones, sums, FRESH: gl.constexpr, FORM: gl.constexpr
):
    """P of a tile, and P V and the sums of codes on their way. Exact sums are complete at once.

    Args:
        scores: raw, [64, keys].
        row_unit, key_units: what codes of the queries, and of the tile's key blocks, are worth.
        top: [64], the score that P counts from, less what P = 1 is stored as.
        sums: P V and the sums of codes, which are added to, or with FRESH only lend their registers; exact row sums.

    Returns:
        P V, pending; the sums of codes, pending (else any number); the exact row sums.
    """
    product, code_sum, row_sum = sums
    place = stage * FORM.blocks
    first, second = halves(scores, FORM.blocks)
    first_p, first_sum = probabilities(first, row_unit, key_units[0], top, values.dtype, FORM)
    product = start_values(first_p, values.index(place), product, FRESH, FORM)
    second_p = first_p
    if FORM.blocks == 2:
        second_p, second_sum = probabilities(second, row_unit, key_units[1], top, values.dtype, FORM)
        product = start_values(second_p, values.index(place + 1), product, False, FORM)
        first_sum = first_sum + second_sum
    if FORM.codes:
        code_sum = start_sums(first_p, ones, code_sum, FRESH, FORM)
        if FORM.blocks == 2:
            code_sum = start_sums(second_p, ones, code_sum, False, FORM)
    else:
        row_sum = row_sum + first_sum
    return product, code_sum, row_sum


@jit
def _start_tile(scores, row_unit, key_units, top, decay, operands, stage, state, FORM: gl.constexpr):
    """The same on top of the state so far: FP8 products are fresh, others go on from the output."""
    _, _, values, ones = operands
    output, product, code_sum, row_sum = state
    if not FORM.codes:
        row_sum = row_sum * decay[:, None]
    if not FORM.fp8_values:
        product = _rescale(output, decay, FORM)
    sums = (product, code_sum, row_sum)
    return _start_products(scores, row_unit, key_units, top, values, stage, ones, sums, FORM.fp8_values, FORM)


@jit
def _wait_for_tile(sums, state, PENDING: gl.constexpr, FORM: gl.constexpr):
    """Wait for what `_start_tile` started, not for the last PENDING products since. Returns the state."""
    partial, partial_sum, row_sum = sums
    output, product, code_sum, _ = state
    if FORM.codes:
        product, code_sum = warpgroup_mma_wait(PENDING, deps=[partial, partial_sum])
    elif FORM.fp8_values:
        product = warpgroup_mma_wait(PENDING, deps=[partial])
    else:
        output = warpgroup_mma_wait(PENDING, deps=[partial])
    return output, product, code_sum, row_sum


@jit
def _add_tile(state, decay, FORM: gl.constexpr):
    """Add a fresh product and sums of codes. Returns the state."""
    output, product, code_sum, row_sum = state
    if FORM.fp8_values:
        output = output * gl.convert_layout(decay, FORM.output_rows)[:, None] + product
    if FORM.codes:
        row_sum = row_sum * gl.convert_layout(decay, FORM.sum_rows)[:, None] + code_sum
    return output, product, code_sum, row_sum


@jit
def _add_lower_part(scores, row_unit, key_units, edge, row_top, operands, stage, state, FORM: gl.constexpr):
    """Add what lies below ``edge`` [64] of a tile, relative to it. Returns the scores above, and the state.

    A peak and the keys around it may be more than FP8 holds. It happens seldom, so nothing is overlapped.
    """
    decay = gl.exp2((row_top - edge) * (1.0 / FORM.steps))
    one: gl.constexpr = TOP_CODE if FORM.codes else FORM.one
    lower = tile_part(scores, row_unit, key_units, edge, False, FORM)
    sums = _start_tile(lower, row_unit, key_units, edge - one, decay, operands, stage, state, FORM)
    state = _add_tile(_wait_for_tile(sums, state, 0, FORM), decay, FORM)
    return tile_part(scores, row_unit, key_units, edge, True, FORM), state


@jit
def _new_top(local_max, row_max, row_top, FORM: gl.constexpr):
    """The score that P of a tile counts from, given its maximum, and the row's so far.

    FP8 holds fewer octaves than lie between a sink and a long tail: its range belongs to a tile, not to a row. The
    output counts from the same score, and may grow in these units as long as float32 can hold it.
    """
    if FORM.fp8_values:
        return gl.maximum(local_max, row_max - REACH * FORM.steps)
    elif FORM.rescales_rarely:
        return gl.where(local_max - row_top > SLACK, local_max, row_top)
    else:
        return row_max


@jit
def walk_row(PART: gl.constexpr, operands, notes, barriers, row, turn, row_unit, threshold_ptr, FORM: gl.constexpr):
    """A row's tiles, each with its maximum.

    The tensor cores add FP8 products in 13 bits: there, each tile gets a fresh accumulator, added in float32 while the
    next scores are computed. 16-bit products are added in place.

    Args:
        PART: which of the two consumers this is.
        operands: Q of this row; all stages of K and V; a tile of ones.
        notes: what the producer wrote beside the stages: units of K's codes, block numbers, kinds (see `producer`).
        row: its first query here; sizes of the problem; blocks it visits.
        turn: the next stage that is used, counted over all rows.
        row_unit: [64], what a code of each query is worth, in steps; of unquantised scores, one number.
        threshold_ptr: of the row's head.

    Returns:
        Output; row sums; the score they count from, in steps; the next turn.
    """
    query, keys, _, _ = operands
    units, blocks, kinds = notes
    _, _, full, free = barriers
    first_query, sizes, count = row
    _, _, q_len, _, _, _, _ = sizes
    # Scores count steps: octaves, or eighths of one where P is a code. P = 1 is stored as the largest number.
    steps: gl.constexpr = FORM.steps
    one: gl.constexpr = TOP_CODE if FORM.codes else FORM.one
    stage = turn % FORM.stages
    await_stage(full, turn, True, FORM)
    pending = start_scores(query, keys.index(stage), FORM)
    more = count > FORM.blocks
    next_stage = gl.where(more, (turn + 1) % FORM.stages, stage)
    await_stage(full, turn + 1, more, FORM)

    threshold = 0.0
    if FORM.has_threshold:
        threshold = gl.load(threshold_ptr) * (LOG2_E * steps)
    row_max = gl.full((ROWS,), LOWEST, gl.float32, FORM.rows)
    row_top = row_max
    output = gl.full((ROWS, FORM.value_dim), 0.0, gl.float32, FORM.output)
    product = output if FORM.fp8_values else gl.to_tensor(0.0)
    if FORM.codes:
        row_sum = gl.full((ROWS, 8), 0.0, gl.float32, FORM.sums)
        code_sum = row_sum
    else:
        row_sum = gl.full((ROWS, 4), 0.0, gl.float32, FORM.lanes)
        code_sum = gl.to_tensor(0.0)
    key_units = _tile_units(units, stage, FORM)
    kind = note_of(kinds, stage, FORM)
    broken = gl.to_tensor(0.0)  # or NaN, which codes cannot carry
    for position in range(0, gl.maximum(count, 1), FORM.blocks):
        scores = warpgroup_mma_wait(0, deps=[pending])
        state = (output, product, code_sum, row_sum)
        if kind != PLAIN:
            scores = hide(scores, blocks, stage * FORM.blocks, first_query, sizes, FORM)
            if FORM.codes:
                broken = broken + gl.where((kind & BROKEN) != 0, float("nan"), 0.0)
            if FORM.peaks == "known":  # noqa: SIM102
                if (kind & SINK) != 0:
                    local_max = gl.max(tile_max(scores, row_unit, key_units, FORM), 1)
                    edge = _new_top(local_max, gl.maximum(row_max, local_max), row_top, FORM) - FP8_RANGE * steps
                    scores, state = _add_lower_part(
                        scores, row_unit, key_units, edge, row_top, operands, stage, state, FORM
                    )
                    row_top = edge
        lane_max = tile_max(scores, row_unit, key_units, FORM)
        local_max = gl.max(lane_max, 1)
        row_max = gl.maximum(row_max, local_max)
        new_top = _new_top(local_max, row_max, row_top, FORM)
        if FORM.peaks == "asked":  # noqa: SIM102
            if any_far_below(lane_max, local_max, PART, FORM):
                edge = new_top - FP8_RANGE * steps
                scores, state = _add_lower_part(
                    scores, row_unit, key_units, edge, row_top, operands, stage, state, FORM
                )
                row_top = edge
        decay = gl.exp2((row_top - new_top) * (1.0 / steps))
        top = new_top - one
        if FORM.has_threshold:
            is_below = local_max - row_max < threshold
            if not FORM.quantized:  # a maximum ignores NaN, and NaN must not be skipped
                has_nan = gl.max((scores != scores).to(gl.int32), 1)
                is_below = is_below & (gl.convert_layout(has_nan, FORM.rows) == 0)
            is_below = is_below | (first_query + gl.arange(0, ROWS, FORM.rows) >= q_len)
            if gl.min(is_below.to(gl.int32), 0) == 0:  # one answer for the warpgroup
                sums = _start_tile(scores, row_unit, key_units, top, decay, operands, stage, state, FORM)
                state = _add_tile(_wait_for_tile(sums, state, 0, FORM), decay, FORM)
                row_top = new_top
            pending = start_scores(query, keys.index(next_stage), FORM)
        else:
            sums = _start_tile(scores, row_unit, key_units, top, decay, operands, stage, state, FORM)
            # After the last tile this repeats its scores, which nobody reads.
            pending = start_scores(query, keys.index(next_stage), FORM)
            state = _wait_for_tile(sums, state, 1, FORM)
            row_top = new_top
        mbarrier.arrive(free.index(stage), count=1)
        turn += 1
        stage = next_stage
        more = position + 2 * FORM.blocks < count
        next_stage = gl.where(more, (turn + 1) % FORM.stages, stage)
        await_stage(full, turn + 1, more, FORM)
        if position + FORM.blocks < count:
            key_units = _tile_units(units, stage, FORM)
            kind = note_of(kinds, stage, FORM)
        if not FORM.has_threshold:
            state = _add_tile(state, decay, FORM)
        output, product, code_sum, row_sum = state
    scores = warpgroup_mma_wait(0, deps=[pending])
    if FORM.codes:
        row_sum = row_sum + gl.convert_layout(row_unit * 0.0 + broken, FORM.sum_rows)[:, None]
    return output, row_sum, row_top, turn
