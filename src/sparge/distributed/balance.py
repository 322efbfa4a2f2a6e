"""Heads that are dealt to ranks by what they cost.

Under a `Budget` or `TopCdf` some heads keep many blocks and others few, and the rank with the many is waited for. What
a head costs changes little from one denoising step to the next, so each call deals the heads by the counts of the call
before: sorted, then to ranks 0 .. P - 1, P - 1 .. 0, and so on (a snake). Nothing waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparge.distributed.budget import Ranks
from sparge.masks.block_mask import BlockMask
from sparge.stats import counters


class HeadBalance:
    """The deal of one layer's heads to the ranks of `ulysses_attention`; each layer has its own.

    Each rank has one too, and all of them make the same calls with it: a deal that one has not learnt mixes up heads.
    The first call takes heads in their order. Grouped heads go together with the head of K and V that they share; with
    as many ranks as such heads, or more, there is nothing to deal. How uneven the work was, is measured:
    `sparge.stats().imbalance`, the blocks of the rank with the most by those of the mean rank.

    Args:
        permute: False measures alone.

    Example:
        >>> balance = HeadBalance()
        >>> balance.order is None  # before the first call
        True
    """

    def __init__(self, *, permute: bool = True) -> None:
        self._permute = permute
        self.order: Tensor | None = None
        """(H_kv,), the heads of rank 0, then those of rank 1, and so on; None: in their order."""

    def heads(self, kv_heads: int, group: int, device: torch.device) -> Tensor | None:
        """Heads of queries in the order of ranks, (H,), None in their own. A deal of other heads is dropped."""
        if self.order is not None and (len(self.order) != kv_heads or self.order.device != device):
            self.order = None
        if self.order is None:
            return None
        return (self.order[:, None] * group + torch.arange(group, device=device)).flatten()

    def learn_from(self, mask: BlockMask, kv_heads: int, ranks: Ranks) -> None:
        """`learn` what every head kept; all ranks tell of theirs."""
        kept = mask.kv_num_blocks.sum((0, 2), dtype=torch.int64)
        self.learn(ranks.stack(kept).flatten(), kv_heads, ranks.size)

    def learn(self, costs: Tensor, kv_heads: int, ranks: int) -> None:
        """Deal the heads anew by what they cost, (H,) in the order of the call that is over, rank by rank."""
        counters.record_work(costs.view(ranks, -1).sum(1))
        if not self._permute or kv_heads % ranks or kv_heads == ranks:
            return
        units = costs.view(kv_heads, -1).sum(1)
        if self.order is not None:
            units = torch.empty_like(units).index_copy_(0, self.order, units)
        self.order = deal(units, ranks)


def deal(costs: Tensor, ranks: int) -> Tensor:
    """Heads in the order of ranks, dealt in a snake from the dearest to the cheapest.

    Example:
        >>> deal(torch.tensor([9, 1, 8, 2]), 2)  # rank 0 gets the dearest and the cheapest
        tensor([0, 1, 2, 3])
        >>> deal(torch.tensor([9, 8, 2, 1]), 2)
        tensor([0, 3, 1, 2])
    """
    rounds = costs.argsort(descending=True, stable=True).view(-1, ranks).clone()
    rounds[1::2] = rounds[1::2].flip(1)
    return rounds.T.flatten()
