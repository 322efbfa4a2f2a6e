"""Create transformers' masks in SDPA's format, and attach a description of their parts where it is known.

transformers creates new mask functions for each mask, so known functions are recognized by their code objects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

PARTS = "_sparge_parts"
"""Attribute of a mask that consists of bottom-right causality and other known parts: its `MaskParts`."""

COMPILED = -1
"""The version of every mask in a compiled program, where torch.compile traces the mask from creation to use."""

Bounds = tuple[Sequence[int], Sequence[int]]
"""The bounds of segments among the queries and among the keys."""


class MaskParts(NamedTuple):
    """The parts of a causal mask.

    Attributes:
        version: version counter of the mask when the parts were attached.
        padding: visible keys (B, 1, 1, S_k); None: all.
        window: the number of keys that a query sees; None: all keys up to its own.
        segments: the bounds of segments within which the mask is causal; never together with padding or a window.
    """

    version: int
    padding: Tensor | None = None
    window: int | None = None
    segments: Bounds | None = None


def parts_of(mask: Tensor | None) -> MaskParts | None:
    """Return the parts of a mask; None if they are unknown, or if the mask has been modified since."""
    parts: MaskParts | None = getattr(mask, PARTS, None)
    if mask is None or parts is None:
        return None
    return parts if parts.version == (COMPILED if is_compiling() else mask._version) else None


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return the mask that transformers makes for SDPA, with its `MaskParts` attached if they are known."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = causal_mask_function if mask_function is None else mask_function
    arguments = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    segments, window = None, None
    if is_compiling():
        is_causal = mask_function is causal_mask_function and kv_offset == 0
    else:
        segments = bounds_of_mask(*arguments)
        is_causal, window = causality_of(mask_function)
    ends_together = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    has_all_keys = attention_mask is None or attention_mask.shape[-1] == kv_offset + kv_length
    mask: Tensor | None
    if segments is None and not (is_causal and ends_together and has_all_keys):
        mask = sdpa_mask(*arguments, **kwargs)
        return mask
    # Inference tensors have no version counter, so modifications could not be detected.
    with contextlib.nullcontext() if is_compiling() else torch.inference_mode(False):
        mask = sdpa_mask(*arguments, **kwargs)
        padding = None
        if attention_mask is not None and segments is None:
            padding = attention_mask[:, None, None, kv_offset:].to(torch.bool, copy=not is_compiling())
    if mask is not None and (is_compiling() or not mask.is_inference()):  # torch.compile cannot trace `is_inference`
        version = COMPILED if is_compiling() else mask._version
        setattr(mask, PARTS, MaskParts(version, padding, window, segments))
    return mask


def bottom_right(q_len: int, kv_len: int, device: torch.device, window: int | None) -> Tensor | None:
    """Return a causal mask (1, 1, S_q, S_k) with its `MaskParts`; None if ``is_causal`` is enough.

    Args:
        window: the number of keys that a query sees; None: all keys up to its own.
    """
    if q_len == kv_len and window is None:
        return None
    with torch.inference_mode(False):
        mask = torch.ones(1, 1, q_len, kv_len, dtype=torch.bool, device=device).tril(kv_len - q_len)
        if window is not None:
            mask = mask.triu(kv_len - q_len - window + 1)
    setattr(mask, PARTS, MaskParts(mask._version, None, window))
    return mask


def causality_of(mask_function: Callable[..., Any]) -> tuple[bool, int | None]:
    """Return whether a mask function is causal, with or without a sliding window, and the window's width or None."""
    from transformers.masking_utils import causal_mask_function

    if mask_function is causal_mask_function:
        return True, None
    window = closure_of(_combined_with_causality(mask_function), "sliding_window_overlay", 1).get("sliding_window")
    return (True, window) if isinstance(window, int) else (False, None)


def bounds_of_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
) -> Bounds | None:
    """Return the segment bounds of a mask that is causal within segments; None for other masks.

    Reads the tensors that the mask function has captured: the documents of a sequence, the left padding of chunks.
    """
    within = _combined_with_causality(mask_function)
    stop = kv_offset + kv_length
    if within is None or not isinstance(q_offset, int) or q_offset + q_length != stop:
        return None
    packed = closure_of(within, "packed_sequence_mask_function", torch.empty(0))
    chunked = closure_of(within, "chunked_overlay", 1, torch.empty(0))
    if packed and batch_size == 1 and q_length == kv_length:
        counts = packed["packed_sequence_mask"][0].unique_consecutive(return_counts=True)[1]
        edges = [0, *counts.cumsum(0).tolist()]
    elif chunked and not bool(chunked["left_padding"].any()):
        edges = [*range(0, stop, chunked["chunk_size"]), stop]
    else:
        return None
    if attention_mask is not None and not bool(attention_mask.all()):
        return None
    bounds_q, bounds_k = ([max(edge - offset, 0) for edge in edges] for offset in (q_offset, kv_offset))
    return bounds_q, bounds_k


def _combined_with_causality(mask_function: Callable[..., Any]) -> Any:
    """Return f if the mask function is ``and_masks`` of ``causal_mask_function`` and f; None otherwise."""
    from transformers.masking_utils import causal_mask_function

    functions = closure_of(mask_function, "and_masks", causal_mask_function).get("mask_functions", ())
    others = [function for function in functions if function is not causal_mask_function]
    return others[0] if len(functions) == 2 and len(others) == 1 else None


def closure_of(function: Any, maker: str, *arguments: Any) -> dict[str, Any]:
    """Return the closure variables of a mask function by name; an empty dict if ``maker`` did not create the function.

    Args:
        maker: the name of a function in ``transformers.masking_utils``. All mask functions that it creates have the
            same code object.
        arguments: valid arguments for ``maker``.
    """
    from transformers import masking_utils

    make = getattr(masking_utils, maker, None)
    code = getattr(function, "__code__", None)
    if make is None or code is None or make(*arguments).__code__ is not code:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))
