"""diffusers' context parallelism: each rank has a part of the tokens, and attention covers the tokens of all ranks.

diffusers' own implementation passes a part of the keys at a time to a kernel. This library selects blocks among all
keys and needs the positions of text tokens, so it exchanges tokens itself (`shards`). All ranks choose between dense
and sparse by the sizes over all ranks. The masks equal the masks of a single process, and no outputs are merged by LSE.
Dense calls exchange tokens the same way, and run on diffusers' SDPA.
"""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparge import api
from sparge.distributed import split_call, ulysses
from sparge.distributed.agreement import check_same_options
from sparge.distributed.balance import HeadBalance
from sparge.distributed.communicator import ONE_RANK, Communicator
from sparge.distributed.mesh import Mesh
from sparge.integrations.decisions import runs_dense
from sparge.integrations.diffusers import probe
from sparge.integrations.diffusers.shards import QueryShards, Shards, shards_of
from sparge.integrations.layers import Layer
from sparge.integrations.model_call import RankPart, unexpanded, with_four_dimensions
from sparge.integrations.sdpa import Scope, Tokens, sparse_sdpa
from sparge.masks.geometry import ceil_div

TEXT = "encoder_hidden_states"
"""The name of the text among the arguments of models, and in their context-parallel plans."""


def mesh_of(config: Any) -> Mesh | None:
    """Return the mesh of a diffusers ``ParallelConfig``; None if there is no config or it does not split tokens."""
    context = getattr(config, "context_parallel_config", None)
    if context is None:
        return None
    groups = context._ulysses_mesh.get_group(), context._ring_mesh.get_group()
    heads, ring = (Communicator(group) if group.size() > 1 else ONE_RANK for group in groups)
    has_equal_shards = not (context.ulysses_anything or context.ring_anything)
    return None if heads is ring else Mesh(heads, ring, has_equal_shards=has_equal_shards)


def splits_text(model: nn.Module) -> bool:
    """Return whether the hooks of a model's context-parallel plan split the text over the ranks separately."""
    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        for hook in () if registry is None else registry.hooks.values():
            plan = getattr(hook, "metadata", None)
            if isinstance(plan, dict) and TEXT in plan and hasattr(hook, "parallel_config"):
                return True
    return False


def local_share(tokens: int, mesh: Mesh) -> int:
    """Return the number of tokens on this rank, given the total: an equal share, and one more on the first ranks."""
    base, extra = divmod(tokens, mesh.size)
    return base + (mesh.rank < extra)


def gather_probe(result: dict[str, tuple[Tokens, ...]], mesh: Mesh, text: int | None) -> dict[str, tuple[Tokens, ...]]:
    """Gather the results of a probe from all ranks.

    Args:
        result: the result on this rank.
        text: the number of text tokens on this rank; None if the ranks do not split text separately.
    """
    local = {layer: tuple(_with_seam(call, text) for call in calls) for layer, calls in result.items()}
    by_rank = mesh.all_gather_objects(local)
    if any(other.keys() != result.keys() for other in by_rank):
        return {}
    return {
        layer: tuple(
            replace(ranks[mesh.rank], ranks=ranks) for ranks in zip(*(other[layer] for other in by_rank), strict=False)
        )
        for layer in local
    }


def _with_seam(tokens: Tokens, text: int | None) -> Tokens:
    """Return ``tokens`` with `Tokens.seam` set if the text is at one end and was sharded separately.

    Args:
        text: number of text tokens on this rank; None if the ranks do not split text separately.
    """
    if not text or not tokens.is_self or tokens.keys is None or not tokens.text:
        return tokens
    (start, stop), (last, end) = tokens.text[0], tokens.text[-1]
    if start == 0 and (stop or 0) >= text:
        return replace(tokens, seam=text)
    seam = tokens.keys - text
    return replace(tokens, seam=seam) if end == tokens.keys and last <= seam else tokens


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
    """Return the output (B, S_q, H, D) of this rank's queries over the keys of all ranks.

    This function causes a graph break under torch.compile: the number of blocks that a query block keeps depends on all
    ranks.

    Args:
        tokens: the description of this rank's tokens, which `Scope.next_call` returned for this call.
        mesh: the ranks that make the same call.
        dense: runs dense calls, with the arguments and the output of this function.
        query, key, value: this rank's part, (B, S, H, D).

    Raises:
        NotImplementedError: causal attention along a ring.
        ValueError: policies or tensors differ between ranks, no rank has the whole mask, or there are fewer heads than
            ranks.
    """
    options = {"has no attn_mask": attn_mask is None, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    _check_call(scope.layer, mesh, query, key, value, options)
    heads, max_heads = query.shape[2], ceil_div(query.shape[2], mesh.ulysses.size)

    # Choose between dense and sparse by the sizes of the whole call.
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    seam = tokens.seam or 0
    counts = (query.shape[2], seam if query.shape[2] == key.shape[2] else 0), (key.shape[2], seam)
    queries, keys = shards_of(mesh, *counts, device=query.device)
    all_tokens = tokens_of_all_ranks(tokens, keys)
    sizes = (
        query[:, :1, :1].expand(-1, max_heads, queries.total, -1),
        key[:, :1, :1].expand(-1, max_heads, keys.total, -1),
    )
    if attn_mask is not None and attn_mask.shape == (query.shape[0], keys.total):
        attn_mask = attn_mask[:, None, None, :]  # the dispatcher's key padding
    attn_mask = None if attn_mask is None else unexpanded(attn_mask, query)
    call = (dropout_p, is_causal, scale, enable_gqa)
    is_dense = not (is_causal or all_tokens.is_text) and runs_dense(scope.layer, *sizes, all_tokens.is_self)

    # Dense cross-attention: gather keys, because they are fewer than the queries.
    if is_dense and keys.total <= min(queries.lengths):
        key, value = (keys.gather_all(tensor, mesh) for tensor in (key, value))
        mask = _whole_mask(attn_mask, queries, keys, mesh, slice(None), range(mesh.rank, mesh.rank + 1))
        return _dense(dense, query, key, value, mask, *call).transpose(1, 2)

    # Exchange tokens for heads, and gather keys and values along the ring.
    if key.shape[1] != heads and key.shape[1] % mesh.ulysses.size:
        key, value = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (key, value))
    balance = None if is_dense else _balance(scope.layer, heads, key.shape[1], mesh)
    order = None if balance is None else balance.query_heads(key.shape[1], heads // key.shape[1], query.device)
    local_heads = mesh.heads_of_this_rank(heads)
    mask_heads = local_heads if order is None else order[local_heads]
    mask = _whole_mask(attn_mask, queries, keys, mesh, mask_heads, mesh.ulysses_ranks)
    q_lengths, kv_lengths = mesh.ulysses_lengths(queries.lengths), mesh.ulysses_lengths(keys.lengths)
    query, key, value = ulysses.to_heads(query, key, value, mesh.ulysses, q_lengths, kv_lengths, order)
    key, value = (keys.gather(tensor, mesh) for tensor in (key, value))
    is_ring, query_shards = mesh.outer.size > 1, QueryShards(queries, mesh)
    query = query if is_ring else queries.sort(query)

    # Attend.
    output = None
    if not is_dense:
        split: dict[str, Any] = {"ranks": mesh, "heads": mesh.heads_by_rank(heads), "queries": query_shards.spans}
        local = functools.partial(
            split_call.attention, **split, balance=balance, order=order, attend_locally=api.attention
        )
        part = RankPart(sizes, local, query_shards if is_ring else None, attn_mask)
        output = sparse_sdpa(
            scope, query, key, value, mask, *call[:2], scale=scale, enable_gqa=enable_gqa, tokens=all_tokens, part=part
        )
    if output is None:
        output = _dense(dense, query, key, value, mask, *call)

    # Exchange heads for tokens.
    output = output if is_ring else queries.unsort(output)
    return ulysses.to_tokens(output, mesh.ulysses, q_lengths, heads, order).transpose(1, 2)


def _check_call(layer: Layer, mesh: Mesh, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> None:
    """Raise if several ranks cannot compute a call together, or if policies or options differ between ranks.

    Policies and options are compared once for each kind of call.
    """
    sizes = {"query (H, D)": query.shape[2:], "key (H, D)": key.shape[2:], "value (H, D)": value.shape[2:]}
    call = {**options, "dtype": str(query.dtype), **sizes}
    kind = mesh.name, mesh.rank, *call.values()
    if kind not in layer.compared:
        policy = {f"Policy.{field.name}": getattr(layer.policy, field.name) for field in fields(layer.policy)}
        check_same_options(mesh, {**policy, **call}, query.device, "")
        layer.compared.add(kind)
    if options["is_causal"] and mesh.outer.size > 1:
        raise NotImplementedError(
            "context parallelism: expected ulysses_degree alone for causal attention, got ring_degree "
            f"{mesh.outer.size}"
        )
    heads, ranks = query.shape[2], mesh.ulysses.size
    if ceil_div(heads, ranks) * (ranks - 1) >= heads:
        raise ValueError(f"ulysses_degree: expected at least one of {heads} heads per rank, got {ranks}")


def _balance(layer: Layer, heads: int, kv_heads: int, mesh: Mesh) -> HeadBalance | None:
    """Return the `HeadBalance` of a layer, or None if its heads cannot be load-balanced.

    This needs equal numbers of heads on all ranks, a mesh without a ring, and a layer name. Without names, all layers
    would share an object, although their costs differ.
    """
    if not layer.name or mesh.outer.size > 1 or heads % mesh.ulysses.size or kv_heads % mesh.ulysses.size:
        return None
    layer.balance = layer.balance or HeadBalance()
    return cast(HeadBalance, layer.balance)


def _dense(function: Any, query: Tensor, key: Tensor, value: Tensor, *call: Any) -> Tensor:
    """Run a dense call on tensors (B, H, S, D)."""
    output: Tensor = function(*(tensor.transpose(1, 2) for tensor in (query, key, value)), *call)
    return output.transpose(1, 2)


@functools.lru_cache(maxsize=512)
def tokens_of_all_ranks(tokens: Tokens, shards: Shards) -> Tokens:
    """Return the tokens of the whole call, given the tokens of this rank."""
    by_rank = tokens.ranks or tuple(_with_seam_of(tokens, seam) for seam in shards.seams)
    flags = []
    for local, count in zip(by_rank, shards.lengths, strict=True):
        is_text = torch.zeros(count, dtype=torch.bool, device="cpu")
        for start, stop in ((0, None),) if local.is_text else local.text:
            is_text[start:stop] = True
        flags.append(is_text)
    ranges = probe.ranges_of(shards.sort(torch.cat(flags)[None, None, :, None]).flatten().tolist())
    known_self = {local.is_self for local in by_rank if local.is_self is not None}
    is_self = True in known_self if known_self else None
    return Tokens(is_self, ranges, None, all(local.is_text for local in by_rank))


def _with_seam_of(tokens: Tokens, seam: int) -> Tokens:
    """Return the tokens of another rank, given its seam. One of the two streams is text."""
    if tokens.seam is None or not tokens.text:
        return tokens
    is_first = tokens.text[0][0] == 0
    return replace(tokens, text=((0, seam),) if is_first else ((seam, None),))


def _whole_mask(
    attn_mask: Tensor | None, queries: Shards, keys: Shards, mesh: Mesh, heads: slice | Tensor, ranks: range
) -> Tensor | None:
    """Return the mask of some heads, over the queries of ``ranks`` and the keys of all ranks.

    Raises:
        ValueError: the mask has one row per query, but only for this rank's keys.
    """
    if attn_mask is None:
        return None
    local_queries, local_keys = (shards.lengths[mesh.rank] for shards in (queries, keys))
    mask = with_four_dimensions(attn_mask)
    has_rows = mask.shape[2] > 1
    if mask.shape[3] == local_keys and local_keys != keys.total:
        if has_rows:
            raise ValueError(
                "attn_mask: expected one over keys, or one over the keys of all ranks, under context parallelism, "
                f"got {tuple(attn_mask.shape)} for {local_queries} of {queries.total} queries and {local_keys} of "
                f"{keys.total} keys"
            )
        mask = keys.gather_all(mask.mT, mesh).mT
    if has_rows and mask.shape[2] == local_queries != queries.total:
        mask = queries.gather_all(mask, mesh)
    if mask.shape[1] > 1:
        mask = mask[:, heads]
    if not has_rows or len(ranks) == mesh.size:
        return mask
    return torch.cat([mask[:, :, start:stop] for rank in ranks for start, stop in queries.pieces[rank]], 2)
