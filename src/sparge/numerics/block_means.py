"""What a skipped block becomes under ``skipped="mean"``: one key of the softmax.

A block of n keys whose mean is k and whose values have the mean v enters as exp(q . k scale + ln n) v: what attention
would give if each of its keys were k and each of its values v. A row of blocks can have that only of a block whose keys
all its queries see alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.masks.geometry import BLOCK_K, Shape
from sparge.masks.visibility import block_edges, key_blocks, row_edges
from sparge.masks.window import Window


class BlockMeans(NamedTuple):
    """The means of every key block over its visible tokens, and what their scores get besides.

    Fields:
        key, value: (B, Hkv, kv_blocks, D | Dv); 0 where either is not finite.
        bias: (B, Hkv, kv_blocks), ln of the number of visible keys; -inf without any; NaN where a key or a value is not
            finite: it reaches the rows that have the block, and no others.
    """

    key: Tensor
    value: Tensor
    bias: Tensor


def block_means(key: Tensor, value: Tensor, keys_seen: Tensor | None) -> BlockMeans:
    """Means of (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv) over the keys that ``keys_seen`` (B | 1, Hkv | 1, Sk) leaves.

    They are float32, or float64 where the tokens are.
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
    missing = -tokens.shape[2] % BLOCK_K
    blocks = F.pad(tokens, (0, 0, 0, missing)).unflatten(2, (-1, BLOCK_K))
    return blocks.sum(3, dtype=torch.promote_types(tokens.dtype, torch.float32)) / counts.clamp(min=1)[..., None]


def replaceable_blocks(shape: Shape, window: Window, device: torch.device) -> Tensor:
    """(q_blocks, kv_blocks): all queries of the row see the block's keys alike; if causal, it lies before them all."""
    rows = row_edges(shape, window, device)
    _, _, first_key, key_end = block_edges(shape, device)
    return (key_end.clamp(max=shape.kv_len) - 1 <= rows.inner_last) & (first_key >= rows.inner_first)


def mean_bias(means: BlockMeans, kept: Tensor, shape: Shape, window: Window) -> Tensor:
    """What the scores of mean keys get besides, for each row of blocks: (B, H, q_blocks, kv_blocks), like ``kept``.

    It is ln of how many keys a mean stands for, and -inf where the row keeps the block or cannot have its mean.
    """
    replaced = ~kept & replaceable_blocks(shape, window, kept.device)
    bias = means.bias.repeat_interleave(shape.group, 1)
    return torch.where(replaced, bias[:, :, None], -torch.inf)


def unfit_for_means(attn_mask: Tensor | None, group: int) -> str | None:
    """Why a mask of four dimensions leaves no mean of a block's keys that is one for all its queries; None: it does."""
    if attn_mask is None:
        return None
    got = None
    if attn_mask.dtype != torch.bool:
        got = "an additive one"
    elif attn_mask.shape[2] > 1:
        got = "one with an entry per query"
    elif attn_mask.shape[1] > 1 and group > 1:
        got = "one that differs among heads that share keys"
    return None if got is None else f"skipped='mean': expected no attn_mask, or a bool one over keys, got {got}"
