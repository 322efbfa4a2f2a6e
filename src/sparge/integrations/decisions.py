"""Decide how an attention call of a model runs: sparse, dense in sparge, or dense in the framework.

Deciding that a rule of the policy makes a call dense takes a few microseconds and reads no tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from sparge.dispatch import dense_rules, run
from sparge.dispatch.reasons import Reason
from sparge.integrations.layers import Layer
from sparge.integrations.model_call import ModelCall, unexpanded, with_four_dimensions
from sparge.integrations.padding import Span, spans_of
from sparge.masks.geometry import Shape
from sparge.stats import counters


class Decision(NamedTuple):
    """The decision about a call.

    Attributes:
        reason: why the call is dense; None if it is sparse.
        detail: details of the reason, for `sparge.stats`.
        is_ours: whether sparge computes the call; otherwise the framework does.
        spans: visible keys of each sequence, if the mask only hides padding.
    """

    reason: Reason | None = None
    detail: str = ""
    is_ours: bool = False
    spans: tuple[Span, ...] | None = None


def decide(layer: Layer, call: ModelCall) -> Decision:
    """Decide how a call runs, cast its tensors as autocast would, and undo `expand` of its mask."""
    reason = _why_dense(layer, *call.sizes, (call.is_self, call.is_language, call.is_causal), is_compiling())
    if reason is not None and not dense_rules.runs_quantized(layer.policy, reason, call.query.device):
        return Decision(reason)
    unsupported = call.unsupported or _prepare(call)
    if unsupported is None and call.part is not None and reason is None:
        if call.query_shards is not None and not call.query_shards.has_block_per_rank:
            return Decision(Reason.CROSSOVER, "fewer query blocks than ranks")
        unsupported = _unsupported_over_ranks(layer, call)
    if unsupported is not None:
        return _by_framework(reason, Reason.UNSUPPORTED, unsupported)
    if call.attn_mask is None:
        return Decision(reason, is_ours=True)
    return _decide_about_mask(layer, call, call.attn_mask, reason)


def _by_framework(by_policy: Reason | None, reason: Reason, detail: str) -> Decision:
    """Return the decision to leave a call to the framework. A reason of the policy takes precedence."""
    return Decision(reason, detail) if by_policy is None else Decision(by_policy)


def _prepare(call: ModelCall) -> str | None:
    """Cast the tensors of a call as autocast would. Return why only the framework can compute the call, or None."""
    reason = dense_rules.not_plain_tensor(call.query, call.key, call.value, call.attn_mask)
    if reason is not None:
        return reason
    call.query, call.key, call.value = (run.autocast_tensor(tensor) for tensor in (call.query, call.key, call.value))
    if call.attn_mask is not None:
        call.attn_mask = unexpanded(run.autocast_tensor(call.attn_mask), call.query)
    tensors = (call.query, call.key, call.value, call.attn_mask)
    return dense_rules.unsupported_call(*tensors, call.dropout_p, call.enable_gqa)


def _unsupported_over_ranks(layer: Layer, call: ModelCall) -> str | None:
    """Return why several ranks cannot compute a call together, or None."""
    rule = layer.policy.selection
    if rule.is_call_wide and rule.similarity_threshold is not None:
        return "a similarity threshold of a budget over several ranks"
    is_full = call.query_shards is not None and call.attn_mask is not None and dense_rules.is_full_mask(call.attn_mask)
    return dense_rules.FULL_MASK if is_full else None


def _decide_about_mask(layer: Layer, call: ModelCall, mask: Tensor, reason: Reason | None) -> Decision:
    """Decide about a call with a mask.

    Args:
        reason: why the policy keeps the call dense; None if it does not.
    """
    query, key, policy = call.query, call.key, layer.policy
    spans = None
    if mask.shape[-1:] == key.shape[2:3] and mask.shape[0] in (1, query.shape[0]):
        spans = spans_of(mask, layer.name)
    if reason is None and call.max_keys is not None:
        narrow = dense_rules.by_window(policy, query, call.max_keys, key.shape[2])
        if narrow is not None:
            return Decision(narrow)
    if spans is None and policy.backend == "auto":
        whole_query, whole_key = call.sizes
        batch, heads, q_len, head_dim = whole_query.shape
        shape = Shape(batch, heads, whole_key.shape[1], q_len, whole_key.shape[2], head_dim, head_dim)
        whole_mask = mask if call.part is None or call.part.mask is None else call.part.mask
        costly = dense_rules.by_mask(whole_mask, shape, query.device, is_dense=reason is not None)
        if costly is not None:
            return _by_framework(reason, Reason.MASK, costly)
    unsupported = dense_rules.ambiguous_mask(mask)
    if unsupported is None and spans is None and reason is None and policy.skipped == "mean":
        obstacle = dense_rules.unsupported_means(with_four_dimensions(mask), query.shape[1] // key.shape[1])
        unsupported = None if obstacle is None else obstacle.label
    if unsupported is not None:
        return _by_framework(reason, Reason.UNSUPPORTED, unsupported)
    return Decision(reason, is_ours=True, spans=spans)


def has_sizes(query: Tensor, key: Tensor) -> bool:
    """Return whether query and key are 4D and not nested. All other calls run dense."""
    return not (query.is_nested or key.is_nested) and query.ndim == key.ndim == 4


def runs_dense(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    is_self: bool | None = None,
    is_language: bool = False,
    is_causal: bool = False,
    *,
    tokens_first: bool = False,
) -> bool:
    """Return whether the policy leaves a call to the framework, and count the call if so.

    Args:
        is_self, is_language, is_causal: as in `ModelCall`.
        tokens_first: query and key are (B, S, H, D) instead of (B, H, S, D).
    """
    is_tracing = is_compiling()
    flags = (is_self, is_language, is_causal)
    reason = _why_dense(layer, query, key, flags, is_tracing, tokens_first=tokens_first)
    if reason is None or dense_rules.runs_quantized(layer.policy, reason, query.device):
        return False
    if not is_tracing:
        counters.record(reason.label, layer.name)
    return True


def _why_dense(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    flags: tuple[bool | None, bool, bool],
    is_tracing: bool,
    *,
    tokens_first: bool = False,
) -> Reason | None:
    """Return why the policy runs a call dense; None if it does not, or if the tensors do not satisfy `has_sizes`.

    Args:
        flags: ``is_self``, ``is_language`` and ``is_causal`` as in `ModelCall`.
        is_tracing: whether torch.compile is tracing.
    """
    if not has_sizes(query, key):
        return None
    heads_dim, tokens_dim = (2, 1) if tokens_first else (1, 2)
    shape, dtype = query.shape, _dtype(query)
    sizes = (query.device, dtype, shape[0] * shape[heads_dim], shape[tokens_dim], key.shape[tokens_dim])
    kind, last_kind, reason = None, None, None
    if not is_tracing:
        kind = (sizes, flags)
        last_kind, reason = layer.last
    if kind is None or kind != last_kind:
        is_self, is_language, is_causal = flags
        reason = dense_rules.by_policy(
            layer.policy,
            dense_rules.ModelSizes(*sizes),
            is_self=is_self,
            is_language=is_language,
            is_causal=is_causal or is_language,
            is_cross=layer.is_cross,
            is_dense_layer=layer.dense,
        )
        if kind is not None:
            layer.last = (kind, reason)
    if reason is None and layer.steps is not None:
        reason = layer.steps.dense
    return reason


def _dtype(query: Tensor) -> torch.dtype:
    """Return the compute dtype of a call. Autocast is considered only on a CPU, where the dtype affects decisions."""
    if query.is_cpu and torch.is_autocast_enabled("cpu"):  # reading `device.type` would take six times as long
        return torch.get_autocast_dtype("cpu")
    return query.dtype
