"""Helpers for tests of skipped P V products: inputs that skip some, and the skipped share computed from the scores."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sparge
from conftest import BLOCK_K, BLOCK_Q, make_qkv, visible_elements

THRESHOLD = -1.0
ROWS = 64
"""Number of queries whose P V products are skipped together."""
LENGTHS = {
    "whole blocks": (256, 384),
    "last query block at most half full": (300, 330),
    "last query block over half full": (200, 260),
    "more queries than keys": (330, 200),
    "one query": (1, 330),
}


def make_levels(q_len: int, kv_len: int, head_dim: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return query, key, value and kept blocks. All query blocks but one keep the first key block, the sink.

    The scores of a key block center on its level or on a tenth of its level, chosen at random for each 64 queries of a
    head. Both centers are far from the threshold compared with the spread of 0.1 around them.
    """
    query, key, value = make_qkv(q_len, kv_len, heads=4, kv_heads=2, head_dim=head_dim)
    generator = torch.Generator().manual_seed(1)
    levels = torch.tensor([0.0, -0.3, -2.0])[torch.randint(3, (1, 2, -(-kv_len // BLOCK_K)), generator=generator)]
    levels[..., 0] = 0.2
    steepness = torch.tensor([0.1, 1.0])[torch.randint(2, (1, 4, -(-q_len // ROWS)), generator=generator)]
    steepness[:, 1] = 1.0
    query, key = 0.8 * head_dim**-0.5 * query, key - key.mean(2, keepdim=True)
    query[..., 0] = 4.0 * steepness.repeat_interleave(ROWS, 2)[:, :, :q_len]
    key[..., 0] = head_dim**0.5 / 4 * levels.repeat_interleave(BLOCK_K, 2)[:, :, :kv_len]
    blocks = torch.rand(1, 4, -(-q_len // BLOCK_Q), -(-kv_len // BLOCK_K), generator=generator) < 0.7
    blocks[..., 0] = True
    blocks[:, 0, 0] = False
    return query, key, value, blocks


def skipped_share(query: Tensor, key: Tensor, blocks: Tensor, *, is_causal: bool, attn_mask: Tensor | None) -> float:
    """Return the share of P V products of kept blocks whose scores are all below the threshold.

    The only half of a query block of at most 64 queries counts twice.
    """
    seen, _ = visible_elements(query, key, is_causal=is_causal, attn_mask=attn_mask, block_mask=blocks)
    scores = query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    scores = (scores * query.shape[-1] ** -0.5).masked_fill(~seen, -math.inf)
    largest = (
        _pad_to_multiple(scores, 3, BLOCK_K, -math.inf).unflatten(3, (-1, BLOCK_K)).amax(4)
    )  # [B, H, Sq, kv_blocks]
    gap = torch.where(largest == -math.inf, -math.inf, largest - largest.cummax(3).values)
    is_skipped = _pad_to_multiple(gap, 2, ROWS, -math.inf).unflatten(2, (-1, ROWS)).amax(3) < THRESHOLD
    if is_skipped.shape[2] % 2:
        is_skipped = torch.cat([is_skipped, is_skipped[:, :, -1:]], 2)
    reached, _ = visible_elements(query, key, is_causal=is_causal)
    reached = _pad_to_multiple(_pad_to_multiple(reached, 3, BLOCK_K, False), 2, BLOCK_Q, False)
    kept = blocks & reached.unflatten(3, (-1, BLOCK_K)).any(4).unflatten(2, (-1, BLOCK_Q)).any(3)
    is_skipped = is_skipped & kept.repeat_interleave(2, 2)
    return int(is_skipped.sum()) / (2 * int(kept.sum()))


def assert_skipped_share(
    lengths: tuple[int, int],
    *,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **options: Any,
) -> None:
    """Check that the statistics report the skipped share that follows from the scores."""
    query, key, value, blocks = make_levels(*lengths, head_dim)
    expected = skipped_share(query, key, blocks, is_causal=is_causal, attn_mask=attn_mask)
    assert 0.1 < expected < 0.9
    sparge.block_sparse_attention(
        *(tensor.to(device, dtype) for tensor in (query, key, value)),
        blocks.to(device),
        is_causal=is_causal,
        attn_mask=None if attn_mask is None else attn_mask.to(device),
        enable_gqa=True,
        pv_threshold=THRESHOLD,
        **options,
    )
    assert sparge.stats().pv_skipped == expected


def _pad_to_multiple(tensor: Tensor, dim: int, size: int, fill: float) -> Tensor:
    """Pad a dimension to a multiple of ``size``."""
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, -tensor.shape[dim] % size), value=fill)
