"""Compute the statistics of K and V that quantization and scores read.

key_value_statistics    one pass over K and V: statistics of every key block, sums and maxima of every chunk
query_sizes             sizes of the channels of Q, from samples
reduce_parts            sums, maxima and sizes -> mean key, factors that balance channels, value scales
key_similarity          similarity of the tokens of each key block, for calls with a similarity threshold
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import buffer_like, first_key, launch, padded, strides_of
from sparge.backends.gpu.primitives import BLOCK_K, kernel, load_tokens, self_similarity, split_program, token_head
from sparge.backends.gpu.replay import in_branch
from sparge.backends.gpu.stages.arguments import seen_keys
from sparge.backends.gpu.stages.key_value_statistics import (
    SUM,
    BlockMeans,
    BlockStatistics,
    ChunkSums,
    key_value_statistics,
)
from sparge.backends.gpu.stages.reduce import Scales, query_sizes, reduce_parts
from sparge.call import Call
from sparge.masks.visibility import SeenTokens


@kernel
def key_similarity_kernel(
    key_ptr,
    seen_ptr,
    center_ptr,
    similarity_ptr,
    key_strides,
    seen_strides,
    center_strides,
    kv_heads,
    kv_len,
    kv_blocks,
    first_key,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
):
    """Compute similarity = |mean of the unit vectors (k - center) / |k - center||^2, the mean cosine over all pairs.

    Grid: key blocks of every head of K and V, in one dimension. No query sees keys before ``first_key``.

    Reads
        key           [B, Hkv, Sk, D]
        seen          [B, Hkv, Sk] bool (HAS_SEEN)
        center        float32 [D padded], the mean key for smoothing, one per head or one per block
    Writes
        similarity    [B * Hkv, kv_blocks] float32
    """
    block, flat_head, batch, head = split_program(tl.program_id(0), kv_blocks, kv_heads)
    tokens = block * BLOCK_K + tl.arange(0, BLOCK_K)
    channels = tl.arange(0, HEAD_DIM_PADDED)
    key_head = token_head(key_ptr, seen_ptr, key_strides, seen_strides, batch, head, (0, first_key, kv_len))
    key, present = load_tokens(key_head, tokens, HEAD_DIM, HEAD_DIM_PADDED, HAS_SEEN)
    center = tl.load(center_ptr + flat_head * center_strides[0] + block * center_strides[1] + channels)
    key = tl.where(present[:, None], key - center[None, :], 0.0)  # [64, HEAD_DIM]
    count = tl.maximum(tl.sum(present.to(tl.int32)), 1).to(tl.float32)
    tl.store(similarity_ptr + flat_head * kv_blocks + block, self_similarity(key, count))


def key_similarity(key: Tensor, sums: ChunkSums, key_mean: Tensor, call: Call, seen: SeenTokens | None) -> Tensor:
    """Return the similarity of every key block, (B * Hkv, kv_blocks) float32.

    Args:
        sums: the sums of every block.
        key_mean: the mean of all keys, returned by `reduce.reduce_parts`.
    """
    shape = call.shape
    width, heads = padded(shape.head_dim), shape.batch * shape.kv_heads
    center, center_strides = key_mean, (width, 0)
    if call.is_causal:  # the mean up to the end of the block, which must not depend on future keys
        center = sums.key[:, :, SUM.value].cumsum(1) / sums.key_count.cumsum(1).clamp(min=1)[..., None]
        center_strides = (shape.kv_blocks * width, width)
    similarity = buffer_like(key, True, heads, shape.kv_blocks)
    keys_seen, seen_strides, has_seen = seen_keys(seen, call, key)
    launch(
        key_similarity_kernel,
        shape.kv_blocks * heads,
        key_ptr=key,
        seen_ptr=keys_seen,
        center_ptr=center,
        similarity_ptr=similarity,
        key_strides=strides_of(key),
        seen_strides=seen_strides,
        center_strides=center_strides,
        kv_heads=shape.kv_heads,
        kv_len=shape.kv_len,
        kv_blocks=shape.kv_blocks,
        first_key=first_key(call),
        HEAD_DIM=shape.head_dim,
        HEAD_DIM_PADDED=width,
        HAS_SEEN=has_seen,
    )
    return similarity


@dataclass(frozen=True)
class KeyValueSummary:
    """Statistics of K and V. Tensors that were not requested are placeholders, which are never read."""

    statistics: BlockStatistics
    scales: Scales
    means: BlockMeans | None = None  # None if skipped blocks are dropped
    key_similarity: Tensor | None = None  # (B * Hkv, kv_blocks) float32, None if it was not requested


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
    """Compute the `KeyValueSummary`: read K once, V if needed, and samples of Q if Q and K will be quantized.

    Args:
        means, variance: whether to compute the mean and the variance of every key block, for the scores.
        quantized: whether to compute the mean key, the balancing factors, and the scales of FP8 values.
        similarity: whether to compute the similarity of every key block.
        blocks: whether to compute the means that replace skipped blocks.
    """
    if not (means or blocks or quantized or similarity):
        return KeyValueSummary(BlockStatistics(key, key, key), Scales(key, key, key, key))
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
            statistics, block_means, sums = summarize()
        with in_branch("queries"):
            sizes = query_sizes(query, call, seen)
        scales = reduce_parts(sizes, sums, call, value_scales=value_scales, sums_of_blocks=similarity)
    else:
        statistics, block_means, sums = summarize()
        scales = Scales(key, key, key, key)
    return KeyValueSummary(
        statistics,
        scales,
        means=block_means if blocks else None,
        key_similarity=key_similarity(key, sums, scales.key_mean, call, seen) if similarity else None,
    )
