"""Hooks of attention modules, and the scopes that these hooks open and close. Used for diffusers and transformers."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from sparge.backends.base import constant
from sparge.integrations.sdpa import Scope, SparseMode

KEY: Any = "sparge"
State = TypeVar("State")


class _Thread(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope] = []


THREAD = _Thread()
"""The scopes that are open in this thread, innermost last. Hooks of attention modules open and close them."""


def add_hooks(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Register two hooks of a module's forward and return a function that removes them.

    All modules use the same key. With torch's own functions, each hook would get another number. torch.compile guards
    on these numbers and would compile every block of a model separately.

    Args:
        before: called with module, args and kwargs.
        after: called with module, args and output; the output is None after an error.
    """
    for table, value in zip(_hook_tables(module), (before, True, after, True), strict=True):
        table[KEY] = value
    return functools.partial(_remove_hooks, module)


def _remove_hooks(module: nn.Module) -> None:
    for table in _hook_tables(module):
        table.pop(KEY, None)


def _hook_tables(module: Any) -> tuple[dict[Any, Any], ...]:
    """Return torch's tables of hooks and of their options."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    return before, module._forward_pre_hooks_with_kwargs, after, module._forward_hooks_always_called


def open_scope(scope: Scope, *, has_mode: bool, is_tracing: bool) -> None:
    """Open a scope in this thread. With ``has_mode``, a `SparseMode` intercepts the SDPA calls inside the scope.

    Attention modules are not nested. A scope that is still open belongs to an interrupted pass, because torch calls no
    hooks after Ctrl-C, and is closed first, except while torch.compile is tracing (``is_tracing``).
    """
    scopes = THREAD.scopes
    if not is_tracing and scopes:
        close_scopes()
    scopes.append(scope)
    if has_mode:
        scope.mode = SparseMode(scope)
        scope.mode.__enter__()


def close_scope() -> Scope:
    """Close the innermost scope of this thread, and its mode if it has one."""
    scope = THREAD.scopes.pop()
    if scope.mode is not None:
        scope.mode.__exit__(None, None, None)
    return scope


def close_scopes() -> None:
    """Close all scopes of this thread."""
    while THREAD.scopes:
        close_scope()


class PassState(Generic[State]):
    """A value of the current forward pass of each thread.

    Compiled programs share one value, set by the latest pass of any thread: torch.compile up to torch 2.11 loses writes
    to thread-local objects.

    Args:
        initial: the value of each thread before its first pass. A copy starts with it again.
    """

    def __init__(self, initial: State) -> None:
        self._initial = self._compiled = initial
        self._local = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return PassState, (self._initial,)

    def set(self, value: State) -> None:
        self._compiled = value
        if not torch.compiler.is_compiling():
            self._local.value = value

    def get(self, *, is_tracing: bool) -> State:
        """Return the value of this thread, or the shared value while torch.compile is tracing."""
        if is_tracing:
            return self._compiled
        value: State = getattr(self._local, "value", self._initial)
        return value


def arguments_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a module by name."""
    return {**dict(zip(parameters_of(type(module)), args, strict=False)), **kwargs}


@constant
def parameters_of(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the parameter names of a model's forward."""
    return _parameters_of(kind.forward)


@functools.cache
def _parameters_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def without_compile(model: Any) -> Any:
    """Return the module inside a ``torch.compile`` wrapper; other objects are returned unchanged."""
    return getattr(model, "_orig_mod", model)
