"""Which tokens of a sequence lie on which rank.

contiguous    rank r has those behind rank r - 1's
head_tail     of 2 P equal pieces, rank r has piece r and piece 2 P - 1 - r: in causal attention early tokens see
              little and late ones much, so that every rank has as much to do
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparge.masks.geometry import BLOCK_Q, ceil_div
from sparge.options.checks import check_choice

Sharding = Literal["contiguous", "head_tail"]
SHARDINGS = ("contiguous", "head_tail")


class Piece(NamedTuple):
    """Neighbouring tokens of a sequence."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Places:
    """The pieces of every rank, in the order in which its tokens lie. `places_of` makes equal ones once."""

    pieces: tuple[tuple[Piece, ...], ...]

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each rank has."""
        return tuple(sum(piece.length for piece in pieces) for pieces in self.pieces)

    @functools.cached_property
    def total(self) -> int:
        return sum(self.lengths)

    @functools.cached_property
    def are_whole_blocks(self) -> bool:
        """Whether no block of the sequence is cut: its rows of blocks and its key blocks each lie on one rank."""
        return all(piece.start % BLOCK_Q == 0 for pieces in self.pieces for piece in pieces)

    @functools.cached_property
    def is_in_order(self) -> bool:
        """Whether the ranks' tokens, one rank's behind the other's, are the sequence."""
        starts = [piece.start for pieces in self.pieces for piece in pieces]
        return starts == sorted(starts)

    def in_order(self, gathered: Tensor) -> Tensor:
        """Tokens (B, H, S, D) of all ranks, one rank's behind the other's, as the sequence has them."""
        if self.is_in_order:
            return gathered
        flat = [piece for pieces in self.pieces for piece in pieces]
        parts = dict(zip(flat, gathered.split([piece.length for piece in flat], 2), strict=True))
        return torch.cat([parts[piece] for piece in sorted(parts)], 2)


def places_of(lengths: Sequence[int], sharding: str) -> Places:
    """Where tokens lie, by how many each rank has.

    Raises:
        ValueError: an unknown sharding, or one that the lengths do not allow.
    """
    check_choice("sharding", sharding, SHARDINGS)
    return _places_of(tuple(lengths), sharding)


@functools.lru_cache(maxsize=64)
def _places_of(lengths: tuple[int, ...], sharding: str) -> Places:
    if sharding == "contiguous":
        ends = [sum(lengths[: rank + 1]) for rank in range(len(lengths))]
        return Places(tuple((Piece(end - length, end),) for end, length in zip(ends, lengths, strict=True)))
    if len(set(lengths)) != 1 or lengths[0] % 2:
        raise ValueError(
            f'sharding="head_tail": expected one even number of tokens on every rank, got {tuple(lengths)}'
        )
    size, pieces = lengths[0] // 2, 2 * len(lengths)
    every = [Piece(index * size, (index + 1) * size) for index in range(pieces)]
    return Places(tuple((every[rank], every[pieces - 1 - rank]) for rank in range(len(lengths))))


def split_lengths(total: int, ranks: int) -> tuple[int, ...]:
    """How many of a sequence's tokens each rank gets, in whole blocks of 128 but for the last.

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
    """What a rank holds of a whole sequence.

    Args:
        tensor: any, with tokens in dimension ``dim``.
        rank: rank in the process group.
        ranks: size of the process group.
        sharding: "contiguous", or "head_tail" for causal attention.
        lengths: of every rank; by default `split_lengths`, or equal ones with "head_tail".

    Raises:
        ValueError: the sequence cannot be cut so.

    Example:
        >>> shard(torch.arange(512)[None, None, :, None], 1, 2, sharding="head_tail").flatten()[[0, 127, 128, 255]]
        tensor([128, 255, 256, 383])
    """
    total = tensor.shape[dim]
    if lengths is None:
        if sharding == "head_tail" and total % (2 * ranks):
            raise ValueError(f'sharding="head_tail": expected a multiple of {2 * ranks} tokens, got {total}')
        lengths = [total // ranks] * ranks if sharding == "head_tail" else split_lengths(total, ranks)
    pieces = places_of(lengths, sharding).pieces[rank]
    if sum(lengths) != total:
        raise ValueError(f"lengths: expected {total} tokens in all, got {sum(lengths)}")
    return torch.cat([tensor.narrow(dim, piece.start, piece.length) for piece in pieces], dim)
