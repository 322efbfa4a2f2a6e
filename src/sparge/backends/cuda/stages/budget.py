"""One budget for all rows of a batch element: how many blocks each row keeps of it.

Probabilities are compared by levels (`config.BUDGET_LEVELS`). Which blocks a row keeps is its own affair: the best.

    count_kernel    for every row and level, how many blocks it keeps if the budget reaches down to that level
    share_kernel    the last level that the budget reaches, and what each row gets of it

Nothing is sorted, and nothing waits for the host. A long row that comes last would be waited for, so rows are also put
in an order: the long ones first, the others as they lie in memory, where neighbours read the same keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge import config
from sparge.backends.cuda.launch import buffer_like, launch, power_of_two, zeros_like
from sparge.backends.cuda.primitives import BLOCK_Q, FIRST_ROW, TOP_LEVEL, segment_number, segment_queries
from sparge.backends.cuda.stages import configs
from sparge.backends.cuda.stages.block_rows import SIZES, RowArguments, load_row
from sparge.call import Call
from sparge.geometry import ceil_div
from sparge.window import blocks_of_row

MOST_ROWS = 4096
"""That `share_kernel` takes at a time."""
LONG = 3.0
"""A row is long if it keeps more than so many times an equal share: exact ones are, as a rule. With 1.25 or 2, rows of
many heads come at once and share no keys, which costs 4 % where heads differ (docs/lab/selection.md)."""
BUDGET_BITS = tl.constexpr(config.BUDGET_BITS)
LEVELS = tl.constexpr(config.BUDGET_LEVELS)
GUARANTEED = tl.constexpr(config.GUARANTEED)
ROUNDING_GUARD = tl.constexpr(config.ROUNDING_GUARD)
# Of each batch element, after its sums for every level: the sum above all levels, and the visible blocks.
FORCED, VISIBLE, SUMS = tl.constexpr(LEVELS.value), tl.constexpr(LEVELS.value + 1), tl.constexpr(2 * LEVELS.value)
PARTS = tl.constexpr(32)
"""Of the sums: programs that add to the same address wait for each other, which took most of the time."""


@triton.jit(do_not_specialize=["amount", *SIZES, "top_level", "rows_of_batch", "programs_of_batch"])
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
        sums       [B, PARTS, SUMS], 0 before: sums of ``kept`` over the rows, and the visible blocks
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
    sums = sums_ptr + (batch * PARTS + tl.program_id(0) % PARTS) * SUMS
    tl.atomic_add(sums + levels, totals, sem="relaxed")
    tl.atomic_add(sums + FORCED, forced_total, sem="relaxed")
    tl.atomic_add(sums + VISIBLE, visible_total, sem="relaxed")


@triton.jit(do_not_specialize=["amount", "many", "rows_of_batch", "heads", "q_blocks"])
def share_kernel(
    kept_ptr,
    sums_ptr,
    counts_ptr,
    order_ptr,
    segments_ptr,
    amount,
    many,
    rows_of_batch,
    heads,
    q_blocks,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """How many blocks each row keeps: what lies above the last level, and its part of that; and the order of rows.

    Of r places for t blocks, the row that has the blocks number a to b - 1 gets floor(b r / t) - floor(a r / t).

    Grid: batch elements. A program takes ROWS rows at a time. Reads what `count_kernel` writes. Writes, int32
        counts     [B * rows]
        order      [B * rows], the rows of each batch element: those with more than ``many`` blocks, then the others,
                   the last first; PACKED, those that exist, without gaps (`Segments.table`)
    """
    batch = tl.program_id(0).to(tl.int64)
    levels = tl.arange(0, LEVELS)
    parts = sums_ptr + (batch * PARTS + tl.arange(0, PARTS)) * SUMS
    sums = tl.sum(tl.load(parts[:, None] + levels[None, :]), 0)
    forced_sum = tl.sum(tl.load(parts + FORCED), 0)
    visible = tl.sum(tl.load(parts + VISIBLE), 0).to(tl.float64)
    places = tl.ceil(visible * amount * ROUNDING_GUARD).to(tl.int32)
    last = tl.max(tl.where(sums >= places, levels, 0), 0)  # sums fall
    last = tl.where(forced_sum >= places, LEVELS, last)
    higher = tl.minimum(last + 1, LEVELS)
    above_sum = tl.sum(tl.where(levels == higher, sums, 0), 0) + tl.where(higher == LEVELS, forced_sum, 0)
    below_sum = tl.sum(tl.where(levels == last, sums, 0), 0) + tl.where(last == LEVELS, forced_sum, 0)
    total = (below_sum - above_sum).to(tl.int64)
    left = tl.minimum(tl.maximum(places - above_sum, 0), below_sum - above_sum).to(tl.int64)
    total = tl.maximum(total, 1)
    before = tl.zeros((), tl.int64)
    long_before = tl.zeros((), tl.int32)
    first_row = batch * rows_of_batch
    own_blocks = q_blocks
    if PACKED:
        _, q_len = segment_queries(segments_ptr, batch)
        own_blocks = tl.cdiv(q_len, BLOCK_Q)
        first_row = segment_number(segments_ptr, batch, FIRST_ROW).to(tl.int64)
    last_place = heads * own_blocks - 1
    for start in range(0, rows_of_batch, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = rows < rows_of_batch
        kept = kept_ptr + (batch * rows_of_batch + rows) * (2 * LEVELS)
        above = tl.load(kept + higher, mask=inside, other=0)
        blocks = tl.load(kept + last, mask=inside, other=0) - above
        after = before + tl.cumsum(blocks, 0)
        share = after * left // total - (after - blocks) * left // total
        count = above + share.to(tl.int32)
        tl.store(counts_ptr + batch * rows_of_batch + rows, count, mask=inside)
        before += tl.sum(blocks, 0)
        is_long = (count > many) & inside
        longs = long_before + tl.cumsum(is_long.to(tl.int32), 0)
        rank = rows
        if PACKED:
            inside = inside & (rows % q_blocks < own_blocks)
            rank = rows // q_blocks * own_blocks + rows % q_blocks
        place = tl.where(is_long, longs - 1, last_place - (rank - longs))
        numbers = (batch * rows_of_batch + rows).to(tl.int32)
        tl.store(order_ptr + first_row + place, numbers, mask=inside)
        long_before += tl.sum(is_long.to(tl.int32), 0)


def count_budget(rows: RowArguments, call: Call, kv_blocks: int) -> tuple[Tensor, Tensor]:
    """What rows keep of a budget that reaches down to each level, and the sums of it, as `count_kernel` writes them.

    Args:
        kv_blocks: of the whole call, by which levels go.
    """
    shape, like = call.shape, rows.pointers["probability_ptr"]
    rows_of_batch = shape.heads * shape.q_blocks
    setting = configs.budget_config()
    programs = ceil_div(rows_of_batch, setting.rows)
    kept = buffer_like(like, True, shape.batch * rows_of_batch, 2 * LEVELS.value, dtype=torch.int32)
    sums = zeros_like(like, shape.batch, PARTS.value, SUMS.value, dtype=torch.int32)
    launch(
        count_kernel,
        programs * shape.batch,
        **rows.pointers,
        kept_ptr=kept,
        sums_ptr=sums,
        **rows.strides,
        amount=_density(call),
        **rows.sizes,
        top_level=config.budget_top(kv_blocks),
        rows_of_batch=rows_of_batch,
        programs_of_batch=programs,
        ROWS=setting.rows,
        **rows.constants,
        num_warps=configs.select_config().warps(rows.columns),
    )
    return kept, sums


def _density(call: Call) -> float:
    amount = call.selection.amount
    assert not isinstance(amount, Tensor)
    return float(amount)


def share_budget(rows: RowArguments, call: Call) -> tuple[Tensor, Tensor]:
    """How many eligible blocks each row keeps of its batch element's budget, (B, H, q_blocks) int32; which comes when.

    The second is (rows that exist,) int32, the rows' numbers with long ones first in each batch element.
    """
    shape, like = call.shape, rows.pointers["probability_ptr"]
    rows_of_batch = shape.heads * shape.q_blocks
    seen_blocks = min(shape.kv_blocks * (0.5 if call.is_causal else 1.0), blocks_of_row(call.window, shape))
    kept, sums = count_budget(rows, call, shape.kv_blocks)
    counts = buffer_like(like, True, shape.batch, shape.heads, shape.q_blocks, dtype=torch.int32)
    many_rows = counts.numel() if call.segments is None else call.segments.order.numel()
    order = buffer_like(like, True, many_rows, dtype=torch.int32)
    launch(
        share_kernel,
        shape.batch,
        kept_ptr=kept,
        sums_ptr=sums,
        counts_ptr=counts,
        order_ptr=order,
        segments_ptr=rows.pointers["segments_ptr"],
        amount=_density(call),
        many=LONG * _density(call) * seen_blocks,
        rows_of_batch=rows_of_batch,
        heads=shape.heads,
        q_blocks=shape.q_blocks,
        PACKED=call.segments is not None,
        ROWS=min(max(power_of_two(rows_of_batch), 128), MOST_ROWS),
        num_warps=configs.budget_config().share_warps,
    )
    return counts, order
