"""Ring: keys and values travel from rank to rank, and each rank merges what its queries get of every part by the LSE.

Which blocks are kept is decided before, from statistics of all key blocks: each part gets its columns of one mask, so
a `Budget` is spent as on one device, and the rules of the sink and the diagonal hold where these lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparge.call import Call, interned
from sparge.dispatch import ops
from sparge.distributed import gathered
from sparge.distributed.budget import RowPool
from sparge.distributed.exchange import Exchange
from sparge.distributed.places import Piece, Places
from sparge.distributed.request import Request
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape, ceil_div
from sparge.stats import counters


class Rectangle(NamedTuple):
    """Pieces of queries that see the same pieces of keys: all of them, or if these are their own, those up to each."""

    queries: range
    keys: range
    is_causal: bool


def rectangles(queries: Sequence[Piece], keys: Sequence[Piece], is_causal: bool) -> Iterator[Rectangle]:
    """What queries here see of a part of the keys, in as few calls as can be; pieces are named by their places."""
    if not is_causal or queries == keys:  # a rank's pieces rise: causality among them is that of their tokens
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
    """How many pieces of keys lie before a piece of queries."""
    return sum(piece.stop <= query.start for piece in keys)


def check_places(places: Places) -> None:
    """Raise ValueError where a block is cut: its keys would lie on two ranks."""
    if not places.are_whole_blocks:
        raise ValueError(
            f"ring_attention: expected a multiple of {BLOCK_Q} tokens on every rank but the last (of half of them with "
            f'"head_tail"; split_lengths cuts so, gathered_attention takes any), got {places.lengths}'
        )


@dataclass(frozen=True)
class Part:
    """What a rank's queries see of one rank's keys, and one call computes.

    Attributes:
        holder: the rank whose keys they are.
        pieces: the pieces of its queries that take part.
        queries, keys: where they lie among the tokens of their ranks.
        columns: the key blocks of the whole sequence that they are.
    """

    holder: int
    pieces: range
    queries: Piece
    keys: Piece
    columns: tuple[slice, ...]
    is_causal: bool


def parts_of(places: Places, rank: int, is_causal: bool) -> list[Part]:
    """All calls of a rank, in the order in which keys come by."""
    found = []
    for step in range(len(places.pieces)):
        holder = (rank - step) % len(places.pieces)
        own, other = places.pieces[rank], places.pieces[holder]
        for queries, keys, is_own in rectangles(own, other, is_causal):
            chosen = other[keys.start : keys.stop]
            columns = tuple(slice(piece.start // BLOCK_K, ceil_div(piece.stop, BLOCK_K)) for piece in chosen)
            found.append(Part(holder, queries, _within(own, queries), _within(other, keys), columns, is_own))
    return found


def compute(
    query: Tensor, key: Tensor, value: Tensor, asked: Request, exchange: Exchange, places: Places, pool: RowPool
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks; the LSE is always computed."""
    steps = asked.once(("ring", places, exchange.rank), lambda: _steps(query, key, asked, exchange, places))
    masks = None if asked.reason is not None else gathered.predict(query, key, asked, exchange, places, pool)
    output = query.new_empty((*query.shape[:3], value.shape[3]), dtype=torch.float32)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    words, is_first = "" if asked.reason is None else asked.words, True
    with counters.as_one():
        for step, parts in enumerate(steps):
            coming = None
            if step + 1 < exchange.size:
                length = places.lengths[(exchange.rank - step - 1) % exchange.size]
                shapes = [(*tensor.shape[:2], length, tensor.shape[3]) for tensor in (key, value)]
                coming = exchange.start_pass((key, value), shapes)  # while this part is computed
            for part, call in parts:
                ops.attend_part(
                    _cut(query, part.queries),
                    _cut(key, part.keys),
                    _cut(value, part.keys),
                    None if masks is None else masks[part.pieces.start : part.pieces.stop],
                    part.columns,
                    call,
                    asked.backend,
                    _cut(output, part.queries),
                    _cut(lse, part.queries),
                    is_first=is_first,  # a rank's own keys come first, which all of its queries see
                    words=words,
                )
                is_first = False
            if coming is not None:
                key, value = coming()
    return output.to(query.dtype), lse


def _steps(
    query: Tensor, key: Tensor, asked: Request, exchange: Exchange, places: Places
) -> list[list[tuple[Part, Call]]]:
    """The parts that are computed while each rank's keys are here, with their calls."""
    steps: list[list[tuple[Part, Call]]] = [[] for _ in range(exchange.size)]
    for part in parts_of(places, exchange.rank, asked.call.is_causal):
        step = (exchange.rank - part.holder) % exchange.size
        steps[step].append((part, interned(_call(asked.call, query, key, part))))
    return steps


def _cut(tokens: Tensor, piece: Piece) -> Tensor:
    """(B, H, n, ...) -> the tokens of a piece."""
    return tokens if piece.length == tokens.shape[2] else tokens[:, :, piece.start : piece.stop]


def _within(pieces: Sequence[Piece], chosen: range) -> Piece:
    """Where neighbouring pieces lie among the tokens of their rank."""
    start = sum(piece.length for piece in pieces[: chosen.start])
    return Piece(start, start + sum(piece.length for piece in pieces[chosen.start : chosen.stop]))


def _call(whole: Call, query: Tensor, key: Tensor, part: Part) -> Call:
    lengths = (part.queries.length, part.keys.length)
    shape = Shape(
        whole.shape.batch, query.shape[1], key.shape[1], *lengths, whole.shape.head_dim, whole.shape.value_dim
    )
    return Call(
        shape,
        part.is_causal,
        whole.scale,
        quantization=whole.quantization,
        pv_threshold=whole.pv_threshold,
        skipped=whole.skipped,
    )
