"""The consumers: two warpgroups, each of which computes 64 queries of every output tile.

for each tile:   wait until Q is full
    for each stage:   wait for S  ->  maximum  ->  P  ->  issue P V  ->  issue the next S
                      ->  wait for P V  ->  give the stage back  ->  add P V to the output
    give Q back  ->  epilogue
"""

from __future__ import annotations

from sparge.backends.gpu.gluon import gl, jit, mbarrier, reinterpret, warpgroup_mma_wait
from sparge.backends.gpu.primitives import BLOCK_Q, FP8_RANGE, KEY_GROUPS, LOG2_E, REACH, SMALLEST_SCALE
from sparge.backends.hopper.accumulator import (
    MmaOperands,
    add_lower_part,
    add_stage,
    empty_accumulator,
    issue_stage,
    issue_stage_without_maximum,
    wait_for_stage,
)
from sparge.backends.hopper.aggregates import MEANS, NON_FINITE, NOTHING, PEAK, PLAIN, Metadata
from sparge.backends.hopper.epilogue import TileResult, load_epilogue_scales, write_tile
from sparge.backends.hopper.lengths import NUM_STAGES, TILE, load_lengths, load_number, load_of_tile
from sparge.backends.hopper.mma import issue_qk
from sparge.backends.hopper.scheduler import coordinates_of, end_of_tiles
from sparge.backends.hopper.softmax import (
    LOWEST,
    adjust_scores,
    any_far_below,
    load_key_scales,
    max_by_lane,
    no_key_scales,
    score_scales,
)
from sparge.backends.hopper.spec import ROWS


@jit
def _place_and_phase(counter, STAGES: gl.constexpr):
    """The stage that a counter stands at, and the phase of its barriers. Unsigned, a remainder is one instruction."""
    counter = gl.to_tensor(counter).to(gl.uint32)
    return (counter % STAGES).to(gl.int32), ((counter // STAGES) & 1).to(gl.int32)


@jit
def _wait_full(full, counter, pred, STAGES: gl.constexpr):
    """Wait until the stage that the counter stands at has landed, if ``pred``."""
    place, phase = _place_and_phase(counter, STAGES)
    mbarrier.wait(full.index(place), phase, pred=pred)


@jit
def _load_flags(metadata, stage, SPEC: gl.constexpr):
    """What is unusual about a stage, the same number for all threads."""
    return load_number(metadata.flags.index(stage).slice(0, 1), SPEC)


@jit
def _wait_for_tile(metadata, query_full, tile_counter, SPEC: gl.constexpr):
    """Wait for the queries of a tile and say which tile it is."""
    query_stage = tile_counter % SPEC.query_stages
    _wait_full(query_full, tile_counter, True, SPEC.query_stages)
    return load_of_tile(metadata, query_stage, TILE, SPEC)


@jit
def _load_query_scale(CONSUMER: gl.constexpr, tile, scales, sizes, softmax_scale, SPEC: gl.constexpr):
    """The scale of each query's scores, [64], in steps: that of its codes, or one number for unquantised scores."""
    if SPEC.quantized:
        coordinates = coordinates_of(tile, sizes, SPEC)
        row = coordinates.flat_head.to(gl.int64) * sizes.q_blocks + coordinates.q_block
        first = row * BLOCK_Q + CONSUMER * ROWS
        pointers = scales.query_ptr + (first + gl.arange(0, ROWS, SPEC.row_layout))
        return gl.load(pointers, mask=tile < end_of_tiles(sizes, SPEC), other=1.0) * SPEC.steps_per_octave
    else:
        return gl.maximum(gl.abs(softmax_scale) * LOG2_E, SMALLEST_SCALE)


@jit
def _new_origin(stage_max, row_max, SPEC: gl.constexpr):
    """The score that P of a stage counts from, given its maximum and the row's so far; all [64].

    FP8 holds fewer octaves than lie between a sink and a long tail: its range belongs to a stage, not to a row. The
    output counts from the same score, and may grow in these units as long as float32 can hold it.
    """
    if SPEC.fp8_values:
        return gl.maximum(stage_max, row_max - REACH * SPEC.steps_per_octave)
    else:
        return row_max


@jit
def _attend(
    CONSUMER: gl.constexpr,
    operands,
    metadata,
    barriers,
    lengths,
    first_query,
    num_stages,
    stage_counter,
    query_scale,
    threshold_ptr,
    exact,
    query_stage,
    SPEC: gl.constexpr,
):
    """The main loop: online softmax over the stages of a tile, each with its own maximum.

    Args:
        first_query: of this consumer's 64.
        num_stages: of the tile, one or more.
        stage_counter: stages used so far, counted over all tiles.
        query_scale: [64], see `_load_query_scale`.
        threshold_ptr: of the tile's head.
        exact: what coarse stages are computed from; ``query_stage``, where the number of the tile is.

    Returns:
        What the epilogue needs; the stage counter.
    """
    steps: gl.constexpr = SPEC.steps_per_octave
    stage = stage_counter % SPEC.stages
    _wait_full(barriers.full, stage_counter, True, SPEC.stages)
    pending_scores = issue_qk(operands.query, operands.keys.index(stage), SPEC)
    has_next = num_stages > 1
    next_stage = gl.where(has_next, (stage_counter + 1) % SPEC.stages, stage)
    _wait_full(barriers.full, stage_counter + 1, has_next, SPEC.stages)

    threshold = 0.0
    if SPEC.has_threshold:
        threshold = gl.load(threshold_ptr) * (LOG2_E * steps)
    row_max = gl.full((ROWS,), LOWEST, gl.float32, SPEC.row_layout)
    row_origin = row_max  # what output and row sums count from
    accumulator = empty_accumulator(SPEC)
    key_scales = load_key_scales(metadata, stage, SPEC)
    flags = _load_flags(metadata, stage, SPEC)
    skipped = 0
    poison = gl.to_tensor(0.0)  # or NaN, which FP8 codes from the scores cannot carry
    end = stage_counter + num_stages
    for counter in range(stage_counter, end):
        scores = warpgroup_mma_wait(0, deps=[pending_scores])
        scales = score_scales(query_scale, key_scales, SPEC)
        if flags != PLAIN:
            scores, scales = adjust_scores(
                scores, scales, exact, metadata, query_stage, stage, flags, first_query, lengths, SPEC
            )
            if SPEC.exponential_free:
                poison = poison + gl.where((flags & NON_FINITE) != 0, float("nan"), 0.0)
            if SPEC.peaks == "marked":  # noqa: SIM102
                if (flags & PEAK) != 0:
                    stage_max = gl.max(max_by_lane(scores, scales, SPEC), 1)
                    new_origin = _new_origin(stage_max, gl.maximum(row_max, stage_max), SPEC)
                    edge = new_origin - FP8_RANGE * steps
                    scores, accumulator = add_lower_part(
                        scores, scales, edge, row_origin, operands, stage, accumulator, SPEC
                    )
                    row_origin = edge
        if SPEC.rescales_rarely:
            pending, row_origin = issue_stage_without_maximum(
                scores, scales, row_origin, operands, stage, accumulator, SPEC
            )
            pending_scores = issue_qk(operands.query, operands.keys.index(next_stage), SPEC)
            accumulator = wait_for_stage(pending, accumulator, 1, SPEC)
            decay = row_origin
        else:
            lane_max = max_by_lane(scores, scales, SPEC)
            stage_max = gl.max(lane_max, 1)
            row_max = gl.maximum(row_max, stage_max)
            new_origin = _new_origin(stage_max, row_max, SPEC)
            origin = new_origin - SPEC.steps_of_one
            if SPEC.peaks == "every_tile":  # noqa: SIM102
                if any_far_below(lane_max, stage_max, CONSUMER, SPEC):
                    edge = new_origin - FP8_RANGE * steps
                    scores, accumulator = add_lower_part(
                        scores, scales, edge, row_origin, operands, stage, accumulator, SPEC
                    )
                    row_origin = edge
            decay = gl.exp2((row_origin - new_origin) * (1.0 / steps))
            if SPEC.has_threshold:
                is_below = stage_max - row_max < threshold
                if not SPEC.quantized:  # a maximum ignores NaN, and NaN must not be skipped
                    has_nan = gl.max((scores != scores).to(gl.int32), 1)
                    is_below = is_below & (gl.convert_layout(has_nan, SPEC.row_layout) == 0)
                is_below = is_below | (first_query + gl.arange(0, ROWS, SPEC.row_layout) >= lengths.q_len)
                is_skipped = gl.min(is_below.to(gl.int32), 0)  # one answer for the warpgroup
                if SPEC.counts_skipped:
                    skipped += gl.where((flags & (MEANS | NOTHING)) == 0, is_skipped, 0)
                if is_skipped == 0:
                    pending = issue_stage(scores, scales, origin, decay, operands, stage, accumulator, SPEC)
                    accumulator = add_stage(wait_for_stage(pending, accumulator, 0, SPEC), decay, SPEC)
                    row_origin = new_origin
                pending_scores = issue_qk(operands.query, operands.keys.index(next_stage), SPEC)
            else:
                pending = issue_stage(scores, scales, origin, decay, operands, stage, accumulator, SPEC)
                # After the last stage this repeats its scores, which nobody reads.
                pending_scores = issue_qk(operands.query, operands.keys.index(next_stage), SPEC)
                accumulator = wait_for_stage(pending, accumulator, 1, SPEC)
                row_origin = new_origin
        mbarrier.arrive(barriers.empty.index(stage), count=1)
        stage = next_stage
        next_counter = counter + 2
        has_next = next_counter < end
        next_stage = gl.where(has_next, _place_and_phase(next_counter, SPEC.stages)[0], stage)
        _wait_full(barriers.full, next_counter, has_next, SPEC.stages)
        if counter + 1 < end:
            key_scales = load_key_scales(metadata, stage, SPEC)
            flags = _load_flags(metadata, stage, SPEC)
        elif SPEC.fp8_values:  # if they kept their values here, they would take registers in all of the loop
            key_scales = no_key_scales(SPEC)
        if not SPEC.has_threshold:
            accumulator = add_stage(accumulator, decay, SPEC)
    scores = warpgroup_mma_wait(0, deps=[pending_scores])
    row_sum = accumulator.row_sum
    if SPEC.exponential_free:
        row_sum = row_sum + gl.convert_layout(query_scale * 0.0 + poison, SPEC.sums_row_layout)[:, None]
    result = TileResult(output=accumulator.output, row_sum=row_sum, row_origin=row_origin, skipped=skipped)
    return result, end


@jit
def _count_skipped(totals_ptr, skipped, coordinates, first_query, lengths):
    """Add what a consumer skipped of a tile to the totals, in halves of blocks."""
    queries = lengths.q_len - coordinates.q_block * BLOCK_Q
    weight = gl.where(queries <= ROWS, 2, 1)  # a half without queries goes with the other
    if (first_query < lengths.q_len) & (coordinates.value_slice == 0):
        gl.atomic_add(totals_ptr + 2, (skipped * weight).to(gl.int64), sem="relaxed")


@jit
def consume(
    CONSUMER: gl.constexpr,
    buffers,
    metadata,
    barriers,
    sizes,
    ones,
    scales,
    threshold_ptr,
    results,
    softmax_scale,
    exact,
    SPEC: gl.constexpr,
):
    """A consumer's role: 64 queries of every tile, the first (CONSUMER 0) or the second half of its 128."""
    query_shape: gl.constexpr = [SPEC.query_stages, BLOCK_Q, SPEC.head_dim]
    queries = reinterpret(buffers.query, buffers.query.dtype, query_shape, SPEC.key_smem_layout)
    key_shape: gl.constexpr = [SPEC.stages, SPEC.keys, SPEC.head_dim]
    keys = reinterpret(buffers.key, buffers.key.dtype, key_shape, SPEC.key_smem_layout)
    values = reinterpret(buffers.value, buffers.value.dtype, SPEC.value_shape, SPEC.value_smem_layout)
    num_blocks: gl.constexpr = SPEC.stages * SPEC.blocks
    metadata = Metadata(
        key_scale=reinterpret(metadata.key_scale, gl.float32, [num_blocks, KEY_GROUPS], SPEC.metadata_smem_layout),
        block=reinterpret(metadata.block, gl.int32, [num_blocks, 1], SPEC.metadata_smem_layout),
        flags=metadata.flags,
        tile=metadata.tile,
        bias=reinterpret(metadata.bias, gl.float32, [num_blocks, SPEC.bias_columns], SPEC.metadata_smem_layout),
    )
    stage_counter = 0
    tile_counter = 0
    query_stage = 0
    tile = _wait_for_tile(metadata, barriers.query_full, tile_counter, SPEC)
    query_scale = _load_query_scale(CONSUMER, tile, scales, sizes, softmax_scale, SPEC)
    while tile < end_of_tiles(sizes, SPEC):
        coordinates = coordinates_of(tile, sizes, SPEC)
        lengths = load_lengths(metadata, query_stage, sizes, SPEC)
        num_stages = load_of_tile(metadata, query_stage, NUM_STAGES, SPEC)
        query = queries.index(query_stage).slice(CONSUMER * ROWS, ROWS, 0)
        first_query = coordinates.q_block * BLOCK_Q + CONSUMER * ROWS
        result, stage_counter = _attend(
            CONSUMER,
            MmaOperands(query=query, keys=keys, values=values, ones=ones),
            metadata,
            barriers,
            lengths,
            first_query,
            num_stages,
            stage_counter,
            query_scale,
            threshold_ptr + coordinates.head,
            exact,
            query_stage,
            SPEC,
        )
        lengths = load_lengths(metadata, query_stage, sizes, SPEC)  # again, to keep them out of the loop's registers
        mbarrier.arrive(barriers.query_empty.index(query_stage), count=1)
        if SPEC.counts_skipped:
            _count_skipped(results.totals_ptr, result.skipped, coordinates, first_query, lengths)
        epilogue_scales = load_epilogue_scales(scales, coordinates, first_query, sizes, lengths, SPEC)
        tile_counter += 1
        query_stage = tile_counter % SPEC.query_stages
        if SPEC.query_stages == 2:  # the next tile is here, as a rule; read its number while these scales are loaded
            tile = _wait_for_tile(metadata, barriers.query_full, tile_counter, SPEC)
            query_scale = _load_query_scale(CONSUMER, tile, scales, sizes, softmax_scale, SPEC)
        write_tile(result, epilogue_scales, coordinates, first_query, sizes, lengths, results, SPEC)
        if SPEC.query_stages == 1:
            tile = _wait_for_tile(metadata, barriers.query_full, tile_counter, SPEC)
            query_scale = _load_query_scale(CONSUMER, tile, scales, sizes, softmax_scale, SPEC)
