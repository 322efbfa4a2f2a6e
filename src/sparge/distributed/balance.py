"""Load balancing of heads across ranks.

Under a `Budget` or `TopCdf`, some heads keep more blocks than others, and all ranks wait for the rank with the most
blocks. The cost of a head changes little between denoising steps, so each call assigns heads by the block counts of the
previous call. Heads are sorted by cost and assigned to ranks in snake order: 0 .. P - 1, P - 1 .. 0, and so on. The
host does not synchronize with the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparge.distributed.communicator import Communicator
from sparge.masks.block_mask import BlockMask
from sparge.stats import counters


class HeadBalance:
    """The assignment of one layer's heads to ranks, for ``mode="ulysses"``. Each layer needs its own object.

    Every rank creates an object and passes it in the same calls as the other ranks. The first call assigns heads in
    their natural order. Query heads that share a K/V head stay together. The assignment only changes if there are more
    K/V heads than ranks. `sparge.stats().imbalance` is the number of blocks on the rank with the most blocks, divided
    by the mean.

    Example:
        >>> balance = HeadBalance()
        >>> balance.order is None  # before the first call
        True
    """

    def __init__(self) -> None:
        self.order: Tensor | None = None
        """(H_kv,), the K/V heads of rank 0, then of rank 1, and so on; None for the natural order."""

    def query_heads(self, kv_heads: int, group: int, device: torch.device) -> Tensor | None:
        """Return the query heads in the order of ranks, (H,), or None for the natural order.

        If the stored order has another number of heads or is on another device, it is dropped.
        """
        if self.order is not None and (len(self.order) != kv_heads or self.order.device != device):
            self.order = None
        if self.order is None:
            return None
        return (self.order[:, None] * group + torch.arange(group, device=device)).flatten()

    def update(self, mask: BlockMask, kv_heads: int, ranks: Communicator) -> None:
        """Reassign heads by the numbers of kept blocks on all ranks; ``mask`` is this rank's mask."""
        kept = mask.kv_num_blocks.sum((0, 2), dtype=torch.int64)
        costs = ranks.all_gather(kept)  # [ranks, H / ranks], heads in the order of this call
        counters.record_work(costs.sum(1))
        if ranks.size == 1 or kv_heads % ranks.size or kv_heads == ranks.size:
            return
        kv_costs = costs.view(kv_heads, -1).sum(1)
        if self.order is not None:
            kv_costs = torch.empty_like(kv_costs).index_copy_(0, self.order, kv_costs)
        self.order = snake_order(kv_costs, ranks.size)


def snake_order(costs: Tensor, ranks: int) -> Tensor:
    """Return heads in the order of ranks, assigned in snake order from the most to the least expensive.

    Example:
        >>> snake_order(torch.tensor([9, 1, 8, 2]), 2)  # rank 0 gets the most and the least expensive
        tensor([0, 1, 2, 3])
        >>> snake_order(torch.tensor([9, 8, 2, 1]), 2)
        tensor([0, 3, 1, 2])
    """
    rounds = costs.argsort(descending=True, stable=True).view(-1, ranks).clone()
    rounds[1::2] = rounds[1::2].flip(1)
    return rounds.T.flatten()
