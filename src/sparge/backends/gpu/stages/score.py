"""Block scores and their softmax: how much of each query block's attention every key block is expected to hold.

    probability[block, j] = mean over its rows i of softmax_j s[i, j], or the root of their mean square

A row is a query that stands for its block, one of some evenly spaced samples or the mean of all. What s is, a score
says (`reference.prediction.SCORES`): each has a function here (`moment_score`, `mean_score`), which `_block_scores`
calls by the score's name, and an entry in `INPUTS`. Score "spread" multiplies each softmax by what `spread` says.

The products run on bfloat16 tensor cores with the mean key in two parts (and 16 or 32-bit queries too), which leaves an
error of about 2^-17 of the score. The probabilities are averages of softmaxes, so maximum and sum of each row must be
known first: the row is scored twice. That costs less than writing all scores out and reading them back, and no memory.
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
    window_flags,
    window_offsets,
)
from sparge.backends.gpu.primitives import (
    BLOCK_K,
    BLOCK_Q,
    LN_2,
    NOWHERE,
    is_finite,
    sampled_query,
    segment_queries,
    segment_sizes,
)
from sparge.backends.gpu.stages import configs
from sparge.backends.gpu.stages.mask_blocks import HIDDEN, MaskBlocks
from sparge.backends.gpu.stages.summary import KeyValueSummary
from sparge.call import Call
from sparge.masks.geometry import ceil_div
from sparge.options import scores
from sparge.options.scores import Mean, Moment, Score, Spread, entry_of

HOPPER = 90
NEGLIGIBLE = tl.constexpr(scores.NEGLIGIBLE)
SPREAD_UNIT = tl.constexpr(scores.SPREAD_UNIT)
NUMBERS = ["heads", "kv_heads", "q_len", "kv_len", "first_offset", "last_offset", "q_blocks", "kv_blocks"]


@dataclass(frozen=True)
class ScoreInputs:
    """What a score is computed from.

    Attributes:
        rows: how many queries stand for a block.
        are_means: they are means of equal parts of the block, else evenly spaced samples.
        variance: whether variances of key blocks are read, besides their means.
    """

    rows: Callable[[Any], int]
    are_means: bool
    variance: bool

    def parts(self, score: Score) -> int:
        """How many means of queries it reads of a block."""
        return self.rows(score) if self.are_means else 0


INPUTS: dict[type[Score], ScoreInputs] = {
    Moment: ScoreInputs(rows=lambda score: score.samples, are_means=False, variance=True),
    Mean: ScoreInputs(rows=lambda _: 1, are_means=True, variance=False),
    Spread: ScoreInputs(rows=lambda score: score.samples, are_means=True, variance=True),
}


def score_inputs(score: Score) -> ScoreInputs:
    """What a score reads.

    Raises:
        NotImplementedError: no kernel has it.
    """
    return entry_of(INPUTS, score, "score on a GPU")


class Rows(NamedTuple):
    """Queries that stand for their blocks, bfloat16 [ROWS, D]: what bfloat16 leaves of them is in ``low`` (HAS_LOW)."""

    query: Any
    low: Any
    square: Any


class Statistics(NamedTuple):
    """Where a head's means of key blocks, in a high and a low part, and their variances begin, each [kv_blocks, D]."""

    mean_high_base: Any
    mean_low_base: Any
    variance_base: Any


@triton.jit
def mean_score(rows, statistics, offsets, inside, HAS_LOW: tl.constexpr):
    """The paper's score: s = log2 e scale q . mean_j, [ROWS, COLUMNS]. (The factors are in the means.)"""
    mean_high = tl.load(statistics.mean_high_base + offsets, mask=inside, other=0.0).T
    scores = tl.dot(rows.query, mean_high)
    mean_low = tl.load(statistics.mean_low_base + offsets, mask=inside, other=0.0).T
    scores = tl.dot(rows.query, mean_low, scores)
    if HAS_LOW:
        scores = tl.dot(rows.low, mean_high, scores)
    return scores


@triton.jit
def moment_score(rows, statistics, offsets, inside, HAS_LOW: tl.constexpr):
    """s = log2 e (scale q . mean_j + scale^2 / 4  q^2 . variance_j), [ROWS, COLUMNS]. (The factors are in both.)"""
    scores = mean_score(rows, statistics, offsets, inside, HAS_LOW)
    variance = tl.load(statistics.variance_base + offsets, mask=inside, other=0.0).T
    return tl.dot(rows.square, variance, scores)


@triton.jit
def spread(rows, statistics, offsets, inside):
    """What the variance adds to `moment_score`, in nats: the weight of score "spread"."""
    variance = tl.load(statistics.variance_base + offsets, mask=inside, other=0.0).T
    return tl.dot(rows.square, variance) * LN_2


@triton.jit
def _block_scores(
    rows,
    statistics,
    columns,
    kv_blocks,
    SCORE: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HAS_LOW: tl.constexpr,
):
    """Scores of rows against key blocks, [ROWS, COLUMNS], in octaves, by the score's name; and weights, or 1."""
    channels = tl.arange(0, HEAD_DIM_PADDED)
    offsets = columns[:, None] * HEAD_DIM_PADDED + channels[None, :]
    inside = (columns < kv_blocks)[:, None]
    weights = 1.0
    if SCORE == "moment":
        scores = moment_score(rows, statistics, offsets, inside, HAS_LOW)
    elif SCORE == "spread":
        scores = moment_score(rows, statistics, offsets, inside, HAS_LOW)
        weights = spread(rows, statistics, offsets, inside)
    else:
        tl.static_assert(SCORE == "mean")
        scores = mean_score(rows, statistics, offsets, inside, HAS_LOW)
    return scores, weights


@triton.jit
def _eligible(
    columns,
    first_key,
    last_key,
    first_seen_base,
    key_similarity_base,
    threshold,
    kv_len,
    kv_blocks,
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    HAS_SIMILARITY: tl.constexpr,
):
    """[ROWS, COLUMNS]: blocks that take part in the softmax.

    They are visible, hold no key before the first or after the last one that their row sees, and their tokens agree
    enough for a summary.
    """
    inside = columns < kv_blocks
    end = tl.minimum((columns + 1) * BLOCK_K, kv_len) - 1
    eligible = inside[None, :] & (last_key[:, None] == last_key[:, None])
    if HAS_LAST:
        eligible = eligible & (end[None, :] <= last_key[:, None])
    if HAS_FIRST:
        eligible = eligible & ((columns * BLOCK_K)[None, :] >= first_key[:, None])
    if HAS_SEEN:
        first_seen = tl.load(first_seen_base + columns, mask=inside, other=NOWHERE)
        eligible = eligible & (first_seen < NOWHERE)[None, :]
    if HAS_SIMILARITY:
        similarity = tl.load(key_similarity_base + columns, mask=inside, other=1.0)
        eligible = eligible & ((similarity < threshold) == 0)[None, :]
    return eligible


@triton.jit
def _row_order(SAMPLES: tl.constexpr, ROWS: tl.constexpr):
    """Query block (from 0) and sample of each row.

    A thread of a matrix product holds rows r and r + 8 of 16. Half of a block's samples go to rows 0 to 7 and half to
    rows 8 to 15, so that `_sum_samples` adds them without an exchange first.
    """
    rows = tl.arange(0, ROWS)
    if SAMPLES == 1 or SAMPLES > 16:
        block = rows // SAMPLES
        sample = rows % SAMPLES
    else:
        half: tl.constexpr = SAMPLES // 2
        within = rows % 8
        block = rows // 16 * (16 // SAMPLES) + within // half
        sample = rows // 8 % 2 * half + within % half
    return block, sample


@triton.jit
def _sum_samples(values, SAMPLES: tl.constexpr):
    """[ROWS, N] in the order of `_row_order` -> [ROWS / SAMPLES, N]."""
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


@triton.jit(do_not_specialize=NUMBERS)
def score_kernel(
    query_ptr,
    mean_high_ptr,
    mean_low_ptr,
    variance_ptr,
    first_seen_ptr,
    first_query_ptr,
    kind_ptr,
    pick_ptr,
    bias_ptr,
    key_similarity_ptr,
    threshold_ptr,
    probability_ptr,
    segments_ptr,
    query_strides,
    first_seen_strides,
    first_query_strides,
    kind_strides,
    pick_strides,
    bias_strides,
    heads,
    kv_heads,
    q_len,
    kv_len,
    first_offset,
    last_offset,
    q_blocks,
    kv_blocks,
    SCORE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    FROM_MEANS: tl.constexpr,
    SAMPLES: tl.constexpr,
    SAMPLES_PADDED: tl.constexpr,
    LOG2_SAMPLES: tl.constexpr,
    EXPONENT: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SIMILARITY: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """probability[block, j] = mean over the block's rows i of softmax_j s[i, j], over the eligible blocks j.

    With EXPONENT 2 the root of the mean square over them.

    Grid: groups of ROWS / SAMPLES_PADDED query blocks of every head, in one dimension. A program has ROWS rows, and
    walks the key blocks in steps of COLUMNS.

    Reads
        query            [B, H, Sq, D], of which samples are taken, or FROM_MEANS those of `QuerySummary.mean`
        mean_high, mean_low, variance    [B * Hkv, kv_blocks, D padded] bfloat16, of `summarize_kernel`
        first_seen       [B, H, kv_blocks] int32 and first_query [B, H] int32 (HAS_SEEN), of `first_seen_keys`
        pick             [B, H, q_blocks, SAMPLES] int32 (HAS_BLOCKS, not FROM_MEANS), of `mask_blocks`
        kind, bias       [B, H, q_blocks, kv_blocks] int8, or [B, H, q_blocks, SAMPLES, kv_blocks] float32 (HAS_BIAS),
                         what is visible and what a mask adds, of `mask_blocks` (HAS_BLOCKS)
        key_similarity   [B * Hkv, kv_blocks] and threshold [H] (HAS_SIMILARITY), float32
        segments         of `Segments.table` (PACKED)
    Writes
        probability      [B * H, q_blocks, kv_blocks] float32; NaN marks a block whose score is not finite. What lies
                         outside of what a group's queries see stays unwritten: nothing reads it.
    """
    blocks: tl.constexpr = ROWS // SAMPLES_PADDED
    groups = (q_blocks + blocks - 1) // blocks
    flat_head = (tl.program_id(0) // groups).to(tl.int64)
    batch = flat_head // heads
    head = flat_head % heads
    flat_kv_head = batch * kv_heads + head // (heads // kv_heads)
    first_block = tl.program_id(0) % groups * blocks
    row_block, sample = _row_order(SAMPLES_PADDED, ROWS)
    q_block = first_block + row_block
    first = flat_kv_head * kv_blocks * HEAD_DIM_PADDED
    key_similarity_base = key_similarity_ptr + flat_kv_head * kv_blocks
    blocks_here = first_block + tl.arange(0, blocks)
    output_rows = (flat_head * q_blocks + blocks_here) * kv_blocks
    query_rows = flat_head * q_blocks + q_block
    base = query_ptr + batch * query_strides[0] + head * query_strides[1]
    if PACKED:  # from here on the sizes are the segment's own
        q_start, _ = segment_queries(segments_ptr, batch)
        q_len, kv_len, first_offset, last_offset = segment_sizes(segments_ptr, batch, first_offset, last_offset)
        q_blocks = tl.cdiv(q_len, BLOCK_Q)
        kv_blocks = tl.cdiv(kv_len, BLOCK_K)
        base += q_start * query_strides[2]
        if first_block >= q_blocks:
            return
    used = (q_block < q_blocks) & (sample < SAMPLES)
    channels = tl.arange(0, HEAD_DIM_PADDED)
    if FROM_MEANS:
        pointers = query_ptr + (query_rows * SAMPLES + sample)[:, None] * HEAD_DIM_PADDED
    else:
        if HAS_BLOCKS:
            picks = pick_ptr + batch * pick_strides[0] + head * pick_strides[1]
            pick = tl.load(picks + q_block * pick_strides[2] + sample * pick_strides[3], mask=used, other=0)
        else:
            first_query = tl.maximum(-last_offset, 0) if HAS_LAST else 0
            if HAS_SEEN:
                first_query = tl.load(first_query_ptr + batch * first_query_strides[0] + head * first_query_strides[1])
            pick = sampled_query(q_block, sample, first_query, q_len, SAMPLES)
        pointers = base + pick.to(tl.int64)[:, None] * query_strides[2]
    inside = used[:, None]
    if HEAD_DIM != HEAD_DIM_PADDED:
        inside = inside & (channels < HEAD_DIM)[None, :]
    exact = tl.load(pointers + channels[None, :], mask=inside, other=0.0)
    wide = exact.to(tl.float32)
    wide = tl.where(is_finite(wide), wide, float("nan"))
    query = wide.to(tl.bfloat16)
    query_low = (wide - query.to(tl.float32)).to(tl.bfloat16)
    square = (wide * wide).to(tl.bfloat16)

    first_key = q_block * BLOCK_Q + first_offset
    last_key = tl.minimum((q_block + 1) * BLOCK_Q, q_len) - 1 + last_offset
    begin = 0
    stop = kv_blocks
    if HAS_FIRST:
        begin = tl.maximum(first_block * BLOCK_Q + first_offset, 0) // BLOCK_K
    if HAS_LAST:
        last_of_all = tl.minimum((first_block + blocks) * BLOCK_Q, q_len) - 1 + last_offset
        stop = tl.minimum(kv_blocks, tl.maximum(last_of_all + 1, 0) // BLOCK_K + 1)
    first_seen_base = first_seen_ptr + batch * first_seen_strides[0] + head * first_seen_strides[1]
    # Rows that are not used read what others do: a mask over rows costs more.
    read_block = tl.minimum(q_block, q_blocks - 1).to(tl.int64)
    kinds = kind_ptr + batch * kind_strides[0] + head * kind_strides[1] + read_block * kind_strides[2]
    biases = bias_ptr + batch * bias_strides[0] + head * bias_strides[1]
    biases = biases + read_block * bias_strides[2] + tl.minimum(sample, SAMPLES - 1) * bias_strides[3]
    threshold = 0.0
    if HAS_SIMILARITY:
        threshold = tl.load(threshold_ptr + head)
    rows = Rows(query, query_low, square)

    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    row_shift = row_sum
    # Pass 0 sums. NaN in a query or key makes a sum NaN; then pass 1 sums again without the blocks it came from. Pass 2
    # stores.
    for step in tl.static_range(3):
        broken = tl.max(((row_sum == row_sum) == 0).to(tl.int32), 0) > 0
        if step != 1 or broken:
            if step == 2:  # 2^(EXPONENT (s - row_shift)) is the share of one sample in its block's average
                if HAS_BIAS:  # s may be -1e9 throughout, beside which a logarithm is lost
                    row_shift = tl.where(row_sum > 0.0, tl.log2(row_sum) + LOG2_SAMPLES / EXPONENT, 0.0)
                    row_max = tl.where(row_sum > 0.0, row_max, 0.0)
                else:
                    row_shift = tl.where(row_sum > 0.0, row_max + tl.log2(row_sum) + LOG2_SAMPLES / EXPONENT, 0.0)
            else:
                row_max = tl.full((ROWS,), float("-inf"), tl.float32)
                row_sum = tl.zeros((ROWS,), tl.float32)
            for start in tl.range(begin, stop, COLUMNS, num_stages=STAGES):
                columns = start + tl.arange(0, COLUMNS)
                statistics = Statistics(mean_high_ptr + first, mean_low_ptr + first, variance_ptr + first)
                scores, weights = _block_scores(rows, statistics, columns, kv_blocks, SCORE, HEAD_DIM_PADDED, HAS_LOW)
                eligible = _eligible(
                    columns,
                    first_key,
                    last_key,
                    first_seen_base,
                    key_similarity_base,
                    threshold,
                    kv_len,
                    kv_blocks,
                    HAS_FIRST,
                    HAS_LAST,
                    HAS_SEEN,
                    HAS_SIMILARITY,
                )
                if HAS_BLOCKS:
                    exists = (columns < kv_blocks)[None, :]
                    places = start + tl.arange(0, COLUMNS)[None, :]
                    if HAS_BIAS:
                        bias = tl.load(biases[:, None] + places, mask=exists, other=float("-inf"))
                        eligible = eligible & (bias != float("-inf"))
                        scores += bias
                    else:
                        eligible = eligible & (tl.load(kinds[:, None] + places, mask=exists, other=HIDDEN) != HIDDEN)
                if step == 2:
                    if HAS_BIAS:
                        scores = scores - row_max[:, None]
                    share = tl.exp2((scores - row_shift[:, None]) * EXPONENT)
                    if SCORE == "spread":
                        share = tl.where(share == 0.0, 0.0, share * weights * weights)
                    average = _sum_samples(tl.where(eligible & used[:, None], share, 0.0), SAMPLES_PADDED)
                    if EXPONENT == 2:
                        average = tl.sqrt(average)
                    average = tl.where(average < NEGLIGIBLE, 0.0, average)  # keeps NaN
                    if SCORE == "spread":
                        average = tl.sqrt(average) * SPREAD_UNIT
                    stored = (blocks_here < q_blocks)[:, None] & (columns < kv_blocks)[None, :]
                    tl.store(probability_ptr + output_rows[:, None] + columns[None, :], average, mask=stored)
                else:
                    if step == 1:
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
    first_seen: Tensor | None,
    first_query: Tensor | None,
    threshold: Tensor | None,
    blocks: MaskBlocks | None = None,
) -> Tensor:
    """Expected share of each key block, (B * H, q_blocks, kv_blocks) float32.

    Args:
        means: `quantize.QuerySummary.mean`, read by scores of mean queries.
        first_seen, first_query: of `visibility.first_seen_keys` where keys are hidden.
        threshold: (H,), similarity under which a key block is not eligible.
        blocks: of `mask_blocks.mask_blocks` where a mask has more to say than which keys are hidden.
    """
    shape, inputs = call.shape, score_inputs(call.score)
    heads = shape.batch * shape.heads
    width = padded(shape.head_dim)
    from_means, samples = inputs.are_means, inputs.rows(call.score)
    samples_padded = power_of_two(samples)
    has_low = from_means or query.dtype != torch.bfloat16
    if _has_hopper_kernel(query, call, has_blocks=blocks is not None, has_threshold=threshold is not None):
        from sparge.backends.gpu.stages.score_hopper import launch_scores

        of_queries = means if from_means else query
        of_keys = key_value.mean_high, key_value.mean_low, key_value.variance
        return launch_scores(of_queries, *of_keys, call, from_means=from_means, has_low=has_low)
    setting = configs.score_config(width, architecture_of(query))
    rows = max(setting.rows, samples_padded)
    probability = buffer_like(query, True, heads, shape.q_blocks, shape.kv_blocks)
    similarity = key_value.key_similarity
    pick, bias = (None, None) if blocks is None else (blocks.pick, blocks.bias)
    launch(
        score_kernel,
        ceil_div(shape.q_blocks, rows // samples_padded) * heads,
        query_ptr=means if from_means else query,
        mean_high_ptr=key_value.mean_high,
        mean_low_ptr=key_value.mean_low,
        variance_ptr=key_value.variance,
        first_seen_ptr=query if first_seen is None else first_seen,
        first_query_ptr=query if first_query is None else first_query,
        kind_ptr=query if blocks is None else blocks.kind,
        pick_ptr=query if pick is None else pick,
        bias_ptr=query if bias is None else bias,
        key_similarity_ptr=query if similarity is None else similarity,
        threshold_ptr=query if threshold is None else threshold,
        probability_ptr=probability,
        segments_ptr=segments_argument(call, query),
        query_strides=strides_of(query),
        first_seen_strides=(0, 0) if first_seen is None else first_seen.stride()[:2],
        first_query_strides=(0, 0) if first_query is None else first_query.stride(),
        kind_strides=(0, 0, 0) if blocks is None else blocks.kind.stride()[:3],
        pick_strides=(0, 0, 0, 0) if pick is None else pick.stride(),
        bias_strides=(0, 0, 0, 0) if bias is None else bias.stride()[:4],
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        **window_offsets(call),
        q_blocks=shape.q_blocks,
        kv_blocks=shape.kv_blocks,
        SCORE=call.score.name,
        HEAD_DIM=width if from_means else shape.head_dim,
        HEAD_DIM_PADDED=width,
        FROM_MEANS=from_means,
        SAMPLES=samples,
        SAMPLES_PADDED=samples_padded,
        LOG2_SAMPLES=math.log2(samples),
        EXPONENT=call.score.exponent,
        HAS_LOW=has_low,
        **window_flags(call),
        HAS_SEEN=first_seen is not None,
        HAS_BLOCKS=blocks is not None,
        HAS_BIAS=bias is not None,
        HAS_SIMILARITY=threshold is not None,
        PACKED=call.segments is not None,
        ROWS=rows,
        COLUMNS=setting.columns,
        STAGES=setting.stages,
        num_warps=setting.warps,
    )
    return probability


def _has_hopper_kernel(query: Tensor, call: Call, *, has_blocks: bool, has_threshold: bool) -> bool:
    """Whether `score_hopper` serves the call; no interpreter runs it."""
    if architecture_of(query) != HOPPER or isinstance(score_kernel, InterpretedFunction) or not has_gluon():
        return False
    from sparge.backends.gpu.stages.score_hopper import serves

    return serves(call, has_blocks=has_blocks, has_threshold=has_threshold)


@functools.cache
def has_gluon() -> bool:
    """Whether Gluon kernels can be compiled."""
    from sparge.backends.gpu.requirements import gluon_unavailable_reason

    return gluon_unavailable_reason() is None
