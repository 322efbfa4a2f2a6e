"""Epilogue of the attention kernel: normalize the output, and write it with the LSE."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparge.backends.gpu.primitives import BLOCK_Q, LN_2


class Results(NamedTuple):
    """Addresses of the results."""

    ptrs: Any  # `ResultPointers`
    # value_scale_ptr, lse_shift_ptr: see `OperandPointers`
    value_scale_ptr: Any
    lse_shift_ptr: Any
    heads: Any  # number of heads of the output
    padded_q_len: Any  # stride between the ``lse_shift`` of consecutive heads
    q_len: Any  # number of queries of the sequence or segment
    # q_start, total_q: first query of the segment, and queries of the pack (SPEC.packed)
    q_start: Any
    total_q: Any


@triton.jit
def load_lse_shift(results, tile, BLOCK_M: tl.constexpr):
    """Return the part of the scores of a tile's queries that smoothing of K removed, [BLOCK_M], in nats."""
    query_positions = tile.number * BLOCK_M + tl.arange(0, BLOCK_M)
    shift_ptrs = results.lse_shift_ptr + tile.flat_head * results.padded_q_len + query_positions
    return tl.load(shift_ptrs, mask=query_positions < results.q_len, other=0.0)


@triton.jit
def write_results(sums, results, tile, SPEC: tl.constexpr):
    """Write output and LSE of a tile from its `RunningSums`. A query that sees nothing gets 0 and -inf."""
    query_positions = tile.number * SPEC.block_m + tl.arange(0, SPEC.block_m)
    channels = tl.arange(0, SPEC.value_dim_padded).to(tl.int64)

    # Normalize
    is_empty = sums.row_sum == 0.0
    output = sums.accumulator * (1.0 / tl.where(is_empty, 1.0, sums.row_sum))[:, None]  # [BLOCK_M, VALUE_DIM]
    if SPEC.has_fp8_values:
        value_scale_ptrs = results.value_scale_ptr + tile.flat_kv_head * SPEC.value_dim_padded + channels
        output = output * tl.load(value_scale_ptrs)[None, :]
    lse = (sums.row_ref + tl.log2(sums.row_sum * (2.0**-SPEC.log2_one))) * LN_2  # [BLOCK_M]
    inside = query_positions < results.q_len
    if SPEC.is_quantized:
        lse += load_lse_shift(results, tile, SPEC.block_m)
    lse = tl.where(is_empty, float("-inf"), lse)

    # Store
    flat_queries = tile.flat_head * results.q_len + query_positions
    if SPEC.packed:
        flat_queries = tile.head * results.total_q + results.q_start + query_positions
    tl.store(results.ptrs.lse + flat_queries, lse, mask=inside)
    if SPEC.packed:
        flat_queries = (results.q_start + query_positions) * results.heads + tile.head
    elif SPEC.tokens_first:
        flat_queries = (tile.batch * results.q_len + query_positions) * results.heads + tile.head
    output_ptrs = results.ptrs.output + flat_queries[:, None] * SPEC.value_dim + channels[None, :]
    output = tl.where(is_empty[:, None], 0.0, output).to(results.ptrs.output.dtype.element_ty)
    tl.store(output_ptrs, output, mask=inside[:, None] & (channels < SPEC.value_dim)[None, :])


@triton.jit
def count_skipped(results, tile, skipped, BLOCK_M: tl.constexpr):
    """Add the skipped P V products of a tile to the totals, in halves of blocks."""
    queries = results.q_len - tile.q_block * BLOCK_Q
    weight = tl.where(queries <= BLOCK_M, 2, 1)  # counts for a second half without queries as well
    tl.atomic_add(results.ptrs.totals + 2, (skipped * weight).to(tl.int64), sem="relaxed")
