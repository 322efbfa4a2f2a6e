"""Similarity of the tokens of each key block, for calls with a similarity threshold."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import buffer_like, first_key, launch, padded, seen_argument, strides_of
from sparge.backends.gpu.primitives import BLOCK_K, TokenHead, head_base, load_tokens, self_similarity
from sparge.backends.gpu.stages.key_value_statistics import SUM, KeyValueStatistics
from sparge.call import Call
from sparge.masks.visibility import SeenTokens

NUMBERS = ["kv_heads", "kv_len", "kv_blocks", "first_key"]


@triton.jit(do_not_specialize=NUMBERS)
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
        center        float32 [D padded], the mean key for smoothing, one for every head or for every block
    Writes
        similarity    [B * Hkv, kv_blocks] float32
    """
    block = tl.program_id(0) % kv_blocks
    flat_head = (tl.program_id(0) // kv_blocks).to(tl.int64)
    batch = flat_head // kv_heads
    head = flat_head % kv_heads
    tokens = block * BLOCK_K + tl.arange(0, BLOCK_K)
    channels = tl.arange(0, HEAD_DIM_PADDED)
    key_base = head_base(key_ptr, key_strides, batch, head)
    seen_base = head_base(seen_ptr, seen_strides, batch, head)
    key_head = TokenHead(key_base, key_strides[2], seen_base, seen_strides[2])
    key, present = load_tokens(key_head, tokens, first_key, kv_len, HEAD_DIM, HEAD_DIM_PADDED, HAS_SEEN)
    center = tl.load(center_ptr + flat_head * center_strides[0] + block * center_strides[1] + channels)
    key = tl.where(present[:, None], key - center[None, :], 0.0)  # [64, HEAD_DIM]
    count = tl.maximum(tl.sum(present.to(tl.int32)), 1).to(tl.float32)
    tl.store(similarity_ptr + flat_head * kv_blocks + block, self_similarity(key, count))


def key_similarity(
    key: Tensor, statistics: KeyValueStatistics, key_mean: Tensor, call: Call, seen: SeenTokens | None
) -> Tensor:
    """Return the similarity of every key block, (B * Hkv, kv_blocks) float32.

    Args:
        statistics: statistics that include the sums of every block.
        key_mean: the mean of all keys, returned by `reduce.reduce_parts`.
    """
    shape = call.shape
    width, heads = padded(shape.head_dim), shape.batch * shape.kv_heads
    center, center_strides = key_mean, (width, 0)
    if call.is_causal:  # the mean up to the end of the block, which must not depend on future keys
        sums, counts = statistics.key_part[:, :, SUM.value], statistics.key_count
        center = sums.cumsum(1) / counts.cumsum(1).clamp(min=1)[..., None]
        center_strides = (shape.kv_blocks * width, width)
    similarity = buffer_like(key, True, heads, shape.kv_blocks)
    keys_seen, seen_strides = seen_argument(
        seen.keys if seen else None, (shape.batch, shape.kv_heads, shape.kv_len), key
    )
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
        HAS_SEEN=seen is not None and seen.keys is not None,
    )
    return similarity
