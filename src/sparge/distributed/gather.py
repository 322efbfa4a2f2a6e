"""Mode "gather": every rank keeps its queries and gathers the keys and values of all ranks, a few heads at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparge.distributed.communicator import Wait
from sparge.distributed.prediction import calls_of_pieces, predict_over_all_keys
from sparge.distributed.request import Request, TokenSplit
from sparge.masks.block_mask import BlockMask
from sparge.stats import counters

GATHERED_BYTES = 2**30
"""Maximum bytes of K and V that are gathered at a time, unless the caller sets the number of heads."""


def heads_at_a_time(key: Tensor, value: Tensor, total: int, requested: int | None) -> int:
    """Return the number of K/V heads to gather at a time; ``total`` is the number of tokens of all ranks."""
    if requested is not None:
        return min(requested, key.shape[1])
    bytes_per_head = key.shape[0] * total * (key.shape[3] + value.shape[3]) * key.element_size()
    return max(1, min(key.shape[1], GATHERED_BYTES // bytes_per_head))


def attend(
    query: Tensor, key: Tensor, value: Tensor, request: Request, split: TokenSplit, _: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE of this rank's queries over the keys of all ranks."""
    ranks, sharding = split.mesh.outer, request.sharding
    masks = predict_over_all_keys(query, key, request, split.mesh) if request.reason is None else None
    kv_heads = key.shape[1]
    group = query.shape[1] // kv_heads
    step = heads_at_a_time(key, value, sharding.total, split.kv_heads_at_once)
    chunks = [slice(start, min(start + step, kv_heads)) for start in range(0, kv_heads, step)]

    def start_gather(chunk: slice) -> list[Wait]:
        return [ranks.start_gather_tokens(tensor[:, chunk], sharding.lengths) for tensor in (key, value)]

    waits = start_gather(chunks[0])
    results = []
    with counters.as_one_call():
        for index, chunk in enumerate(chunks):
            keys, values = (sharding.sort(wait()) for wait in waits)
            if index + 1 < len(chunks):
                waits = start_gather(chunks[index + 1])  # while this chunk is computed
            heads = slice(chunk.start * group, chunk.stop * group)
            part, queries = request.for_heads(heads), query[:, heads]
            calls = calls_of_pieces(queries, keys, part, ranks.rank)
            pieces = queries.split([call.shape.q_len for call in calls], 2)
            chunk_masks = [None] * len(calls) if masks is None else [mask_of_heads(mask, heads) for mask in masks]
            kv_lens = [call.shape.kv_len for call in calls]
            chunk_results = [
                part.attend(piece, keys[:, :, :kv_len], values[:, :, :kv_len], mask, call)
                for piece, kv_len, mask, call in zip(pieces, kv_lens, chunk_masks, calls, strict=True)
            ]
            results.append(_concatenated(chunk_results, 2, with_lse=request.return_lse))
    return _concatenated(results, 1, with_lse=request.return_lse)


def _concatenated(results: Sequence[tuple[Tensor, Tensor]], dim: int, *, with_lse: bool) -> tuple[Tensor, Tensor]:
    if len(results) == 1:
        return results[0]
    outputs, lses = zip(*results, strict=True)
    return torch.cat(outputs, dim), torch.cat(lses, dim) if with_lse else lses[0]


def mask_of_heads(mask: BlockMask, heads: slice) -> BlockMask:
    """Select heads of a mask."""
    if heads == slice(0, mask.kv_indices.shape[1]):
        return mask
    return replace(
        mask,
        kv_num_blocks=mask.kv_num_blocks[:, heads],
        kv_indices=mask.kv_indices[:, heads],
        visible_num_blocks=mask.visible_num_blocks[:, heads],
    )
