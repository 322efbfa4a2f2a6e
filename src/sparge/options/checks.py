"""Checks of options that calls and policies share, with errors of the form "expected X, got Y"."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor

from sparge.options.common import (
    QUANTIZATIONS,
    RENAMED_QUANTIZATIONS,
    Layout,
    OnUnsupported,
    PerHead,
    Quantization,
    Skipped,
    check_range,
)
from sparge.options.rules import DEFAULT_TOPK, Budget, Selection, TopK, make_unchecked
from sparge.options.scores import SCORES, Score

LAYOUTS: tuple[str, ...] = get_args(Layout)
ON_UNSUPPORTED: tuple[str, ...] = get_args(OnUnsupported)
SKIPPED: tuple[str, ...] = get_args(Skipped)
_LIBRARY_CODE = (str(Path(__file__).parents[1]), "<string>")
"""Prefixes of the file names of this library's code; "<string>" is that of a dataclass's ``__init__``."""


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of the choices."""
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{name}: expected one of {listed}, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a bool. Other values are rejected, because "no" and [False] are truthy."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {value!r}")


def rule_from_topk(topk: PerHead | None) -> Selection:
    """Return the rule of a ``topk`` argument: a `Budget` for a number, a `TopK` for a per-head tensor."""
    topk = DEFAULT_TOPK if topk is None else topk
    check_range("topk", topk, 0.0, 1.0, "(0, 1]")
    return make_unchecked(TopK, topk=topk) if isinstance(topk, Tensor) else make_unchecked(Budget, density=topk)


def resolve_score(score: str | Score) -> Score:
    """Return the score with a name, or check a `Score` and return it."""
    if isinstance(score, Score) and isinstance(score, SCORES.get(score.name, ())):
        return score
    if not isinstance(score, str):
        listed = " or ".join(repr(name) for name in SCORES)
        raise TypeError(f"score: expected {listed}, or a value such as Moment(...), got {type(score).__name__}")
    check_choice("score", score, tuple(SCORES))
    return SCORES[score]()


def resolve_quantization_name(quantization: str) -> Quantization:
    """Return the current name of a quantization, and warn about old names."""
    if isinstance(quantization, str) and quantization in RENAMED_QUANTIZATIONS:
        current = RENAMED_QUANTIZATIONS[quantization]
        message = f"quantization {quantization!r} was renamed to {current!r}; version 1.0 removes the old name"
        warn_caller(message, DeprecationWarning)
        return cast(Quantization, current)
    check_choice("quantization", quantization, QUANTIZATIONS)
    return cast(Quantization, quantization)


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line that called this library. Does nothing under torch.compile, which cannot trace warnings."""
    if torch.compiler.is_compiling():
        return
    frame, stacklevel = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARY_CODE):
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(message, category, stacklevel=stacklevel)


def check_indices(name: str, indices: Sequence[int], total: int) -> None:
    """Raise ValueError if an index of a layer or step is out of range, because a rule for it would have no effect."""
    out_of_range = [index for index in indices if not -total <= index < total]
    if out_of_range:
        things, listed = name.removeprefix("dense_"), ", ".join(map(str, out_of_range))
        raise ValueError(f"{name}: expected {things} below {total} (or from -{total} on), got {listed}")
