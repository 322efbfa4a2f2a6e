"""Compute statistics of K and V, which quantization and scores need.

key_value_statistics    one pass over K and V: statistics of every key block, sums and maxima of every chunk
query_sizes             sizes of the channels of some queries
reduce                  sums, maxima and sizes -> mean key, factors that balance channels, value scales
similarity              similarity of the tokens of each key block, for calls with a threshold
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sparge.backends.gpu.replay import in_branch
from sparge.backends.gpu.stages.key_value_statistics import key_value_statistics
from sparge.backends.gpu.stages.query_sizes import query_sizes
from sparge.backends.gpu.stages.reduce import ReducedScales, reduce_parts
from sparge.backends.gpu.stages.similarity import key_similarity
from sparge.call import Call
from sparge.masks.visibility import SeenTokens


@dataclass(frozen=True)
class KeyValueSummary:
    """Statistics of K and V. Tensors that were not requested are placeholders, which are never read."""

    # mean_high, mean_low, variance: (B * Hkv, kv_blocks, D padded) bfloat16, see `summarize_kernel`
    mean_high: Tensor
    mean_low: Tensor
    variance: Tensor
    key_mean: Tensor  # (B * Hkv, D padded) float32, the smoothing mean
    balance: Tensor  # (B * Hkv, D padded) float32; queries are multiplied by it, keys divided
    value_scale: Tensor  # (B * Hkv, D_v padded) float32
    # (B * Hkv,) int32, bits of the largest key scale of a head that is not NaN; complete after quantization
    largest_key_scale: Tensor
    key_similarity: Tensor | None = None  # (B * Hkv, kv_blocks) float32, None if it was not requested
    # key_block, value_block: (B, Hkv, kv_blocks, D | D_v padded), the means that replace skipped blocks, None if blocks
    # are dropped; float32 if they will be quantized, else in the dtype of K
    key_block: Tensor | None = None
    value_block: Tensor | None = None
    # (B, Hkv, kv_blocks) float32, log2 of the number of keys of each block, NaN if a mean is not finite
    block_bias: Tensor | None = None
    block_usable: Tensor | None = None  # (B, Hkv, kv_blocks) int8, whether the bias is finite


def summarize_key_value(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    seen: SeenTokens | None,
    *,
    means: bool,
    variance: bool,
    quantized: bool,
    similarity: bool,
    blocks: bool = False,
) -> KeyValueSummary:
    """Read K once, V if it is needed, and some queries if Q and K will be quantized.

    Args:
        means, variance: compute the mean and the variance of every key block, for the scores.
        quantized: compute the mean key, the balancing factors, and the scales of FP8 values, for quantization.
        similarity: compute the similarity of every key block.
        blocks: compute the means that replace skipped blocks.
    """
    if not (means or blocks or quantized or similarity):
        return KeyValueSummary(*[key] * 7)
    value_scales = quantized and call.has_fp8_values
    summarize = partial(
        key_value_statistics,
        key,
        value,
        call,
        seen,
        means=means,
        variance=variance,
        blocks_for=(torch.float32 if quantized else key.dtype) if blocks else None,
        sums=quantized or similarity,
        value_max=value_scales,
        sums_of_blocks=similarity,
    )
    if quantized or similarity:
        with in_branch("keys"):
            statistics = summarize()
        with in_branch("queries"):
            sizes = query_sizes(query, call, seen)
        scales = reduce_parts(sizes, statistics, call, value_scales=value_scales)
    else:
        statistics, scales = summarize(), ReducedScales(key, key, key, key)
    return KeyValueSummary(
        mean_high=statistics.mean_high,
        mean_low=statistics.mean_low,
        variance=statistics.variance,
        key_mean=scales.key_mean,
        balance=scales.balance,
        value_scale=scales.value_scale if value_scales else key,
        largest_key_scale=scales.largest_key_scale,
        key_similarity=key_similarity(key, statistics, scales.key_mean, call, seen) if similarity else None,
        key_block=statistics.key_block if blocks else None,
        value_block=statistics.value_block if blocks else None,
        block_bias=statistics.block_bias if blocks else None,
        block_usable=statistics.block_usable if blocks else None,
    )
