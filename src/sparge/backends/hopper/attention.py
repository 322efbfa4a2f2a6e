"""Attention over the kept blocks on Hopper: one producer warp copies, two consumer warpgroups compute.

The contract is that of `triton.attention`, its twin and oracle. A program serves whole rows of 128 queries, one after
the other; each consumer takes 64 of them, and a tile is two key blocks of 64.

    producer    walks the row's kept blocks; copies K and V of a tile, and notes scales and positions beside them
    consumer    S = Q K^T of the next tile and P V of this one run while this tile's softmax is computed

    for each tile:   wait for S  ->  row maximum  ->  P  ->  start P V  ->  start the next S
                     ->  wait for P V  ->  give the stage back  ->  acc = acc 2^(m - m') + P V

Barriers: ``full[stage]`` (a tile has landed), ``free[stage]`` (both consumers are done with it), and the same for the
queries. Layouts, and why P needs no exponentials: docs/hopper.md.

Grid: one program per multiprocessor. Each takes the next row when it is done with one, the longest causal rows first.
"""

from __future__ import annotations

from sparge.backends.hopper.arithmetic import (
    CODES_PER_OCTAVE,
    ONES_BITS,
    ROWS,
    TOP_CODE,
    halves,
    hide,
    lane_sum,
    probabilities,
    tile_max,
    units_of,
)
from sparge.backends.hopper.gluon import (
    async_load,
    barrier,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from sparge.backends.triton.primitives import (
    BLOCK_K,
    BLOCK_Q,
    INT32_AS_FLOAT,
    LN_2,
    LOG2_E,
    LOG2_FP8_MAX,
    SMALLEST_SCALE,
)


@jit
def _place(work, sizes, FORM: gl.constexpr):
    """Batch, head, head of K and V, head counted over batches, query block and slice of the value channels.

    Neighbouring rows share a head's K and V in the cache. Causal rows start with the longest.
    """
    heads, group, _, _, q_blocks, _, _ = sizes
    value_slice = work % FORM.slices
    work = work // FORM.slices
    q_block = work % q_blocks
    if FORM.is_causal:
        q_block = q_blocks - 1 - q_block
    flat_head = work // q_blocks
    batch = flat_head // heads
    head = flat_head % heads
    return batch, head, head // group, flat_head, q_block, value_slice


@jit
def _kept_blocks(kv_num_blocks_ptr, row, q_block, sizes, FORM: gl.constexpr):
    """How many blocks a row visits."""
    _, _, q_len, kv_len, _, kv_blocks, _ = sizes
    if FORM.all_blocks:
        count = kv_blocks
        if FORM.is_causal:
            last_query = gl.minimum((q_block + 1) * BLOCK_Q, q_len) - 1 + kv_len - q_len
            count = gl.minimum(kv_blocks, gl.maximum(last_query + BLOCK_K, 0) // BLOCK_K)
    else:
        count = gl.load(kv_num_blocks_ptr + row)
    return count


@jit
def _copy(tiles, batch, head, row, column, buffer, landed):
    """Start copying a tile of (B, H, rows, columns) into shared memory; what lies outside becomes 0."""
    buffer = reinterpret(buffer, tiles.dtype, tiles.block_shape, tiles.layout)
    async_load(tiles, [batch, head, row, column], landed, buffer)


@jit
def _produce(
    tiles,
    buffers,
    barriers,
    sizes,
    key_scale_ptr,
    lists,
    totals_ptr,
    taken_ptr,
    FORM: gl.constexpr,
):
    """One warp: copies a row's queries and the tiles of its kept blocks, as fast as stages are given back.

    Whoever is done takes the next row, so that rows of any length keep all programs busy.
    """
    query_tiles, key_tiles, value_tiles = tiles
    query_smem, key_smem, value_smem, unit_smem, block_smem, plain_smem, work_smem = buffers
    query_full, query_free, full, free = barriers
    heads, group, q_len, kv_len, q_blocks, kv_blocks, works = sizes
    kv_num_blocks_ptr, kv_indices_ptr, visible_num_blocks_ptr = lists
    chunks: gl.constexpr = FORM.chunks
    blocks: gl.constexpr = FORM.blocks
    value_copies: gl.constexpr = FORM.value_copies
    # One thread writes all notes of a tile: it is also the one that arrives.
    notes: gl.constexpr = gl.BlockedLayout([FORM.blocks], [32], [1], [0])
    places = gl.arange(0, blocks, notes)
    zero = gl.arange(0, 1, notes)
    tile = 0
    turn = 0
    work = gl.program_id(0)
    while work < works:
        batch, head, kv_head, flat_head, q_block, value_slice = _place(work, sizes, FORM)
        row = flat_head.to(gl.int64) * q_blocks + q_block
        count = _kept_blocks(kv_num_blocks_ptr, row, q_block, sizes, FORM)
        if FORM.count and value_slice == 0:
            gl.atomic_add(totals_ptr, count.to(gl.int64), sem="relaxed")
            gl.atomic_add(totals_ptr + 1, gl.load(visible_num_blocks_ptr + row).to(gl.int64), sem="relaxed")

        mbarrier.wait(query_free, (turn & 1) ^ 1)
        work_smem.index(0).store(zero + work)
        work_smem.index(1).store(zero + count)
        mbarrier.expect(query_full, FORM.query_bytes)
        for c in gl.static_range(chunks):
            _copy(query_tiles, batch, head, q_block * BLOCK_Q, c * FORM.chunk, query_smem.index(c), query_full)
        turn += 1

        plain_blocks = kv_len // BLOCK_K  # blocks from here on need an element mask
        if FORM.is_causal:
            seen_by_all = gl.maximum(q_block * BLOCK_Q + kv_len - q_len + 1, 0) // BLOCK_K
            plain_blocks = gl.minimum(plain_blocks, seen_by_all)
        last = gl.maximum(count - 1, 0)
        list_base = kv_indices_ptr + row * kv_blocks
        scale_base = key_scale_ptr + (batch.to(gl.int64) * (heads // group) + kv_head) * kv_blocks
        for position in range(0, gl.maximum(count, 1), blocks):  # a row that sees nothing gets one hidden tile
            stage = tile % FORM.stages
            is_listed = position + places < count  # what follows a list may be anything
            listed = gl.minimum(position + places, last)
            first = gl.minimum(position, last)
            second = gl.minimum(position + blocks - 1, last)
            if not FORM.all_blocks:
                listed = gl.load(list_base + listed, mask=is_listed, other=0)
                first = gl.load(list_base + first, mask=count > 0, other=0)
                second = gl.load(list_base + second, mask=count > 0, other=0)
            is_plain = (gl.maximum(first, second) < plain_blocks) & (position + blocks <= count)
            units = gl.full((blocks,), 1.0, gl.float32, notes)
            if FORM.quantized:
                units = gl.load(scale_base + listed, mask=is_listed, other=1.0)  # hidden keys may be NaN
            mbarrier.wait(free.index(stage), ((tile // FORM.stages) & 1) ^ 1)
            unit_smem.index(stage).store(units)
            block_smem.index(stage).store(gl.where(is_listed, listed, kv_blocks))
            plain_smem.index(stage).store(zero + is_plain.to(gl.int32))
            landed = full.index(stage)
            mbarrier.expect(landed, FORM.tile_bytes)
            for b in gl.static_range(blocks):
                block = first if b == 0 else second
                for c in gl.static_range(chunks):
                    buffer = key_smem.index((stage * chunks + c) * blocks + b)
                    _copy(key_tiles, batch, kv_head, block * BLOCK_K, c * FORM.chunk, buffer, landed)
                for c in gl.static_range(value_copies):
                    value_buffer = value_smem.index((stage * blocks + b) * value_copies + c)
                    if FORM.fp8_values:
                        channel = value_slice * FORM.value_dim
                        _copy(value_tiles, batch, kv_head, channel, block * BLOCK_K, value_buffer, landed)
                    else:
                        channel = c * FORM.value_columns
                        _copy(value_tiles, batch, kv_head, block * BLOCK_K, channel, value_buffer, landed)
            tile += 1
        work = gl.num_programs(0) + gl.atomic_add(taken_ptr, 1, sem="relaxed")
    mbarrier.wait(query_free, (turn & 1) ^ 1)
    work_smem.index(0).store(zero + works)
    mbarrier.arrive(query_full, count=1)


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
    if FORM.blocks == 2:
        second_p, second_sum = probabilities(second, second_unit, top, values.dtype, FORM)
        partial = _start_values(second_p, values.index(place + 1), partial, False, FORM)
        first_sum = first_sum + second_sum
    if FORM.codes:
        codes = gl.convert_layout(first_p, FORM.summand)
        partial_sum = warpgroup_mma(codes, ones, tile_sum, use_acc=False, is_async=True)
        if FORM.blocks == 2:
            codes = gl.convert_layout(second_p, FORM.summand)
            partial_sum = warpgroup_mma(codes, ones, partial_sum, is_async=True)
        return partial, partial_sum, row_sum
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
def _consume(
    PART: gl.constexpr,
    buffers,
    barriers,
    sizes,
    ones,
    scales,
    threshold_ptr,
    results,
    scale,
    FORM: gl.constexpr,
):
    """One warpgroup: 64 queries of every row, the first (PART 0) or the second half of its 128.

    The tensor cores add FP8 products in 13 bits: there, each tile gets a fresh accumulator, added in float32 while the
    next scores are computed. 16-bit products are added in place.
    """
    query_smem, key_smem, value_smem, unit_smem, block_smem, plain_smem, work_smem = buffers
    query_full, query_free, full, free = barriers
    heads, group, q_len, _, q_blocks, _, works = sizes
    query_scale_ptr, value_scale_ptr, lse_shift_ptr = scales
    output_ptr, lse_ptr = results
    # Scores count steps: octaves, or eighths of one where P is a code. P = 1 is stored as the largest number.
    steps: gl.constexpr = CODES_PER_OCTAVE if FORM.codes else 1.0
    one: gl.constexpr = TOP_CODE if FORM.codes else LOG2_FP8_MAX if FORM.fp8_values else 0.0
    query = reinterpret(query_smem, query_smem.dtype, [BLOCK_Q, FORM.head_dim], FORM.key_tile)
    query = query.slice(PART * ROWS, ROWS, 0)
    keys = reinterpret(key_smem, key_smem.dtype, [FORM.stages, FORM.keys, FORM.head_dim], FORM.key_tile)
    values = reinterpret(value_smem, value_smem.dtype, FORM.value_shape, FORM.value_tile)
    units = reinterpret(unit_smem, gl.float32, [FORM.stages * FORM.blocks, 1], FORM.plain)
    blocks = reinterpret(block_smem, gl.int32, [FORM.stages * FORM.blocks, 1], FORM.plain)
    tile = 0
    turn = 0
    mbarrier.wait(query_full, 0)
    work = gl.max(work_smem.index(0).load(FORM.rows), 0)
    while work < works:
        batch, head, kv_head, flat_head, q_block, value_slice = _place(work, sizes, FORM)
        count = gl.max(work_smem.index(1).load(FORM.rows), 0)
        stage = tile % FORM.stages
        mbarrier.wait(full.index(stage), (tile // FORM.stages) & 1)
        pending = _start_scores(query, keys.index(stage), FORM)
        more = count > FORM.blocks
        next_stage = gl.where(more, (tile + 1) % FORM.stages, stage)
        mbarrier.wait(full.index(next_stage), ((tile + 1) // FORM.stages) & 1, pred=more)

        row = flat_head.to(gl.int64) * q_blocks + q_block
        first_query = q_block * BLOCK_Q + PART * ROWS
        if FORM.quantized:
            query_unit = gl.load(query_scale_ptr + row) * steps
        else:
            query_unit = gl.maximum(gl.abs(scale) * LOG2_E, SMALLEST_SCALE)
        threshold = 0.0
        if FORM.has_threshold:
            threshold = gl.load(threshold_ptr + head) * (LOG2_E * steps)
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
        is_plain = gl.max(plain_smem.index(stage).load(FORM.rows), 0) != 0
        for position in range(0, gl.maximum(count, 1), FORM.blocks):
            place = stage * FORM.blocks
            scores = warpgroup_mma_wait(0, deps=[pending])
            if not is_plain:
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
            tile += 1
            stage = next_stage
            more = position + 2 * FORM.blocks < count
            next_stage = gl.where(more, (tile + 1) % FORM.stages, stage)
            mbarrier.wait(full.index(next_stage), ((tile + 1) // FORM.stages) & 1, pred=more)
            first_unit, second_unit = units_of(units, stage, query_unit, FORM)
            is_plain = gl.max(plain_smem.index(stage).load(FORM.rows), 0) != 0
            if not FORM.has_threshold:
                output, product, tile_sum, row_sum = _add_tile((output, product, tile_sum, row_sum), decay, FORM)
        scores = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(query_free, count=1)
        turn += 1

        if FORM.codes:
            total = gl.convert_layout(gl.max(row_sum, 1), FORM.output_rows)
        else:
            total = gl.convert_layout(gl.sum(row_sum, 1), FORM.output_rows)
        # Only both: a row of NaN has no maximum, and where scores are huge all codes may be 0.
        empty = (total == 0.0) & (gl.convert_layout(row_max, FORM.output_rows) == float("-inf"))
        output = output * (1.0 / gl.where(empty, 1.0, total))[:, None]
        channels = value_slice * FORM.value_dim + gl.arange(0, FORM.value_dim, FORM.output_columns)
        if FORM.fp8_values:
            scale_base = value_scale_ptr + (batch.to(gl.int64) * (heads // group) + kv_head) * FORM.value_scales
            output = output * gl.load(scale_base + channels, mask=channels < FORM.output_dim, other=0.0)[None, :]
        positions = first_query + gl.arange(0, ROWS, FORM.output_rows)
        inside = positions < q_len
        flat_queries = flat_head.to(gl.int64) * q_len + positions
        output_ptrs = output_ptr + flat_queries[:, None] * FORM.output_dim + channels[None, :]
        output = gl.where(empty[:, None], 0.0, output).to(output_ptr.dtype.element_ty)
        gl.store(output_ptrs, output, mask=inside[:, None] & (channels < FORM.output_dim)[None, :])
        log2_top: gl.constexpr = LOG2_FP8_MAX if FORM.fp8_values else 0.0
        octaves = gl.convert_layout(row_max, FORM.output_rows) * (1.0 / steps)
        lse = (octaves + gl.log2(total) - log2_top) * LN_2
        if FORM.quantized:
            lse = lse + gl.load(lse_shift_ptr + flat_queries, mask=inside, other=0.0)
        gl.store(lse_ptr + flat_queries, gl.where(empty, float("-inf"), lse), mask=inside & (value_slice == 0))

        mbarrier.wait(query_full, turn & 1)
        work = gl.max(work_smem.index(0).load(FORM.rows), 0)


@jit(do_not_specialize=["heads", "group", "q_len", "kv_len", "q_blocks", "kv_blocks", "works"])
def attention_kernel(
    query_tiles,
    key_tiles,
    value_tiles,
    query_scale_ptr,
    key_scale_ptr,
    value_scale_ptr,
    lse_shift_ptr,
    kv_num_blocks_ptr,
    kv_indices_ptr,
    visible_num_blocks_ptr,
    totals_ptr,
    taken_ptr,
    threshold_ptr,
    output_ptr,
    lse_ptr,
    scale,
    heads,
    group,
    q_len,
    kv_len,
    q_blocks,
    kv_blocks,
    works,
    FORM: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Allocates shared memory and barriers, and starts the roles."""
    query_smem = gl.allocate_shared_memory(query_tiles.dtype, [FORM.chunks, BLOCK_Q, FORM.chunk], FORM.key_tile)
    key_smem = gl.allocate_shared_memory(
        key_tiles.dtype, [FORM.stages * FORM.chunks * FORM.blocks, BLOCK_K, FORM.chunk], FORM.key_tile
    )
    value_smem = gl.allocate_shared_memory(
        value_tiles.dtype,
        [FORM.stages * FORM.blocks * FORM.value_copies, FORM.value_rows, FORM.value_columns],
        FORM.value_tile,
    )
    unit_smem = gl.allocate_shared_memory(gl.float32, [FORM.stages, FORM.blocks], FORM.plain)
    block_smem = gl.allocate_shared_memory(gl.int32, [FORM.stages, FORM.blocks], FORM.plain)
    plain_smem = gl.allocate_shared_memory(gl.int32, [FORM.stages, 1], FORM.plain)
    work_smem = gl.allocate_shared_memory(gl.int32, [2, 1], FORM.plain)
    # Stored as integers: Triton 3.6 gets small FP8 tiles wrong. All bytes are the same, so the layout does not matter.
    ones_smem = gl.allocate_shared_memory(gl.int32, [8 * BLOCK_K // 4], FORM.plain)
    ones_smem.store(gl.full((8 * BLOCK_K // 4,), ONES_BITS, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    ones = reinterpret(ones_smem, gl.float8e4nv, [8, BLOCK_K], FORM.ones_tile).permute((1, 0))
    full = gl.allocate_shared_memory(gl.int64, [FORM.stages, 1], FORM.barrier)
    free = gl.allocate_shared_memory(gl.int64, [FORM.stages, 1], FORM.barrier)
    query_full = gl.allocate_shared_memory(gl.int64, [1], FORM.barrier)
    query_free = gl.allocate_shared_memory(gl.int64, [1], FORM.barrier)
    stages: gl.constexpr = FORM.stages
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    mbarrier.init(query_full, count=1)
    mbarrier.init(query_free, count=2)
    fence_async_shared()
    barrier()

    tiles = (query_tiles, key_tiles, value_tiles)
    buffers = (query_smem, key_smem, value_smem, unit_smem, block_smem, plain_smem, work_smem)
    barriers = (query_full, query_free, full, free)
    sizes = (heads, group, q_len, kv_len, q_blocks, kv_blocks, works)
    scales = (query_scale_ptr, value_scale_ptr, lse_shift_ptr)
    lists = (kv_num_blocks_ptr, kv_indices_ptr, visible_num_blocks_ptr)
    results = (output_ptr, lse_ptr)
    gl.warp_specialize(
        [
            (_consume, (0, buffers, barriers, sizes, ones, scales, threshold_ptr, results, scale, FORM)),
            (_consume, (1, buffers, barriers, sizes, ones, scales, threshold_ptr, results, scale, FORM)),
            (_produce, (tiles, buffers, barriers, sizes, key_scale_ptr, lists, totals_ptr, taken_ptr, FORM)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
