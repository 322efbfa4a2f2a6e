"""Gathered: every rank keeps its queries, and gets all keys and values, a few heads at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparge.call import Call, interned
from sparge.dispatch import ops
from sparge.distributed.budget import Ranks, RowPool, Rows, order_of_rows
from sparge.distributed.computing import attend, choose_rows
from sparge.distributed.exchange import Exchange
from sparge.distributed.places import Piece, Places
from sparge.distributed.request import Request, of_heads, of_piece
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape, ceil_div
from sparge.masks.window import Window
from sparge.stats import counters

GATHERED_BYTES = 2**30
"""Of K and V, with which heads are gathered at a time unless the caller says how many."""


def heads_at_a_time(key: Tensor, value: Tensor, total: int, asked: int | None) -> int:
    """How many heads of K and V are gathered at a time."""
    if asked is not None:
        return min(asked, key.shape[1])
    of_head = key.shape[0] * total * (key.shape[3] + value.shape[3]) * key.element_size()
    return max(1, min(key.shape[1], GATHERED_BYTES // of_head))


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asked: Request,
    exchange: Exchange,
    places: Places,
    pool: RowPool,
    *,
    kv_heads_at_once: int | None = None,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks.

    Args:
        asked: the whole call, with the heads that are here.
        kv_heads_at_once: see `heads_at_a_time`.
    """
    masks = predict(query, key, asked, exchange, places, pool) if asked.reason is None else None
    group = query.shape[1] // key.shape[1]
    step = heads_at_a_time(key, value, places.total, kv_heads_at_once)
    chunks = [slice(start, min(start + step, key.shape[1])) for start in range(0, key.shape[1], step)]

    def start(chunk: slice) -> tuple:
        return tuple(exchange.start_gather(tensor[:, chunk], places.lengths) for tensor in (key, value))

    coming = start(chunks[0])
    results = []
    with counters.as_one():
        for index, chunk in enumerate(chunks):
            keys, values = (places.in_order(arrive()) for arrive in coming)
            if index + 1 < len(chunks):
                coming = start(chunks[index + 1])  # while this one is computed
            heads = slice(chunk.start * group, chunk.stop * group)
            parts = masks
            if masks is not None and len(chunks) > 1:
                parts = [of_mask_heads(mask, heads) for mask in masks]
            call = of_heads(asked.call, heads)
            results.append(_pieces(query[:, heads], keys, values, parts, call, asked, exchange, places, with_lse))
    outputs, lses = zip(*results, strict=True)
    return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0], torch.cat(lses, 1) if with_lse else lses[0]


def _pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Sequence[BlockMask] | None,
    call: Call,
    asked: Request,
    exchange: Exchange,
    places: Places,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Each piece of this rank's queries over the keys that it sees, which lie before its end if attention is causal."""
    outputs, lses = [], []
    pieces = places.pieces[exchange.rank]
    for index, (part, piece) in enumerate(zip(query.split([p.length for p in pieces], 2), pieces, strict=True)):
        local = _call_of_piece(call, piece, query.shape[1], key.shape[1], asked)
        seen = local.shape.kv_len
        mask = None if masks is None else masks[index]
        output, lse = attend(part, key[:, :, :seen], value[:, :, :seen], mask, local, asked, with_lse=with_lse)
        outputs.append(output)
        lses.append(lse)
    if len(outputs) == 1:
        return outputs[0], lses[0]
    return torch.cat(outputs, 2), torch.cat(lses, 2) if with_lse else lses[0]


def _call_of_piece(call: Call, piece: Piece, heads: int, kv_heads: int, asked: Request) -> Call:
    """`of_piece` of a request's call, or of some of its heads, with numbers of their own."""
    if call.has_per_head_numbers:
        return of_piece(call, *piece, heads, kv_heads)
    return asked.once(("piece", piece, heads, kv_heads), lambda: interned(of_piece(call, *piece, heads, kv_heads)))


def of_mask_heads(mask: BlockMask, heads: slice) -> BlockMask:
    """Some heads of a mask."""
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.visible_num_blocks)
    counts, indices, visible = (tensor[:, heads] for tensor in lists)
    return BlockMask(counts, indices, visible, mask.q_len, mask.kv_len, window=mask.window)


def pool_of(asked: Request, places: Places, ranks: Ranks, heads: Sequence[range], device: torch.device) -> RowPool:
    """The rows of all ranks: of every rank of a mesh its heads, and the pieces of its place in the sequence.

    Args:
        heads: of every rank, in the order of ``ranks``; the places repeat in it.
    """

    def find() -> tuple[Tensor, int]:
        starts = tuple(tuple(map(tuple, places.pieces[rank % len(places.pieces)])) for rank in range(ranks.size))
        own = sum(ceil_div(stop - start, BLOCK_Q) for start, stop in starts[ranks.rank]) * len(heads[ranks.rank])
        return order_of_rows(starts, tuple(heads), asked.call.shape.q_blocks, device), own

    return RowPool(ranks, *asked.once(("rows", places, ranks.size, ranks.rank), find))


def predict(
    query: Tensor, key: Tensor, asked: Request, exchange: Exchange, places: Places, pool: RowPool
) -> list[BlockMask]:
    """A mask over all keys for each piece of this rank's queries.

    Where no block is cut between ranks, statistics of key blocks are gathered, a thirty-second of K and V; else K is,
    a head at a time.
    """
    pieces = places.pieces[exchange.rank]
    heads, kv_heads = query.shape[1], key.shape[1]

    def find() -> list[Call]:
        return [interned(of_piece(asked.call, piece.start, piece.stop, heads, kv_heads)) for piece in pieces]

    calls = asked.once(("pieces", places, exchange.rank, heads, kv_heads), find)
    if places.are_whole_blocks and asked.call.attn_mask is None:
        whole = gather_summary(key, asked, exchange, places)
        keys = [tuple(tensor[:, :, : call.shape.kv_blocks] for tensor in whole) for call in calls]
    else:
        keys = _summaries(key, calls, asked, exchange, places)
    parts = query.split([piece.length for piece in pieces], 2)
    rows = [Rows(part, part_keys, call) for part, part_keys, call in zip(parts, keys, calls, strict=True)]
    return choose_rows(rows, asked, pool)


def gather_summary(key: Tensor, asked: Request, exchange: Exchange, places: Places) -> tuple[Tensor, ...]:
    """What prediction reads of all keys, from that of every rank's; no block may be cut."""
    shape = asked.call.shape

    def find() -> tuple[Call, Places]:
        sizes = (key.shape[1], key.shape[1], key.shape[2], key.shape[2], shape.head_dim, shape.head_dim)
        local = replace(asked.call, shape=Shape(shape.batch, *sizes), is_causal=False, window=Window(), attn_mask=None)
        return interned(local), _in_key_blocks(places)

    local, blocks = asked.once(("summary", places, key.shape), find)
    arrivals = [
        exchange.start_gather(tensor, blocks.lengths) for tensor in ops.summarize_keys(key, local, asked.backend)
    ]
    return tuple(blocks.in_order(arrive()) for arrive in arrivals)


def _in_key_blocks(places: Places) -> Places:
    """The same places, counted in key blocks."""
    return Places(
        tuple(
            tuple(piece._replace(start=piece.start // BLOCK_K, stop=ceil_div(piece.stop, BLOCK_K)) for piece in pieces)
            for pieces in places.pieces
        )
    )


def _summaries(
    key: Tensor, calls: Sequence[Call], asked: Request, exchange: Exchange, places: Places
) -> list[tuple[Tensor, ...]]:
    """What prediction reads of the keys that each piece sees, from K itself, a head at a time."""
    by_head: list[list[tuple[Tensor, ...]]] = []
    for head in range(key.shape[1]):
        whole = places.in_order(exchange.gather(key[:, head : head + 1], places.lengths))
        found = []
        for call in calls:
            shape = replace(call.shape, heads=1, kv_heads=1)
            local = replace(call, shape=shape)
            found.append(ops.summarize_keys(whole[:, :, : shape.kv_len], local, asked.backend))
        by_head.append(found)
    return [
        tuple(torch.cat(tensors, 1) for tensors in zip(*heads_of_piece, strict=True))
        for heads_of_piece in zip(*by_head, strict=True)
    ]
