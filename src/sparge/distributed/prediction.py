"""Prediction on several ranks: each rank scores its own query blocks, and one rule selects blocks for all ranks.

A `Budget` is allocated to the query blocks of all ranks as on a single rank (`RankQBlocks`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.backends import base
from sparge.call import Call, interned
from sparge.dispatch.ops import on_query_device
from sparge.distributed.communicator import Communicator
from sparge.distributed.mesh import Mesh
from sparge.distributed.request import Request
from sparge.distributed.sharding import Piece, TokenSharding
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape, ceil_div
from sparge.masks.window import Window
from sparge.options.rules import Selection

PADDING_SORT_KEY = 2**62
"""Sort key of padding, above all numbers of query blocks."""
Keys = Tensor | tuple[Tensor, ...]
"""All keys that some queries may see: K, or the result of `base.Backend.summarize_keys`."""


class RankQBlocks:
    """The query blocks of all ranks: a `budget_allocation.RankPool`.

    Args:
        ranks: the ranks that share a budget.
        ranges: the ranges [start, stop) of each rank's queries.
        heads: the heads of each rank.
        head_order: (H,), the heads in the order of ranks if a `HeadBalance` assigned them. Each rank must then have the
            same number of heads, with all their queries. None for the natural order.
        device: device of the order.
    """

    def __init__(
        self,
        ranks: Communicator,
        ranges: tuple[tuple[tuple[int, int], ...], ...],
        heads: tuple[range, ...],
        head_order: Tensor | None,
        device: torch.device,
    ) -> None:
        q_blocks = ceil_div(max(stop for ranges_of_rank in ranges for _, stop in ranges_of_rank), BLOCK_Q)
        if head_order is None:
            order = _order_by_ranges(ranges, heads, q_blocks, device)
        else:
            order = (head_order.argsort()[:, None] * q_blocks + torch.arange(q_blocks, device=device)).flatten()
        self.order = order  # [ranks * width]
        self.width = len(order) // ranks.size
        self.first = ranks.rank * self.width
        self.total, self.gather = ranks.all_reduce, ranks.all_gather
        q_blocks_per_head = sum(ceil_div(stop - start, BLOCK_Q) for start, stop in ranges[ranks.rank])
        self._unpadded = q_blocks_per_head * len(heads[ranks.rank])

    def before(self, blocks: Tensor) -> Tensor:
        padded = F.pad(blocks, (0, self.width - self._unpadded)).int()
        gathered = self.gather(padded).transpose(0, 1).flatten(1).long()  # [B, ranks * width]
        in_order = gathered[:, self.order]
        before = torch.empty_like(gathered)
        before[:, self.order] = in_order.cumsum(1) - in_order
        return before[:, self.first : self.first + self._unpadded]


@functools.lru_cache(maxsize=64)
def _order_by_ranges(
    ranges: tuple[tuple[tuple[int, int], ...], ...], heads: tuple[range, ...], q_blocks: int, device: torch.device
) -> Tensor:
    """Return the permutation that sorts the concatenated, padded query blocks of all ranks as in the whole call."""
    block_numbers = []
    for ranges_of_rank, heads_of_rank in zip(ranges, heads, strict=True):
        first = torch.tensor(heads_of_rank, device="cpu")[:, None] * q_blocks
        parts = []
        for start, stop in ranges_of_rank:
            blocks = torch.arange(ceil_div(stop - start, BLOCK_Q), device="cpu") + start // BLOCK_Q
            parts.append((first + blocks).flatten())
        block_numbers.append(torch.cat(parts))
    width = max(map(len, block_numbers))
    padded = torch.cat([F.pad(part, (0, width - len(part)), value=PADDING_SORT_KEY) for part in block_numbers])
    return padded.argsort(stable=True).to(device)


def q_blocks_of(request: Request, mesh: Mesh, head_order: Tensor | None, device: torch.device) -> RankQBlocks:
    """Return the query blocks of all ranks. A rank's heads depend on its Ulysses rank, its tokens on its outer rank."""
    shape, pieces = request.call.shape, request.sharding.pieces
    ranges = tuple([pieces[rank // mesh.ulysses.size] for rank in range(mesh.size)])
    return RankQBlocks(mesh, ranges, mesh.heads_by_rank(shape.heads), head_order, device)


@on_query_device
def choose_masks(
    query: Tensor, keys: Sequence[Keys], calls: Sequence[Call], whole: Call, backend_name: str, pool: RankQBlocks
) -> list[BlockMask]:
    """Return a mask for each part of this rank's queries. One rule selects blocks for the query blocks of all ranks.

    Args:
        query: (B, H, n, D), the queries of all parts of this rank.
        keys: for each part, the keys that it may see.
        calls: for each part, the call with the sizes of the part.
        whole: the call of all ranks.
        pool: the query blocks of all ranks.
    """
    if whole.selection.similarity_threshold is not None:
        raise NotImplementedError(
            "similarity_threshold: expected None if ranks select blocks together (TopK and TopCdf support it with "
            'mode="ulysses" and without a HeadBalance), got a threshold'
        )
    backend = base.get(backend_name)
    parts = zip(query.split([call.shape.q_len for call in calls], 2), keys, calls, strict=True)
    candidates = [backend.candidates(part, part_keys, interned(call)) for part, part_keys, call in parts]
    return backend.choose_together(candidates, whole.shape.kv_blocks, pool)


def calls_of_pieces(query: Tensor, key: Tensor, request: Request, rank: int) -> list[Call]:
    """Return a call for each piece of a rank's queries. Its numbers of heads are those of ``query`` and ``key``."""
    heads = query.shape[1], key.shape[1]
    pieces = request.sharding.pieces[rank]
    return request.cached(
        ("pieces", heads), lambda: [interned(_call_of_piece(request.call, piece, *heads)) for piece in pieces]
    )


def _call_of_piece(call: Call, piece: Piece, heads: int, kv_heads: int) -> Call:
    """Return the call that covers the queries of one piece.

    Its keys are those of the whole call. A causal call needs only the keys up to the end of the piece.
    """
    shape, (start, stop) = call.shape, piece
    kv_len = stop if call.is_causal else shape.kv_len
    keeps_diagonal = isinstance(call.sparsity, Selection) and call.sparsity.keeps_diagonal(call.is_causal)
    if not call.is_causal and (call.window != Window() or keeps_diagonal) and piece.length != shape.q_len:
        got = "diagonal=True" if call.window == Window() else f"window={tuple(call.window)}"
        raise NotImplementedError(
            'window, diagonal: expected causal attention if ranks keep their queries (mode="ulysses" supports both), '
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


def predict_over_all_keys(query: Tensor, key: Tensor, request: Request, mesh: Mesh) -> list[BlockMask]:
    """Return a mask over the keys of all ranks for each piece of this rank's queries.

    If no block is split between ranks, only statistics of key blocks are gathered, 1/32 of the size of K and V.
    Otherwise K is gathered, one head at a time.
    """
    calls = calls_of_pieces(query, key, request, mesh.outer.rank)
    keys: list[tuple[Tensor, ...]]
    if request.sharding.has_whole_blocks and request.call.attn_mask is None:
        statistics = _gather_statistics(key, request, mesh.outer)
        keys = [tuple(tensor[:, :, : call.shape.kv_blocks] for tensor in statistics) for call in calls]
    else:
        by_head = [_statistics_of_head(head, calls, request, mesh.outer) for head in key.split(1, 1)]
        keys = [
            tuple(torch.cat(tensors, 1) for tensors in zip(*heads_of_piece, strict=True))
            for heads_of_piece in zip(*by_head, strict=True)
        ]
    pool = q_blocks_of(request, mesh, None, query.device)
    return choose_masks(query, keys, calls, request.call, request.backend, pool)


@on_query_device
def _statistics(key: Tensor, call: Call, backend: str) -> tuple[Tensor, ...]:
    return base.get(backend).summarize_keys(key, interned(call))


def _gather_statistics(key: Tensor, request: Request, ranks: Communicator) -> tuple[Tensor, ...]:
    """Compute the statistics of this rank's key blocks, and gather those of all ranks."""
    pieces = request.sharding.pieces

    def make() -> tuple[Call, TokenSharding]:
        heads, tokens = key.shape[1:3]
        shape = replace(request.call.shape, heads=heads, kv_heads=heads, q_len=tokens, kv_len=tokens)
        call = replace(request.call, shape=shape, is_causal=False, window=Window(), attn_mask=None)
        blocks = [
            tuple(Piece(start // BLOCK_K, ceil_div(stop, BLOCK_K)) for start, stop in of_rank) for of_rank in pieces
        ]
        return interned(call), TokenSharding(tuple(blocks))

    call, blocks = request.cached("statistics", make)
    statistics = _statistics(key, call, request.backend)
    waits = [ranks.start_gather_tokens(tensor, blocks.lengths) for tensor in statistics]
    return tuple(blocks.sort(wait()) for wait in waits)


def _statistics_of_head(
    key: Tensor, calls: Sequence[Call], request: Request, ranks: Communicator
) -> list[tuple[Tensor, ...]]:
    """Gather one head of K, (B, 1, n, D), and return the statistics of the keys visible to each piece."""
    whole = request.sharding.sort(ranks.gather_tokens(key, request.sharding.lengths))
    heads = {"heads": 1, "kv_heads": 1}
    return [
        _statistics(
            whole[:, :, : call.shape.kv_len], replace(call, shape=replace(call.shape, **heads)), request.backend
        )
        for call in calls
    ]
