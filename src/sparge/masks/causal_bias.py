"""torch's ``CausalBias``: a mask that is a name. Its memory is never written, so nobody must read it as numbers."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

Alignment = Literal["top-left", "bottom-right"]


def alignment_of(attn_mask: Any) -> Alignment | None:
    """Where torch's ``causal_upper_left`` and ``causal_lower_right`` align causality; None for any other mask."""
    if attn_mask is None or type(attn_mask) is Tensor:
        return None
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(attn_mask, CausalBias):
        return None
    return "top-left" if attn_mask.variant == CausalVariant.UPPER_LEFT else "bottom-right"


def lengths_of(causal_bias: Any) -> tuple[int, int]:
    """Queries and keys of a ``CausalBias``. Before torch 2.7 it refuses to tell its shape."""
    return causal_bias.seq_len_q, causal_bias.seq_len_kv
