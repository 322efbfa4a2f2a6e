"""The producer: one warp that copies Q, and K and V of the kept blocks, to shared memory as stages are released.

for each tile:   wait until a query stage is empty  ->  tile metadata  ->  copy Q
    for each stage:   wait until it is empty  ->  stage metadata  ->  copy K and V of one or two kept blocks
    for each stage of means:   the same with 64 or 128 means
"""

from __future__ import annotations

from sparge.backends.gpu.gluon import async_load, barrier, gl, jit, mbarrier, reinterpret
from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q, KEY_GROUPS
from sparge.backends.hopper.aggregates import COARSE, EMPTY, MASKED, MEANS, NON_FINITE, PEAK, PLAIN
from sparge.backends.hopper.scheduler import (
    NUM_STAGES,
    TILE,
    coordinates_of,
    count_kept_blocks,
    end_of_mean_stages,
    end_of_tiles,
    first_mean_stage,
    first_visible_block,
    last_offset_of,
    lengths_of,
    store_coordinates,
    store_lengths,
    store_tile_value,
    take_turn,
    tile_of_turn,
    turn_of,
)

SCALES_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
"""Layout of the scales of a stage, one per lane."""


@jit
def _copy(descriptor, batch, head, row, column, buffer, full):
    """Start a TMA copy of a box of (B, H, rows, columns) to shared memory; elements outside of the tensor become 0."""
    buffer = reinterpret(buffer, descriptor.dtype, descriptor.block_shape, descriptor.layout)
    async_load(descriptor, [batch, head, row, column], full, buffer)


@jit
def _wait_empty(empty, counter, STAGES: gl.constexpr):
    """Wait until both consumers have released the stage that ``counter`` maps to; the first use does not wait."""
    mbarrier.wait(empty.index(counter % STAGES), ((counter // STAGES) & 1) ^ 1)


@jit
def _blocks_at(positions, list_ptr, count, last, first_block, SPEC: gl.constexpr):
    """Return the key blocks at positions of a tile's list of ``count`` blocks. Positions are clamped to ``last``."""
    blocks = gl.minimum(positions, last)
    if not SPEC.all_blocks:
        blocks = gl.load(list_ptr + blocks, mask=count > 0, other=0)
    elif SPEC.has_first:
        blocks += first_block
    return blocks


@jit
def _entry(numbers, PLACE: gl.constexpr):
    """Return entry PLACE of a tensor [N] that every thread holds completely."""
    places = gl.arange(0, numbers.shape[0], numbers.type.layout)
    return gl.sum(gl.where(places == PLACE, numbers, 0), 0)


@jit
def _load_key_scales(scale_ptr, block_numbers, position, count, SPEC: gl.constexpr):
    """Load the scales of a stage's key blocks, [4 * blocks]. Scales of missing blocks are 0; without quantization all
    are 1.

    Args:
        block_numbers: [blocks]; the first one is at ``position`` of a list of ``count`` blocks.
    """
    groups = gl.arange(0, SPEC.blocks * KEY_GROUPS, SCALES_LAYOUT)
    if SPEC.quantized:
        block = _entry(block_numbers, 0)
        if SPEC.blocks == 2:
            block = gl.where(groups < KEY_GROUPS, block, _entry(block_numbers, 1))
        is_listed = position + groups // KEY_GROUPS < count  # scales of hidden keys may be NaN
        return gl.load(scale_ptr + (block * KEY_GROUPS + groups % KEY_GROUPS), mask=is_listed, other=0.0)
    else:
        return gl.full((SPEC.blocks * KEY_GROUPS,), 1.0, gl.float32, SCALES_LAYOUT)


@jit
def _store_stage_metadata(metadata, stage, key_scale, flags, zero):
    """Store scales and flags of a stage for the consumers. Every thread stores the same values."""
    metadata.key_scale.index(stage).store(gl.where(key_scale == 0.0, 1.0, key_scale))  # 0 belongs to a missing block
    metadata.flags.index(stage).slice(0, 1).store(zero + flags)


@jit
def _largest_query_scale(scales, row, SPEC: gl.constexpr):
    """Return the largest scale of a tile's queries, in score units. ``row`` is the index of its query block."""
    rows = gl.arange(0, BLOCK_Q, gl.BlockedLayout([BLOCK_Q // 32], [32], [1], [0]))
    return gl.max(gl.load(scales.query + (row * BLOCK_Q + rows)), 0) * SPEC.units_per_log2


@jit
def _coarse_flags(query_scale, key_scale, SPEC: gl.constexpr):
    """Return COARSE where INT8 rounds scores too coarsely, else PLAIN.

    Args:
        query_scale: largest scale of the tile's queries, in score units.
        key_scale: scales of groups of keys, [N].
    """
    return gl.where(key_scale * query_scale >= SPEC.coarse_scale, COARSE, PLAIN)


@jit
def _non_finite_flags(numbers):
    """Return NON_FINITE where a number is NaN, else PLAIN."""
    return gl.where(numbers == numbers, PLAIN, NON_FINITE)


@jit
def _copy_query(descriptors, buffers, query_full, coordinates, query_stage, SPEC: gl.constexpr):
    """Start copying the queries of a tile."""
    batch, head, q_block = coordinates.batch, coordinates.head, coordinates.q_block
    chunks: gl.constexpr = SPEC.chunks
    stage_full = query_full.index(query_stage)
    mbarrier.expect(stage_full, SPEC.query_bytes)
    for c in gl.static_range(chunks):
        query_buffer = buffers.query.index(query_stage * chunks + c)
        _copy(descriptors.query, batch, head, q_block * BLOCK_Q, c * SPEC.chunk, query_buffer, stage_full)


@jit
def _copy_key_value(descriptors, buffers, full, coordinates, stage, block_numbers, first_value, SPEC: gl.constexpr):
    """Start copying K and V of a stage's blocks, ``block_numbers`` [blocks]. V starts at key ``first_value``."""
    chunks: gl.constexpr = SPEC.chunks
    blocks: gl.constexpr = SPEC.blocks
    value_copies: gl.constexpr = SPEC.value_copies
    batch, kv_head = coordinates.batch, coordinates.kv_head
    stage_full = full.index(stage)
    mbarrier.expect(stage_full, SPEC.stage_bytes)
    for b in gl.static_range(blocks):
        block = _entry(block_numbers, b)
        for c in gl.static_range(chunks):
            key_buffer = buffers.key.index((stage * chunks + c) * blocks + b)
            _copy(descriptors.key, batch, kv_head, block * BLOCK_K, c * SPEC.chunk, key_buffer, stage_full)
        for c in gl.static_range(value_copies):
            value_buffer = buffers.value.index((stage * blocks + b) * value_copies + c)
            if SPEC.fp8_values:
                channel = coordinates.value_slice * SPEC.value_dim
                _copy(descriptors.value, batch, kv_head, channel, block * BLOCK_K, value_buffer, stage_full)
            else:
                row, channel = block * BLOCK_K - first_value, c * SPEC.value_columns
                _copy(descriptors.value, batch, kv_head, row, channel, value_buffer, stage_full)


@jit
def produce(descriptors, means, shared, sizes, scales, lists, mean_bias_ptr, counters, SPEC: gl.constexpr):
    """Run the producer: copy the operands of one tile after the other, then pass a sentinel tile to the consumers.

    Args:
        descriptors: `Descriptors` of Q, K and V.
        means: `Descriptors` with block means as K and V.
    """
    buffers, metadata, barriers = shared.buffers, shared.metadata, shared.barriers
    blocks: gl.constexpr = SPEC.blocks
    # Every thread stores the same metadata. A warp barrier orders these stores before the arrival of one thread.
    by_block: gl.constexpr = gl.BlockedLayout([blocks], [32], [1], [0])
    places = gl.arange(0, blocks, by_block)
    columns = gl.arange(0, SPEC.keys, gl.BlockedLayout([SPEC.keys // 32], [32], [1], [0]))
    zero = gl.arange(0, 1, by_block)
    stage_counter = 0
    tile_counter = 0
    turn = gl.program_id(0)
    while turn < sizes.num_tiles:
        # Tile: coordinates, lengths and number of kept blocks
        tile = tile_of_turn(turn, lists.order, sizes, SPEC)
        row = (tile // SPEC.value_slices).to(gl.int64)  # flat_head * q_blocks + q_block, without a division
        coordinates = coordinates_of(tile, sizes, SPEC)
        lengths = lengths_of(coordinates.batch, lists.segments, sizes, SPEC)
        count = count_kept_blocks(lists.kv_num_blocks, row, coordinates.q_block, lengths, SPEC)

        # Tile metadata and Q
        query_stage = tile_counter % SPEC.query_stages
        _wait_empty(barriers.query_empty, tile_counter, SPEC.query_stages)
        store_tile_value(metadata, query_stage, TILE, tile, zero, SPEC)
        last = gl.maximum(count - 1, 0)
        num_stages = last // blocks + 1  # a tile without kept blocks gets one stage whose keys are all masked
        mean_begin = 0
        mean_end = 0
        if SPEC.means:
            mean_end = end_of_mean_stages(coordinates.q_block, lengths, SPEC)
            mean_begin = first_mean_stage(coordinates.q_block, mean_end, lengths, SPEC)
        store_tile_value(metadata, query_stage, NUM_STAGES, num_stages + (mean_end - mean_begin), zero, SPEC)
        store_coordinates(metadata, query_stage, coordinates, zero, SPEC)
        store_lengths(metadata, query_stage, lengths, zero, SPEC)
        barrier()
        _copy_query(descriptors, buffers, barriers.query_full, coordinates, query_stage, SPEC)
        tile_counter += 1

        # Range of key blocks that need no element mask, from `first_plain` to `plain_blocks` - 1
        plain_blocks = lengths.kv_len // BLOCK_K
        if SPEC.has_last:
            first_query = coordinates.q_block * BLOCK_Q
            seen_by_all = gl.maximum(first_query + last_offset_of(lengths, SPEC) + 1, 0) // BLOCK_K
            plain_blocks = gl.minimum(plain_blocks, seen_by_all)
        first_block = first_visible_block(coordinates.q_block, lengths, SPEC)
        first_plain = 0
        if SPEC.has_first:
            last_query = coordinates.q_block * BLOCK_Q + BLOCK_Q - 1
            first_plain = gl.maximum(last_query + lengths.first_offset + BLOCK_K - 1, 0) // BLOCK_K
        list_ptr = lists.kv_indices + row * sizes.kv_blocks
        flat_kv_head = coordinates.batch.to(gl.int64) * (sizes.heads // sizes.group) + coordinates.kv_head
        scale_ptr = scales.key + flat_kv_head * sizes.kv_blocks * KEY_GROUPS
        query_scale = gl.to_tensor(1.0)
        if SPEC.quantized:
            query_scale = _largest_query_scale(scales, row, SPEC)

        # Main loop: stages of kept blocks. To hide the latency of loads, block numbers are loaded two stages ahead, and
        # scales one stage ahead.
        block_numbers = _blocks_at(places, list_ptr, count, last, first_block, SPEC)
        next_numbers = _blocks_at(blocks + places, list_ptr, count, last, first_block, SPEC)
        key_scale = _load_key_scales(scale_ptr, block_numbers, 0, count, SPEC)
        for i in range(0, num_stages):
            position = i * blocks
            next_scale = _load_key_scales(scale_ptr, next_numbers, position + blocks, count, SPEC)
            later_numbers = _blocks_at(position + 2 * blocks + places, list_ptr, count, last, first_block, SPEC)

            # Flags
            stage = stage_counter % SPEC.stages
            is_listed = position + places < count  # the last stage may be incomplete
            is_plain = block_numbers < plain_blocks
            if SPEC.has_first:
                is_plain = is_plain & (block_numbers >= first_plain)
            # A missing block repeats the last block. Its P is 0 without a mask if FP8 bits are derived from scores that
            # are NaN.
            is_plain = is_plain & ((count > 0) if SPEC.exponential_free else is_listed)
            flags = gl.where(gl.min(is_plain.to(gl.int32), 0) == 1, PLAIN, MASKED)
            if SPEC.counts_blocks and SPEC.has_threshold:
                flags += gl.where(count == 0, EMPTY, 0)
            if SPEC.quantized:
                scale_flags = _coarse_flags(query_scale, gl.abs(key_scale), SPEC)
                if SPEC.peaks == "marked":
                    scale_flags |= gl.where(key_scale < 0, PEAK, PLAIN)
                if SPEC.exponential_free:  # FP8 bits derived from scores cannot be NaN
                    scale_flags |= _non_finite_flags(key_scale)
                flags += gl.reduce_or(scale_flags, 0)
                key_scale = gl.abs(key_scale)
                if SPEC.exponential_free:
                    key_scale = gl.where(key_scale == 0.0, float("nan"), key_scale)  # 0 belongs to a missing block

            # Metadata, then K and V
            _wait_empty(barriers.empty, stage_counter, SPEC.stages)
            _store_stage_metadata(metadata, stage, key_scale, flags, zero)
            metadata.block.index(stage).store(gl.where(is_listed, block_numbers, lengths.kv_blocks))
            barrier()
            first_value = sizes.first_value if SPEC.has_first else 0
            _copy_key_value(descriptors, buffers, barriers.full, coordinates, stage, block_numbers, first_value, SPEC)
            stage_counter += 1
            block_numbers, next_numbers, key_scale = next_numbers, later_numbers, next_scale

        # Take the next turn late, so that programs end at about the same time. The stages of means hide the latency.
        taken = take_turn(counters.turns, tile_counter)
        visible = gl.load(lists.visible_num_blocks + row) if SPEC.counts_blocks else gl.to_tensor(0)

        # Stages of means
        if SPEC.means:
            mean_blocks = (sizes.kv_blocks + BLOCK_K - 1) // BLOCK_K
            bias_ptr = mean_bias_ptr + row * sizes.bias_columns
            scale_ptr = scales.mean_key + flat_kv_head * mean_blocks * KEY_GROUPS
            for i in range(mean_begin, mean_end):
                stage = stage_counter % SPEC.stages
                position = i * blocks
                block_numbers = gl.minimum(position + places, mean_blocks - 1)
                key_scale = _load_key_scales(scale_ptr, block_numbers, position, mean_blocks, SPEC)
                flags = gl.to_tensor(MEANS)
                if SPEC.quantized:
                    flags += gl.reduce_or(_coarse_flags(query_scale, key_scale, SPEC), 0)
                bias = gl.load(bias_ptr + i * SPEC.keys + columns) * SPEC.units_per_log2
                if SPEC.exponential_free:
                    flags += gl.reduce_or(_non_finite_flags(bias), 0)
                _wait_empty(barriers.empty, stage_counter, SPEC.stages)
                _store_stage_metadata(metadata, stage, key_scale, flags, zero)
                metadata.block.index(stage).store(block_numbers)
                metadata.bias.index(stage).store(bias)
                barrier()
                _copy_key_value(means, buffers, barriers.full, coordinates, stage, block_numbers, 0, SPEC)
                stage_counter += 1
        # Counts, which must not delay the copies of a tile
        if SPEC.counts_blocks and coordinates.value_slice == 0:
            gl.atomic_add(counters.totals, count.to(gl.int64), sem="relaxed")
            gl.atomic_add(counters.totals + 1, visible.to(gl.int64), sem="relaxed")
        turn = turn_of(taken)

    # Sentinel: no further tile
    query_stage = tile_counter % SPEC.query_stages
    _wait_empty(barriers.query_empty, tile_counter, SPEC.query_stages)
    store_tile_value(metadata, query_stage, TILE, end_of_tiles(sizes, SPEC), zero, SPEC)
    barrier()
    mbarrier.arrive(barriers.query_full.index(query_stage), count=1)
