"""One attention call of a model: its sparse output, or None where it is to run dense on the framework's own attention.

All integrations meet here. They say where a call comes from (`Layer`) and what it is (SDPA's arguments); `decide` asks
the policy; the decision is counted. Deciding for dense costs a few microseconds and touches no tensor.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from sparge import api
from sparge.backends import base
from sparge.dispatch import call_cache, dense_rules, ops
from sparge.dispatch.dense_rules import Reason
from sparge.integrations.transformers.padding import attend_within, spans_of
from sparge.masks.geometry import BLOCK_Q, ceil_div
from sparge.masks.ordering import TokenOrder
from sparge.masks.window import Window, keys_of_query
from sparge.options import checks
from sparge.options.rules import Selection, TopCdf
from sparge.policy import Policy
from sparge.sinks import with_exact_sinks, with_sinks
from sparge.stats import counters


class Steps:
    """Where a denoising schedule stands.

    Attributes:
        dense: why the policy has the present step run dense, or None. It alone is read in calls: a compiled model is
            compiled twice at most, not once for each step.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.index, self.total = 0, 0
        self.dense: Reason | None = Reason.UNKNOWN_SCHEDULE

    def start(self, total: int) -> None:
        """A schedule of so many steps begins."""
        self.total = total
        self._go_to(0)
        warn_of_missing("dense_steps", self._policy.dense_steps, total)

    def advance(self) -> None:
        """A step is done."""
        self._go_to(self.index + 1)

    def _go_to(self, index: int) -> None:
        self.index = index
        self.dense = Reason.STEP if self._policy.is_dense_step(index, self.total) else None


@dataclass
class Layer:
    """Where calls come from.

    Attributes:
        name: what `sparge.stats` calls it; "" counts in the totals alone.
        policy: what goes sparse.
        dense: the policy's ``dense_layers`` name it.
        is_cross: it is known to be cross-attention.
        steps: the schedule, where the policy has rules about it.
        last: what was asked last, and the answer: a layer's calls are alike, and asking again takes longer.
        balance: how its heads are dealt to ranks that exchange them.
    """

    name: str
    policy: Policy
    dense: bool = False
    steps: Steps | None = None
    is_cross: bool = False
    last: tuple[Any, Reason | None] = field(default=(None, None), compare=False, repr=False)
    balance: Any = field(default=None, compare=False, repr=False)


class Rows(Protocol):
    """Queries of a call that is split by rows of blocks: a rank exchanges those that it has for those of its rows."""

    @property
    def total(self) -> int:
        """Of the whole call."""

    @property
    def are_enough(self) -> bool:
        """Whether each rank gets a row of blocks."""

    @property
    def span(self) -> tuple[int, int]:
        """Those of this rank's rows, [start, stop)."""

    def take(self, query: Tensor, order: tuple[Any, ...] | None) -> Tensor:
        """Queries (B, H, S, D) of this rank -> those of its rows, which are made along an order."""

    def give(self, output: Tensor, order: tuple[Any, ...] | None) -> Tensor:
        """The way back, for outputs."""


@dataclass(frozen=True)
class Part:
    """What of a call that several ranks make together one of them holds: some heads, or some queries, or both.

    Attributes:
        sizes: query and key that have as many heads and tokens as all ranks are to decide by, whatever is in them.
        attention: `sparge.attention` for it, in which a budget is that of all ranks.
        rows: how queries are split; None: they are not.
        mask: the one of all heads, by whose dimensions ranks decide: ranks have unequal numbers of heads, perhaps.
    """

    sizes: tuple[Tensor, Tensor]
    attention: Callable[..., Tensor]
    rows: Rows | None = None
    mask: Tensor | None = None


Substitute = Callable[..., Tensor]
"""Called with the name of the layer, then as `sparge.attention` is: query, key, value and keywords."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.substitute: Substitute | None = None


_THREAD = _Thread()


@contextmanager
def substituted(function: Substitute) -> Iterator[None]:
    """Calls of this thread that go sparse are handed to a function in place of `sparge.attention`, for evaluation.

    Compiled models do not notice.
    """
    before, _THREAD.substitute = _THREAD.substitute, function
    try:
        yield
    finally:
        _THREAD.substitute = before


_WARNED: set[str] = set()
_WARNING = threading.Lock()


def attend(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    is_self: bool | None = None,
    is_language: bool = False,
    window: tuple[int | None, int | None] | None = None,
    text: Sequence[tuple[int, int]] = (),
    grid: tuple[int, ...] | None = None,
    sinks: Tensor | None = None,
    most_keys: int | None = None,
    unsupported: str | None = None,
    part: Part | None = None,
) -> Tensor | None:
    """The output (B, H, S_q, D_v) of an SDPA call, heads first, or None when the framework is to run it; counted.

    It is sparse, or dense in 8 bits where a rule keeps it dense and the policy wants those so.

    Args:
        is_causal: aligned bottom-right, as in `sparge.attention`; may be combined with a mask.
        is_self: queries and keys are of one sequence; None goes by their lengths.
        is_language: the tokens are text in order, even if a mask rather than ``is_causal`` says so: the rules for
            causal attention hold (sink, diagonal), and fewer queries than keys are a chunk behind a prefix.
        window: as in `sparge.attention`, of a causal call.
        text: ranges of tokens that every row keeps besides the policy's, and that see all where that costs little.
        grid: sizes of the picture or video that all other tokens are, in the order of a raster.
        sinks: logits (H,) of attention sinks.
        most_keys: that the mask shows to a query, where the caller knows.
        unsupported: what the caller knows to keep the call from being sparse.
        part: what of a call of several ranks this is. All that is said of tokens is about the whole call.

    Raises:
        NotImplementedError: the call should be sparse, cannot be, and the policy says to raise.
    """
    kind = None
    if part is None and attn_mask is None and sinks is None and unsupported is None and not is_compiling():
        described = (dropout_p, is_causal, scale, enable_gqa, is_self, is_language, window, tuple(text), grid)
        kind = _kind_of(layer, query, key, value, described)
        found: tuple[call_cache.Runner, Policy] | None = call_cache.find(kind)
        if found is not None:
            with counters.within(layer.name):
                output, _ = found[0](query, key, value, None)
            return output
    whole_query, whole_key = (query, key) if part is None else part.sizes
    rows = None if part is None else part.rows
    dense = _why_dense(layer, whole_query, whole_key, is_self, is_language, is_causal)
    if dense is not None and not dense_rules.in_eight_bits(layer.policy, dense, query.device):
        dense_rules.count(dense, layer.name)
        return None
    reason = unsupported or dense_rules.foreign(query, key, value, attn_mask)
    if reason is None:
        query, key, value = (_autocast(tensor) for tensor in (query, key, value))
        attn_mask = None if attn_mask is None else unexpanded(_autocast(attn_mask), query)
        reason = dense_rules.unsupported_call(query, key, value, attn_mask, dropout_p, enable_gqa)
    if reason is None and part is not None and dense is None:
        if rows is not None and not rows.are_enough:
            dense_rules.count(Reason.CROSSOVER, layer.name, detail="fewer rows of blocks than ranks")
            return None
        reason = _unfit_for_parts(layer.policy.selection, rows, attn_mask)
    spans = None
    if reason is None and attn_mask is not None:
        if attn_mask.shape[-1:] == key.shape[2:3] and attn_mask.shape[0] in (1, query.shape[0]):
            spans = spans_of(attn_mask, layer.name)
        if spans is None and layer.policy.backend == "auto" and dense_rules.is_on_gpu(query):
            whole_mask = attn_mask if part is None or part.mask is None else part.mask
            reason = dense_rules.costly_mask(whole_query, whole_mask, over_all_blocks=dense is not None)
            if reason is None and dense_rules.is_small_under_mask(whole_query, whole_key, whole_mask):
                dense_rules.count(Reason.CROSSOVER, layer.name, detail=dense_rules.SQUARE_MASK)
                return None
        if reason is None and dense is None and _shows_little(layer.policy, query, key, most_keys):
            dense_rules.count(Reason.WINDOW, layer.name)
            return None
        if reason is None:
            reason = dense_rules.ambiguous_mask(attn_mask)
        if reason is None and spans is None and dense is None and layer.policy.skipped == "mean":
            obstacle = dense_rules.no_means(_of_four(attn_mask), query.shape[1] // key.shape[1])
            reason = None if obstacle is None else obstacle.word
    if reason is not None:
        if dense is None:
            refuse(layer, reason)
        else:
            dense_rules.count(dense, layer.name)
        return None
    if dense is None and window is not None and _is_narrow(layer.policy, query, key, window):
        dense = Reason.WINDOW
    if dense is not None:
        call = {"scale": scale, "enable_gqa": enable_gqa, "window": window}
        return _in_eight_bits(layer, dense, query, key, value, attn_mask, spans, is_causal, sinks, call)
    order, q_len = None, query.shape[2] if rows is None else rows.total
    if grid is not None and not is_causal and q_len == key.shape[2]:
        order = _order(layer.policy, grid, text, key.shape[2], attn_mask, spans)
    rules = is_language and not is_causal
    options = _options(layer.policy, scale, enable_gqa, rules=rules, is_causal=is_causal, is_ordered=order is not None)
    if window is not None:
        options["window"] = window
    if text and _costs_little(text, layer.policy.selection, q_len, is_causal=is_causal or is_language):
        options["exact_queries"] = list(text)
    keep = [*layer.policy.kept_ranges(key.shape[2]), *text]
    if kind is not None:
        options |= {"always_keep": keep or None, "order": order}
        with counters.within(layer.name):
            output, _, runner = api.resolve_and_run(query, key, value, is_causal=is_causal, **options)
        if runner is not None:
            call_cache.remember(kind, (runner, layer.policy))
        return output
    if rows is not None:
        query = rows.take(query, order)
        options["exact_queries"] = _within_rows(options.get("exact_queries", ()), rows)
    if order is not None:
        if rows is None:
            query, key, value = ops.all_along(query, key, value, *order)
        else:
            key, value = (ops.along(tensor, *order) for tensor in (key, value))
        if attn_mask is not None and spans is None:
            attn_mask = ops.along(_of_four(attn_mask).mT, *order).mT
    substitute = None if torch.compiler.is_compiling() else _THREAD.substitute
    attention: Callable[..., Any] = api.attention if part is None else part.attention
    if substitute is not None:
        attention = functools.partial(substitute, layer.name)
    if spans is not None and part is None and _names_eight_bits(layer.policy):
        attention = functools.partial(_dense_if_small, attention)
    if sinks is not None:
        attention = (with_sinks if substitute is None else with_exact_sinks)(attention, sinks)
    if torch.compiler.is_compiling():
        output = _attend(attention, query, key, value, attn_mask, spans, is_causal, keep, options)
    else:
        with counters.within(layer.name):
            output = _attend(attention, query, key, value, attn_mask, spans, is_causal, keep, options)
    if rows is not None:
        return rows.give(output, order)
    return output if order is None else ops.along(output, *order, undo=True)


def _kind_of(layer: Layer, query: Tensor, key: Tensor, value: Tensor, described: tuple[Any, ...]) -> Any:
    """Return the key under which a call without a mask is looked up; None if it must be resolved each time.

    The key contains the id of the policy, so the remembered value must hold a reference to it.

    Args:
        described: the other arguments of `attend`.
    """
    is_scheduled_dense = layer.steps is not None and layer.steps.dense is not None
    is_autocast = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    if is_scheduled_dense or is_autocast or _THREAD.substitute is not None:
        return None
    options = ("layer", id(layer.policy), layer.dense, layer.is_cross, *described)
    return call_cache.kind_of(query, key, value, None, None, None, options)


def _unfit_for_parts(rule: Selection, rows: Rows | None, attn_mask: Tensor | None) -> str | None:
    """What keeps a call from being computed by several ranks."""
    if rule.is_call_wide and rule.similarity_threshold is not None:
        return "a similarity threshold of a budget over several ranks"
    has_entries = rows is not None and attn_mask is not None and _of_four(attn_mask).shape[2] > 1
    return dense_rules.SQUARE_MASK if has_entries else None


def _within_rows(ranges: Sequence[tuple[int, int]], rows: Rows) -> list[tuple[int, int]]:
    """Ranges of a call's queries, counted from the first of a rank's."""
    start, stop = rows.span
    return [(max(a, start) - start, min(b, stop) - start) for a, b in ranges if a < stop and b > start]


def _names_eight_bits(policy: Policy) -> bool:
    """Whether a policy names 8 bits, but no backend: in `sparge.attention` that switches the crossover off, in a policy
    it does not."""
    return policy.backend == "auto" and policy.quantization not in ("auto", "none")


def _is_narrow(policy: Policy, query: Tensor, key: Tensor, window: tuple[int | None, int | None]) -> bool:
    """Whether a window shows fewer keys than the crossover has, where `sparge.attention` would not ask."""
    keys = keys_of_query(Window(*window), key.shape[2])
    return _names_eight_bits(policy) and keys < key.shape[2] and _is_small(query, keys, is_causal=False)


def _shows_little(policy: Policy, query: Tensor, key: Tensor, most_keys: int | None) -> bool:
    """Whether a mask shows each query fewer keys than the crossover has: dense, as a window that is known to be one."""
    if most_keys is None or policy.backend != "auto":
        return False
    return most_keys < key.shape[2] and _is_small(query, most_keys, is_causal=False)


def _is_small(query: Tensor, keys: int, *, is_causal: bool) -> bool:
    """Whether a call over so many keys is below the crossover of the backend that "auto" takes."""
    crossover = base.crossover_for(query.device.type, query.device.index, query.dtype)
    return base.is_below(crossover, query.shape[0] * query.shape[1], query.shape[2], keys, is_causal)


def _dense_if_small(
    attention: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    **options: Any,
) -> Any:
    """A sequence without its padding, dense in 16 bits below the crossover, as `sparge.attention` has it by itself."""
    call: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not _is_small(query, key.shape[2], is_causal=is_causal):
        return attention(query, key, value, **call, **options)
    told = {name: options[name] for name in ("window", "return_lse") if name in options}
    return api.dense(query, key, value, **call, **told, words=dense_rules.describe(Reason.CROSSOVER))


def _in_eight_bits(
    layer: Layer,
    reason: Reason,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    spans: tuple[tuple[int, int], ...] | None,
    is_causal: bool,
    sinks: Tensor | None,
    call: dict[str, Any],
) -> Tensor:
    """The output of a call that a rule keeps dense. No `Substitute` sees it, as none sees other dense calls."""
    options = {
        **call,
        "quantization": layer.policy.quantization,
        "backend": layer.policy.backend,
        "words": dense_rules.describe(reason, in_eight_bits=True),
    }
    attention = _over_all_blocks if sinks is None else with_sinks(_over_all_blocks, sinks)
    if torch.compiler.is_compiling():
        return _attend(attention, query, key, value, attn_mask, spans, is_causal, [], options)
    with counters.within(layer.name):
        return _attend(attention, query, key, value, attn_mask, spans, is_causal, [], options)


def _over_all_blocks(*tensors: Any, always_keep: None = None, **call: Any) -> Any:
    """`api.dense` for `_attend`, which speaks of blocks to keep."""
    del always_keep
    return api.dense(*tensors, **call)


def _order(
    policy: Policy,
    grid: tuple[int, ...],
    text: Sequence[tuple[int, int]],
    tokens: int,
    attn_mask: Tensor | None,
    spans: Sequence[tuple[int, int]] | None,
) -> TokenOrder | None:
    """Return the order to compute a call in; None to keep the tokens in place.

    Text must lie before or behind them, and a mask must be one over keys, which moves along; what `padding` cuts off
    must be text.
    """
    name = "hilbert" if policy.order == "auto" else policy.order
    count = math.prod(grid)
    start = 0
    for first, stop in text:
        if first == 0:
            start = stop
    if name == "row" or policy.always_keep or count + sum(stop - first for first, stop in text) != tokens:
        return None
    if any(first < start + count and start < stop for first, stop in text):
        return None
    if spans is not None:
        fits = all(first <= start and start + count <= stop for first, stop in spans)
    else:
        fits = attn_mask is None or _of_four(attn_mask).shape[2:] == (1, tokens)
    return TokenOrder(grid, name, start) if fits else None


def _of_four(attn_mask: Tensor) -> Tensor:
    """A mask with all its dimensions."""
    return attn_mask[(None,) * (4 - attn_mask.ndim)]


def unexpanded(attn_mask: Tensor, query: Tensor) -> Tensor:
    """A mask as it was before `expand` had sequences, heads or queries share its entries: kernels read each once."""
    for dim in range(-min(attn_mask.ndim, 4), -1):
        if attn_mask.stride(dim) == 0 and attn_mask.shape[dim] == query.shape[dim] > 1:
            attn_mask = attn_mask.narrow(dim, 0, 1)
    return attn_mask


EXACT_SHARE = 0.125
"""Of the blocks that are kept, what text may take that sees everything."""


def _costs_little(text: Sequence[tuple[int, int]], rule: Selection, tokens: int, *, is_causal: bool) -> bool:
    """Whether rows of text that see everything are a small part of the work; under `TopCdf` of a quarter of all."""
    amount = rule.amount
    density = 0.25 if isinstance(rule, TopCdf) else float(amount.mean() if isinstance(amount, Tensor) else amount)
    rows = ceil_div(tokens, BLOCK_Q)
    seen = 0
    for start, stop in text:
        first, last = start // BLOCK_Q, ceil_div(stop, BLOCK_Q)
        seen += (last - first) * (first + last + 1 if is_causal else 2 * rows)
    return seen <= EXACT_SHARE * density * rows * (rows + 1 if is_causal else 2 * rows)


def _options(
    policy: Policy, scale: float | None, enable_gqa: bool, *, rules: bool, is_causal: bool, is_ordered: bool
) -> dict[str, Any]:
    """Keywords of `sparge.attention`; with ``rules`` those of causal attention hold without causality."""
    sparsity = policy.selection
    if rules:
        sink = True if sparsity.sink is None else sparsity.sink
        diagonal = True if sparsity.diagonal is None else sparsity.diagonal
        sparsity = replace(sparsity, sink=sink, diagonal=diagonal)
    return {
        "scale": scale,
        "enable_gqa": enable_gqa,
        "sparsity": sparsity,
        "score": policy.score_of(is_ordered=is_ordered, is_causal=is_causal or rules),
        "quantization": policy.quantization,
        "skipped": "drop" if rules and policy.skipped == "auto" else policy.skipped,
        "backend": policy.backend,
    }


def _attend(
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    spans: tuple[tuple[int, int], ...] | None,
    is_causal: bool,
    keep: list[tuple[int, int]],
    options: dict[str, Any],
) -> Tensor:
    if spans is None:
        return attention(query, key, value, attn_mask, is_causal=is_causal, always_keep=keep or None, **options)
    return attend_within(spans, query, key, value, is_causal=is_causal, keep=keep, attention=attention, **options)


def aligned_top_left(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, str | None]:
    """Keys and values for causality as SDPA aligns it; or, third, why `attend` has nothing like it."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if q_len > kv_len:
        return key, value, "causal with more queries than keys"
    if q_len < kv_len:
        key, value = key[:, :, :q_len], value[:, :, :q_len]  # nobody sees the keys behind
    return key, value, None


def has_sizes(query: Tensor, key: Tensor) -> bool:
    """Whether there are heads and tokens to be counted; if not, the call is unsupported, if anything."""
    return not (query.is_nested or key.is_nested) and query.ndim == key.ndim == 4


def runs_dense(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    is_self: bool | None = None,
    is_language: bool = False,
    is_causal: bool = False,
    *,
    heads_at: int = 1,
    tokens_at: int = 2,
) -> bool:
    """Whether the framework is to run a call, counted if so; the other arguments are those of `attend`.

    Args:
        heads_at, tokens_at: their dimensions.
    """
    reason = _why_dense(layer, query, key, is_self, is_language, is_causal, heads_at, tokens_at)
    if reason is None or (
        layer.policy.dense == "8bit" and dense_rules.in_eight_bits(layer.policy, reason, query.device)
    ):
        return False
    if not is_compiling():
        counters.record(reason.words, layer.name)
    return True


def _why_dense(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    is_self: bool | None,
    is_language: bool,
    is_causal: bool,
    heads_at: int = 1,
    tokens_at: int = 2,
) -> Reason | None:
    """Why the policy has a call run dense; None: it does not, or there are no sizes to tell by."""
    if query.is_nested or key.is_nested:
        return None
    if is_compiling():
        reason = _by_policy(layer, query, key, is_self, is_language, is_causal, heads_at, tokens_at)
    else:
        asked = (query.shape, key.shape, query.device, _dtype(query), tokens_at, is_self, is_language, is_causal)
        known, reason = layer.last
        if known != asked:
            reason = _by_policy(layer, query, key, is_self, is_language, is_causal, heads_at, tokens_at)
            layer.last = (asked, reason)
    if reason is None and layer.steps is not None and has_sizes(query, key):
        reason = layer.steps.dense
    return reason


def _by_policy(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    is_self: bool | None,
    is_language: bool,
    is_causal: bool,
    heads_at: int,
    tokens_at: int,
) -> Reason | None:
    """What `decide` says, wherever in a schedule a call stands."""
    if not has_sizes(query, key):
        return None
    q_shape, kv_shape = query.shape, key.shape
    return dense_rules.by_policy(
        layer.policy,
        query.device,
        _dtype(query),
        q_shape[0] * q_shape[heads_at],
        q_shape[tokens_at],
        kv_shape[tokens_at],
        is_self=is_self,
        is_language=is_language,
        is_causal=is_causal or is_language,
        is_cross=layer.is_cross,
        is_dense_layer=layer.dense,
    )


def _dtype(query: Tensor) -> torch.dtype:
    """What a call is computed in, as far as it matters to a decision: on a CPU."""
    if query.is_cpu and torch.is_autocast_enabled("cpu"):  # to ask a device for its type takes six times as long
        return torch.get_autocast_dtype("cpu")
    return query.dtype


def _autocast(tensor: Tensor) -> Tensor:
    """A tensor as autocast hands it to SDPA."""
    if not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def refuse(layer: Layer, reason: str) -> None:
    """Count a call that cannot be sparse, and as the policy says raise, warn once for each reason, or say nothing."""
    message = f"an attention call cannot be sparse: {reason}"
    if layer.policy.on_unsupported == "raise":
        raise NotImplementedError(f"{message} (on_unsupported='warn' or 'dense' runs it dense)")
    dense_rules.count(Reason.UNSUPPORTED, layer.name, detail=reason)
    if layer.policy.on_unsupported == "warn" and not torch.compiler.is_compiling():
        _warn_once(reason, f"{message}; it runs dense", stacklevel=5)


def warn_of_missing(name: str, places: Sequence[int], total: int) -> None:
    """Say that a rule is about layers or steps that are not there, where another run may well have them."""
    try:
        checks.check_places(name, places, total)
    except ValueError as error:
        _warn_once(str(error), str(error), stacklevel=4)


def _warn_once(reason: str, message: str, stacklevel: int) -> None:
    """Warn, once for each reason and process."""
    with _WARNING:
        if reason in _WARNED:
            return
        _WARNED.add(reason)
    warnings.warn(f"sparge: {message}", stacklevel=stacklevel)
