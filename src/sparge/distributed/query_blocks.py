"""The query blocks of all ranks, among which a `Budget` is allocated as if they were on one rank."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.distributed.communicator import Communicator
from sparge.distributed.mesh import Mesh
from sparge.distributed.request import Request
from sparge.masks.geometry import BLOCK_Q, ceil_div

BEHIND_ALL = 2**62
"""Sorts padding behind every query block."""


class RankQBlocks:
    """The query blocks of all ranks: a `budget_allocation.RankPool`.

    Args:
        ranks: the ranks among which a budget is allocated.
        order: (ranks * width,) int64, the query blocks of all ranks, concatenated, in the order of the whole call.
            Shorter ranks are padded.
        own_q_blocks: the number of query blocks on this rank.
    """

    def __init__(self, ranks: Communicator, order: Tensor, own_q_blocks: int) -> None:
        self._ranks = ranks
        self._own_q_blocks = own_q_blocks
        self.width = len(order) // ranks.size
        self.first = ranks.rank * self.width
        self.order = order

    def total(self, own: Tensor) -> Tensor:
        return self._ranks.all_reduce(own)

    def gather(self, own: Tensor) -> Tensor:
        return self._ranks.all_gather(own)

    def before(self, blocks: Tensor) -> Tensor:
        padded = F.pad(blocks, (0, self.width - self._own_q_blocks)).int()
        gathered = self.gather(padded).transpose(0, 1).flatten(1).long()  # [B, ranks * width]
        in_order = gathered[:, self.order]
        before = torch.empty_like(gathered)
        before[:, self.order] = in_order.cumsum(1) - in_order
        return before[:, self.first : self.first + self._own_q_blocks]


def order_by_heads(heads: Tensor, q_blocks: int) -> Tensor:
    """Return the order of `RankQBlocks` where each rank has all ``q_blocks`` of its heads.

    Args:
        heads: (H,), the heads of the ranks, equally many each, concatenated.
    """
    return (heads.argsort()[:, None] * q_blocks + torch.arange(q_blocks, device=heads.device)).flatten()


@functools.lru_cache(maxsize=64)
def order_by_ranges(
    ranges: tuple[tuple[tuple[int, int], ...], ...], heads: tuple[range, ...], q_blocks: int, device: torch.device
) -> Tensor:
    """Return the order of `RankQBlocks` where each rank has some queries of some heads.

    Args:
        ranges: for every rank, the ranges [start, stop) of its queries.
        heads: for every rank, its heads.
        q_blocks: query blocks per head of the whole call.
    """
    numbers = []
    for own_ranges, own_heads in zip(ranges, heads, strict=True):
        first = torch.tensor(own_heads, device="cpu")[:, None] * q_blocks
        parts = []
        for start, stop in own_ranges:
            blocks = torch.arange(ceil_div(stop - start, BLOCK_Q), device="cpu") + start // BLOCK_Q
            parts.append((first + blocks).flatten())
        numbers.append(torch.cat(parts))
    width = max(map(len, numbers))
    padded = torch.cat([F.pad(part, (0, width - len(part)), value=BEHIND_ALL) for part in numbers])
    return padded.argsort(stable=True).to(device)


def q_blocks_of(request: Request, mesh: Mesh, order: Tensor | None, device: torch.device) -> RankQBlocks:
    """Return the query blocks of all ranks of a mesh: heads by the Ulysses rank, pieces by the outer rank.

    Args:
        order: (H,), query heads in the order of ranks, where a `HeadBalance` assigned them; None: their own order.
    """
    shape = request.call.shape

    def make() -> tuple[Tensor, int]:
        each, heads = mesh.ulysses.size, mesh.heads_by_rank(shape.heads)
        pieces = [request.sharding.pieces[rank // each] for rank in range(mesh.size)]
        ranges = tuple(tuple((piece.start, piece.stop) for piece in own) for own in pieces)
        own = sum(ceil_div(piece.length, BLOCK_Q) for piece in pieces[mesh.rank]) * len(heads[mesh.rank])
        return order_by_ranges(ranges, heads, shape.q_blocks, device), own

    found, own = request.once(("q_blocks", mesh.rank), make)
    return RankQBlocks(mesh, found if order is None else order_by_heads(order, shape.q_blocks), own)
