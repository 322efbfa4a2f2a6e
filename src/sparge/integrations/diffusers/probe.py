"""Find the image tokens among the keys of every attention call by running the model twice.

The second run uses different latents. In both runs, attention returns its queries, so no token depends on another
token. Keys that change between the runs belong to the image; all others are text, references or sound. A probe costs
two forward passes without attention, once per kind of input.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from sparge.integrations.sdpa import Recorder, Tokens

LATENTS = ("hidden_states", "sample", "x", "vision_tokens")
"""Names of the argument with the latents. In a model without them, it is the first argument that may be latents."""
MAX_RANGES = 8
"""Maximum number of ranges of other tokens in the keys of a call. If there are more (interleaved), none is kept."""
MIN_CHANGE = 1e-3
"""Smallest change of an image token, relative to the largest entry of all fingerprints. Rounding errors are smaller."""
_THREAD = threading.local()
"""While this thread probes a model, ``calls`` has the fingerprints of queries and keys of each call, by layer."""


def recorder_of(layer: str) -> Recorder | None:
    """Return a function that records a layer's calls in place of attention; None unless a model is being probed."""
    calls: dict[str, list[tuple[Tensor, Tensor]]] | None = getattr(_THREAD, "calls", None)
    if calls is None:
        return None

    def record(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        calls.setdefault(layer, []).append((_fingerprint(query), _fingerprint(key)))
        return F.pad(query, (0, value.shape[3] - query.shape[3]))

    return record


def probe(run: Callable[..., Any], arguments: dict[str, Any], layers: Iterable[str]) -> dict[str, tuple[Tokens, ...]]:
    """Return the tokens of each call of ``run(**arguments)``, for each of the layers that made calls.

    Raises:
        ValueError: no argument can be the latents.
        Exception: the model may raise any error for the changed latents.
    """
    latents = next((name for name in (*LATENTS, *arguments) if _may_be_latents(arguments.get(name))), None)
    if latents is None:
        raise ValueError("expected an argument with latents, got none")
    before = _recorded(run, arguments)
    after = _recorded(run, {**arguments, latents: _changed_latents(arguments[latents])})
    return {
        layer: tuple(_tokens(*pair) for pair in zip(before[layer], after.get(layer, ()), strict=False))
        for layer in layers
        if layer in before
    }


def _recorded(run: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Run a model and return the fingerprints of its calls by layer."""
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {}
    _THREAD.calls = calls
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            run(**{name: _copy_of(value) for name, value in arguments.items()})
    finally:
        _THREAD.calls = None
    return calls


def _fingerprint(tokens: Tensor) -> Tensor:
    """Return the mean over all heads of the first sequence, (B, H, S, D) -> (S, D)."""
    return tokens[0].float().mean(0)


def _tokens(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Tokens:
    """Return the tokens of a call from the fingerprints of its queries and keys in both runs."""
    if before[1].shape != after[1].shape:
        return Tokens(None, (), before[1].shape[0])
    queries, keys = (_changed(*pair).tolist() for pair in zip(before, after, strict=True))
    if not any(queries):
        return Tokens(False, (), len(keys)) if any(keys) else Tokens(None, (), len(keys), is_text=True)
    if not any(keys):
        return Tokens(False, (), len(keys))
    others = ranges_of([not changed for changed in keys])
    return Tokens(True, others if len(others) <= MAX_RANGES else (), len(keys))


def _changed(before: Tensor, after: Tensor) -> Tensor:
    """Return a bool tensor (S,), True for tokens whose fingerprint has changed."""
    largest = torch.maximum(before.abs(), after.abs()).amax()
    return (before - after).abs().amax(-1) > MIN_CHANGE * largest


def ranges_of(flags: list[bool]) -> tuple[tuple[int, int], ...]:
    """Return the ranges [start, stop) in which all flags are True."""
    edges = [index for index, (last, this) in enumerate(pairwise([False, *flags, False])) if last != this]
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _may_be_latents(value: Any) -> bool:
    """Return whether an argument contains floating-point numbers, or a tensor with at least 3 dimensions."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return any(tensor.is_floating_point() or tensor.ndim >= 3 for tensor in tensors)


def _changed_latents(latents: Any) -> Any:
    """Return latents of the same shape and dtype in which every value differs."""

    def different(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.is_floating_point():
            return leaf.flip(tuple(range(1, leaf.ndim)))
        generator = torch.Generator().manual_seed(0)
        return torch.randn(leaf.shape, generator=generator).to(leaf) - leaf  # the latents may be this noise

    return tree_map(different, latents)


def _copy_of(argument: Any) -> Any:
    """Copy an argument, because a forward pass may modify it. Tensors, modules and generators are not copied."""
    kept = (Tensor, nn.Module, torch.Generator)
    return tree_map(lambda leaf: leaf if isinstance(leaf, kept) else copy.deepcopy(leaf), argument)
