"""Checks of options shared by calls and policies. Each raises "expected X, got Y"."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from sparge.options.common import QUANTIZATIONS, RENAMED_QUANTIZATIONS, PerHead, Quantization, check_range
from sparge.options.rules import DEFAULT_TOPK, Budget, Selection, TopK, make_unchecked
from sparge.options.scores import SCORES, Score

LAYOUTS = ("HND", "NHD")
ON_UNSUPPORTED = ("raise", "warn", "dense")
SKIPPED = ("auto", "mean", "drop")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of the choices."""
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{name}: expected one of {listed}, got {value!r}")


def check_flag(name: str, value: bool) -> None:
    """Raise TypeError unless ``value`` is a bool; "no" and [False] would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {value!r}")


def rule_from_topk(topk: PerHead | None) -> Selection:
    """Return the rule of a ``topk`` argument: a budget of the whole call, or `TopK` for one share per head."""
    if isinstance(topk, Tensor):
        return TopK.of(topk)
    if topk is not None:
        check_range("topk", topk, 0.0, 1.0, "(0, 1]")
    return make_unchecked(Budget, density=DEFAULT_TOPK if topk is None else topk)


def resolve_score(score: str | Score) -> Score:
    """Return a score given by name or as a value."""
    if isinstance(score, Score) and isinstance(score, SCORES.get(score.name, ())):
        return score
    if not isinstance(score, str):
        listed = " or ".join(repr(name) for name in SCORES)
        raise TypeError(f"score: expected {listed}, or a value such as Moment(...), got {type(score).__name__}")
    check_choice("score", score, tuple(SCORES))
    return SCORES[score]()


def resolve_quantization_name(quantization: str, stacklevel: int = 3) -> Quantization:
    """Return the current name of a quantization; warn about earlier names, ``stacklevel`` frames from here."""
    if isinstance(quantization, str) and quantization in RENAMED_QUANTIZATIONS:
        present = RENAMED_QUANTIZATIONS[quantization]
        if not torch.compiler.is_compiling():  # a warning cannot be traced
            message = f"quantization {quantization!r} was renamed to {present!r}; version 1.0 removes the old name"
            warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)
        return cast(Quantization, present)
    check_choice("quantization", quantization, QUANTIZATIONS)
    return cast(Quantization, quantization)


def check_indices(name: str, places: Sequence[int], total: int) -> None:
    """Raise ValueError for a layer or step outside of ``total``: a rule for it would have no effect."""
    missing = [place for place in places if not -total <= place < total]
    if missing:
        things, listed = name.removeprefix("dense_"), ", ".join(map(str, missing))
        raise ValueError(f"{name}: expected {things} below {total} (or from -{total} on), got {listed}")
