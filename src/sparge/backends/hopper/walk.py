"""How a consumer walks a row: scores, their maximum, P, products, and the output they are added to.

    for each stage:   wait for S  ->  maximum  ->  P of a tile  ->  start P V  ->  start the tile's next S
                      ->  wait for P V  ->  give the stage back  ->  add P V to the output
"""

from __future__ import annotations

from sparge.backends.hopper import form
from sparge.backends.hopper.arithmetic import (
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
from sparge.backends.hopper.gluon import gl, jit, mbarrier, warpgroup_mma_wait
from sparge.backends.hopper.producer import BROKEN, PLAIN
from sparge.backends.hopper.products import await_stage, note_of, ordered, start_scores, start_sums, start_values
from sparge.backends.triton.primitives import FP8_RANGE, LOG2_E, REACH, SHORT

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
def _start_stage_scores(query, keys, stage, FORM: gl.constexpr):
    """Start the scores of a stage's tiles."""
    if FORM.tiles == 2:
        first = start_scores(query, keys.index(stage * 2), FORM)
        return first, start_scores(query, keys.index(stage * 2 + 1), FORM)
    else:
        return (start_scores(query, keys.index(stage), FORM),)


@jit
def _wait_for_scores(pending, FORM: gl.constexpr):
    """Wait for what `_start_stage_scores` started, and all before it."""
    if FORM.tiles == 2:
        return warpgroup_mma_wait(0, deps=[pending[0], pending[1]])
    else:
        return (warpgroup_mma_wait(0, deps=[pending[0]]),)


@jit
def _stage_units(units, stage, FORM: gl.constexpr):
    """What a code of each key block is worth; four numbers, the last ones repeated."""
    place = stage * FORM.stage_blocks
    first = key_unit_of(units, place, FORM)
    second = key_unit_of(units, place + 1, FORM) if FORM.stage_blocks > 1 else first
    if FORM.stage_blocks == 4:
        return first, second, key_unit_of(units, place + 2, FORM), key_unit_of(units, place + 3, FORM)
    else:
        return first, second, first, second


@jit
def _tile_units(key_units, TILE: gl.constexpr, FORM: gl.constexpr):
    """Those of a tile's first and second key block."""
    if TILE == 0:
        return (key_units[0], key_units[1])
    elif FORM.blocks == 2:
        return (key_units[2], key_units[3])
    else:
        return (key_units[1], key_units[1])


@jit
def _stage_max(scores, row_unit, key_units, FORM: gl.constexpr):
    """Maximum of each thread's own columns of a stage, [64, 4], in steps."""
    largest = tile_max(scores[0], _tile_units(key_units, 0, FORM), FORM)
    if FORM.tiles == 2:
        largest = gl.maximum(largest, tile_max(scores[1], _tile_units(key_units, 1, FORM), FORM))
    if FORM.quantized:
        return largest * row_unit[:, None]
    else:
        return largest * row_unit


@jit
def _hide_stage(scores, blocks, stage, first_query, sizes, FORM: gl.constexpr):
    place = stage * FORM.stage_blocks
    first = hide(scores[0], blocks, place, first_query, sizes, FORM)
    if FORM.tiles == 2:
        return first, hide(scores[1], blocks, place + FORM.blocks, first_query, sizes, FORM)
    else:
        return (first,)


@jit
def _start_tile_products(
    tile, row_unit, key_units, top, values, place, ones, sums, FRESH: gl.constexpr, FORM: gl.constexpr
):
    """P of a tile, and P V and the sums of codes on their way. Exact sums are complete at once.

    Args:
        tile: raw scores [64, keys].
        row_unit, key_units: what codes of the queries, and of the tile's key blocks, are worth.
        top: the score that P counts from.
        values, place: V in shared memory, from ``place`` on.
        sums: P V and the sums of codes, which are added to, or with FRESH only lend their registers; exact row sums.

    Returns:
        P V, pending; the sums of codes, pending (else any number); the exact row sums.
    """
    partial, code_sum, row_sum = sums
    first, second = halves(tile, FORM.blocks)
    first_p, first_sum = probabilities(first, row_unit, key_units[0], top, values.dtype, FORM)
    partial = start_values(first_p, values.index(place), partial, FRESH, FORM)
    second_p = first_p
    if FORM.blocks == 2:
        second_p, second_sum = probabilities(second, row_unit, key_units[1], top, values.dtype, FORM)
        partial = start_values(second_p, values.index(place + 1), partial, False, FORM)
        first_sum = first_sum + second_sum
    if FORM.codes:
        code_sum = start_sums(first_p, ones, code_sum, FRESH, FORM)
        if FORM.blocks == 2:
            code_sum = start_sums(second_p, ones, code_sum, False, FORM)
        return partial, code_sum, row_sum
    else:
        return partial, code_sum, row_sum + first_sum


@jit
def _start_stage(
    scores, row_unit, key_units, top, decay, operands, stage, next_stage, state, FORM: gl.constexpr
):
    """Products of a stage's tiles, and the scores of the next one as registers become free.

    With a threshold, which may leave out the products, the caller starts the scores.

    Returns:
        The next scores, pending, and started last; what `_start_tile_products` returns.
    """
    query, keys, values, ones = operands
    output, product, code_sum, row_sum = state
    place = stage * FORM.stage_blocks
    if not FORM.codes:
        row_sum = row_sum * decay[:, None]
    if FORM.fp8_values:
        sums = (product, code_sum, row_sum)
    else:
        sums = (_rescale(output, decay, FORM), code_sum, row_sum)
    tile_units = _tile_units(key_units, 0, FORM)
    sums = _start_tile_products(
        scores[0], row_unit, tile_units, top, values, place, ones, sums, FORM.fp8_values, FORM
    )
    if FORM.has_threshold:
        return scores, sums
    elif FORM.tiles == 1:
        return (start_scores(query, keys.index(next_stage), FORM),), sums
    else:
        first = start_scores(query, keys.index(next_stage * 2), FORM)
        top = ordered(top)  # the second tile's P under the products of the first
        tile_units = _tile_units(key_units, 1, FORM)
        place += FORM.blocks
        sums = _start_tile_products(scores[1], row_unit, tile_units, top, values, place, ones, sums, False, FORM)
        return (first, start_scores(query, keys.index(next_stage * 2 + 1), FORM)), sums


@jit
def _wait_for_products(sums, state, PENDING: gl.constexpr, FORM: gl.constexpr):
    """Wait for what `_start_stage` started, not for the last PENDING products since. Returns the state."""
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
def _add_stage(state, decay, FORM: gl.constexpr):
    """Add a fresh product and sums of codes. Returns the state."""
    output, product, code_sum, row_sum = state
    if FORM.fp8_values:
        output = output * gl.convert_layout(decay, FORM.output_rows)[:, None] + product
    if FORM.codes:
        row_sum = row_sum * gl.convert_layout(decay, FORM.sum_rows)[:, None] + code_sum
    return output, product, code_sum, row_sum


@jit
def _add_lower_part(scores, row_unit, key_units, edge, decay, operands, stage, state, FORM: gl.constexpr):
    """Add what lies below ``edge`` [64] of a stage, relative to it. Returns the scores above, and the state.

    A peak and the keys around it, which may be more than FP8 holds. It happens seldom, so nothing is overlapped.
    """
    _, _, values, ones = operands
    output, product, code_sum, row_sum = state
    one: gl.constexpr = TOP_CODE if FORM.codes else FORM.one
    place = stage * FORM.stage_blocks
    if not FORM.codes:
        row_sum = row_sum * decay[:, None]
    sums = (product, code_sum, row_sum)
    first_units, second_units = _tile_units(key_units, 0, FORM), _tile_units(key_units, 1, FORM)
    lower = tile_part(scores[0], row_unit, first_units, edge, False, FORM)
    sums = _start_tile_products(lower, row_unit, first_units, edge - one, values, place, ones, sums, True, FORM)
    if FORM.tiles == 2:
        lower = tile_part(scores[1], row_unit, second_units, edge, False, FORM)
        place += FORM.blocks
        sums = _start_tile_products(lower, row_unit, second_units, edge - one, values, place, ones, sums, False, FORM)
    state = _add_stage(_wait_for_products(sums, state, 0, FORM), decay, FORM)
    upper = tile_part(scores[0], row_unit, first_units, edge, True, FORM)
    if FORM.tiles == 2:
        return (upper, tile_part(scores[1], row_unit, second_units, edge, True, FORM)), state
    else:
        return (upper,), state


@jit
def _new_top(local_max, row_max, row_top, FORM: gl.constexpr):
    """The score that P of a stage counts from, given its maximum, and the row's so far.

    FP8 holds fewer octaves than lie between a sink and a long tail: its range belongs to a stage, not to a row. The
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
    """A row's stages, each with its maximum.

    The tensor cores add FP8 products in 13 bits: there, each stage gets a fresh accumulator, added in float32 while the
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
    pending = _start_stage_scores(query, keys, stage, FORM)
    more = count > FORM.stage_blocks
    next_stage = gl.where(more, (turn + 1) % FORM.stages, stage)
    await_stage(full, turn + 1, more, FORM)

    is_short = count <= SHORT
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
    key_units = _stage_units(units, stage, FORM)
    note = note_of(kinds, stage, FORM)
    broken = gl.to_tensor(0.0)  # or NaN, which codes cannot carry
    for position in range(0, gl.maximum(count, 1), FORM.stage_blocks):
        scores = _wait_for_scores(pending, FORM)
        if note != PLAIN:
            scores = _hide_stage(scores, blocks, stage, first_query, sizes, FORM)
            if FORM.codes:
                broken = broken + gl.where(note == BROKEN, float("nan"), 0.0)
        lane_max = _stage_max(scores, row_unit, key_units, FORM)
        local_max = gl.max(lane_max, 1)
        row_max = gl.maximum(row_max, local_max)
        new_top = _new_top(local_max, row_max, row_top, FORM)
        if FORM.splits:
            if is_short | (position == 0):
                if any_far_below(lane_max, local_max, PART, FORM):
                    edge = new_top - FP8_RANGE * steps
                    lower_decay = gl.exp2((row_top - edge) * (1.0 / steps))
                    state = (output, product, code_sum, row_sum)
                    scores, state = _add_lower_part(
                        scores, row_unit, key_units, edge, lower_decay, operands, stage, state, FORM
                    )
                    output, product, code_sum, row_sum = state
                    row_top = edge
        decay = gl.exp2((row_top - new_top) * (1.0 / steps))
        row_top = new_top

        state = (output, product, code_sum, row_sum)
        top = new_top - one
        if FORM.has_threshold:
            is_below = local_max - row_max < threshold
            if not FORM.quantized:  # a maximum ignores NaN, and NaN must not be skipped
                has_nan = gl.max((scores[0] != scores[0]).to(gl.int32), 1)
                is_below = is_below & (gl.convert_layout(has_nan, FORM.rows) == 0)
            is_below = is_below | (first_query + gl.arange(0, ROWS, FORM.rows) >= q_len)
            if gl.min(is_below.to(gl.int32), 0) == 0:  # one answer for the warpgroup
                scores, sums = _start_stage(
                    scores, row_unit, key_units, top, decay, operands, stage, next_stage, state, FORM
                )
                finished = _wait_for_products(sums, state, 0, FORM)
                output, product, code_sum, row_sum = _add_stage(finished, decay, FORM)
            pending = _start_stage_scores(query, keys, next_stage, FORM)
        else:
            # After the last stage this repeats its scores, which nobody reads.
            pending, sums = _start_stage(scores, row_unit, key_units, top, decay, operands, stage, next_stage, state, FORM)
            output, product, code_sum, row_sum = _wait_for_products(sums, state, 1, FORM)
        mbarrier.arrive(free.index(stage), count=1)
        turn += 1
        stage = next_stage
        more = position + 2 * FORM.stage_blocks < count
        next_stage = gl.where(more, (turn + 1) % FORM.stages, stage)
        await_stage(full, turn + 1, more, FORM)
        if position + FORM.stage_blocks < count:
            key_units = _stage_units(units, stage, FORM)
            note = note_of(kinds, stage, FORM)
        if not FORM.has_threshold:
            output, product, code_sum, row_sum = _add_stage((output, product, code_sum, row_sum), decay, FORM)
    scores = _wait_for_scores(pending, FORM)
    if FORM.codes:
        row_sum = row_sum + gl.convert_layout(row_unit * 0.0 + broken, FORM.sum_rows)[:, None]
    return output, row_sum, row_top, turn
