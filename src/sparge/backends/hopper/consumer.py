"""The consumers: two warpgroups, each of which computes 64 of the 128 queries of every output tile.

for each tile:   wait until Q is full
    for each stage:   wait for S  ->  maximum  ->  P  ->  issue P V  ->  issue the next S
                      ->  wait for P V  ->  release the stage  ->  add P V to the output
    release Q  ->  epilogue
"""

from __future__ import annotations

from sparge.backends.gpu.gluon import gl, jit, mbarrier, reinterpret, warpgroup_mma_wait
from sparge.backends.gpu.primitives import BLOCK_Q, FP8_RANGE, KEY_GROUPS, LOG2_E, ROW_REF_RANGE, SMALLEST_SCALE
from sparge.backends.hopper.accumulator import (
    MmaOperands,
    add_lower_part,
    add_stage,
    empty_accumulator,
    issue_stage,
    issue_stage_without_maximum,
    wait_for_stage,
)
from sparge.backends.hopper.aggregates import EMPTY, MEANS, NON_FINITE, PEAK, PLAIN, Metadata
from sparge.backends.hopper.epilogue import TileResult, load_epilogue_scales, write_tile
from sparge.backends.hopper.mma import issue_qk
from sparge.backends.hopper.scheduler import (
    NUM_STAGES,
    TILE,
    ConsumerTile,
    end_of_tiles,
    load_coordinates,
    load_lengths,
    load_number,
    load_tile_value,
)
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
    """Return the stage that a counter maps to, and the phase of its barriers."""
    counter = gl.to_tensor(counter).to(gl.uint32)  # unsigned division is cheaper
    return (counter % STAGES).to(gl.int32), ((counter // STAGES) & 1).to(gl.int32)


@jit
def _wait_full(full, counter, pred, STAGES: gl.constexpr):
    """Wait until the stage that ``counter`` maps to is full; do nothing unless ``pred``."""
    place, phase = _place_and_phase(counter, STAGES)
    mbarrier.wait(full.index(place), phase, pred=pred)


@jit
def _load_flags(metadata, stage, SPEC: gl.constexpr):
    """Load the flags of a stage, uniform over threads."""
    return load_number(metadata.flags.index(stage).slice(0, 1), SPEC)


@jit
def _wait_for_tile(metadata, query_full, tile_counter, SPEC: gl.constexpr):
    """Wait for the queries of a tile and return the tile's index."""
    query_stage = tile_counter % SPEC.query_stages
    _wait_full(query_full, tile_counter, True, SPEC.query_stages)
    return load_tile_value(metadata, query_stage, TILE, SPEC)


@jit
def _load_query_scale(CONSUMER: gl.constexpr, tile, scales, exact, SPEC: gl.constexpr):
    """Return the scale of each query's scores in score units: [64], or a scalar without quantization."""
    if SPEC.quantized:
        row = (tile // SPEC.value_slices).to(gl.int64)  # flat_head * q_blocks + q_block
        first = row * BLOCK_Q + CONSUMER * ROWS
        pointers = scales.query + (first + gl.arange(0, ROWS, SPEC.row_layout))
        return gl.load(pointers, mask=tile < end_of_tiles(exact.sizes, SPEC), other=1.0) * SPEC.units_per_log2
    else:
        return gl.maximum(gl.abs(exact.softmax_scale) * LOG2_E, SMALLEST_SCALE)


@jit
def _stage_ref(stage_max, row_max, SPEC: gl.constexpr):
    """Return the row reference of a stage, [64], from the row maximum of the stage and the running maximum.

    FP8 covers 15 powers of two, less than the range between an attention sink and a long tail. With FP8 values, each
    stage therefore has its own reference. The output is rescaled to the same reference; float32 can represent it as
    long as the reference is at most `ROW_REF_RANGE` below the running maximum.
    """
    if SPEC.fp8_values:
        return gl.maximum(stage_max, row_max - ROW_REF_RANGE * SPEC.units_per_log2)
    else:
        return row_max


@jit
def _main_loop(
    CONSUMER: gl.constexpr,
    operands,
    metadata,
    barriers,
    tile,
    num_stages,
    stage_counter,
    query_scale,
    threshold_ptr,
    exact,
    SPEC: gl.constexpr,
):
    """Compute online softmax over the stages of a tile.

    Args:
        tile: `ConsumerTile`.
        num_stages: number of stages of the tile, at least 1.
        stage_counter: number of stages used by earlier tiles.
        query_scale: see `_load_query_scale`.
        threshold_ptr: pointer to the threshold of the tile's head.
        exact: `ExactOperands` of coarse stages.

    Returns:
        The `TileResult`, and the new stage counter.
    """
    # Prologue: issue S of the first stage, and wait for the second stage
    units: gl.constexpr = SPEC.units_per_log2
    stage = stage_counter % SPEC.stages
    _wait_full(barriers.full, stage_counter, True, SPEC.stages)
    pending_scores = issue_qk(operands.query, operands.keys.index(stage), SPEC)
    has_next = num_stages > 1
    next_stage = gl.where(has_next, (stage_counter + 1) % SPEC.stages, stage)
    _wait_full(barriers.full, stage_counter + 1, has_next, SPEC.stages)

    threshold = 0.0
    if SPEC.has_threshold:
        threshold = gl.load(threshold_ptr) * (LOG2_E * units)
    row_max = gl.full((ROWS,), LOWEST, gl.float32, SPEC.row_layout)
    row_ref = row_max  # output and row sums are relative to it
    accumulator = empty_accumulator(SPEC)
    key_scales = load_key_scales(metadata, stage, SPEC)
    flags = _load_flags(metadata, stage, SPEC)
    skipped = 0
    poison = gl.to_tensor(0.0)  # NaN if a key is not finite, because FP8 bits derived from scores cannot be NaN
    end = stage_counter + num_stages

    # Main loop
    for counter in range(stage_counter, end):
        scores = warpgroup_mma_wait(0, deps=[pending_scores])  # [64, keys]
        scales = score_scales(query_scale, key_scales, SPEC)

        # Rare stages: coarse, masked, means, not finite, or with a marked peak
        if flags != PLAIN:
            scores, scales = adjust_scores(scores, scales, exact, metadata, tile, stage, flags, SPEC)
            if SPEC.exponential_free:
                poison = poison + gl.where((flags & NON_FINITE) != 0, float("nan"), 0.0)
            if SPEC.peaks == "marked":  # noqa: SIM102
                if (flags & PEAK) != 0:
                    stage_max = gl.max(max_by_lane(scores, scales, SPEC), 1)
                    new_ref = _stage_ref(stage_max, gl.maximum(row_max, stage_max), SPEC)
                    edge = new_ref - FP8_RANGE * units
                    scores, accumulator = add_lower_part(
                        scores, scales, edge, row_ref, operands, stage, accumulator, SPEC
                    )
                    row_ref = edge

        if SPEC.rescales_rarely:
            # Softmax and products with the row reference of an earlier stage. The next S is issued behind P V.
            pending, row_ref = issue_stage_without_maximum(scores, scales, row_ref, operands, stage, accumulator, SPEC)
            pending_scores = issue_qk(operands.query, operands.keys.index(next_stage), SPEC)
            accumulator = wait_for_stage(pending, accumulator, 1, SPEC)
            decay = row_ref  # unused: `add_stage` has nothing to add
        else:
            # Softmax: maximum and row reference of this stage
            lane_max = max_by_lane(scores, scales, SPEC)  # [64, 4]
            stage_max = gl.max(lane_max, 1)  # [64]
            row_max = gl.maximum(row_max, stage_max)
            new_ref = _stage_ref(stage_max, row_max, SPEC)
            p_ref = new_ref - SPEC.stored_one
            if SPEC.peaks == "every_tile":  # noqa: SIM102
                if any_far_below(lane_max, stage_max, CONSUMER, SPEC):
                    edge = new_ref - FP8_RANGE * units
                    scores, accumulator = add_lower_part(
                        scores, scales, edge, row_ref, operands, stage, accumulator, SPEC
                    )
                    row_ref = edge
            decay = gl.exp2((row_ref - new_ref) * (1.0 / units))

            # Products: P V of this stage, then S of the next stage, which reuses the registers of this S
            if SPEC.has_threshold:
                is_below = stage_max - row_max < threshold
                if not SPEC.quantized:  # the maximum ignores NaN, but NaN must not be skipped
                    has_nan = gl.max((scores != scores).to(gl.int32), 1)
                    is_below = is_below & (gl.convert_layout(has_nan, SPEC.row_layout) == 0)
                is_below = is_below | (tile.first_query + gl.arange(0, ROWS, SPEC.row_layout) >= tile.lengths.q_len)
                is_skipped = gl.min(is_below.to(gl.int32), 0)  # uniform over the warpgroup, so it can be branched on
                if SPEC.counts_blocks:
                    skipped += gl.where((flags & (MEANS | EMPTY)) == 0, is_skipped, 0)
                if is_skipped == 0:
                    pending = issue_stage(scores, scales, p_ref, decay, operands, stage, accumulator, SPEC)
                    accumulator = add_stage(wait_for_stage(pending, accumulator, 0, SPEC), decay, SPEC)
                    row_ref = new_ref
                pending_scores = issue_qk(operands.query, operands.keys.index(next_stage), SPEC)
            else:
                pending = issue_stage(scores, scales, p_ref, decay, operands, stage, accumulator, SPEC)
                # After the last stage, this recomputes S of the same stage, which is not used.
                pending_scores = issue_qk(operands.query, operands.keys.index(next_stage), SPEC)
                accumulator = wait_for_stage(pending, accumulator, 1, SPEC)
                row_ref = new_ref

        # Release the stage, wait for the stage after the next one, and load the metadata of the next stage
        mbarrier.arrive(barriers.empty.index(stage), count=1)
        stage = next_stage
        next_counter = counter + 2
        has_next = next_counter < end
        next_stage = gl.where(has_next, _place_and_phase(next_counter, SPEC.stages)[0], stage)
        _wait_full(barriers.full, next_counter, has_next, SPEC.stages)
        if counter + 1 < end:
            key_scales = load_key_scales(metadata, stage, SPEC)
            flags = _load_flags(metadata, stage, SPEC)
        elif SPEC.fp8_values:  # old scales would stay in registers throughout the loop
            key_scales = no_key_scales(SPEC)

        # Accumulate FP8 products in float32 while the tensor cores compute the next S
        if not SPEC.has_threshold:
            accumulator = add_stage(accumulator, decay, SPEC)

    # No product may be in flight when the epilogue begins
    scores = warpgroup_mma_wait(0, deps=[pending_scores])
    row_sum = accumulator.row_sum
    if SPEC.exponential_free:
        row_sum = row_sum + gl.convert_layout(query_scale * 0.0 + poison, SPEC.sums_row_layout)[:, None]
    result = TileResult(output=accumulator.output, row_sum=row_sum, row_ref=row_ref, skipped=skipped)
    return result, end


@jit
def _count_skipped(totals_ptr, skipped, coordinates, first_query, lengths):
    """Add a consumer's skipped products of a tile to the totals, in halves of blocks."""
    queries = lengths.q_len - coordinates.q_block * BLOCK_Q
    weight = gl.where(queries <= ROWS, 2, 1)  # also counts a second half without queries
    if (first_query < lengths.q_len) & (coordinates.value_slice == 0):
        gl.atomic_add(totals_ptr + 2, (skipped * weight).to(gl.int64), sem="relaxed")


@jit
def consume(CONSUMER: gl.constexpr, shared, scales, exact, threshold_ptr, counters, results, SPEC: gl.constexpr):
    """Run a consumer, which computes the first (CONSUMER 0) or the last (CONSUMER 1) 64 queries of every tile."""
    buffers, metadata, barriers, sizes = shared.buffers, shared.metadata, shared.barriers, exact.sizes
    # Views of shared memory
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

    # Loop over tiles, until the sentinel
    stage_counter = 0
    tile_counter = 0
    query_stage = 0
    tile = _wait_for_tile(metadata, barriers.query_full, tile_counter, SPEC)
    query_scale = _load_query_scale(CONSUMER, tile, scales, exact, SPEC)
    while tile < end_of_tiles(sizes, SPEC):
        # Main loop
        coordinates = load_coordinates(metadata, query_stage, sizes, SPEC)
        lengths = load_lengths(metadata, query_stage, sizes, SPEC)
        num_stages = load_tile_value(metadata, query_stage, NUM_STAGES, SPEC)
        query = queries.index(query_stage).slice(CONSUMER * ROWS, ROWS, 0)
        first_query = coordinates.q_block * BLOCK_Q + CONSUMER * ROWS
        result, stage_counter = _main_loop(
            CONSUMER,
            MmaOperands(query, keys, values, shared.ones),
            metadata,
            barriers,
            ConsumerTile(query_stage, first_query, lengths),
            num_stages,
            stage_counter,
            query_scale,
            threshold_ptr + coordinates.head,
            exact,
            SPEC,
        )

        # Release Q, and load the scales of the epilogue
        # Lengths and coordinates are reloaded to save registers in the main loop
        lengths = load_lengths(metadata, query_stage, sizes, SPEC)
        coordinates = load_coordinates(metadata, query_stage, sizes, SPEC)
        first_query = coordinates.q_block * BLOCK_Q + CONSUMER * ROWS
        mbarrier.arrive(barriers.query_empty.index(query_stage), count=1)
        if SPEC.counts_blocks and SPEC.has_threshold:
            _count_skipped(counters.totals, result.skipped, coordinates, first_query, lengths)
        epilogue_scales = load_epilogue_scales(scales, coordinates, first_query, sizes, lengths, SPEC)

        # Epilogue, and the next tile
        tile_counter += 1
        query_stage = tile_counter % SPEC.query_stages
        if SPEC.query_stages == 2:  # usually the next tile is ready: load its scale while the epilogue's scales arrive
            tile = _wait_for_tile(metadata, barriers.query_full, tile_counter, SPEC)
            query_scale = _load_query_scale(CONSUMER, tile, scales, exact, SPEC)
        write_tile(result, epilogue_scales, coordinates, first_query, sizes, lengths, results, SPEC)
        if SPEC.query_stages == 1:
            tile = _wait_for_tile(metadata, barriers.query_full, tile_counter, SPEC)
            query_scale = _load_query_scale(CONSUMER, tile, scales, exact, SPEC)
