"""Sharding: the assignment of the tokens of a sequence to ranks.

contiguous    the tokens of rank r follow those of rank r - 1
head_tail     of 2 P equal pieces, rank r has pieces r and 2 P - 1 - r. In causal attention early tokens see few keys
              and late tokens see many, so all ranks have equal work
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sparge.masks.geometry import BLOCK_Q, ceil_div
from sparge.options.checks import check_choice

Sharding = Literal["contiguous", "head_tail"]
SHARDINGS = get_args(Sharding)


class Piece(NamedTuple):
    """Consecutive tokens of a sequence."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class TokenSharding:
    """The pieces of every rank, in the order in which the rank stores them. Compared by identity.

    Attributes:
        lengths: number of tokens on every rank.
        total: number of tokens of the sequence.
        flat: the pieces of all ranks; ``is_sorted`` if they are in the order of the sequence.
        has_whole_blocks: no query block and no key block is split between ranks.
    """

    def __init__(self, pieces: tuple[tuple[Piece, ...], ...]) -> None:
        self.pieces = pieces
        self.lengths = tuple([sum([piece.length for piece in of_rank]) for of_rank in pieces])
        self.total = sum(self.lengths)
        self.flat = [piece for of_rank in pieces for piece in of_rank]
        self.has_whole_blocks = all(piece.start % BLOCK_Q == 0 for piece in self.flat)
        self.is_sorted = self.flat == sorted(self.flat)

    def sort(self, gathered: Tensor) -> Tensor:
        """Sort the concatenated tokens of all ranks, (B, H, S, D), into the order of the sequence."""
        if self.is_sorted:
            return gathered
        parts = dict(zip(self.flat, gathered.split([piece.length for piece in self.flat], 2), strict=True))
        return torch.cat([parts[piece] for piece in sorted(parts)], 2)


@functools.lru_cache(maxsize=64)
def token_sharding(lengths: tuple[int, ...], sharding: str) -> TokenSharding:
    """Return the tokens of every rank, given their numbers. Equal arguments return the same object."""
    if sharding == "contiguous":
        ends = [sum(lengths[: rank + 1]) for rank in range(len(lengths))]
        return TokenSharding(tuple((Piece(end - length, end),) for end, length in zip(ends, lengths, strict=True)))
    if len(set(lengths)) != 1 or lengths[0] % 2:
        raise ValueError(f'sharding="head_tail": expected the same even number of tokens on every rank, got {lengths}')
    size, count = lengths[0] // 2, 2 * len(lengths)
    pieces = [Piece(index * size, (index + 1) * size) for index in range(count)]
    return TokenSharding(tuple((pieces[rank], pieces[count - 1 - rank]) for rank in range(len(lengths))))


def split_lengths(total: int, ranks: int) -> tuple[int, ...]:
    """Split a sequence into whole blocks of 128 tokens, and return the number of tokens of each rank.

    Only the last rank may have a partial block.

    Raises:
        ValueError: there are fewer blocks than ranks.

    Example:
        >>> split_lengths(1000, 3)
        (384, 384, 232)
    """
    blocks = ceil_div(total, BLOCK_Q)
    if blocks < ranks:
        raise ValueError(f"total: expected a block of {BLOCK_Q} tokens or more for each of {ranks} ranks, got {total}")
    ends = [min((blocks * rank + ranks - 1) // ranks * BLOCK_Q, total) for rank in range(ranks + 1)]
    return tuple(stop - start for start, stop in pairwise(ends))


def shard(
    tensor: Tensor,
    rank: int,
    ranks: int,
    *,
    dim: int = 2,
    sharding: Sharding = "contiguous",
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Return a rank's tokens of a whole sequence.

    Args:
        tensor: any tensor with tokens in dimension ``dim``.
        rank: rank in the process group.
        ranks: size of the process group.
        sharding: "contiguous", or "head_tail" for causal attention.
        lengths: number of tokens on every rank. Default: `split_lengths`, or equal numbers with "head_tail".

    Raises:
        ValueError: the sequence cannot be split this way.

    Example:
        >>> shard(torch.arange(512)[None, None, :, None], 1, 2, sharding="head_tail").flatten()[[0, 127, 128, 255]]
        tensor([128, 255, 256, 383])
    """
    total = tensor.shape[dim]
    check_choice("sharding", sharding, SHARDINGS)
    if lengths is None:
        if sharding == "head_tail" and total % (2 * ranks):
            raise ValueError(f'sharding="head_tail": expected a multiple of {2 * ranks} tokens, got {total}')
        lengths = [total // ranks] * ranks if sharding == "head_tail" else split_lengths(total, ranks)
    pieces = token_sharding(tuple(lengths), sharding).pieces[rank]
    if sum(lengths) != total:
        raise ValueError(f"lengths: expected {total} tokens in total, got {sum(lengths)}")
    return torch.cat([tensor.narrow(dim, piece.start, piece.length) for piece in pieces], dim)
