"""Block scores and their softmax: the expected share of a query block's attention in each key block.

    probability[block, j] = mean over its rows i of softmax_j s[i, j], or the root of their mean square

A row is a query that represents its block: one of several evenly spaced samples, or a mean of queries. The scores s are
defined in `options.scores`. Each has a function here (`moment_score`, `mean_score`), which `_block_scores` calls by the
score's name, and an entry in `INPUTS`. Score "spread" multiplies each softmax by the result of `spread`.

Products run on bfloat16 tensor cores, with the mean key in two parts, and queries too unless they are bfloat16. This
leaves a relative error of about 2^-17. Every softmax needs the maximum and sum of its row first, so rows are scored
twice. This costs less than writing all scores and reading them back, and takes no memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from sparge.backends.gpu.launch import (
    architecture_of,
    buffer_like,
    launch,
    padded,
    power_of_two,
    segments_argument,
    strides_of,
)
from sparge.backends.gpu.primitives import (
    BLOCK_K,
    BLOCK_Q,
    LN_2,
    NOWHERE,
    head_base,
    is_finite,
    kernel,
    row_order,
    sampled_query,
    segment_queries,
    segment_sizes,
    split_program,
)
from sparge.backends.gpu.stages import configs
from sparge.backends.gpu.stages.arguments import WindowSpec, sizes_of, spec_of, tensor_and_strides, tensor_or
from sparge.backends.gpu.stages.key_value_statistics import BlockStatistics
from sparge.backends.gpu.stages.mask_blocks import HIDDEN, MaskFacts
from sparge.backends.gpu.stages.summary import KeyValueSummary
from sparge.call import Call
from sparge.masks.geometry import ceil_div
from sparge.options import scores
from sparge.options.scores import Mean, Moment, Score, Spread, entry_of

HOPPER = 90
NEGLIGIBLE = tl.constexpr(scores.NEGLIGIBLE)
SPREAD_UNIT = tl.constexpr(scores.SPREAD_UNIT)
# Passes of `score_kernel` over the key blocks
ROW_SUMS, ROW_SUMS_WITHOUT_NAN, PROBABILITIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True)
class ScoreInputs:
    """The inputs that a score reads."""

    rows: Callable[[Any], int]  # number of queries that represent a block
    are_means: bool  # whether rows are means of equal parts of the block instead of evenly spaced samples
    variance: bool  # whether the variances of key blocks are read in addition to their means

    def parts(self, score: Score) -> int:
        """Return the number of mean queries per block; 0 if the score samples queries instead."""
        return self.rows(score) if self.are_means else 0


INPUTS: dict[type[Score], ScoreInputs] = {
    Moment: ScoreInputs(rows=lambda score: score.samples, are_means=False, variance=True),
    Mean: ScoreInputs(rows=lambda _: 1, are_means=True, variance=False),
    Spread: ScoreInputs(rows=lambda score: score.samples, are_means=True, variance=True),
}


def score_inputs(score: Score) -> ScoreInputs:
    """Return the inputs of a score.

    Raises:
        NotImplementedError: no kernel has the score.
    """
    return entry_of(INPUTS, score, "score on a GPU")


class MaskFactPointers(NamedTuple):
    """Pointers to facts about the mask. ``fact_strides`` has the same fields: strides without the last dimension."""

    # first_seen, first_query: [B, H, kv_blocks] and [B, H] int32, of `first_seen_keys` (SPEC.has_seen)
    first_seen: Any
    first_query: Any
    kind: Any  # [B, H, q_blocks, kv_blocks] int8, visible blocks, of `mask_blocks` (SPEC.has_blocks)
    pick: Any  # [B, H, q_blocks, samples] int32, the sampled queries (SPEC.has_blocks, not from_means)
    bias: Any  # [B, H, q_blocks, samples, kv_blocks] float32, of `mask_blocks` (SPEC.has_bias)


class SimilarityPointers(NamedTuple):
    """Similarity of each key block [B * Hkv, kv_blocks], and its threshold [H], float32 (SPEC.has_similarity)."""

    key: Any
    threshold: Any


@dataclass(frozen=True)
class ScoreSpec(WindowSpec):
    """Compile-time values of `score_kernel`."""

    score: str  # name of the score
    # head_dim, head_dim_padded: channels of the queries, and padded to a power of two
    head_dim: int
    head_dim_padded: int
    from_means: bool  # rows are means of queries, from `QuerySummary.mean`; otherwise samples
    # samples, samples_padded: rows of a query block, and padded to a power of two
    samples: int
    samples_padded: int
    log2_samples: float  # log2 of ``samples``
    exponent: int  # 1 for the mean over rows, 2 for the root of the mean square
    has_low: bool  # bfloat16 leaves a remainder of the rows
    # has_seen, has_blocks, has_bias, has_similarity: see the pointers
    has_seen: bool
    has_blocks: bool
    has_bias: bool
    has_similarity: bool
    # rows, columns, stages: rows of a program, key blocks of a step, depth of the pipeline
    rows: int
    columns: int
    stages: int


class RowOperands(NamedTuple):
    """The rows of a program, bfloat16 [ROWS, HEAD_DIM] each."""

    query: Any  # queries that represent their blocks
    low: Any  # the remainder that bfloat16 leaves (SPEC.has_low)
    square: Any  # squares of the queries


@triton.jit
def mean_score(rows, statistics, offsets, inside, SPEC: tl.constexpr):
    """Compute the paper's score, s = log2 e scale q . mean_j, [ROWS, COLUMNS]. The means include log2 e scale."""
    mean_high = tl.load(statistics.mean_high + offsets, mask=inside, other=0.0).T
    scores = tl.dot(rows.query, mean_high)
    mean_low = tl.load(statistics.mean_low + offsets, mask=inside, other=0.0).T
    scores = tl.dot(rows.query, mean_low, scores)
    if SPEC.has_low:
        scores = tl.dot(rows.low, mean_high, scores)
    return scores


@triton.jit
def moment_score(rows, statistics, offsets, inside, SPEC: tl.constexpr):
    """Compute s = log2 e (scale q . mean_j + scale^2 / 4  q^2 . variance_j), [ROWS, COLUMNS].

    The factors in front of means and variances are already multiplied into them.
    """
    scores = mean_score(rows, statistics, offsets, inside, SPEC)
    variance = tl.load(statistics.variance + offsets, mask=inside, other=0.0).T
    return tl.dot(rows.square, variance, scores)


@triton.jit
def spread(rows, statistics, offsets, inside):
    """Compute the weights of score "spread": the variance term of `moment_score` in nats, [ROWS, COLUMNS]."""
    variance = tl.load(statistics.variance + offsets, mask=inside, other=0.0).T
    return tl.dot(rows.square, variance) * LN_2


@triton.jit
def _block_scores(rows, statistics, columns, kv_blocks, SPEC: tl.constexpr):
    """Compute scores of rows and key blocks in log2 units, [ROWS, COLUMNS], and weights (1 if the score has none)."""
    channels = tl.arange(0, SPEC.head_dim_padded)
    offsets = columns[:, None] * SPEC.head_dim_padded + channels[None, :]  # [COLUMNS, HEAD_DIM]
    inside = (columns < kv_blocks)[:, None]
    weights = 1.0
    if SPEC.score == "moment":
        scores = moment_score(rows, statistics, offsets, inside, SPEC)
    elif SPEC.score == "spread":
        scores = moment_score(rows, statistics, offsets, inside, SPEC)
        weights = spread(rows, statistics, offsets, inside)
    else:
        tl.static_assert(SPEC.score == "mean")
        scores = mean_score(rows, statistics, offsets, inside, SPEC)
    return scores, weights


class VisibleKeys(NamedTuple):
    """The keys that the query blocks of a program see."""

    # first_key, last_key: [ROWS], first and last key that some query of the row's query block sees
    first_key: Any
    last_key: Any
    first_seen_base: Any  # the head's first seen key of each block (SPEC.has_seen)
    # similarity_base, threshold: similarities and threshold of the head's key blocks (SPEC.has_similarity)
    similarity_base: Any
    threshold: Any
    # kv_len, kv_blocks: numbers of keys and key blocks of the sequence or segment
    kv_len: Any
    kv_blocks: Any


@triton.jit
def _eligible(columns, visible, SPEC: tl.constexpr):
    """Return which blocks enter the softmax of each row, [ROWS, COLUMNS] bool.

    These blocks are visible, do not extend beyond the keys that the query block sees, and have tokens that are similar
    enough for a mean.
    """
    inside = columns < visible.kv_blocks
    end = tl.minimum((columns + 1) * BLOCK_K, visible.kv_len) - 1
    eligible = inside[None, :] & (visible.last_key[:, None] == visible.last_key[:, None])
    if SPEC.has_last:
        eligible = eligible & (end[None, :] <= visible.last_key[:, None])
    if SPEC.has_first:
        eligible = eligible & ((columns * BLOCK_K)[None, :] >= visible.first_key[:, None])
    if SPEC.has_seen:
        first_seen = tl.load(visible.first_seen_base + columns, mask=inside, other=NOWHERE)
        eligible = eligible & (first_seen < NOWHERE)[None, :]
    if SPEC.has_similarity:
        similarity = tl.load(visible.similarity_base + columns, mask=inside, other=1.0)
        eligible = eligible & ((similarity < visible.threshold) == 0)[None, :]
    return eligible


@triton.jit
def _sum_samples(values, SAMPLES: tl.constexpr):
    """Sum over the samples of each block: [ROWS, N] in the order of `row_order` -> [ROWS / SAMPLES, N]."""
    rows: tl.constexpr = values.shape[0]
    columns: tl.constexpr = values.shape[1]
    if SAMPLES == 1:
        total = values
    elif SAMPLES > 16:
        total = tl.sum(tl.reshape(values, (rows // SAMPLES, SAMPLES, columns)), 1)
    else:
        halves = tl.sum(tl.reshape(values, (rows // 16, 2, 8, columns)), 1)
        total = tl.sum(tl.reshape(halves, (rows // SAMPLES, SAMPLES // 2, columns)), 1)
    return total


@kernel
def score_kernel(
    query_ptr,
    statistics_ptrs,
    fact_ptrs,
    similarity_ptrs,
    probability_ptr,
    segments_ptr,
    query_strides,
    fact_strides,
    heads,
    group,
    q_len,
    kv_len,
    first_offset,
    last_offset,
    q_blocks,
    kv_blocks,
    SPEC: tl.constexpr,
):
    """Compute probability[block, j] = mean over the block's rows i of softmax_j s[i, j], over the eligible blocks j.

    With SPEC.exponent 2, the mean is replaced by the root of the mean square.

    Grid: groups of ROWS / SAMPLES_PADDED query blocks of every head, in one dimension. A program has ROWS rows, and
    visits the key blocks in steps of COLUMNS.

    Args:
        query_ptr: [B, H, Sq, D], which is sampled; or `QuerySummary.mean` (SPEC.from_means).
        statistics_ptrs: `BlockStatistics`.
        fact_ptrs, fact_strides: `MaskFactPointers`.
        similarity_ptrs: `SimilarityPointers`.
        probability_ptr: writes [B * H, q_blocks, kv_blocks] float32; NaN marks a block whose score is not finite.
            Blocks that no query of a group sees are neither written nor read.
        segments_ptr: `Segments.table` (SPEC.packed).
        SPEC: `ScoreSpec`.
    """
    ROWS: tl.constexpr = SPEC.rows
    SAMPLES: tl.constexpr = SPEC.samples
    EXPONENT: tl.constexpr = SPEC.exponent
    HEAD_DIM_PADDED: tl.constexpr = SPEC.head_dim_padded
    Q_BLOCKS: tl.constexpr = SPEC.rows // SPEC.samples_padded

    # Prologue: coordinates
    groups = (q_blocks + Q_BLOCKS - 1) // Q_BLOCKS
    program, flat_head, batch, head = split_program(tl.program_id(0), groups, heads)
    flat_kv_head = batch * (heads // group) + head // group
    first_block = program * Q_BLOCKS
    row_block, sample = row_order(tl.arange(0, ROWS), SPEC.samples_padded)
    q_block = first_block + row_block  # [ROWS]
    statistics_offset = flat_kv_head * kv_blocks * HEAD_DIM_PADDED
    similarity_base = similarity_ptrs.key + flat_kv_head * kv_blocks
    blocks_here = first_block + tl.arange(0, Q_BLOCKS)
    output_offsets = (flat_head * q_blocks + blocks_here) * kv_blocks  # [Q_BLOCKS]
    flat_q_block = flat_head * q_blocks + q_block
    base = head_base(query_ptr, query_strides, batch, head)
    if SPEC.packed:  # from here on, sizes are those of the segment
        q_start, _ = segment_queries(segments_ptr, batch)
        q_len, kv_len, first_offset, last_offset = segment_sizes(segments_ptr, batch, first_offset, last_offset)
        q_blocks = tl.cdiv(q_len, BLOCK_Q)
        kv_blocks = tl.cdiv(kv_len, BLOCK_K)
        base += q_start * query_strides[2]
        if first_block >= q_blocks:
            return
    used = (q_block < q_blocks) & (sample < SAMPLES)

    # Load the rows
    channels = tl.arange(0, HEAD_DIM_PADDED)
    if SPEC.from_means:
        row_ptrs = query_ptr + (flat_q_block * SAMPLES + sample)[:, None] * HEAD_DIM_PADDED
    else:
        if SPEC.has_blocks:
            picks = head_base(fact_ptrs.pick, fact_strides.pick, batch, head)
            pick_ptrs = picks + q_block * fact_strides.pick[2] + sample * fact_strides.pick[3]
            pick = tl.load(pick_ptrs, mask=used, other=0)
        else:
            first_query = tl.maximum(-last_offset, 0) if SPEC.has_last else 0
            if SPEC.has_seen:
                first_query = tl.load(head_base(fact_ptrs.first_query, fact_strides.first_query, batch, head))
            pick = sampled_query(q_block, sample, first_query, q_len, SAMPLES)
        row_ptrs = base + pick.to(tl.int64)[:, None] * query_strides[2]
    inside = used[:, None]
    if SPEC.head_dim != HEAD_DIM_PADDED:
        inside = inside & (channels < SPEC.head_dim)[None, :]
    loaded = tl.load(row_ptrs + channels[None, :], mask=inside, other=0.0)
    wide = loaded.to(tl.float32)  # [ROWS, HEAD_DIM]
    wide = tl.where(is_finite(wide), wide, float("nan"))
    query = wide.to(tl.bfloat16)
    query_low = (wide - query.to(tl.float32)).to(tl.bfloat16)
    rows = RowOperands(query, query_low, (wide * wide).to(tl.bfloat16))

    # Key blocks that the rows see
    first_key = q_block * BLOCK_Q + first_offset
    last_key = tl.minimum((q_block + 1) * BLOCK_Q, q_len) - 1 + last_offset
    begin = 0
    stop = kv_blocks
    if SPEC.has_first:
        begin = tl.maximum(first_block * BLOCK_Q + first_offset, 0) // BLOCK_K
    if SPEC.has_last:
        last_of_all = tl.minimum((first_block + Q_BLOCKS) * BLOCK_Q, q_len) - 1 + last_offset
        stop = tl.minimum(kv_blocks, tl.maximum(last_of_all + 1, 0) // BLOCK_K + 1)
    first_seen_base = head_base(fact_ptrs.first_seen, fact_strides.first_seen, batch, head)
    # Unused rows read the facts of used rows, because a load mask over rows would cost more.
    read_block = tl.minimum(q_block, q_blocks - 1).to(tl.int64)
    kinds = head_base(fact_ptrs.kind, fact_strides.kind, batch, head) + read_block * fact_strides.kind[2]  # [ROWS]
    biases = head_base(fact_ptrs.bias, fact_strides.bias, batch, head)
    biases = biases + read_block * fact_strides.bias[2] + tl.minimum(sample, SAMPLES - 1) * fact_strides.bias[3]
    threshold = 0.0
    if SPEC.has_similarity:
        threshold = tl.load(similarity_ptrs.threshold + head)
    visible = VisibleKeys(first_key, last_key, first_seen_base, similarity_base, threshold, kv_len, kv_blocks)

    # Main loops. The first pass computes row maxima and sums. If a sum is NaN, the second pass recomputes them without
    # the blocks whose score is NaN. The third pass computes and stores probabilities.
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    row_shift = row_sum
    for pass_index in tl.static_range(3):
        has_nan = tl.max(((row_sum == row_sum) == 0).to(tl.int32), 0) > 0
        if pass_index != ROW_SUMS_WITHOUT_NAN or has_nan:
            if pass_index == PROBABILITIES:  # a row adds 2^(EXPONENT (s - row_shift)) to the mean of its query block
                if SPEC.has_bias:  # all s may be -1e9, to which a logarithm cannot be added in float32
                    row_shift = tl.where(row_sum > 0.0, tl.log2(row_sum) + SPEC.log2_samples / EXPONENT, 0.0)
                    row_max = tl.where(row_sum > 0.0, row_max, 0.0)
                else:
                    row_shift = tl.where(row_sum > 0.0, row_max + tl.log2(row_sum) + SPEC.log2_samples / EXPONENT, 0.0)
            else:
                row_max = tl.full((ROWS,), float("-inf"), tl.float32)
                row_sum = tl.zeros((ROWS,), tl.float32)
            for start in tl.range(begin, stop, SPEC.columns, num_stages=SPEC.stages):
                # Scores
                columns = start + tl.arange(0, SPEC.columns)
                statistics = BlockStatistics(  # of this head
                    statistics_ptrs.mean_high + statistics_offset,
                    statistics_ptrs.mean_low + statistics_offset,
                    statistics_ptrs.variance + statistics_offset,
                )
                scores, weights = _block_scores(rows, statistics, columns, kv_blocks, SPEC)  # [ROWS, COLUMNS]
                eligible = _eligible(columns, visible, SPEC)
                if SPEC.has_blocks:
                    exists = (columns < kv_blocks)[None, :]
                    places = start + tl.arange(0, SPEC.columns)[None, :]
                    if SPEC.has_bias:
                        bias = tl.load(biases[:, None] + places, mask=exists, other=float("-inf"))
                        eligible = eligible & (bias != float("-inf"))
                        scores += bias
                    else:
                        eligible = eligible & (tl.load(kinds[:, None] + places, mask=exists, other=HIDDEN) != HIDDEN)
                if pass_index == PROBABILITIES:
                    # Epilogue: means over the samples of each query block
                    if SPEC.has_bias:
                        scores = scores - row_max[:, None]
                    share = tl.exp2((scores - row_shift[:, None]) * EXPONENT)
                    if SPEC.score == "spread":
                        share = tl.where(share == 0.0, 0.0, share * weights * weights)
                    share = tl.where(eligible & used[:, None], share, 0.0)
                    average = _sum_samples(share, SPEC.samples_padded)  # [Q_BLOCKS, COLUMNS]
                    if EXPONENT == 2:
                        average = tl.sqrt(average)
                    average = tl.where(average < NEGLIGIBLE, 0.0, average)  # keeps NaN
                    if SPEC.score == "spread":
                        average = tl.sqrt(average) * SPREAD_UNIT
                    stored = (blocks_here < q_blocks)[:, None] & (columns < kv_blocks)[None, :]
                    tl.store(probability_ptr + output_offsets[:, None] + columns[None, :], average, mask=stored)
                else:
                    # Online softmax
                    if pass_index == ROW_SUMS_WITHOUT_NAN:
                        eligible = eligible & (scores == scores)
                    scores = tl.where(eligible, scores, float("-inf"))
                    new_max = tl.maximum(row_max, tl.max(scores, 1))
                    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
                    row_sum = row_sum * tl.exp2(row_max - safe_max) + tl.sum(tl.exp2(scores - safe_max[:, None]), 1)
                    row_max = new_max


def block_probabilities(
    query: Tensor,
    key_value: KeyValueSummary,
    means: Tensor,
    call: Call,
    mask: MaskFacts | None,
    threshold: Tensor | None,
) -> Tensor:
    """Return the expected share of attention in each key block, (B * H, q_blocks, kv_blocks) float32.

    Args:
        means: `quantize.QuerySummary.mean`, read by scores of mean queries.
        mask: returned by `key_mask.key_mask` or `mask_blocks.mask_blocks`; None without a mask.
        threshold: (H,), similarity below which a key block is not eligible.
    """
    shape, inputs = call.shape, score_inputs(call.score)
    heads = shape.batch * shape.heads
    width = padded(shape.head_dim)
    from_means, samples = inputs.are_means, inputs.rows(call.score)
    samples_padded = power_of_two(samples)
    has_low = from_means or query.dtype != torch.bfloat16
    if architecture_of(query) == HOPPER and has_gluon():
        from sparge.backends.gpu.stages import score_hopper

        if score_hopper.serves(call, has_threshold=threshold is not None):
            rows = means if from_means else query
            return score_hopper.launch_scores(rows, key_value.statistics, call, from_means=from_means, has_low=has_low)
    config = configs.stage_config("score", width, architecture_of(query))
    num_rows = max(config.rows, samples_padded)
    probability = buffer_like(query, True, heads, shape.q_blocks, shape.kv_blocks)
    similarity = key_value.key_similarity
    facts = MaskFactPointers(*[None] * 5)
    if mask is not None:
        facts = MaskFactPointers(mask.first_seen, mask.first_query, mask.kind, mask.pick, mask.bias)
    fact_arguments = [tensor_and_strides(x, n, query) for x, n in zip(facts, (2, 2, 3, 4, 4), strict=True)]
    launch(
        score_kernel,
        ceil_div(shape.q_blocks, num_rows // samples_padded) * heads,
        query_ptr=means if from_means else query,
        statistics_ptrs=key_value.statistics,
        fact_ptrs=MaskFactPointers(*[tensor for tensor, _ in fact_arguments]),
        similarity_ptrs=SimilarityPointers(tensor_or(similarity, query), tensor_or(threshold, query)),
        probability_ptr=probability,
        segments_ptr=segments_argument(call, query),
        query_strides=strides_of(query),
        fact_strides=MaskFactPointers(*[strides for _, strides in fact_arguments]),
        **sizes_of(call),
        SPEC=ScoreSpec(
            score=call.score.name,
            head_dim=width if from_means else shape.head_dim,
            head_dim_padded=width,
            from_means=from_means,
            samples=samples,
            samples_padded=samples_padded,
            log2_samples=math.log2(samples),
            exponent=call.score.exponent,
            has_low=has_low,
            **spec_of(call),
            has_seen=facts.first_seen is not None,
            has_blocks=facts.kind is not None,
            has_bias=facts.bias is not None,
            has_similarity=threshold is not None,
            rows=num_rows,
            columns=config.columns,
            stages=config.stages,
        ),
        num_warps=config.warps,
    )
    return probability


@functools.cache
def has_gluon() -> bool:
    """Return whether Gluon kernels can be compiled. Triton's interpreter cannot run them."""
    from sparge.backends.gpu.requirements import gluon_unavailable_reason

    return not isinstance(score_kernel, InterpretedFunction) and gluon_unavailable_reason() is None
