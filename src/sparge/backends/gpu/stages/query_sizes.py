"""The size of each channel of Q, from 1/16 of the queries: an input of the factors that balance Q and K."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import (
    buffer_like,
    first_query,
    launch,
    padded,
    seen_argument,
    segments_argument,
    strides_of,
)
from sparge.backends.gpu.primitives import (
    BLOCK_Q,
    SHIFT,
    TokenHead,
    head_base,
    is_finite,
    load_tokens,
    segment_number,
    segment_queries,
)
from sparge.call import Call
from sparge.masks.visibility import SeenTokens
from sparge.numerics import quantization as quant

NUMBERS = ["heads", "q_len", "q_blocks", "first_query"]
LOG, VOTES = tl.constexpr(0), tl.constexpr(1)
"""Entries of a query block's ``query_part``, [2, D]: log2 of a channel's size times votes; votes."""
SAMPLES = tl.constexpr(quant.BALANCE_QUERIES)


@triton.jit(do_not_specialize=NUMBERS)
def size_kernel(
    query_ptr,
    seen_ptr,
    query_part_ptr,
    segments_ptr,
    query_strides,
    seen_strides,
    heads,
    q_len,
    q_blocks,
    first_query,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Compute the size of each channel of Q in a block, the largest |q| of SAMPLES queries: see `quantization.balance`.

        size = largest |q| of the samples that are finite and not 0;  votes = number of these samples
        query_part = votes log2 size, votes;  both 0 where size is 0

    Grid: query blocks of every head, in one dimension. Queries before ``first_query`` see nothing. A short last block
    also takes samples from queries before it.

    Reads query [B, H, Sq, D], seen [B, H, Sq] bool (HAS_SEEN) and `Segments.table` (PACKED); writes query_part
    [B * H, q_blocks, 2, D padded] float32.
    """
    flat_q_block = tl.program_id(0).to(tl.int64)
    flat_head = flat_q_block // q_blocks
    batch = flat_head // heads
    head = flat_head % heads
    channels = tl.arange(0, HEAD_DIM_PADDED)
    block = tl.program_id(0) % q_blocks
    query_base = head_base(query_ptr, query_strides, batch, head)
    if PACKED:
        q_start, q_len = segment_queries(segments_ptr, batch)
        query_base += q_start * query_strides[2]
        first_query = tl.maximum(first_query - segment_number(segments_ptr, batch, SHIFT), 0)
        if block * BLOCK_Q >= q_len:
            return
    start = tl.maximum(tl.minimum(block * BLOCK_Q, q_len - BLOCK_Q), 0)
    tokens = start + (2 * tl.arange(0, SAMPLES) + 1) * tl.minimum(q_len, BLOCK_Q) // (2 * SAMPLES)
    seen_base = head_base(seen_ptr, seen_strides, batch, head)
    query_head = TokenHead(query_base, query_strides[2], seen_base, seen_strides[2])
    values, _ = load_tokens(query_head, tokens, first_query, q_len, HEAD_DIM, HEAD_DIM_PADDED, HAS_SEEN)
    usable = (tl.min(is_finite(values).to(tl.int32), 1) != 0) & (tl.max(tl.abs(values), 1) > 0.0)
    size = tl.max(tl.where(usable[:, None], tl.abs(values), 0.0), 0)  # [HEAD_DIM]
    votes = tl.where(size > 0.0, tl.sum(usable.to(tl.int32)).to(tl.float32), 0.0)
    part = query_part_ptr + flat_q_block * 2 * HEAD_DIM_PADDED + channels
    tl.store(part + LOG * HEAD_DIM_PADDED, votes * tl.log2(tl.where(size > 0.0, size, 1.0)))
    tl.store(part + VOTES * HEAD_DIM_PADDED, votes)


def query_sizes(query: Tensor, call: Call, seen: SeenTokens | None) -> Tensor:
    """Return ``query_part`` of every query block, (B * H, q_blocks, 2, D padded) float32."""
    shape = call.shape
    width, programs = padded(shape.head_dim), shape.batch * shape.heads * shape.q_blocks
    query_part = buffer_like(query, True, shape.batch * shape.heads, shape.q_blocks, 2, width)
    queries_seen, seen_strides = seen_argument(
        seen.queries if seen else None, (shape.batch, shape.heads, shape.q_len), query
    )
    launch(
        size_kernel,
        programs,
        query_ptr=query,
        seen_ptr=queries_seen,
        query_part_ptr=query_part,
        segments_ptr=segments_argument(call, query),
        query_strides=strides_of(query),
        seen_strides=seen_strides,
        heads=shape.heads,
        q_len=shape.q_len,
        q_blocks=shape.q_blocks,
        first_query=first_query(call),
        HEAD_DIM=shape.head_dim,
        HEAD_DIM_PADDED=width,
        HAS_SEEN=seen is not None and seen.queries is not None,
        PACKED=call.segments is not None,
        num_warps=1,
    )
    return query_part
