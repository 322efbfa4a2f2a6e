"""Helpers of `prediction` and `softmax`: visibility and bias of each query and key, smoothed keys, per-head values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparge.call import Call
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape
from sparge.masks.visibility import allowed_elements
from sparge.options.common import per_head


class ElementMask(NamedTuple):
    """``allowed`` is True for keys that a query sees, ``bias`` is added to the scores; both (B, H, Sq, Sk)."""

    allowed: Tensor
    bias: Tensor


def element_mask(call: Call, device: torch.device) -> ElementMask:
    """Combine the window of a call, aligned bottom-right, with its bool or additive mask."""
    shape, attn_mask = call.shape, call.attn_mask
    full = (shape.batch, shape.heads, shape.q_len, shape.kv_len)
    allowed = torch.ones(full, dtype=torch.bool, device=device)
    bias = torch.zeros(full, dtype=torch.float64, device=device)
    positions = torch.arange(shape.q_len, device=device)[:, None] + shape.causal_offset
    keys = torch.arange(shape.kv_len, device=device)
    if call.window.left is not None:
        allowed &= keys >= positions - call.window.left
    if call.window.right is not None:
        allowed &= keys <= positions + call.window.right
    if attn_mask is not None:
        allowed &= allowed_elements(attn_mask)
        if attn_mask.dtype != torch.bool:
            bias = torch.where(allowed, attn_mask.double(), 0.0)
    return ElementMask(allowed, bias)


def visible_blocks(allowed: Tensor) -> Tensor:
    """Return (B, H, q_blocks, kv_blocks): True where some query of the block sees some key of the block."""
    q_blocks = [
        torch.stack([tile.any(-1).any(-1) for tile in q_block.split(BLOCK_K, dim=3)], -1)
        for q_block in allowed.split(BLOCK_Q, dim=2)
    ]
    return torch.stack(q_blocks, 2)


def visible_keys(allowed: Tensor, kv_heads: int) -> Tensor:
    """Return (B, Hkv, Sk): True for keys that some query of some head of the group sees."""
    return allowed.any(2).unflatten(1, (kv_heads, -1)).any(2)


def smooth_key(key: Tensor, keys_seen: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the per-channel mean over the visible, finite tokens. Return (smoothed, mean (B, Hkv, 1, D)).

    The softmax does not change, because q . (k - mean) differs from q . k by the same number for every key.
    """
    usable = keys_seen[..., None] & key.isfinite().all(-1, keepdim=True)
    count = usable.sum(2, keepdim=True).clamp(min=1)
    mean = torch.where(usable, key, 0.0).sum(2, keepdim=True) / count
    return torch.where(keys_seen[..., None], key - mean, 0.0), mean


def value_of_head(value: float | Tensor | None, head: int, shape: Shape) -> float | None:
    """Return one head's entry of a per-head value; None if the value is None."""
    return None if value is None else float(per_head(value, shape.heads, torch.device("cpu"))[head])
