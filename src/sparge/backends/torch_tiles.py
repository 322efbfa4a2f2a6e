"""Tiles of the attention map for the PyTorch backends: blocks of Q, K, V to gather, and the masks inside them.

A *row* is one query block of one head, numbered (b * heads + h) * q_blocks + i. Blocks are gathered from views of the
caller's tensors; only a ragged length or hidden keys (whose contents must not matter) cost a padded copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.geometry import BLOCK_K, BLOCK_Q, Shape
from sparge.visibility import Visibility, allowed_elements


def cut_blocks(tokens: Tensor, block: int, seen: Tensor | None = None) -> Tensor:
    """(B, H, S, D) -> (B, H, blocks, block, D): a view, or a zero-filled copy if ragged or partly hidden."""
    if seen is not None:
        tokens = torch.where(seen[..., None], tokens, 0)
    missing = -tokens.shape[2] % block
    if missing:
        tokens = F.pad(tokens, (0, 0, 0, missing))
    return tokens.unflatten(2, (-1, block))


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
    is_causal: bool
    attn_mask: Tensor | None

    @classmethod
    def cut(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        shape: Shape,
        seen: Visibility,
        is_causal: bool,
        attn_mask: Tensor | None,
    ) -> Tiles:
        return cls(
            query=cut_blocks(query, BLOCK_Q),
            key=cut_blocks(key, BLOCK_K, seen.keys),
            value=cut_blocks(value, BLOCK_K, seen.keys),
            shape=shape,
            is_causal=is_causal,
            attn_mask=None if attn_mask is None else attn_mask.expand(-1, -1, -1, shape.kv_len),
        )

    def place(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Batch, head and query-block index of each row."""
        head_rows = rows // self.shape.q_blocks
        return head_rows // self.shape.heads, head_rows % self.shape.heads, rows % self.shape.q_blocks

    def queries(self, rows: Tensor) -> Tensor:
        """(n,) -> (n, 128, D), float32."""
        return _take(self.query, self.place(rows)).float()

    def keys_values(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Key blocks ``columns`` (n, c) of each row's head: (n, c * 64, D) and (n, c * 64, Dv), float32."""
        batch, head, _ = self.place(rows)
        place = (batch[:, None], (head // self.shape.group)[:, None], columns)
        key, value = (_take(blocks, place).float() for blocks in (self.key, self.value))
        return key.flatten(1, 2), value.flatten(1, 2)

    def element_bias(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """What to add to the scores of each row and its key blocks: (n, 128, c * 64), -inf where hidden.

        Also returns which queries see anything there, (n, 128).
        """
        batch, head, block = self.place(rows)
        queries = block[:, None] * BLOCK_Q + torch.arange(BLOCK_Q, device=rows.device)  # [n, 128]
        keys = (columns[..., None] * BLOCK_K + torch.arange(BLOCK_K, device=rows.device)).flatten(1)  # [n, c * 64]
        queries, keys = queries[:, :, None], keys[:, None, :]
        allowed = keys < self.shape.kv_len
        if self.is_causal:
            allowed = allowed & (keys <= queries + self.shape.causal_offset)
        bias: Tensor | float = 0.0
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
        allowed = allowed.expand(len(rows), BLOCK_Q, keys.shape[-1])
        hidden = torch.full((), -torch.inf, device=rows.device)
        return torch.where(allowed, bias, hidden), allowed.any(-1)


def _take(blocks: Tensor, place: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """``blocks[b, h, i]`` for index tensors of one shape, through the faster flat copy where the layout allows it."""
    b, h, i = torch.broadcast_tensors(*place)
    if not blocks.is_contiguous():
        return blocks[b, h, i]
    flat = ((b * blocks.shape[1] + h) * blocks.shape[2] + i).flatten()
    return blocks.flatten(0, 2).index_select(0, flat).unflatten(0, i.shape)
