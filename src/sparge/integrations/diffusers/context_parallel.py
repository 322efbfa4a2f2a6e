"""diffusers' context parallelism: every rank holds a part of the tokens, and an attention call is one over all of them.

The attention of diffusers' own backends is written for kernels that see a part of the keys at a time. Blocks are chosen
among all keys here, and where text lies matters, so that this library exchanges tokens itself (`shards`): a call is
decided by the sizes that it has on all ranks together, its masks are those of a single process, and no part of it is
merged by its LSE. Dense calls go the same way, to diffusers' SDPA.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sparge.distributed import shared
from sparge.distributed.balance import HeadBalance
from sparge.distributed.exchange import Exchange
from sparge.distributed.shared import Share
from sparge.integrations.decisions import runs_dense
from sparge.integrations.diffusers.shards import Mesh, Rows, Shards
from sparge.integrations.layers import Layer
from sparge.integrations.model_call import RankPart, unexpanded
from sparge.integrations.sdpa import Scope, Tokens, sparse_sdpa
from sparge.masks.geometry import ceil_div

TEXT = "encoder_hidden_states"
"""What models call the text among their arguments, and plans of parallelism with them."""


def mesh_of(config: Any) -> Mesh | None:
    """The mesh of a ``ParallelConfig``; None where it splits no tokens."""
    context = getattr(config, "context_parallel_config", None)
    if context is None:
        return None
    group = context._flattened_mesh.get_group()
    ulysses, ring = (Exchange(mesh.get_group()) for mesh in (context._ulysses_mesh, context._ring_mesh))
    everyone = Exchange(group)
    is_even = not (context.ulysses_anything or context.ring_anything)
    return None if everyone.size == 1 else Mesh(ulysses, ring, everyone, group, is_even)


def mesh_of_model(model: nn.Module) -> Mesh | None:
    """The mesh of a model after its ``enable_parallelism``."""
    return mesh_of(getattr(model, "_parallel_config", None))


def splits_text(model: nn.Module) -> bool:
    """Whether text is split over the ranks by itself, as the hooks of a plan say that are on the model."""
    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        for hook in () if registry is None else registry.hooks.values():
            plan = getattr(hook, "metadata", None)
            if isinstance(plan, dict) and TEXT in plan and hasattr(hook, "parallel_config"):
                return True
    return False


def own_share(tokens: int, mesh: Mesh) -> int:
    """How many of so many tokens a rank has: all as many, or the first ones one more."""
    least, more = divmod(tokens, mesh.everyone.size)
    return least + (mesh.everyone.rank < more)


def of_all_ranks(found: dict[str, tuple[Tokens, ...]], mesh: Mesh, text: int | None) -> dict[str, tuple[Tokens, ...]]:
    """What a probe finds on each rank, put together.

    Args:
        found: on this one.
        text: how many text tokens it has; None: text is not split by itself.
    """
    told = mesh.tell({layer: tuple(_seamed(call, text) for call in calls) for layer, calls in found.items()})
    if any(other.keys() != found.keys() for other in told):
        return {}
    return {
        layer: tuple(replace(own, ranks=ranks) for own, ranks in zip(calls, _by_call(told, layer), strict=False))
        for layer, calls in told[mesh.everyone.rank].items()
    }


def _seamed(tokens: Tokens, text: int | None) -> Tokens:
    """Tokens with their seam, if text lies at one of their ends and was split by itself."""
    if not text or not tokens.is_self or tokens.keys is None or not tokens.text:
        return tokens
    (start, stop), (last, end) = tokens.text[0], tokens.text[-1]
    if start == 0 and (stop or 0) >= text:
        return replace(tokens, seam=text)
    seam = tokens.keys - text
    return replace(tokens, seam=seam) if end == tokens.keys and last <= seam else tokens


def _by_call(told: Sequence[dict[str, tuple[Tokens, ...]]], layer: str) -> list[tuple[Tokens, ...]]:
    return list(zip(*(of_rank[layer] for of_rank in told), strict=False))


@torch.compiler.disable
def attention(
    scope: Scope,
    tokens: Tokens,
    mesh: Mesh,
    dense: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The output (B, S_q, H, D) of a rank's queries over the keys of all.

    Compiled programs end before it and go on behind it: how many blocks a row keeps is known when all ranks have told.

    Args:
        tokens: what the rank's own tokens of a call are that the scope has counted.
        mesh: of those who make the same call.
        dense: what runs dense calls, with arguments and output as here.
        query, key, value: the rank's own, (B, S, H, D).

    Raises:
        NotImplementedError: causal attention along a ring.
        ValueError: a mask of whose entries no rank knows all; fewer heads than ranks.
    """
    if is_causal and mesh.ring.size > 1:
        raise NotImplementedError(
            f"context parallelism: expected ulysses_degree alone for causal attention, got ring_degree {mesh.ring.size}"
        )
    heads = query.shape[2]
    own_heads = ceil_div(heads, mesh.ulysses.size)
    if own_heads * (mesh.ulysses.size - 1) >= heads:
        raise ValueError(f"ulysses_degree: expected some of {heads} heads for each rank, got {mesh.ulysses.size}")
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    seam = tokens.seam or 0
    counts = (query.shape[2], seam if query.shape[2] == key.shape[2] else 0), (key.shape[2], seam)
    queries, keys = mesh.shards(*counts, device=query.device)
    told = whole(tokens, keys)
    sizes = (
        query[:, :1, :1].expand(-1, own_heads, queries.total, -1),
        key[:, :1, :1].expand(-1, own_heads, keys.total, -1),
    )
    if attn_mask is not None and attn_mask.shape == (query.shape[0], keys.total):
        attn_mask = attn_mask[:, None, None, :]  # the dispatcher's key padding
    attn_mask = None if attn_mask is None else unexpanded(attn_mask, query)
    call = (dropout_p, is_causal, scale, enable_gqa)
    is_dense = not (is_causal or told.is_text) and runs_dense(scope.layer, *sizes, told.is_self)
    if is_dense and keys.total <= min(queries.tokens):  # cross-attention: fewer keys travel than queries would
        key, value = (keys.join(mesh.everyone.gather(tensor, keys.tokens)) for tensor in (key, value))
        mask = _whole_mask(attn_mask, queries, keys, mesh, slice(None), mesh.alone)
        return _dense(dense, query, key, value, mask, *call).transpose(1, 2)
    if key.shape[1] != heads and key.shape[1] % mesh.ulysses.size:
        key, value = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (key, value))
    balance = None if is_dense else _balance(scope.layer, heads, key.shape[1], mesh)
    order = None if balance is None else balance.heads(key.shape[1], heads // key.shape[1], query.device)
    if order is not None:
        group = heads // key.shape[1]
        query = query.index_select(1, order)
        key, value = (tensor.index_select(1, order[::group] // group) for tensor in (key, value))
    own = mesh.heads(heads)
    mask = _whole_mask(attn_mask, queries, keys, mesh, own if order is None else order[own], mesh.column)
    pairs = ((query, queries), (key, keys), (value, keys))
    query, key, value = (arrive() for arrive in [mesh.start_to_heads(*pair) for pair in pairs])
    key, value = (mesh.gather(tensor, keys) for tensor in (key, value))
    rows = Rows(queries, mesh) if mesh.ring.size > 1 else None
    if rows is None:
        query = queries.join(query)
    output = None
    if not is_dense:
        spans = ((0, queries.total),) * mesh.everyone.size if rows is None else rows.spans
        share = Share(mesh.everyone, mesh.all_heads(heads), spans, balance, order)
        part = RankPart(sizes, functools.partial(shared.attention, share=share), rows, attn_mask)
        output = sparse_sdpa(
            scope, query, key, value, mask, *call[:2], scale=scale, enable_gqa=enable_gqa, tokens=told, part=part
        )
    if output is None:
        output = _dense(dense, query, key, value, mask, *call)
    if rows is None:
        output = queries.part(output)
    output = mesh.to_tokens(output, queries, heads)
    return (output if order is None else output.index_select(1, order.argsort())).transpose(1, 2)


def _balance(layer: Layer, heads: int, kv_heads: int, mesh: Mesh) -> HeadBalance | None:
    """How a layer deals its heads to ranks, from step to step; None where they cannot be dealt evenly, or along a ring.

    Calls of no layer come from all of them, and one knows nothing of the next.
    """
    if not layer.name or mesh.ring.size > 1 or heads % mesh.ulysses.size or kv_heads % mesh.ulysses.size:
        return None
    if layer.balance is None:
        layer.balance = HeadBalance()
    balance: HeadBalance = layer.balance
    return balance


def _dense(function: Any, query: Tensor, key: Tensor, value: Tensor, *call: Any) -> Tensor:
    """What runs dense calls, heads first."""
    output: Tensor = function(*(tensor.transpose(1, 2) for tensor in (query, key, value)), *call)
    return output.transpose(1, 2)


def whole(tokens: Tokens, shards: Shards) -> Tokens:
    """What the tokens of all ranks are, from what one knows."""
    ranks = tokens.ranks or tuple(_alike(tokens, seam) for seam in shards.seams)
    ranges: list[tuple[int, int]] = []
    for rank, known in enumerate(ranks):
        count = shards.tokens[rank]
        for start, stop in ((0, None),) if known.is_text else known.text:
            ranges += shards.places(rank, start, count if stop is None else min(stop, count))
    return Tokens(_common(ranks), _merged(ranges), None, all(known.is_text for known in ranks))


def _alike(tokens: Tokens, seam: int) -> Tokens:
    """What a rank with another seam holds, where one of two streams is text."""
    if tokens.seam is None or not tokens.text:
        return tokens
    is_first = tokens.text[0][0] == 0
    return replace(tokens, text=((0, seam),) if is_first else ((seam, None),))


def _common(ranks: Sequence[Tokens]) -> bool | None:
    """Whether queries and keys are of one sequence, by what any rank knows."""
    known = {tokens.is_self for tokens in ranks if tokens.is_self is not None}
    return True in known if known else None


def _merged(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sorted ranges, neighbours joined."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def _whole_mask(
    attn_mask: Tensor | None, queries: Shards, keys: Shards, mesh: Mesh, heads: slice | Tensor, ranks: range
) -> Tensor | None:
    """The mask of some heads over the queries of some ranks, or over those of all, and the keys of all.

    Raises:
        ValueError: it has entries for the rank's own queries and own keys, of which nobody knows the others.
    """
    if attn_mask is None:
        return None
    own_queries, own_keys = (shards.tokens[mesh.everyone.rank] for shards in (queries, keys))
    mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
    has_rows = mask.shape[2] > 1
    if mask.shape[3] == own_keys and own_keys != keys.total:
        if has_rows:
            raise ValueError(
                "attn_mask: expected one over keys, or one over the keys of all ranks, under context parallelism, "
                f"got {tuple(attn_mask.shape)} for {own_queries} of {queries.total} queries and {own_keys} of "
                f"{keys.total} keys"
            )
        mask = keys.join(mesh.everyone.gather(mask.mT, keys.tokens)).mT
    if has_rows and mask.shape[2] == own_queries != queries.total:
        mask = queries.join(mesh.everyone.gather(mask, queries.tokens))
    if mask.shape[1] > 1:
        mask = mask[:, heads]
    if not has_rows or len(ranks) == mesh.everyone.size:
        return mask
    ranges = [pair for rank in ranks for pair in queries.places(rank, 0, queries.tokens[rank])]
    return torch.cat([mask[:, :, start:stop] for start, stop in ranges], 2)
