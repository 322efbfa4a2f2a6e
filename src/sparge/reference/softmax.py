"""Attention by online softmax over the kept blocks: quantization if requested, skipping of P V, LSE.

Query blocks of all heads are computed in batches. Each step adds the next kept key block of every query block of the
batch, in ascending order. The means of skipped blocks follow. Groups of 64 queries skip P V as a unit. The torch
backend calls `attend_q_blocks` in float32 for quantized calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, ROW_GROUP
from sparge.masks.visibility import key_blocks
from sparge.numerics.block_means import block_means, mean_bias
from sparge.numerics.quantization import (
    FP8_MAX,
    FP8_RANGE,
    FP16_ROOM,
    MIXED,
    ROW_REF_RANGE,
    balance,
    fp8_from_log2,
    fp8_tensor_core,
    is_coarse,
    key_scales,
    mix,
    quantize_fp8,
    quantize_int8,
    query_scales,
    to_fp8,
    to_fp16,
)
from sparge.options.common import per_head
from sparge.reference.shared import element_mask, smooth_key, visible_keys

MAX_Q_BLOCKS = 64
"""Query blocks that are computed together."""
GROUPS = BLOCK_Q // ROW_GROUP
Accumulation = Literal["exact", "two_level", "single_level"]
ElementBias = Callable[[Tensor, Tensor], Tensor]
"""A function of n query blocks, numbered over batch, heads and sequence, and one key block for each. It returns the
bias of their scores, (n | 1, 128, 64), -inf for hidden keys."""


class AttentionResult(NamedTuple):
    """Output (B, H, Sq, Dv), LSE (B, H, Sq), and counts of skipped P V products, (B, H, q_blocks).

    ``pv_skipped`` counts halves of kept blocks, 64 queries by 64 keys. If the second half of a query block has no
    queries, it counts as skipped whenever the first half is. ``means_skipped`` counts tiles of means in the same way.
    """

    output: Tensor
    lse: Tensor
    pv_skipped: Tensor
    means_skipped: Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    call: Call,
    *,
    accumulation: Accumulation = "two_level",
) -> AttentionResult:
    """Compute online softmax over the kept blocks, and over the means of the skipped blocks if the call requests it.

    Args:
        mask: kept blocks.
        call: its quantization is "none", "int8_fp8" (INT8 Q K^T, FP8 P V), "int8_fp8_fast" (the same with P derived
            directly from the scores, see `fp8_from_log2`) or "int8_fp16" (INT8 Q K^T, FP16 P V).
        accumulation: how FP8 products are summed. "two_level" uses a fresh FP8 accumulator for every tile of 64 keys;
            "single_level" uses one for all tiles, which is less accurate; "exact" rounds no sum.
    """
    masks = element_mask(call, query.device)
    keys_seen = visible_keys(masks.allowed, call.shape.kv_heads)
    bias = torch.where(masks.allowed, masks.bias, -math.inf)
    padding = (0, -bias.shape[3] % BLOCK_K, 0, -bias.shape[2] % BLOCK_Q)
    tiles = F.pad(bias, padding, value=-math.inf).unflatten(3, (-1, BLOCK_K)).unflatten(2, (-1, BLOCK_Q)).flatten(0, 2)
    return attend_q_blocks(
        torch.where(masks.allowed.any(3, keepdim=True), query.double(), 0.0),
        torch.where(keys_seen[..., None], key.double(), 0.0),
        torch.where(keys_seen[..., None], value.double(), 0.0),
        keys_seen,
        mask.to_dense(),
        call,
        lambda q_indices, kv_indices: tiles[q_indices, :, kv_indices],
        accumulation=accumulation,
    )


def attend_q_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys_seen: Tensor,
    kept: Tensor,
    call: Call,
    element_bias: ElementBias,
    *,
    has_bias: Tensor | None = None,
    accumulation: Accumulation = "exact",
) -> AttentionResult:
    """Compute the attention of all query blocks, in the dtype of the tensors (float32 or float64).

    Args:
        query, key, value: tokens, 0 where hidden.
        keys_seen: (B, Hkv, Sk), True for visible keys.
        kept: kept blocks, (B, H, q_blocks, kv_blocks).
        element_bias: the bias of the scores of pairs of blocks.
        has_bias: the pairs of blocks that have a bias, in the shape of ``kept``; None if all do.
        accumulation: see `attention`.
    """
    shape, device = call.shape, query.device
    operands = _Operands(query, key, value, keys_seen, call)
    means_bias = None
    if operands.means is not None:
        bias = mean_bias(operands.means, kept, shape, call.window).to(query.dtype)
        means_bias = key_blocks(bias.flatten(0, 2), -math.inf)  # [n, tiles, 64]
    kept = kept.flatten(0, 2)  # [n, kv_blocks]
    has_bias = torch.ones_like(kept) if has_bias is None else has_bias.flatten(0, 2)
    counts = kept.sum(-1)
    output = query.new_empty(len(kept), BLOCK_Q, shape.value_dim)
    lse = query.new_empty(len(kept), BLOCK_Q)
    pv_skipped, means_skipped = torch.zeros(2, len(kept), dtype=torch.int64, device=device)
    for q_indices in torch.argsort(counts, descending=True, stable=True).split(MAX_Q_BLOCKS):
        q_blocks = _QBlocks(operands, q_indices, accumulation)
        kv_indices = torch.argsort((~kept[q_indices]).to(torch.uint8), dim=-1, stable=True)
        for step in range(int(counts[q_indices[0]])):
            active = q_indices[: int((counts[q_indices] > step).sum())]  # the counts fall
            column = kv_indices[: len(active), step]
            scores = q_blocks.scores(operands.keys, column)
            biased = has_bias[active, column]
            if bool(biased.any()):
                scores[biased] = _add_bias(scores[biased], element_bias(active[biased], column[biased]))
            pv_skipped[active] += q_blocks.add(scores, operands.values, column)
        if means_bias is not None:
            for tile, tile_bias in enumerate(means_bias[q_indices, None].unbind(2)):  # [n, 1, 64]
                column = torch.full_like(q_indices, tile)
                scores = _add_bias(q_blocks.scores(operands.mean_keys, column), tile_bias)
                means_skipped[q_indices] += q_blocks.add(scores, operands.mean_values, column)
        output[q_indices], lse[q_indices] = q_blocks.finish()
    sizes = (shape.batch, shape.heads, shape.q_blocks)
    output, lse = (part.view(*sizes[:2], -1, *part.shape[2:])[:, :, : shape.q_len] for part in (output, lse))
    return AttentionResult(output, lse + operands.mean_score, pv_skipped.view(sizes), means_skipped.view(sizes))


def _add_bias(scores: Tensor, bias: Tensor) -> Tensor:
    """Add a bias to scores; -inf also hides NaN."""
    return (scores + bias).masked_fill(bias == -math.inf, -math.inf)


def prepare_for_int8(query: Tensor, key: Tensor, keys_seen: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Smooth, balance and mix Q and K: (B, H, Sq, D), (B, Hkv, Sk, D) -> (B, H, Sq, D'), (B, Hkv, Sk, D'), (B, H, Sq).

    The last result is the score of each query with the mean key, which smoothing subtracts from every key.
    """
    group = query.shape[1] // key.shape[1]
    key, key_mean = smooth_key(key, keys_seen)
    mean_score = scale * (query @ key_mean.repeat_interleave(group, 1).mT).squeeze(-1)
    factors = balance(query, key, keys_seen)
    return mix(query * factors.repeat_interleave(group, 1)) * MIXED, mix(key / factors), mean_score


class _Tiles(NamedTuple):
    """Tokens in blocks, (heads, blocks, tokens, channels), heads of all batch elements.

    Attributes:
        tokens: INT8 values in the dtype of the computation, or unquantized tokens.
        scale: (..., tokens, 1), INT8 scales; 1 without quantization.
        exact: unquantized tokens.
    """

    tokens: Tensor
    scale: Tensor
    exact: Tensor

    @classmethod
    def quantized(cls, tokens: Tensor, block: int, scales: Callable[[Tensor], Tensor] | None) -> _Tiles:
        """Cut (B, H, S, D) into blocks, and quantize them unless ``scales`` is None."""
        exact = _cut(tokens, block)
        if scales is None:
            return cls(exact, torch.ones_like(exact[..., :1]), exact)
        scale = scales(exact)
        return cls(quantize_int8(exact, scale).to(exact.dtype), scale, exact)


def _cut(tokens: Tensor, block: int) -> Tensor:
    """Cut (B, H, S, D) into blocks padded with zeros, (B * H, blocks, block, D)."""
    return F.pad(tokens, (0, 0, 0, -tokens.shape[2] % block)).unflatten(2, (-1, block)).flatten(0, 1)


class _Operands:
    """The quantized operands of a call, and the means of key blocks if the call uses them."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, keys_seen: Tensor, call: Call) -> None:
        self.call = call
        self.mean_score = torch.zeros_like(query[..., 0])
        if call.is_quantized:
            query, key, self.mean_score = prepare_for_int8(query, key, keys_seen, call.scale)
        of_queries, of_keys = (query_scales, key_scales) if call.is_quantized else (None, None)
        self.queries = _Tiles.quantized(query, BLOCK_Q, of_queries)
        self.keys = _Tiles.quantized(key, BLOCK_K, of_keys)
        self.means = block_means(key, value, keys_seen) if call.replaces_skipped else None
        scale = torch.ones_like(value[:, :, :1])
        if call.has_fp8_values:
            value, scale = quantize_fp8(value)
        elif call.quantization == "int8_fp16":
            value = to_fp16(value)
        self.values, self.value_scale = _cut(value, BLOCK_K), scale.flatten(0, 1)
        if self.means is not None:
            mean_value = self.means.value / scale
            if call.has_fp8_values:
                mean_value = to_fp8(mean_value)
            elif call.quantization == "int8_fp16":
                mean_value = to_fp16(mean_value)
            self.mean_keys = _Tiles.quantized(self.means.key, BLOCK_K, of_keys)
            self.mean_values = _cut(mean_value, BLOCK_K)


class _OnlineSoftmax:
    """The running state of online softmax for groups of rows, updated tile by tile.

    ``row_sum`` and ``accumulator`` are relative to exp(row_ref). Without FP8 values, ``row_ref`` is the maximum of the
    row so far. FP8 covers only 15 powers of two, less than the range between an attention sink and a long tail. With
    FP8 values, ``row_ref`` is therefore the maximum of the latest tile, but at most `ROW_REF_RANGE` below that of the
    row.
    """

    def __init__(
        self, like: Tensor, sizes: tuple[int, int], value_dim: int, quantization: str, accumulation: Accumulation
    ) -> None:
        """Create the state of ``sizes`` = (groups, rows), on the device and with the dtype of ``like``."""
        self.quantization, self.accumulation = quantization, accumulation
        self.has_fp8 = quantization in ("int8_fp8", "int8_fp8_fast")
        self.running_max = like.new_full((*sizes, 1), -math.inf)
        self.row_ref = self.running_max.clone()
        self.row_sum = like.new_zeros(*sizes, 1)
        self.accumulator = like.new_zeros(*sizes, value_dim)

    def gap(self, groups: slice, local_max: Tensor) -> Tensor:
        """Return a tile's row maxima (groups, rows, 1) minus the running maxima that include them, at most 0."""
        new_max = torch.maximum(self.running_max[groups], local_max)
        return torch.where(local_max == -math.inf, -math.inf, local_max - new_max)

    def add(self, groups: slice | Tensor, scores: Tensor, value: Tensor, local_max: Tensor) -> None:
        """Add a tile to the state of ``groups``.

        If the scores of a row span more than the range of FP8, the tile is added in two parts, low scores first.

        Args:
            scores: (groups, rows, 64)
            value: (groups, 64, Dv)
            local_max: maximum of each row of the tile, (groups, rows, 1)
        """
        self.running_max[groups] = new_max = torch.maximum(self.running_max[groups], local_max)
        if not self.has_fp8:
            self._add_part(groups, scores, value, new_max)
            return
        row_ref = torch.maximum(local_max, new_max - ROW_REF_RANGE * math.log(2.0))
        edge = row_ref - FP8_RANGE * math.log(2.0)
        is_low = scores <= edge
        has_low = (is_low & (scores > -math.inf)).any(-1, keepdim=True)
        if bool(has_low.any()):
            low_ref = torch.where(has_low, edge, self.row_ref[groups])  # other rows do not change
            self._add_part(groups, scores.masked_fill(~is_low | ~has_low, -math.inf), value, low_ref)
            scores = scores.masked_fill(is_low, -math.inf)
        self._add_part(groups, scores, value, row_ref)

    def _add_part(self, groups: slice | Tensor, scores: Tensor, value: Tensor, new_ref: Tensor) -> None:
        """Add P V of a tile, with P relative to ``new_ref``."""
        shift = new_ref.masked_fill(new_ref == -math.inf, 0.0)
        decay = (self.row_ref[groups] - shift).exp()
        probability = scores - shift
        if self.quantization == "int8_fp8_fast":
            probability = fp8_from_log2(probability / math.log(2.0)) / FP8_MAX
        else:
            probability = probability.exp()
        self.row_sum[groups] = self.row_sum[groups] * decay + probability.sum(-1, keepdim=True)
        if self.has_fp8:
            probability = to_fp8(probability * FP8_MAX)
        elif self.quantization == "int8_fp16":
            probability = to_fp16(probability * 2**FP16_ROOM) / 2**FP16_ROOM
        self.accumulator[groups] = self._accumulate(self.accumulator[groups] * decay, probability, value)
        self.row_ref[groups] = new_ref

    def _accumulate(self, accumulator: Tensor, probability: Tensor, value: Tensor) -> Tensor:
        """Return ``accumulator`` + P V. With FP8 values, P is scaled by 448."""
        if not self.has_fp8 or self.accumulation == "exact":
            return accumulator + torch.bmm(probability, value)
        is_single_level = self.accumulation == "single_level"
        sums = accumulator.clone() if is_single_level else torch.zeros_like(accumulator)
        for tile_p, tile_v, tile_sum in zip(probability, value, sums, strict=True):
            rows = (tile_p != 0).any(1) | (tile_sum != 0).any(1)  # the padding of a query block is 0
            tile_sum[rows] = fp8_tensor_core(tile_p[rows], tile_v, tile_sum[rows])
        return sums if is_single_level else accumulator + sums

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the output without V's scale, (groups, rows, Dv), and the LSE, (groups, rows)."""
        is_empty = self.row_sum == 0
        unit = FP8_MAX if self.has_fp8 else 1.0
        output = self.accumulator / (unit * self.row_sum.masked_fill(is_empty, 1.0))
        return output.masked_fill(is_empty, 0.0), (self.row_ref + self.row_sum.log()).squeeze(-1)


class _QBlocks:
    """A batch of query blocks and their softmax so far. The first ones are active: they have more key blocks to add."""

    def __init__(self, operands: _Operands, q_indices: Tensor, accumulation: Accumulation) -> None:
        call, shape = operands.call, operands.call.shape
        self.operands, self.call, self.q_indices = operands, call, q_indices
        head, block = q_indices // shape.q_blocks, q_indices % shape.q_blocks
        self.kv_head = head // shape.group  # of all batch elements
        self.queries = _Tiles(*(part.flatten(0, 1)[q_indices] for part in operands.queries))
        sizes = (len(q_indices) * GROUPS, ROW_GROUP)
        self.softmax = _OnlineSoftmax(self.queries.tokens, sizes, shape.value_dim, call.quantization, accumulation)
        if call.pv_threshold is not None:
            threshold = per_head(call.pv_threshold, shape.heads, q_indices.device).to(self.softmax.row_sum.dtype)
            self.threshold = threshold[head % shape.heads].repeat_interleave(GROUPS, 0)  # [groups, 1, 1]
            positions = block[:, None] * BLOCK_Q + torch.arange(BLOCK_Q, device=q_indices.device)
            self.is_padding = (positions >= shape.q_len).view(*sizes, 1)
            has_one_group = (shape.q_len - block * BLOCK_Q <= ROW_GROUP).long()
            self.weight = torch.stack([1 + has_one_group, 1 - has_one_group], 1).flatten()  # [groups]

    def scores(self, tiles: _Tiles, column: Tensor) -> Tensor:
        """Return the scores of the active query blocks for one tile of keys each, (n,) -> (n, 128, 64).

        Groups of 64 queries that INT8 is too coarse for have scores from unquantized Q and K.
        """
        active, scale = len(column), self.call.scale
        place = self.kv_head[:active], column
        scores = torch.bmm(self.queries.tokens[:active], tiles.tokens[place].mT)
        if not self.call.is_quantized:
            return scores.mul_(scale)
        query_scale, key_scale = self.queries.scale[:active], tiles.scale[place]
        scores = scores.mul_(query_scale * scale).mul_(key_scale.mT)
        coarse = is_coarse(query_scale, key_scale, scale, self.call.shape.head_dim)
        coarse = coarse.view(active, GROUPS, -1).any(-1).repeat_interleave(ROW_GROUP, 1)[..., None]  # [n, 128, 1]
        if bool(coarse.any()):
            exact = torch.bmm(self.queries.exact[:active], tiles.exact[place].mT) * scale
            scores = torch.where(coarse, exact, scores)
        return scores

    def add(self, scores: Tensor, values: Tensor, column: Tensor) -> Tensor:
        """Add scores (n, 128, 64) of one tile for each active query block. Return the number of groups that skip it."""
        scores = scores.view(-1, ROW_GROUP, BLOCK_K)  # [groups, 64, 64]
        value = values[self.kv_head[: len(column)], column].repeat_interleave(GROUPS, 0)
        local_max = scores.amax(-1, keepdim=True)
        groups = slice(0, len(scores))
        if self.call.pv_threshold is None:
            self.softmax.add(groups, scores, value, local_max)
            return torch.zeros_like(column)
        is_below = self.softmax.gap(groups, local_max) < self.threshold[groups]
        is_skipped = (is_below | self.is_padding[groups]).all(1).flatten()
        live = (~is_skipped).nonzero().flatten()
        self.softmax.add(live, scores[live], value[live], local_max[live])
        return (self.weight[groups] * is_skipped).view(-1, GROUPS).sum(1)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the output (n, 128, Dv) and the LSE (n, 128) of the scores after smoothing."""
        output, lse = self.softmax.finish()
        output = output.view(len(self.q_indices), BLOCK_Q, -1) * self.operands.value_scale[self.kv_head]
        return output, lse.view(-1, BLOCK_Q)
