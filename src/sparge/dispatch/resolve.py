"""Resolve calls: check their arguments, choose between dense and sparse, and choose the backend.

Only this module chooses between dense and sparse for `sparge.attention`; the rules are in `dense_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparge.backends import base
from sparge.call import Call
from sparge.dispatch import dense_rules, validation
from sparge.dispatch.gradients import inside_autograd_function, needs_grad_of
from sparge.dispatch.ops import is_direct
from sparge.dispatch.reasons import Obstacle, Reason
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import Shape
from sparge.masks.ordering import TokenOrder
from sparge.masks.window import Window
from sparge.options import checks
from sparge.options.common import QUANTIZATIONS, Layout, OnUnsupported, PerHead, Quantization, ScoreName, Skipped
from sparge.options.rules import Dense, Sparsity, check_pv_threshold
from sparge.options.scores import Score


class Options(NamedTuple):
    """The options of a call as the caller passed them.

    Attributes:
        is_causal: None, which only `sparge.block_sparse_attention` accepts, uses the causality of the mask.
        order: order of tokens in which a model's call is computed.
        pv_threshold: the threshold of `sparge.block_sparse_attention`.

    The other options are those of `sparge.attention`.
    """

    dropout_p: float = 0.0
    is_causal: bool | None = False
    scale: float | None = None
    enable_gqa: bool = False
    window: tuple[int | None, int | None] | None = None
    topk: PerHead | None = None
    sparsity: Sparsity | None = None
    score: ScoreName | Score = "moment"
    quantization: Quantization = "auto"
    layout: Layout = "HND"
    always_keep: Sequence[tuple[int, int]] | None = None
    exact_queries: Sequence[tuple[int, int]] | None = None
    skipped: Skipped = "auto"
    return_lse: bool = False
    backend: str = "auto"
    on_unsupported: OnUnsupported = "raise"
    order: TokenOrder | None = None
    pv_threshold: PerHead | None = None


class Tensors(NamedTuple):
    """Checked tensors of a call, heads-first.

    Attributes:
        scale: factor on the scores, above 0. The sign of the caller's scale is moved into the query.
        is_repeatable: the tensors are plain and views of the caller's tensors, not copies, so the call can be cached.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    shape: Shape
    scale: float
    is_repeatable: bool


class Resolved(NamedTuple):
    """A resolved call, ready to run.

    Attributes:
        call: the options; the sparsity of dense calls is `Dense`.
        backend: name of the backend.
        reason: why the call is dense; None if it is sparse.
        obstacle: a property that no sparse backend supports, so SDPA computes the call.
        is_repeatable: all calls of the same kind resolve to the same result, so it can be cached.
        is_deferred: the sizes are unknown, so the operator chooses between dense and sparse when it runs.
    """

    call: Call
    backend: str
    reason: Reason | None = None
    obstacle: Obstacle | None = None
    is_repeatable: bool = False
    is_deferred: bool = False


def check_tensors(
    query: Tensor, key: Tensor, value: Tensor, options: Options, *, may_be_empty: bool = False
) -> Tensors:
    """Check the tensors and the scale of a call, and view the tensors as heads-first.

    Args:
        may_be_empty: accept batch size 0 and 0 queries.
    """
    inputs = (query, key, value)
    query, key, value, shape = validation.check_query_key_value(
        query, key, value, options.layout, options.enable_gqa, may_be_empty=may_be_empty
    )
    scale = validation.check_scale(options.scale, shape.head_dim)
    is_repeatable = is_direct(*inputs) and scale > 0 and all(tensor.stride(-1) == 1 for tensor in inputs)
    query, scale = with_positive_scale(query, scale)
    return Tensors(query, key, value, shape, scale, is_repeatable)


def resolve(tensors: Tensors, attn_mask: Tensor | None, options: Options, *, largest: Shape | None = None) -> Resolved:
    """Check the options of `sparge.attention` and decide how the call runs.

    Args:
        largest: sizes of the largest part of a call that is split over ranks. The choice between dense and sparse
            depends on them. Default: the sizes of the call.
    """
    shape, device = tensors.shape, tensors.query.device
    checks.check_choice("on_unsupported", options.on_unsupported, checks.ON_UNSUPPORTED)
    checks.check_flag("return_lse", options.return_lse)
    checks.check_choice("quantization", options.quantization, QUANTIZATIONS)
    visible = _check_visibility(tensors, attn_mask, options)
    attn_mask, window = visible["attn_mask"], visible["window"]
    prediction = _check_prediction(options, shape)
    rule = prediction["sparsity"]
    checks.check_choice("skipped", options.skipped, checks.SKIPPED)
    backend = base.resolve(options.backend, device)
    is_deferred = _sizes_are_unknown() and options.backend == "auto" and not isinstance(rule, Dense)
    reason = None
    if not is_deferred:
        target = dense_rules.Target(options.backend, backend, device, tensors.query.dtype)
        reason = dense_rules.by_arguments(largest or shape, window, rule, options.quantization, target, attn_mask)
    obstacle = _obstacle(tensors, attn_mask, options, reason)
    if obstacle is not None:
        return Resolved(Call(**visible), backend, Reason.UNSUPPORTED, obstacle)
    has_mask = attn_mask is not None
    resolved = dense_rules.resolve_quantization(options.quantization, backend, device, reason, has_mask=has_mask)
    if reason is not None:
        return Resolved(Call(**visible, quantization=resolved), backend, reason, is_repeatable=tensors.is_repeatable)
    assert not isinstance(rule, Dense)
    sparse = Call(
        **visible,
        **prediction,
        quantization=resolved,
        pv_threshold=rule.pv_threshold,
        skipped=validation.resolve_skipped(options.skipped, window.right == 0, attn_mask, shape),
        exact_lse=options.return_lse,
    )
    is_repeatable = tensors.is_repeatable and not sparse.has_per_head_numbers
    return Resolved(sparse, backend, is_repeatable=is_repeatable, is_deferred=is_deferred)


def _check_visibility(tensors: Tensors, attn_mask: Tensor | None, options: Options) -> dict[str, Any]:
    """Check the mask, causality and the window, and return the fields of a `Call` that do not depend on its rule."""
    shape, device = tensors.shape, tensors.query.device
    checks.check_flag("is_causal", options.is_causal)
    attn_mask, is_causal = validation.resolve_causal_bias(attn_mask, bool(options.is_causal), shape, device)
    window = validation.resolve_window(options.window, is_causal, shape.q_len, shape.kv_len)
    return {
        "shape": shape,
        "is_causal": window.right == 0,
        "scale": tensors.scale,
        "attn_mask": validation.check_attn_mask(attn_mask, shape, device),
        "window": window,
    }


def _check_prediction(options: Options, shape: Shape) -> dict[str, Any]:
    """Check the options that affect prediction, and return them as fields of a `Call`."""
    return {
        "sparsity": validation.resolve_sparsity(options.topk, options.sparsity, shape.heads),
        "score": checks.resolve_score(options.score),
        "always_keep": validation.check_ranges("always_keep", options.always_keep, shape.kv_len, "keys"),
        "exact_queries": validation.check_ranges("exact_queries", options.exact_queries, shape.q_len, "queries"),
    }


def _obstacle(tensors: Tensors, attn_mask: Tensor | None, options: Options, reason: Reason | None) -> Obstacle | None:
    """Return the obstacle to a call, or raise NotImplementedError if the call may not fall back to dense."""
    query, key, value, shape = tensors.query, tensors.key, tensors.value, tensors.shape
    needs_grad = needs_grad_of(query, key, value, attn_mask)
    if options.backend == "auto" and options.on_unsupported != "raise" and inside_autograd_function():
        needs_grad = True  # checkpointing repeats this call with gradients, which runs dense, so this call must too
    obstacle = dense_rules.unsupported(shape, options.dropout_p, needs_grad)
    if obstacle is None and reason is None and options.skipped == "mean":
        obstacle = dense_rules.unsupported_means(attn_mask, shape.group)
    if obstacle is None:
        return None
    if options.on_unsupported == "raise" or options.backend != "auto":
        raise NotImplementedError(obstacle.message)
    if options.return_lse:
        raise NotImplementedError(f"{obstacle.message}; running dense instead cannot return the LSE")
    return obstacle


def resolve_prediction(tensors: Tensors, attn_mask: Tensor | None, options: Options) -> Resolved:
    """Check the options of `sparge.predict`, which never runs dense."""
    visible = _check_visibility(tensors, attn_mask, options)
    call = Call(**visible, **_check_prediction(options, tensors.shape))
    is_repeatable = tensors.is_repeatable and not call.has_per_head_numbers
    return Resolved(call, base.resolve(options.backend, tensors.query.device), is_repeatable=is_repeatable)


def resolve_block_sparse_attention(
    tensors: Tensors, mask: BlockMask | Tensor, attn_mask: Tensor | None, options: Options
) -> tuple[BlockMask, Resolved]:
    """Check the options of `sparge.block_sparse_attention`, and return the checked mask and the resolved call."""
    shape, device, is_causal = tensors.shape, tensors.query.device, options.is_causal
    if is_causal is not None:
        checks.check_flag("is_causal", is_causal)
    checks.check_flag("return_lse", options.return_lse)
    checks.check_choice("quantization", options.quantization, QUANTIZATIONS)
    attn_mask, _ = validation.resolve_causal_bias(attn_mask, bool(is_causal), shape, device, as_mask=True)
    obstacle = dense_rules.unsupported(shape, 0.0, needs_grad_of(tensors.query, tensors.key, tensors.value, attn_mask))
    if obstacle is not None:
        raise NotImplementedError(obstacle.message)
    if options.pv_threshold is not None:
        check_pv_threshold(options.pv_threshold)
        validation.check_per_head("pv_threshold", options.pv_threshold, shape.heads)
    backend = base.resolve(options.backend, device)
    blocks = validation.check_block_mask(mask, shape, is_causal, device, options.window)
    attn_mask = validation.check_attn_mask(attn_mask, shape, device)
    call = Call(
        shape=shape,
        is_causal=blocks.is_causal,
        scale=tensors.scale,
        quantization=base.resolve_quantization(options.quantization, backend, device, has_mask=attn_mask is not None),
        pv_threshold=options.pv_threshold,
        attn_mask=attn_mask,
        skipped=validation.resolve_skipped(options.skipped, blocks.is_causal, attn_mask, shape),
        window=Window(*blocks.window),
        exact_lse=options.return_lse,
    )
    is_repeatable = tensors.is_repeatable and blocks is mask and not call.has_per_head_numbers
    return blocks, Resolved(call, backend, is_repeatable=is_repeatable)


def with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return an equivalent query and a scale above 0.

    torch's kernels mask with -inf before they scale. A negative scale would turn -inf into inf, and 0 would give NaN.
    """
    if scale > 0:
        return query, scale
    return (-query, -scale) if scale < 0 else (query * 0.0, 1.0)


def _sizes_are_unknown() -> bool:
    """Return whether torch.export is tracing. A choice by size would restrict the exported program to these lengths."""
    is_exporting = getattr(torch.compiler, "is_exporting", None)  # from torch 2.7 on
    return torch.compiler.is_compiling() and is_exporting is not None and is_exporting()
