"""Attention over the kept blocks on Hopper: one producer warp copies, two consumer warpgroups compute.

The contract is that of `triton.attention`, its twin and oracle. A program serves whole rows of 128 queries, one after
the other; each consumer takes 64 of them, and a tile is one or two key blocks of 64.

    producer    walks the row's kept blocks; copies K and V, and notes scales and positions beside them
    consumer    S = Q K^T, softmax, P V; products run while it or the other consumer computes P

`producer.py` is the one role, `walk.py` the other's inner loop; `output.py` ends a row. Barriers: ``full[stage]`` (a
tile has landed), ``free[stage]`` (both consumers are done with it), and the same for the queries.
Layouts, and why P needs no exponentials: docs/hopper.md.

Grid: one program per multiprocessor. Each takes the next row when it is done with one, the longest causal rows first.
"""

from __future__ import annotations

from sparge.backends.cuda.primitives import BLOCK_K, BLOCK_Q, KEY_GROUPS, LOG2_E, SMALLEST_SCALE
from sparge.backends.hopper.consumer import walk_row
from sparge.backends.hopper.epilogue import load_row_scales, write_row
from sparge.backends.hopper.gluon import barrier, fence_async_shared, gl, jit, mbarrier, reinterpret
from sparge.backends.hopper.producer import place_of, produce
from sparge.backends.hopper.softmax import ONES_BITS, ROWS, declare_far


@jit
def _next_work(work_smem, query_full, row_turn, FORM: gl.constexpr):
    """Wait for the queries of a row and say which row it is."""
    slot = row_turn % FORM.rows_ahead
    mbarrier.wait(query_full.index(slot), (row_turn // FORM.rows_ahead) & 1)
    return gl.max(work_smem.index(slot * 2).load(FORM.rows), 0)


@jit
def _row_unit(PART: gl.constexpr, work, scales, sizes, scale, FORM: gl.constexpr):
    """What a code of each query is worth, [64], in steps. Of unquantised scores, what one of them is."""
    _, _, _, _, q_blocks, _, works = sizes
    if FORM.quantized:
        query_scale_ptr, _, _, _ = scales
        _, _, _, flat_head, q_block, _ = place_of(work, sizes, FORM)
        first = (flat_head.to(gl.int64) * q_blocks + q_block) * BLOCK_Q + PART * ROWS
        pointers = query_scale_ptr + (first + gl.arange(0, ROWS, FORM.rows))
        return gl.load(pointers, mask=work < works, other=1.0) * FORM.steps
    else:
        return gl.maximum(gl.abs(scale) * LOG2_E, SMALLEST_SCALE)


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
    """One warpgroup: 64 queries of every row, the first (PART 0) or the second half of its 128."""
    query_smem, key_smem, value_smem, unit_smem, block_smem, kind_smem, work_smem = buffers
    query_full, query_free, _, _ = barriers
    heads, group, q_len, _, _, _, works = sizes
    queries = reinterpret(query_smem, query_smem.dtype, [FORM.rows_ahead, BLOCK_Q, FORM.head_dim], FORM.key_tile)
    keys = reinterpret(key_smem, key_smem.dtype, [FORM.stages, FORM.keys, FORM.head_dim], FORM.key_tile)
    values = reinterpret(value_smem, value_smem.dtype, FORM.value_shape, FORM.value_tile)
    units = reinterpret(unit_smem, gl.float32, [FORM.stages * FORM.blocks, KEY_GROUPS], FORM.plain)
    blocks = reinterpret(block_smem, gl.int32, [FORM.stages * FORM.blocks, 1], FORM.plain)
    notes = (units, blocks, kind_smem)
    turn = 0
    row_turn = 0
    slot = 0
    work = _next_work(work_smem, query_full, row_turn, FORM)
    row_unit = _row_unit(PART, work, scales, sizes, scale, FORM)
    while work < works:
        batch, head, kv_head, flat_head, q_block, value_slice = place_of(work, sizes, FORM)
        count = gl.max(work_smem.index(slot * 2 + 1).load(FORM.rows), 0)
        query = queries.index(slot).slice(PART * ROWS, ROWS, 0)
        first_query = q_block * BLOCK_Q + PART * ROWS
        operands = (query, keys, values, ones)
        row = (first_query, sizes, count)
        output, row_sum, row_top, turn = walk_row(
            PART, operands, notes, barriers, row, turn, row_unit, threshold_ptr + head, FORM
        )
        mbarrier.arrive(query_free.index(slot), count=1)
        target = (flat_head, first_query, value_slice, q_len)
        row_scales = load_row_scales(scales, target, batch * (heads // group) + kv_head, FORM)
        row_turn += 1
        slot = row_turn % FORM.rows_ahead
        if FORM.rows_ahead == 2:  # the next row is here, as a rule; read its number while these scales are on their way
            work = _next_work(work_smem, query_full, row_turn, FORM)
            row_unit = _row_unit(PART, work, scales, sizes, scale, FORM)
        write_row(output, row_sum, row_top, row_scales, target, results, FORM)
        if FORM.rows_ahead == 1:
            work = _next_work(work_smem, query_full, row_turn, FORM)
            row_unit = _row_unit(PART, work, scales, sizes, scale, FORM)


@jit(do_not_specialize=["scale", "heads", "group", "q_len", "kv_len", "q_blocks", "kv_blocks", "works"])
def attention_kernel(
    query_desc,
    key_desc,
    value_desc,
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
    if FORM.peaks == "asked":
        declare_far()
    query_smem = gl.allocate_shared_memory(
        query_desc.dtype, [FORM.rows_ahead * FORM.chunks, BLOCK_Q, FORM.chunk], FORM.key_tile
    )
    key_smem = gl.allocate_shared_memory(
        key_desc.dtype, [FORM.stages * FORM.chunks * FORM.blocks, BLOCK_K, FORM.chunk], FORM.key_tile
    )
    value_smem = gl.allocate_shared_memory(
        value_desc.dtype,
        [FORM.stages * FORM.blocks * FORM.value_copies, FORM.value_rows, FORM.value_columns],
        FORM.value_tile,
    )
    unit_smem = gl.allocate_shared_memory(gl.float32, [FORM.stages, FORM.blocks * KEY_GROUPS], FORM.plain)
    block_smem = gl.allocate_shared_memory(gl.int32, [FORM.stages, FORM.blocks], FORM.plain)
    kind_smem = gl.allocate_shared_memory(gl.int32, [FORM.stages, 1], FORM.plain)
    work_smem = gl.allocate_shared_memory(gl.int32, [2 * FORM.rows_ahead, 1], FORM.plain)
    # Stored as integers: Triton 3.6 gets small FP8 tiles wrong. All bytes are the same, so the layout does not matter.
    ones_smem = gl.allocate_shared_memory(gl.int32, [8 * BLOCK_K // 4], FORM.plain)
    ones_smem.store(gl.full((8 * BLOCK_K // 4,), ONES_BITS, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    ones = reinterpret(ones_smem, gl.float8e4nv, [8, BLOCK_K], FORM.ones_tile).permute((1, 0))
    full = gl.allocate_shared_memory(gl.int64, [FORM.stages, 1], FORM.barrier)
    free = gl.allocate_shared_memory(gl.int64, [FORM.stages, 1], FORM.barrier)
    query_full = gl.allocate_shared_memory(gl.int64, [FORM.rows_ahead, 1], FORM.barrier)
    query_free = gl.allocate_shared_memory(gl.int64, [FORM.rows_ahead, 1], FORM.barrier)
    stages: gl.constexpr = FORM.stages
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    rows_ahead: gl.constexpr = FORM.rows_ahead
    for i in gl.static_range(rows_ahead):
        mbarrier.init(query_full.index(i), count=1)
        mbarrier.init(query_free.index(i), count=2)
    fence_async_shared()
    barrier()

    tiles = (query_desc, key_desc, value_desc)
    buffers = (query_smem, key_smem, value_smem, unit_smem, block_smem, kind_smem, work_smem)
    barriers = (query_full, query_free, full, free)
    sizes = (heads, group, q_len, kv_len, q_blocks, kv_blocks, works)
    scales = (query_scale_ptr, key_scale_ptr, value_scale_ptr, lse_shift_ptr)
    lists = (kv_num_blocks_ptr, kv_indices_ptr, visible_num_blocks_ptr)
    results = (output_ptr, lse_ptr)
    gl.warp_specialize(
        [
            (_consume, (0, buffers, barriers, sizes, ones, scales, threshold_ptr, results, scale, FORM)),
            (_consume, (1, buffers, barriers, sizes, ones, scales, threshold_ptr, results, scale, FORM)),
            (produce, (tiles, buffers, barriers, sizes, scales, lists, totals_ptr, taken_ptr, FORM)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
