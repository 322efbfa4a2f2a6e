"""Visibility of tokens and blocks, which is computed before any prediction.

Windows (including causality), key padding and attention masks are reduced to four tensors (`Visibility`). Masks are
processed one query block at a time, so intermediate tensors have at most 128 x kv_len elements per mask head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape
from sparge.masks.window import Window, first_offset, first_seeing_query, first_seen_key, last_offset

NOWHERE = 2**31 - 1
"""Position of the first visible key in a block without visible keys. The value is exact in float64, the type of padding
values."""


@dataclass(frozen=True)
class SeenTokens:
    """Tokens that take part in a call. The dimensions b and h are either 1 or the size of the call.

    Attributes:
        keys: bool (b, kv_heads or 1, kv_len), True for keys that some query may see; None means all keys.
        queries: bool (b, h, q_len), True for queries that may see some key; None means all queries.
    """

    keys: Tensor | None
    queries: Tensor | None


@dataclass(frozen=True)
class Visibility(SeenTokens):
    """Tokens and blocks that the masks of one call allow.

    Attributes:
        blocks: (b, h, q_blocks, kv_blocks), True where some query of the block may see some key of the block.
        full: (b, h, q_blocks, kv_blocks), True where every query of the block sees every key of the block without a
            bias, so no element mask is needed.
    """

    blocks: Tensor
    full: Tensor


def allowed_elements(attn_mask: Tensor) -> Tensor:
    """Return True where a query may see a key. Additive masks hide keys with -inf or the dtype's lowest number."""
    if attn_mask.dtype == torch.bool:
        return attn_mask
    return ~(attn_mask <= torch.finfo(attn_mask.dtype).min)  # NaN stays visible and propagates


def window_elements(shape: Shape, window: Window, queries: Tensor) -> Tensor:
    """Return a bool tensor (..., kv_len), True for the keys that queries with indices (...) see in a window."""
    first, last = first_offset(window, shape), last_offset(window, shape)
    keys = torch.arange(shape.kv_len, dtype=queries.dtype, device=queries.device)
    queries = queries[..., None]
    seen = torch.ones_like(keys, dtype=torch.bool) if last is None else keys <= queries + last
    if first is not None:
        seen = seen & (keys >= queries + first)
    return seen.expand(*queries.shape[:-1], shape.kv_len)


def find_visibility(shape: Shape, window: Window, attn_mask: Tensor | None, device: torch.device) -> Visibility:
    """Reduce a window and a mask (B | 1, H | 1, S_q | 1, S_k | 1) to the visibility of tokens and blocks."""
    if attn_mask is None:
        return _without_mask(shape, window, device)
    attn_mask = attn_mask.expand(-1, -1, -1, shape.kv_len)
    visibility = (
        _with_key_mask(shape, window, attn_mask.squeeze(2))
        if attn_mask.shape[2] == 1
        else _with_element_mask(shape, window, attn_mask)
    )
    if visibility.keys is not None and shape.group > 1 and visibility.keys.shape[1] == shape.heads:
        keys = visibility.keys.unflatten(1, (shape.kv_heads, shape.group)).any(2)
        return replace(visibility, keys=keys)
    return visibility


def block_edges(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the edges of blocks as key positions.

    Returns:
        Positions of the first and the last query of each query block, both (q_blocks, 1), and of the first key and the
        end of each key block, both (kv_blocks,).
    """
    first_query = torch.arange(shape.q_blocks, device=device)[:, None] * BLOCK_Q
    last_query = (first_query + BLOCK_Q - 1).clamp(max=shape.q_len - 1)
    first_key = torch.arange(shape.kv_blocks, device=device) * BLOCK_K
    return (
        first_query + shape.causal_offset,
        last_query + shape.causal_offset,
        first_key,
        first_key + BLOCK_K,
    )


class WindowEdges(NamedTuple):
    """Ranges of keys that query blocks see in a window, each (q_blocks, 1). They may extend beyond the sequence.

    Keys first .. last are visible to some query of the block, keys inner_first .. inner_last to all of its queries.
    """

    first: Tensor
    last: Tensor
    inner_first: Tensor
    inner_last: Tensor


def window_edges(shape: Shape, window: Window, device: torch.device) -> WindowEdges:
    """Return the edges of a window for every query block."""
    first_query, last_query, _, _ = block_edges(shape, device)
    first, inner_first = torch.zeros_like(first_query), torch.zeros_like(first_query)
    last, inner_last = torch.full_like(first, shape.kv_len - 1), torch.full_like(first, shape.kv_len - 1)
    if window.left is not None:
        first, inner_first = first_query - window.left, last_query - window.left
    if window.right is not None:
        last, inner_last = last_query + window.right, first_query + window.right
    return WindowEdges(first, last, inner_first, inner_last)


def unfinished_blocks(shape: Shape, window: Window, device: torch.device) -> Tensor:
    """Return a bool tensor (q_blocks, kv_blocks), True for blocks with both visible keys and keys outside the window.

    These blocks are kept regardless of their score, because their statistics include keys outside the window (future
    keys in causal attention).
    """
    edges = window_edges(shape, window, device)
    _, _, first_key, key_end = block_edges(shape, device)
    last_key = key_end.clamp(max=shape.kv_len) - 1
    behind = (first_key <= edges.last) & (edges.last < last_key)
    return behind | ((first_key < edges.first) & (edges.first <= last_key))


def first_seen_keys(shape: Shape, window: Window, attn_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Find the first visible keys under a bool mask over keys (b, h, 1, S_k) and a window without a left bound.

    Returns:
        (B, H, kv_blocks) int32: position of the first visible key in each key block, 2^31 - 1 if there is none.
        (B, H) int32: the first query that sees a key; all later queries see a key too.
    """
    positions = torch.arange(shape.kv_len, dtype=torch.int32, device=attn_mask.device)
    seen_at = torch.where(attn_mask.expand(-1, -1, -1, shape.kv_len).squeeze(2), positions, NOWHERE)
    first_seen = key_blocks(seen_at, NOWHERE).amin(-1)  # [b, h, kv_blocks]
    # Each head's entries start at a multiple of 16, because Triton recompiles kernels for other alignments.
    first_seen = F.pad(first_seen, (0, -shape.kv_blocks % 16), value=NOWHERE)
    first_query, last = torch.zeros_like(first_seen[..., 0]), last_offset(window, shape)
    if last is not None:
        first_query = (first_seen.amin(-1).long() - last).clamp(0, shape.q_len).int()
    leading = (shape.batch, shape.heads)
    return first_seen.expand(*leading, -1)[..., : shape.kv_blocks], first_query.expand(leading)


def _without_mask(shape: Shape, window: Window, device: torch.device) -> Visibility:
    keys = queries = None
    first_key, first_query = first_seen_key(window, shape), first_seeing_query(window, shape)
    if first_key > 0:
        keys = (torch.arange(shape.kv_len, device=device) >= first_key)[None, None]
    if first_query > 0:
        queries = (torch.arange(shape.q_len, device=device) >= first_query)[None, None]
    blocks, full = _window_blocks(shape, window, device)
    return Visibility(keys, queries, blocks[None, None], full[None, None])


def _window_blocks(shape: Shape, window: Window, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the blocks at least partly inside a window, and those entirely inside; both bool (q_blocks, kv_blocks)."""
    edges = window_edges(shape, window, device)
    _, _, first_key, key_end = block_edges(shape, device)
    blocks = (first_key <= edges.last) & (key_end.clamp(max=shape.kv_len) > edges.first)
    full = (key_end - 1 <= edges.inner_last) & (first_key >= edges.inner_first) & (key_end <= shape.kv_len)
    return blocks, full


def _with_key_mask(shape: Shape, window: Window, attn_mask: Tensor) -> Visibility:
    """Reduce a mask (b, h, kv_len) that is the same for all queries."""
    device = attn_mask.device
    keys = allowed_elements(attn_mask)
    plain = keys if attn_mask.dtype == torch.bool else attn_mask == 0
    _, full = _window_blocks(shape, window, device)
    full = full & key_blocks(plain, False).all(-1)[..., None, :]
    keys = keys & (torch.arange(shape.kv_len, device=device) >= first_seen_key(window, shape))
    before = F.pad(keys.cumsum(-1, dtype=torch.int32), (1, 0))  # [b, h, kv_len + 1], number of visible keys before
    edges = window_edges(shape, window, device)
    _, _, first_key, key_end = block_edges(shape, device)
    first = torch.maximum(first_key, edges.first).clamp(0, shape.kv_len)
    end = torch.minimum(key_end, edges.last + 1).clamp(0, shape.kv_len)
    blocks = before[..., end] > before[..., torch.minimum(first, end)]
    positions = torch.arange(shape.q_len, device=device)
    first_of_query, last_of_query = first_offset(window, shape), last_offset(window, shape)
    since = before[..., :1] if first_of_query is None else before[..., (positions + first_of_query).clamp(min=0)]
    until = before[..., -1:]
    if last_of_query is not None:
        until = before[..., (positions + last_of_query + 1).clamp(0, shape.kv_len)]
    return Visibility(keys, (until > since).expand(-1, -1, shape.q_len), blocks, full)


def _with_element_mask(shape: Shape, window: Window, attn_mask: Tensor) -> Visibility:
    """Reduce a full mask (b, h, q_len, kv_len)."""
    keys = torch.zeros_like(attn_mask[:, :, 0], dtype=torch.bool)
    blocks, full, queries = [], [], []
    for start in range(0, shape.q_len, BLOCK_Q):
        rows = attn_mask[:, :, start : start + BLOCK_Q]  # [b, h, rows, kv_len]
        seen = allowed_elements(rows)
        plain = seen if attn_mask.dtype == torch.bool else rows == 0
        if window != Window():
            inside = window_elements(shape, window, start + torch.arange(rows.shape[2], device=rows.device))
            seen, plain = seen & inside, plain & inside
        some = seen.any(2)  # [b, h, kv_len]
        keys |= some
        blocks.append(key_blocks(some, False).any(-1))
        full.append(key_blocks(plain.all(2), False).all(-1))
        queries.append(seen.any(3))
    return Visibility(keys, torch.cat(queries, 2), torch.stack(blocks, 2), torch.stack(full, 2))


def key_blocks(per_key: Tensor, fill: float) -> Tensor:
    """Split keys into blocks, (..., kv_len) -> (..., kv_blocks, BLOCK_K); ``fill`` pads a partial last block."""
    missing = -per_key.shape[-1] % BLOCK_K
    return F.pad(per_key, (0, missing), value=fill).unflatten(-1, (-1, BLOCK_K))
