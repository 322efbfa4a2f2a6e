"""Tokens that are split over a mesh of ranks, and how a rank's part of a call is put together from them.

A mesh has two dimensions. Along "ulysses" ranks exchange tokens for heads; along "ring" they gather keys and values,
and each takes some rows of queries. What a rank then holds is what a single process would hold of the same heads and
rows: text and picture, which were split one by one, are joined in the order that they had, and rows begin where a block
of queries does.

Tensors are (B, H, tokens, D).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparge.distributed.exchange import Arrival, Exchange
from sparge.masks import ordering
from sparge.masks.geometry import BLOCK_Q, ceil_div

Order = tuple[tuple[int, ...], Any, int]
"""The grid of a picture or video, the order of its tokens, and where they begin."""


@dataclass(frozen=True)
class Shards:
    """How many tokens each rank of a mesh holds, and how many of them belong to the first of two streams.

    Streams are text and picture, each of which was split over all ranks; 0 everywhere: there is one stream. Ranks are
    numbered along "ulysses" first.
    """

    tokens: tuple[int, ...]
    seams: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.tokens)

    def join(self, tokens: Tensor, dim: int = 2) -> Tensor:
        """Tokens of all ranks, one rank's behind the other's, in the order that they had before they were split."""
        if not any(self.seams):
            return tokens
        parts = tokens.split(self._pieces, dim)
        return torch.cat(parts[::2] + parts[1::2], dim)

    def part(self, tokens: Tensor) -> Tensor:
        """What `join` joined."""
        if not any(self.seams):
            return tokens
        pieces = self._pieces
        parts = tokens.split(pieces[::2] + pieces[1::2], 2)
        ranks = len(self.tokens)
        return torch.cat([part for rank in range(ranks) for part in (parts[rank], parts[ranks + rank])], 2)

    @property
    def _pieces(self) -> list[int]:
        """Of each rank the tokens of both streams."""
        return [size for count, seam in zip(self.tokens, self.seams, strict=True) for size in (seam, count - seam)]

    def places(self, rank: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Where tokens [start, stop) of a rank lie when all are joined: ranges, of each stream one at most."""
        seam = self.seams[rank]
        first = sum(self.seams[:rank])
        second = sum(self.seams) + sum(self.tokens[:rank]) - first - seam
        ranges = ((start + first, min(stop, seam) + first), (max(start, seam) + second, stop + second))
        return [(a, b) for a, b in ranges if a < b]


@dataclass(frozen=True)
class Mesh:
    """The process groups of a rank: along both dimensions of a mesh, and over all of it.

    Attributes:
        group: that of everyone.
        is_even: each rank holds as many tokens as this one.
    """

    ulysses: Exchange
    ring: Exchange
    everyone: Exchange
    group: Any
    is_even: bool

    def shards(self, *counts: tuple[int, int], device: torch.device) -> list[Shards]:
        """What all ranks hold, from what this one does: tokens and seam, for several kinds of tokens.

        Where numbers may differ the ranks tell each other, and the host waits for it.
        """
        size = self.everyone.size
        if self.is_even:
            return [Shards((tokens,) * size, (seam,) * size) for tokens, seam in counts]
        told = self.everyone.stack(torch.tensor(counts, device=device)).permute(1, 2, 0).tolist()
        return [Shards(tuple(tokens), tuple(seams)) for tokens, seams in told]

    def tell(self, own: Any) -> list[Any]:
        """An object of each rank."""
        told: list[Any] = [None] * self.everyone.size
        dist.all_gather_object(told, own, group=self.group)
        return told

    @property
    def column(self) -> range:
        """The ranks of the whole mesh that exchange heads with this one."""
        return range(self.ring.rank * self.ulysses.size, (self.ring.rank + 1) * self.ulysses.size)

    @property
    def alone(self) -> range:
        """This rank of the whole mesh."""
        return range(self.everyone.rank, self.everyone.rank + 1)

    def all_heads(self, count: int) -> tuple[range, ...]:
        """The heads of each rank, of so many: as many on each, fewer on the last where they do not divide."""
        most = ceil_div(count, self.ulysses.size)
        along = [range(first, min(first + most, count)) for first in range(0, most * self.ulysses.size, most)]
        return tuple(along * self.ring.size)

    def heads(self, count: int) -> slice:
        """Own heads of so many."""
        own = self.all_heads(count)[self.everyone.rank]
        return slice(own.start, own.stop)

    def start_to_heads(self, tokens: Tensor, shards: Shards) -> Arrival:
        """Own tokens of all heads -> own heads of the tokens of all ranks along "ulysses", one behind the other."""
        if self.ulysses.size == 1:
            return lambda: tokens
        heads = tokens.shape[1]
        missing = -heads % self.ulysses.size
        if missing:
            tokens = torch.nn.functional.pad(tokens, (0, 0, 0, 0, 0, missing))
        arrive = self.ulysses.start_to_heads(tokens, self._column(shards))
        own = len(self.all_heads(heads)[self.everyone.rank])
        return (lambda: arrive()[:, :own]) if missing else arrive

    def to_tokens(self, output: Tensor, shards: Shards, heads: int) -> Tensor:
        """The way back: own heads of the tokens of all ranks along "ulysses" -> own tokens of all heads."""
        if self.ulysses.size == 1:
            return output
        most = ceil_div(heads, self.ulysses.size)
        if output.shape[1] < most:
            output = torch.nn.functional.pad(output, (0, 0, 0, 0, 0, most - output.shape[1]))
        return self.ulysses.to_tokens(output, self._column(shards))[:, :heads]

    def gather(self, tokens: Tensor, shards: Shards) -> Tensor:
        """Tokens that `start_to_heads` gave -> those of all ranks of the mesh, joined."""
        if self.ring.size > 1:
            each = self.ulysses.size
            lengths = [sum(shards.tokens[ring * each : (ring + 1) * each]) for ring in range(self.ring.size)]
            tokens = self.ring.gather(tokens, lengths)
        return shards.join(tokens)

    def _column(self, shards: Shards) -> tuple[int, ...]:
        """Numbers of tokens of the ranks that exchange heads with this one."""
        return shards.tokens[self.column.start : self.column.stop]


@dataclass(frozen=True)
class Rows:
    """The queries of ranks along "ring": each takes some rows of blocks, in the order that blocks are made in.

    Attributes:
        shards: of the queries.
    """

    shards: Shards
    mesh: Mesh

    @property
    def total(self) -> int:
        """Queries of the whole call."""
        return self.shards.total

    @property
    def are_enough(self) -> bool:
        """Whether each rank gets a row of blocks."""
        return ceil_div(self.total, BLOCK_Q) >= self.mesh.ring.size

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The queries [start, stop) of the whole call that each rank of the mesh takes."""
        bounds = _row_bounds(self.total, self.mesh.ring.size)
        return tuple(span for span in pairwise(bounds) for _ in range(self.mesh.ulysses.size))

    @property
    def span(self) -> tuple[int, int]:
        """Those that this rank takes."""
        return self.spans[self.mesh.everyone.rank]

    def take(self, query: Tensor, order: Order | None) -> Tensor:
        """Own queries, exchanged for those of own rows along an order."""
        moves = self._moves(query, order)
        if moves.is_still:
            return query
        moved = self.mesh.ring.move(query.index_select(2, moves.sent), moves.sent_counts, moves.received_counts)
        return moved.index_select(2, moves.received)

    def give(self, output: Tensor, order: Order | None) -> Tensor:
        """The way back, for outputs."""
        moves = self._moves(output, order)
        if moves.is_still:
            return output
        moved = self.mesh.ring.move(output.index_select(2, moves.unreceived), moves.received_counts, moves.sent_counts)
        return moved.index_select(2, moves.unsent)

    def _moves(self, like: Tensor, order: Order | None) -> _Moves:
        ring = self.mesh.ring
        return _moves(self.shards, self.mesh.ulysses.size, ring.rank, ring.size, order, str(like.device))


def _row_bounds(queries: int, ranks: int) -> list[int]:
    """Where the rows of each rank begin, and where the last ones end: between blocks, and the first ranks have more."""
    least, more = divmod(ceil_div(queries, BLOCK_Q), ranks)
    blocks = [least + (rank < more) for rank in range(ranks)]
    return [min(bound * BLOCK_Q, queries) for bound in accumulate(blocks, initial=0)]


@dataclass(frozen=True, eq=False)
class _Moves:
    """How a rank's queries become its rows: they are sent sorted by place, and so by who gets them.

    Attributes:
        is_still: each rank has its rows already.
    """

    is_still: bool
    sent: Tensor
    sent_counts: tuple[int, ...]
    received: Tensor
    received_counts: tuple[int, ...]
    unsent: Tensor
    unreceived: Tensor


@functools.cache  # none is forgotten: a CUDA graph may hold its address
def _moves(shards: Shards, each: int, rank: int, ranks: int, order: Order | None, device: str) -> _Moves:
    """See `_Moves`; ``each`` ranks of the mesh lie at each place of the ring."""
    bounds = _row_bounds(shards.total, ranks)
    places = [_places(shards, range(part * each, (part + 1) * each), order) for part in range(ranks)]
    inner = torch.tensor(bounds[1:-1])
    takers = [torch.bucketize(of_part, inner, right=True) for of_part in places]
    sent = places[rank].argsort()
    coming = [of_part[taker == rank].sort().values for of_part, taker in zip(places, takers, strict=True)]
    received = torch.cat(coming).argsort()
    is_still = all(
        torch.equal(of_part, torch.arange(*span)) for of_part, span in zip(places, pairwise(bounds), strict=True)
    )
    return _Moves(
        is_still,
        sent.to(device),
        tuple(torch.bincount(takers[rank], minlength=ranks).tolist()),
        received.to(device),
        tuple(map(len, coming)),
        sent.argsort().to(device),
        received.argsort().to(device),
    )


def _places(shards: Shards, ranks: range, order: Order | None) -> Tensor:
    """Where the tokens of some ranks lie when all are joined and put into an order."""
    ranges = [pair for rank in ranks for pair in shards.places(rank, 0, shards.tokens[rank])]
    places = torch.cat([torch.arange(start, stop) for start, stop in ranges])
    if order is None:
        return places
    grid, name, first = order
    inverse = ordering.order_of(grid, name).inverse
    moved = torch.arange(shards.total)
    moved[first : first + len(inverse)] = inverse + first
    return moved[places]
