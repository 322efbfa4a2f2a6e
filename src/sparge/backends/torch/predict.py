"""Prediction in batched PyTorch, for any device: block statistics -> scores -> selection -> BlockMask.

The result equals that of `reference.predict` except for ties. Statistics and probabilities are the same, but in
float32. They are computed for all heads at once and for a few query blocks at a time, so that the largest intermediate
stays near `CHUNK_BYTES`. Call-wide rules (`Budget`) are applied to all query blocks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape
from sparge.masks.visibility import (
    Visibility,
    allowed_elements,
    find_visibility,
    unfinished_blocks,
    window_elements,
)
from sparge.masks.window import Window
from sparge.numerics.budget_allocation import RankPool, allocate
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
from sparge.options.scores import VARIANCE_SHARE, Mean, Moment, Score, Spread, entry_of
from sparge.reference.prediction import (
    block_probabilities,
    dissimilar_blocks,
    forced_blocks,
    log_mean_exp,
    part_means,
    sample_queries,
    token_blocks,
)

CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class _Inputs:
    """Inputs of the scores of all query blocks.

    Attributes:
        statistics: means and, if the score reads them, variances of key blocks, (B, Hkv, kv_blocks, D) float32.
        bias: the additive mask, (b, h, Sq | 1, Sk); None if there is none.
    """

    query: Tensor
    call: Call
    seen: Visibility
    statistics: tuple[Tensor, ...]
    bias: Tensor | None

    @property
    def has_key_bias(self) -> bool:
        """Return whether there is a bias that depends on the key only."""
        return self.bias is not None and self.bias.shape[2] == 1 and self.call.window == Window()

    def seen_by(self, positions: Tensor) -> Tensor | None:
        """Return the keys inside the windows of the given queries, (..., kv_len) bool; None without a window."""
        return None if self.call.window == Window() else window_elements(self.call.shape, self.call.window, positions)


def predict(query: Tensor, key: Tensor, call: Call) -> BlockMask:
    """Select the blocks of the attention map to compute. See `reference.predict`."""
    seen = find_visibility(call.shape, call.window, call.attn_mask, query.device)
    visible = _visible(seen, call.shape)
    if isinstance(call.sparsity, Dense):
        return _mask(visible, visible, call)
    rule = call.selection
    inputs = _inputs(query, _key_statistics(key, seen, call), call, seen)
    parts = _q_blocks(inputs, dissimilar_blocks(query, key, seen.queries, seen.keys, call))
    if rule.is_call_wide:
        return _mask(_select(_QBlocks.joined(list(parts)), rule), visible, call)
    return _mask(torch.cat([_select(part, rule) for part in parts], 2), visible, call)


def summarize_keys(key: Tensor, call: Call) -> tuple[Tensor, ...]:
    """See `base.Backend.summarize_keys`."""
    return _key_statistics(key, find_visibility(call.shape, call.window, call.attn_mask, key.device), call)


class TorchCandidates(NamedTuple):
    """The candidates of `base.Backend.candidates`."""

    q_blocks: _QBlocks
    call: Call

    @classmethod
    def of(cls, query: Tensor, keys: Tensor | tuple[Tensor, ...], call: Call) -> TorchCandidates:
        """Compute the probabilities of all query blocks from K or its statistics."""
        seen = find_visibility(call.shape, call.window, call.attn_mask, query.device)
        statistics = keys if isinstance(keys, tuple) else _key_statistics(keys, seen, call)
        return cls(_QBlocks.joined(list(_q_blocks(_inputs(query, statistics, call, seen), None))), call)


def choose_together(candidates: Sequence[TorchCandidates], kv_blocks: int, pool: RankPool) -> list[BlockMask]:
    """See `base.Backend.choose_together`."""
    rule = candidates[0].call.selection
    if not rule.is_call_wide:
        return [_mask(_select(q_blocks, rule), q_blocks.visible, call) for q_blocks, call in candidates]
    chosen = _budget([q_blocks for q_blocks, _ in candidates], rule, kv_blocks, pool)
    pairs = zip(candidates, chosen, strict=True)
    return [_mask(_with_forced(q_blocks, kept), q_blocks.visible, call) for (q_blocks, call), kept in pairs]


def _mask(kept: Tensor, visible: Tensor, call: Call) -> BlockMask:
    shape = call.shape
    return BlockMask.from_dense(kept, q_len=shape.q_len, kv_len=shape.kv_len, window=call.window, visible=visible)


def _visible(seen: Visibility, shape: Shape) -> Tensor:
    return seen.blocks.expand(shape.batch, shape.heads, shape.q_blocks, shape.kv_blocks)


def _key_statistics(key: Tensor, seen: Visibility, call: Call) -> tuple[Tensor, ...]:
    """Return the statistics of key blocks that the call's score reads, (B, Hkv, kv_blocks, D) each."""
    blocks = token_blocks(key, seen.keys, BLOCK_K)
    mean, kind = blocks.mean(), entry_of(SCORES, call.score, "score on the torch backend")
    return (mean, blocks.variance(mean)) if kind.has_variance else (mean,)


def _inputs(query: Tensor, statistics: tuple[Tensor, ...], call: Call, seen: Visibility) -> _Inputs:
    bias = None
    if call.attn_mask is not None and call.attn_mask.dtype != torch.bool:
        bias = call.attn_mask.expand(-1, -1, -1, call.shape.kv_len)
    return _Inputs(query, call, seen, statistics, bias)


def _q_blocks(inputs: _Inputs, dissimilar: Tensor | None) -> Iterator[_QBlocks]:
    """Yield the query blocks of a call with their probabilities, a few at a time."""
    call, seen = inputs.call, inputs.seen
    visible = _visible(seen, call.shape)
    unfinished = unfinished_blocks(call.shape, call.window, inputs.query.device)
    forced = _forced_blocks(call, seen) | unfinished
    for first, last in _chunks(inputs):
        blocks = slice(first, last)
        eligible = visible[:, :, blocks]
        if dissimilar is not None:
            eligible = eligible & ~dissimilar[:, :, blocks]
        scores, weights = _scores(inputs, blocks)
        scored = eligible & ~unfinished[blocks]
        probabilities, broken = block_probabilities(scores, scored, call.score.exponent, weights)
        yield _QBlocks(probabilities, visible[:, :, blocks], eligible, forced[:, :, blocks] | broken)


def select_blocks(probabilities: Tensor, call: Call) -> BlockMask:
    """Apply a call's rule to the given probabilities (B, H, q_blocks, kv_blocks) instead of predicted ones.

    With the true probabilities, no score can produce a better mask under the rule.
    """
    seen = find_visibility(call.shape, call.window, call.attn_mask, probabilities.device)
    visible = seen.blocks.expand(probabilities.shape)
    forced = always_kept_blocks(call, probabilities.device)
    return _mask(_select(_QBlocks(probabilities, visible, visible, forced), call.selection), visible, call)


def always_kept_blocks(call: Call, device: torch.device) -> Tensor:
    """Return the blocks that are kept regardless of their score, if visible, (B, H, q_blocks, kv_blocks)."""
    shape = call.shape
    seen = find_visibility(shape, call.window, call.attn_mask, device)
    forced = _forced_blocks(call, seen) | unfinished_blocks(shape, call.window, device)
    return forced.expand(shape.batch, shape.heads, -1, -1)


def _forced_blocks(call: Call, seen: Visibility) -> Tensor:
    """Return `reference.prediction.forced_blocks`, (b, h, q_blocks, kv_blocks) with the b and h of the call's mask."""
    reachable = seen.blocks
    if call.window.left is not None:
        unbounded = Window(None, call.window.right)
        reachable = find_visibility(call.shape, unbounded, call.attn_mask, reachable.device).blocks
    return forced_blocks(call, reachable)


def _chunks(inputs: _Inputs) -> list[tuple[int, int]]:
    """Split the query blocks into ranges whose scores and biases fit into `CHUNK_BYTES`."""
    shape, score = inputs.call.shape, inputs.call.score
    samples = SCORES[type(score)].samples(score)
    q_block_bytes = 4 * shape.batch * shape.heads * samples * shape.kv_blocks
    if inputs.bias is not None and not inputs.has_key_bias:
        q_block_bytes += 8 * inputs.bias.shape[0] * inputs.bias.shape[1] * samples * shape.kv_len
    step = max(1, CHUNK_BYTES // q_block_bytes)
    return [(first, min(first + step, shape.q_blocks)) for first in range(0, shape.q_blocks, step)]


def _scores(inputs: _Inputs, blocks: slice) -> tuple[Tensor, Tensor | None]:
    """Compute scores (B, H, n, queries, kv_blocks) of the query blocks in ``blocks``, and their weights if any."""
    shape, kind = inputs.call.shape, SCORES[type(inputs.call.score)]
    tokens = slice(blocks.start * BLOCK_Q, min(blocks.stop * BLOCK_Q, shape.q_len))
    features, summary, bias = kind.features(inputs, tokens)
    weights = None
    if kind.has_weights:  # the second half of the features is the variance term
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
    """Return mean queries (B, H, n, 1, D), mean keys (B, Hkv, kv_blocks, D), and the bias of each pair of blocks."""
    means = token_blocks(inputs.query[:, :, tokens], _seen_queries(inputs, tokens), BLOCK_Q).mean()
    return means[:, :, :, None] * inputs.call.scale, inputs.statistics[0], _bias_of_blocks(inputs, tokens)


def _score_moment(inputs: _Inputs, tokens: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return features of sampled queries (B, H, n, samples, 2 D), statistics (B, Hkv, kv_blocks, 2 D), and the bias.

    Features are queries and `VARIANCE_SHARE` times their squares; statistics are means and variances of key blocks.
    """
    score, query, seen = inputs.call.score, inputs.query[:, :, tokens], _seen_queries(inputs, tokens)
    assert isinstance(score, Moment)
    if seen is None:
        seen = torch.ones(1, 1, query.shape[2], dtype=torch.bool, device=query.device)
    picks = sample_queries(seen, score.samples)  # [b, h, n, samples]
    bias = _key_bias(inputs)
    if inputs.bias is not None and bias is None:
        bias = _sampled_bias(inputs, inputs.bias, picks + tokens.start)
    return *_with_squares(_gather_tokens(query, picks).float(), inputs), bias


def _score_spread(inputs: _Inputs, tokens: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the inputs of `_score_moment`, with mean queries of parts of a block instead of sampled queries."""
    score = inputs.call.score
    assert isinstance(score, Spread)
    means = part_means(inputs.query[:, :, tokens], _seen_queries(inputs, tokens), score.samples)
    return *_with_squares(means, inputs), _bias_of_blocks(inputs, tokens)


def _with_squares(queries: Tensor, inputs: _Inputs) -> tuple[Tensor, Tensor]:
    """Append `VARIANCE_SHARE` times their squares to scaled queries, and variances of key blocks to their means."""
    queries = queries * inputs.call.scale
    return torch.cat([queries, queries.square() * VARIANCE_SHARE], -1), torch.cat(inputs.statistics, -1)


@dataclass(frozen=True)
class ScoreKind:
    """The computation of a score.

    Attributes:
        features: function of the inputs and a range of queries, which returns features of the queries that represent
            blocks, the key-block statistics to multiply them by, and a bias.
        samples: function of the score, which returns the number of queries that represent a block.
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
    """Return the bias of each key block, (b, h, 1, 1, kv_blocks), if all queries share it; otherwise None."""
    if inputs.bias is None or not inputs.has_key_bias:
        return None
    return _log_mean_exp(inputs.bias, None)[:, :, None, None]


def _bias_of_blocks(inputs: _Inputs, tokens: slice) -> Tensor | None:
    """Return the bias of each pair of query block and key block, (b, h, n | 1, 1, kv_blocks)."""
    bias, key_bias = inputs.bias, _key_bias(inputs)
    if bias is None or key_bias is not None:
        return key_bias
    block_biases = []
    for positions in torch.arange(tokens.start, tokens.stop, device=bias.device).split(BLOCK_Q):
        biases = bias[:, :, positions] if bias.shape[2] > 1 else bias.expand(-1, -1, len(positions), -1)
        block_biases.append(_log_mean_exp(biases, inputs.seen_by(positions)))
    return torch.stack(block_biases, 2)[:, :, :, None]


def _gather_tokens(tokens: Tensor, picks: Tensor) -> Tensor:
    """Gather tokens: (B, H, S, D), (b, h, n, samples) -> (B, H, n, samples, D)."""
    if picks.shape[:2] == (1, 1):
        return tokens[:, :, picks[0, 0]]
    batch, heads = tokens.shape[:2]
    b = torch.arange(batch, device=tokens.device)[:, None, None, None]
    h = torch.arange(heads, device=tokens.device)[None, :, None, None]
    return tokens[b, h, picks.expand(batch, heads, -1, -1)]


def _sampled_bias(inputs: _Inputs, bias: Tensor, picks: Tensor) -> Tensor:
    """Return the bias of each pair of sampled query and key block, (b, h, n, samples, kv_blocks)."""
    if bias.shape[2] == 1:
        biases = bias[:, :, :, None].expand(-1, -1, picks.shape[2], picks.shape[3], -1)
    else:
        leading = (max(bias.shape[0], picks.shape[0]), max(bias.shape[1], picks.shape[1]))
        biases = _gather_tokens(bias.expand(*leading, -1, -1), picks.expand(*leading, -1, -1))
    seen = inputs.seen_by(picks)
    return _log_mean_exp(biases[..., None, :], None if seen is None else seen[..., None, :])


def _log_mean_exp(bias: Tensor, seen: Tensor | None) -> Tensor:
    """Return `log_mean_exp` of biases (..., queries, kv_len) over the keys that the bias and ``seen`` allow."""
    allowed = allowed_elements(bias)
    return log_mean_exp(bias.float(), allowed if seen is None else allowed & seen)


@dataclass(frozen=True)
class _QBlocks:
    """A batch of `reference.prediction.QBlock`, the input of a selection rule. All tensors are (B, H, n, kv_blocks).

    ``eligible`` marks the blocks that the rule selects from. All other visible blocks are kept.
    """

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
        """Return the rank of each key block, from 0: forced blocks, then by falling probability, ties by index."""
        priority = torch.where(self.eligible, self.probabilities, -1.0).masked_fill(self.eligible & self.forced, 2.0)
        return _ranks(priority)


def _select(q_blocks: _QBlocks, rule: Selection) -> Tensor:
    """Return the kept blocks (B, H, n, kv_blocks): those selected by the rule, forced blocks and dissimilar blocks."""
    return _with_forced(q_blocks, entry_of(SELECTIONS, rule, "sparsity on the torch backend")(q_blocks, rule))


def _with_forced(q_blocks: _QBlocks, kept: Tensor) -> Tensor:
    """Add the visible blocks that every rule keeps: forced and dissimilar ones."""
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
    """Select the most probable blocks until the sum of their probabilities reaches a share of the total."""
    mass = _amounts(q_blocks, rule)
    values = torch.where(q_blocks.eligible, q_blocks.probabilities, -1.0)
    values, order = torch.sort(values, dim=-1, descending=True, stable=True)
    values = values.clamp(min=0).to(mass.dtype)
    covered_before = values.cumsum(-1) - values
    inside = (covered_before < mass * values.sum(-1, keepdim=True) * ROUNDING_GUARD) | (mass >= 1)
    covering = torch.zeros_like(inside).scatter_(-1, order, inside)
    return q_blocks.eligible & (covering | (q_blocks.ranks() < max(rule.min_blocks, 1)))


def _select_budget(q_blocks: _QBlocks, rule: Selection) -> Tensor:
    """Select blocks under a budget: all query blocks of a batch element share one probability cutoff."""
    return _budget([q_blocks], rule, q_blocks.visible.shape[-1], None)[0]


def _budget(parts: Sequence[_QBlocks], rule: Selection, kv_blocks: int, pool: RankPool | None) -> list[Tensor]:
    """Select the blocks of a budget shared by the query blocks of all parts, on all ranks.

    Args:
        kv_blocks: number of key blocks of the whole call, which determines the levels.
    """
    assert isinstance(rule, Budget)
    counted = [_kept_by_level(part, rule, budget_top(kv_blocks)) for part in parts]
    visible = torch.stack([seen for _, seen in counted]).sum(0)
    counts = allocate(torch.cat([kept.flatten(1, 2) for kept, _ in counted], 1), visible, rule.density, pool)
    shares = counts.split([kept.shape[1] * kept.shape[2] for kept, _ in counted], 1)
    pairs = zip(parts, shares, strict=True)
    return [part.eligible & (part.ranks() < share.view(part.visible.shape[:3])[..., None]) for part, share in pairs]


def _kept_by_level(q_blocks: _QBlocks, rule: Selection, top: int) -> tuple[Tensor, Tensor]:
    """Return the number of blocks that each query block keeps if a budget reaches down to each level.

    Returns:
        The numbers (B, H, n, levels + 1), and the total numbers of visible blocks (B,).
    """
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


Rule: TypeAlias = Callable[[_QBlocks, Selection], Tensor]
SELECTIONS: dict[type[Selection], Rule] = {TopK: _select_topk, TopCdf: _select_topcdf, Budget: _select_budget}
"""For each rule, the function that returns the selected blocks. They include the minimum per query block, but not the
blocks that every rule keeps (`_with_forced`)."""


def _ranks(priority: Tensor) -> Tensor:
    """Return the rank of each entry along the last dimension: from 0 for the largest, ties by index."""
    order = torch.argsort(priority, dim=-1, descending=True, stable=True)
    ranks = torch.arange(priority.shape[-1], device=priority.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, ranks)
