"""Predict which blocks of the attention map to compute.

    pool, self_similarity -> SCORES -> block_probabilities -> forced_blocks, SELECTIONS -> BlockMask

A new score is a function in `SCORES`, a new selection rule one in `SELECTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape
from sparge.masks.window import Window
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


def smooth_key_for_similarity(key: Tensor, keys_seen: Tensor, is_causal: bool) -> Tensor:
    """Return the keys whose self-similarity is computed: smoothed without using later tokens.

    A mean over all tokens would let one late outlier change the similarity of early blocks. In causal attention, each
    block is therefore smoothed by the mean of the tokens up to its own end.
    """
    if not is_causal:
        return smooth_key(key, keys_seen)[0]
    ends = [min(start + BLOCK_K, key.shape[2]) for start in range(0, key.shape[2], BLOCK_K)]
    parts = [smooth_key(key[:, :, :end], keys_seen[:, :, :end])[0] for end in ends]
    return torch.cat([part[:, :, index * BLOCK_K :] for index, part in enumerate(parts)], 2)


def token_blocks(tokens: Tensor, seen: Tensor, block: int) -> Iterator[Tensor]:
    """Yield the visible tokens of each block of one head: (S, D), (S,) -> blocks of (n <= block, D)."""
    for part, part_seen in zip(tokens.split(block), seen.split(block), strict=True):
        yield part[part_seen]


def pool(tokens: Tensor, seen: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return mean and (population) variance per channel of each block: two tensors of shape (blocks, D)."""
    means, variances = [], []
    for part in token_blocks(tokens, seen, block):
        empty = len(part) == 0
        mean = torch.zeros_like(tokens[0]) if empty else part.mean(0)
        means.append(mean)
        variances.append(torch.zeros_like(mean) if empty else (part - mean).square().mean(0))
    return torch.stack(means), torch.stack(variances)


def self_similarity(tokens: Tensor, seen: Tensor, block: int) -> Tensor:
    """Return the mean pairwise cosine of the tokens of each block, (blocks,), in [0, 1]: |mean of unit vectors|^2."""
    result = []
    for part in token_blocks(tokens, seen, block):
        units = torch.nn.functional.normalize(part, dim=-1)
        result.append(units.mean(0).square().sum() if len(part) else units.new_zeros(()))
    return torch.stack(result)


def sample_queries(seen: Tensor, samples: int) -> Tensor:
    """Return the positions of ``samples`` evenly spaced visible queries per block: (Sq,) bool -> (q_blocks, samples).

    With n visible queries in a block, sample s is number floor((2 s + 1) n / (2 samples)) of them. A block without
    visible queries uses its first query; it keeps no blocks anyway.
    """
    picks = []
    for block_index, part in enumerate(seen.split(BLOCK_Q)):
        positions = part.nonzero().flatten().tolist() or [0]
        ranks = [(2 * s + 1) * len(positions) // (2 * samples) for s in range(samples)]
        picks.append([block_index * BLOCK_Q + positions[rank] for rank in ranks])
    return torch.tensor(picks, device=seen.device)


def log_mean_exp(bias: Tensor, allowed: Tensor) -> Tensor:
    """Return log of the mean of exp(bias) over the allowed elements of every block, 0 if there are none.

    This is the bias's contribution to the block's score. Both arguments are (..., queries, Sk); the result is
    (..., kv_blocks), with all queries reduced.
    """
    blocks = []
    for tile, seen in zip(bias.split(BLOCK_K, -1), allowed.split(BLOCK_K, -1), strict=True):
        total, count = tile.masked_fill(~seen, -math.inf).logsumexp((-2, -1)), seen.sum((-2, -1))
        blocks.append(torch.where(count == 0, 0.0, total - count.to(total.dtype).log()))
    return torch.stack(blocks, -1)


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


def score_mean(head: HeadSummary, score: Score) -> Tensor:  # noqa: ARG001
    """Compute the paper's compressed scores of one head, (q_blocks, 1, kv_blocks): mean q . mean k * scale + bias."""
    query_means, _ = pool(head.query, head.queries_seen, BLOCK_Q)
    scores = query_means @ head.key_means.mT * head.scale + block_bias(head)
    return scores[:, None]


def block_bias(head: HeadSummary) -> Tensor:
    """Return the masks' contribution to the score of every block, (q_blocks, kv_blocks)."""
    q_blocks = zip(head.allowed.split(BLOCK_Q), head.bias.split(BLOCK_Q), strict=True)
    return torch.stack([log_mean_exp(bias, seen) for seen, bias in q_blocks])


def score_moment(head: HeadSummary, score: Score) -> Tensor:
    """Compute scores of sampled queries of one head, (q_blocks, samples, kv_blocks).

    log mean_k exp(scale q.k + bias) is about scale q.mean + w scale^2 (q^2).variance + log mean exp(bias), with w = 1/2
    for normally distributed logits. Here w is `VARIANCE_SHARE`.
    """
    assert isinstance(score, Moment)
    picks = sample_queries(head.queries_seen, score.samples)  # [q_blocks, samples]
    queries, allowed, bias = head.query[picks], head.allowed[picks], head.bias[picks]
    scores = queries @ head.key_means.mT * head.scale
    scores = scores + queries.square() @ head.key_variances.mT * (VARIANCE_SHARE * head.scale**2)
    return scores + log_mean_exp(bias[:, :, None], allowed[:, :, None])


def part_means(query: Tensor, seen: Tensor, parts: int) -> Tensor:
    """Return the mean query of each of ``parts`` equal parts of every block, (q_blocks, parts, D).

    Means are taken over queries that see a key. A part without any has the mean of its block; a block without any has
    0.
    """
    result = []
    for start in range(0, len(query), BLOCK_Q):
        whole = query[start : start + BLOCK_Q][seen[start : start + BLOCK_Q]]
        block_mean = whole.mean(0) if len(whole) else torch.zeros_like(query[0])
        size, means = BLOCK_Q // parts, []
        for first in range(start, start + BLOCK_Q, size):
            part = query[first : first + size][seen[first : first + size]]
            means.append(part.mean(0) if len(part) else block_mean)
        result.append(torch.stack(means))
    return torch.stack(result)


def score_spread(head: HeadSummary, score: Score) -> Tensor:
    """Compute scores of the mean queries of parts of a block, (q_blocks, parts, kv_blocks).

    The bias is that of the whole block, as in `score_mean`.
    """
    assert isinstance(score, Spread)
    queries = part_means(head.query, head.queries_seen, score.samples)
    return queries @ head.key_means.mT * head.scale + spread(head, score) + block_bias(head)[:, None]


def spread(head: HeadSummary, score: Score) -> Tensor:
    """Return `VARIANCE_SHARE` times the variance of the logits, (q_blocks, parts, kv_blocks), which a mean discards."""
    assert isinstance(score, Spread)
    queries = part_means(head.query, head.queries_seen, score.samples)
    return queries.square() @ head.key_variances.mT * (VARIANCE_SHARE * head.scale**2)


SCORES: dict[type[Score], Callable[[HeadSummary, Score], Tensor]] = {
    Moment: score_moment,
    Mean: score_mean,
    Spread: score_spread,
}
"""Scores of one head, (q_blocks, queries, kv_blocks), with the queries per block that the score evaluates."""
WEIGHTS: dict[type[Score], Callable[[HeadSummary, Score], Tensor]] = {Spread: spread}
"""Factors of the probabilities before averaging, of the same shape, for scores that use them."""


def block_probabilities(
    scores: Tensor, eligible: Tensor, exponent: int = 1, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the softmax of each query's scores over the eligible blocks and average it over the queries.

    Args:
        scores: (q_blocks, queries, kv_blocks).
        eligible: (q_blocks, kv_blocks), visible blocks that their summary represents well.
        exponent: exponent of the average, see `Score.exponent`.
        weights: factors of the probabilities, see `WEIGHTS`.

    Returns:
        Probabilities (q_blocks, kv_blocks), and a bool tensor of the same shape that marks blocks with a non-finite
        score. These are excluded from the softmax and always kept, so that NaN and Inf reach the output.
    """
    broken = ~scores.isfinite() & eligible[:, None]
    scores = scores.masked_fill(broken | ~eligible[:, None], -math.inf)
    probabilities = scores.softmax(-1).nan_to_num(0.0)  # the softmax of scores that are all -inf is NaN
    if weights is not None:
        probabilities = torch.where(probabilities == 0, 0.0, probabilities * weights)
    average = probabilities.pow(exponent).mean(1).pow(1 / exponent)
    average = torch.where(average < NEGLIGIBLE, 0.0, average)
    return average if weights is None else average.sqrt() * SPREAD_UNIT, broken.any(1)


def forced_blocks(call: Call, reachable: Tensor) -> Tensor:
    """Return the blocks kept regardless of their score, (q_blocks, kv_blocks): sink, diagonal, the caller's ranges.

    The sink is the first block that any query would see if the window had no left bound: block 0, or the first block
    after left padding. A query block keeps it only if it sees it.

    Args:
        reachable: (q_blocks, kv_blocks), the visible blocks of a window without a left bound.
    """
    shape, rule = call.shape, call.selection
    forced = torch.zeros(shape.q_blocks, shape.kv_blocks, dtype=torch.bool)
    if rule.keeps_sink(call.is_causal):
        seen = reachable.any(0).nonzero()
        forced[:, seen[:1]] = True
    for i in range(shape.q_blocks):
        first = i * BLOCK_Q + shape.causal_offset
        last = min((i + 1) * BLOCK_Q, shape.q_len) - 1 + shape.causal_offset
        for j in range(shape.kv_blocks):
            if rule.keeps_diagonal(call.is_causal) and j * BLOCK_K <= last and first < (j + 1) * BLOCK_K:
                forced[i, j] = True
            if any(start < (j + 1) * BLOCK_K and j * BLOCK_K < stop for start, stop in call.always_keep):
                forced[i, j] = True
        if any(start < (i + 1) * BLOCK_Q and i * BLOCK_Q < stop for start, stop in call.exact_queries):
            forced[i] = True
    return forced


def unfinished_blocks(shape: Shape, window: Window) -> Tensor:
    """Return blocks that contain both keys seen by a query of the block and keys seen by none, (q_blocks, kv_blocks).

    Their summary includes keys outside of the window, so they are kept without a score. In causal attention these are
    keys after the last query of the block. They exist only when S_k - S_q is no multiple of the key block, and are on
    the diagonal.
    """
    unfinished = torch.zeros(shape.q_blocks, shape.kv_blocks, dtype=torch.bool)
    for i in range(shape.q_blocks):
        first = i * BLOCK_Q + shape.causal_offset
        last = min((i + 1) * BLOCK_Q, shape.q_len) - 1 + shape.causal_offset
        for j in range(shape.kv_blocks):
            first_key, last_key = j * BLOCK_K, min((j + 1) * BLOCK_K, shape.kv_len) - 1
            if window.right is not None and first_key <= last + window.right < last_key:
                unfinished[i, j] = True
            if window.left is not None and first_key < first - window.left <= last_key:
                unfinished[i, j] = True
    return unfinished


@dataclass(frozen=True)
class QBlock:
    """One query block of one head, the input of a selection rule; all tensors are (kv_blocks,).

    Attributes:
        probabilities: the share of the query block's attention that each key block is predicted to hold.
        visible: blocks that some query of the block may see.
        forced: blocks kept regardless of their score, if visible.
        dissimilar: blocks that their summary does not represent, which are kept in addition to any amount.
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
        """Return the best candidates up to the rule's minimum per query block."""
        return self.best(topk_budget(0.0, int(self.visible.sum()), self.min_blocks))

    def kept_by_level(self) -> list[int]:
        """Return how many blocks are kept by a budget that reaches down to each level; the last entry is no level.

        A level classifies the probability of candidates that are not forced, from 0 to `BUDGET_LEVELS` - 1.
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
    """Return the blocks a query block keeps: ceil(topk * visible), at least ``min_blocks`` and 1, at most ``visible``.

    `ROUNDING_GUARD` lowers the share slightly, so that rounding (0.1 in float32 times 1280) does not add a block.
    """
    share = math.ceil(topk * visible * ROUNDING_GUARD)
    return min(max(share, min_blocks, 1), visible)


def select_topk(q_block: QBlock) -> list[int]:
    """Select the best share of the visible blocks, rounded up."""
    return q_block.best(topk_budget(q_block.amount, int(q_block.visible.sum()), 0))


def select_topcdf(q_block: QBlock) -> list[int]:
    """Select the most probable candidates until their sum reaches the given share, including the crossing one.

    An amount of 1 selects all.
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
    """Select the best candidates of every query block, down to one common level of probability.

    The level is the last one that fits the density. The blocks of that level are allocated evenly: if it has t blocks
    and r of them fit, a query block that owns numbers a to b - 1 of them keeps floor(b r / t) - floor(a r / t), its
    best.
    """
    visible = sum(int(q_block.visible.sum()) for q_block in q_blocks)
    places = math.ceil(q_blocks[0].amount * visible * ROUNDING_GUARD)
    by_level = [q_block.kept_by_level() for q_block in q_blocks]
    last = BUDGET_LEVELS
    while last > 0 and sum(kept[last] for kept in by_level) < places:
        last -= 1
    above = [kept[min(last + 1, BUDGET_LEVELS)] for kept in by_level]
    blocks = [kept[last] - count for kept, count in zip(by_level, above, strict=True)]
    total = max(sum(blocks), 1)
    places = min(max(places - sum(above), 0), sum(blocks))
    result, before = [], 0
    for q_block, count, own in zip(q_blocks, above, blocks, strict=True):
        result.append(q_block.best(count + (before + own) * places // total - before * places // total))
        before += own
    return result


def by_q_block(select: Callable[[QBlock], list[int]]) -> Callable[[Sequence[QBlock]], list[list[int]]]:
    """Apply a rule to each query block by itself, and add the minimum per query block."""
    return lambda q_blocks: [q_block.minimum() + select(q_block) for q_block in q_blocks]


SELECTIONS: dict[type[Selection], Callable[[Sequence[QBlock]], list[list[int]]]] = {
    TopK: by_q_block(select_topk),
    TopCdf: by_q_block(select_topcdf),
    Budget: select_budget,
}
"""Candidates that a rule keeps of all query blocks of a batch element; a candidate may be listed twice."""


def apply_rule(rule: Selection, q_blocks: Sequence[QBlock]) -> list[Tensor]:
    """Return a list with the kept blocks, (kv_blocks,), of every query block of a batch element."""
    result = []
    for q_block, selected in zip(q_blocks, SELECTIONS[type(rule)](q_blocks), strict=True):
        kept = (q_block.forced | q_block.dissimilar) & q_block.visible
        kept[selected] = True
        result.append(kept)
    return result


def predict(query: Tensor, key: Tensor, call: Call) -> BlockMask:
    """Predict which blocks of the attention map to compute."""
    shape, is_causal, window = call.shape, call.is_causal, call.window
    masks = element_mask(call, query.device)
    visible = visible_blocks(masks.allowed)
    reachable = visible_blocks(element_mask(replace(call, window=Window(None, window.right)), query.device).allowed)

    def finish(dense: Tensor) -> BlockMask:
        return BlockMask.from_dense(dense, q_len=shape.q_len, kv_len=shape.kv_len, window=window, visible=visible)

    if isinstance(call.sparsity, Dense):
        return finish(visible)

    rule = call.selection
    query, key = query.double(), key.double()
    keys_seen = visible_keys(masks.allowed, shape.kv_heads)
    queries_seen = masks.allowed.any(3)
    smoothed = smooth_key_for_similarity(key, keys_seen, is_causal)
    unfinished = unfinished_blocks(shape, window).to(query.device)
    kept = torch.zeros_like(visible)
    for b in range(shape.batch):
        q_blocks = []
        for h in range(shape.heads):
            kv = h // shape.group
            dissimilar = _dissimilar_blocks(
                self_similarity(query[b, h], queries_seen[b, h], BLOCK_Q),
                self_similarity(smoothed[b, kv], keys_seen[b, kv], BLOCK_K),
                value_of_head(rule.similarity_threshold, h, shape),
            )
            dissimilar = (
                dissimilar & ~unfinished
            )  # unfinished blocks are kept regardless of the similarity of their keys
            head = HeadSummary(
                query[b, h],
                queries_seen[b, h],
                *pool(key[b, kv], keys_seen[b, kv], BLOCK_K),
                call.scale,
                masks.allowed[b, h],
                masks.bias[b, h],
            )
            scores = SCORES[type(call.score)](head, call.score)
            weights = WEIGHTS[type(call.score)](head, call.score) if type(call.score) in WEIGHTS else None
            eligible = visible[b, h] & ~dissimilar & ~unfinished
            probabilities, broken = block_probabilities(scores, eligible, call.score.exponent, weights)
            forced = forced_blocks(call, reachable[b, h]).to(query.device) | unfinished | broken
            amount = value_of_head(rule.amount, h, shape)
            assert amount is not None
            for i in range(shape.q_blocks):
                blocks = (probabilities[i], visible[b, h, i], forced[i], dissimilar[i])
                q_blocks.append(QBlock(*blocks, amount, rule.min_blocks))
        kept[b] = torch.stack(apply_rule(rule, q_blocks)).view_as(kept[b])
    return finish(kept)


def _dissimilar_blocks(query_similarity: Tensor, key_similarity: Tensor, threshold: float | None) -> Tensor:
    """Return (q_blocks, kv_blocks): query and key blocks whose tokens are too dissimilar for their summary."""
    if threshold is None:
        return torch.zeros(
            len(query_similarity),
            len(key_similarity),
            dtype=torch.bool,
            device=key_similarity.device,
        )
    return (query_similarity < threshold)[:, None] | (key_similarity < threshold)
