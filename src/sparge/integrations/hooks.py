"""Hooks around attention modules and the scopes that they open and close, shared by diffusers and transformers."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from sparge.backends.base import constant
from sparge.integrations.sdpa import Scope, SparseMode
from sparge.stats import counters

KEY: Any = "sparge"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope] = []


THREAD = _Thread()
"""The scopes that are open in this thread, innermost last. Hooks of attention modules open and close them."""


def hooked(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Register the hooks of an attention module and return a function that removes them.

    All modules use the same key. torch's own functions number their hooks, torch.compile guards on the numbers, and
    every block of a model would be compiled separately.

    Args:
        before: called with module, args and kwargs.
        after: called with module, args and output; the output is None after an error.
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
    """Route the SDPA calls of this thread to the scope, until it is closed."""
    scope.mode = SparseMode(scope)
    scope.mode.__enter__()


def close_scope() -> Scope:
    """Close the innermost scope of this thread, and its mode if it has one."""
    scope = THREAD.scopes.pop()
    if scope.mode is not None:
        scope.mode.__exit__(None, None, None)
    return scope


class Passes:
    """Hooks of a model that close scopes left open by an interrupted forward pass: torch calls no hook after Ctrl-C.

    Args:
        is_paused: returns True while forward passes are part of another one.
    """

    def __init__(self, is_paused: Callable[[], bool] | None = None) -> None:
        self._is_paused = is_paused
        self._local = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return Passes, (self._is_paused,)

    def _is_active(self) -> bool:
        return not torch.compiler.is_compiling() and not (self._is_paused is not None and self._is_paused())

    def begin(self, *_: Any) -> None:
        if self._is_active():
            self.unwind()
            self._local.depth = len(THREAD.scopes)

    def end(self, *_: Any) -> None:
        if self._is_active():
            self._local.depth = None

    def unwind(self) -> None:
        depth = getattr(self._local, "depth", None)
        while depth is not None and len(THREAD.scopes) > depth:
            close_scope()
        self._local.depth = None


class TrainingNotice:
    """Warn when a layer runs sparse in training mode, which it does where no gradient flows through it.

    Args:
        layer: the name of the layer in `sparge.stats`.
    """

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self._before: int | None = None

    def open(self, module: nn.Module) -> None:
        if not torch.compiler.is_compiling():
            self._before = counters.sparse_calls(self._layer) if is_training(module) else None

    def close(self) -> None:
        if not torch.compiler.is_compiling() and self._before is not None:
            if counters.sparse_calls(self._layer) > self._before:
                warn_of_training()
            self._before = None


def is_training(module: nn.Module) -> bool:
    """Return whether a module is in training mode and gradients are enabled; False while torch.compile traces."""
    return not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled()


@functools.cache
def warn_of_training() -> None:
    """Warn, once per process, that a model in training mode runs sparse."""
    warnings.warn(
        "sparge: attention runs sparse in training mode, because no gradient flows through it (frozen layers): call "
        "sparge.disable(model) to train on dense features, or model.eval() if the features should be sparse",
        stacklevel=3,
    )


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
