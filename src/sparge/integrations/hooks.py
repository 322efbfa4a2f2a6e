"""Hooks around attention modules, and the scopes that they open and close: what diffusers and transformers share."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from sparge.backends.base import constant
from sparge.integrations.sdpa import Scope, SparseMode

KEY: Any = "sparge"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope] = []


THREAD = _Thread()
"""Scopes of the attention modules this thread is in, opened and closed by hooks."""


def hooked(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Put the hooks of an attention module in place, and say how to remove them.

    Under one name for all modules: torch's own functions number hooks, torch.compile guards on the numbers, and would
    compile every block of a model anew.

    Args:
        before: called with module, args and kwargs.
        after: called with module, args and output; with None for an output after an error.
    """
    module._forward_pre_hooks[KEY] = before
    module._forward_pre_hooks_with_kwargs[KEY] = True
    module._forward_hooks[KEY] = after
    module._forward_hooks_always_called[KEY] = True
    return functools.partial(_unhook, module)


def _unhook(module: nn.Module) -> None:
    for hooks in (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_always_called,
    ):
        cast(dict[Any, Any], hooks).pop(KEY, None)


def open_mode(scope: Scope) -> None:
    """Have the SDPA calls of this thread belong to the scope, the innermost one."""
    scope.mode = SparseMode(scope)
    scope.mode.__enter__()


def close_scope() -> Scope:
    """End the innermost scope of this thread, and its mode if it has one."""
    scope = THREAD.scopes.pop()
    if scope.mode is not None:
        scope.mode.__exit__(None, None, None)
    return scope


class Passes:
    """Scopes that a forward pass left open are closed before the next: torch calls no hook after Ctrl-C.

    Args:
        is_paused: whether passes are to be taken for parts of another one.
    """

    def __init__(self, is_paused: Callable[[], bool] | None = None) -> None:
        self._is_paused = is_paused
        self._local = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return Passes, (self._is_paused,)

    def begin(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and not (self._is_paused is not None and self._is_paused()):
            self.unwind()
            self._local.depth = len(THREAD.scopes)

    def end(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and not (self._is_paused is not None and self._is_paused()):
            self._local.depth = None

    def unwind(self) -> None:
        depth = getattr(self._local, "depth", None)
        while depth is not None and len(THREAD.scopes) > depth:
            close_scope()
        self._local.depth = None


@constant
def parameters_of(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of what a model's forward takes."""
    return _parameters_of(kind.forward)


@functools.cache
def _parameters_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]
