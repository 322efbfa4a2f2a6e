"""Which queries a program computes, and which key blocks it visits in which order."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q
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


class PlainBlocks(NamedTuple):
    """Key blocks from ``first`` to ``stop`` - 1, of which every query of the tile sees every key."""

    first: Any
    stop: Any


class Step(NamedTuple):
    """The key blocks of one step of the main loop."""

    # block, last_block: numbers of the first and last one, the same where a step is one block
    block: Any
    last_block: Any
    offsets: Any  # [N] int64, of the first key of each column's block
    key_positions: Any  # [N]; kv_len for the columns of a missing second block
    is_plain: Any  # every query sees every key
    is_short: Any  # the second block is missing


@triton.jit
def locate(pid, heads, group, q_blocks, SPEC: tl.constexpr):
    """Return the `Tile` of a program. Without a given order, causal heads begin with their longest tile, the last."""
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
def plain_blocks(tile, lengths, SPEC: tl.constexpr):
    """Return the `PlainBlocks` of a tile: the others are the last ones of its list, and the first ones of a window."""
    stop = lengths.kv_len // BLOCK_K
    if SPEC.has_last:
        last_plain_key = tl.maximum(tile.number * SPEC.block_m + lengths.last_offset + 1, 0)
        stop = tl.minimum(stop, last_plain_key // BLOCK_K)
    first = 0
    if SPEC.has_first:
        last_query = tile.number * SPEC.block_m + (SPEC.block_m - 1 + BLOCK_K - 1)
        first = tl.maximum(last_query + lengths.first_offset, 0) // BLOCK_K
    return PlainBlocks(first, stop)


@triton.jit
def kept_blocks(tile, indices_base, list_ptrs, totals_ptr, lengths, kv_blocks, SPEC: tl.constexpr):
    """Return the `KeptBlocks` of a tile, and count them (SPEC.counts_blocks)."""
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
    # Counted here, because at the end of the kernel it would cost registers in the main loop.
    if SPEC.counts_blocks and tile.number % (BLOCK_Q // SPEC.block_m) == 0:
        tl.atomic_add(totals_ptr, count.to(tl.int64), sem="relaxed")
        visible = tl.load(list_ptrs.visible_num_blocks + tile.flat_q_block)
        tl.atomic_add(totals_ptr + 1, visible.to(tl.int64), sem="relaxed")
    count = tl.where(tile.number * SPEC.block_m < lengths.q_len, count, 0)  # a tile may have no queries
    return KeptBlocks(indices_base, first, count)


@triton.jit
def kept_block(blocks, place, SPEC: tl.constexpr):
    """Return the number of the kept block at a place of the list."""
    return blocks.first + place if SPEC.all_blocks else tl.load(blocks.indices_base + place)


@triton.jit
def load_step(blocks, place, plain, lengths, SPEC: tl.constexpr):
    """Return the `Step` that begins at a place of the list. N is 64 times the blocks of a step."""
    columns = tl.arange(0, BLOCK_K * SPEC.blocks)  # [N]
    within = columns % BLOCK_K
    block = kept_block(blocks, place, SPEC)
    last_block = block
    numbers = tl.where(columns < BLOCK_K, block, block)  # [N]
    if SPEC.blocks == 2:
        last_block = kept_block(blocks, tl.minimum(place + 1, blocks.count - 1), SPEC)
        numbers = tl.where(columns < BLOCK_K, block, last_block)
    key_positions = numbers * BLOCK_K + within
    is_plain = tl.maximum(block, last_block) < plain.stop
    if SPEC.has_first:
        is_plain = is_plain & (tl.minimum(block, last_block) >= plain.first)
    is_short = place + (SPEC.blocks - 1) >= blocks.count
    if SPEC.blocks == 2:
        is_plain = is_plain & (is_short == 0)
        key_positions = tl.where((columns >= BLOCK_K) & is_short, lengths.kv_len, key_positions)
    return Step(block, last_block, numbers.to(tl.int64) * BLOCK_K, key_positions, is_plain, is_short)
