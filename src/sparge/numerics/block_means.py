"""Block means: under ``skipped="mean"``, each skipped block enters the softmax as one key.

A block of n keys with mean key k and mean value v contributes exp(scale q . k + ln n) v, as if each of its keys were k
and each of its values v. A block can be replaced if all queries of a query block see the same keys of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.masks.geometry import BLOCK_K, Shape
from sparge.masks.visibility import block_edges, key_blocks, window_edges
from sparge.masks.window import Window


class BlockMeans(NamedTuple):
    """The mean of every key block over its visible tokens, and the bias of its score.

    Fields:
        key, value: (B, Hkv, kv_blocks, D | Dv); 0 where either is not finite.
        bias: (B, Hkv, kv_blocks), ln of the number of visible keys; -inf if there are none; NaN where the mean key or
            value is not finite, so that NaN reaches the query blocks that use the mean, and no others.
    """

    key: Tensor
    value: Tensor
    bias: Tensor


def block_means(key: Tensor, value: Tensor, keys_seen: Tensor | None) -> BlockMeans:
    """Average (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv) over the keys that ``keys_seen`` (B | 1, Hkv | 1, Sk) marks.

    Means are float32, or float64 for float64 tokens.
    """
    seen = torch.ones(1, 1, key.shape[2], dtype=torch.bool, device=key.device) if keys_seen is None else keys_seen
    counts = key_blocks(seen, False).sum(-1)  # [b, h, kv_blocks]
    key_means, value_means = (_means(tokens, keys_seen, counts) for tokens in (key, value))
    finite = key_means.isfinite().all(-1) & value_means.isfinite().all(-1)
    return BlockMeans(
        torch.where(finite[..., None], key_means, 0.0),
        torch.where(finite[..., None], value_means, 0.0),
        torch.where(finite, counts.to(key_means.dtype).log(), torch.nan),
    )


def _means(tokens: Tensor, seen: Tensor | None, counts: Tensor) -> Tensor:
    if seen is not None:
        tokens = torch.where(seen[..., None], tokens, 0)
    padding = -tokens.shape[2] % BLOCK_K
    blocks = F.pad(tokens, (0, 0, 0, padding)).unflatten(2, (-1, BLOCK_K))  # [B, Hkv, kv_blocks, 64, D]
    return blocks.sum(3, dtype=torch.promote_types(tokens.dtype, torch.float32)) / counts.clamp(min=1)[..., None]


def replaceable_blocks(shape: Shape, window: Window, device: torch.device) -> Tensor:
    """Return the blocks that a mean can replace, (q_blocks, kv_blocks): those that no edge of the window cuts.

    In causal attention, these are the key blocks before the first query of the query block.
    """
    edges = window_edges(shape, window, device)
    _, _, first_key, key_end = block_edges(shape, device)
    return (key_end.clamp(max=shape.kv_len) - 1 <= edges.inner_last) & (first_key >= edges.inner_first)


def mean_bias(means: BlockMeans, kept: Tensor, shape: Shape, window: Window) -> Tensor:
    """Return the bias added to the scores of mean keys, with the shape of ``kept``, (B, H, q_blocks, kv_blocks).

    The bias is ln of the number of keys that a mean represents, or -inf if the block is kept or cannot be replaced.
    """
    replaced = ~kept & replaceable_blocks(shape, window, kept.device)
    bias = means.bias.repeat_interleave(shape.group, 1)
    return torch.where(replaced, bias[:, :, None], -torch.inf)


def unfit_for_means(attn_mask: Tensor | None, group: int) -> str | None:
    """Return the reason why a four-dimensional mask rules out block means; None if it does not.

    A mean must be the same for all queries of a query block and for all heads that share its keys.
    """
    if attn_mask is None:
        return None
    got = None
    if attn_mask.dtype != torch.bool:
        got = "an additive one"
    elif attn_mask.shape[2] > 1:
        got = "a full (S_q x S_k) one"
    elif attn_mask.shape[1] > 1 and group > 1:
        got = "one that differs among heads that share keys"
    return None if got is None else f"skipped='mean': expected no attn_mask, or a bool one over keys, got {got}"
