"""The tile scheduler: which output tile comes when, and where it lies.

A tile is 128 queries of one head, with all value channels or a slice of them. A program takes its first turn by its
number, and each further one from a counter in global memory: tiles of any length keep all programs busy. The producer
takes turns and finds the tile that has one; consumers learn of tiles alone.
"""

from __future__ import annotations

from sparge.backends.gpu.gluon import aggregate, gl, jit
from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q

BEYOND_TILES = gl.constexpr(2**31 - 1)
"""The largest int32."""


@aggregate
class TileCoordinates:
    """Where an output tile lies; ``flat_head`` is the query head counted over batches."""

    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    flat_head: gl.tensor
    q_block: gl.tensor
    value_slice: gl.tensor


@jit
def coordinates_of(tile, sizes, SPEC: gl.constexpr):
    """The coordinates of a tile: neighbours share a head's K and V in the cache."""
    value_slice = tile % SPEC.value_slices
    tile = tile // SPEC.value_slices
    q_block = tile % sizes.q_blocks
    flat_head = tile // sizes.q_blocks
    batch = flat_head // sizes.heads
    head = flat_head % sizes.heads
    return TileCoordinates(
        batch=batch,
        head=head,
        kv_head=head // sizes.group,
        flat_head=flat_head,
        q_block=q_block,
        value_slice=value_slice,
    )


@jit
def tile_of_turn(turn, order_ptr, sizes, SPEC: gl.constexpr):
    """The tile whose turn it is: in a given order, long rows first; else head by head, causal ones from the longest."""
    row = turn // SPEC.value_slices
    if SPEC.ordered:
        row = gl.load(order_ptr + row)
    elif SPEC.has_last:
        q_block = row % sizes.q_blocks
        row += sizes.q_blocks - 1 - 2 * q_block
    return row * SPEC.value_slices + turn % SPEC.value_slices


@jit
def end_of_tiles(sizes, SPEC: gl.constexpr):
    """A number beyond every tile's: what the producer calls the tile after the last one."""
    if SPEC.packed:  # numbers of tiles have gaps, where a shorter segment has no queries
        return BEYOND_TILES
    else:
        return sizes.num_tiles


@jit
def next_turn(taken_ptr):
    """Take the next turn from the counter, after those that programs start with."""
    return gl.num_programs(0) + gl.atomic_add(taken_ptr, 1, sem="relaxed")


@jit
def last_offset_of(lengths, SPEC: gl.constexpr):
    """Query i sees no key behind i + this."""
    if SPEC.is_causal:
        return lengths.kv_len - lengths.q_len
    else:
        return lengths.last_offset


@jit
def first_visible_block(q_block, lengths, SPEC: gl.constexpr):
    """The first key block that a tile sees something of."""
    if SPEC.has_first:
        return gl.maximum(q_block * BLOCK_Q + lengths.first_offset, 0) // BLOCK_K
    else:
        return 0


@jit
def count_kept_blocks(kv_num_blocks_ptr, row, q_block, lengths, SPEC: gl.constexpr):
    """How many key blocks a tile visits; ``row`` is its place in the lists."""
    if SPEC.all_blocks:
        count = lengths.kv_blocks
        if SPEC.has_last:
            last_key = gl.minimum((q_block + 1) * BLOCK_Q, lengths.q_len) - 1 + last_offset_of(lengths, SPEC)
            count = gl.minimum(lengths.kv_blocks, gl.maximum(last_key + BLOCK_K, 0) // BLOCK_K)
        if SPEC.has_first:
            count = gl.maximum(count - first_visible_block(q_block, lengths, SPEC), 0)
    else:
        count = gl.load(kv_num_blocks_ptr + row)
    return count


@jit
def end_of_mean_stages(q_block, lengths, SPEC: gl.constexpr):
    """Where the stages of means end that a tile visits: causal ones have those of blocks before their first query."""
    count = lengths.kv_blocks
    if SPEC.has_last:
        last_key = q_block * BLOCK_Q + last_offset_of(lengths, SPEC)
        count = gl.minimum(count, gl.maximum(last_key + BLOCK_K, 0) // BLOCK_K)
    return (count + SPEC.keys - 1) // SPEC.keys


@jit
def first_mean_stage(q_block, end, lengths, SPEC: gl.constexpr):
    """Where they begin, at ``end`` at most: at blocks inside of all the tile's windows."""
    if SPEC.has_first:
        first_key = gl.minimum((q_block + 1) * BLOCK_Q, lengths.q_len) - 1 + lengths.first_offset
        return gl.minimum(gl.maximum(first_key, 0) // (BLOCK_K * SPEC.keys), end)
    else:
        return 0
