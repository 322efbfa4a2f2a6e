"""Allocate one budget to query blocks on several ranks: the kernels around `budget_allocation.allocate`'s collectives.

    total_kernel     add the sums of `count_kernel` over the query blocks of this rank; ranks then add these totals
    level_kernel     count each query block's blocks at the last level that the budget reaches; ranks gather the counts
    portion_kernel   compute how many blocks each query block keeps

The query blocks of a rank may be several pieces of a sequence, each with its own counts. If one rank has all query
blocks, `budget.allocated_blocks` computes the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import buffer_like, launch
from sparge.backends.gpu.primitives import kernel
from sparge.backends.gpu.stages.budget import (
    BEFORE,
    FORCED,
    LEVELS,
    PARTS_AT_ONCE,
    SUMS,
    VISIBLE,
    blocks_at_level,
    last_level,
    portion_of,
)
from sparge.masks.geometry import ceil_div

TOTALS = tl.constexpr(BEFORE.value)
"""Numbers that ranks add for a batch element: kept blocks for every level and above all levels, visible blocks."""
ROWS, WARPS = 2048, 8
"""Query blocks that a program reads at a time, warps."""


@kernel
def total_kernel(sums_ptr, totals_ptr, parts):
    """Add the sums of all parts of a batch element.

    Grid: batch elements.

    Reads
        sums      [B, parts, SUMS] int32
    Writes
        totals    [B, TOTALS] int64
    """
    batch = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SUMS)
    totals = tl.zeros((SUMS,), tl.int64)
    for start in range(0, parts, PARTS_AT_ONCE):
        part = start + tl.arange(0, PARTS_AT_ONCE)
        pointers = sums_ptr + (batch * parts + part)[:, None] * SUMS + columns[None, :]
        totals += tl.sum(tl.load(pointers, mask=(part < parts)[:, None], other=0).to(tl.int64), 0)
    tl.store(totals_ptr + batch * TOTALS + columns, totals, mask=columns < TOTALS)


@triton.jit
def _last_level(totals_ptr, batch, density):
    """Return `budget.last_level` for the totals of all ranks."""
    totals = totals_ptr + batch * TOTALS
    sums = tl.load(totals + tl.arange(0, LEVELS))
    return last_level(sums, tl.load(totals + FORCED), tl.load(totals + VISIBLE), density, tl.int64)


@kernel
def level_kernel(
    kept_ptr, totals_ptr, blocks_ptr, density, rows, first_row, end_row, width, chunks, ROWS: tl.constexpr
):
    """Write blocks[first_row + i], the blocks of query block i of a piece at the last level, padded to ``end_row``.

    Grid: chunks of ROWS query blocks of every batch element, in one dimension.

    Reads
        kept      [B, rows, 2 * LEVELS] int32, from `budget.count_kernel`
        totals    [B, TOTALS] int64, sums over all ranks
    Writes
        blocks    [B, width] int32
    """
    # The last level
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    last, higher, _, _ = _last_level(totals_ptr, batch, density)

    # Blocks of each query block at that level
    places = tl.program_id(0) % chunks * ROWS + tl.arange(0, ROWS)
    inside = places < rows
    _, blocks = blocks_at_level(kept_ptr + (batch * rows + places) * (2 * LEVELS), last, higher, inside)
    tl.store(blocks_ptr + batch * width + first_row + places, blocks, mask=first_row + places < end_row)


@kernel
def portion_kernel(
    kept_ptr,
    totals_ptr,
    gathered_ptr,
    order_ptr,
    counts_ptr,
    density,
    batches,
    rows,
    first,
    width,
    total_rows,
    ROWS: tl.constexpr,
):
    """Compute counts[i], the number of blocks that query block i of a piece keeps.

    Grid: batch elements. All ranks together have ``total_rows`` query blocks; the piece starts at index ``first``.

    Reads
        kept, totals   see `level_kernel`
        gathered       [ranks, B, width] int32, `blocks_of_level` of all ranks
        order          [ranks * width] int64, indices of all query blocks in the order of the whole call
    Writes
        counts         [B, rows] int32
    """
    batch = tl.program_id(0).to(tl.int64)
    _, higher, room, total = _last_level(totals_ptr, batch, density)

    # Loop over the query blocks of all ranks, in the order of the whole call
    before = tl.zeros((), tl.int64)
    for start in range(0, total_rows, ROWS):
        places = start + tl.arange(0, ROWS)
        inside = places < total_rows
        numbers = tl.load(order_ptr + places, mask=inside, other=0)
        source = gathered_ptr + (numbers // width * batches + batch) * width + numbers % width
        blocks = tl.load(source, mask=inside, other=0).to(tl.int64)
        after = before + tl.cumsum(blocks, 0)
        portion = portion_of(blocks, after, room, total)
        row = numbers - first
        is_local = inside & (row >= 0) & (row < rows)
        above = tl.load(kept_ptr + (batch * rows + row) * (2 * LEVELS) + higher, mask=is_local, other=0)
        tl.store(counts_ptr + batch * rows + row, above + portion.to(tl.int32), mask=is_local)
        before += tl.sum(blocks, 0)


def own_totals(sums: Tensor) -> Tensor:
    """Return the sums of `budget.count_budget` over the query blocks of this rank, (B, TOTALS) int64."""
    totals = buffer_like(sums, True, len(sums), TOTALS.value, dtype=torch.int64)
    launch(
        total_kernel,
        len(sums),
        sums_ptr=sums,
        totals_ptr=totals,
        parts=sums.shape[1],
        num_warps=WARPS,
    )
    return totals


def blocks_of_level(pieces: list[Tensor], totals: Tensor, density: float, width: int) -> Tensor:
    """Return the blocks of all pieces at the last level, padded to ``width`` query blocks: (B, width) int32.

    Args:
        pieces: the blocks that the query blocks of each piece keep at every level, returned by `budget.count_budget`.
        totals: sums over all ranks.
    """
    batch, first_row = len(totals), 0
    blocks = buffer_like(totals, True, batch, width, dtype=torch.int32)
    for place, kept in enumerate(pieces):
        rows = len(kept) // batch
        end_row = width if place + 1 == len(pieces) else first_row + rows
        chunks = ceil_div(end_row - first_row, ROWS)
        launch(
            level_kernel,
            chunks * batch,
            kept_ptr=kept,
            totals_ptr=totals,
            blocks_ptr=blocks,
            density=density,
            rows=rows,
            first_row=first_row,
            end_row=end_row,
            width=width,
            chunks=chunks,
            ROWS=ROWS,
            num_warps=WARPS,
        )
        first_row += rows
    return blocks


def portions(kept: Tensor, totals: Tensor, gathered: Tensor, order: Tensor, density: float, first: int) -> Tensor:
    """Return the number of blocks that each query block of a piece keeps, (B, rows) int32.

    Args:
        kept: returned by `budget.count_budget`.
        totals: sums over all ranks.
        gathered: (ranks, B, width) int32, `blocks_of_level` of all ranks.
        order: (ranks * width,) int64, the query blocks of all ranks in the order of the whole call.
        first: index of the piece's first query block in the query blocks of all ranks.
    """
    ranks, batch, width = gathered.shape
    rows = len(kept) // batch
    counts = buffer_like(kept, True, batch, rows, dtype=torch.int32)
    launch(
        portion_kernel,
        batch,
        kept_ptr=kept,
        totals_ptr=totals,
        gathered_ptr=gathered,
        order_ptr=order,
        counts_ptr=counts,
        density=density,
        batches=batch,
        rows=rows,
        first=first,
        width=width,
        total_rows=ranks * width,
        ROWS=ROWS,
        num_warps=WARPS,
    )
    return counts
