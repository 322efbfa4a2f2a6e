"""Access to torch's ``CausalBias``, a mask without elements: its memory is uninitialized and must not be read."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

Alignment = Literal["top-left", "bottom-right"]


def alignment_of(attn_mask: Any) -> Alignment | None:
    """Return the alignment of torch's ``causal_upper_left`` or ``causal_lower_right``, or None for any other mask."""
    if attn_mask is None or type(attn_mask) is Tensor:
        return None
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(attn_mask, CausalBias):
        return None
    return "top-left" if attn_mask.variant == CausalVariant.UPPER_LEFT else "bottom-right"


def lengths_of(causal_bias: Any) -> tuple[int, int]:
    """Return the numbers of queries and keys of a ``CausalBias``, whose shape is not accessible before torch 2.7."""
    return causal_bias.seq_len_q, causal_bias.seq_len_kv
