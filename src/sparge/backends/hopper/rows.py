"""How a consumer walks the kept blocks of a row: two ways.

`measure_row` takes the row maximum of every tile before it computes P. `guess_row` guesses it for pairs of tiles and
looks afterwards whether any score was higher: rarely, and then the pair is measured.
"""

from __future__ import annotations

from sparge.backends.hopper.arithmetic import (
    ROWS,
    TOP_CODE,
    halves,
    hide,
    lane_sum,
    probabilities,
    tile_max,
    units_of,
)
from sparge.backends.hopper.gluon import gl, jit, mbarrier, warpgroup_mma, warpgroup_mma_wait
from sparge.backends.hopper.guess import (
    CLAMPED,
    FIRST_PAIRS,
    FREE,
    LOWEST,
    codes_below,
    fits,
    guess_after_measuring,
    larger,
    largest_words,
    next_guess,
    reached_score,
)
from sparge.backends.triton.primitives import BLOCK_K, INT32_AS_FLOAT, LOG2_E, LOG2_FP8_MAX, SMALLEST_SCALE


@jit
def _await_stage(full, turn, pred, FORM: gl.constexpr):
    """Wait until the copies of a turn have landed. Turns are counted over all rows."""
    mbarrier.wait(full.index(turn % FORM.stages), (turn // FORM.stages) & 1, pred=pred)


@jit
def _note(notes, stage, FORM: gl.constexpr):
    """A number that the producer wrote beside a stage."""
    return gl.max(notes.index(stage).load(FORM.rows), 0)


@jit
def _start_scores(query, key, FORM: gl.constexpr):
    """Start Q K^T: [64, keys] INT32 that are floats above 1.5 * 2^23, or float32."""
    if FORM.quantized:
        start = gl.full((ROWS, FORM.keys), INT32_AS_FLOAT, gl.int32, FORM.scores)
        return warpgroup_mma(query, key.permute((1, 0)), start, is_async=True)
    else:
        nothing = gl.full((ROWS, FORM.keys), 0.0, gl.float32, FORM.scores)
        return warpgroup_mma(query, key.permute((1, 0)), nothing, use_acc=False, is_async=True)


@jit
def _start_values(probability, value, sums, FRESH: gl.constexpr, FORM: gl.constexpr):
    """Start P V of one key block on top of ``sums``, or of nothing where FRESH."""
    if FORM.fp8_values:
        value = value.permute((1, 0))
    return warpgroup_mma(probability, value, sums, use_acc=not FRESH, is_async=True)


@jit
def _start_sums(first, second, ones, tile_sum, FRESH: gl.constexpr, FORM: gl.constexpr):
    """Start the row sums of the codes of a tile's key blocks: a product with ones."""
    codes = gl.convert_layout(first, FORM.summand)
    sums = warpgroup_mma(codes, ones, tile_sum, use_acc=not FRESH, is_async=True)
    if FORM.blocks == 2:
        codes = gl.convert_layout(second, FORM.summand)
        sums = warpgroup_mma(codes, ones, sums, is_async=True)
    return sums


@jit
def _start_codes(first, second, values, tile, ones, product, tile_sum, FRESH: gl.constexpr, FORM: gl.constexpr):
    """Start P V and the row sums of a tile's codes, into the registers of ``product`` and ``tile_sum``."""
    place = tile * FORM.blocks
    partial = _start_values(first, values.index(place), product, FRESH, FORM)
    if FORM.blocks == 2:
        partial = _start_values(second, values.index(place + 1), partial, False, FORM)
    return partial, _start_sums(first, second, ones, tile_sum, FRESH, FORM)


@jit
def _start_tile(first, second, first_unit, second_unit, top, decay, values, place, ones, state, FORM: gl.constexpr):
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
        partial = _start_values(first_p, values.index(place), product, True, FORM)
    else:
        output = output * gl.convert_layout(decay, FORM.output_rows)[:, None]
        partial = _start_values(first_p, values.index(place), output, False, FORM)
    second_p = first_p
    if FORM.blocks == 2:
        second_p, second_sum = probabilities(second, second_unit, top, values.dtype, FORM)
        partial = _start_values(second_p, values.index(place + 1), partial, False, FORM)
        first_sum = first_sum + second_sum
    if FORM.codes:
        return partial, _start_sums(first_p, second_p, ones, tile_sum, True, FORM), row_sum
    else:
        lanes: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
        return partial, tile_sum, row_sum * gl.convert_layout(decay, lanes)[:, None] + first_sum


@jit
def _wait_for_tile(pending, state, PENDING: gl.constexpr, FORM: gl.constexpr):
    """Wait for what `_start_tile` started, though not for the last PENDING products since. Returns the state."""
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
        Output; row sums; row maxima, in steps; the next turn.
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
    _await_stage(full, turn, True, FORM)
    pending = _start_scores(query, keys.index(stage), FORM)
    more = count > FORM.blocks
    next_stage = gl.where(more, (turn + 1) % FORM.stages, stage)
    _await_stage(full, turn + 1, more, FORM)

    query_unit = gl.maximum(gl.abs(scale) * LOG2_E, SMALLEST_SCALE)
    threshold = 0.0
    if FORM.has_threshold:
        threshold = gl.load(threshold_ptr) * (LOG2_E * steps)
    row_max = gl.full((ROWS,), float("-inf"), gl.float32, FORM.rows)
    output = gl.full((ROWS, FORM.value_dim), 0.0, gl.float32, FORM.output)
    product = output if FORM.fp8_values else gl.to_tensor(0.0)
    if FORM.codes:
        row_sum = gl.full((ROWS, 8), 0.0, gl.float32, FORM.sums)
        tile_sum = row_sum
    else:
        row_sum = lane_sum(gl.full((ROWS, BLOCK_K), 0.0, gl.float32, FORM.probability), FORM.k_width)
        tile_sum = gl.to_tensor(0.0)
    first_unit, second_unit = units_of(units, stage, query_unit, FORM)
    masked_tiles = _note(masked, stage, FORM)
    for position in range(0, gl.maximum(count, 1), FORM.blocks):
        place = stage * FORM.blocks
        scores = warpgroup_mma_wait(0, deps=[pending])
        if masked_tiles != 0:
            scores = hide(scores, blocks, place, first_query, sizes, FORM)
        first, second = halves(scores, FORM.blocks)
        local_max = tile_max(first, second, first_unit, second_unit, FORM)
        new_max = gl.maximum(row_max, local_max)
        safe_max = gl.where(new_max == float("-inf"), 0.0, new_max)
        decay = gl.exp2((row_max - safe_max) * (1.0 / steps))
        if FORM.codes:
            decay = decay + (first_unit + second_unit) * 0.0  # NaN, because codes cannot carry one
        row_max = new_max

        state = (output, product, tile_sum, row_sum)
        if FORM.has_threshold:
            gap = gl.where(local_max == float("-inf"), float("-inf"), local_max - new_max)
            is_below = gap < threshold
            if not FORM.quantized:  # a maximum ignores NaN, and NaN must not be skipped
                broken = gl.max((scores != scores).to(gl.int32), 1)
                is_below = is_below & (gl.convert_layout(broken, FORM.rows) == 0)
            is_below = is_below | (first_query + gl.arange(0, ROWS, FORM.rows) >= q_len)
            if gl.min(is_below.to(gl.int32), 0) == 0:  # one answer for the warpgroup
                pending_tile = _start_tile(
                    first, second, first_unit, second_unit, safe_max - one, decay, values, place, ones, state, FORM
                )
                finished = _wait_for_tile(pending_tile, state, 0, FORM)
                output, product, tile_sum, row_sum = _add_tile(finished, decay, FORM)
            pending = _start_scores(query, keys.index(next_stage), FORM)
        else:
            pending_tile = _start_tile(
                first, second, first_unit, second_unit, safe_max - one, decay, values, place, ones, state, FORM
            )
            # After the last tile this repeats its scores, which nobody reads.
            pending = _start_scores(query, keys.index(next_stage), FORM)
            output, product, tile_sum, row_sum = _wait_for_tile(pending_tile, state, 1, FORM)
        mbarrier.arrive(free.index(stage), count=1)
        turn += 1
        stage = next_stage
        more = position + 2 * FORM.blocks < count
        next_stage = gl.where(more, (turn + 1) % FORM.stages, stage)
        _await_stage(full, turn + 1, more, FORM)
        if position + FORM.blocks < count:
            first_unit, second_unit = units_of(units, stage, query_unit, FORM)
            masked_tiles = _note(masked, stage, FORM)
        if not FORM.has_threshold:
            output, product, tile_sum, row_sum = _add_tile((output, product, tile_sum, row_sum), decay, FORM)
    scores = warpgroup_mma_wait(0, deps=[pending])
    return output, row_sum, row_max, turn


@jit
def _start_guessed(
    scores, first_unit, second_unit, guess, values, tile, ones, sums, FRESH: gl.constexpr, FORM: gl.constexpr
):
    """Codes of a tile relative to a guess, and what `_start_codes` starts with them.

    Returns:
        P V and row sums, pending; the codes of both key blocks in 16 bits.
    """
    product, tile_sum = sums
    first, second = halves(scores, FORM.blocks)
    first_p, first_words = codes_below(first, first_unit, guess, FREE, FORM)
    second_p, second_words = codes_below(second, second_unit, guess, FREE, FORM)
    partial, partial_sum = _start_codes(first_p, second_p, values, tile, ones, product, tile_sum, FRESH, FORM)
    return partial, partial_sum, first_words, second_words


@jit
def guess_row(PART: gl.constexpr, operands, notes, barriers, row, turn, FORM: gl.constexpr):
    """A row's pairs of tiles; codes only. The first and the masked ones are measured, and those that exceed a guess.

    The output counts in units of 2^(base / 8), where base is the largest score measured; each pair's codes are relative
    to its own guess. The tensor cores add the products of a pair, in 13 bits; pairs are added in float32.

    Args:
        PART: which of the two consumers this is.
        notes: as in `measure_row`; -2 instead of a number of tiles if nothing but the last block is missing, which can
            be guessed. The others: see `measure_row`.

    Returns:
        Output; row sums; base, in steps; the next turn.
    """
    query, keys, values, ones = operands
    units, blocks, masked = notes
    _, _, full, free = barriers
    first_query, sizes, count = row
    octaves: gl.constexpr = 1.0 / FORM.steps
    left = (gl.maximum(count, 1) + FORM.stage_blocks - 1) // FORM.stage_blocks
    _await_stage(full, turn, True, FORM)
    pending = _start_scores(query, keys.index(turn % FORM.stages * 2), FORM)
    _await_stage(full, turn + 1, left > 1, FORM)
    base = gl.full((ROWS,), LOWEST, gl.float32, FORM.rows)
    guess = base
    output = gl.full((ROWS, FORM.value_dim), 0.0, gl.float32, FORM.output)
    product = output
    row_sum = gl.full((ROWS, 8), 0.0, gl.float32, FORM.sums)
    tile_sum = row_sum
    careful = 1 if FORM.is_causal else FIRST_PAIRS  # pairs to measure before the first guess
    while left > 0:  # with the scores of this pair's first tile on their way, and the next pair landed
        stage = turn % FORM.stages
        next_stage = gl.where(left > 1, (turn + 1) % FORM.stages, stage)
        note = _note(masked, stage, FORM)
        next_note = _note(masked, next_stage, FORM)
        tiles = gl.where(note > 0, note, 2)
        lowest = gl.full((ROWS,), float("inf"), gl.float32, FORM.rows)
        for t in range(0, tiles):
            tile = stage * 2 + t
            first_unit, second_unit = units_of(units, tile, 1.0, FORM)
            scores = warpgroup_mma_wait(0, deps=[pending])
            if note != 0:
                scores = hide(scores, blocks, tile * FORM.blocks, first_query, sizes, FORM)
            if note < 0:  # the unit of the last block, which is missing, is NaN
                second_unit = gl.where(second_unit == second_unit, second_unit, 1.0)
            first, second = halves(scores, FORM.blocks)
            highest = tile_max(first, second, first_unit, second_unit, FORM)
            lowest = gl.minimum(lowest, highest)
            new_base = gl.maximum(base, highest)
            decay = gl.exp2((base - new_base) * octaves) + (first_unit + second_unit) * 0.0  # NaN: codes carry none
            base = new_base
            first_p, _words = codes_below(first, first_unit, base, CLAMPED, FORM)
            second_p, _words = codes_below(second, second_unit, base, CLAMPED, FORM)
            partial, partial_sum = _start_codes(first_p, second_p, values, tile, ones, product, tile_sum, True, FORM)
            # After the last tile this repeats scores that nobody reads.
            pending = _start_scores(query, keys.index(gl.where(t + 1 < tiles, tile + 1, next_stage * 2)), FORM)
            product, tile_sum = warpgroup_mma_wait(1, deps=[partial, partial_sum])
            output = output * gl.convert_layout(decay, FORM.output_rows)[:, None] + product
            row_sum = row_sum * gl.convert_layout(decay, FORM.sum_rows)[:, None] + tile_sum
        mbarrier.arrive(free.index(stage), count=1)
        guess = guess_after_measuring(lowest, base, guess)  # a peak in one tile is no reason to expect another
        turn += 1
        left -= 1
        _await_stage(full, turn + 1, left > 1, FORM)

        is_right = gl.to_tensor(True)
        careful -= 1
        go = (careful <= 0) & (left > 0) & (next_note <= 0)
        while go:
            stage = turn % FORM.stages
            tile = stage * 2
            next_stage = gl.where(left > 1, (turn + 1) % FORM.stages, stage)
            first_unit, second_unit = units_of(units, tile, 1.0, FORM)
            scores = warpgroup_mma_wait(0, deps=[pending])
            sums = (product, tile_sum)
            partial, partial_sum, first_words, second_words = _start_guessed(
                scores, first_unit, second_unit, guess, values, tile, ones, sums, True, FORM
            )
            pending = _start_scores(query, keys.index(tile + 1), FORM)
            words = largest_words(first_words, second_words)

            first_unit, second_unit = units_of(units, tile + 1, 1.0, FORM)
            next_note = _note(masked, next_stage, FORM)
            scores, product, tile_sum = warpgroup_mma_wait(0, deps=[pending, partial, partial_sum])
            sums = (product, tile_sum)
            partial, partial_sum, first_words, second_words = _start_guessed(
                scores, first_unit, second_unit, guess, values, tile + 1, ones, sums, False, FORM
            )
            pending = _start_scores(query, keys.index(next_stage * 2), FORM)
            words = larger(words, largest_words(first_words, second_words))
            weight = gl.exp2((guess - base) * octaves)
            following = next_guess(reached_score(words, guess, FORM), base, guess)

            product, tile_sum = warpgroup_mma_wait(1, deps=[partial, partial_sum])
            is_right = fits(words, PART)
            mbarrier.arrive(free.index(stage), count=1, pred=is_right)
            if is_right:
                output = output + product * gl.convert_layout(weight, FORM.output_rows)[:, None]
                row_sum = row_sum + tile_sum * gl.convert_layout(weight, FORM.sum_rows)[:, None]
                guess = following
            turn += 1
            left -= 1
            _await_stage(full, turn + 1, is_right & (left > 1), FORM)
            go = is_right & (left > 0) & (next_note <= 0)
        if not is_right:  # back to this pair, to measure it
            turn -= 1
            left += 1
            scores = warpgroup_mma_wait(0, deps=[pending])
            pending = _start_scores(query, keys.index(turn % FORM.stages * 2), FORM)
    scores = warpgroup_mma_wait(0, deps=[pending])
    return output, row_sum, base, turn
