"""The tile of a program: its queries, the key blocks that it visits, and its results (normalized output and LSE)."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q, LN_2
from sparge.backends.triton.arguments import KeptBlocks


class Tile(NamedTuple):
    """Coordinates of the queries of a program."""

    number: Any  # index of the tile in its head
    q_block: Any  # index of its query block in its head
    # flat_head, flat_kv_head: batch * heads + head, for Q and for K and V
    flat_head: Any
    batch: Any
    head: Any
    kv_head: Any
    flat_kv_head: Any
    flat_q_block: Any  # index of its query block, counted over all heads


class FullBlocks(NamedTuple):
    """Key blocks from ``first`` to ``stop`` - 1, which need no element mask: every query of the tile sees every key."""

    first: Any
    stop: Any


class Step(NamedTuple):
    """The key blocks of one step of the main loop."""

    # block, last_block: indices of the first and last block, which are equal if a step is one block
    block: Any
    last_block: Any
    offsets: Any  # [N] int64, position of the first key of each column's block
    key_positions: Any  # [N]; kv_len for the columns of a missing second block
    is_full: Any  # every query sees every key
    is_short: Any  # the second block is missing


@triton.jit
def locate(pid, heads, group, q_blocks, SPEC: tl.constexpr):
    """Return the `Tile` of a program. Without a given order, causal heads start with their last tile, the longest."""
    TILES_PER_BLOCK: tl.constexpr = BLOCK_Q // SPEC.block_m
    tiles = q_blocks * TILES_PER_BLOCK
    number = pid % tiles
    if SPEC.has_last and not SPEC.ordered:
        number = tiles - 1 - number
    q_block = number // TILES_PER_BLOCK
    flat_head = (pid // tiles).to(tl.int64)
    batch = flat_head // heads
    head = flat_head % heads
    kv_head = head // group
    flat_kv_head = batch * (heads // group) + kv_head
    flat_q_block = flat_head * q_blocks + q_block
    return Tile(number, q_block, flat_head, batch, head, kv_head, flat_kv_head, flat_q_block)


@triton.jit
def full_blocks_of(tile, lengths, SPEC: tl.constexpr):
    """Return the `FullBlocks` of a tile. Only blocks on an edge of the window or at the end of K are not full."""
    stop = lengths.kv_len // BLOCK_K
    if SPEC.has_last:
        first_hidden_key = tl.maximum(tile.number * SPEC.block_m + lengths.last_offset + 1, 0)
        stop = tl.minimum(stop, first_hidden_key // BLOCK_K)
    first = 0
    if SPEC.has_first:
        last_query = tile.number * SPEC.block_m + (SPEC.block_m - 1 + BLOCK_K - 1)
        first = tl.maximum(last_query + lengths.first_offset, 0) // BLOCK_K
    return FullBlocks(first, stop)


@triton.jit
def kept_blocks(tile, indices_base, list_ptrs, totals_ptr, lengths, kv_blocks, SPEC: tl.constexpr):
    """Return the `KeptBlocks` of a tile, and add them to the totals (SPEC.counts_blocks)."""
    first = 0
    if SPEC.all_blocks:
        count = kv_blocks
        if SPEC.has_last:
            last_key = tl.minimum((tile.q_block + 1) * BLOCK_Q, lengths.q_len) - 1 + lengths.last_offset
            count = tl.minimum(kv_blocks, tl.maximum(last_key + BLOCK_K, 0) // BLOCK_K)
        if SPEC.has_first:
            first = tl.maximum(tile.number * SPEC.block_m + lengths.first_offset, 0) // BLOCK_K
            count = tl.maximum(count - first, 0)
    else:
        count = tl.load(list_ptrs.kv_num_blocks + tile.flat_q_block)
    # Counted here: counting at the end of the kernel would keep these values in registers through the main loop.
    if SPEC.counts_blocks and tile.number % (BLOCK_Q // SPEC.block_m) == 0:
        tl.atomic_add(totals_ptr, count.to(tl.int64), sem="relaxed")
        visible = tl.load(list_ptrs.visible_num_blocks + tile.flat_q_block)
        tl.atomic_add(totals_ptr + 1, visible.to(tl.int64), sem="relaxed")
    count = tl.where(tile.number * SPEC.block_m < lengths.q_len, count, 0)  # the last query block may end before a tile
    return KeptBlocks(indices_base, first, count)


@triton.jit
def block_at(blocks, index, SPEC: tl.constexpr):
    """Return the key block at an index of the list of kept blocks."""
    return blocks.first + index if SPEC.all_blocks else tl.load(blocks.indices_base + index)


@triton.jit
def load_step(blocks, index, full_blocks, lengths, SPEC: tl.constexpr):
    """Return the `Step` that starts at an index of the list. N is 64 times the blocks of a step."""
    columns = tl.arange(0, BLOCK_K * SPEC.blocks)  # [N]
    within = columns % BLOCK_K
    block = block_at(blocks, index, SPEC)
    last_block = block
    numbers = tl.where(columns < BLOCK_K, block, block)  # [N], broadcasts the scalar
    if SPEC.blocks == 2:
        last_block = block_at(blocks, tl.minimum(index + 1, blocks.count - 1), SPEC)
        numbers = tl.where(columns < BLOCK_K, block, last_block)
    key_positions = numbers * BLOCK_K + within
    is_full = tl.maximum(block, last_block) < full_blocks.stop
    if SPEC.has_first:
        is_full = is_full & (tl.minimum(block, last_block) >= full_blocks.first)
    is_short = index + (SPEC.blocks - 1) >= blocks.count
    if SPEC.blocks == 2:
        is_full = is_full & (is_short == 0)
        key_positions = tl.where((columns >= BLOCK_K) & is_short, lengths.kv_len, key_positions)
    return Step(block, last_block, numbers.to(tl.int64) * BLOCK_K, key_positions, is_full, is_short)


class Results(NamedTuple):
    """Pointers and strides that `write_results` needs."""

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
    """Load the ``lse_shift`` of a tile's queries, [BLOCK_M], in nats."""
    query_positions = tile.number * BLOCK_M + tl.arange(0, BLOCK_M)
    shift_ptrs = results.lse_shift_ptr + tile.flat_head * results.padded_q_len + query_positions
    return tl.load(shift_ptrs, mask=query_positions < results.q_len, other=0.0)


@triton.jit
def write_results(sums, results, tile, SPEC: tl.constexpr):
    """Write output and LSE of a tile from its `RunningSums`: 0 and -inf for a query that sees no key."""
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
    weight = tl.where(queries <= BLOCK_M, 2, 1)  # also counts a second half without queries
    tl.atomic_add(results.ptrs.totals + 2, (skipped * weight).to(tl.int64), sem="relaxed")
