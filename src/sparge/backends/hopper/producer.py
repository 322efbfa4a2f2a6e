"""The producer: one warp that copies queries, and keys and values of the kept blocks, as stages are given back."""

from __future__ import annotations

from sparge.backends.hopper.gluon import async_load, barrier, gl, jit, mbarrier, reinterpret
from sparge.backends.triton.primitives import BLOCK_K, BLOCK_Q, SMALLEST_SCALE


@jit
def place_of(work, sizes, FORM: gl.constexpr):
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
def _last_until(block, list_base, last, FORM: gl.constexpr):
    """Place of the last listed block that is not beyond ``block``, or 0. Each step asks 32 places of the list."""
    if FORM.all_blocks:
        return gl.minimum(block, last)
    else:
        lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        low = 0
        span = last + 1
        while span > 1:
            step = (span + 31) // 32
            listed = gl.load(list_base + low + lanes * step, mask=lanes * step < span, other=block + 1)
            before = gl.maximum(gl.sum((listed <= block).to(gl.int32), 0) - 1, 0) * step
            low += before
            span = gl.minimum(step, span - before)
        return low


@jit
def _outwards(i, center, count):
    """The i-th of ``count`` places around a center: itself, one after, one before, two after, ..., in a circle."""
    place = center + gl.where(i % 2 == 1, (i + 1) // 2, -(i // 2))
    place = gl.where(place < 0, place + count, place)
    return gl.where(place < count, place, place - count)


@jit
def _copy(tiles, batch, head, row, column, buffer, landed):
    """Start copying a tile of (B, H, rows, columns) into shared memory; what lies outside becomes 0."""
    buffer = reinterpret(buffer, tiles.dtype, tiles.block_shape, tiles.layout)
    async_load(tiles, [batch, head, row, column], landed, buffer)


@jit
def produce(
    tiles,
    buffers,
    barriers,
    sizes,
    scales,
    lists,
    totals_ptr,
    taken_ptr,
    FORM: gl.constexpr,
):
    """Whoever is done takes the next row, so that rows of any length keep all programs busy.

    Where maxima are guessed, a row that is not causal starts at the queries' own position, where scores are high as a
    rule, and goes outwards in turns: guesses are right sooner. Causal rows come to it last, and measure it.
    """
    query_tiles, key_tiles, value_tiles = tiles
    query_smem, key_smem, value_smem, unit_smem, block_smem, masked_smem, work_smem = buffers
    query_full, query_free, full, free = barriers
    heads, group, q_len, kv_len, q_blocks, kv_blocks, works = sizes
    kv_num_blocks_ptr, kv_indices_ptr, visible_num_blocks_ptr = lists
    query_scale_ptr, key_scale_ptr, _, _ = scales
    chunks: gl.constexpr = FORM.chunks
    blocks: gl.constexpr = FORM.stage_blocks
    value_copies: gl.constexpr = FORM.value_copies
    goes_outwards: gl.constexpr = FORM.guesses and not FORM.is_causal
    # Every thread writes the same notes. They meet before one of them arrives.
    notes: gl.constexpr = gl.BlockedLayout([FORM.stage_blocks], [32], [1], [0])
    places = gl.arange(0, blocks, notes)
    zero = gl.arange(0, 1, notes)
    turn = 0
    row_turn = 0
    work = gl.program_id(0)
    while work < works:
        batch, head, kv_head, flat_head, q_block, value_slice = place_of(work, sizes, FORM)
        row = flat_head.to(gl.int64) * q_blocks + q_block
        count = _kept_blocks(kv_num_blocks_ptr, row, q_block, sizes, FORM)
        if FORM.count and value_slice == 0:
            gl.atomic_add(totals_ptr, count.to(gl.int64), sem="relaxed")
            gl.atomic_add(totals_ptr + 1, gl.load(visible_num_blocks_ptr + row).to(gl.int64), sem="relaxed")

        slot = row_turn % FORM.rows_ahead
        mbarrier.wait(query_free.index(slot), ((row_turn // FORM.rows_ahead) & 1) ^ 1)
        work_smem.index(slot * 2).store(zero + work)
        work_smem.index(slot * 2 + 1).store(zero + count)
        barrier()
        mbarrier.expect(query_full.index(slot), FORM.query_bytes)
        for c in gl.static_range(chunks):
            query_buffer = query_smem.index(slot * chunks + c)
            _copy(query_tiles, batch, head, q_block * BLOCK_Q, c * FORM.chunk, query_buffer, query_full.index(slot))
        row_turn += 1
        following = gl.num_programs(0) + gl.atomic_add(taken_ptr, 1, sem="relaxed")

        plain_blocks = kv_len // BLOCK_K  # blocks from here on need an element mask
        if FORM.is_causal:
            seen_by_all = gl.maximum(q_block * BLOCK_Q + kv_len - q_len + 1, 0) // BLOCK_K
            plain_blocks = gl.minimum(plain_blocks, seen_by_all)
        last = gl.maximum(count - 1, 0)
        row_stages = last // blocks + 1  # a row that sees nothing gets a hidden tile
        list_base = kv_indices_ptr + row * kv_blocks
        scale_base = key_scale_ptr + (batch.to(gl.int64) * (heads // group) + kv_head) * kv_blocks
        query_unit = 1.0
        if FORM.quantized:
            query_unit = gl.load(query_scale_ptr + row) * FORM.steps
        center = 0
        if goes_outwards:
            own = (q_block * BLOCK_Q + gl.maximum(kv_len - q_len, 0)) // BLOCK_K
            center = _last_until(own, list_base, last, FORM) // blocks
        for i in range(0, row_stages):
            stage = turn % FORM.stages
            position = i * blocks
            if goes_outwards:
                position = _outwards(i, center, row_stages) * blocks
            is_listed = position + places < count  # what follows a list may be anything
            listed = gl.minimum(position + places, last)
            if not FORM.all_blocks:
                listed = gl.load(list_base + listed, mask=count > 0, other=0)
            units = gl.full((blocks,), 1.0, gl.float32, notes)
            if FORM.quantized:
                units = gl.load(scale_base + listed, mask=is_listed, other=1.0) * query_unit  # hidden keys may be NaN
                units = gl.where(units == 0.0, SMALLEST_SCALE, units)  # a hidden score is -inf before it is scaled
            is_plain = listed < plain_blocks
            if FORM.guesses:
                is_plain = is_plain & (gl.abs(units) < float("inf"))  # codes cannot carry NaN
            present = 1
            if FORM.tiles == 2:
                present = gl.where(position + FORM.blocks < count, 2, 1)
            all_plain = gl.min(is_plain.to(gl.int32), 0) == 1
            masked = gl.where(all_plain & (position + blocks <= count), 0, present)  # how many tiles need a mask
            if FORM.guesses:
                # A last block that is missing gets codes of 0 by a unit of NaN: such a pair can be guessed. The first
                # of a row never is.
                lacks_last = all_plain & (position + blocks == count + 1) & (i > 0)
                masked = gl.where(lacks_last, -2, masked)
                units = gl.where(lacks_last & (is_listed == 0), float("nan"), units)
            mbarrier.wait(free.index(stage), ((turn // FORM.stages) & 1) ^ 1)
            unit_smem.index(stage).store(units)
            block_smem.index(stage).store(gl.where(is_listed, listed, kv_blocks))
            masked_smem.index(stage).store(zero + masked)
            barrier()
            landed = full.index(stage)
            mbarrier.expect(landed, FORM.tile_bytes, pred=present == 1)
            if FORM.tiles == 2:
                mbarrier.expect(landed, 2 * FORM.tile_bytes, pred=present == 2)
            for b in gl.static_range(blocks):
                if b // FORM.blocks < present:
                    block = gl.sum(gl.where(places == b, listed, 0), 0)
                    key_place = (stage * FORM.tiles + b // FORM.blocks) * chunks * FORM.blocks + b % FORM.blocks
                    for c in gl.static_range(chunks):
                        key_buffer = key_smem.index(key_place + c * FORM.blocks)
                        _copy(key_tiles, batch, kv_head, block * BLOCK_K, c * FORM.chunk, key_buffer, landed)
                    for c in gl.static_range(value_copies):
                        value_buffer = value_smem.index((stage * blocks + b) * value_copies + c)
                        if FORM.fp8_values:
                            channel = value_slice * FORM.value_dim
                            _copy(value_tiles, batch, kv_head, channel, block * BLOCK_K, value_buffer, landed)
                        else:
                            channel = c * FORM.value_columns
                            _copy(value_tiles, batch, kv_head, block * BLOCK_K, channel, value_buffer, landed)
            turn += 1
        work = following
    slot = row_turn % FORM.rows_ahead
    mbarrier.wait(query_free.index(slot), ((row_turn // FORM.rows_ahead) & 1) ^ 1)
    work_smem.index(slot * 2).store(zero + works)
    barrier()
    mbarrier.arrive(query_full.index(slot), count=1)
