"""Masks of transformers, in SDPA's form. Causal, window and padding masks also carry a description of their parts.

transformers creates new mask functions for each mask. They are recognized by their code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparge.integrations.transformers import packing
from sparge.integrations.transformers.mask_functions import captured

CAUSAL = "_sparge_causal"
"""Attribute of a mask that consists of bottom-right causality, padding and a sliding window: its `CausalParts`."""

COMPILED = -1
"""The version of every mask in a compiled program, which torch.compile traces from its creation to its use."""


class CausalParts(NamedTuple):
    """The parts of a causal mask.

    Attributes:
        version: version of the mask when it consisted of these parts.
        padding: visible keys (B, 1, 1, S_k); None: all.
        window: the number of keys that a query sees; None: all up to its own.
    """

    version: int | None = None
    padding: Tensor | None = None
    window: int | None = None


def parts_of(mask: Tensor | None) -> CausalParts | None:
    """Return the parts of a mask; None if they are unknown, or if the mask was written to since."""
    parts: CausalParts | None = getattr(mask, CAUSAL, None)
    if mask is None or parts is None:
        return None
    version = COMPILED if torch.compiler.is_compiling() else mask._version
    return parts if parts.version == version else None


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
    """Return the mask that transformers makes for SDPA, with `CausalParts` or the bounds of segments attached."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = causal_mask_function if mask_function is None else mask_function
    mask: Tensor | None
    arguments = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    is_causal, window = mask_function is causal_mask_function and kv_offset == 0, None
    if not torch.compiler.is_compiling():
        bounds = packing.bounds_of_mask(*arguments)
        if bounds is not None:
            with torch.inference_mode(False):
                mask = sdpa_mask(*arguments, **kwargs)
            if mask is not None and not mask.is_inference():
                setattr(mask, packing.BOUNDS, (mask._version, bounds))
            return mask
        is_causal, window = causality_of(mask_function)
    ends_together = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    has_all_keys = attention_mask is None or attention_mask.shape[-1] == kv_offset + kv_length
    if not (is_causal and ends_together and has_all_keys):
        mask = sdpa_mask(*arguments, **kwargs)
        return mask
    if torch.compiler.is_compiling():
        mask = sdpa_mask(*arguments, **kwargs)
        if mask is not None:
            padding = None if attention_mask is None else attention_mask[:, None, None, :].to(torch.bool)
            setattr(mask, CAUSAL, CausalParts(COMPILED, padding))
        return mask
    with torch.inference_mode(False):  # a tensor of inference mode has no version: writes to it would go unnoticed
        mask = sdpa_mask(*arguments, **kwargs)
        padding = None
        if attention_mask is not None:
            padding = attention_mask[:, None, None, kv_offset:].to(torch.bool, copy=True)
    if mask is not None and not mask.is_inference():
        setattr(mask, CAUSAL, CausalParts(mask._version, padding, window))
    return mask


def bottom_right(q_len: int, kv_len: int, device: torch.device, window: int | None) -> Tensor | None:
    """Return a causal mask (1, 1, S_q, S_k) with its `CausalParts`; None if ``is_causal`` is enough.

    Args:
        window: the number of keys that a query sees; None: all up to its own.
    """
    if q_len == kv_len and window is None:
        return None
    with torch.inference_mode(False):
        mask = torch.ones(1, 1, q_len, kv_len, dtype=torch.bool, device=device).tril(kv_len - q_len)
        if window is not None:
            mask = mask.triu(kv_len - q_len - window + 1)
    setattr(mask, CAUSAL, CausalParts(mask._version, None, window))
    return mask


def causality_of(mask_function: Callable[..., Any]) -> tuple[bool, int | None]:
    """Return whether a function is transformers' own for causal masks, and the sliding window's number of keys."""
    from transformers.masking_utils import causal_mask_function

    if mask_function is causal_mask_function:
        return True, None
    parts = captured(mask_function, "and_masks", causal_mask_function).get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not causal_mask_function:
        return False, None
    window = captured(parts[0], "sliding_window_overlay", 1).get("sliding_window")
    return isinstance(window, int), window if isinstance(window, int) else None
