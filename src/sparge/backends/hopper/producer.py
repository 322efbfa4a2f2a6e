"""The producer: one warp that copies queries, and keys and values of the kept blocks, as stages are given back."""

from __future__ import annotations

from sparge.backends.cuda.primitives import BLOCK_K, BLOCK_Q, KEY_GROUPS
from sparge.backends.hopper.gluon import async_load, barrier, gl, jit, mbarrier, reinterpret

PLAIN, MASKED, BROKEN, SINK = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(4)
"""Kinds of a stage, which may be added: every query sees every key; some do not; a key is not finite; one is a sink."""


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
    """Whoever is done takes the next row, so that rows of any length keep all programs busy."""
    query_desc, key_desc, value_desc = tiles
    query_smem, key_smem, value_smem, unit_smem, block_smem, kind_smem, work_smem = buffers
    query_full, query_free, full, free = barriers
    heads, group_size, q_len, kv_len, q_blocks, kv_blocks, works = sizes
    kv_num_blocks_ptr, kv_indices_ptr, visible_num_blocks_ptr = lists
    _, key_scale_ptr, _, _ = scales
    chunks: gl.constexpr = FORM.chunks
    blocks: gl.constexpr = FORM.blocks
    value_copies: gl.constexpr = FORM.value_copies
    # Every thread writes the same notes. They meet before one of them arrives.
    notes: gl.constexpr = gl.BlockedLayout([FORM.blocks], [32], [1], [0])
    by_groups: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    places = gl.arange(0, blocks, notes)
    group = gl.arange(0, blocks * KEY_GROUPS, by_groups)  # of every block of a stage
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
            _copy(query_desc, batch, head, q_block * BLOCK_Q, c * FORM.chunk, query_buffer, query_full.index(slot))
        row_turn += 1
        following = gl.num_programs(0) + gl.atomic_add(taken_ptr, 1, sem="relaxed")

        plain_blocks = kv_len // BLOCK_K  # blocks from here on need an element mask
        if FORM.is_causal:
            seen_by_all = gl.maximum(q_block * BLOCK_Q + kv_len - q_len + 1, 0) // BLOCK_K
            plain_blocks = gl.minimum(plain_blocks, seen_by_all)
        last = gl.maximum(count - 1, 0)
        row_stages = last // blocks + 1  # a row that sees nothing gets a hidden tile
        list_base = kv_indices_ptr + row * kv_blocks
        scale_base = key_scale_ptr + (batch.to(gl.int64) * (heads // group_size) + kv_head) * kv_blocks * KEY_GROUPS
        for i in range(0, row_stages):
            stage = turn % FORM.stages
            position = i * blocks
            is_listed = position + places < count  # what follows a list may be anything
            listed = gl.minimum(position + places, last)
            if not FORM.all_blocks:
                listed = gl.load(list_base + listed, mask=count > 0, other=0)
            is_plain = (listed < plain_blocks) & is_listed
            kind = gl.where(gl.min(is_plain.to(gl.int32), 0) == 1, PLAIN, MASKED)
            units = gl.full((blocks * KEY_GROUPS,), 1.0, gl.float32, by_groups)
            if FORM.quantized:
                listed_of_group = gl.minimum(position + group // KEY_GROUPS, last)
                if not FORM.all_blocks:
                    listed_of_group = gl.load(list_base + listed_of_group, mask=count > 0, other=0)
                is_there = position + group // KEY_GROUPS < count  # hidden keys may be NaN
                unit_ptrs = scale_base + listed_of_group * KEY_GROUPS + group % KEY_GROUPS
                units = gl.load(unit_ptrs, mask=is_there, other=1.0)
                if FORM.peaks == "known":
                    kind += gl.max((units < 0).to(gl.int32), 0) * SINK
                units = gl.abs(units)
                if FORM.codes:  # they cannot carry NaN
                    kind += (1 - gl.min((units == units).to(gl.int32), 0)) * BROKEN
            mbarrier.wait(free.index(stage), ((turn // FORM.stages) & 1) ^ 1)
            unit_smem.index(stage).store(units)
            block_smem.index(stage).store(gl.where(is_listed, listed, kv_blocks))
            kind_smem.index(stage).store(zero + kind)
            barrier()
            landed = full.index(stage)
            mbarrier.expect(landed, FORM.tile_bytes)
            for b in gl.static_range(blocks):
                block = gl.sum(gl.where(places == b, listed, 0), 0)
                for c in gl.static_range(chunks):
                    key_buffer = key_smem.index((stage * chunks + c) * blocks + b)
                    _copy(key_desc, batch, kv_head, block * BLOCK_K, c * FORM.chunk, key_buffer, landed)
                for c in gl.static_range(value_copies):
                    value_buffer = value_smem.index((stage * blocks + b) * value_copies + c)
                    if FORM.fp8_values:
                        channel = value_slice * FORM.value_dim
                        _copy(value_desc, batch, kv_head, channel, block * BLOCK_K, value_buffer, landed)
                    else:
                        channel = c * FORM.value_columns
                        _copy(value_desc, batch, kv_head, block * BLOCK_K, channel, value_buffer, landed)
            turn += 1
        work = following
    slot = row_turn % FORM.rows_ahead
    mbarrier.wait(query_free.index(slot), ((row_turn // FORM.rows_ahead) & 1) ^ 1)
    work_smem.index(slot * 2).store(zero + works)
    barrier()
    mbarrier.arrive(query_full.index(slot), count=1)
