"""Block scores and their softmax: how much of each query block's attention every key block is expected to hold.

    s[i, j] = log2 e (scale q_i . mean_j + scale^2 / 2  q_i^2 . variance_j)     for every sampled query i
    probability[block, j] = mean over its samples i of softmax_j s[i, j]

The product runs on bfloat16 tensor cores with the mean in two parts (and 16 or 32-bit queries too), which leaves an
error of about 2^-17 of the score. The probabilities are averages of softmaxes, so maximum and sum of each query's row
must be known first: the row is scored twice. That costs less than writing P scores per block out and reading them
back, and no memory.

The paper's "mean" score is the same with one query, the block's mean, and no variance.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.cuda.launch import architecture_of, buffer_like, launch, padded, power_of_two, strides_of
from sparge.backends.cuda.primitives import BLOCK_K, BLOCK_Q, NOWHERE, is_finite, sampled_query
from sparge.backends.cuda.stages import configs
from sparge.backends.cuda.stages.quantize import QueryFacts
from sparge.backends.cuda.stages.statistics import Summary
from sparge.call import Call
from sparge.config import Mean, Moment
from sparge.geometry import ceil_div

LENGTHS = ["heads", "kv_heads", "q_len", "kv_len", "q_blocks", "kv_blocks"]


@triton.jit
def _judged(
    columns,
    last_query,
    first_seen_base,
    key_similarity_base,
    threshold,
    kv_len,
    kv_blocks,
    IS_CAUSAL: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    HAS_JUDGE: tl.constexpr,
):
    """[rows, columns]: blocks that are visible, hold no key after the row's last query, and agree with themselves."""
    inside = columns < kv_blocks
    end = tl.minimum((columns + 1) * BLOCK_K, kv_len) - 1
    judged = inside[None, :] & (last_query[:, None] == last_query[:, None])
    if IS_CAUSAL:
        judged = judged & (end[None, :] <= last_query[:, None])
    if HAS_SEEN:
        first_seen = tl.load(first_seen_base + columns, mask=inside, other=NOWHERE)
        judged = judged & (first_seen < NOWHERE)[None, :]
    if HAS_JUDGE:
        similarity = tl.load(key_similarity_base + columns, mask=inside, other=1.0)
        judged = judged & ((similarity < threshold) == 0)[None, :]
    return judged


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


@triton.jit
def _scores(
    query,
    query_low,
    square,
    mean_high_base,
    mean_low_base,
    variance_base,
    columns,
    kv_blocks,
    HEAD_DIM_PADDED: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_VARIANCE: tl.constexpr,
):
    channels = tl.arange(0, HEAD_DIM_PADDED)
    offsets = columns[:, None] * HEAD_DIM_PADDED + channels[None, :]
    inside = (columns < kv_blocks)[:, None]
    mean_high = tl.load(mean_high_base + offsets, mask=inside, other=0.0).T
    scores = tl.dot(query, mean_high)
    mean_low = tl.load(mean_low_base + offsets, mask=inside, other=0.0).T
    scores = tl.dot(query, mean_low, scores)
    if HAS_LOW:
        scores = tl.dot(query_low, mean_high, scores)
    if HAS_VARIANCE:
        variance = tl.load(variance_base + offsets, mask=inside, other=0.0).T
        scores = tl.dot(square, variance, scores)
    return scores


@triton.jit(do_not_specialize=LENGTHS)
def score_kernel(
    query_ptr,
    mean_high_ptr,
    mean_low_ptr,
    variance_ptr,
    first_seen_ptr,
    first_query_ptr,
    key_similarity_ptr,
    threshold_ptr,
    probability_ptr,
    query_strides,
    first_seen_strides,
    first_query_strides,
    heads,
    kv_heads,
    q_len,
    kv_len,
    q_blocks,
    kv_blocks,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SAMPLES: tl.constexpr,
    SAMPLES_PADDED: tl.constexpr,
    FROM_MEANS: tl.constexpr,
    HAS_LOW: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    HAS_JUDGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: groups of ROWS / SAMPLES_PADDED query blocks of every head. A row is one sampled query.

    Stores probabilities [B * H, q_blocks, kv_blocks] in float32; NaN marks a block whose score is not finite. What
    lies beyond the last query of a group stays unwritten: nothing reads it.
    """
    blocks: tl.constexpr = ROWS // SAMPLES_PADDED
    groups = (q_blocks + blocks - 1) // blocks
    flat_head = (tl.program_id(0) // groups).to(tl.int64)
    batch = flat_head // heads
    head = flat_head % heads
    flat_kv_head = batch * kv_heads + head // (heads // kv_heads)
    causal_offset = kv_len - q_len
    first_block = tl.program_id(0) % groups * blocks
    row_block, sample = _row_order(SAMPLES_PADDED, ROWS)
    q_block = first_block + row_block
    used = (q_block < q_blocks) & (sample < SAMPLES)
    channels = tl.arange(0, HEAD_DIM_PADDED)
    if FROM_MEANS:
        pointers = query_ptr + (flat_head * q_blocks + q_block)[:, None] * HEAD_DIM_PADDED
    else:
        first_query = tl.maximum(-causal_offset, 0) if IS_CAUSAL else 0
        if HAS_SEEN:
            first_query = tl.load(first_query_ptr + batch * first_query_strides[0] + head * first_query_strides[1])
        pick = sampled_query(q_block, sample, first_query, q_len, SAMPLES)
        base = query_ptr + batch * query_strides[0] + head * query_strides[1]
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

    last_query = tl.minimum((q_block + 1) * BLOCK_Q, q_len) - 1 + causal_offset
    stop = kv_blocks
    if IS_CAUSAL:
        last_of_all = tl.minimum((first_block + blocks) * BLOCK_Q, q_len) - 1 + causal_offset
        stop = tl.minimum(kv_blocks, tl.maximum(last_of_all + 1, 0) // BLOCK_K + 1)
    first_seen_base = first_seen_ptr + batch * first_seen_strides[0] + head * first_seen_strides[1]
    key_similarity_base = key_similarity_ptr + flat_kv_head * kv_blocks
    threshold = 0.0
    if HAS_JUDGE:
        threshold = tl.load(threshold_ptr + head)
    statistics = flat_kv_head * kv_blocks * HEAD_DIM_PADDED

    blocks_here = first_block + tl.arange(0, blocks)
    output_rows = (flat_head * q_blocks + blocks_here) * kv_blocks
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    row_shift = row_sum
    # Pass 0 sums. NaN in a query or key makes a sum NaN; then pass 1 sums again without the blocks it came from. Pass 2
    # stores.
    for step in tl.static_range(3):
        broken = tl.max(((row_sum == row_sum) == 0).to(tl.int32), 0) > 0
        if step != 1 or broken:
            if step == 2:  # 2^(s - row_shift) is the share of one sample in its block's average
                row_shift = tl.where(row_sum > 0.0, row_max + tl.log2(row_sum * SAMPLES), 0.0)
            else:
                row_max = tl.full((ROWS,), float("-inf"), tl.float32)
                row_sum = tl.zeros((ROWS,), tl.float32)
            for start in tl.range(0, stop, COLUMNS, num_stages=STAGES):
                columns = start + tl.arange(0, COLUMNS)
                scores = _scores(
                    query,
                    query_low,
                    square,
                    mean_high_ptr + statistics,
                    mean_low_ptr + statistics,
                    variance_ptr + statistics,
                    columns,
                    kv_blocks,
                    HEAD_DIM_PADDED,
                    HAS_LOW,
                    not FROM_MEANS,
                )
                judged = _judged(
                    columns,
                    last_query,
                    first_seen_base,
                    key_similarity_base,
                    threshold,
                    kv_len,
                    kv_blocks,
                    IS_CAUSAL,
                    HAS_SEEN,
                    HAS_JUDGE,
                )
                if step == 2:
                    share = tl.where(judged & used[:, None], tl.exp2(scores - row_shift[:, None]), 0.0)
                    average = _sum_samples(share, SAMPLES_PADDED)
                    stored = (blocks_here < q_blocks)[:, None] & (columns < kv_blocks)[None, :]
                    tl.store(probability_ptr + output_rows[:, None] + columns[None, :], average, mask=stored)
                else:
                    if step == 1:
                        judged = judged & (scores == scores)
                    scores = tl.where(judged, scores, float("-inf"))
                    new_max = tl.maximum(row_max, tl.max(scores, 1))
                    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
                    row_sum = row_sum * tl.exp2(row_max - safe_max) + tl.sum(tl.exp2(scores - safe_max[:, None]), 1)
                    row_max = new_max


def block_probabilities(
    query: Tensor,
    summary: Summary,
    facts: QueryFacts,
    call: Call,
    first_seen: Tensor | None,
    first_query: Tensor | None,
    threshold: Tensor | None,
) -> Tensor:
    """Expected share of each key block, (B * H, q_blocks, kv_blocks) float32.

    Args:
        first_seen, first_query: of `visibility.first_seen_keys` where keys are hidden.
        threshold: (H,), similarity under which a key block is not judged.
    """
    shape, score = call.shape, call.score
    heads = shape.batch * shape.heads
    width = padded(shape.head_dim)
    from_means = isinstance(score, Mean)
    samples = score.samples if isinstance(score, Moment) else 1
    samples_padded = power_of_two(samples)
    config = configs.score_config(width, architecture_of(query))
    rows = max(config.rows, samples_padded)
    probability = buffer_like(query, True, heads, shape.q_blocks, shape.kv_blocks)
    launch(
        score_kernel,
        ceil_div(shape.q_blocks, rows // samples_padded) * heads,
        query_ptr=facts.mean if from_means else query,
        mean_high_ptr=summary.mean_high,
        mean_low_ptr=summary.mean_low,
        variance_ptr=summary.variance,
        first_seen_ptr=query if first_seen is None else first_seen,
        first_query_ptr=query if first_query is None else first_query,
        key_similarity_ptr=query if summary.key_similarity is None else summary.key_similarity,
        threshold_ptr=query if threshold is None else threshold,
        probability_ptr=probability,
        query_strides=strides_of(query),
        first_seen_strides=(0, 0) if first_seen is None else first_seen.stride()[:2],
        first_query_strides=(0, 0) if first_query is None else first_query.stride(),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        q_blocks=shape.q_blocks,
        kv_blocks=shape.kv_blocks,
        HEAD_DIM=width if from_means else shape.head_dim,
        HEAD_DIM_PADDED=width,
        SAMPLES=samples,
        SAMPLES_PADDED=samples_padded,
        FROM_MEANS=from_means,
        HAS_LOW=from_means or query.dtype != torch.bfloat16,
        IS_CAUSAL=call.is_causal,
        HAS_SEEN=first_seen is not None,
        HAS_JUDGE=threshold is not None,
        ROWS=rows,
        COLUMNS=config.columns,
        STAGES=config.stages,
        num_warps=config.warps,
    )
    return probability
