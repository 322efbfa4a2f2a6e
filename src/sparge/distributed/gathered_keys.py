"""Prediction for queries that stay on their rank, from gathered statistics of the keys of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparge.call import Call, interned
from sparge.dispatch import ops
from sparge.distributed import local_attention
from sparge.distributed.communicator import Communicator
from sparge.distributed.local_attention import LocalQueries
from sparge.distributed.mesh import Mesh
from sparge.distributed.query_blocks import q_blocks_of
from sparge.distributed.request import Request
from sparge.distributed.sharding import Piece, TokenSharding
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, Shape, ceil_div
from sparge.masks.window import Window
from sparge.options.rules import Selection


def call_of_piece(call: Call, piece: Piece, heads: int, kv_heads: int) -> Call:
    """Return the call of a piece's queries over the keys that they may see: all, or causally those up to its end.

    Raises:
        NotImplementedError: a window or a diagonal without causality, which are aligned with the last key.
    """
    shape, (start, stop) = call.shape, piece
    kv_len = stop if call.is_causal else shape.kv_len
    if not call.is_causal and (call.window != Window() or _keeps_diagonal(call)) and piece.length != shape.q_len:
        got = "diagonal=True" if call.window == Window() else f"window={tuple(call.window)}"
        raise NotImplementedError(
            'window, diagonal: expected causal attention where ranks keep their queries (mode="ulysses" accepts both), '
            f"got {got} without causality"
        )
    exact = [(max(first, start) - start, min(last, stop) - start) for first, last in call.exact_queries]
    always = [(first, min(last, kv_len)) for first, last in call.always_keep]
    mask = call.attn_mask
    return replace(
        call,
        shape=Shape(shape.batch, heads, kv_heads, piece.length, kv_len, shape.head_dim, shape.value_dim),
        exact_queries=tuple(pair for pair in exact if pair[0] < pair[1]),
        always_keep=tuple(pair for pair in always if pair[0] < pair[1]),
        attn_mask=mask if mask is None or mask.shape[3] == 1 else mask[..., :kv_len],
    )


def _keeps_diagonal(call: Call) -> bool:
    return isinstance(call.sparsity, Selection) and call.sparsity.keeps_diagonal(call.is_causal)


def calls_of_pieces(query: Tensor, key: Tensor, request: Request, rank: int) -> list[Call]:
    """Return the call of each piece of a rank's queries, for the heads of ``query`` and ``key``."""
    heads = query.shape[1], key.shape[1]
    pieces = request.sharding.pieces[rank]
    return request.once(
        ("pieces", heads), lambda: [interned(call_of_piece(request.call, piece, *heads)) for piece in pieces]
    )


def predict(query: Tensor, key: Tensor, request: Request, mesh: Mesh) -> list[BlockMask]:
    """Return a mask over all keys for each piece of this rank's queries.

    Where no block is split between ranks, statistics of key blocks are gathered, a thirty-second of K and V. Otherwise
    K is gathered, one head at a time.
    """
    calls = calls_of_pieces(query, key, request, mesh.outer.rank)
    if request.sharding.has_whole_blocks and request.call.attn_mask is None:
        whole = _gather_summary(key, request, mesh.outer)
        keys = [tuple(tensor[:, :, : call.shape.kv_blocks] for tensor in whole) for call in calls]
    else:
        keys = _summaries_of_gathered_keys(key, calls, request, mesh.outer)
    parts = query.split([call.shape.q_len for call in calls], 2)
    queries = [LocalQueries(part, part_keys, call) for part, part_keys, call in zip(parts, keys, calls, strict=True)]
    return local_attention.choose_masks(queries, request, q_blocks_of(request, mesh, None, query.device))


def _gather_summary(key: Tensor, request: Request, ranks: Communicator) -> tuple[Tensor, ...]:
    """Gather the key statistics of all ranks."""
    shape, sharding = request.call.shape, request.sharding

    def make() -> tuple[Call, TokenSharding]:
        sizes = (key.shape[1], key.shape[1], key.shape[2], key.shape[2], shape.head_dim, shape.head_dim)
        local = replace(
            request.call, shape=Shape(shape.batch, *sizes), is_causal=False, window=Window(), attn_mask=None
        )
        blocks = [[Piece(start // BLOCK_K, ceil_div(stop, BLOCK_K)) for start, stop in own] for own in sharding.pieces]
        return interned(local), TokenSharding(tuple(map(tuple, blocks)))

    local, blocks = request.once("summary", make)
    waits = [
        ranks.start_gather_tokens(tensor, blocks.lengths) for tensor in ops.summarize_keys(key, local, request.backend)
    ]
    return tuple(blocks.sort(wait()) for wait in waits)


def _summaries_of_gathered_keys(
    key: Tensor, calls: Sequence[Call], request: Request, ranks: Communicator
) -> list[tuple[Tensor, ...]]:
    """Gather K one head at a time, and return the statistics of the keys visible to each piece."""
    by_head: list[list[tuple[Tensor, ...]]] = []
    for head in range(key.shape[1]):
        whole = request.sharding.sort(ranks.gather_tokens(key[:, head : head + 1], request.sharding.lengths))
        found = []
        for call in calls:
            local = replace(call, shape=replace(call.shape, heads=1, kv_heads=1))
            found.append(ops.summarize_keys(whole[:, :, : call.shape.kv_len], local, request.backend))
        by_head.append(found)
    return [
        tuple(torch.cat(tensors, 1) for tensors in zip(*heads_of_piece, strict=True))
        for heads_of_piece in zip(*by_head, strict=True)
    ]
