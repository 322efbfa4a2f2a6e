"""Exchange the tokens of diffusers' models over a mesh of ranks, for this rank's part of an attention call.

Along ``ulysses``, ranks exchange tokens for heads. Along ``outer``, diffusers' ring, they gather keys and values, and
each rank computes some query blocks. The tensors then equal the tensors of a single process for the same heads and
query blocks: text and image tokens, which diffusers shards separately, are joined in their original order.

Tensors are (B, H, tokens, D).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sparge.distributed.mesh import Mesh
from sparge.distributed.sharding import Piece, TokenSharding
from sparge.masks.geometry import BLOCK_Q, ceil_div
from sparge.masks.ordering import TokenOrder, order_of


class Shards(TokenSharding):
    """The tokens of the ranks of a mesh. Each rank holds a part of one or two streams, for example text and image.

    Args:
        tokens: the number of tokens on each rank.
        seams: the number of these tokens that belong to the first of two streams, which comes first in the sequence; 0
            if there is only one stream.
    """

    def __init__(self, tokens: tuple[int, ...], seams: tuple[int, ...]) -> None:
        self.seams = seams
        others = [count - seam for count, seam in zip(tokens, seams, strict=True)]
        pieces = [Piece(*ends) for ends in pairwise(accumulate((*seams, *others), initial=0))]
        both = zip(pieces[: len(tokens)], pieces[len(tokens) :], strict=True)
        super().__init__(tuple(tuple(piece for piece in pair if piece.length) for pair in both))

    def unsort(self, tokens: Tensor) -> Tensor:
        """Reorder tokens from the order of the sequence to the order of the ranks; the inverse of `sort`."""
        return tokens if self.is_sorted else torch.cat([tokens[:, :, start:stop] for start, stop in self.flat], 2)

    def gather(self, tokens: Tensor, mesh: Mesh) -> Tensor:
        """Return the sorted tokens of all ranks of the mesh, given the tokens of the Ulysses ranks."""
        return self.sort(mesh.outer.gather_tokens(tokens, mesh.outer_lengths(self.lengths)))

    def gather_all(self, tokens: Tensor, mesh: Mesh) -> Tensor:
        """Return the sorted tokens of all ranks of the mesh, given the tokens of this rank."""
        return self.gather(mesh.ulysses.gather_tokens(tokens, mesh.ulysses_lengths(self.lengths)), mesh)


def shards_of(mesh: Mesh, *counts: tuple[int, int], device: torch.device) -> list[Shards]:
    """Return the shards of all ranks for several kinds of tokens.

    If the ranks may have different numbers of tokens, they exchange the numbers, which synchronizes with the device.

    Args:
        counts: the numbers (tokens, seam) on this rank, for each kind.
    """
    if mesh.has_equal_shards:
        return [_shards((tokens,) * mesh.size, (seam,) * mesh.size) for tokens, seam in counts]
    gathered = mesh.all_gather(torch.tensor(counts, device=device)).permute(1, 2, 0).tolist()
    return [_shards(tuple(tokens), tuple(seams)) for tokens, seams in gathered]


_shards = functools.cache(Shards)  # unbounded, like `_moves`, whose keys are shards


@dataclass(frozen=True)
class QueryShards:
    """The query blocks that each outer rank of a mesh computes: contiguous ranges, in the order of the ranks.

    Attributes:
        shards: the shards of the queries.
    """

    shards: Shards
    mesh: Mesh

    @property
    def total(self) -> int:
        """The number of queries of the whole call."""
        return self.shards.total

    @property
    def has_block_per_rank(self) -> bool:
        """Whether there is at least one query block for each rank."""
        return ceil_div(self.total, BLOCK_Q) >= self.mesh.outer.size

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The range [start, stop) of queries of the whole call that each rank of the mesh computes."""
        bounds = _block_bounds(self.total, self.mesh.outer.size)
        return tuple(span for span in pairwise(bounds) for _ in range(self.mesh.ulysses.size))

    @property
    def span(self) -> tuple[int, int]:
        """The range of queries that this rank computes."""
        return self.spans[self.mesh.rank]

    def to_blocks(self, query: Tensor, order: TokenOrder | None) -> Tensor:
        """Send the queries of this rank's tokens to the ranks that compute them, and return those this rank computes.

        Args:
            order: token order in which queries are divided into blocks and returned; None for the sequence's own order.
        """
        moves, outer = self._moves(query, order), self.mesh.outer
        if moves.is_identity:
            return query
        sent = query.index_select(2, moves.sent)
        return outer.exchange_tokens(sent, moves.sent_counts, moves.received_counts).index_select(2, moves.received)

    def from_blocks(self, output: Tensor, order: TokenOrder | None) -> Tensor:
        """Undo `to_blocks` for outputs."""
        moves, outer = self._moves(output, order), self.mesh.outer
        if moves.is_identity:
            return output
        received = torch.empty_like(output).index_copy_(2, moves.received, output)
        sent = outer.exchange_tokens(received, moves.received_counts, moves.sent_counts)
        return torch.empty_like(sent).index_copy_(2, moves.sent, sent)

    def _moves(self, like: Tensor, order: TokenOrder | None) -> _Moves:
        outer = self.mesh.outer
        return _moves(self.shards, self.mesh.ulysses.size, outer.rank, outer.size, order, str(like.device))


def _block_bounds(queries: int, ranks: int) -> list[int]:
    """Split queries into whole blocks per rank, and return the first query of each rank and the end of the last rank.

    If blocks do not divide evenly, the first ranks have one more.
    """
    base, extra = divmod(ceil_div(queries, BLOCK_Q), ranks)
    blocks = [base + (rank < extra) for rank in range(ranks)]
    return [min(bound * BLOCK_Q, queries) for bound in accumulate(blocks, initial=0)]


class _Moves(NamedTuple):
    """The exchange between the queries of a rank's tokens and the queries of its query blocks.

    Queries are sent sorted by position, which also sorts them by the rank that receives them.

    Attributes:
        is_identity: whether every rank already has the queries of its blocks, so that nothing is exchanged.
        sent: order in which the queries of this rank's tokens are sent.
        sent_counts: number of queries sent to each rank.
        received: for each query of this rank's query blocks, its index among the received queries.
        received_counts: number of queries received from each rank.
    """

    is_identity: bool
    sent: Tensor
    sent_counts: tuple[int, ...]
    received: Tensor
    received_counts: tuple[int, ...]


@functools.cache  # unbounded, because a CUDA graph may hold the address of a tensor
def _moves(shards: Shards, ulysses: int, rank: int, ranks: int, order: TokenOrder | None, device: str) -> _Moves:
    """Return the `_Moves` of one outer rank. Every outer rank consists of ``ulysses`` Ulysses ranks."""
    bounds = _block_bounds(shards.total, ranks)
    inner = torch.tensor(bounds[1:-1])
    positions = [_positions(shards, range(outer * ulysses, (outer + 1) * ulysses), order) for outer in range(ranks)]
    spans = zip(positions, pairwise(bounds), strict=True)
    receivers = [torch.bucketize(of_rank, inner, right=True) for of_rank in positions]
    incoming = [of_rank[to == rank].sort().values for of_rank, to in zip(positions, receivers, strict=True)]
    return _Moves(
        all(torch.equal(of_rank, torch.arange(*span)) for of_rank, span in spans),
        positions[rank].argsort().to(device),
        tuple(torch.bincount(receivers[rank], minlength=ranks).tolist()),
        torch.cat(incoming).argsort().to(device),
        tuple(map(len, incoming)),
    )


def _positions(shards: Shards, ranks: range, order: TokenOrder | None) -> Tensor:
    """Return the positions of some ranks' tokens in the sequence, or in the sequence reordered by ``order``."""
    positions = torch.cat([torch.arange(*piece) for rank in ranks for piece in shards.pieces[rank]])
    if order is None:
        return positions
    inverse, start = order_of(order.grid, order.name).inverse, order.start
    moved = torch.arange(shards.total)
    moved[start : start + len(inverse)] = inverse + start
    return moved[positions]
