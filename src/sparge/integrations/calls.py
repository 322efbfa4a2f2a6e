"""One attention call of a model: describe it (`ModelCall`), decide how it runs (`decide`), run it.

All integrations call `attend`, which returns the output of a call, or None if the framework must compute the call.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from sparge import api
from sparge.dispatch import call_cache, dense_rules, ops, run
from sparge.dispatch.reasons import Reason, count, describe
from sparge.dispatch.resolve import Options
from sparge.dispatch.sinks import with_dense_lse_sinks, with_sinks
from sparge.integrations.decisions import decide
from sparge.integrations.layers import Layer, refuse
from sparge.integrations.model_call import ModelCall, with_four_dimensions
from sparge.integrations.padding import Span, attend_within, ranges_within
from sparge.masks.geometry import BLOCK_Q, ceil_div
from sparge.masks.ordering import TokenOrder
from sparge.masks.window import Window, keys_of_query
from sparge.options.rules import Selection, TopCdf
from sparge.policy import Policy
from sparge.stats import counters

Substitute = Callable[..., Tensor]
"""A function with the arguments of `sparge.attention` after the name of the layer."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.substitute: Substitute | None = None


_THREAD = _Thread()


@contextlib.contextmanager
def substituted(function: Substitute) -> Iterator[None]:
    """Call a function in place of `sparge.attention` for the sparse calls of this thread, for evaluation.

    This has no effect on compiled models.
    """
    before, _THREAD.substitute = _THREAD.substitute, function
    try:
        yield
    finally:
        _THREAD.substitute = before


def attend(layer: Layer, call: ModelCall) -> Tensor | None:
    """Count a call of a model, and return its output (B, H, S_q, D_v), or None if the framework must compute it.

    The call is sparse, or dense in INT8/FP8 if a rule of the policy keeps it dense and the policy has
    ``dense="8bit"``.

    Raises:
        NotImplementedError: the call should be sparse, cannot be, and the policy has ``on_unsupported="raise"``.
    """
    kind = None
    if not is_compiling():
        kind, cached = _find(layer, call)
        if cached is not None:
            runner, _ = cached
            with counters.for_layer(layer.name):
                output, _ = runner(call.query, call.key, call.value, None)
            return output
    decision = decide(layer, call)
    if decision.reason is Reason.UNSUPPORTED:
        refuse(layer, decision.detail)
        return None
    if decision.reason is None:
        return _run_sparse(layer, call, decision.spans, kind)
    if decision.is_ours:
        return _run_dense(layer, call, decision.reason, decision.spans)
    count(decision.reason, layer.name, detail=decision.detail)
    return None


def _find(layer: Layer, call: ModelCall) -> tuple[Any, tuple[call_cache.Runner, Policy] | None]:
    """Return the cache key ("kind") of a call, and the cached runner of that kind.

    The kind is None if the call must be resolved each time. It contains the id of the policy, so the cached value must
    hold a reference to the policy.
    """
    if call.part is not None or call.attn_mask is not None or call.sinks is not None or call.unsupported is not None:
        return None, None
    is_scheduled_dense = layer.steps is not None and layer.steps.dense is not None
    if is_scheduled_dense or _THREAD.substitute is not None:
        return None, None
    described = (call.dropout_p, call.is_causal, call.scale, call.enable_gqa, call.is_self, call.is_language)
    options = (id(layer.policy), layer.dense, layer.is_cross, *described, call.window, tuple(call.text), call.grid)
    return call_cache.find(call.query, call.key, call.value, None, options, "layer")


def _run_dense(layer: Layer, call: ModelCall, reason: Reason, spans: tuple[Span, ...] | None) -> Tensor:
    """Compute a call over all blocks in INT8/FP8. Like every dense call, it is not passed to a `Substitute`."""
    options = {
        "scale": call.scale,
        "enable_gqa": call.enable_gqa,
        "window": call.window,
        "quantization": layer.policy.quantization,
        "backend": layer.policy.backend,
        "label": describe(reason, is_quantized=True),
    }
    return _attend(layer, run.dense if call.sinks is None else with_sinks(run.dense, call.sinks), call, spans, options)


def _run_sparse(layer: Layer, call: ModelCall, spans: tuple[Span, ...] | None, kind: Any) -> Tensor:
    """Compute a sparse call. If the call has a kind, cache its runner."""
    order, shards = _order(layer.policy, call, spans), call.query_shards
    options = _options(layer.policy, call, is_ordered=order is not None)
    attention = _attention_function(layer, call, spans)
    if kind is not None and attention is api.attention:
        call_options = Options(is_causal=call.is_causal, order=order, **options)
        with counters.for_layer(layer.name):
            output, _, runner = run.resolve_and_run(call.query, call.key, call.value, None, call_options)
        if runner is not None:
            call_cache.remember(kind, (runner, layer.policy))
        return output
    if shards is not None:
        options["exact_queries"] = ranges_within(options.get("exact_queries", ()), *shards.span)
    output = _attend(layer, attention, _in_order(call, order, spans), spans, options)
    if shards is not None:
        return shards.from_blocks(output, order)
    return output if order is None else ops.reorder(output, *order, undo=True)


def _order(policy: Policy, call: ModelCall, spans: Sequence[Span] | None) -> TokenOrder | None:
    """Return the order of tokens in which to compute a call; None to keep the original order.

    Tokens can be reordered if text is before or after the grid, the mask is a key mask (reordered with the keys), and
    all removed padding is text.
    """
    name = "hilbert" if policy.order == "auto" else policy.order
    if call.grid is None or call.is_causal or name == "row" or policy.always_keep:
        return None
    query, key = call.sizes
    tokens, size = key.shape[2], math.prod(call.grid)
    if query.shape[2] != tokens or size + sum(stop - first for first, stop in call.text) != tokens:
        return None
    start = max([0, *[stop for first, stop in call.text if first == 0]])  # of the grid
    if any(first < start + size and start < stop for first, stop in call.text):
        return None
    if spans is not None:
        fits = all(first <= start and start + size <= stop for first, stop in spans)
    else:
        fits = call.attn_mask is None or with_four_dimensions(call.attn_mask).shape[2:] == (1, tokens)
    return TokenOrder(call.grid, name, start) if fits else None


def _in_order(call: ModelCall, order: TokenOrder | None, spans: tuple[Span, ...] | None) -> ModelCall:
    """Return a call with reordered tokens, and with this rank's queries if the ranks split the queries."""
    if order is None and call.query_shards is None:
        return call  # also because torch.compile of torch 2.6 cannot trace `replace`
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    if call.query_shards is not None:
        query = call.query_shards.to_blocks(query, order)
    if order is not None:
        if call.query_shards is None:
            query, key, value = ops.reorder_all((query, key, value), *order)
        else:
            key, value = ops.reorder_all((key, value), *order)
        if mask is not None and spans is None:
            mask = ops.reorder(with_four_dimensions(mask).mT, *order).mT
    return replace(call, query=query, key=key, value=value, attn_mask=mask)


def _options(policy: Policy, call: ModelCall, *, is_ordered: bool) -> dict[str, Any]:
    """Return the keywords of `sparge.attention` for a call. The causal rules also apply if only the mask is causal."""
    sparsity, is_masked_text = policy.selection, call.is_language and not call.is_causal
    if is_masked_text:
        sink = True if sparsity.sink is None else sparsity.sink
        diagonal = True if sparsity.diagonal is None else sparsity.diagonal
        sparsity = replace(sparsity, sink=sink, diagonal=diagonal)
    is_causal = call.is_causal or call.is_language
    options: dict[str, Any] = {
        "scale": call.scale,
        "enable_gqa": call.enable_gqa,
        "sparsity": sparsity,
        "score": policy.score_of(is_ordered=is_ordered, is_causal=is_causal),
        "quantization": policy.quantization,
        "always_keep": [*policy.kept_ranges(call.key.shape[2]), *call.text] or None,
        "skipped": "drop" if is_masked_text and policy.skipped == "auto" else policy.skipped,
        "backend": policy.backend,
    }
    if call.window is not None:
        options["window"] = call.window
    if call.text and _is_cheap(call.text, policy.selection, call.sizes[0].shape[2], is_causal=is_causal):
        options["exact_queries"] = list(call.text)
    return options


EXACT_SHARE = 0.125
"""Text queries see all keys if that adds at most this share of the kept blocks."""


def _is_cheap(text: Sequence[tuple[int, int]], rule: Selection, tokens: int, *, is_causal: bool) -> bool:
    """Return whether it adds at most `EXACT_SHARE` of the kept blocks if text queries see all keys.

    `TopCdf` counts as density 0.25.
    """
    amount = rule.amount
    density = 0.25 if isinstance(rule, TopCdf) else float(amount.mean() if isinstance(amount, Tensor) else amount)
    q_blocks = ceil_div(tokens, BLOCK_Q)
    seen = 0
    for start, stop in text:
        first, last = start // BLOCK_Q, ceil_div(stop, BLOCK_Q)
        seen += (last - first) * (first + last + 1 if is_causal else 2 * q_blocks)
    return seen <= EXACT_SHARE * density * q_blocks * (q_blocks + 1 if is_causal else 2 * q_blocks)


def _attention_function(layer: Layer, call: ModelCall, spans: tuple[Span, ...] | None) -> Callable[..., Any]:
    """Return the function that computes a sparse call, with the arguments of `sparge.attention`."""
    policy, substitute = layer.policy, None if is_compiling() else _THREAD.substitute
    attention: Callable[..., Any] = api.attention if call.part is None else call.part.attention
    if substitute is not None:
        attention = functools.partial(substitute, layer.name)
    is_quantized = policy.backend == "auto" and policy.quantization not in ("auto", "none")
    if is_quantized and call.part is None and (spans is not None or call.window is not None):
        attention = functools.partial(_unquantized_if_small, attention)
    if call.sinks is not None:
        attention = (with_sinks if substitute is None else with_dense_lse_sinks)(attention, call.sinks)
    return attention


def _unquantized_if_small(
    attention: Callable[..., Any], query: Tensor, key: Tensor, *tensors: Any, is_causal: bool, **options: Any
) -> Any:
    """Call `sparge.attention` without quantization if the visible keys of a sequence are below the crossover.

    `sparge.attention` runs such calls dense, except if a quantization is named. A policy names a quantization for the
    sparse calls alone.
    """
    kv_len, window = key.shape[2], options.get("window")
    keys = kv_len if window is None else keys_of_query(Window(*window), kv_len)
    is_below = functools.partial(dense_rules.is_below_crossover, query)
    if is_below(kv_len, is_causal=is_causal) or is_below(keys, is_causal=False):
        options["quantization"] = "none"
    return attention(query, key, *tensors, is_causal=is_causal, **options)


def _attend(
    layer: Layer,
    attention: Callable[..., Tensor],
    call: ModelCall,
    spans: tuple[Span, ...] | None,
    options: dict[str, Any],
) -> Tensor:
    """Call ``attention`` and count the call for the layer. Known ``spans`` replace the mask."""
    tensors, options = (call.query, call.key, call.value), {**options, "is_causal": call.is_causal}
    with contextlib.nullcontext() if is_compiling() else counters.for_layer(layer.name):
        if spans is not None:
            return attend_within(spans, *tensors, attention=attention, **options)
        return attention(*tensors, call.attn_mask, **options)
