"""Run torch's scaled_dot_product_attention sparsely inside a scope, according to a policy.

Nothing is patched: a ``TorchFunctionMode`` intercepts the calls of its own thread, however the function was imported,
and torch.compile guards on it. Each torch function in the scope takes about 3 us longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode

from sparge.dispatch.reasons import Reason, count
from sparge.integrations.calls import attend
from sparge.integrations.decisions import has_sizes, runs_dense
from sparge.integrations.function_mode import run_within
from sparge.integrations.layers import Layer, check_policy, warn_if_training
from sparge.integrations.model_call import ModelCall, RankPart, aligned_top_left
from sparge.masks.causal_bias import alignment_of, lengths_of
from sparge.policy import Policy

Function = TypeVar("Function", bound=Callable[..., Any])

_SDPA = F.scaled_dot_product_attention


class _Thread(threading.local):
    def __init__(self) -> None:
        self.deciding = False  # an instance attribute, because torch.compile guards on where it is stored


_THREAD = _Thread()


def run_unintercepted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a framework's own attention for a dense call, without interception by an enclosing scope."""
    if torch.compiler.is_compiling() or not torch._C._len_torch_function_stack():
        return function(*args, **kwargs)  # no scope is open; writing `deciding` while tracing would break guards
    before, _THREAD.deciding = _THREAD.deciding, True
    try:
        return function(*args, **kwargs)
    finally:
        _THREAD.deciding = before


@dataclass(frozen=True)
class Tokens:
    """Description of the tokens of an attention call.

    Attributes:
        is_self: whether queries and keys belong to one sequence; None infers this from their lengths.
        text: key ranges [start, stop) to keep in addition to the policy's ranges; a stop of None means the last key.
        keys: the number of keys of a call that has these tokens; None: any number.
        is_text: whether all tokens are text.
        seam: the number of this rank's tokens in the first of two streams that were sharded separately; None: there is
            only one stream.
        ranks: the tokens of each rank, if they are known and differ.
    """

    is_self: bool | None = None
    text: Sequence[tuple[int, int | None]] = ()
    keys: int | None = None
    is_text: bool = False
    seam: int | None = None
    ranks: tuple[Tokens, ...] = ()


UNKNOWN = Tokens()

Recorder = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function that is called in place of attention, with query, key and value (B, H, S, D), and returns the output."""


@dataclass
class Scope:
    """Information about the SDPA calls inside a scope.

    Attributes:
        layer: the layer that makes the calls.
        tokens: the tokens of each call, in the order of calls; later calls use the last entry. Empty if unknown. (The
            default is not ``(UNKNOWN,)``, because torch.compile cannot trace objects of this library as defaults.)
        grid: sizes of the image or video that all tokens except text form.
        module: the module that makes the calls, if it is known.
        calls: the number of calls so far.
        mode: the mode that intercepts the calls; None if the integration passes the calls itself.
        recorder: called in place of attention; None to compute attention.
        called_with: the processor of the module and its backend, if the module is from diffusers.
    """

    layer: Layer
    tokens: Sequence[Tokens] = ()
    grid: tuple[int, ...] | None = None
    module: nn.Module | None = None
    calls: int = 0
    mode: SparseMode | None = None
    recorder: Recorder | None = None
    called_with: Any = None

    def next_call(self, key: Tensor, *, tokens_first: bool = False) -> Tokens:
        """Count a call with these keys, (B, H, S, D) or (B, S, H, D), and return its tokens."""
        self.calls += 1
        if not self.tokens:
            return UNKNOWN
        tokens = self.tokens[min(self.calls, len(self.tokens)) - 1]
        return tokens if tokens.keys is None or tokens.keys == key.shape[1 if tokens_first else 2] else UNKNOWN


def next_sparse_call(
    scope: Scope, query: Tensor, key: Tensor, *, is_causal: bool = False, tokens_first: bool = False
) -> Tokens | None:
    """Count a call, and return its tokens, or None if the policy leaves the call to the framework.

    Sizes are not checked for causal calls, because the number of keys may change (`aligned_top_left`).
    """
    tokens = scope.next_call(key, tokens_first=tokens_first)
    if tokens.is_text:
        count(Reason.TEXT, scope.layer.name)
        return None
    is_dense = not is_causal and runs_dense(scope.layer, query, key, tokens.is_self, tokens_first=tokens_first)
    return None if is_dense else tokens


class SparseMode(TorchFunctionMode):
    """Run the SDPA calls of this thread by the policy of a scope. The first call sets ``was_used``."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.scope = scope
        self.was_used = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        thread = _THREAD
        if func is not _SDPA or thread.deciding:
            if func is F.multi_head_attention_forward and not thread.deciding:  # its SDPA runs below this mode
                count(Reason.INSIDE_MODULE, self.scope.layer.name)
            return func(*args, **kwargs)
        self.was_used = True
        thread.deciding = True  # enclosing modes must not decide again
        try:
            output = sparse_sdpa(self.scope, *args, **kwargs)
            return func(*args, **kwargs) if output is None else output
        finally:
            thread.deciding = False


def sparse_sdpa(
    scope: Scope,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    tokens: Tokens | None = None,
    part: RankPart | None = None,
) -> Tensor | None:
    """Run an SDPA call sparsely (with top-left causality and CausalBias), or return None for a dense call.

    Args:
        tokens: the tokens of the call, if the caller has counted it and checked the policy (`next_sparse_call`).
        part: this rank's part of a call over several ranks.
    """
    if scope.recorder is not None:
        return scope.recorder(query, key, value)
    alignment = None if attn_mask is None else alignment_of(attn_mask)
    causal = is_causal or alignment is not None
    if tokens is None:
        tokens = next_sparse_call(scope, query, key, is_causal=causal)
    elif tokens.is_text:
        count(Reason.TEXT, scope.layer.name)
        return None
    if tokens is None:
        return None
    is_self, text, unsupported = tokens.is_self, [], None
    if is_causal and attn_mask is not None:
        unsupported = "a mask and is_causal"  # SDPA forbids it; some of its kernels take it
    elif has_sizes(query, key):
        if causal and query.shape[2] != key.shape[2]:
            is_self = False if is_self is None else is_self
        if alignment is not None and lengths_of(attn_mask) != (query.shape[2], key.shape[2]):
            unsupported = "shape of the mask"
        elif causal and alignment != "bottom-right":
            key, value, unsupported = aligned_top_left(query, key, value)
        ends = [(start, key.shape[2] if stop is None else min(stop, key.shape[2])) for start, stop in tokens.text]
        text = [(start, stop) for start, stop in ends if start < stop]
    mask = attn_mask if alignment is None or unsupported else None
    call = ModelCall(query, key, value, mask, dropout_p, causal, scale, enable_gqa, is_self, text=text, part=part)
    call.grid, call.unsupported = scope.grid, unsupported
    output = attend(scope.layer, call)
    if output is not None and scope.module is not None:
        warn_if_training(scope.module)
    return output


class replace_sdpa:
    """Run SDPA calls sparsely by a policy, as a context manager or a decorator.

    This works with every model that calls ``torch.nn.functional.scaled_dot_product_attention``. Calls keep SDPA's
    semantics (masks, GQA, top-left causality, autocast). Cross-attention, short calls and unsupported calls run dense
    on SDPA. `sparge.stats` returns the counts and reasons. Scopes may be nested (the innermost decides), entered again,
    and used in several threads; a scope affects only the thread that entered it.

    Decorated generators and coroutines are inside the scope only while they run. They may enter torch function modes
    themselves, such as ``with torch.device(...):`` or another ``replace_sdpa``, which are suspended with them.

    Args:
        policy: decides which calls are sparse; ``Policy()`` by default. Rules for layers and steps need `enable`.

    Raises:
        ValueError: the policy has rules about layers or steps.

    Example:
        >>> import torch, sparge
        >>> sparge.reset_stats()
        >>> q = torch.randn(1, 2, 4096, 16)
        >>> with sparge.replace_sdpa(sparge.Policy(topk=0.25)):
        ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        >>> sparge.stats().sparse
        1
    """

    def __init__(self, policy: Policy | None = None) -> None:
        policy = check_policy(policy)
        if policy.has_step_rules or policy.has_layer_rules:
            raise ValueError(
                "policy: expected no rules about steps or layers (SDPA calls have no steps and no layer names; use "
                f"sparge.enable(model, policy)), got {policy}"
            )
        self.policy = policy

    def __enter__(self) -> replace_sdpa:
        self._new_mode().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        _pop_mode()

    def __call__(self, function: Function) -> Function:
        if isinstance(function, type) or not callable(function):
            got = f"the class {function.__name__}" if isinstance(function, type) else repr(function)
            raise TypeError(f"replace_sdpa: expected a function to decorate, got {got}")
        return cast(Function, run_within(self._new_mode, function))

    def _new_mode(self) -> SparseMode:
        return SparseMode(Scope(Layer("", self.policy)))
