"""Prediction in batched PyTorch, for any device: block statistics -> scores -> selection -> BlockMask.

Agrees with `reference.predict` block by block, except for ties. Scores are computed in float32 for a few query blocks
at a time, so that the largest intermediate stays near `CHUNK_BYTES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.backends.base import Candidates
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape, ceil_div
from sparge.masks.visibility import (
    Visibility,
    allowed_elements,
    block_edges,
    find_visibility,
    unfinished_blocks,
    window_elements,
)
from sparge.masks.window import Window
from sparge.numerics.budget_allocation import allocate
from sparge.options.common import per_head
from sparge.options.rules import (
    BUDGET_BITS,
    BUDGET_LEVELS,
    GUARANTEED,
    ROUNDING_GUARD,
    Budget,
    Dense,
    Selection,
    TopCdf,
    TopK,
    budget_top,
)
from sparge.options.scores import NEGLIGIBLE, SPREAD_UNIT, VARIANCE_SHARE, Mean, Moment, Score, Spread, entry_of

CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class _KeyStatistics:
    """Statistics per key block, float32: mean and, if the score reads it, variance, (B, Hkv, kv_blocks, D)."""

    mean: Tensor
    variance: Tensor | None


@dataclass(frozen=True)
class _Inputs:
    """Inputs of the scores of all query blocks. ``bias`` is an additive mask (b, h, Sq | 1, Sk), None without one."""

    query: Tensor
    call: Call
    seen: Visibility
    statistics: _KeyStatistics
    bias: Tensor | None

    @property
    def has_key_bias(self) -> bool:
        """Return whether all queries share one bias per key."""
        return self.bias is not None and self.bias.shape[2] == 1 and self.call.window == Window()

    def seen_by(self, positions: Tensor) -> Tensor | None:
        """Return the keys that a window shows to the given queries, (..., kv_len); None without a window."""
        return None if self.call.window == Window() else window_elements(self.call.shape, self.call.window, positions)


def predict(query: Tensor, key: Tensor, call: Call) -> BlockMask:
    """Select the blocks of the attention map to compute. See `reference.predict`."""
    shape, window = call.shape, call.window
    seen = find_visibility(shape, window, call.attn_mask, query.device)
    if isinstance(call.sparsity, Dense):
        kept = visible = _visible(seen, shape)
    else:
        rule, visible = call.selection, _visible(seen, shape)
        kind = entry_of(SCORES, call.score, "score on the torch backend")
        inputs = _inputs(query, _key_statistics(key, seen.keys, with_variance=kind.has_variance), call, seen)
        parts = _q_blocks(inputs, _dissimilar_blocks(inputs, key, rule))
        if rule.is_call_wide:
            kept = _select(_QBlocks.joined(list(parts)), rule)
        else:
            kept = torch.cat([_select(part, rule) for part in parts], 2)
    return BlockMask.from_dense(kept, q_len=shape.q_len, kv_len=shape.kv_len, window=window, visible=visible)


def summarize_keys(key: Tensor, call: Call) -> tuple[Tensor, ...]:
    """See `base.Backend.summarize_keys`."""
    seen = find_visibility(call.shape, call.window, call.attn_mask, key.device)
    kind = entry_of(SCORES, call.score, "score on the torch backend")
    statistics = _key_statistics(key, seen.keys, with_variance=kind.has_variance)
    return (statistics.mean,) if statistics.variance is None else (statistics.mean, statistics.variance)


class TorchCandidates(Candidates):
    """See `base.Candidates`."""

    def __init__(self, query: Tensor, keys: tuple[Tensor, ...], call: Call) -> None:
        self._call = call
        seen = find_visibility(call.shape, call.window, call.attn_mask, query.device)
        statistics = _KeyStatistics(keys[0], keys[1] if len(keys) > 1 else None)
        self._q_blocks = _QBlocks.joined(list(_q_blocks(_inputs(query, statistics, call, seen), None)))

    def kept_by_level(self, kv_blocks: int) -> tuple[Tensor, Tensor]:
        return _kept_by_level(self._q_blocks, self._call.selection, budget_top(kv_blocks))

    def choose(self, counts: Tensor | None) -> BlockMask:
        q_blocks, rule, shape = self._q_blocks, self._call.selection, self._call.shape
        kept = _select(q_blocks, rule) if counts is None else _with_forced(q_blocks, _best(q_blocks, counts))
        window, visible = self._call.window, q_blocks.visible
        return BlockMask.from_dense(kept, q_len=shape.q_len, kv_len=shape.kv_len, window=window, visible=visible)


def _visible(seen: Visibility, shape: Shape) -> Tensor:
    return seen.blocks.expand(shape.batch, shape.heads, shape.q_blocks, shape.kv_blocks)


def _inputs(query: Tensor, statistics: _KeyStatistics, call: Call, seen: Visibility) -> _Inputs:
    bias = None
    if call.attn_mask is not None and call.attn_mask.dtype != torch.bool:
        bias = call.attn_mask.expand(-1, -1, -1, call.shape.kv_len)
    return _Inputs(query, call, seen, statistics, bias)


def _q_blocks(inputs: _Inputs, dissimilar: Tensor | None) -> Iterator[_QBlocks]:
    """Yield the query blocks of a call with their probabilities, a few at a time."""
    call, seen = inputs.call, inputs.seen
    visible = _visible(seen, call.shape)
    unfinished = unfinished_blocks(call.shape, call.window, inputs.query.device)
    forced = _forced_blocks(call, seen.blocks) | unfinished
    if dissimilar is not None:
        dissimilar = dissimilar & ~unfinished  # unfinished blocks are kept regardless of the similarity of their keys
    for first, last in _chunks(inputs):
        blocks = slice(first, last)
        eligible = visible[:, :, blocks]
        if dissimilar is not None:
            eligible = eligible & ~dissimilar[:, :, blocks]
        scores = _scores(inputs, blocks)
        probabilities, broken = _probabilities(*scores, eligible & ~unfinished[blocks], call.score.exponent)
        yield _QBlocks(probabilities, visible[:, :, blocks], eligible, forced[:, :, blocks] | broken)


def select_blocks(probabilities: Tensor, call: Call) -> BlockMask:
    """Apply a call's rule to given probabilities (B, H, q_blocks, kv_blocks) as if they were predicted.

    With the true probabilities, this is the best mask that any score could produce under the rule.
    """
    shape, window, rule = call.shape, call.window, call.selection
    seen = find_visibility(shape, window, call.attn_mask, probabilities.device)
    visible = seen.blocks.expand(probabilities.shape)
    forced = forced_blocks(call, probabilities.device)
    kept = _select(_QBlocks(probabilities, visible, visible, forced), rule)
    return BlockMask.from_dense(kept, q_len=shape.q_len, kv_len=shape.kv_len, window=window, visible=visible)


def forced_blocks(call: Call, device: torch.device) -> Tensor:
    """Return blocks kept regardless of their score, (B, H, q_blocks, kv_blocks); some may not be visible."""
    shape = call.shape
    seen = find_visibility(shape, call.window, call.attn_mask, device)
    forced = _forced_blocks(call, seen.blocks) | unfinished_blocks(shape, call.window, device)
    return forced.expand(shape.batch, shape.heads, -1, -1)


def _chunks(inputs: _Inputs) -> list[tuple[int, int]]:
    """Return ranges of query blocks whose scores, and biases if any, fit into `CHUNK_BYTES`."""
    shape, score = inputs.call.shape, inputs.call.score
    samples = SCORES[type(score)].samples(score)
    q_block_bytes = 4 * shape.batch * shape.heads * samples * shape.kv_blocks
    if inputs.bias is not None and not inputs.has_key_bias:
        q_block_bytes += 8 * inputs.bias.shape[0] * inputs.bias.shape[1] * samples * shape.kv_len
    step = max(1, CHUNK_BYTES // q_block_bytes)
    return [(first, min(first + step, shape.q_blocks)) for first in range(0, shape.q_blocks, step)]


def _blocks_of(tokens: Tensor, seen: Tensor | None, block: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cut (B, H, S, D) into float32 blocks (B, H, blocks, block, D), with unseen tokens set to zero.

    Returns:
        The blocks; the number of seen tokens per block (b, h, blocks, 1), at least 1; their mask (b, h, blocks, block,
        1), None if every token of every block is seen.
    """
    length = tokens.shape[2]
    blocks = ceil_div(length, block)
    missing = blocks * block - length
    if seen is None and missing == 0:
        return (
            tokens.unflatten(2, (blocks, block)).float(),
            tokens.new_full((1, 1, 1, 1), block).float(),
            None,
        )
    if seen is None:
        seen = torch.ones(1, 1, length, dtype=torch.bool, device=tokens.device)
    seen = F.pad(seen, (0, missing)).unflatten(2, (blocks, block))[..., None]
    padded = F.pad(tokens, (0, 0, 0, missing)).unflatten(2, (blocks, block)).float()
    return torch.where(seen, padded, 0.0), seen.sum(3).clamp(min=1).float(), seen


def _key_statistics(key: Tensor, seen: Tensor | None, with_variance: bool) -> _KeyStatistics:
    blocks, count, present = _blocks_of(key, seen, BLOCK_K)
    mean = blocks.sum(3) / count
    variance = None
    if with_variance:
        deviation = blocks - mean[:, :, :, None]
        if present is not None:
            deviation = torch.where(present, deviation, 0.0)
        variance = deviation.square_().sum(3) / count
    return _KeyStatistics(mean, variance)


def _self_similarity(blocks: Tensor, count: Tensor) -> Tensor:
    """Compute |mean of the unit vectors|^2: (B, H, blocks, block, D) with unseen tokens 0 -> (B, H, blocks)."""
    return (F.normalize(blocks, dim=-1).sum(3) / count).square().sum(-1)


def _smooth(blocks: Tensor, present: Tensor | None, is_causal: bool) -> Tensor:
    """Subtract the mean of all seen, finite tokens from key blocks; in causal attention, up to the block's end."""
    usable = blocks.isfinite().all(-1, keepdim=True)
    if present is not None:
        usable = usable & present
    total = torch.where(usable, blocks, 0.0).sum(3, keepdim=True)  # [B, Hkv, blocks, 1, D]
    count = usable.sum(3, keepdim=True)
    total, count = (x.cumsum(2) if is_causal else x.sum(2, keepdim=True) for x in (total, count))
    smoothed = blocks - total / count.clamp(min=1)
    return smoothed if present is None else torch.where(present, smoothed, 0.0)


def _dissimilar_blocks(inputs: _Inputs, key: Tensor, rule: Selection) -> Tensor | None:
    """Return query and key blocks with dissimilar tokens, (B, H, q_blocks, kv_blocks); None without a threshold."""
    if rule.similarity_threshold is None:
        return None
    shape = inputs.call.shape
    threshold = per_head(rule.similarity_threshold, shape.heads, key.device)
    query_blocks, query_count, _ = _blocks_of(inputs.query, inputs.seen.queries, BLOCK_Q)
    key_blocks, key_count, present = _blocks_of(key, inputs.seen.keys, BLOCK_K)
    of_queries = _self_similarity(query_blocks, query_count)[..., None] < threshold
    of_keys = _self_similarity(_smooth(key_blocks, present, inputs.call.is_causal), key_count)
    return of_queries | (of_keys.repeat_interleave(shape.group, 1)[:, :, None] < threshold)


def _scores(inputs: _Inputs, blocks: slice) -> tuple[Tensor, Tensor | None]:
    """Compute scores (B, H, n, queries, kv_blocks) of the query blocks in ``blocks``, and their weights if any."""
    shape, kind = inputs.call.shape, SCORES[type(inputs.call.score)]
    tokens = slice(blocks.start * BLOCK_Q, min(blocks.stop * BLOCK_Q, shape.q_len))
    features, summary, bias = kind.features(inputs, tokens)
    weights = None
    if kind.has_weights:  # the last half of the features
        weights = _products(features[..., shape.head_dim :], summary[..., shape.head_dim :], shape)
        features, summary = features[..., : shape.head_dim], summary[..., : shape.head_dim]
    scores = _products(features, summary, shape)
    if weights is not None:
        scores = scores + weights
    return scores if bias is None else scores + bias, weights


def _products(features: Tensor, summary: Tensor, shape: Shape) -> Tensor:
    """Multiply (B, H, n, queries, width) by (B, Hkv, kv_blocks, width) -> (B, H, n, queries, kv_blocks)."""
    grouped = features.reshape(shape.batch, shape.kv_heads, -1, features.shape[-1])  # [B, Hkv, group * n * P, width]
    return (grouped @ summary.mT).view(shape.batch, shape.heads, -1, features.shape[3], shape.kv_blocks)


def _score_mean(inputs: _Inputs, tokens: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return mean queries [B, H, n, 1, D], mean keys [B, Hkv, kv_blocks, D], and the bias between their blocks."""
    queries, count, _ = _blocks_of(inputs.query[:, :, tokens], _seen_queries(inputs, tokens), BLOCK_Q)
    features = (queries.sum(3) / count)[:, :, :, None] * inputs.call.scale
    return features, inputs.statistics.mean, _bias_of_blocks(inputs, tokens)


def _bias_of_blocks(inputs: _Inputs, tokens: slice) -> Tensor | None:
    """Return the bias between query blocks and key blocks, [b, h, n | 1, 1, kv_blocks]."""
    bias = _key_bias(inputs)
    if inputs.bias is not None and bias is None:
        first, last = tokens.start // BLOCK_Q, ceil_div(tokens.stop, BLOCK_Q)
        bias = torch.stack([_block_bias(inputs, inputs.bias, block) for block in range(first, last)], 2)
    return bias


def _score_moment(inputs: _Inputs, tokens: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return sampled queries and a share of their squares [B, H, n, samples, 2 D], and means and variances of keys."""
    score, statistics = inputs.call.score, inputs.statistics
    assert isinstance(score, Moment) and statistics.variance is not None
    query = inputs.query[:, :, tokens]
    picks = _sample_positions(_seen_queries(inputs, tokens), query, score.samples)  # [b, h, n, samples]
    sampled = _gather_tokens(query, picks).float() * inputs.call.scale
    bias = _key_bias(inputs)
    if inputs.bias is not None and bias is None:
        bias = _sampled_bias(inputs, inputs.bias, picks + tokens.start)
    features = torch.cat([sampled, sampled.square() * VARIANCE_SHARE], -1)
    return features, torch.cat([statistics.mean, statistics.variance], -1), bias


def _score_spread(inputs: _Inputs, tokens: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the same as `_score_moment`, with the mean queries of parts of a block instead of samples."""
    score, statistics = inputs.call.score, inputs.statistics
    assert isinstance(score, Spread) and statistics.variance is not None
    queries, count, present = _blocks_of(inputs.query[:, :, tokens], _seen_queries(inputs, tokens), BLOCK_Q)
    parts = (score.samples, BLOCK_Q // score.samples)
    means = queries.unflatten(3, parts).sum(4) * (1 / parts[1])
    if present is not None:
        counts = present.unflatten(3, parts).sum(4)  # [b, h, n, parts, 1]
        means = means * (parts[1] / counts.clamp(min=1))
        means = torch.where(counts > 0, means, (queries.sum(3) / count)[:, :, :, None])
    means = means * inputs.call.scale
    features = torch.cat([means, means.square() * VARIANCE_SHARE], -1)
    return features, torch.cat([statistics.mean, statistics.variance], -1), _bias_of_blocks(inputs, tokens)


@dataclass(frozen=True)
class ScoreKind:
    """The computation of a score.

    Attributes:
        features: returns features of a block's queries, the key-block statistics to multiply them by, and a bias.
        samples: number of queries that represent a block.
        has_variance: whether the score reads the variances of key blocks.
        has_weights: whether the variance term of a score is also the weight of its probability.
    """

    features: Callable[[_Inputs, slice], tuple[Tensor, Tensor, Tensor | None]]
    samples: Callable[[Any], int]
    has_variance: bool
    has_weights: bool = False


SCORES: dict[type[Score], ScoreKind] = {
    Moment: ScoreKind(_score_moment, samples=lambda score: score.samples, has_variance=True),
    Mean: ScoreKind(_score_mean, samples=lambda _: 1, has_variance=False),
    Spread: ScoreKind(_score_spread, samples=lambda score: score.samples, has_variance=True, has_weights=True),
}


def _seen_queries(inputs: _Inputs, tokens: slice) -> Tensor | None:
    return None if inputs.seen.queries is None else inputs.seen.queries[:, :, tokens]


def _key_bias(inputs: _Inputs) -> Tensor | None:
    """Return the bias that all queries share, [b, h, 1, 1, kv_blocks]; None if there is none."""
    if inputs.bias is None or not inputs.has_key_bias:
        return None
    return _log_mean(*_sums_over_keys(inputs.bias, None))[:, :, None]


def _sample_positions(seen: Tensor | None, query: Tensor, samples: int) -> Tensor:
    """Return evenly spaced seen queries of each block, as positions within ``query``: (b, h, n, samples)."""
    length, device = query.shape[2], query.device
    blocks = ceil_div(length, BLOCK_Q)
    if seen is None:
        seen = torch.ones(1, 1, length, dtype=torch.bool, device=device)
    seen = F.pad(seen, (0, blocks * BLOCK_Q - length)).unflatten(2, (blocks, BLOCK_Q))
    count = seen.sum(-1, keepdim=True).clamp(min=1)
    odd = torch.arange(1, 2 * samples, 2, device=device)
    ranks = odd * count // (2 * samples)  # [b, h, n, samples]
    seen_first = torch.argsort((~seen).to(torch.uint8), dim=-1, stable=True)
    return seen_first.gather(-1, ranks) + torch.arange(0, blocks * BLOCK_Q, BLOCK_Q, device=device)[:, None]


def _gather_tokens(tokens: Tensor, picks: Tensor) -> Tensor:
    """Gather tokens: (B, H, S, D), (b, h, n, samples) -> (B, H, n, samples, D)."""
    if picks.shape[:2] == (1, 1):
        return tokens[:, :, picks[0, 0]]
    batch, heads = tokens.shape[:2]
    b = torch.arange(batch, device=tokens.device)[:, None, None, None]
    h = torch.arange(heads, device=tokens.device)[None, :, None, None]
    return tokens[b, h, picks.expand(batch, heads, -1, -1)]


def _sampled_bias(inputs: _Inputs, bias: Tensor, picks: Tensor) -> Tensor:
    """Return log mean exp of the visible biases of each sampled query and key block: (b, h, n, samples, kv_blocks)."""
    if bias.shape[2] == 1:
        biases = bias[:, :, :, None].expand(-1, -1, picks.shape[2], picks.shape[3], -1)
    else:
        leading = (max(bias.shape[0], picks.shape[0]), max(bias.shape[1], picks.shape[1]))
        biases = _gather_tokens(bias.expand(*leading, -1, -1), picks.expand(*leading, -1, -1))
    total, count = _sums_over_keys(biases, inputs.seen_by(picks))
    return _log_mean(total, count)


def _block_bias(inputs: _Inputs, bias: Tensor, block: int) -> Tensor:
    """Return log mean exp of the visible biases between one query block and every key block: (b, h, 1, kv_blocks)."""
    positions = torch.arange(block * BLOCK_Q, min((block + 1) * BLOCK_Q, inputs.call.shape.q_len), device=bias.device)
    biases = bias[:, :, positions] if bias.shape[2] > 1 else bias.expand(-1, -1, len(positions), -1)
    total, count = _sums_over_keys(biases, inputs.seen_by(positions))
    return _log_mean(total.logsumexp(2, keepdim=True), count.sum(2, keepdim=True))


def _sums_over_keys(bias: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return log sum exp and number of the visible biases of each key block: (..., kv_len) -> 2 x (..., kv_blocks)."""
    allowed = allowed_elements(bias)
    if seen is not None:
        allowed = allowed & seen
    missing = -bias.shape[-1] % BLOCK_K
    hidden = F.pad(bias.float().masked_fill(~allowed, -math.inf), (0, missing), value=-math.inf)
    count = F.pad(allowed, (0, missing)).unflatten(-1, (-1, BLOCK_K)).sum(-1)
    return hidden.unflatten(-1, (-1, BLOCK_K)).logsumexp(-1), count


def _log_mean(log_sum: Tensor, count: Tensor) -> Tensor:
    """Convert the log of a sum to the log of the mean, 0 if nothing was summed."""
    return torch.where(count == 0, 0.0, log_sum - count.clamp(min=1).log())


def _probabilities(scores: Tensor, weights: Tensor | None, eligible: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
    """Average each query's softmax over the eligible blocks by `Score.exponent`; also return non-finite blocks."""
    hidden = ~eligible[:, :, :, None]
    broken = ~scores.isfinite() & ~hidden
    scores = scores.masked_fill(broken | hidden, -math.inf)
    probabilities = scores.softmax(-1).nan_to_num_(0.0)
    if weights is not None:
        probabilities = torch.where(probabilities == 0, 0.0, probabilities * weights)
    average = probabilities.square_().mean(3).sqrt_() if exponent == 2 else probabilities.mean(3)
    average.masked_fill_(average < NEGLIGIBLE, 0.0)
    return average if weights is None else average.sqrt_().mul_(SPREAD_UNIT), broken.any(3)


def _forced_blocks(call: Call, visible: Tensor) -> Tensor:
    """Return the sink (first block that any query sees, ignoring a left bound), the diagonal, and the caller's ranges.

    The shape is (b, h, q_blocks, kv_blocks), with ``b`` and ``h`` of ``visible``: 1 or the call's own.
    """
    rule = call.selection
    first_query, last_query, first_key, key_end = block_edges(call.shape, visible.device)
    forced = torch.zeros_like(visible)
    if rule.keeps_sink(call.is_causal):
        reachable = visible
        if call.window.left is not None:
            unbounded = Window(None, call.window.right)
            reachable = find_visibility(call.shape, unbounded, call.attn_mask, visible.device).blocks
        seen = reachable.any(2, keepdim=True)
        forced |= seen & (seen.cumsum(-1) == 1)
    if rule.keeps_diagonal(call.is_causal):
        forced |= (first_key <= last_query) & (first_query < key_end)
    for start, stop in call.always_keep:
        forced |= (start < key_end) & (first_key < stop)
    for start, stop in call.exact_queries:
        forced[:, :, start // BLOCK_Q : ceil_div(stop, BLOCK_Q)] = True
    return forced


@dataclass(frozen=True)
class _QBlocks:
    """Query blocks as the input of a selection rule, (B, H, n, kv_blocks) each."""

    probabilities: Tensor
    visible: Tensor
    eligible: Tensor
    forced: Tensor

    @classmethod
    def joined(cls, parts: Sequence[_QBlocks]) -> _QBlocks:
        """Concatenate the query blocks of a call."""
        fields = zip(*((part.probabilities, part.visible, part.eligible, part.forced) for part in parts), strict=True)
        return cls(*(torch.cat(field, 2) for field in fields))

    def ranks(self) -> Tensor:
        """Rank each query block's key blocks: forced ones, then falling probability, ties to the lower index."""
        priority = torch.where(self.eligible, self.probabilities, -1.0).masked_fill(self.eligible & self.forced, 2.0)
        return _ranks(priority)


def _select(q_blocks: _QBlocks, rule: Selection) -> Tensor:
    """Return kept blocks (B, H, n, kv_blocks): those of the rule, its minimum, forced and dissimilar ones."""
    return _with_forced(q_blocks, entry_of(SELECTIONS, rule, "sparsity on the torch backend")(q_blocks, rule))


def _with_forced(q_blocks: _QBlocks, kept: Tensor) -> Tensor:
    """Add the visible blocks that are kept regardless of the rule."""
    return (kept | q_blocks.forced | ~q_blocks.eligible) & q_blocks.visible


def _amounts(q_blocks: _QBlocks, rule: Selection) -> Tensor:
    """Return a rule's amount per head, (H, 1, 1)."""
    return per_head(rule.amount, q_blocks.visible.shape[1], q_blocks.visible.device)


def _select_topk(q_blocks: _QBlocks, rule: Selection) -> Tensor:
    """Select the best share of the visible blocks, rounded up."""
    share = _amounts(q_blocks, rule) * q_blocks.visible.sum(-1, keepdim=True) * ROUNDING_GUARD
    budget = share.ceil().clamp(min=max(rule.min_blocks, 1))
    return q_blocks.eligible & (q_blocks.ranks() < budget)


def _select_topcdf(q_blocks: _QBlocks, rule: Selection) -> Tensor:
    """Select blocks until their sorted probabilities sum to a share of all."""
    mass = _amounts(q_blocks, rule)
    values = torch.where(q_blocks.eligible, q_blocks.probabilities, -1.0)
    values, order = torch.sort(values, dim=-1, descending=True, stable=True)
    values = values.clamp(min=0).to(mass.dtype)
    covered_before = values.cumsum(-1) - values
    inside = (covered_before < mass * values.sum(-1, keepdim=True) * ROUNDING_GUARD) | (mass >= 1)
    covering = torch.zeros_like(inside).scatter_(-1, order, inside)
    return q_blocks.eligible & (covering | (q_blocks.ranks() < max(rule.min_blocks, 1)))


def _select_budget(q_blocks: _QBlocks, rule: Selection) -> Tensor:
    """Select the best blocks of every query block, down to one common level of probability per batch element."""
    assert isinstance(rule, Budget)
    kept, visible = _kept_by_level(q_blocks, rule, budget_top(q_blocks.visible.shape[-1]))
    counts = allocate(kept.flatten(1, 2), visible, rule.density)
    return _best(q_blocks, counts.view(kept.shape[:3]))


def _kept_by_level(q_blocks: _QBlocks, rule: Selection, top: int) -> tuple[Tensor, Tensor]:
    """Return blocks kept by a budget that reaches down to each level (B, H, n, levels + 1), and visible blocks (B,)."""
    visible, shape = q_blocks.visible.sum(-1), q_blocks.visible.shape
    density = per_head(rule.amount, 1, visible.device).flatten()
    levels = (q_blocks.probabilities.float().contiguous().view(torch.int32) >> BUDGET_BITS).clamp(max=top)
    levels = (levels - (top - BUDGET_LEVELS + 1)).clamp(min=0).masked_fill(q_blocks.forced, BUDGET_LEVELS)
    levels = levels.masked_fill(~q_blocks.eligible, BUDGET_LEVELS + 1)
    counts = levels.new_zeros(*shape[:-1], BUDGET_LEVELS + 2)
    counts.scatter_add_(-1, levels.long(), torch.ones_like(levels))
    at_or_above = counts[..., :-1].flip(-1).cumsum(-1).flip(-1)  # [B, H, n, levels + 1], forced blocks last
    guaranteed = (GUARANTEED * density * visible * ROUNDING_GUARD).ceil().clamp(min=max(rule.min_blocks, 1)).long()
    kept = torch.maximum(guaranteed[..., None], at_or_above)
    return torch.minimum(kept, q_blocks.eligible.sum(-1, keepdim=True)), visible.flatten(1).sum(1)


def _best(q_blocks: _QBlocks, counts: Tensor) -> Tensor:
    """Select the best ``counts`` (B, H, n) eligible blocks of every query block."""
    return q_blocks.eligible & (q_blocks.ranks() < counts[..., None])


Rule: TypeAlias = Callable[[_QBlocks, Selection], Tensor]
SELECTIONS: dict[type[Selection], Rule] = {TopK: _select_topk, TopCdf: _select_topcdf, Budget: _select_budget}
"""Blocks that a rule keeps, including its minimum per query block; forced ones are added later."""


def _ranks(priority: Tensor) -> Tensor:
    """Return the position of each entry when its row is sorted in falling order, ties to the lower index."""
    order = torch.argsort(priority, dim=-1, descending=True, stable=True)
    places = torch.arange(priority.shape[-1], device=priority.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)
