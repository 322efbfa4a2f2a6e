"""One budget for all rows of a batch element: how many blocks each row keeps of it.

Probabilities are compared by levels (`rules.BUDGET_LEVELS`). Which blocks a row keeps is its own affair: the best.

    count_kernel    for every row and level, how many blocks it keeps if the budget reaches down to that level; the last
                    program finds the last level that the budget reaches
    share_of_row    what a row gets of that level, which `select_kernel` asks for

Nothing is sorted, and nothing waits for the host. A long row that comes last would be waited for, so rows are also put
in an order (`place_row`): the long ones first, the others as they lie in memory, where neighbors read the same keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import buffer_like, launch, zeros_like
from sparge.backends.gpu.primitives import BLOCK_Q, FIRST_ROW, TOP_LEVEL, segment_number, segment_queries
from sparge.backends.gpu.stages import configs
from sparge.backends.gpu.stages.block_rows import SIZES, RowArguments, load_row
from sparge.call import Call
from sparge.masks.geometry import ceil_div
from sparge.masks.window import max_blocks_per_q_block
from sparge.options import rules

LONG = 3.0
"""A row is long if it keeps more than so many times an equal share: exact ones are, as a rule. With 1.25 or 2, rows of
many heads come at once and share no keys, which costs 4 % where heads differ (docs/lab/selection.md)."""
BUDGET_BITS = tl.constexpr(rules.BUDGET_BITS)
LEVELS = tl.constexpr(rules.BUDGET_LEVELS)
LEVEL_WIDTH = tl.constexpr(1 << rules.BUDGET_BITS)
"""Probabilities of one level, as the integers that they are as float32."""
GUARANTEED = tl.constexpr(rules.GUARANTEED)
ROUNDING_GUARD = tl.constexpr(rules.ROUNDING_GUARD)
PART_ROWS = tl.constexpr(128)
"""Rows whose sums are one part: programs that add to the same address wait for each other, which took most of the time;
and a row reads those before it in its part."""
# Of each part, after its sums for every level: the sum above all levels, visible blocks, blocks of the last level that
# parts before it have. In the first part also: programs that are done; the last level, places that are left in it and
# its blocks; rows that were placed in front and behind.
FORCED, VISIBLE, BEFORE = (tl.constexpr(LEVELS.value + place) for place in range(3))
DONE, LAST, LEFT, TOTAL, IN_FRONT, BEHIND = (tl.constexpr(LEVELS.value + place) for place in range(3, 9))
SUMS = tl.constexpr(2 * LEVELS.value)
GATHERED = tl.constexpr(16)
"""Parts that are added at a time."""


@triton.jit
def _find_level(sums_ptr, amount, parts):
    """The last level that the budget of a batch element reaches, and what its parts have of it."""
    levels = tl.arange(0, LEVELS)
    sums = tl.zeros((LEVELS,), tl.int32)
    forced_sum = tl.zeros((), tl.int32)
    visible = tl.zeros((), tl.int32)
    for start in range(0, parts, GATHERED):
        part = start + tl.arange(0, GATHERED)
        inside = part < parts
        sums += tl.sum(tl.load(sums_ptr + part[:, None] * SUMS + levels[None, :], mask=inside[:, None], other=0), 0)
        forced_sum += tl.sum(tl.load(sums_ptr + part * SUMS + FORCED, mask=inside, other=0), 0)
        visible += tl.sum(tl.load(sums_ptr + part * SUMS + VISIBLE, mask=inside, other=0), 0)
    places = tl.ceil(visible.to(tl.float64) * amount * ROUNDING_GUARD).to(tl.int32)
    last = tl.max(tl.where(sums >= places, levels, 0), 0)  # sums fall
    last = tl.where(forced_sum >= places, LEVELS, last)
    higher = tl.minimum(last + 1, LEVELS)
    above_sum = tl.sum(tl.where(levels == higher, sums, 0), 0) + tl.where(higher == LEVELS, forced_sum, 0)
    below_sum = tl.sum(tl.where(levels == last, sums, 0), 0) + tl.where(last == LEVELS, forced_sum, 0)
    tl.store(sums_ptr + LAST, last)
    tl.store(sums_ptr + LEFT, tl.minimum(tl.maximum(places - above_sum, 0), below_sum - above_sum))
    tl.store(sums_ptr + TOTAL, tl.maximum(below_sum - above_sum, 1))
    before = tl.zeros((), tl.int32)
    for start in range(0, parts, 32):
        part = start + tl.arange(0, 32)
        inside = part < parts
        blocks = tl.load(sums_ptr + part * SUMS + last, mask=inside, other=0)
        blocks -= tl.load(sums_ptr + part * SUMS + higher, mask=inside, other=0)
        tl.store(sums_ptr + part * SUMS + BEFORE, before + tl.cumsum(blocks, 0) - blocks, mask=inside)
        before += tl.sum(blocks, 0)


@triton.jit(do_not_specialize=["amount", *SIZES, "top_level", "rows_of_batch", "programs_of_batch", "parts"])
def count_kernel(
    probability_ptr,
    always_ptr,
    exact_ptr,
    first_seen_ptr,
    kind_ptr,
    column_ptr,
    key_similarity_ptr,
    query_similarity_ptr,
    threshold_ptr,
    segments_ptr,
    kept_ptr,
    sums_ptr,
    first_seen_strides,
    kind_strides,
    column_strides,
    amount,
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
    rows_of_batch,
    programs_of_batch,
    parts,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
    SINK: tl.constexpr,
    DIAGONAL: tl.constexpr,
    HAS_ALWAYS: tl.constexpr,
    HAS_EXACT: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    HAS_SIMILARITY: tl.constexpr,
    PACKED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """kept[row, level] = max(what the row is sure of, its forced blocks and those at or above the level).

    Grid: groups of ROWS rows of every batch element, in one dimension.

    Reads what `load_row` reads. Writes, int32
        kept       [B * rows, 2 * LEVELS]: for every level, and for none at LEVELS
        sums       [B, parts, SUMS], 0 before: sums of ``kept`` over PART_ROWS rows, and the visible blocks; SHARES what
                   `share_of_row` needs besides
    """
    batch = (tl.program_id(0) // programs_of_batch).to(tl.int64)
    first_row = tl.program_id(0) % programs_of_batch * ROWS
    if PACKED:
        top_level = segment_number(segments_ptr, batch, TOP_LEVEL)
    levels = tl.arange(0, LEVELS)
    totals = tl.zeros((LEVELS,), tl.int32)
    forced_total = 0
    visible_total = 0
    for step in range(ROWS):
        if first_row + step < rows_of_batch:
            row = batch * rows_of_batch + first_row + step
            blocks = load_row(
                row,
                probability_ptr,
                always_ptr,
                exact_ptr,
                first_seen_ptr,
                kind_ptr,
                column_ptr,
                key_similarity_ptr,
                query_similarity_ptr,
                threshold_ptr,
                segments_ptr,
                first_seen_strides,
                kind_strides,
                column_strides,
                heads,
                group,
                q_len,
                kv_len,
                first_offset,
                last_offset,
                q_blocks,
                kv_blocks,
                HAS_FIRST,
                HAS_LAST,
                SINK,
                DIAGONAL,
                HAS_ALWAYS,
                HAS_EXACT,
                HAS_SEEN,
                HAS_BLOCKS,
                HAS_SIMILARITY,
                PACKED,
                COLUMNS,
            )
            level = tl.minimum(blocks.bits >> BUDGET_BITS, top_level) - (top_level - LEVELS + 1)
            free = blocks.eligible & (blocks.forced == 0)
            free_count = tl.sum(free.to(tl.int32))
            counts = tl.histogram(tl.where(free, tl.maximum(level, 0), 0), LEVELS)
            counts -= tl.where(levels == 0, COLUMNS - free_count, 0)  # those that are not free went there
            visible_count = tl.sum(blocks.visible.to(tl.int32))
            forced_count = tl.sum((blocks.eligible & blocks.forced).to(tl.int32))
            share = tl.ceil(amount * visible_count.to(tl.float32) * (GUARANTEED * ROUNDING_GUARD)).to(tl.int32)
            sure = tl.maximum(tl.maximum(share, min_blocks), 1)
            most = free_count + forced_count
            kept = tl.minimum(tl.maximum(sure, forced_count + tl.cumsum(counts, 0, reverse=True)), most)
            forced_kept = tl.minimum(tl.maximum(sure, forced_count), most)
            tl.store(kept_ptr + row * (2 * LEVELS) + levels, kept)
            tl.store(kept_ptr + row * (2 * LEVELS) + LEVELS, forced_kept)
            totals += kept
            forced_total += forced_kept
            visible_total += visible_count
    of_batch = sums_ptr + batch * parts * SUMS
    sums = of_batch + first_row // PART_ROWS * SUMS
    tl.atomic_add(sums + levels, totals, sem="relaxed")
    tl.atomic_add(sums + FORCED, forced_total, sem="relaxed")
    tl.atomic_add(sums + VISIBLE, visible_total, sem="relaxed")
    if SHARES:
        tl.debug_barrier()
        if tl.atomic_add(of_batch + DONE, 1, sem="acq_rel") == programs_of_batch - 1:
            _find_level(of_batch, amount, parts)


@triton.jit
def share_of_row(row, kept_ptr, sums_ptr, rows_of_batch, parts):
    """Return how many blocks a row keeps, those above the last level and its part of that, and the last level.

    Of r places for t blocks, the row that has the blocks number a to b - 1 gets floor(b r / t) - floor(a r / t).
    """
    batch = row // rows_of_batch
    place = (row % rows_of_batch).to(tl.int32)
    of_batch = sums_ptr + batch * parts * SUMS
    last = tl.load(of_batch + LAST)
    left = tl.load(of_batch + LEFT).to(tl.int64)
    total = tl.load(of_batch + TOTAL).to(tl.int64)
    before = tl.load(of_batch + place // PART_ROWS * SUMS + BEFORE)
    rows = place // PART_ROWS * PART_ROWS + tl.arange(0, PART_ROWS)
    inside = rows <= place
    kept = kept_ptr + (batch * rows_of_batch + rows) * (2 * LEVELS)
    above = tl.load(kept + tl.minimum(last + 1, LEVELS), mask=inside, other=0)
    blocks = tl.load(kept + last, mask=inside, other=0) - above
    after = (before + tl.sum(blocks, 0)).to(tl.int64)
    own = tl.sum(tl.where(rows == place, blocks, 0), 0)
    share = after * left // total - (after - own) * left // total
    return tl.sum(tl.where(rows == place, above, 0), 0) + share.to(tl.int32), last


@triton.jit
def place_row(
    row, count, many, order_ptr, sums_ptr, segments_ptr, rows_of_batch, parts, heads, q_blocks, PACKED: tl.constexpr
):
    """Put a row into the order of its batch element: if it keeps more than ``many`` blocks the next in front, else the
    next behind; PACKED, without gaps if it exists (`Segments.table`)."""
    batch = row // rows_of_batch
    first = batch * rows_of_batch
    rows = rows_of_batch
    exists = True
    if PACKED:
        _, q_len = segment_queries(segments_ptr, batch)
        first = segment_number(segments_ptr, batch, FIRST_ROW).to(tl.int64)
        rows = heads * tl.cdiv(q_len, BLOCK_Q)
        exists = row % q_blocks * BLOCK_Q < q_len
    if exists:
        of_batch = sums_ptr + batch * parts * SUMS
        is_long = count > many
        before = tl.atomic_add(of_batch + tl.where(is_long, IN_FRONT, BEHIND), 1, sem="relaxed")
        tl.store(order_ptr + first + tl.where(is_long, before, rows - 1 - before), row.to(tl.int32))


def count_budget(rows: RowArguments, call: Call, kv_blocks: int, *, shares: bool) -> tuple[Tensor, Tensor]:
    """What rows keep of a budget that reaches down to each level, and the sums of it, as `count_kernel` writes them.

    Args:
        kv_blocks: of the whole call, by which levels go.
        shares: `share_of_row` will be asked.
    """
    shape, like = call.shape, rows.pointers["probability_ptr"]
    rows_of_batch = shape.heads * shape.q_blocks
    setting = configs.budget_config()
    programs, parts = ceil_div(rows_of_batch, setting.rows), ceil_div(rows_of_batch, PART_ROWS.value)
    kept = buffer_like(like, True, shape.batch * rows_of_batch, 2 * LEVELS.value, dtype=torch.int32)
    sums = zeros_like(like, shape.batch, parts, SUMS.value, dtype=torch.int32)
    launch(
        count_kernel,
        programs * shape.batch,
        **rows.pointers,
        kept_ptr=kept,
        sums_ptr=sums,
        **rows.strides,
        amount=density_of(call),
        **rows.sizes,
        top_level=rules.budget_top(kv_blocks),
        rows_of_batch=rows_of_batch,
        programs_of_batch=programs,
        parts=parts,
        SHARES=shares,
        ROWS=setting.rows,
        **rows.constants,
        num_warps=configs.select_config().warps(rows.columns),
    )
    return kept, sums


def density_of(call: Call) -> float:
    """The share of all blocks that a budget has."""
    amount = call.selection.amount
    assert not isinstance(amount, Tensor)
    return float(amount)


def many_blocks(call: Call) -> float:
    """How many blocks a long row keeps at least."""
    shape = call.shape
    seen_blocks = min(shape.kv_blocks * (0.5 if call.is_causal else 1.0), max_blocks_per_q_block(call.window, shape))
    return LONG * density_of(call) * seen_blocks
