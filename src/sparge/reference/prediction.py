"""Predict which blocks of the attention map to compute.

    pool, dissimilar_blocks -> SCORES -> block_probabilities -> forced_blocks, SELECTIONS -> BlockMask

`SCORES` contains a function for each score, and `SELECTIONS` a function for each selection rule. Scores are computed
for one head at a time. The torch backend has its own version of these functions, and calls the other functions in
float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, ceil_div
from sparge.masks.visibility import block_edges, key_blocks, unfinished_blocks
from sparge.masks.window import Window
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
from sparge.options.scores import NEGLIGIBLE, SPREAD_UNIT, VARIANCE_SHARE, Mean, Moment, Score, Spread
from sparge.reference.shared import element_mask, smooth_key, value_of_head, visible_blocks, visible_keys


class TokenBlocks(NamedTuple):
    """Tokens cut into blocks, float32 or float64.

    Attributes:
        tokens: (..., blocks, block, D); hidden tokens and padding are 0.
        num_tokens: (..., blocks, 1), number of visible tokens, at least 1.
        present: (..., blocks, block, 1), True for visible tokens; None if every token of every block is visible.
    """

    tokens: Tensor
    num_tokens: Tensor
    present: Tensor | None

    def mean(self) -> Tensor:
        """Return the mean of the visible tokens, (..., blocks, D); 0 in a block without visible tokens."""
        return self.tokens.sum(-2) / self.num_tokens

    def variance(self, mean: Tensor) -> Tensor:
        """Return the (population) variance of each channel, (..., blocks, D)."""
        deviation = self.tokens - mean[..., None, :]
        if self.present is not None:
            deviation = torch.where(self.present, deviation, 0.0)
        return deviation.square_().sum(-2) / self.num_tokens


def token_blocks(tokens: Tensor, seen: Tensor | None, block: int) -> TokenBlocks:
    """Cut tokens (..., S, D) into blocks; ``seen`` (..., S) marks the visible ones, None all."""
    length, dtype = tokens.shape[-2], torch.promote_types(tokens.dtype, torch.float32)
    padding = -length % block
    if seen is None and padding == 0:
        return TokenBlocks(tokens.unflatten(-2, (-1, block)).to(dtype), tokens.new_full((1,), block, dtype=dtype), None)
    if seen is None:
        seen = torch.ones(length, dtype=torch.bool, device=tokens.device)
    present = F.pad(seen, (0, padding)).unflatten(-1, (-1, block))[..., None]
    padded = F.pad(tokens, (0, 0, 0, padding)).unflatten(-2, (-1, block)).to(dtype)
    return TokenBlocks(torch.where(present, padded, 0.0), present.sum(-2).clamp(min=1).to(dtype), present)


def pool(tokens: Tensor, seen: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance per channel of each block: (..., S, D) -> 2 x (..., blocks, D)."""
    blocks = token_blocks(tokens, seen, block)
    mean = blocks.mean()
    return mean, blocks.variance(mean)


def smooth_key_for_similarity(key: Tensor, keys_seen: Tensor, is_causal: bool) -> Tensor:
    """Return smoothed keys for `self_similarity`.

    The mean of all tokens is subtracted. In causal attention, a late outlier could then change the similarity of early
    blocks, so the mean of the tokens up to the end of each block is subtracted instead.
    """
    if not is_causal:
        return smooth_key(key, keys_seen)[0]
    usable = keys_seen & key.isfinite().all(-1)
    sums = token_blocks(key, usable, BLOCK_K).tokens.sum(-2).cumsum(-2)
    counts = key_blocks(usable, False).sum(-1, keepdim=True).cumsum(-2)
    means = (sums / counts.clamp(min=1)).repeat_interleave(BLOCK_K, -2)[..., : key.shape[-2], :]
    return torch.where(keys_seen[..., None], key - means, 0.0)


def self_similarity(tokens: Tensor, seen: Tensor | None, block: int) -> Tensor:
    """Return the mean pairwise cosine of each block's tokens, (..., blocks), in [0, 1]: |mean of unit vectors|^2."""
    blocks = token_blocks(tokens, seen, block)
    return (F.normalize(blocks.tokens, dim=-1).sum(-2) / blocks.num_tokens).square().sum(-1)


def dissimilar_blocks(
    query: Tensor, key: Tensor, queries_seen: Tensor | None, keys_seen: Tensor | None, call: Call
) -> Tensor | None:
    """Return blocks whose queries or keys are too dissimilar to be represented by a mean, (B, H, q_blocks, kv_blocks).

    Return None without a similarity threshold. Unfinished blocks, which are always kept, are never marked.
    """
    shape, threshold = call.shape, call.selection.similarity_threshold
    if threshold is None:
        return None
    threshold = per_head(threshold, shape.heads, key.device)
    if keys_seen is None:
        keys_seen = torch.ones(1, 1, shape.kv_len, dtype=torch.bool, device=key.device)
    smoothed = smooth_key_for_similarity(key, keys_seen, call.is_causal)
    query_similarity = self_similarity(query, queries_seen, BLOCK_Q)[..., None]  # [B, H, q_blocks, 1]
    key_similarity = self_similarity(smoothed, keys_seen, BLOCK_K).repeat_interleave(shape.group, 1)[:, :, None]
    dissimilar = (query_similarity < threshold) | (key_similarity < threshold)
    return dissimilar & ~unfinished_blocks(shape, call.window, key.device)


def sample_queries(seen: Tensor, samples: int) -> Tensor:
    """Return the positions of ``samples`` evenly spaced visible queries: (..., Sq) bool -> (..., q_blocks, samples).

    With n visible queries in a block, sample s is visible query floor((2 s + 1) n / (2 samples)). For a block without
    visible queries, which keeps no blocks, the samples are its first query.
    """
    blocks = F.pad(seen, (0, -seen.shape[-1] % BLOCK_Q)).unflatten(-1, (-1, BLOCK_Q))
    odd = torch.arange(1, 2 * samples, 2, device=seen.device)
    ranks = odd * blocks.sum(-1, keepdim=True).clamp(min=1) // (2 * samples)
    seen_first = torch.argsort((~blocks).to(torch.uint8), dim=-1, stable=True)
    starts = torch.arange(blocks.shape[-2], device=seen.device)[:, None] * BLOCK_Q
    return seen_first.gather(-1, ranks) + starts


def log_mean_exp(bias: Tensor, allowed: Tensor) -> Tensor:
    """Return log of the mean of exp(bias) over the allowed elements of every block, 0 if there are none.

    This is the contribution of the bias to a block's score. Both arguments are (..., queries, Sk). The mean is also
    over queries, so the result is (..., kv_blocks).
    """
    total = key_blocks(bias.masked_fill(~allowed, -math.inf), -math.inf).logsumexp(-1).logsumexp(-2)
    count = key_blocks(allowed, False).sum((-3, -1))
    return torch.where(count == 0, 0.0, total - count.clamp(min=1).to(total.dtype).log())


@dataclass(frozen=True)
class HeadSummary:
    """Inputs of a score for one head.

    Attributes:
        query: (Sq, D).
        queries_seen: (Sq,), True for queries that see a key.
        key_means, key_variances: (kv_blocks, D).
        allowed, bias: (Sq, Sk), the masks.
    """

    query: Tensor
    queries_seen: Tensor
    key_means: Tensor
    key_variances: Tensor
    scale: float
    allowed: Tensor
    bias: Tensor


Scores = tuple[Tensor, Tensor | None]
"""Scores of one head, (q_blocks, queries, kv_blocks), where ``queries`` is the number of queries that represent a query
block. For scores that weight their probabilities before averaging, also the weights in the same shape."""


def score_mean(head: HeadSummary, score: Score) -> Scores:  # noqa: ARG001
    """Compute the paper's compressed scores, with one mean query per block: mean q . mean k * scale + bias."""
    query_means, _ = pool(head.query, head.queries_seen, BLOCK_Q)
    scores = query_means @ head.key_means.mT * head.scale + block_bias(head)
    return scores[:, None], None


def block_bias(head: HeadSummary) -> Tensor:
    """Return the masks' contribution to the score of every block, (q_blocks, kv_blocks)."""
    q_blocks = zip(head.allowed.split(BLOCK_Q), head.bias.split(BLOCK_Q), strict=True)
    return torch.stack([log_mean_exp(bias, seen) for seen, bias in q_blocks])


def score_moment(head: HeadSummary, score: Score) -> Scores:
    """Compute scores of sampled queries.

    log mean_k exp(scale q.k + bias) is about scale q.mean + w scale^2 (q^2).variance + log mean exp(bias), with w = 1/2
    for normally distributed logits. Here w is `VARIANCE_SHARE`.
    """
    assert isinstance(score, Moment)
    picks = sample_queries(head.queries_seen, score.samples)  # [q_blocks, samples]
    queries, allowed, bias = head.query[picks], head.allowed[picks], head.bias[picks]
    scores = queries @ head.key_means.mT * head.scale
    scores = scores + queries.square() @ head.key_variances.mT * (VARIANCE_SHARE * head.scale**2)
    return scores + log_mean_exp(bias[:, :, None], allowed[:, :, None]), None


def part_means(query: Tensor, seen: Tensor | None, parts: int) -> Tensor:
    """Return the mean query of each of ``parts`` equal parts of a block: (..., Sq, D) -> (..., q_blocks, parts, D).

    Means are taken over queries that see a key. If no query of a part sees a key, its mean is the mean of the block, or
    0 if no query of the block does.
    """
    blocks, size = token_blocks(query, seen, BLOCK_Q), BLOCK_Q // parts
    means = blocks.tokens.unflatten(-2, (parts, size)).sum(-2) * (1 / size)
    if blocks.present is not None:
        counts = blocks.present.unflatten(-2, (parts, size)).sum(-2)
        means = means * (size / counts.clamp(min=1).to(means.dtype))
        means = torch.where(counts > 0, means, blocks.mean()[..., None, :])
    return means


def score_spread(head: HeadSummary, score: Score) -> Scores:
    """Compute scores of the mean queries of parts of a block. All parts share the bias of the whole block.

    The weights are the variances of the logits inside each key block, times `VARIANCE_SHARE`.
    """
    assert isinstance(score, Spread)
    queries = part_means(head.query, head.queries_seen, score.samples)  # [q_blocks, parts, D]
    weights = queries.square() @ head.key_variances.mT * (VARIANCE_SHARE * head.scale**2)
    return queries @ head.key_means.mT * head.scale + weights + block_bias(head)[:, None], weights


SCORES: dict[type[Score], Callable[[HeadSummary, Score], Scores]] = {
    Moment: score_moment,
    Mean: score_mean,
    Spread: score_spread,
}
"""For each score, the function that computes it for one head."""


def block_probabilities(
    scores: Tensor, eligible: Tensor, exponent: int = 1, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the softmax of each query's scores over the eligible blocks, and average it over the queries.

    Args:
        scores: (..., q_blocks, queries, kv_blocks).
        eligible: (..., q_blocks, kv_blocks), visible blocks that are represented well enough by their mean.
        exponent: exponent of the average, see `Score.exponent`.
        weights: factors of the probabilities, in the shape of the scores.

    Returns:
        Probabilities (..., q_blocks, kv_blocks), and a bool tensor of the same shape that marks eligible blocks with a
        non-finite score. The softmax excludes them, and they are always kept, so that NaN and Inf reach the output.
    """
    hidden = ~eligible[..., None, :]
    broken = ~scores.isfinite() & ~hidden
    probabilities = scores.masked_fill(broken | hidden, -math.inf).softmax(-1)
    probabilities.nan_to_num_(0.0)  # the softmax of scores that are all -inf is NaN
    if weights is not None:
        probabilities = torch.where(probabilities == 0, 0.0, probabilities * weights)
    average = probabilities.pow_(exponent).mean(-2).pow_(1 / exponent)
    average.masked_fill_(average < NEGLIGIBLE, 0.0)
    return average if weights is None else average.sqrt_().mul_(SPREAD_UNIT), broken.any(-2)


def forced_blocks(call: Call, reachable: Tensor) -> Tensor:
    """Return the blocks that are kept, if visible, regardless of their score: sink, diagonal, the caller's ranges.

    The sink is the first block that any query would see if the window had no left bound: block 0, or the first block
    after left padding.

    Args:
        reachable: (..., q_blocks, kv_blocks), the visible blocks if the window had no left bound. The result has the
            same shape.
    """
    rule = call.selection
    first_query, last_query, first_key, key_end = block_edges(call.shape, reachable.device)
    forced = torch.zeros_like(reachable)
    if rule.keeps_sink(call.is_causal):
        seen = reachable.any(-2, keepdim=True)
        forced |= seen & (seen.cumsum(-1) == 1)
    if rule.keeps_diagonal(call.is_causal):
        forced |= (first_key <= last_query) & (first_query < key_end)
    for start, stop in call.always_keep:
        forced |= (start < key_end) & (first_key < stop)
    for start, stop in call.exact_queries:
        forced[..., start // BLOCK_Q : ceil_div(stop, BLOCK_Q), :] = True
    return forced


@dataclass(frozen=True)
class QBlock:
    """One query block of one head, the input of a selection rule; all tensors are (kv_blocks,).

    Attributes:
        probabilities: predicted share of the query block's attention in each key block.
        visible: blocks that some query of the query block sees.
        forced: blocks kept regardless of their score, if visible.
        dissimilar: blocks that a mean does not represent. They are kept in addition to the blocks that the rule keeps.
        amount: the rule's amount for this head.
        min_blocks: the rule's minimum per query block.
    """

    probabilities: Tensor
    visible: Tensor
    forced: Tensor
    dissimilar: Tensor
    amount: float
    min_blocks: int

    @property
    def candidates(self) -> list[int]:
        """Visible blocks that a rule chooses from, in ascending order."""
        return (self.visible & ~self.dissimilar).nonzero().flatten().tolist()

    def minimum(self) -> list[int]:
        """Return the best candidates, as many as the rule's minimum per query block."""
        return self.best(topk_budget(0.0, int(self.visible.sum()), self.min_blocks))

    def kept_by_level(self) -> list[int]:
        """Return the number of blocks kept by a budget that reaches down to each level.

        The level of a candidate, from 0 to `BUDGET_LEVELS` - 1, is its probability on a logarithmic scale. Forced
        candidates are kept at every level. The last entry of the result is for a budget that reaches no level.
        """
        top = budget_top(len(self.visible))
        bits = self.probabilities.float().view(torch.int32) >> BUDGET_BITS
        levels = (bits.clamp(max=top) - (top - BUDGET_LEVELS + 1)).clamp(min=0)
        candidates = self.candidates
        free = levels[[j for j in candidates if not self.forced[j]]]
        guaranteed = topk_budget(GUARANTEED * self.amount, int(self.visible.sum()), self.min_blocks)
        forced = len(candidates) - len(free)
        reached = (free >= torch.arange(BUDGET_LEVELS + 1, device=free.device)[:, None]).sum(1)
        return [min(max(guaranteed, forced + count), len(candidates)) for count in reached.tolist()]

    def best(self, count: int) -> list[int]:
        """Return the best ``count`` candidates: forced ones, then by falling probability, ties to the lower index."""
        return sorted(self.candidates, key=lambda j: (not self.forced[j], -float(self.probabilities[j]), j))[:count]


def topk_budget(topk: float, visible: int, min_blocks: int) -> int:
    """Return the number of blocks to keep: ceil(topk * visible), at least ``min_blocks`` and 1, at most ``visible``.

    `ROUNDING_GUARD` lowers the share slightly, so that a rounded product (0.1 in float32 times 1280) adds no block.
    """
    share = math.ceil(topk * visible * ROUNDING_GUARD)
    return min(max(share, min_blocks, 1), visible)


def select_topk(q_block: QBlock) -> list[int]:
    """Select the best share of the visible blocks, rounded up."""
    return q_block.best(topk_budget(q_block.amount, int(q_block.visible.sum()), 0))


def select_topcdf(q_block: QBlock) -> list[int]:
    """Select the most probable candidates until the sum of their probabilities reaches a share of the total.

    The candidate that reaches the share is included. A share of 1 selects all candidates.
    """
    kept, covered, probabilities = [], 0.0, q_block.probabilities
    mass = q_block.amount * sum(float(probabilities[j]) for j in q_block.candidates) * ROUNDING_GUARD
    for j in sorted(q_block.candidates, key=lambda j: (-float(probabilities[j]), j)):
        if covered >= mass and q_block.amount < 1:
            break
        kept.append(j)
        covered += float(probabilities[j])
    return kept


def select_budget(q_blocks: Sequence[QBlock]) -> list[list[int]]:
    """Select the best candidates of every query block, down to a level of probability that all query blocks share.

    The last level is the one at which the density is reached. If it has t blocks, numbered over all query blocks, and
    only r of them fit, they are allocated evenly: a query block with blocks a to b - 1 keeps its best
    floor(b r / t) - floor(a r / t) of them.
    """
    visible = sum(int(q_block.visible.sum()) for q_block in q_blocks)
    capacity = math.ceil(q_blocks[0].amount * visible * ROUNDING_GUARD)
    by_level = [q_block.kept_by_level() for q_block in q_blocks]
    last = BUDGET_LEVELS
    while last > 0 and sum(kept[last] for kept in by_level) < capacity:
        last -= 1
    above = [kept[min(last + 1, BUDGET_LEVELS)] for kept in by_level]
    blocks = [kept[last] - count for kept, count in zip(by_level, above, strict=True)]
    total = max(sum(blocks), 1)
    room = min(max(capacity - sum(above), 0), sum(blocks))
    result, before = [], 0
    for q_block, count, at_level in zip(q_blocks, above, blocks, strict=True):
        after = before + at_level
        result.append(q_block.best(count + after * room // total - before * room // total))
        before = after
    return result


def by_q_block(select: Callable[[QBlock], list[int]]) -> Callable[[Sequence[QBlock]], list[list[int]]]:
    """Apply a rule to each query block by itself, and add the minimum per query block."""
    return lambda q_blocks: [q_block.minimum() + select(q_block) for q_block in q_blocks]


SELECTIONS: dict[type[Selection], Callable[[Sequence[QBlock]], list[list[int]]]] = {
    TopK: by_q_block(select_topk),
    TopCdf: by_q_block(select_topcdf),
    Budget: select_budget,
}
"""For each rule, the function that returns the candidates that each query block of a batch element keeps. The lists may
contain a candidate twice."""


def apply_rule(rule: Selection, q_blocks: Sequence[QBlock]) -> list[Tensor]:
    """Return the kept blocks of every query block of a batch element, (kv_blocks,) bool each."""
    result = []
    for q_block, selected in zip(q_blocks, SELECTIONS[type(rule)](q_blocks), strict=True):
        kept = (q_block.forced | q_block.dissimilar) & q_block.visible
        kept[selected] = True
        result.append(kept)
    return result


def predict(query: Tensor, key: Tensor, call: Call) -> BlockMask:
    """Predict which blocks of the attention map to compute."""
    shape, window = call.shape, call.window
    masks = element_mask(call, query.device)
    visible = visible_blocks(masks.allowed)
    reachable = visible_blocks(element_mask(replace(call, window=Window(None, window.right)), query.device).allowed)

    def finish(dense: Tensor) -> BlockMask:
        return BlockMask.from_dense(dense, q_len=shape.q_len, kv_len=shape.kv_len, window=window, visible=visible)

    if isinstance(call.sparsity, Dense):
        return finish(visible)

    query, key = query.double(), key.double()
    keys_seen, queries_seen = visible_keys(masks.allowed, shape.kv_heads), masks.allowed.any(3)
    unfinished = unfinished_blocks(shape, window, query.device)
    dissimilar = dissimilar_blocks(query, key, queries_seen, keys_seen, call)
    if dissimilar is None:
        dissimilar = torch.zeros_like(visible)
    eligible = visible & ~dissimilar & ~unfinished
    forced = forced_blocks(call, reachable) | unfinished
    key_means, key_variances = pool(key, keys_seen, BLOCK_K)
    kept = torch.zeros_like(visible)
    for b in range(shape.batch):
        q_blocks = []
        for h in range(shape.heads):
            kv = h // shape.group
            summary = (query[b, h], queries_seen[b, h], key_means[b, kv], key_variances[b, kv])
            head = HeadSummary(*summary, call.scale, masks.allowed[b, h], masks.bias[b, h])
            scores, weights = SCORES[type(call.score)](head, call.score)
            probabilities, broken = block_probabilities(scores, eligible[b, h], call.score.exponent, weights)
            amount = value_of_head(call.selection.amount, h, shape)
            assert amount is not None
            for i in range(shape.q_blocks):
                blocks = (probabilities[i], visible[b, h, i], forced[b, h, i] | broken[i], dissimilar[b, h, i])
                q_blocks.append(QBlock(*blocks, amount, call.selection.min_blocks))
        kept[b] = torch.stack(apply_rule(call.selection, q_blocks)).view_as(kept[b])
    return finish(kept)
