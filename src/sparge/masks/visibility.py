"""Visibility of tokens and blocks, before any prediction.

Windows (including causality), key padding and attention masks are reduced to four tensors (`Visibility`). The masks are
processed per query block, so intermediates are at most 128 x kv_len per mask head.
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
"""Position of the first visible key in a block without any. float64, which carries padding values, represents it."""


@dataclass(frozen=True)
class SeenTokens:
    """Tokens that take part in a call. The leading dimensions b and h are 1 or the call's own.

    Attributes:
        keys: (b, kv_heads or 1, kv_len), keys that some query may see; None means all keys.
        queries: (b, h, q_len), queries that may see some key; None means all queries.
    """

    keys: Tensor | None
    queries: Tensor | None


@dataclass(frozen=True)
class Visibility(SeenTokens):
    """Tokens and blocks that the masks of one call allow.

    Attributes:
        blocks: (b, h, q_blocks, kv_blocks), True where some query of the block may see some key of the block.
        full: the same shape, True where every query sees every key without a bias, so no element mask is needed.
    """

    blocks: Tensor
    full: Tensor


def allowed_elements(attn_mask: Tensor) -> Tensor:
    """Return True where the mask lets a query see a key. Additive masks hide with -inf or the dtype's lowest number."""
    if attn_mask.dtype == torch.bool:
        return attn_mask
    return ~(attn_mask <= torch.finfo(attn_mask.dtype).min)  # NaN stays visible and propagates


def causal_elements(shape: Shape, offset: int, device: torch.device) -> Tensor:
    """Return (q_len, kv_len), True where query i sees key j: j <= i + offset."""
    return torch.ones(shape.q_len, shape.kv_len, dtype=torch.bool, device=device).tril(offset)


def window_elements(shape: Shape, window: Window, queries: Tensor) -> Tensor:
    """Return (..., kv_len), True where a window lets the queries with the given indices (...) see key j."""
    first, last = first_offset(window, shape), last_offset(window, shape)
    keys = torch.arange(shape.kv_len, dtype=queries.dtype, device=queries.device)
    queries = queries[..., None]
    seen = torch.ones_like(keys, dtype=torch.bool) if last is None else keys <= queries + last
    if first is not None:
        seen = seen & (keys >= queries + first)
    return seen.expand(*queries.shape[:-1], shape.kv_len)


def find_visibility(shape: Shape, window: Window, attn_mask: Tensor | None, device: torch.device) -> Visibility:
    """Reduce a window and a mask of shape (B | 1, H | 1, Sq | 1, Sk | 1) to the visibility of tokens and blocks."""
    if attn_mask is None:
        return _without_mask(shape, window, device)
    attn_mask = attn_mask.expand(-1, -1, -1, shape.kv_len)
    found = (
        _with_key_mask(shape, window, attn_mask.squeeze(2))
        if attn_mask.shape[2] == 1
        else _with_element_mask(shape, window, attn_mask)
    )
    if found.keys is not None and shape.group > 1 and found.keys.shape[1] == shape.heads:
        keys = found.keys.unflatten(1, (shape.kv_heads, shape.group)).any(2)
        return replace(found, keys=keys)
    return found


def block_edges(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return key positions of each query block's first and last query, (q_blocks, 1), and of key blocks' edges."""
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
    """Ranges of keys that query blocks see in a window, (q_blocks, 1); they may extend beyond the sequence.

    Some query sees keys first .. last; all queries see keys inner_first .. inner_last.
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
    """Return blocks that contain both keys seen by a query of the block and keys seen by none, (q_blocks, kv_blocks).

    They are kept without a score, because their summary includes keys outside of the window (in causal attention:
    future keys).
    """
    edges = window_edges(shape, window, device)
    _, _, first_key, key_end = block_edges(shape, device)
    last_key = key_end.clamp(max=shape.kv_len) - 1
    behind = (first_key <= edges.last) & (edges.last < last_key)
    return behind | ((first_key < edges.first) & (edges.first <= last_key))


def first_seen_keys(shape: Shape, window: Window, attn_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Find the first keys visible under a bool mask of keys (b, h, 1, Sk); both results are int32, expanded to B and H.

    The window must have no left bound.

    Returns:
        (B, H, kv_blocks): position of the first visible key in each key block, 2^31 - 1 if there is none.
        (B, H): the first query that sees a key; all later queries do.
    """
    positions = torch.arange(shape.kv_len, dtype=torch.int32, device=attn_mask.device)
    seen_at = torch.where(attn_mask.expand(-1, -1, -1, shape.kv_len).squeeze(2), positions, NOWHERE)
    first_seen = key_blocks(seen_at, NOWHERE).amin(-1)  # [b, h, kv_blocks]
    # Each head's entries start at a multiple of 16 for any length: kernels are recompiled for other alignments.
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
    """Return blocks (q_blocks, kv_blocks) that are partly and entirely inside of a window."""
    edges = window_edges(shape, window, device)
    _, _, first_key, key_end = block_edges(shape, device)
    blocks = (first_key <= edges.last) & (key_end.clamp(max=shape.kv_len) > edges.first)
    full = (key_end - 1 <= edges.inner_last) & (first_key >= edges.inner_first) & (key_end <= shape.kv_len)
    return blocks, full


def _with_key_mask(shape: Shape, window: Window, attn_mask: Tensor) -> Visibility:
    """Reduce a mask (b, h, kv_len) with the same keys (or biases) for every query."""
    device = attn_mask.device
    keys = allowed_elements(attn_mask)
    plain = keys if attn_mask.dtype == torch.bool else attn_mask == 0
    _, full = _window_blocks(shape, window, device)
    full = full & key_blocks(plain, False).all(-1)[..., None, :]
    keys = keys & (torch.arange(shape.kv_len, device=device) >= first_seen_key(window, shape))
    before = F.pad(keys.cumsum(-1, dtype=torch.int32), (1, 0))  # [b, h, kv_len + 1], visible keys before each
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
    """Split keys into blocks, (..., kv_len) -> (..., kv_blocks, BLOCK_K), and fill a partial last block."""
    missing = -per_key.shape[-1] % BLOCK_K
    return F.pad(per_key, (0, missing), value=fill).unflatten(-1, (-1, BLOCK_K))
