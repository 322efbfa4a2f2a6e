"""Mode "ring": keys and values are sent from rank to rank, and each rank merges its partial outputs by their LSE.

The kept blocks are selected first, from statistics of all key blocks. Each part uses its columns of this mask.
Therefore a `Budget` is allocated as on one device, and sink and diagonal blocks are kept on every rank that has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sparge.backends import base
from sparge.call import Call, interned
from sparge.dispatch.ops import on_query_device
from sparge.distributed.communicator import Communicator
from sparge.distributed.prediction import predict_over_all_keys
from sparge.distributed.request import Request, TokenSplit
from sparge.distributed.sharding import Piece
from sparge.masks.geometry import BLOCK_K, ceil_div
from sparge.stats import counters


def rectangles(queries: Sequence[Piece], keys: Sequence[Piece], is_causal: bool) -> Iterator[tuple[slice, slice, bool]]:
    """Yield the minimum number of rectangles that cover all pairs of query pieces and visible key pieces.

    Each rectangle has the indices of query pieces, the indices of key pieces, and whether it is causal. In a causal
    rectangle, queries and keys are the same tokens. In any other rectangle, all queries see all keys.
    """
    if not is_causal or queries == keys:  # the pieces of a rank are sorted, so local causality is global causality
        yield slice(0, len(queries)), slice(0, len(keys)), is_causal
        return
    visible = [sum(piece.stop <= query.start for piece in keys) for query in queries]  # key pieces before each query
    first = 0
    while first < len(queries):
        last = first + visible[first:].count(visible[first])  # counts never decrease
        if visible[first]:
            yield slice(first, last), slice(0, visible[first]), False
        first = last


class RingPart(NamedTuple):
    """Queries of this rank and keys of one rank that are computed in one call.

    Attributes:
        pieces: indices of the query pieces.
        queries, keys: positions of the queries and keys among the tokens of their ranks.
        columns: columns of the whole mask that correspond to the keys.
    """

    pieces: slice
    queries: Piece
    keys: Piece
    columns: tuple[slice, ...]
    call: Call


def attend(
    query: Tensor, key: Tensor, value: Tensor, request: Request, split: TokenSplit, _: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE of this rank's queries over the keys of all ranks."""
    ranks, lengths = split.mesh.outer, request.sharding.lengths
    steps = request.cached("ring", lambda: _parts_by_step(query, key, request, ranks))
    masks = None if request.reason is not None else predict_over_all_keys(query, key, request, split.mesh)
    output = query.new_empty((*query.shape[:3], value.shape[3]), dtype=torch.float32)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    is_first = True
    with counters.as_one_call():
        for step, parts in enumerate(steps):
            wait = None
            if step + 1 < ranks.size:
                length = lengths[(ranks.rank - step - 1) % ranks.size]
                shapes = [(*tensor.shape[:2], length, tensor.shape[3]) for tensor in (key, value)]
                wait = ranks.start_ring_shift((key, value), shapes)  # while this step is computed
            for part in parts:
                queries = part.queries
                # The first part has the keys of this rank, and every query sees some of them.
                into = base.PartialResult(_take(output, queries), _take(lse, queries), is_first)
                kept = None if masks is None else base.KeptColumns(masks[part.pieces], part.columns)
                tensors = _take(query, queries), _take(key, part.keys), _take(value, part.keys)
                _attend_part(*tensors, kept, part.call, into, request)
                is_first = False
            if wait is not None:
                key, value = wait()
    return output.to(query.dtype), lse


@on_query_device
def _attend_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: base.KeptColumns | None,
    call: Call,
    into: base.PartialResult,
    request: Request,
) -> None:
    """Count and compute one part, and merge it into the result; see `base.Backend.attend_part`."""
    serving, totals = base.get(request.backend).serving(call, query.dtype), None
    if kept is None:
        counters.record(request.dense_label)
    else:
        totals = counters.record_sparse(serving.name, query.device, has_threshold=call.pv_threshold is not None)
    serving.attend_part(query, key, value, kept, call, into, totals=totals)


def _parts_by_step(query: Tensor, key: Tensor, request: Request, ranks: Communicator) -> list[list[RingPart]]:
    """Return the parts that this rank computes in each step of the ring, with the keys that it has in that step."""
    whole, pieces = request.call, request.sharding.pieces
    q_pieces = pieces[ranks.rank]
    steps = []
    for step in range(ranks.size):
        k_pieces = pieces[(ranks.rank - step) % ranks.size]
        parts = []
        for q_indices, k_indices, is_causal in rectangles(q_pieces, k_pieces, whole.is_causal):
            queries, keys = _local_piece(q_pieces, q_indices), _local_piece(k_pieces, k_indices)
            columns = [slice(start // BLOCK_K, ceil_div(stop, BLOCK_K)) for start, stop in k_pieces[k_indices]]
            sizes = {"q_len": queries.length, "kv_len": keys.length}
            call = Call(
                replace(whole.shape, heads=query.shape[1], kv_heads=key.shape[1], **sizes),
                is_causal,
                whole.scale,
                quantization=whole.quantization,
                pv_threshold=whole.pv_threshold,
                skipped=whole.skipped,
            )
            parts.append(RingPart(q_indices, queries, keys, tuple(columns), interned(call)))
        steps.append(parts)
    return steps


def _take(tokens: Tensor, piece: Piece) -> Tensor:
    """Select the tokens of a piece from (B, H, n, ...)."""
    return tokens if piece.length == tokens.shape[2] else tokens[:, :, piece.start : piece.stop]


def _local_piece(pieces: Sequence[Piece], indices: slice) -> Piece:
    """Return the positions of consecutive pieces among the tokens of their rank."""
    start = sum(piece.length for piece in pieces[: indices.start])
    return Piece(start, start + sum(piece.length for piece in pieces[indices]))
