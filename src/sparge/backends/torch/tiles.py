"""Tiles of the attention map for the PyTorch backends: blocks of Q, K, V to gather, and the masks inside them.

A *row* is one query block of one head, numbered (b * heads + h) * q_blocks + i. Blocks are gathered from the caller's
own memory; a ragged length, hidden keys (whose contents must not matter) or a strided layout cost one copy.
Gathering writes into buffers that are used again and again: fresh memory would cost more than the copying itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.call import Call
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape
from sparge.masks.visibility import Visibility, allowed_elements
from sparge.masks.window import Window, first_offset, last_offset


def cut_blocks(tokens: Tensor, block: int, seen: Tensor | None = None) -> Tensor:
    """(B, H, S, D) -> contiguous (B, H, blocks, block, D): a view, or a copy if ragged, partly hidden or strided."""
    if seen is not None:
        tokens = torch.where(seen[..., None], tokens, 0)
    missing = -tokens.shape[2] % block
    if missing:
        tokens = F.pad(tokens, (0, 0, 0, missing))
    return tokens.contiguous().unflatten(2, (-1, block))


@dataclass(frozen=True)
class Tiles:
    """The operands of one call, cut into blocks, and what hides elements inside a block.

    Attributes:
        query: (B, H, q_blocks, 128, D); key: (B, Hkv, kv_blocks, 64, D); value: (B, Hkv, kv_blocks, 64, Dv).
        attn_mask: (B | 1, H | 1, Sq | 1, Sk) boolean or additive, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    shape: Shape
    window: Window
    attn_mask: Tensor | None

    @classmethod
    def cut(cls, query: Tensor, key: Tensor, value: Tensor, call: Call, seen: Visibility) -> Tiles:
        """The tensors of a call in blocks; what nobody sees is 0."""
        shape, attn_mask = call.shape, call.attn_mask
        return cls(
            query=cut_blocks(query, BLOCK_Q, seen.queries),
            key=cut_blocks(key, BLOCK_K, seen.keys),
            value=cut_blocks(value, BLOCK_K, seen.keys),
            shape=shape,
            window=call.window,
            attn_mask=None if attn_mask is None else attn_mask.expand(-1, -1, -1, shape.kv_len),
        )

    def place(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Batch, head and query-block index of each row."""
        head_rows = rows // self.shape.q_blocks
        return (
            head_rows // self.shape.heads,
            head_rows % self.shape.heads,
            rows % self.shape.q_blocks,
        )

    def queries(self, rows: Tensor, into: Workspace) -> Tensor:
        """(n,) -> (n, 128, D), in the workspace's dtype."""
        return into.gather("query", self.query, rows)

    def keys_values(self, rows: Tensor, columns: Tensor, into: Workspace) -> tuple[Tensor, Tensor]:
        """Key blocks ``columns`` (n, c) of each row's head: (n, c * 64, D) and (n, c * 64, Dv)."""
        batch, head, _ = self.place(rows)
        kv_head = batch * self.shape.kv_heads + head // self.shape.group
        flat = (kv_head[:, None] * self.shape.kv_blocks + columns).flatten()
        key, value = into.gather("key", self.key, flat), into.gather("value", self.value, flat)
        n, tokens = len(rows), columns.shape[1] * BLOCK_K
        return key.view(n, tokens, -1), value.view(n, tokens, -1)

    def element_bias(self, rows: Tensor, columns: Tensor) -> Tensor:
        """What to add to the scores of each row and its key blocks: (n | 1, 128, c * 64), -inf where hidden.

        The leading size is 1 when all rows share one pattern, as they do along an aligned edge of a window.
        """
        batch, head, block = self.place(rows)
        if self.attn_mask is None:
            patterns = torch.cat([columns * BLOCK_K - block[:, None] * BLOCK_Q, self._keys_left(columns)], 1)
            if bool((patterns == patterns[:1]).all()):
                batch, head, block, columns = batch[:1], head[:1], block[:1], columns[:1]
        within_q = torch.arange(BLOCK_Q, dtype=torch.int32, device=rows.device)
        within_k = torch.arange(BLOCK_K, dtype=torch.int32, device=rows.device)
        queries = (block.int()[:, None] * BLOCK_Q + within_q)[:, :, None]  # [n, 128, 1]
        keys = (columns.int()[..., None] * BLOCK_K + within_k).flatten(1)[:, None, :]  # [n, 1, c * 64]
        allowed = keys < self.shape.kv_len
        first, last = first_offset(self.window, self.shape), last_offset(self.window, self.shape)
        if last is not None:
            allowed = allowed & (keys <= queries + last)
        if first is not None:
            allowed = allowed & (keys >= queries + first)
        bias = torch.zeros((), dtype=torch.float32, device=rows.device)
        if self.attn_mask is not None:
            mask = self.attn_mask
            elements = mask[
                batch[:, None, None] if mask.shape[0] > 1 else 0,
                head[:, None, None] if mask.shape[1] > 1 else 0,
                queries.clamp(max=self.shape.q_len - 1) if mask.shape[2] > 1 else torch.zeros_like(queries[:, :1]),
                keys.clamp(max=self.shape.kv_len - 1),
            ]
            allowed = allowed & allowed_elements(elements)
            if mask.dtype != torch.bool:
                bias = elements.float()
        allowed = allowed.expand(len(block), BLOCK_Q, keys.shape[-1])
        return torch.where(allowed, bias, -torch.inf)

    def _keys_left(self, columns: Tensor) -> Tensor:
        """Keys that each block really holds."""
        return (self.shape.kv_len - columns * BLOCK_K).clamp(max=BLOCK_K)


class Workspace:
    """Buffers to gather into, one per name and dtype. What `gather` returns is valid until its next call.

    Args:
        dtype: what is computed in; blocks of another one are converted.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def gather(self, name: str, blocks: Tensor, index: Tensor) -> Tensor:
        """Blocks (flattened over batch, head and position) number ``index`` (n,): (n, block, D)."""
        flat = blocks.flatten(0, 2)
        gathered = self._buffer(name, flat, len(index), flat.dtype)
        torch.index_select(flat, 0, index, out=gathered)
        if flat.dtype == self.dtype:
            return gathered
        return self._buffer(name, flat, len(index), self.dtype).copy_(gathered)

    def _buffer(self, name: str, like: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        found = self._buffers.get((name, dtype))
        if found is None or len(found) < count:
            found = like.new_empty((count, *like.shape[1:]), dtype=dtype)
            self._buffers[name, dtype] = found
        return found[:count]
