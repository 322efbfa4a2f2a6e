"""Checks of options that calls and policies share. Each raises "expected X, got Y"."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from sparge.options.common import QUANTIZATIONS, RENAMED_QUANTIZATIONS, PerHead, Quantization, check_range
from sparge.options.rules import DEFAULT_TOPK, Budget, Selection, TopK, trusted
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
    """Raise TypeError unless it is a bool: "no" and [False] would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {value!r}")


def by_share(topk: PerHead | None) -> Selection:
    """What the plain knob stands for: one share is a budget of the whole call, one for each head belongs to rows."""
    if isinstance(topk, Tensor):
        return TopK.of(topk)
    if topk is not None:
        check_range("topk", topk, 0.0, 1.0, "(0, 1]")
    return trusted(Budget, density=DEFAULT_TOPK if topk is None else topk)


def resolve_score(score: str | Score) -> Score:
    """A score by name, or as given."""
    if isinstance(score, Score) and isinstance(score, SCORES.get(score.name, ())):
        return score
    if not isinstance(score, str):
        listed = " or ".join(repr(name) for name in SCORES)
        raise TypeError(f"score: expected {listed}, or a value such as Moment(...), got {type(score).__name__}")
    check_choice("score", score, tuple(SCORES))
    return SCORES[score]()


def resolve_quantization_name(quantization: str, stacklevel: int = 3) -> Quantization:
    """A quantization by its present name, with a note about names of earlier versions at so many frames from here."""
    if isinstance(quantization, str) and quantization in RENAMED_QUANTIZATIONS:
        present = RENAMED_QUANTIZATIONS[quantization]
        if not torch.compiler.is_compiling():  # a warning cannot be traced
            message = f"quantization {quantization!r} is called {present!r} now; the old name will go in version 1.0"
            warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)
        return cast(Quantization, present)
    check_choice("quantization", quantization, QUANTIZATIONS)
    return cast(Quantization, quantization)


def check_places(name: str, places: Sequence[int], total: int) -> None:
    """Raise ValueError for a layer or step that is none of ``total``: a rule about it would do nothing."""
    missing = [place for place in places if not -total <= place < total]
    if missing:
        things, listed = name.removeprefix("dense_"), ", ".join(map(str, missing))
        raise ValueError(f"{name}: expected {things} below {total} (or from -{total} on), got {listed}")
