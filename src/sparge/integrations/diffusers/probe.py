"""Where the tokens of the picture lie among the keys of every attention call, found by trying.

A model runs twice, the second time on other latents, and attention gives the queries back both times, so that no token
learns of another: whatever key has changed belongs to the picture, everything else is text, a reference or sound. It
takes the time of two forward passes without attention, once for each kind of input.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparge.integrations.sdpa import Recorder, Tokens

MAX_RANGES = 8
"""Stretches of other tokens among the keys of a call; with more of them they are interleaved, and none is kept."""

CHANGED = 1e-3
"""Of the largest number of a key: what a token of the picture differs by, and rounding does not."""


class _Prints(threading.local):
    """What this thread is recording: for each layer its calls, for each call a print of queries and keys."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[Tensor, Tensor]]] | None = None


_PRINTS = _Prints()


def recorder_of(layer: str) -> Recorder | None:
    """What records the calls of a layer in place of attention, while a model is probed; None otherwise."""
    calls = _PRINTS.calls
    if calls is None:
        return None

    def record(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        calls.setdefault(layer, []).append((_print(query), _print(key)))
        return F.pad(query, (0, value.shape[3] - query.shape[3]))

    return record


def is_probing() -> bool:
    """Whether this thread is inside of `probe`."""
    return _PRINTS.calls is not None


LATENTS = ("hidden_states", "sample", "x", "vision_tokens")
"""What models call the argument that they denoise; with another name it is the first that holds numbers, or a picture
of codes."""


def probe(run: Callable[..., Any], arguments: dict[str, Any], layers: Iterable[str]) -> dict[str, tuple[Tokens, ...]]:
    """For each layer that made calls, what their tokens are.

    Args:
        run: the model's forward.
        arguments: what the model was called with.
        layers: those that may make calls.

    Raises:
        ValueError: none of the arguments can be what is denoised.
        Exception: whatever the model raises for other latents.
    """
    latents = next((name for name in (*LATENTS, *arguments) if _has_numbers(arguments.get(name))), None)
    if latents is None:
        raise ValueError("no argument that holds numbers")
    before = _recorded(run, arguments)
    after = _recorded(run, {**arguments, latents: _other(arguments[latents])})
    return {
        layer: tuple(_tokens(*pair) for pair in zip(before[layer], after.get(layer, ()), strict=False))
        for layer in layers
        if layer in before
    }


def _recorded(run: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, list[tuple[Tensor, Tensor]]]:
    with _recording() as calls, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        run(**{name: _kept(value) for name, value in arguments.items()})
    return calls


@contextmanager
def _recording() -> Any:
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {}
    _PRINTS.calls = calls
    try:
        yield calls
    finally:
        _PRINTS.calls = None


def _print(tokens: Tensor) -> Tensor:
    """(S, D) of (B, H, S, D): the first sequence's, over all heads."""
    return tokens[0].float().mean(0)


def _tokens(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Tokens:
    if before[1].shape != after[1].shape:
        return Tokens(None, (), before[1].shape[0])
    queries, keys = (_changed(*pair).tolist() for pair in zip(before, after, strict=True))
    if not any(queries):
        return Tokens(False, (), len(keys)) if any(keys) else Tokens(None, (), len(keys), is_text=True)
    if not any(keys):
        return Tokens(False, (), len(keys))
    others = _stretches([not changed for changed in keys])
    return Tokens(True, others if len(others) <= MAX_RANGES else (), len(keys))


def _changed(before: Tensor, after: Tensor) -> Tensor:
    """(S,), True where a token's print has changed."""
    largest = torch.maximum(before.abs(), after.abs()).amax()
    return (before - after).abs().amax(-1) > CHANGED * largest


def _stretches(flags: list[bool]) -> tuple[tuple[int, int], ...]:
    """Ranges [start, stop) of True."""
    edges = [place for place, (last, this) in enumerate(pairwise([False, *flags, False])) if last != this]
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _has_numbers(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.ndim >= 3
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(map(_has_numbers, values))


def _other(latents: Any) -> Any:
    """Other latents of the same kind: every number is another one."""
    if isinstance(latents, Tensor):
        if not latents.is_floating_point():
            return latents.flip(tuple(range(1, latents.ndim)))
        generator = torch.Generator().manual_seed(0)
        return torch.randn(latents.shape, generator=generator).to(latents) - latents  # which may be that very noise
    if isinstance(latents, dict):
        return {name: _other(value) for name, value in latents.items()}
    return type(latents)(map(_other, latents)) if isinstance(latents, (list, tuple)) else latents


def _kept(value: Any) -> Any:
    """An argument that a forward pass may change without the caller noticing: caches and other objects are copied."""
    plain = (Tensor, nn.Module, str, int, float, bool, type(None), torch.dtype, torch.device, torch.Generator)
    if isinstance(value, plain):
        return value
    if isinstance(value, dict):
        return {name: _kept(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_kept, value))
    return copy.deepcopy(value)
