"""Allocate one budget to all query blocks of a batch element: compute how many key blocks each query block keeps.

A level is a range of float32 probabilities with equal upper bits (`rules.BUDGET_LEVELS`). The budget takes
blocks from the highest level down, and ends within one level. Each query block then keeps its most probable blocks.

    count_kernel        for every query block and level, count the blocks that it keeps if the budget reaches down to
                        that level; the last program finds the last level that the budget reaches
    allocated_blocks    compute how many blocks a query block keeps (called by `select_kernel`)
    place_q_block       determine the order in which to compute query blocks (called by `select_kernel`)

Nothing is sorted, and the host does not synchronize. A long query block that runs last would delay the whole attention
kernel, so long query blocks come first. The others follow in memory order, so that neighbors share keys in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import buffer_like, launch, zeros_like
from sparge.backends.gpu.primitives import BLOCK_Q, FIRST_ROW, TOP_LEVEL, kernel, segment_number, segment_queries
from sparge.backends.gpu.stages import configs
from sparge.backends.gpu.stages.arguments import Sizes
from sparge.backends.gpu.stages.query_blocks import SelectionArguments, load_blocks
from sparge.call import Call
from sparge.masks.geometry import ceil_div
from sparge.masks.window import max_blocks_per_q_block
from sparge.options import rules

LONG = 3.0
"""A query block is long if it keeps more than this many times an equal share of the budget. Most query blocks in
`Call.exact_queries` are long. With 1.25 or 2, query blocks of many heads are interleaved and share no keys, which costs
4 % if heads differ (docs/lab/selection.md)."""
BUDGET_BITS = tl.constexpr(rules.BUDGET_BITS)
LEVELS = tl.constexpr(rules.BUDGET_LEVELS)
LEVEL_WIDTH = tl.constexpr(1 << rules.BUDGET_BITS)
"""Number of float32 bit patterns in a level."""
GUARANTEED = tl.constexpr(rules.GUARANTEED)
ROUNDING_GUARD = tl.constexpr(rules.ROUNDING_GUARD)
PART_Q_BLOCKS = tl.constexpr(128)
"""Query blocks whose counts are summed in one part. With a single part, atomic additions to the same addresses took
most of the time, and `allocated_blocks` would have to read the counts of all preceding query blocks."""
# Entries of a part after its sums for every level: the sum above all levels, visible blocks, and blocks of earlier
# parts at the last level.
FORCED, VISIBLE, BEFORE = (tl.constexpr(LEVELS.value + place) for place in range(3))
# Further entries of the first part: finished programs; the last level, its blocks that fit the budget, all its blocks;
# query blocks placed in front and behind.
DONE, LAST, ROOM, TOTAL, IN_FRONT, BEHIND = (tl.constexpr(LEVELS.value + place) for place in range(3, 9))
SUMS = tl.constexpr(2 * LEVELS.value)
PARTS_AT_ONCE = tl.constexpr(16)
"""Parts that a program adds at a time."""


@triton.jit
def last_level(sums, forced_sum, visible, density, DTYPE: tl.constexpr):
    """Find the last level that a budget reaches.

    Args:
        sums: [LEVELS], kept blocks if the budget reaches down to each level.
        forced_sum, visible: kept blocks above all levels, and visible blocks.

    Returns:
        The last level, the next higher level, the number of blocks at the last level that fit the budget, and the
        number of all blocks at the last level (at least 1).
    """
    levels = tl.arange(0, LEVELS)
    capacity = tl.ceil(visible.to(tl.float64) * density * ROUNDING_GUARD).to(DTYPE)
    last = tl.max(tl.where(sums >= capacity, levels, 0), 0)  # sums decrease with the level
    last = tl.where(forced_sum >= capacity, LEVELS, last)
    higher = tl.minimum(last + 1, LEVELS)
    above_sum = tl.sum(tl.where(levels == higher, sums, 0), 0) + tl.where(higher == LEVELS, forced_sum, 0)
    below_sum = tl.sum(tl.where(levels == last, sums, 0), 0) + tl.where(last == LEVELS, forced_sum, 0)
    room = tl.minimum(tl.maximum(capacity - above_sum, 0), below_sum - above_sum)
    return last, higher, room, tl.maximum(below_sum - above_sum, 1)


@triton.jit
def _find_level(sums_ptr, density, parts):
    """Find the last level that the budget of a batch element reaches, and the blocks of each part at that level."""
    # Sums over all parts
    levels = tl.arange(0, LEVELS)
    sums = tl.zeros((LEVELS,), tl.int32)
    forced_sum = tl.zeros((), tl.int32)
    visible = tl.zeros((), tl.int32)
    for start in range(0, parts, PARTS_AT_ONCE):
        part = start + tl.arange(0, PARTS_AT_ONCE)
        inside = part < parts
        sums += tl.sum(tl.load(sums_ptr + part[:, None] * SUMS + levels[None, :], mask=inside[:, None], other=0), 0)
        forced_sum += tl.sum(tl.load(sums_ptr + part * SUMS + FORCED, mask=inside, other=0), 0)
        visible += tl.sum(tl.load(sums_ptr + part * SUMS + VISIBLE, mask=inside, other=0), 0)

    # The last level, and how many of its blocks fit
    last, higher, room, total = last_level(sums, forced_sum, visible, density, tl.int32)
    tl.store(sums_ptr + LAST, last)
    tl.store(sums_ptr + ROOM, room)
    tl.store(sums_ptr + TOTAL, total)

    # Blocks of that level in earlier parts
    before = tl.zeros((), tl.int32)
    for start in range(0, parts, 32):
        part = start + tl.arange(0, 32)
        inside = part < parts
        blocks = tl.load(sums_ptr + part * SUMS + last, mask=inside, other=0)
        blocks -= tl.load(sums_ptr + part * SUMS + higher, mask=inside, other=0)
        tl.store(sums_ptr + part * SUMS + BEFORE, before + tl.cumsum(blocks, 0) - blocks, mask=inside)
        before += tl.sum(blocks, 0)


@kernel
def count_kernel(
    selection_ptrs,
    kept_ptr,
    sums_ptr,
    selection_strides,
    density,
    heads,
    group,
    q_len,
    kv_len,
    first_offset,
    last_offset,
    q_blocks,
    kv_blocks,
    min_blocks,
    top_level,
    batch_q_blocks,
    programs_of_batch,
    parts,
    ALLOCATES: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Compute kept[q_block, level] = max(guaranteed blocks, forced blocks + eligible blocks at or above the level).

    Grid: groups of Q_BLOCKS query blocks of every batch element, in one dimension.

    Args:
        selection_ptrs, selection_strides, SPEC: see `query_blocks`.
        kept_ptr: writes [B * batch_q_blocks, 2 * LEVELS] int32, ``kept`` for each level; entry LEVELS is for a budget
            that reaches no level.
        sums_ptr: adds to [B, parts, SUMS] int32, cleared beforehand: sums of ``kept`` over PART_Q_BLOCKS query blocks,
            and the visible blocks. ALLOCATES: the last program also writes the inputs of `allocated_blocks`.
        density: density of the budget.
        min_blocks: minimum number of blocks of a query block.
        top_level: the highest level, see `rules.budget_top`.
        batch_q_blocks, programs_of_batch, parts: numbers of query blocks, programs and parts in a batch element.
    """
    sizes = Sizes(heads, group, q_len, kv_len, first_offset, last_offset, q_blocks, kv_blocks)
    batch = (tl.program_id(0) // programs_of_batch).to(tl.int64)
    first = tl.program_id(0) % programs_of_batch * Q_BLOCKS
    if SPEC.packed:
        top_level = segment_number(selection_ptrs.segments, batch, TOP_LEVEL)
    levels = tl.arange(0, LEVELS)
    totals = tl.zeros((LEVELS,), tl.int32)
    forced_total = 0
    visible_total = 0
    for step in range(Q_BLOCKS):
        if first + step < batch_q_blocks:
            flat_q_block = batch * batch_q_blocks + first + step
            blocks = load_blocks(flat_q_block, selection_ptrs, selection_strides, sizes, SPEC)

            # Eligible blocks of each level
            level = tl.minimum(blocks.bits >> BUDGET_BITS, top_level) - (top_level - LEVELS + 1)  # [COLUMNS]
            free = blocks.eligible & (blocks.forced == 0)
            free_count = tl.sum(free.to(tl.int32))
            counts = tl.histogram(tl.where(free, tl.maximum(level, 0), 0), LEVELS)  # [LEVELS]
            counts -= tl.where(levels == 0, SPEC.columns - free_count, 0)  # all other columns were counted at level 0

            # Kept blocks, if the budget reaches down to each level
            visible_count = tl.sum(blocks.visible.to(tl.int32))
            forced_count = tl.sum((blocks.eligible & blocks.forced).to(tl.int32))
            share = tl.ceil(density * visible_count.to(tl.float32) * (GUARANTEED * ROUNDING_GUARD)).to(tl.int32)
            guaranteed = tl.maximum(tl.maximum(share, min_blocks), 1)
            eligible_count = free_count + forced_count
            kept = tl.maximum(guaranteed, forced_count + tl.cumsum(counts, 0, reverse=True))  # [LEVELS]
            kept = tl.minimum(kept, eligible_count)
            forced_kept = tl.minimum(tl.maximum(guaranteed, forced_count), eligible_count)
            tl.store(kept_ptr + flat_q_block * (2 * LEVELS) + levels, kept)
            tl.store(kept_ptr + flat_q_block * (2 * LEVELS) + LEVELS, forced_kept)
            totals += kept
            forced_total += forced_kept
            visible_total += visible_count

    # Sums of this part
    batch_sums = sums_ptr + batch * parts * SUMS
    part_sums = batch_sums + first // PART_Q_BLOCKS * SUMS
    tl.atomic_add(part_sums + levels, totals, sem="relaxed")
    tl.atomic_add(part_sums + FORCED, forced_total, sem="relaxed")
    tl.atomic_add(part_sums + VISIBLE, visible_total, sem="relaxed")

    # The last program of a batch element finds the level
    if ALLOCATES:
        tl.debug_barrier()
        if tl.atomic_add(batch_sums + DONE, 1, sem="acq_rel") == programs_of_batch - 1:
            _find_level(batch_sums, density, parts)


@triton.jit
def blocks_at_level(kept_ptrs, last, higher, inside):
    """Return each query block's number of kept blocks above the last level, and its number of blocks at that level."""
    above = tl.load(kept_ptrs + higher, mask=inside, other=0)
    return above, tl.load(kept_ptrs + last, mask=inside, other=0) - above


@triton.jit
def portion_of(blocks, after, room, total):
    """Return the number of a query block's ``blocks`` at the last level that it keeps.

    The budget has room for r = ``room`` of the t = ``total`` blocks at this level, which are numbered over all query
    blocks. A query block with blocks a to b - 1 (b = ``after``) keeps floor(b r / t) - floor(a r / t) of them.
    """
    return after * room // total - (after - blocks) * room // total


@triton.jit
def allocated_blocks(flat_q_block, kept_ptr, sums_ptr, batch_q_blocks, parts):
    """Return the number of blocks that a query block keeps, and the last level that the budget reaches.

    The query block keeps all its blocks above that level, and its `portion_of` the blocks at that level.
    """
    batch = flat_q_block // batch_q_blocks
    place = (flat_q_block % batch_q_blocks).to(tl.int32)
    batch_sums = sums_ptr + batch * parts * SUMS
    last = tl.load(batch_sums + LAST)
    room = tl.load(batch_sums + ROOM).to(tl.int64)
    total = tl.load(batch_sums + TOTAL).to(tl.int64)
    before = tl.load(batch_sums + place // PART_Q_BLOCKS * SUMS + BEFORE)
    members = place // PART_Q_BLOCKS * PART_Q_BLOCKS + tl.arange(0, PART_Q_BLOCKS)  # query blocks of the same part
    inside = members <= place
    kept_ptrs = kept_ptr + (batch * batch_q_blocks + members) * (2 * LEVELS)
    above, blocks = blocks_at_level(kept_ptrs, last, tl.minimum(last + 1, LEVELS), inside)
    after = (before + tl.sum(blocks, 0)).to(tl.int64)
    portion = portion_of(tl.sum(tl.where(members == place, blocks, 0), 0), after, room, total)
    return tl.sum(tl.where(members == place, above, 0), 0) + portion.to(tl.int32), last


@triton.jit
def place_q_block(
    flat_q_block, count, limit, order_ptr, sums_ptr, segments_ptr, batch_q_blocks, parts, sizes, PACKED: tl.constexpr
):
    """Write a query block's position in the order of computation: in front if it keeps over ``limit`` blocks.

    In a pack, positions have no gaps: padding query blocks have none (`Segments.table`).
    """
    batch = flat_q_block // batch_q_blocks
    first = batch * batch_q_blocks
    existing = batch_q_blocks
    exists = True
    if PACKED:
        _, q_len = segment_queries(segments_ptr, batch)
        first = segment_number(segments_ptr, batch, FIRST_ROW).to(tl.int64)
        existing = sizes.heads * tl.cdiv(q_len, BLOCK_Q)
        exists = flat_q_block % sizes.q_blocks * BLOCK_Q < q_len
    if exists:
        batch_sums = sums_ptr + batch * parts * SUMS
        is_long = count > limit
        before = tl.atomic_add(batch_sums + tl.where(is_long, IN_FRONT, BEHIND), 1, sem="relaxed")
        tl.store(order_ptr + first + tl.where(is_long, before, existing - 1 - before), flat_q_block.to(tl.int32))


def count_budget(
    arguments: SelectionArguments, call: Call, kv_blocks: int, *, allocates: bool
) -> tuple[Tensor, Tensor]:
    """Launch `count_kernel`. Return the number of blocks that each query block keeps at each level, and the sums.

    Args:
        kv_blocks: number of key blocks of the whole call, which determines the levels.
        allocates: whether `allocated_blocks` reads the sums; ranks instead add their sums first (`rank_budget`).
    """
    shape, like = call.shape, arguments.probability
    batch_q_blocks = shape.heads * shape.q_blocks
    setting = configs.stage_config("budget")
    programs, parts = ceil_div(batch_q_blocks, setting.rows), ceil_div(batch_q_blocks, PART_Q_BLOCKS.value)
    kept = buffer_like(like, True, shape.batch * batch_q_blocks, 2 * LEVELS.value, dtype=torch.int32)
    sums = zeros_like(like, shape.batch, parts, SUMS.value, dtype=torch.int32)
    launch(
        count_kernel,
        programs * shape.batch,
        selection_ptrs=arguments.ptrs,
        kept_ptr=kept,
        sums_ptr=sums,
        selection_strides=arguments.strides,
        density=density_of(call),
        **arguments.sizes,
        top_level=rules.budget_top(kv_blocks),
        batch_q_blocks=batch_q_blocks,
        programs_of_batch=programs,
        parts=parts,
        ALLOCATES=allocates,
        Q_BLOCKS=setting.rows,
        SPEC=arguments.spec,
        num_warps=configs.stage_config("select").warps(arguments.columns),
    )
    return kept, sums


def density_of(call: Call) -> float:
    """Return the density of a budget."""
    amount = call.selection.amount
    assert not isinstance(amount, Tensor)
    return float(amount)


def long_limit_of(call: Call) -> float:
    """Return the number of blocks above which a query block is long."""
    shape = call.shape
    seen_blocks = min(shape.kv_blocks * (0.5 if call.is_causal else 1.0), max_blocks_per_q_block(call.window, shape))
    return LONG * density_of(call) * seen_blocks
