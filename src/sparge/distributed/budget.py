"""One `Budget` for rows of blocks that lie on several ranks: the same blocks as if they lay on one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.call import Call
from sparge.dispatch import ops
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_Q, ceil_div
from sparge.numerics.budget_allocation import RankPool


class Ranks(Protocol):
    """What `RowPool` asks of an `Exchange`, or of several."""

    size: int
    rank: int

    def total(self, own: Tensor) -> Tensor: ...

    def stack(self, own: Tensor) -> Tensor: ...


class RowPool:
    """The rows of all ranks, for `budget_allocation.allocate`.

    Args:
        ranks: whom to ask.
        order: (ranks * rows,) int64, the rows of all ranks, one rank's behind the other's, as the whole call has them;
            ranks with fewer rows than others have some that are none.
        own_rows: how many rows this rank has.
    """

    def __init__(self, ranks: Ranks, order: Tensor, own_rows: int) -> None:
        self._ranks = ranks
        self._own_rows = own_rows
        self.width = len(order) // ranks.size
        self.first = ranks.rank * self.width
        self.order = order

    def total(self, own: Tensor) -> Tensor:
        return self._ranks.total(own)

    def gather(self, own: Tensor) -> Tensor:
        return self._ranks.stack(own)

    def before(self, blocks: Tensor) -> Tensor:
        padded = F.pad(blocks, (0, self.width - self._own_rows)).int()
        everyone = self.gather(padded).transpose(0, 1).flatten(1).long()  # [B, ranks * rows]
        in_order = everyone[:, self.order]
        before = torch.empty_like(everyone)
        before[:, self.order] = in_order.cumsum(1) - in_order
        return before[:, self.first : self.first + self._own_rows]


NOWHERE = 2**62


def order_of_heads(heads: Tensor, q_blocks: int) -> Tensor:
    """`RowPool`'s order where each rank has all rows of as many heads, (H,), one rank's behind the other's."""
    return (heads.argsort()[:, None] * q_blocks + torch.arange(q_blocks, device=heads.device)).flatten()


@functools.lru_cache(maxsize=64)
def order_of_rows(
    starts: tuple[tuple[tuple[int, int], ...], ...], heads: tuple[range, ...], q_blocks: int, device: torch.device
) -> Tensor:
    """`RowPool`'s order where each rank has some rows of some heads.

    Args:
        starts: for every rank the pieces (start, stop) of the sequence whose queries it has.
        heads: for every rank its heads.
        q_blocks: rows of a head of the whole call.
    """
    numbers = []
    for pieces, own_heads in zip(starts, heads, strict=True):
        of_heads = torch.tensor(own_heads, device="cpu")[:, None] * q_blocks
        parts = []
        for start, stop in pieces:
            rows = torch.arange(ceil_div(stop - start, BLOCK_Q), device="cpu") + start // BLOCK_Q
            parts.append((of_heads + rows).flatten())
        numbers.append(torch.cat(parts))
    width = max(map(len, numbers))
    padded = torch.cat([F.pad(part, (0, width - len(part)), value=NOWHERE) for part in numbers])
    return padded.argsort(stable=True).to(device)


@dataclass(frozen=True)
class Rows:
    """Some rows of a call on this rank.

    Attributes:
        query: (B, H, n, D).
        keys: K, or what `base.Backend.summarize_keys` made of it, of all blocks that the rows may see.
        call: what is asked for, with the sizes of these rows and keys.
    """

    query: Tensor
    keys: Tensor | tuple[Tensor, ...]
    call: Call


def choose(rows: Sequence[Rows], kv_blocks: int, pool: RankPool, backend: str) -> list[BlockMask]:
    """The blocks that rows on this rank keep, by one rule for the rows of all ranks.

    Args:
        rows: those of this rank; all calls have the same rule.
        kv_blocks: of the whole sequence.
        pool: the rows of all ranks.
    """
    candidates = [ops.candidates(part.query, part.keys, part.call, backend) for part in rows]
    return ops.choose_together(rows[0].query, candidates, rows[0].call, kv_blocks, pool, backend)
