"""Online softmax over kept blocks in batched PyTorch: quantization and the P V threshold on any device.

This computes the same as the quantized kernels (`reference.softmax`), with float32 arithmetic on the quantized values,
tile by tile of 64 keys, for many query blocks at once. It shows the quantization error on any machine, and is not
faster than the unquantized path.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from sparge.backends.torch.tiles import Tiles, Workspace, cut_blocks
from sparge.call import Call
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, ROW_GROUP
from sparge.masks.visibility import Visibility, key_blocks
from sparge.numerics.block_means import block_means, mean_bias
from sparge.numerics.quantization import (
    is_coarse,
    key_scales,
    quantize_fp8,
    quantize_int8,
    query_scales,
    to_fp8,
    to_fp16,
)
from sparge.options.common import per_head
from sparge.reference.softmax import OnlineSoftmax, prepare_for_int8

MAX_Q_BLOCKS = 64
"""Query blocks that are computed together."""
GROUPS = BLOCK_Q // ROW_GROUP


def attention(tiles: Tiles, kept: Tensor, seen: Visibility, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention of all query blocks, as `reference.attention` does.

    Returns:
        Output (n, 128, Dv) and LSE (n, 128), float32, and the number of halves of blocks whose P V was skipped.
    """
    shape, device = tiles.shape, tiles.query.device
    operands = _Operands(tiles, seen, call)
    bias = None
    if operands.means is not None:
        bias = mean_bias(operands.means, kept, shape, call.window).flatten(0, 2).float()
        bias = key_blocks(bias, -math.inf)  # [n, tiles, 64]
    threshold = None
    if call.pv_threshold is not None:
        threshold = per_head(call.pv_threshold, shape.heads, device).flatten().float()
    kept_blocks = kept.flatten(0, 2)  # [n, kv_blocks]
    partial_blocks = (kept & ~seen.full).flatten(0, 2)
    counts = kept_blocks.sum(-1)
    total = len(kept_blocks)
    output = torch.empty(total, BLOCK_Q, shape.value_dim, dtype=torch.float32, device=device)
    lse = torch.empty(total, BLOCK_Q, dtype=torch.float32, device=device)
    skipped = torch.zeros((), dtype=torch.int64, device=device)
    for q_indices in torch.argsort(counts, descending=True, stable=True).split(MAX_Q_BLOCKS):
        kv_indices = torch.argsort((~kept_blocks[q_indices]).to(torch.uint8), dim=-1, stable=True)
        state = _QBlocks(operands, q_indices, threshold)
        for step in range(int(counts[q_indices[0]])):
            active = int((counts[q_indices] > step).sum())  # sorted by count: the active query blocks come first
            column = kv_indices[:active, step]
            state.add_block(column, partial_blocks[q_indices[:active], column])
        skipped += state.skipped  # before the means, which are not counted
        if bias is not None:
            state.add_means(bias[q_indices])
        output[q_indices], lse[q_indices] = state.finish()
    return output, lse, skipped


class _Operands:
    """Quantized Q, K and V, stored in float32, with their scales."""

    def __init__(self, tiles: Tiles, seen: Visibility, call: Call) -> None:
        shape, quantization, scale = tiles.shape, call.quantization, call.scale
        self.quantization, self.scale, self.head_dim = quantization, scale, shape.head_dim
        key, value = tiles.key.flatten(2, 3), tiles.value.flatten(2, 3)
        seen_keys = seen.keys
        if seen_keys is None:
            seen_keys = torch.ones(1, 1, shape.kv_len, dtype=torch.bool, device=key.device)
        present = key_blocks(seen_keys, False).flatten(2).expand(key.shape[:3])  # padded tokens are absent
        self.query_scale = self.mean_score = self.value_scale = None
        if quantization != "none":
            query = tiles.query.flatten(2, 3)[:, :, : shape.q_len].float()
            query, key, mean_score = prepare_for_int8(query, key.float(), present, scale)
            query = cut_blocks(query, BLOCK_Q)
            self.mean_score = cut_blocks(mean_score[..., None], BLOCK_Q).flatten(0, 2).squeeze(-1)
            self.query_scale, self.exact_query = query_scales(query), query
            tiles = replace(tiles, query=quantize_int8(query, self.query_scale).float())
        self.keys = _KeyTiles.of(cut_blocks(key, BLOCK_K), quantization)
        if quantization == "int8_fp8":
            quantized_value, self.value_scale = quantize_fp8(value.float())
            tiles = replace(tiles, value=quantized_value.unflatten(2, tiles.value.shape[2:4]))
        elif quantization == "int8_fp16":
            tiles = replace(tiles, value=to_fp16(tiles.value.float()))
        self.tiles = replace(tiles, key=self.keys.key)
        self.means = None
        if call.replaces_skipped:
            means = block_means(key, value, present)
            self.means, self.mean_keys = means, _KeyTiles.of(cut_blocks(means.key, BLOCK_K), quantization)
            self.mean_values = cut_blocks(self._rounded(means.value), BLOCK_K)

    def _rounded(self, value: Tensor) -> Tensor:
        """Round mean values as V is rounded, with V's scales."""
        if self.value_scale is not None:
            return to_fp8(value / self.value_scale)
        return to_fp16(value) if self.quantization == "int8_fp16" else value

    def scores(self, q_indices: Tensor, query: Tensor, key: Tensor, keys: _KeyTiles, place: _Place) -> Tensor:
        """Compute scaled scores, (n, 128, D), (n, 64, D) -> (n, 128, 64); ``key`` is ``keys.key[place]``."""
        scores = torch.bmm(query, key.mT)
        if self.query_scale is None or keys.scale is None:
            return scores.mul_(self.scale)
        query_scale, key_scale = self.query_scale[self.tiles.place(q_indices)], keys.scale[place]
        scores = scores.mul_(query_scale * self.scale).mul_(key_scale.mT)
        coarse = is_coarse(query_scale, key_scale, self.scale, self.head_dim).flatten(1).any(1)
        if bool(coarse.any()):
            exact_query = self.exact_query[self.tiles.place(q_indices[coarse])]
            exact_key = keys.exact[tuple(index[coarse] for index in place)]
            scores[coarse] = torch.bmm(exact_query, exact_key.mT) * self.scale
        return scores


_Place: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Batch elements, heads and indices of n tiles."""


class _KeyTiles(NamedTuple):
    """Keys in tiles of 64, (B, Hkv, tiles, 64, D): INT8 values, their scales (..., 1), and unquantized keys."""

    key: Tensor
    scale: Tensor | None
    exact: Tensor

    @classmethod
    def of(cls, key: Tensor, quantization: str) -> _KeyTiles:
        """Quantize tiles of keys, unless ``quantization`` is "none"."""
        if quantization == "none":
            return cls(key, None, key)
        scales = key_scales(key)
        return cls(quantize_int8(key, scales).float(), scales, key)


class _QBlocks:
    """A batch of query blocks and their softmax so far. Each group of 64 rows skips P V as a unit."""

    def __init__(self, operands: _Operands, q_indices: Tensor, threshold: Tensor | None) -> None:
        tiles, device = operands.tiles, q_indices.device
        self.operands, self.tiles, self.q_indices = operands, tiles, q_indices
        self.workspace = Workspace()
        self.query = tiles.queries(q_indices, self.workspace)
        sizes = (len(q_indices) * GROUPS, ROW_GROUP)
        self.softmax = OnlineSoftmax(self.query, sizes, tiles.shape.value_dim, operands.quantization)
        self.threshold = None
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)  # half blocks, see `reference.attention`
        if threshold is not None:
            _, head, block = tiles.place(q_indices)
            positions = block[:, None] * BLOCK_Q + torch.arange(BLOCK_Q, device=device)
            self.threshold = threshold[head].repeat_interleave(GROUPS)[:, None, None]
            self.outside = (positions >= tiles.shape.q_len).view(*sizes, 1)
            one_group = (tiles.shape.q_len - block * BLOCK_Q <= ROW_GROUP).long()
            self.weight = torch.stack([1 + one_group, 1 - one_group], 1).flatten()  # [groups]

    def add_block(self, column: Tensor, partial: Tensor) -> None:
        """Add one key block for each of the first ``len(column)`` query blocks; ``partial`` marks element masks."""
        active = len(column)
        q_indices = self.q_indices[:active]
        key, value = self.tiles.keys_values(q_indices, column[:, None], self.workspace)
        place = (*self._kv_heads(q_indices), column)
        scores = self.operands.scores(q_indices, self.query[:active], key, self.operands.keys, place)
        if bool(partial.any()):
            bias = self.tiles.element_bias(q_indices[partial], column[partial, None])
            scores[partial] = (scores[partial] + bias).masked_fill(bias == -math.inf, -math.inf)  # hides NaN too
        self._add_tile(scores, value)

    def add_means(self, bias: Tensor) -> None:
        """Add the means of skipped blocks for all query blocks, with ``bias`` (n, tiles, 64)."""
        operands, (batch, kv_head) = self.operands, self._kv_heads(self.q_indices)
        for tile, tile_bias in enumerate(bias[:, None].unbind(2)):  # [n, 1, 64]
            place = batch, kv_head, torch.full_like(batch, tile)
            key = operands.mean_keys.key[place]
            scores = operands.scores(self.q_indices, self.query, key, operands.mean_keys, place)
            scores = (scores + tile_bias).masked_fill(tile_bias == -math.inf, -math.inf)
            self._add_tile(scores, operands.mean_values[place])

    def _kv_heads(self, q_indices: Tensor) -> tuple[Tensor, Tensor]:
        batch, head, _ = self.tiles.place(q_indices)
        return batch, head // self.tiles.shape.group

    def _add_tile(self, scores: Tensor, value: Tensor) -> None:
        """Add scores (n, 128, 64) and values (n, 64, Dv) of the first n query blocks, unless they are skipped."""
        scores = scores.view(-1, ROW_GROUP, BLOCK_K)  # [groups, 64, 64]
        value = value.repeat_interleave(GROUPS, 0)
        local_max = scores.amax(-1, keepdim=True)
        groups = slice(0, len(scores))
        if self.threshold is None:
            self.softmax.add(groups, scores, value, local_max)
            return
        below = (self.softmax.gap(groups, local_max) < self.threshold[groups]) | self.outside[groups]
        is_skipped = below.all(1).flatten()
        self.skipped += self.weight[groups][is_skipped].sum()
        live = (~is_skipped).nonzero().flatten()
        self.softmax.add(live, scores[live], value[live], local_max[live])

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return output (n, 128, Dv) and LSE (n, 128), to which the score of the mean key is added back."""
        output, lse = (part.view(len(self.q_indices), BLOCK_Q, -1) for part in self.softmax.finish())
        lse = lse.squeeze(-1)
        if self.operands.value_scale is not None:
            output = output * self.operands.value_scale[self._kv_heads(self.q_indices)]
        if self.operands.mean_score is not None:
            lse = lse + self.operands.mean_score[self.q_indices]
        return output, lse
