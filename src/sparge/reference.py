"""Every stage of the method in plain PyTorch, slow and obvious: the specification and the oracle of the tests.

The stages, in the order of the data flow (docs/algorithm.md has the mathematics):

    element_mask -> smooth_key -> pool, self_similarity -> score_mean | score_moment -> select -> BlockMask
    8-bit codes (`eight_bits`) -> attention (online softmax over kept blocks, stage-2 skipping, LSE)

Shapes follow `geometry.Shape`: query (B, H, Sq, D), key (B, Hkv, Sk, D), value (B, Hkv, Sk, Dv). Everything is
computed in float64 unless a step is a low-precision one by definition. Memory is quadratic in the length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparge.block_mask import BlockMask
from sparge.config import Dense, Mean, Score, Sparsity, TopCdf, TopK, per_head
from sparge.eight_bits import (
    FP8_MAX,
    FP8_RANGE,
    FP16_ROOM,
    MIXED,
    REACH,
    balance,
    fp8_from_log2,
    fp8_tensor_core,
    key_scales,
    mix,
    quantize_fp8,
    quantize_int8,
    query_scales,
    to_fp8,
    to_fp16,
)
from sparge.geometry import BLOCK_K, BLOCK_Q, ROW_GROUP, Shape
from sparge.visibility import allowed_elements

Accumulation = Literal["two_level", "single_level"]
FP8_MODES = ("int8_fp8", "int8_fp8_codes")


class ElementMask(NamedTuple):
    """Both tensors are (B, H, Sq, Sk): which keys a query sees, and what is added to the scores."""

    allowed: Tensor
    bias: Tensor


class AttentionResult(NamedTuple):
    """``output`` (B, H, Sq, Dv) and ``lse`` (B, H, Sq), float64; ``pv_skipped`` (B, H, q_blocks): 64-row products."""

    output: Tensor
    lse: Tensor
    pv_skipped: Tensor


def element_mask(shape: Shape, is_causal: bool, attn_mask: Tensor | None, device: torch.device) -> ElementMask:
    """Combine bottom-right causality with a boolean or additive mask."""
    full = (shape.batch, shape.heads, shape.q_len, shape.kv_len)
    allowed = torch.ones(full, dtype=torch.bool, device=device)
    bias = torch.zeros(full, dtype=torch.float64, device=device)
    if is_causal:
        queries = torch.arange(shape.q_len, device=device)[:, None] + shape.causal_offset
        allowed &= torch.arange(shape.kv_len, device=device) <= queries
    if attn_mask is not None:
        allowed &= allowed_elements(attn_mask)
        if attn_mask.dtype != torch.bool:
            bias = torch.where(allowed, attn_mask.double(), 0.0)
    return ElementMask(allowed, bias)


def visible_blocks(allowed: Tensor) -> Tensor:
    """(B, H, Sq, Sk) -> (B, H, q_blocks, kv_blocks): some query of the block sees some key of the block."""
    rows = [
        torch.stack([tile.any(-1).any(-1) for tile in row.split(BLOCK_K, dim=3)], -1)
        for row in allowed.split(BLOCK_Q, dim=2)
    ]
    return torch.stack(rows, 2)


def _visible_keys(allowed: Tensor, kv_heads: int) -> Tensor:
    """(B, Hkv, Sk): keys that some query of some head of the group sees."""
    return allowed.any(2).unflatten(1, (kv_heads, -1)).any(2)


def smooth_key(key: Tensor, keys_seen: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the per-channel mean over the visible, finite tokens; returns (smoothed, mean (B, Hkv, 1, D)).

    Softmax does not change: q . (k - mean) differs from q . k by the same number for every key.
    """
    usable = keys_seen[..., None] & key.isfinite().all(-1, keepdim=True)
    count = usable.sum(2, keepdim=True).clamp(min=1)
    mean = torch.where(usable, key, 0.0).sum(2, keepdim=True) / count
    return torch.where(keys_seen[..., None], key - mean, 0.0), mean


def smooth_key_for_judge(key: Tensor, keys_seen: Tensor, is_causal: bool) -> Tensor:
    """The keys a block is judged by: smoothed, and without a look at the future.

    The mean over all tokens lets one late outlier decide whether early tokens agree. In causal attention each block is
    therefore smoothed by the mean of the tokens up to its own end.
    """
    if not is_causal:
        return smooth_key(key, keys_seen)[0]
    ends = [min(start + BLOCK_K, key.shape[2]) for start in range(0, key.shape[2], BLOCK_K)]
    parts = [smooth_key(key[:, :, :end], keys_seen[:, :, :end])[0] for end in ends]
    return torch.cat([part[:, :, index * BLOCK_K :] for index, part in enumerate(parts)], 2)


def token_blocks(tokens: Tensor, seen: Tensor, block: int) -> Iterator[Tensor]:
    """The visible tokens of each block of one head: (S, D), (S,) -> blocks of (n <= block, D)."""
    for part, part_seen in zip(tokens.split(block), seen.split(block), strict=True):
        yield part[part_seen]


def pool(tokens: Tensor, seen: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Mean and (population) variance per channel of each block: two tensors of shape (blocks, D)."""
    means, variances = [], []
    for part in token_blocks(tokens, seen, block):
        empty = len(part) == 0
        mean = torch.zeros_like(tokens[0]) if empty else part.mean(0)
        means.append(mean)
        variances.append(torch.zeros_like(mean) if empty else (part - mean).square().mean(0))
    return torch.stack(means), torch.stack(variances)


def self_similarity(tokens: Tensor, seen: Tensor, block: int) -> Tensor:
    """Mean cosine over all pairs of tokens of each block, (blocks,), in [0, 1]: |mean of the unit vectors|^2."""
    result = []
    for part in token_blocks(tokens, seen, block):
        units = torch.nn.functional.normalize(part, dim=-1)
        result.append(units.mean(0).square().sum() if len(part) else units.new_zeros(()))
    return torch.stack(result)


def sample_queries(seen: Tensor, samples: int) -> Tensor:
    """Positions of ``samples`` evenly spaced visible queries per block: (Sq,) bool -> (q_blocks, samples).

    With n visible queries in a block, sample s is the floor((2 s + 1) n / (2 samples))-th of them; a block without
    any samples its first query (its row sees nothing anyway).
    """
    picks = []
    for block_index, part in enumerate(seen.split(BLOCK_Q)):
        positions = part.nonzero().flatten().tolist() or [0]
        ranks = [(2 * s + 1) * len(positions) // (2 * samples) for s in range(samples)]
        picks.append([block_index * BLOCK_Q + positions[rank] for rank in ranks])
    return torch.tensor(picks, device=seen.device)


def log_mean_exp(bias: Tensor, allowed: Tensor) -> Tensor:
    """log of the mean of exp(bias) over the allowed elements, 0 without any: what a bias adds to a block's worth."""
    if not allowed.any():
        return bias.new_zeros(())
    return bias[allowed].logsumexp(0) - math.log(int(allowed.sum()))


def score_mean(query_means: Tensor, key_means: Tensor, scale: float, allowed: Tensor, bias: Tensor) -> Tensor:
    """The paper's compressed scores of one head, (q_blocks, 1, kv_blocks): q_i . k_j * scale + bias."""
    scores = query_means @ key_means.mT * scale
    for i, (allowed_row, bias_row) in enumerate(zip(allowed.split(BLOCK_Q), bias.split(BLOCK_Q), strict=True)):
        tiles = zip(allowed_row.split(BLOCK_K, -1), bias_row.split(BLOCK_K, -1), strict=True)
        scores[i] += torch.stack([log_mean_exp(bias_tile, seen) for seen, bias_tile in tiles])
    return scores[:, None]


def score_moment(
    queries: Tensor,
    key_means: Tensor,
    key_variances: Tensor,
    scale: float,
    allowed: Tensor,
    bias: Tensor,
) -> Tensor:
    """Second-order scores of sampled queries, (q_blocks, samples, kv_blocks).

    log mean_k exp(scale q.k + bias) ~ scale q.mean + scale^2 / 2 (q^2).variance + log mean exp(bias)

    Args:
        queries: (q_blocks, samples, D).
        key_means, key_variances: (kv_blocks, D).
        allowed, bias: (q_blocks, samples, Sk), the sampled rows of the masks.
    """
    scores = queries @ key_means.mT * scale + queries.square() @ key_variances.mT * (scale**2 / 2)
    for i in range(scores.shape[0]):
        for s in range(scores.shape[1]):
            tiles = zip(allowed[i, s].split(BLOCK_K), bias[i, s].split(BLOCK_K), strict=True)
            scores[i, s] += torch.stack([log_mean_exp(bias_tile, seen) for seen, bias_tile in tiles])
    return scores


def block_probabilities(scores: Tensor, judged: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of each query's scores over the judged blocks, averaged over the queries.

    Args:
        scores: (q_blocks, queries, kv_blocks).
        judged: (q_blocks, kv_blocks), visible blocks that a summary may judge.

    Returns:
        Probabilities (q_blocks, kv_blocks) and a bool tensor of the same shape that marks blocks whose score is not
        finite: these take no part in the softmax and are always kept, so that NaN and Inf reach the output.
    """
    broken = ~scores.isfinite() & judged[:, None]
    scores = scores.masked_fill(broken | ~judged[:, None], -math.inf)
    probabilities = scores.softmax(-1).nan_to_num(0.0)  # a row of -inf only has no probabilities
    return probabilities.mean(1), broken.any(1)


def forced_blocks(
    shape: Shape, sparsity: TopK | TopCdf, is_causal: bool, always_keep: Sequence[tuple[int, int]], visible: Tensor
) -> Tensor:
    """Blocks kept whatever their score, (q_blocks, kv_blocks): sink, diagonal and the caller's key ranges.

    The sink is the first block any query sees (``visible`` is (q_blocks, kv_blocks)): block 0, or what comes after
    padding on the left.
    """
    forced = torch.zeros(shape.q_blocks, shape.kv_blocks, dtype=torch.bool)
    if sparsity.keeps_sink(is_causal):
        seen = visible.any(0).nonzero()
        forced[:, seen[:1]] = True
    for i in range(shape.q_blocks):
        first = i * BLOCK_Q + shape.causal_offset
        last = min((i + 1) * BLOCK_Q, shape.q_len) - 1 + shape.causal_offset
        for j in range(shape.kv_blocks):
            if sparsity.keeps_diagonal(is_causal) and j * BLOCK_K <= last and first < (j + 1) * BLOCK_K:
                forced[i, j] = True
            if any(start < (j + 1) * BLOCK_K and j * BLOCK_K < stop for start, stop in always_keep):
                forced[i, j] = True
    return forced


def unfinished_blocks(shape: Shape, is_causal: bool) -> Tensor:
    """Blocks that hold keys after the row's last query, (q_blocks, kv_blocks).

    Their summary knows the future, so they are kept without a score. They exist only when S_k - S_q is no multiple of
    the key block, and then lie on the diagonal.
    """
    unfinished = torch.zeros(shape.q_blocks, shape.kv_blocks, dtype=torch.bool)
    for i in range(shape.q_blocks if is_causal else 0):
        last = min((i + 1) * BLOCK_Q, shape.q_len) - 1 + shape.causal_offset
        for j in range(shape.kv_blocks):
            unfinished[i, j] = j * BLOCK_K <= last < min((j + 1) * BLOCK_K, shape.kv_len) - 1
    return unfinished


def topk_budget(topk: float, visible: int, min_blocks: int) -> int:
    """Blocks a row keeps: ceil(topk * visible), at least ``min_blocks`` and one, at most what it sees.

    The share is lowered by 1e-7 of itself so that rounding (.1 in fp32 times 1280) does not add a block.
    """
    share = math.ceil(topk * visible * (1 - 1e-7))
    return min(max(share, min_blocks, 1), visible)


def select_row(
    probabilities: Tensor,
    visible: Tensor,
    forced: Tensor,
    unjudged: Tensor,
    *,
    min_blocks: int,
    topk: float | None = None,
    cdf: float | None = None,
) -> Tensor:
    """The kept blocks of one row; every argument and the result have shape (kv_blocks,).

    Forced blocks come first and count towards the budget; then falling probability, ties to the lower index.
    Unjudged (fix) blocks are kept on top of it.
    """
    kept = forced & visible
    candidates = [j for j in range(len(visible)) if visible[j] and not unjudged[j]]
    ranked = sorted(candidates, key=lambda j: (not forced[j], -float(probabilities[j]), j))
    floor = topk_budget(0.0 if topk is None else topk, int(visible.sum()), min_blocks)
    kept[ranked[:floor]] = True
    if cdf is not None:
        covered = 0.0
        for j in sorted(candidates, key=lambda j: (-float(probabilities[j]), j)):
            if covered >= cdf and cdf < 1:
                break
            kept[j] = True
            covered += float(probabilities[j])
    return kept | (unjudged & visible)


def predict(
    query: Tensor,
    key: Tensor,
    shape: Shape,
    *,
    sparsity: Sparsity,
    score: Score,
    is_causal: bool,
    scale: float,
    attn_mask: Tensor | None = None,
    always_keep: Sequence[tuple[int, int]] = (),
) -> BlockMask:
    """Stage 1: which blocks of the attention map to compute."""
    masks = element_mask(shape, is_causal, attn_mask, query.device)
    visible = visible_blocks(masks.allowed)

    def finish(dense: Tensor) -> BlockMask:
        return BlockMask.from_dense(dense, q_len=shape.q_len, kv_len=shape.kv_len, is_causal=is_causal, visible=visible)

    if isinstance(sparsity, Dense):
        return finish(visible)

    query, key = query.double(), key.double()
    keys_seen = _visible_keys(masks.allowed, shape.kv_heads)
    queries_seen = masks.allowed.any(3)
    smoothed = smooth_key_for_judge(key, keys_seen, is_causal)
    unfinished = unfinished_blocks(shape, is_causal).to(query.device)
    kept = torch.zeros_like(visible)
    for b in range(shape.batch):
        for h in range(shape.heads):
            kv = h // shape.group
            key_means, key_variances = pool(key[b, kv], keys_seen[b, kv], BLOCK_K)
            unjudged = _fix_blocks(
                self_similarity(query[b, h], queries_seen[b, h], BLOCK_Q),
                self_similarity(smoothed[b, kv], keys_seen[b, kv], BLOCK_K),
                _of_head(sparsity.similarity_threshold, h, shape),
            )
            unjudged = unjudged & ~unfinished  # whether such a block takes a place must not depend on its keys
            allowed, bias = masks.allowed[b, h], masks.bias[b, h]
            if isinstance(score, Mean):
                query_means, _ = pool(query[b, h], queries_seen[b, h], BLOCK_Q)
                scores = score_mean(query_means, key_means, scale, allowed, bias)
            else:
                picks = sample_queries(queries_seen[b, h], score.samples)
                scores = score_moment(query[b, h][picks], key_means, key_variances, scale, allowed[picks], bias[picks])
            probabilities, broken = block_probabilities(scores, visible[b, h] & ~unjudged & ~unfinished)
            forced = forced_blocks(shape, sparsity, is_causal, always_keep, visible[b, h]).to(query.device) | unfinished
            for i in range(shape.q_blocks):
                kept[b, h, i] = select_row(
                    probabilities[i],
                    visible[b, h, i],
                    forced[i] | broken[i],
                    unjudged[i],
                    min_blocks=sparsity.min_blocks,
                    topk=_of_head(sparsity.topk, h, shape) if isinstance(sparsity, TopK) else None,
                    cdf=_of_head(sparsity.cdf, h, shape) if isinstance(sparsity, TopCdf) else None,
                )
    return finish(kept)


def _of_head(value: float | Tensor | None, head: int, shape: Shape) -> float | None:
    return None if value is None else float(per_head(value, shape.heads, torch.device("cpu"))[head])


def _fix_blocks(query_similarity: Tensor, key_similarity: Tensor, threshold: float | None) -> Tensor:
    """(q_blocks, kv_blocks): rows and columns whose tokens disagree too much to be judged."""
    if threshold is None:
        return torch.zeros(
            len(query_similarity),
            len(key_similarity),
            dtype=torch.bool,
            device=key_similarity.device,
        )
    return (query_similarity < threshold)[:, None] | (key_similarity < threshold)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    shape: Shape,
    *,
    scale: float,
    attn_mask: Tensor | None = None,
    quantization: str = "none",
    pv_threshold: float | Tensor | None = None,
    accumulation: Accumulation = "two_level",
) -> AttentionResult:
    """Stage 2 and the output: online softmax over the kept blocks of every row.

    Args:
        mask: kept blocks; its ``is_causal`` decides causality inside them.
        quantization: "none", "int8_fp8" (INT8 Q K^T, FP8 P V), "int8_fp8_codes" (the same without exponentials, see
            `fp8_from_log2`) or "int8_fp16" (INT8 Q K^T, FP16 P V).
        pv_threshold: skip P V of 64 rows whose scores all lie further below the running maximum (natural log, < 0).
        accumulation: "two_level" gives every tile of 64 keys a fresh FP8 accumulator; "single_level" keeps one for
            the whole row, which is how accuracy is lost.
    """
    masks = element_mask(shape, mask.is_causal, attn_mask, query.device)
    keys_seen = _visible_keys(masks.allowed, shape.kv_heads)
    query, key, value = query.double(), key.double(), value.double()
    query = torch.where(masks.allowed.any(3, keepdim=True), query, 0.0)
    key = torch.where(keys_seen[..., None], key, 0.0)
    value = torch.where(keys_seen[..., None], value, 0.0)
    mean_score = torch.zeros_like(query[..., 0])
    if quantization != "none":
        key, key_mean = smooth_key(key, keys_seen)
        mean_score = scale * (query @ key_mean.repeat_interleave(shape.group, 1).mT).squeeze(-1)
        factors = balance(query, key, keys_seen)
        query, key = mix(query * factors.repeat_interleave(shape.group, 1)) * MIXED, mix(key / factors)

    kept = mask.to_dense()
    output = torch.zeros(*query.shape[:3], shape.value_dim, dtype=torch.float64, device=query.device)
    lse = torch.full(query.shape[:3], -math.inf, dtype=torch.float64, device=query.device)
    skipped = torch.zeros(kept.shape[:3], dtype=torch.int64, device=query.device)
    for b in range(shape.batch):
        for h in range(shape.heads):
            kv = h // shape.group
            head = _Head(query[b, h], key[b, kv], value[b, kv], scale, quantization, accumulation)
            threshold = _of_head(pv_threshold, h, shape)
            for first in range(0, shape.q_len, ROW_GROUP):
                rows = slice(first, min(first + ROW_GROUP, shape.q_len))
                i = first // BLOCK_Q
                columns = kept[b, h, i].nonzero().flatten().tolist()
                result = head.attend(rows, columns, masks.allowed[b, h], masks.bias[b, h], threshold)
                output[b, h, rows], lse[b, h, rows] = result.output, result.lse
                skipped[b, h, i] += int(result.pv_skipped)
    return AttentionResult(output, lse + mean_score, skipped)


class _Head:
    """One head's operands, quantised as asked, and the online softmax over them."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        quantization: str,
        accumulation: Accumulation,
    ) -> None:
        self.query, self.key, self.value = query, key, value
        self.query_scale, self.key_scale = torch.ones_like(query[:, :1]), torch.ones_like(key[:, :1])
        self.value_scale = torch.ones_like(value[:1])
        self.scale, self.quantization, self.accumulation = scale, quantization, accumulation
        if quantization != "none":
            self.query_scale, self.key_scale = query_scales(query), key_scales(key)
            self.query = quantize_int8(query, self.query_scale).double()
            self.key = quantize_int8(key, self.key_scale).double()
        self.fp8_values = quantization in FP8_MODES
        if self.fp8_values:
            self.value, self.value_scale = quantize_fp8(value)
        elif quantization == "int8_fp16":
            self.value = to_fp16(value)

    def attend(
        self,
        rows: slice,
        columns: list[int],
        allowed: Tensor,
        bias: Tensor,
        threshold: float | None,
    ) -> AttentionResult:
        """Attention of up to 64 rows (one skipping group) to the given key blocks, in order.

        Sums count in units of exp(top). FP8 holds 15 octaves, fewer than lie between a sink and a long tail, so that
        ``top`` is the maximum of the latest tile alone; else it is that of the row. See `_parts`.
        """
        count = rows.stop - rows.start
        running_max = top = self.query.new_full((count, 1), -math.inf)
        row_sum = self.query.new_zeros(count, 1)
        accumulator = self.query.new_zeros(count, self.value.shape[1])
        skipped = 0
        for j in columns:
            keys = slice(j * BLOCK_K, min((j + 1) * BLOCK_K, len(self.key)))
            scores = self._scores(rows, keys) + bias[rows, keys]
            scores = scores.masked_fill(~allowed[rows, keys], -math.inf)
            local_max = scores.amax(1, keepdim=True)
            new_max = torch.maximum(running_max, local_max)
            gap = torch.where(local_max == -math.inf, -math.inf, local_max - new_max)
            if threshold is not None and bool((gap < threshold).all()):
                skipped += 1
                continue
            for part, new_top in self._parts(scores, local_max, new_max):
                shift = new_top.masked_fill(new_top == -math.inf, 0.0)
                decay = (top - shift).exp()
                probability = self._probabilities(part - shift)
                row_sum = row_sum * decay + probability.sum(1, keepdim=True)
                accumulator = self._accumulate(accumulator * decay, probability, self.value[keys])
                top = new_top
            running_max = new_max
        unit = FP8_MAX if self.fp8_values else 1.0
        nothing = row_sum == 0
        output = accumulator / (unit * row_sum.masked_fill(nothing, 1.0)) * self.value_scale
        lse = (top + row_sum.log()).squeeze(1)
        return AttentionResult(torch.where(nothing, 0.0, output), lse, torch.tensor(skipped))

    def _parts(self, scores: Tensor, local_max: Tensor, new_max: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A tile's scores, and what their P counts from: in two parts, the lower first, where FP8 cannot hold both."""
        if not self.fp8_values:
            return [(scores, new_max)]
        top = torch.maximum(local_max, new_max - REACH * math.log(2.0))
        edge = top - FP8_RANGE * math.log(2.0)
        lower, upper = scores.masked_fill(scores > edge, -math.inf), scores.masked_fill(scores <= edge, -math.inf)
        has_lower = bool((lower > -math.inf).any())
        return [(lower, edge), (upper, top)] if has_lower else [(scores, top)]

    def _scores(self, rows: slice, keys: slice) -> Tensor:
        return self.query[rows] @ self.key[keys].mT * self.query_scale[rows] * self.key_scale[keys].mT * self.scale

    def _probabilities(self, log_probability: Tensor) -> Tensor:
        if self.quantization == "int8_fp8_codes":
            return fp8_from_log2(log_probability / math.log(2.0)) / FP8_MAX
        return log_probability.exp()

    def _accumulate(self, accumulator: Tensor, probability: Tensor, value: Tensor) -> Tensor:
        """P V of one tile. The FP8 accumulator carries P's factor of 448."""
        if self.quantization == "int8_fp16":
            return accumulator + to_fp16(probability * 2**FP16_ROOM) / 2**FP16_ROOM @ value
        if self.quantization == "none":
            return accumulator + probability @ value
        codes = to_fp8(probability * FP8_MAX)
        if self.accumulation == "single_level":
            return fp8_tensor_core(codes, value, accumulator)
        return accumulator + fp8_tensor_core(codes, value, torch.zeros_like(accumulator))
