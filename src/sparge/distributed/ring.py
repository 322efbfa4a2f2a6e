"""Ring: keys and values travel from rank to rank, and each rank merges what its queries get of every part by the LSE.

Which blocks are kept is decided before, from statistics of all key blocks: each part gets its columns of one mask, so
a `Budget` is spent as on one device, and the rules of the sink and the diagonal hold where these lie.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.block_mask import BlockMask
from sparge.call import Call
from sparge.distributed import gathered
from sparge.distributed.budget import RowPool
from sparge.distributed.computing import attend
from sparge.distributed.exchange import Exchange
from sparge.distributed.merge import merge
from sparge.distributed.places import Piece, Places
from sparge.distributed.request import Request
from sparge.geometry import BLOCK_K, BLOCK_Q, Shape, ceil_div
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
        queries, keys: where they lie among the tokens of their ranks.
        columns: the key blocks of the whole sequence that they are.
    """

    holder: int
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
            found.append(Part(holder, _within(own, queries), _within(other, keys), columns, is_own))
    return found


def compute(
    query: Tensor, key: Tensor, value: Tensor, asked: Request, exchange: Exchange, places: Places, pool: RowPool
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks; the LSE is always computed."""
    parts = parts_of(places, exchange.rank, asked.call.is_causal)
    masks: list[BlockMask | None] = [None] * len(parts)
    if asked.reason is None:
        kept = _joined(gathered.predict(query, key, asked, exchange, places, pool), asked.call.shape.kv_blocks)
        masks = [*_masks(kept, parts)]
    output = query.new_zeros((*query.shape[:3], value.shape[3]), dtype=torch.float32)
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
    with counters.as_one():
        for step in range(exchange.size):
            holder = (exchange.rank - step) % exchange.size
            coming = None
            if step + 1 < exchange.size:
                length = places.lengths[(holder - 1) % exchange.size]
                shapes = [(*tensor.shape[:2], length, tensor.shape[3]) for tensor in (key, value)]
                coming = exchange.start_pass((key, value), shapes)  # while this part is computed
            for part, mask in zip(parts, masks, strict=True):
                if part.holder == holder:
                    _add(output, lse, query, key, value, part, mask, asked)
            if coming is not None:
                key, value = coming()
    return output.to(query.dtype), lse


def _joined(masks: Sequence[BlockMask], kv_blocks: int) -> Tensor:
    """The kept blocks of all pieces, (B, H, rows, kv_blocks)."""
    parts = [mask.to_dense() for mask in masks]
    return torch.cat([F.pad(part, (0, kv_blocks - part.shape[3])) for part in parts], 2)


def _masks(kept: Tensor, parts: Sequence[Part]) -> list[BlockMask]:
    """The mask of every part: its columns of the rows of its queries.

    Lists of parts with the same sizes are made together: to make those of each takes the host longer than a short part
    takes the device.
    """
    alike: dict[Hashable, list[int]] = {}
    for index, part in enumerate(parts):
        alike.setdefault((part.queries, part.keys.length, part.is_causal), []).append(index)
    masks: dict[int, BlockMask] = {}
    for indices in alike.values():
        first = parts[indices[0]]
        rows = kept[:, :, first.queries.start // BLOCK_Q : ceil_div(first.queries.stop, BLOCK_Q)]
        dense = torch.cat([torch.cat([rows[..., cut] for cut in parts[index].columns], 3) for index in indices])
        q_len, kv_len = first.queries.length, first.keys.length
        together = BlockMask.from_dense(dense, q_len=q_len, kv_len=kv_len, is_causal=first.is_causal)
        for place, index in enumerate(indices):
            own = slice(place * len(kept), (place + 1) * len(kept))
            counts, listed = together.kv_num_blocks[own], together.kv_indices[own]
            masks[index] = BlockMask(counts, listed, together.visible_num_blocks[own], q_len, kv_len, first.is_causal)
    return [masks[index] for index in range(len(parts))]


def _add(
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    mask: BlockMask | None,
    asked: Request,
) -> None:
    """Merge what a part gives into the output and LSE of its queries."""
    queries, keys = (slice(*piece) for piece in (part.queries, part.keys))
    call = _call(asked.call, query, key, part)
    tensors = query[:, :, queries], key[:, :, keys], value[:, :, keys]
    merge(output[:, :, queries], lse[:, :, queries], *attend(*tensors, mask, call, asked, with_lse=True))


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
