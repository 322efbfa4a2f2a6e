"""Attention by online softmax over the kept blocks: quantization if requested, skipping of P V, LSE."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, ROW_GROUP
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
from sparge.reference.shared import element_mask, smooth_key, value_of_head, visible_keys

Accumulation = Literal["two_level", "single_level"]


class AttentionResult(NamedTuple):
    """Output (B, H, Sq, Dv) and LSE (B, H, Sq), float64, and counts of skipped P V products, (B, H, q_blocks).

    ``pv_skipped`` counts halves of kept blocks, 64 queries by 64 keys. If the second half of a query block has no
    queries, it counts as skipped whenever the first half is. ``means_skipped`` counts tiles of means, 64 queries by 64
    means.
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
            "single_level" uses one for all tiles, which is less accurate.
    """
    shape, scale = call.shape, call.scale
    masks = element_mask(call, query.device)
    keys_seen = visible_keys(masks.allowed, shape.kv_heads)
    query, key, value = query.double(), key.double(), value.double()
    query = torch.where(masks.allowed.any(3, keepdim=True), query, 0.0)
    key = torch.where(keys_seen[..., None], key, 0.0)
    value = torch.where(keys_seen[..., None], value, 0.0)
    mean_score = torch.zeros_like(query[..., 0])
    if call.is_quantized:
        query, key, mean_score = prepare_for_int8(query, key, keys_seen, scale)

    kept = mask.to_dense()
    means = block_means(key, value, keys_seen)
    bias_of_means = mean_bias(means, kept, shape, call.window)
    output = torch.zeros(*query.shape[:3], shape.value_dim, dtype=torch.float64, device=query.device)
    lse = torch.full(query.shape[:3], -math.inf, dtype=torch.float64, device=query.device)
    pv_skipped = torch.zeros(kept.shape[:3], dtype=torch.int64, device=query.device)
    means_skipped = torch.zeros_like(pv_skipped)
    for b in range(shape.batch):
        for h in range(shape.heads):
            kv = h // shape.group
            head_means = (means.key[b, kv], means.value[b, kv]) if call.replaces_skipped else None
            head = _Head(query[b, h], key[b, kv], value[b, kv], head_means, call, accumulation)
            threshold = value_of_head(call.pv_threshold, h, shape)
            for first in range(0, shape.q_len, ROW_GROUP):
                rows = slice(first, min(first + ROW_GROUP, shape.q_len))
                i = first // BLOCK_Q
                columns = kept[b, h, i].nonzero().flatten().tolist()
                tiles = head.tiles(rows, columns, masks.allowed[b, h], masks.bias[b, h])
                tiles = chain(tiles, head.mean_tiles(rows, bias_of_means[b, h, i]))
                output[b, h, rows], lse[b, h, rows], skipped = head.attend(rows.stop - rows.start, tiles, threshold)
                weight = 2 if shape.q_len - i * BLOCK_Q <= ROW_GROUP else 1
                pv_skipped[b, h, i] += weight * sum(skipped[: len(columns)])
                means_skipped[b, h, i] += sum(skipped[len(columns) :])
    return AttentionResult(output, lse + mean_score, pv_skipped, means_skipped)


def prepare_for_int8(query: Tensor, key: Tensor, keys_seen: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Smooth, balance and mix Q and K: (B, H, Sq, D), (B, Hkv, Sk, D) -> (B, H, Sq, D'), (B, Hkv, Sk, D'), (B, H, Sq).

    The last result is the score of the mean that smoothing subtracts from every key.
    """
    group = query.shape[1] // key.shape[1]
    key, key_mean = smooth_key(key, keys_seen)
    mean_score = scale * (query @ key_mean.repeat_interleave(group, 1).mT).squeeze(-1)
    factors = balance(query, key, keys_seen)
    return mix(query * factors.repeat_interleave(group, 1)) * MIXED, mix(key / factors), mean_score


class OnlineSoftmax:
    """The running state of online softmax for groups of rows, updated tile by tile.

    ``row_sum`` and ``accumulator`` are relative to exp(row_ref). FP8 covers 15 powers of two, less than the range
    between an attention sink and a long tail. With FP8 values, ``row_ref`` is therefore the maximum of the latest tile
    alone (but at most `ROW_REF_RANGE` below the maximum of the row); otherwise, it is the maximum of the row so far.
    """

    def __init__(self, like: Tensor, sizes: tuple[int, int], value_dim: int, quantization: str) -> None:
        """Create the state of ``sizes`` = (groups, rows), on the device and with the dtype of ``like``."""
        self.quantization = quantization
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
        """Add a tile for some groups: scores (groups, rows, 64), values (groups, 64, Dv), maxima (groups, rows, 1).

        If FP8 cannot represent all of a row's P, it is added in two parts, lower scores first.
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
        self.accumulator[groups] = self.accumulate(self.accumulator[groups] * decay, probability, value)
        self.row_ref[groups] = new_ref

    def accumulate(self, accumulator: Tensor, probability: Tensor, value: Tensor) -> Tensor:
        """Return ``accumulator`` + P V. With FP8 values, P is scaled by 448."""
        return accumulator + torch.bmm(probability, value)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the output without V's scale, (groups, rows, Dv), and the LSE, (groups, rows)."""
        is_empty = self.row_sum == 0
        unit = FP8_MAX if self.has_fp8 else 1.0
        output = self.accumulator / (unit * self.row_sum.masked_fill(is_empty, 1.0))
        return output.masked_fill(is_empty, 0.0), (self.row_ref + self.row_sum.log()).squeeze(-1)


class _TensorCoreSoftmax(OnlineSoftmax):
    """`OnlineSoftmax` of one group, with FP8 products computed as a tensor core does."""

    is_single_level = False

    def accumulate(self, accumulator: Tensor, probability: Tensor, value: Tensor) -> Tensor:
        if not self.has_fp8:
            return super().accumulate(accumulator, probability, value)
        if self.is_single_level:
            return fp8_tensor_core(probability[0], value[0], accumulator[0])[None]
        return accumulator + fp8_tensor_core(probability[0], value[0], torch.zeros_like(accumulator[0]))


class _Head:
    """One head's quantized operands, and the online softmax over them."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        means: tuple[Tensor, Tensor] | None,
        call: Call,
        accumulation: Accumulation,
    ) -> None:
        self.query, self.key, self.value, self.means = query, key, value, means
        self.exact_query, self.exact_key = query, key
        self.query_scale, self.key_scale = torch.ones_like(query[:, :1]), torch.ones_like(key[:, :1])
        self.value_scale = torch.ones_like(value[:1])
        quantization = call.quantization
        self.scale, self.quantization, self.accumulation = call.scale, quantization, accumulation
        self.head_dim = call.shape.head_dim
        if call.is_quantized:
            self.query_scale, self.key_scale = query_scales(query), key_scales(key)
            self.query = quantize_int8(query, self.query_scale).double()
            self.key = quantize_int8(key, self.key_scale).double()
        self.fp8_values = call.has_fp8_values
        if self.fp8_values:
            self.value, self.value_scale = quantize_fp8(value)
        elif quantization == "int8_fp16":
            self.value = to_fp16(value)

    def tiles(self, rows: slice, columns: list[int], allowed: Tensor, bias: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield scores (n, 64) and values (64, Dv) of the given key blocks for the given queries, in order."""
        for j in columns:
            keys = slice(j * BLOCK_K, min((j + 1) * BLOCK_K, len(self.key)))
            scores = self._scores(rows, self.key[keys], self.key_scale[keys], self.exact_key[keys]) + bias[rows, keys]
            yield scores.masked_fill(~allowed[rows, keys], -math.inf), self.value[keys]

    def mean_tiles(self, rows: slice, bias: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield scores and values of 64 means of key blocks at a time; ``bias`` (kv_blocks,) is added to the scores."""
        if self.means is None:
            return
        key, value = self.means
        exact_key, key_scale = key, torch.ones_like(key[:, :1])
        if self.quantization != "none":
            key_scale = key_scales(key)
            key = quantize_int8(key, key_scale).double()
        if self.fp8_values:
            value = to_fp8(value / self.value_scale)
        elif self.quantization == "int8_fp16":
            value = to_fp16(value)
        for first in range(0, len(key), BLOCK_K):
            blocks = slice(first, min(first + BLOCK_K, len(key)))
            scores = self._scores(rows, key[blocks], key_scale[blocks], exact_key[blocks]) + bias[blocks]
            yield scores.masked_fill(bias[blocks] == -math.inf, -math.inf), value[blocks]

    def attend(
        self, count: int, tiles: Iterable[tuple[Tensor, Tensor]], threshold: float | None
    ) -> tuple[Tensor, Tensor, list[bool]]:
        """Compute attention of ``count`` <= 64 rows, which skip P V together, over tiles of scores and values in order.

        Returns:
            Output, LSE, and whether each tile was skipped.
        """
        softmax = _TensorCoreSoftmax(self.query, (1, count), self.value.shape[1], self.quantization)
        softmax.is_single_level = self.accumulation == "single_level"
        group, skipped = slice(0, 1), []
        for scores, value in tiles:
            local_max = scores[None].amax(-1, keepdim=True)
            skipped.append(threshold is not None and bool((softmax.gap(group, local_max) < threshold).all()))
            if not skipped[-1]:
                softmax.add(group, scores[None], value[None], local_max)
        output, lse = softmax.finish()
        return output[0] * self.value_scale, lse[0], skipped

    def _scores(self, rows: slice, key: Tensor, key_scale: Tensor, exact_key: Tensor) -> Tensor:
        """Return the scores of a tile from the INT8 values, or from unquantized Q and K where INT8 is too coarse."""
        if self.quantization != "none":
            coarse = is_coarse(self.query_scale[rows], key_scale, self.scale, self.head_dim)
            if bool(coarse.any()):
                return self.exact_query[rows] @ exact_key.mT * self.scale
        return self.query[rows] @ key.mT * self.query_scale[rows] * key_scale.mT * self.scale
