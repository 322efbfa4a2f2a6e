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
Q_BLOCKS = tl.constexpr(2048)
"""Query blocks that a program reads at a time."""
WARPS = 8


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
def level_kernel(kept_ptr, totals_ptr, blocks_ptr, density, q_blocks, first_q_block, end_q_block, width, chunks):
    """Count the blocks that each query block has at the last level that the budget reaches.

    The kernel handles one piece of the sequence: its query block i is entry ``first_q_block`` + i. Entries between the
    end of the piece and ``end_q_block`` are set to 0.

    Grid: chunks of Q_BLOCKS query blocks of every batch element, in one dimension.

    Reads
        kept      [B, q_blocks, 2 * LEVELS] int32, from `budget.count_kernel`
        totals    [B, TOTALS] int64, sums over all ranks
    Writes
        blocks    [B, width] int32
    """
    # The last level
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    last, higher, _, _ = _last_level(totals_ptr, batch, density)

    # Blocks of each query block at that level
    places = tl.program_id(0) % chunks * Q_BLOCKS + tl.arange(0, Q_BLOCKS)
    inside = places < q_blocks
    _, blocks = blocks_at_level(kept_ptr + (batch * q_blocks + places) * (2 * LEVELS), last, higher, inside)
    tl.store(blocks_ptr + batch * width + first_q_block + places, blocks, mask=first_q_block + places < end_q_block)


@kernel
def portion_kernel(
    kept_ptr,
    totals_ptr,
    gathered_ptr,
    order_ptr,
    counts_ptr,
    density,
    batches,
    q_blocks,
    first,
    width,
    total_q_blocks,
):
    """Compute counts[i], the number of blocks that query block i of a piece keeps.

    Grid: batch elements. All ranks together have ``total_q_blocks`` query blocks, and the piece starts at index
    ``first`` of their padded concatenation.

    Reads
        kept, totals   see `level_kernel`
        gathered       [ranks, B, width] int32, `blocks_of_level` of all ranks
        order          [ranks * width] int64, indices of all query blocks in the order of the whole call
    Writes
        counts         [B, q_blocks] int32
    """
    batch = tl.program_id(0).to(tl.int64)
    _, higher, room, total = _last_level(totals_ptr, batch, density)

    # Loop over the query blocks of all ranks, in the order of the whole call
    before = tl.zeros((), tl.int64)
    for start in range(0, total_q_blocks, Q_BLOCKS):
        places = start + tl.arange(0, Q_BLOCKS)
        inside = places < total_q_blocks
        indices = tl.load(order_ptr + places, mask=inside, other=0)
        source = gathered_ptr + (indices // width * batches + batch) * width + indices % width
        blocks = tl.load(source, mask=inside, other=0).to(tl.int64)
        after = before + tl.cumsum(blocks, 0)
        portion = portion_of(blocks, after, room, total)
        q_block = indices - first
        is_local = inside & (q_block >= 0) & (q_block < q_blocks)
        above = tl.load(kept_ptr + (batch * q_blocks + q_block) * (2 * LEVELS) + higher, mask=is_local, other=0)
        tl.store(counts_ptr + batch * q_blocks + q_block, above + portion.to(tl.int32), mask=is_local)
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
    """Return the number of blocks that each query block of this rank has at the last level, (B, width) int32.

    The query blocks of all pieces are concatenated and padded to ``width``.

    Args:
        pieces: for each piece, the numbers of blocks kept at every level, returned by `budget.count_budget`.
        totals: sums over all ranks.
    """
    batch, first_q_block = len(totals), 0
    blocks = buffer_like(totals, True, batch, width, dtype=torch.int32)
    for place, kept in enumerate(pieces):
        q_blocks = len(kept) // batch
        end_q_block = width if place + 1 == len(pieces) else first_q_block + q_blocks
        chunks = ceil_div(end_q_block - first_q_block, Q_BLOCKS.value)
        launch(
            level_kernel,
            chunks * batch,
            kept_ptr=kept,
            totals_ptr=totals,
            blocks_ptr=blocks,
            density=density,
            q_blocks=q_blocks,
            first_q_block=first_q_block,
            end_q_block=end_q_block,
            width=width,
            chunks=chunks,
            num_warps=WARPS,
        )
        first_q_block += q_blocks
    return blocks


def portions(kept: Tensor, totals: Tensor, gathered: Tensor, order: Tensor, density: float, first: int) -> Tensor:
    """Return the number of blocks that each query block of a piece keeps, (B, q_blocks) int32.

    Args:
        kept: returned by `budget.count_budget`.
        totals: sums over all ranks.
        gathered: (ranks, B, width) int32, `blocks_of_level` of all ranks.
        order: (ranks * width,) int64, the query blocks of all ranks in the order of the whole call.
        first: index of the piece's first query block in the query blocks of all ranks.
    """
    ranks, batch, width = gathered.shape
    q_blocks = len(kept) // batch
    counts = buffer_like(kept, True, batch, q_blocks, dtype=torch.int32)
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
        q_blocks=q_blocks,
        first=first,
        width=width,
        total_q_blocks=ranks * width,
        num_warps=WARPS,
    )
    return counts
