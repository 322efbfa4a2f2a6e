"""Ring: keys and values travel from rank to rank, and each rank merges what its queries get of every part by the LSE.

Which blocks are kept is decided before, from statistics of all key blocks: each part gets its columns of one mask, so
a `Budget` is spent as on one device, and the rules of the sink and the diagonal hold where these lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sparge.block_mask import BlockMask
from sparge.call import Call
from sparge.config import Dense
from sparge.distributed import gathered
from sparge.distributed.budget import RowPool
from sparge.distributed.computing import as_one, attend
from sparge.distributed.exchange import Exchange
from sparge.distributed.merge import merged
from sparge.distributed.places import Piece, Places
from sparge.distributed.request import Request
from sparge.geometry import BLOCK_K, BLOCK_Q, Shape, ceil_div
from sparge.window import Window


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


def compute(
    query: Tensor, key: Tensor, value: Tensor, asked: Request, exchange: Exchange, places: Places, pool: RowPool
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks; the LSE is always computed."""
    kept = None
    if asked.reason is None:
        kept = _joined(gathered.predict(query, key, asked, exchange, places, pool), asked.call.shape.kv_blocks)
    batch, heads, length, _ = query.shape
    output = query.new_zeros((batch, heads, length, value.shape[3]), dtype=torch.float32)
    lse = query.new_full((batch, heads, length), -torch.inf, dtype=torch.float32)
    here = (key, value)
    with as_one():
        for step in range(exchange.size):
            holder = (exchange.rank - step) % exchange.size
            coming = None
            if step + 1 < exchange.size:
                length = places.lengths[(holder - 1) % exchange.size]
                shapes = [(*tensor.shape[:2], length, tensor.shape[3]) for tensor in here]
                coming = exchange.start_pass(here, shapes)  # while this part is computed
            for rectangle in rectangles(places.pieces[exchange.rank], places.pieces[holder], asked.call.is_causal):
                _add(output, lse, query, *here, rectangle, kept, asked, places, exchange.rank, holder)
            if coming is not None:
                key, value = coming()
                here = (key, value)
    return output.to(query.dtype), lse


def _joined(masks: Sequence[BlockMask], kv_blocks: int) -> Tensor:
    """The kept blocks of all pieces, (B, H, rows, kv_blocks)."""
    parts = [mask.to_dense() for mask in masks]
    return torch.cat([torch.nn.functional.pad(part, (0, kv_blocks - part.shape[3])) for part in parts], 2)


def _add(
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rectangle: Rectangle,
    kept: Tensor | None,
    asked: Request,
    places: Places,
    rank: int,
    holder: int,
) -> None:
    """Merge what a rectangle gives into the output and LSE of its queries."""
    queries = _within(places.pieces[rank], rectangle.queries)
    keys = _within(places.pieces[holder], rectangle.keys)
    call = _call(asked.call, query, key, queries, keys, rectangle.is_causal)
    mask = None
    if kept is not None:
        rows = kept[:, :, queries.start // BLOCK_Q : ceil_div(queries.stop, BLOCK_Q)]
        columns = [
            rows[..., piece.start // BLOCK_K : ceil_div(piece.stop, BLOCK_K)]
            for piece in places.pieces[holder][rectangle.keys.start : rectangle.keys.stop]
        ]
        mask = BlockMask.from_dense(
            torch.cat(columns, 3), q_len=queries.length, kv_len=keys.length, is_causal=rectangle.is_causal
        )
    part, part_lse = attend(
        query[:, :, queries.start : queries.stop],
        key[:, :, keys.start : keys.stop],
        value[:, :, keys.start : keys.stop],
        mask,
        call,
        asked,
        with_lse=True,
    )
    own = slice(queries.start, queries.stop)
    output[:, :, own], lse[:, :, own] = merged(output[:, :, own], lse[:, :, own], part, part_lse)


def _within(pieces: Sequence[Piece], chosen: range) -> Piece:
    """Where neighbouring pieces lie among the tokens of their rank."""
    start = sum(piece.length for piece in pieces[: chosen.start])
    return Piece(start, start + sum(piece.length for piece in pieces[chosen.start : chosen.stop]))


def _call(whole: Call, query: Tensor, key: Tensor, queries: Piece, keys: Piece, is_causal: bool) -> Call:
    shape = Shape(
        whole.shape.batch,
        query.shape[1],
        key.shape[1],
        queries.length,
        keys.length,
        whole.shape.head_dim,
        whole.shape.value_dim,
    )
    return replace(
        whole, shape=shape, is_causal=is_causal, window=Window(), sparsity=Dense(), always_keep=(), exact_queries=()
    )
