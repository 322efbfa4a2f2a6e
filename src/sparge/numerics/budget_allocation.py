"""Allocate a `Budget` to query blocks, so that they together keep the given density of blocks.

Probabilities have levels (`options.rules.BUDGET_LEVELS`). For each level, the input has the number of blocks that each
query block keeps if the budget reaches down to that level. The sums over all query blocks determine the last level that
fits, and the blocks of that level are allocated evenly. If query blocks are distributed over the ranks of a process
group, a `RankPool` provides the sums over all ranks. `reference.prediction.select_budget` is the specification. If one
GPU has all query blocks, `backends.gpu.stages.budget` computes the allocation instead.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparge.options.rules import BUDGET_LEVELS, ROUNDING_GUARD


class RankPool(Protocol):
    """The query blocks of several ranks that share a budget. Every rank is padded to the same number of query blocks.

    Attributes:
        width: query blocks per rank, padding included.
        first: the index of the first query block of this rank in the concatenation of all ranks.
        order: (ranks * width,) int64, the indices of all query blocks in the order of the whole call.
    """

    width: int
    first: int
    order: Tensor

    def total(self, counts: Tensor, /) -> Tensor:
        """Return the elementwise sum of the ``counts`` of all ranks."""

    def before(self, blocks: Tensor, /) -> Tensor:
        """Return, for each local query block, the sum of (B, n) ints over all preceding query blocks on any rank."""

    def gather(self, counts: Tensor, /) -> Tensor:
        """Gather one number per query block from all ranks: (B, width) -> (ranks, B, width)."""


def allocate(kept: Tensor, visible: Tensor, density: float, pool: RankPool | None = None) -> Tensor:
    """Return the number of blocks that each query block keeps, (B, n) int64.

    A query block keeps all its blocks above the last level. If the last level has t blocks and the budget has room for
    r of them, a query block with blocks a to b - 1 of the t also keeps floor(b r / t) - floor(a r / t) of these.

    Args:
        kept: (B, n, levels + 1) ints, number of blocks that each query block keeps if the budget reaches down to each
            level. The last entry is for a budget that reaches no level.
        visible: (B,) ints, total number of blocks visible to the query blocks of this process.
        density: density of the budget.
        pool: the query blocks of all ranks; None if they are all in this process.
    """
    totals = torch.cat([kept.sum(1), visible[:, None]], 1).long()
    if pool is not None:
        totals = pool.total(totals)
    sums, seen = totals[:, :-1], totals[:, -1:]
    seen = seen.float() if seen.device.type == "mps" else seen.double()
    capacity = (density * seen * ROUNDING_GUARD).ceil().long()  # [B, 1]
    last = ((sums >= capacity).sum(1, keepdim=True) - 1).clamp(min=0)  # sums decrease with the level
    higher = (last + 1).clamp(max=BUDGET_LEVELS)
    below, above = (_at(kept, level) for level in (last, higher))
    blocks = below - above  # [B, n], blocks at the last level
    above_sum = sums.gather(1, higher)
    total = sums.gather(1, last) - above_sum
    room = torch.minimum((capacity - above_sum).clamp(min=0), total)  # [B, 1], blocks of the last level that fit
    total = total.clamp(min=1)
    before = blocks.cumsum(1) - blocks if pool is None else pool.before(blocks)
    return above + (before + blocks) * room // total - before * room // total


def _at(kept: Tensor, level: Tensor) -> Tensor:
    """Look up each query block's count at one level: (B, n, levels + 1), (B, 1) -> (B, n) int64."""
    return kept.gather(2, level[:, :, None].expand(-1, kept.shape[1], 1)).squeeze(2).long()
