"""A row whose maxima are guessed, for pairs of tiles; one is measured only if a score turns out higher than its guess.

From a pair's second key block on, two products are under way while the warpgroup computes codes of P:

    codes of block i  |  P V of block i - 1  |  S of block i + 1

Up to 64 value channels the registers suffice for whole tiles: codes of the second are computed under P V of the first.
"""

from __future__ import annotations

from sparge.backends.hopper.arithmetic import ROWS, halves, hide, tile_max, units_of
from sparge.backends.hopper.gluon import gl, jit, mbarrier, warpgroup_mma_wait
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
from sparge.backends.hopper.products import await_stage, note_of, ordered, start_block_scores, start_codes, start_scores

PRODUCTS_OF_BLOCK = gl.constexpr(2)
"""P V and row sums."""


@jit
def _half_of(sums):
    """Half of the columns of row sums, which are all the same."""
    half, _ = gl.split(gl.reshape(sums, (ROWS, 4, 2)))
    return half


@jit
def _start_tile_scores(query, key, FORM: gl.constexpr):
    """Start the scores of a tile, in one product or in one of each key block."""
    if FORM.guesses_by_blocks:
        return start_block_scores(query, key, 0, FORM), start_block_scores(query, key, 1, FORM)
    else:
        return (start_scores(query, key, FORM),)


@jit
def _wait_for_scores(pending, FORM: gl.constexpr):
    """Wait for what `_start_tile_scores` started, and all before it. Returns the scores of the two key blocks."""
    if FORM.guesses_by_blocks:
        return warpgroup_mma_wait(0, deps=[pending[0], pending[1]])
    else:
        return halves(warpgroup_mma_wait(0, deps=[pending[0]]), FORM.blocks)


@jit
def _start_tile_codes(first, second, values, tile, ones, sums, FRESH: gl.constexpr, FORM: gl.constexpr):
    """Start P V and row sums of a tile's codes, into the registers of ``sums``."""
    product, code_sum = start_codes(first, values.index(tile * 2), ones, sums[0], sums[1], FRESH, FORM)
    return start_codes(second, values.index(tile * 2 + 1), ones, product, code_sum, False, FORM)


@jit
def _start_measured(scores, tile_units, base, operands, tile, following, sums, FORM: gl.constexpr):
    """Codes of a tile relative to its maximum; P V and row sums on their way, and the scores of tile ``following``.

    Returns:
        These scores, of which one product was started last; P V and row sums, pending as well.
    """
    query, keys, values, ones = operands
    first_unit, second_unit = tile_units
    first_codes, _words = codes_below(scores[0], first_unit, base, CLAMPED, FORM)
    if FORM.guesses_by_blocks:
        sums = start_codes(first_codes, values.index(tile * 2), ones, sums[0], sums[1], True, FORM)
        first = start_block_scores(query, keys.index(following), 0, FORM)
        second_codes, _words = codes_below(scores[1], ordered(second_unit, base), base, CLAMPED, FORM)
        sums = start_codes(second_codes, values.index(tile * 2 + 1), ones, sums[0], sums[1], False, FORM)
        return (first, start_block_scores(query, keys.index(following), 1, FORM)), sums
    else:
        second_codes, _words = codes_below(scores[1], second_unit, base, CLAMPED, FORM)
        sums = _start_tile_codes(first_codes, second_codes, values, tile, ones, sums, True, FORM)
        return _start_tile_scores(query, keys.index(following), FORM), sums


@jit
def _guess_block(scores, unit, guess, value, ones, sums, FRESH: gl.constexpr, FORM: gl.constexpr):
    """Codes of a key block relative to a guess, and P V and row sums on their way.

    Returns:
        P V and row sums, pending; each thread's largest codes.
    """
    codes, words = codes_below(scores, unit, guess, FREE, FORM)
    return start_codes(codes, value, ones, sums[0], sums[1], FRESH, FORM), largest_words(words)


@jit
def _guess_by_blocks(pending, operands, units, stage, next_stage, guess, sums, FORM: gl.constexpr):
    """A pair of tiles relative to a guess, by key blocks.

    Args:
        pending: scores of the first tile, on their way.
        stage, next_stage: where the pair lies, and the next one.
        sums: product and sums of codes, of which only the registers are taken.

    Returns:
        The scores of the next pair's first tile; P V and row sums, pending as well; each thread's largest codes.
    """
    query, keys, values, ones = operands
    tile = stage * 2
    place = stage * FORM.stage_blocks
    first_unit, second_unit = units_of(units, tile, 1.0, FORM)
    # Both: ptxas runs all products in sequence if one is on its way from turn to turn that is not the next to be read.
    first, second = _wait_for_scores(pending, FORM)
    sums, words = _guess_block(first, first_unit, guess, values.index(place), ones, sums, True, FORM)
    first = start_block_scores(query, keys.index(tile + 1), 0, FORM)
    second_unit = ordered(second_unit, guess)  # this block's codes under P V of the first
    sums, more = _guess_block(second, second_unit, guess, values.index(place + 1), ones, sums, False, FORM)
    second = start_block_scores(query, keys.index(tile + 1), 1, FORM)
    words = larger(words, more)

    first_unit, second_unit = units_of(units, tile + 1, 1.0, FORM)
    scores = warpgroup_mma_wait(PRODUCTS_OF_BLOCK + 1, deps=[first])
    sums, more = _guess_block(scores, first_unit, guess, values.index(place + 2), ones, sums, False, FORM)
    first = start_block_scores(query, keys.index(next_stage * 2), 0, FORM)
    words = larger(words, more)
    scores = warpgroup_mma_wait(PRODUCTS_OF_BLOCK + 1, deps=[second])
    sums, more = _guess_block(scores, second_unit, guess, values.index(place + 3), ones, sums, False, FORM)
    second = start_block_scores(query, keys.index(next_stage * 2), 1, FORM)
    return (first, second), sums, larger(words, more)


@jit
def _guess_by_tiles(pending, operands, units, stage, next_stage, guess, sums, FORM: gl.constexpr):
    """A pair of tiles relative to a guess, by tiles. See `_guess_by_blocks`."""
    query, keys, values, ones = operands
    tile = stage * 2
    first_unit, second_unit = units_of(units, tile, 1.0, FORM)
    first, second = _wait_for_scores(pending, FORM)
    first_codes, words = codes_below(first, first_unit, guess, FREE, FORM)
    second_codes, more = codes_below(second, second_unit, guess, FREE, FORM)
    scores = start_scores(query, keys.index(tile + 1), FORM)
    sums = _start_tile_codes(first_codes, second_codes, values, tile, ones, sums, True, FORM)
    words = larger(largest_words(words), largest_words(more))

    first_unit, second_unit = units_of(units, tile + 1, 1.0, FORM)
    first, second = halves(warpgroup_mma_wait(2 * PRODUCTS_OF_BLOCK, deps=[scores]), FORM.blocks)
    first_codes, more = codes_below(first, first_unit, guess, FREE, FORM)
    words = larger(words, largest_words(more))
    second_codes, more = codes_below(second, second_unit, guess, FREE, FORM)
    words = larger(words, largest_words(more))
    sums = _start_tile_codes(first_codes, second_codes, values, tile + 1, ones, sums, False, FORM)
    return _start_tile_scores(query, keys.index(next_stage * 2), FORM), sums, words


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
    gl.static_assert(FORM.blocks == 2 and FORM.chunks == 1)
    query, keys, _, _ = operands
    units, blocks, masked = notes
    _, _, full, free = barriers
    first_query, sizes, count = row
    octaves: gl.constexpr = 1.0 / FORM.steps
    left = (gl.maximum(count, 1) + FORM.stage_blocks - 1) // FORM.stage_blocks
    await_stage(full, turn, True, FORM)
    pending = _start_tile_scores(query, keys.index(turn % FORM.stages * 2), FORM)
    await_stage(full, turn + 1, left > 1, FORM)
    base = gl.full((ROWS,), LOWEST, gl.float32, FORM.rows)
    guess = base
    output = gl.full((ROWS, FORM.value_dim), 0.0, gl.float32, FORM.output)
    product = output
    code_sum = gl.full((ROWS, 8), 0.0, gl.float32, FORM.sums)
    row_sum = _half_of(code_sum)
    sum_rows: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
    careful = 1 if FORM.is_causal else FIRST_PAIRS  # pairs to measure before the first guess
    while left > 0:  # with the scores of this pair's first tile on their way, and the next pair landed
        stage = turn % FORM.stages
        next_stage = gl.where(left > 1, (turn + 1) % FORM.stages, stage)
        note = note_of(masked, stage, FORM)
        next_note = note_of(masked, next_stage, FORM)
        tiles = gl.where(note > 0, note, 2)
        lowest = gl.full((ROWS,), float("inf"), gl.float32, FORM.rows)
        for t in range(0, tiles):
            tile = stage * 2 + t
            first_unit, second_unit = units_of(units, tile, 1.0, FORM)
            first, second = _wait_for_scores(pending, FORM)
            if note != 0:
                first = hide(first, blocks, tile * 2, first_query, sizes, FORM)
                second = hide(second, blocks, tile * 2 + 1, first_query, sizes, FORM)
            if note < 0:  # the unit of the last block, which is missing, is NaN
                second_unit = gl.where(second_unit == second_unit, second_unit, 1.0)
            highest = tile_max(first, second, first_unit, second_unit, FORM)
            lowest = gl.minimum(lowest, highest)
            new_base = gl.maximum(base, highest)
            decay = gl.exp2((base - new_base) * octaves) + (first_unit + second_unit) * 0.0  # NaN: codes carry none
            base = new_base
            following = gl.where(t + 1 < tiles, tile + 1, next_stage * 2)  # after the last tile, scores nobody reads
            scores, tile_units, sums = (first, second), (first_unit, second_unit), (product, code_sum)
            pending, sums = _start_measured(scores, tile_units, base, operands, tile, following, sums, FORM)
            product, code_sum = warpgroup_mma_wait(1, deps=[sums[0], sums[1]])
            output = output * gl.convert_layout(decay, FORM.output_rows)[:, None] + product
            row_sum = row_sum * gl.convert_layout(decay, sum_rows)[:, None] + _half_of(code_sum)
        mbarrier.arrive(free.index(stage), count=1)
        guess = guess_after_measuring(lowest, base, guess)  # a peak in one tile is no reason to expect another
        turn += 1
        left -= 1
        await_stage(full, turn + 1, left > 1, FORM)

        is_right = gl.to_tensor(True)
        careful -= 1
        go = (careful <= 0) & (left > 0) & (next_note <= 0)
        while go:
            stage = turn % FORM.stages
            next_stage = gl.where(left > 1, (turn + 1) % FORM.stages, stage)
            next_note = note_of(masked, next_stage, FORM)
            sums = (product, code_sum)
            if FORM.guesses_by_blocks:
                pending, sums, words = _guess_by_blocks(pending, operands, units, stage, next_stage, guess, sums, FORM)
            else:
                pending, sums, words = _guess_by_tiles(pending, operands, units, stage, next_stage, guess, sums, FORM)
            weight = gl.exp2((guess - base) * octaves)
            new_guess = next_guess(reached_score(words, guess, FORM), base, guess)
            product, code_sum = warpgroup_mma_wait(1, deps=[sums[0], sums[1]])
            is_right = fits(words, PART)
            mbarrier.arrive(free.index(stage), count=1, pred=is_right)
            if is_right:
                output = output + product * gl.convert_layout(weight, FORM.output_rows)[:, None]
                row_sum = row_sum + _half_of(code_sum) * gl.convert_layout(weight, sum_rows)[:, None]
                guess = new_guess
            turn += 1
            left -= 1
            await_stage(full, turn + 1, is_right & (left > 1), FORM)
            go = is_right & (left > 0) & (next_note <= 0)
        if not is_right:  # back to this pair, to measure it
            turn -= 1
            left += 1
            first, second = _wait_for_scores(pending, FORM)
            pending = _start_tile_scores(query, keys.index(turn % FORM.stages * 2), FORM)
    first, second = _wait_for_scores(pending, FORM)
    return output, row_sum, base, turn
