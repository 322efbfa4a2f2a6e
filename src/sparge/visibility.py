"""Which tokens and blocks may be seen at all, before anything is predicted.

Causality, key padding and attention masks are reduced to four facts (`Visibility`). The work is done per row of
query blocks, so no intermediate is larger than 128 x kv_len per mask head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.geometry import BLOCK_K, BLOCK_Q, Shape

NOWHERE = 2**31 - 1
"""Position of the first visible key in a block that has none. It fits a double, in which padding values travel."""


@dataclass(frozen=True)
class Visibility:
    """What the masks of one call allow. The leading dimensions b and h are 1 or the call's own.

    Attributes:
        blocks: (b, h, q_blocks, kv_blocks), some query of the block may see some key of the block.
        full: the same shape, every query sees every key and no bias applies: the block needs no element mask.
        keys: (b, kv_heads or 1, kv_len), keys that some query may see; None when all are.
        queries: (b, h, q_len), queries that may see some key; None when all do.
    """

    blocks: Tensor
    full: Tensor
    keys: Tensor | None
    queries: Tensor | None


def allowed_elements(attn_mask: Tensor) -> Tensor:
    """True where the mask lets a query see a key. Additive masks hide with -inf or the dtype's lowest number."""
    if attn_mask.dtype == torch.bool:
        return attn_mask
    return ~(attn_mask <= torch.finfo(attn_mask.dtype).min)  # NaN stays visible, and so propagates


def causal_elements(shape: Shape, offset: int, device: torch.device) -> Tensor:
    """(q_len, kv_len), True where query i sees key j: j <= i + offset."""
    return torch.ones(shape.q_len, shape.kv_len, dtype=torch.bool, device=device).tril(offset)


def find_visibility(shape: Shape, is_causal: bool, attn_mask: Tensor | None, device: torch.device) -> Visibility:
    """Reduce causality and a mask of shape (B | 1, H | 1, Sq | 1, Sk | 1) to block and token facts."""
    if attn_mask is None:
        return _without_mask(shape, is_causal, device)
    attn_mask = attn_mask.expand(-1, -1, -1, shape.kv_len)
    found = (
        _with_key_mask(shape, is_causal, attn_mask.squeeze(2))
        if attn_mask.shape[2] == 1
        else _with_element_mask(shape, is_causal, attn_mask)
    )
    if found.keys is not None and shape.group > 1 and found.keys.shape[1] == shape.heads:
        keys = found.keys.unflatten(1, (shape.kv_heads, shape.group)).any(2)
        return Visibility(found.blocks, found.full, keys, found.queries)
    return found


def block_edges(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Key positions of each query block's first and last query, (q_blocks, 1), and each key block's first and end."""
    first_query = torch.arange(shape.q_blocks, device=device)[:, None] * BLOCK_Q
    last_query = (first_query + BLOCK_Q - 1).clamp(max=shape.q_len - 1)
    first_key = torch.arange(shape.kv_blocks, device=device) * BLOCK_K
    return (
        first_query + shape.causal_offset,
        last_query + shape.causal_offset,
        first_key,
        first_key + BLOCK_K,
    )


def first_seen_keys(shape: Shape, is_causal: bool, attn_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where a bool mask of keys, (b, h, 1, Sk), starts to show something; both int32, expanded to B and H.

    Returns:
        (B, H, kv_blocks): position of the first visible key in each key block, 2^31 - 1 where there is none.
        (B, H): the first query that sees a key; all later ones do.
    """
    positions = torch.arange(shape.kv_len, dtype=torch.int32, device=attn_mask.device)
    seen_at = torch.where(attn_mask.expand(-1, -1, -1, shape.kv_len).squeeze(2), positions, NOWHERE)
    first_seen = key_blocks(seen_at, NOWHERE).amin(-1)  # [b, h, kv_blocks]
    # Rows start at multiples of 16 whatever the length: kernels are compiled anew for other alignments.
    first_seen = F.pad(first_seen, (0, -shape.kv_blocks % 16), value=NOWHERE)
    first_query = torch.zeros_like(first_seen[..., 0])
    if is_causal:
        first_query = (first_seen.amin(-1).long() - shape.causal_offset).clamp(0, shape.q_len).int()
    leading = (shape.batch, shape.heads)
    return first_seen.expand(*leading, -1)[..., : shape.kv_blocks], first_query.expand(leading)


def _without_mask(shape: Shape, is_causal: bool, device: torch.device) -> Visibility:
    first_query, last_query, first_key, key_end = block_edges(shape, device)
    full = (key_end <= shape.kv_len).expand(shape.q_blocks, -1)
    blocks = torch.ones_like(full)
    queries = None
    if is_causal:
        blocks = first_key <= last_query
        full = full & (key_end - 1 <= first_query)
        if shape.causal_offset < 0:
            queries = torch.arange(shape.q_len, device=device)[None, None] + shape.causal_offset >= 0
    return Visibility(blocks[None, None], full[None, None], None, queries)


def _with_key_mask(shape: Shape, is_causal: bool, attn_mask: Tensor) -> Visibility:
    """``attn_mask`` is (b, h, kv_len): the same keys (or biases) for every query."""
    device = attn_mask.device
    first_query, last_query, _, key_end = block_edges(shape, device)
    keys = allowed_elements(attn_mask)
    positions = torch.arange(shape.kv_len, device=device)
    seen_at = torch.where(keys, positions, NOWHERE)  # [b, h, kv_len]
    first_seen = key_blocks(seen_at, NOWHERE).amin(-1)[..., None, :]  # [b, h, 1, kv_blocks]
    plain = keys if attn_mask.dtype == torch.bool else attn_mask == 0
    full = key_blocks(plain, False).all(-1)[..., None, :].expand(-1, -1, shape.q_blocks, -1)
    if is_causal:
        blocks = first_seen <= last_query
        full = full & (key_end - 1 <= first_query)
        query_positions = torch.arange(shape.q_len, device=device) + shape.causal_offset
        queries = seen_at.amin(-1, keepdim=True) <= query_positions
    else:
        blocks = (first_seen < NOWHERE).expand(-1, -1, shape.q_blocks, -1)
        queries = keys.any(-1, keepdim=True).expand(-1, -1, shape.q_len)
    return Visibility(blocks, full, keys, queries)


def _with_element_mask(shape: Shape, is_causal: bool, attn_mask: Tensor) -> Visibility:
    """``attn_mask`` is (b, h, q_len, kv_len)."""
    positions = torch.arange(shape.kv_len, device=attn_mask.device)
    keys = torch.zeros_like(attn_mask[:, :, 0], dtype=torch.bool)
    blocks, full, queries = [], [], []
    for start in range(0, shape.q_len, BLOCK_Q):
        rows = attn_mask[:, :, start : start + BLOCK_Q]  # [b, h, rows, kv_len]
        seen = allowed_elements(rows)
        plain = seen if attn_mask.dtype == torch.bool else rows == 0
        if is_causal:
            row_positions = start + torch.arange(rows.shape[2], device=rows.device)
            past = positions <= row_positions[:, None] + shape.causal_offset
            seen, plain = seen & past, plain & past
        some = seen.any(2)  # [b, h, kv_len]
        keys |= some
        blocks.append(key_blocks(some, False).any(-1))
        full.append(key_blocks(plain.all(2), False).all(-1))
        queries.append(seen.any(3))
    return Visibility(torch.stack(blocks, 2), torch.stack(full, 2), keys, torch.cat(queries, 2))


def key_blocks(per_key: Tensor, fill: float) -> Tensor:
    """(..., kv_len) -> (..., kv_blocks, BLOCK_K), the ragged tail filled."""
    missing = -per_key.shape[-1] % BLOCK_K
    return F.pad(per_key, (0, missing), value=fill).unflatten(-1, (-1, BLOCK_K))
