"""The blocks of Q, K and V that the torch backend gathers, and the element masks of pairs of blocks.

Query blocks are numbered over batch, heads and sequence: ``q_indices`` are (b * heads + h) * q_blocks + i. Blocks are
gathered from the caller's memory if possible. A tensor is copied once if it has a partial block, hidden tokens (which
may be NaN) or a strided layout. Gathering reuses its buffers, because allocating memory takes longer than copying.
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
    """Cut (B, H, S, D) into contiguous (B, H, blocks, block, D): a view, or a copy if padded, masked or strided."""
    if seen is not None:
        tokens = torch.where(seen[..., None], tokens, 0)
    padding = -tokens.shape[2] % block
    if padding:
        tokens = F.pad(tokens, (0, 0, 0, padding))
    return tokens.contiguous().unflatten(2, (-1, block))


@dataclass(frozen=True)
class Tiles:
    """The operands of one call, cut into blocks, and the call's masks.

    Attributes:
        query: (B, H, q_blocks, 128, D).
        key: (B, Hkv, kv_blocks, 64, D).
        value: (B, Hkv, kv_blocks, 64, Dv).
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
        """Cut the tensors of a call into blocks; unseen tokens are set to 0."""
        shape, attn_mask = call.shape, call.attn_mask
        return cls(
            query=cut_blocks(query, BLOCK_Q, seen.queries),
            key=cut_blocks(key, BLOCK_K, seen.keys),
            value=cut_blocks(value, BLOCK_K, seen.keys),
            shape=shape,
            window=call.window,
            attn_mask=None if attn_mask is None else attn_mask.expand(-1, -1, -1, shape.kv_len),
        )

    def place(self, q_indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return batch, head and index within the head of each query block."""
        flat_head = q_indices // self.shape.q_blocks
        return flat_head // self.shape.heads, flat_head % self.shape.heads, q_indices % self.shape.q_blocks

    def queries(self, q_indices: Tensor, into: Workspace) -> Tensor:
        """Gather query blocks: (n,) -> (n, 128, D), in the workspace's dtype."""
        return into.gather("query", self.query, q_indices)

    def keys_values(self, q_indices: Tensor, kv_indices: Tensor, into: Workspace) -> tuple[Tensor, Tensor]:
        """Gather key blocks ``kv_indices`` (n, c) for each query block: (n, c * 64, D) and (n, c * 64, Dv)."""
        batch, head, _ = self.place(q_indices)
        kv_head = batch * self.shape.kv_heads + head // self.shape.group
        flat = (kv_head[:, None] * self.shape.kv_blocks + kv_indices).flatten()
        key, value = into.gather("key", self.key, flat), into.gather("value", self.value, flat)
        n, tokens = len(q_indices), kv_indices.shape[1] * BLOCK_K
        return key.view(n, tokens, -1), value.view(n, tokens, -1)

    def element_bias(self, q_indices: Tensor, kv_indices: Tensor) -> Tensor:
        """Return the bias of the scores of query blocks (n,) for key blocks (n, c): (n | 1, 128, c * 64).

        The bias of hidden keys is -inf. The leading size is 1 if the same keys are hidden in all pairs of blocks, as
        along the diagonal.
        """
        batch, head, block = self.place(q_indices)
        if self.attn_mask is None:
            patterns = torch.cat([kv_indices * BLOCK_K - block[:, None] * BLOCK_Q, self._num_keys(kv_indices)], 1)
            if bool((patterns == patterns[:1]).all()):
                batch, head, block, kv_indices = batch[:1], head[:1], block[:1], kv_indices[:1]
        within_q = torch.arange(BLOCK_Q, dtype=torch.int32, device=q_indices.device)
        within_k = torch.arange(BLOCK_K, dtype=torch.int32, device=q_indices.device)
        queries = (block.int()[:, None] * BLOCK_Q + within_q)[:, :, None]  # [n, 128, 1]
        keys = (kv_indices.int()[..., None] * BLOCK_K + within_k).flatten(1)[:, None, :]  # [n, 1, c * 64]
        allowed = keys < self.shape.kv_len
        first, last = first_offset(self.window, self.shape), last_offset(self.window, self.shape)
        if last is not None:
            allowed = allowed & (keys <= queries + last)
        if first is not None:
            allowed = allowed & (keys >= queries + first)
        bias = torch.zeros((), dtype=torch.float32, device=q_indices.device)
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

    def _num_keys(self, kv_indices: Tensor) -> Tensor:
        """Return the number of keys that each block contains."""
        return (self.shape.kv_len - kv_indices * BLOCK_K).clamp(max=BLOCK_K)


class Workspace:
    """Buffers to gather into, one per name and dtype.

    A result of `gather` is valid until `gather` is called again with the same name.

    Args:
        dtype: dtype of the computation, to which gathered blocks are converted.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def gather(self, name: str, blocks: Tensor, index: Tensor) -> Tensor:
        """Gather blocks (numbered over batch, head and position) by ``index`` (n,): (n, block, D)."""
        flat = blocks.flatten(0, 2)
        gathered = self._buffer(name, flat, len(index), flat.dtype)
        torch.index_select(flat, 0, index, out=gathered)
        if flat.dtype == self.dtype:
            return gathered
        return self._buffer(name, flat, len(index), self.dtype).copy_(gathered)

    def _buffer(self, name: str, like: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        buffer = self._buffers.get((name, dtype))
        if buffer is None or len(buffer) < count:
            buffer = like.new_empty((count, *like.shape[1:]), dtype=dtype)
            self._buffers[name, dtype] = buffer
        return buffer[:count]
