"""Functions that transformers makes masks of, taken apart: they are made anew for every mask, known by their code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def captured(function: Any, maker: str, *arguments: Any) -> dict[str, Any]:
    """What a mask function has captured, by name, if transformers' function of that name made it; else nothing.

    Args:
        arguments: with which one like it is made: all of them have the same code.
    """
    from transformers import masking_utils

    make = getattr(masking_utils, maker, None)
    code = getattr(function, "__code__", None)
    if make is None or code is None or make(*arguments).__code__ is not code:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))


def causality_of(mask_function: Callable[..., Any]) -> tuple[bool, int | None]:
    """Whether a function is transformers' own for causal masks, and how many keys a query sees if they slide."""
    from transformers.masking_utils import causal_mask_function

    if mask_function is causal_mask_function:
        return True, None
    parts = captured(mask_function, "and_masks", causal_mask_function).get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not causal_mask_function:
        return False, None
    window = captured(parts[0], "sliding_window_overlay", 1).get("sliding_window")
    return isinstance(window, int), window if isinstance(window, int) else None
