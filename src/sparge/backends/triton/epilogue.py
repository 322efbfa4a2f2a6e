"""Where a tile of queries lies, and what the attention kernel writes of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparge.backends.gpu.primitives import BLOCK_Q, LN_2


class Tile(NamedTuple):
    """Coordinates of the queries of a program.

    Attributes:
        number: of the tile in its head, q_block: of its query block.
        flat_head: batch * heads + head; flat_kv_head: the same of keys and values.
        row: of its query block, counted over all heads.
    """

    number: Any
    q_block: Any
    flat_head: Any
    batch: Any
    head: Any
    kv_head: Any
    flat_kv_head: Any
    row: Any


class Results(NamedTuple):
    """Where results are written, and what that takes.

    Attributes:
        output_ptr, lse_ptr, totals_ptr, value_scale_ptr, lse_shift_ptr, heads: of `attention_kernel`.
        padded_q_len: what the heads of ``lse_shift_ptr`` are apart; q_len: of the call, or the segment.
        q_start, total_q: of the segment and the pack.
    """

    output_ptr: Any
    lse_ptr: Any
    totals_ptr: Any
    value_scale_ptr: Any
    lse_shift_ptr: Any
    heads: Any
    padded_q_len: Any
    q_len: Any
    q_start: Any
    total_q: Any


@triton.jit
def locate(pid, heads, group, q_blocks, TILES_PER_BLOCK: tl.constexpr, IS_REVERSED: tl.constexpr):
    """The `Tile` of a program; IS_REVERSED: the last of a head first."""
    tiles = q_blocks * TILES_PER_BLOCK
    number = pid % tiles
    if IS_REVERSED:
        number = tiles - 1 - number
    q_block = number // TILES_PER_BLOCK
    flat_head = (pid // tiles).to(tl.int64)
    batch = flat_head // heads
    head = flat_head % heads
    kv_head = head // group
    return Tile(
        number,
        q_block,
        flat_head,
        batch,
        head,
        kv_head,
        batch * (heads // group) + kv_head,
        flat_head * q_blocks + q_block,
    )


@triton.jit
def lse_shift(results, tile, BLOCK_M: tl.constexpr):
    """What smoothing takes from the scores of a tile's queries, [M], in nats."""
    query_positions = tile.number * BLOCK_M + tl.arange(0, BLOCK_M)
    pointers = results.lse_shift_ptr + tile.flat_head * results.padded_q_len + query_positions
    return tl.load(pointers, mask=query_positions < results.q_len, other=0.0)


@triton.jit
def write_rows(
    sums,
    results,
    tile,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    HAS_FP8_VALUES: tl.constexpr,
    LOG2_UNIT: tl.constexpr,
    PACKED: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write output and LSE of the `Sums` of a tile."""
    accumulator, row_sum, _, origin = sums
    query_positions = tile.number * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_dv = tl.arange(0, VALUE_DIM_PADDED).to(tl.int64)
    empty = row_sum == 0.0
    output = accumulator * (1.0 / tl.where(empty, 1.0, row_sum))[:, None]
    if HAS_FP8_VALUES:
        output = output * tl.load(results.value_scale_ptr + tile.flat_kv_head * VALUE_DIM_PADDED + offs_dv)[None, :]
    lse = (origin + tl.log2(row_sum * (2.0**-LOG2_UNIT))) * LN_2
    inside = query_positions < results.q_len
    if IS_QUANTIZED:
        lse += lse_shift(results, tile, BLOCK_M)
    lse = tl.where(empty, float("-inf"), lse)
    flat_queries = tile.flat_head * results.q_len + query_positions
    if PACKED:
        flat_queries = tile.head * results.total_q + results.q_start + query_positions
    tl.store(results.lse_ptr + flat_queries, lse, mask=inside)
    if PACKED:
        flat_queries = (results.q_start + query_positions) * results.heads + tile.head
    elif TOKENS_FIRST:
        flat_queries = (tile.batch * results.q_len + query_positions) * results.heads + tile.head
    output_ptrs = results.output_ptr + flat_queries[:, None] * VALUE_DIM + offs_dv[None, :]
    tl.store(
        output_ptrs,
        tl.where(empty[:, None], 0.0, output).to(results.output_ptr.dtype.element_ty),
        mask=inside[:, None] & (offs_dv < VALUE_DIM)[None, :],
    )


@triton.jit
def count_skipped(results, tile, skipped, BLOCK_M: tl.constexpr):
    """Add a tile's skipped products to the totals, in halves of blocks."""
    queries = results.q_len - tile.q_block * BLOCK_Q
    weight = tl.where(queries <= BLOCK_M, 2, 1)  # a half without queries goes with the other
    tl.atomic_add(results.totals_ptr + 2, (skipped * weight).to(tl.int64), sem="relaxed")
