"""What a call over several ranks asks for, checked once: the same on every rank, whatever part of it a rank computes.

Whether it is sparse is decided by the sizes of the largest part, which all ranks know: ranks that decided by their own
sizes could wait for each other for ever.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from sparge.backends import base
from sparge.call import Call
from sparge.dispatch import call_cache, dense_rules, reasons, validation
from sparge.dispatch.call_cache import as_hashable
from sparge.dispatch.gradients import needs_grad_of
from sparge.dispatch.reasons import Reason
from sparge.dispatch.resolve import positively_scaled
from sparge.masks.geometry import Shape
from sparge.masks.window import Window
from sparge.options import checks
from sparge.options.common import PerHead
from sparge.options.rules import Selection, Sparsity, trusted

Found = TypeVar("Found")


@dataclass(frozen=True)
class Options:
    """The arguments of `sparge.attention` that every mode takes, as they were given."""

    is_causal: bool
    scale: float | None
    enable_gqa: bool
    topk: PerHead | None
    sparsity: Sparsity | None
    score: Any
    quantization: Any
    layout: Any
    always_keep: Sequence[tuple[int, int]] | None
    exact_queries: Sequence[tuple[int, int]] | None
    skipped: Any
    backend: str
    window: tuple[int | None, int | None] | None = None

    @classmethod
    def among(cls, names: dict[str, Any]) -> Options:
        """Those found among the arguments of a function, by their names."""
        return cls(**{field.name: names[field.name] for field in fields(cls) if field.name in names})


@dataclass(frozen=True)
class Request:
    """A checked call.

    Attributes:
        call: of the whole: all heads, all tokens. Its sparsity is `Dense` where it runs dense.
        reason: why it does, None where it is sparse.
        backend: resolved.
        asked: the backend as the caller named it.
        found: what `once` made. Requests of equal calls are one object.
    """

    call: Call
    reason: Reason | None
    backend: str
    asked: str
    found: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """Return what follows from the request and a key, made when it is first asked for."""
        if key not in self.found:
            self.found[key] = make()
        return cast(Found, self.found[key])

    @property
    def words(self) -> str:
        """What a dense call is counted as."""
        assert self.reason is not None
        return reasons.describe(self.reason)


def request(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    *,
    mode: Hashable,
    largest: Callable[[Shape], Shape],
    total: int | None = None,
    heads: int | None = None,
    attn_mask: Tensor | None = None,
    with_lse: bool = False,
    is_merged: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Request]:
    """Check a call of which this rank has some tokens, or some heads. An equal one is looked up.

    Args:
        mode: what else the request depends on: the ranks, and how tokens or heads lie on them.
        largest: the sizes of the largest part that a rank computes, from those of the whole call.
        total: tokens on all ranks, of queries and keys; None: what is here is what is asked about.
        heads: those of which rules may have numbers, by default those that are here.
        attn_mask: of the whole call.
        with_lse: the LSE is read.
        is_merged: parts are put together by their LSEs.

    Returns:
        The tensors heads first, and the request.

    Raises:
        TypeError, ValueError: an argument is not what was expected.
        NotImplementedError: gradients, head_dim or device that cannot be served.
    """
    kind = known = None
    if attn_mask is None:
        kind, known = _find(query, key, value, options, (mode, total, heads, with_lse, is_merged))
    if known is not None:
        if options.layout == "NHD":
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return query, key, value, known
    strides = [tensor.stride(-1) for tensor in (query, key, value)] if kind is not None else []
    checks.check_flag("is_causal", options.is_causal)
    quantization = checks.resolve_quantization_name(options.quantization)
    query, key, value, shape = validation.check_query_key_value(query, key, value, options.layout, options.enable_gqa)
    if total is not None and shape.q_len != shape.kv_len:
        raise ValueError(f"key: expected as many tokens here as the query has, {shape.q_len}, got {shape.kv_len}")
    if is_merged and quantization == "int8_fp8_fast":
        raise NotImplementedError(
            "quantization: expected 'int8_fp8', 'int8_fp16' or 'none' where parts are merged by their LSE (it is rough "
            "without exponentials), got 'int8_fp8_fast'"
        )
    whole = shape if total is None else replace(shape, q_len=total, kv_len=total)
    given_scale = validation.check_scale(options.scale, shape.head_dim)
    query, scale = positively_scaled(query, given_scale)
    obstacle = dense_rules.unsupported(shape, 0.0, needs_grad_of(query, key, value))
    if obstacle is not None:
        raise NotImplementedError(obstacle.message)
    window = validation.resolve_window(options.window, options.is_causal, whole.q_len, whole.kv_len)
    rule = validation.resolve_sparsity(options.topk, options.sparsity, heads or whole.heads)
    backend = base.resolve(options.backend, query.device)
    part = largest(whole)
    asked = options.backend
    reason = dense_rules.by_arguments(part, window, rule, quantization, asked, backend, query.device, query.dtype)
    has_mask = attn_mask is not None
    resolved = base.resolve_quantization(quantization, backend, query.device, has_mask=has_mask)
    if is_merged and resolved == "int8_fp8_fast":
        resolved = "int8_fp8"
    if reason in (Reason.CROSSOVER, Reason.WINDOW):
        resolved = "none"
    is_causal = window.right == 0
    call = Call(
        shape=whole,
        is_causal=is_causal,
        scale=scale,
        sparsity=rule if reason is None else None,
        score=checks.resolve_score(options.score),
        always_keep=validation.check_always_keep(options.always_keep, whole.kv_len),
        exact_queries=validation.check_exact_queries(options.exact_queries, whole.q_len),
        quantization=resolved,
        pv_threshold=rule.pv_threshold if reason is None and isinstance(rule, Selection) else None,
        attn_mask=validation.check_attn_mask(attn_mask, whole, query.device),
        skipped=validation.resolve_skipped(options.skipped, is_causal, attn_mask, whole),
        window=window,
        exact_lse=with_lse or is_merged,
    )
    asked_for = Request(call, reason, backend, asked)
    # Tensors that are copied first, and old names, which warn, are resolved each time.
    is_plain = strides == [1, 1, 1] and quantization == options.quantization and scale == given_scale
    if is_plain and not call.has_per_head_numbers:
        call_cache.remember(kind, asked_for)
    return query, key, value, asked_for


def _find(query: Tensor, key: Tensor, value: Tensor, options: Options, mode: Hashable) -> tuple[Any, Any]:
    """Return what a request without a mask depends on, None for an unusual call, and the request if it is known."""
    given = {**vars(options), "always_keep": as_hashable(options.always_keep)}
    given["exact_queries"] = as_hashable(options.exact_queries)
    return call_cache.find(query, key, value, None, tuple(given.values()), ("ranks", mode))


def of_heads(call: Call, heads: Tensor | slice) -> Call:
    """A call's numbers for each head, for some of its heads alone. Its shape is not changed."""
    if not call.has_per_head_numbers:
        return call
    rule = call.sparsity
    if isinstance(rule, Selection):
        rule = rule_of_heads(rule, heads)
    return replace(call, sparsity=rule, pv_threshold=_cut(call.pv_threshold, heads))


def rule_of_heads(rule: Selection, heads: Tensor | slice) -> Selection:
    """A rule's numbers for some heads alone."""
    names = (rule.amount_field, "similarity_threshold", "pv_threshold")
    numbers = {name: getattr(rule, name) for name in ("min_blocks", "sink", "diagonal")}
    return trusted(type(rule), **numbers, **{name: _cut(getattr(rule, name), heads) for name in names})


def _cut(value: PerHead | None, heads: Tensor | slice) -> PerHead | None:
    if not isinstance(value, Tensor):
        return value
    if isinstance(heads, Tensor):
        value = value.to(heads.device)  # numbers may lie on the host, a deal of heads does not
    return value.flatten()[heads]


def of_piece(call: Call, start: int, stop: int, heads: int, kv_heads: int) -> Call:
    """The call of queries ``start`` to ``stop`` of a sequence over the keys that they may see: all, or those before.

    Raises:
        NotImplementedError: a window, or a diagonal without causality, which are aligned with the last key.
    """
    shape = call.shape
    kv_len = stop if call.is_causal else shape.kv_len
    if not call.is_causal and (call.window != Window() or _keeps_diagonal(call)) and stop - start != shape.q_len:
        got = "diagonal=True" if call.window == Window() else f"window={tuple(call.window)}"
        raise NotImplementedError(
            "window, diagonal: expected causal attention where ranks keep their queries (ulysses_attention takes any), "
            f"got {got} without causality"
        )
    exact = [(max(first, start) - start, min(last, stop) - start) for first, last in call.exact_queries]
    always = [(first, min(last, kv_len)) for first, last in call.always_keep]
    mask = call.attn_mask
    return replace(
        call,
        shape=Shape(shape.batch, heads, kv_heads, stop - start, kv_len, shape.head_dim, shape.value_dim),
        exact_queries=tuple(pair for pair in exact if pair[0] < pair[1]),
        always_keep=tuple(pair for pair in always if pair[0] < pair[1]),
        attn_mask=mask if mask is None or mask.shape[3] == 1 else mask[..., :kv_len],
    )


def _keeps_diagonal(call: Call) -> bool:
    return isinstance(call.sparsity, Selection) and call.sparsity.keeps_diagonal(call.is_causal)


def check_lengths(lengths: Sequence[int] | None, own: int, rank: int, ranks: int) -> tuple[int, ...]:
    """Tokens of every rank; by default as many as here.

    Raises:
        TypeError: they are no ints.
        ValueError: they are not those of so many ranks, or not what this rank has.
    """
    if lengths is None:
        return (own,) * ranks
    try:
        found = tuple(operator.index(length) for length in lengths)
    except TypeError as error:
        raise TypeError(f"lengths: expected an int for each of {ranks} ranks, got {lengths!r}") from error
    if len(found) != ranks or min(found) < 1:
        raise ValueError(f"lengths: expected a number above 0 for each of {ranks} ranks, got {tuple(lengths)}")
    if found[rank] != own:
        raise ValueError(f"lengths: expected {own} for rank {rank}, which has so many tokens, got {found[rank]}")
    return found


def check_key_mask(attn_mask: Tensor | None, total: int) -> None:
    """Raise unless a mask is one of keys alone: it must mean the same on every rank, whatever queries that has."""
    if attn_mask is not None and (
        not isinstance(attn_mask, torch.Tensor)
        or attn_mask.dtype != torch.bool
        or attn_mask.ndim != 4
        or attn_mask.shape[1:3] != (1, 1)
    ):
        got = f"{attn_mask.dtype} {tuple(attn_mask.shape)}" if isinstance(attn_mask, Tensor) else type(attn_mask)
        raise NotImplementedError(
            f"attn_mask: expected None or a bool mask of all keys, (B, 1, 1, {total}), one for all ranks, got {got}"
        )
