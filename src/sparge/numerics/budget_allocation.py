"""How a `Budget` is shared out between rows of blocks: as many blocks to each as its density allows all of them.

A row says how many blocks it would keep if the budget reached down to each level of probability
(`config.BUDGET_LEVELS`). The last level that fits is found from the sums over all rows; what it holds is shared out
evenly. Rows may lie in several places, on the ranks of a process group: a `Pool` then knows the sums over all of them.
(`reference.prediction.select_budget` says the same row by row; GPUs that hold all rows have a kernel for it.)
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparge.options.rules import BUDGET_LEVELS, ROUNDING_GUARD


class Pool(Protocol):
    """All rows that share a budget, of which some are here."""

    def total(self, own: Tensor) -> Tensor:
        """Sums over all places of what is summed here."""

    def before(self, blocks: Tensor) -> Tensor:
        """(B, rows) ints of the rows here -> for each, the sum over all rows anywhere that come before it."""


class RankPool(Pool, Protocol):
    """A `Pool` of rows on several ranks, each padded to as many.

    Attributes:
        width: rows of a rank.
        first: the number of the first row here among those of all ranks, one rank's behind the other's.
        order: (ranks * width,) int64, the numbers of all rows as the whole call has them.
    """

    width: int
    first: int
    order: Tensor

    def gather(self, own: Tensor) -> Tensor:
        """(B, width) of the rows here -> (ranks, B, width)."""


class Alone:
    """A `Pool` of the rows that are here."""

    def total(self, own: Tensor) -> Tensor:
        return own

    def before(self, blocks: Tensor) -> Tensor:
        return blocks.cumsum(1) - blocks


ALONE = Alone()


def share_out(kept: Tensor, visible: Tensor, density: float, pool: Pool = ALONE) -> Tensor:
    """How many blocks each row keeps, (B, rows) int64.

    Of r places for the t blocks of the last level, the row that has the blocks number a to b - 1 of them gets
    floor(b r / t) - floor(a r / t).

    Args:
        kept: (B, rows, levels + 1) ints, what a row keeps of a budget that reaches down to each level, at last to none.
        visible: (B,) ints, blocks that all rows here see.
        density: of the budget.
        pool: the rows that share it.
    """
    own = torch.cat([kept.sum(1), visible[:, None]], 1).long()
    totals = pool.total(own)
    sums, seen = totals[:, :-1], totals[:, -1:]
    seen = seen.float() if seen.device.type == "mps" else seen.double()
    places = (density * seen * ROUNDING_GUARD).ceil().long()  # [B, 1]
    last = ((sums >= places).sum(1, keepdim=True) - 1).clamp(min=0)  # sums fall: the highest level that is low enough
    higher = (last + 1).clamp(max=BUDGET_LEVELS)
    below, above = (_at(kept, level) for level in (last, higher))
    blocks = below - above
    above_sum = sums.gather(1, higher)
    total = sums.gather(1, last) - above_sum
    places = torch.minimum((places - above_sum).clamp(min=0), total)
    total = total.clamp(min=1)
    before = pool.before(blocks)
    return above + (before + blocks) * places // total - before * places // total


def _at(kept: Tensor, level: Tensor) -> Tensor:
    """(B, rows, levels + 1), (B, 1) -> (B, rows) int64."""
    return kept.gather(2, level[:, :, None].expand(-1, kept.shape[1], 1)).squeeze(2).long()
