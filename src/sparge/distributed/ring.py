"""Ring: keys and values are sent from rank to rank; each rank merges its outputs over the parts by their LSE.

The kept blocks are chosen first, from statistics of all key blocks. Each part uses its columns of this one mask, so a
`Budget` is allocated as on one device, and sink and diagonal blocks are kept wherever they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sparge.backends.base import KeptColumns, PartialResult
from sparge.call import Call, interned
from sparge.dispatch import ops
from sparge.distributed.communicator import Communicator
from sparge.distributed.gathered_keys import predict
from sparge.distributed.request import Request
from sparge.distributed.sharding import Piece, TokenSharding
from sparge.distributed.token_split import Mode, TokenSplit
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, ceil_div
from sparge.stats import counters


class Rectangle(NamedTuple):
    """Indices of query pieces and of the key pieces that all of them see; causally if they are the same tokens."""

    queries: range
    keys: range
    is_causal: bool


def rectangles(queries: Sequence[Piece], keys: Sequence[Piece], is_causal: bool) -> Iterator[Rectangle]:
    """Yield the fewest rectangles that cover the pairs of query pieces and visible key pieces."""
    if not is_causal or queries == keys:  # the pieces of a rank are sorted, so local causality is global causality
        yield Rectangle(range(len(queries)), range(len(keys)), is_causal)
        return
    first = 0
    while first < len(queries):
        seen = _seen(queries[first], keys)
        last = first + 1
        while last < len(queries) and _seen(queries[last], keys) == seen:
            last += 1
        if seen:
            yield Rectangle(range(first, last), range(seen), False)
        first = last


def _seen(query: Piece, keys: Sequence[Piece]) -> int:
    """Return the number of key pieces before a query piece."""
    return sum(piece.stop <= query.start for piece in keys)


def check_sharding(sharding: TokenSharding) -> None:
    """Raise ValueError if the keys of a block are split between two ranks."""
    if not sharding.has_whole_blocks:
        raise ValueError(
            f'mode="ring": expected a multiple of {BLOCK_Q} tokens on every rank but the last (twice that with '
            f'"head_tail"; `split_lengths` returns such lengths, mode="gather" accepts any), got {sharding.lengths}'
        )


class RingPart(NamedTuple):
    """Queries of this rank and keys of one rank that are computed in one call.

    Attributes:
        holder: the rank that the keys come from.
        pieces: indices of the query pieces.
        queries, keys: their positions among the tokens of their ranks.
        columns: the key blocks, as columns of the whole mask.
    """

    holder: int
    pieces: range
    queries: Piece
    keys: Piece
    columns: tuple[slice, ...]
    is_causal: bool


def ring_parts(sharding: TokenSharding, rank: int, is_causal: bool) -> list[RingPart]:
    """Return the parts that a rank computes, in the order in which it receives their keys."""
    found = []
    ranks = len(sharding.pieces)
    for step in range(ranks):
        holder = (rank - step) % ranks
        own, other = sharding.pieces[rank], sharding.pieces[holder]
        for queries, keys, is_own in rectangles(own, other, is_causal):
            chosen = other[keys.start : keys.stop]
            columns = tuple(slice(piece.start // BLOCK_K, ceil_div(piece.stop, BLOCK_K)) for piece in chosen)
            found.append(RingPart(holder, queries, _local(own, queries), _local(other, keys), columns, is_own))
    return found


def attend(
    query: Tensor, key: Tensor, value: Tensor, request: Request, split: TokenSplit, _: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return output and LSE of this rank's queries over the keys of all ranks."""
    ranks, lengths = split.mesh.outer, request.sharding.lengths
    steps = request.once("ring", lambda: _steps(query, key, request, ranks))
    masks = None if request.reason is not None else predict(query, key, request, split.mesh)
    output = query.new_empty((*query.shape[:3], value.shape[3]), dtype=torch.float32)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    label, is_first = request.dense_label, True
    with counters.as_one():
        for step, parts in enumerate(steps):
            wait = None
            if step + 1 < ranks.size:
                length = lengths[(ranks.rank - step - 1) % ranks.size]
                shapes = [(*tensor.shape[:2], length, tensor.shape[3]) for tensor in (key, value)]
                wait = ranks.start_ring_shift((key, value), shapes)  # while this step is computed
            for part, call in parts:
                queries, kept = part.queries, None
                if masks is not None:
                    kept = KeptColumns(masks[part.pieces.start : part.pieces.stop], part.columns)
                tensors = _take(query, queries), _take(key, part.keys), _take(value, part.keys)
                into = PartialResult(_take(output, queries), _take(lse, queries), is_first)
                ops.attend_part(*tensors, kept, call, into, request.backend, label=label)
                is_first = False  # the first part is a rank's own keys, which all of its queries see
            if wait is not None:
                key, value = wait()
    return output.to(query.dtype), lse


def _steps(query: Tensor, key: Tensor, request: Request, ranks: Communicator) -> list[list[tuple[RingPart, Call]]]:
    """Return for each step of the ring the parts that are computed, with their calls."""
    steps: list[list[tuple[RingPart, Call]]] = [[] for _ in range(ranks.size)]
    whole = request.call
    for part in ring_parts(request.sharding, ranks.rank, whole.is_causal):
        sizes = {"q_len": part.queries.length, "kv_len": part.keys.length}
        call = Call(
            replace(whole.shape, heads=query.shape[1], kv_heads=key.shape[1], **sizes),
            part.is_causal,
            whole.scale,
            quantization=whole.quantization,
            pv_threshold=whole.pv_threshold,
            skipped=whole.skipped,
        )
        steps[(ranks.rank - part.holder) % ranks.size].append((part, interned(call)))
    return steps


def _take(tokens: Tensor, piece: Piece) -> Tensor:
    """Return the tokens of a piece, given (B, H, n, ...)."""
    return tokens if piece.length == tokens.shape[2] else tokens[:, :, piece.start : piece.stop]


def _local(pieces: Sequence[Piece], chosen: range) -> Piece:
    """Return the positions of consecutive pieces among the tokens of their rank."""
    start = sum(piece.length for piece in pieces[: chosen.start])
    return Piece(start, start + sum(piece.length for piece in pieces[chosen.start : chosen.stop]))


MODE = Mode("ring", attend, ("sharding",), merges_by_lse=True, check_sharding=check_sharding)
