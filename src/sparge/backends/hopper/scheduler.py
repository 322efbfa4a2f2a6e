"""The tile scheduler: the order of the output tiles and their coordinates.

A tile is 128 queries of one head, with all value channels or a slice of them. A program's first turn is its program ID,
and each further turn comes from a counter in global memory, so that tiles of different lengths keep all programs busy.
The producer takes turns and maps them to tiles; consumers receive tiles only.
"""

from __future__ import annotations

from sparge.backends.gpu.gluon import aggregate, gl, jit
from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q

BEYOND_TILES = gl.constexpr(2**31 - 1)
"""The largest int32."""


@aggregate
class TileCoordinates:
    """Coordinates of an output tile; ``flat_head`` is the query head counted over batches."""

    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    flat_head: gl.tensor
    q_block: gl.tensor
    value_slice: gl.tensor


@jit
def coordinates_of(tile, sizes, SPEC: gl.constexpr):
    """Return the coordinates of a tile. Consecutive tiles share a head's K and V in the cache."""
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
    """Return the tile of a turn: in the given order, longest first; else head by head, causal tiles longest first."""
    row = turn // SPEC.value_slices
    if SPEC.ordered:
        row = gl.load(order_ptr + row)
    elif SPEC.has_last:
        q_block = row % sizes.q_blocks
        row += sizes.q_blocks - 1 - 2 * q_block
    return row * SPEC.value_slices + turn % SPEC.value_slices


@jit
def end_of_tiles(sizes, SPEC: gl.constexpr):
    """Return the sentinel tile index that the producer stores after the last tile."""
    if SPEC.packed:  # numbers of tiles have gaps, where a shorter segment has no queries
        return BEYOND_TILES
    else:
        return sizes.num_tiles


@jit
def next_turn(turn_counter_ptr):
    """Take the next turn from the counter; programs start with turns 0 .. num_programs - 1."""
    return gl.num_programs(0) + gl.atomic_add(turn_counter_ptr, 1, sem="relaxed")


@jit
def last_offset_of(lengths, SPEC: gl.constexpr):
    """Return the offset such that query i sees no key after i + offset."""
    if SPEC.is_causal:
        return lengths.kv_len - lengths.q_len
    else:
        return lengths.last_offset


@jit
def first_visible_block(q_block, lengths, SPEC: gl.constexpr):
    """Return the first key block that a tile sees part of."""
    if SPEC.has_first:
        return gl.maximum(q_block * BLOCK_Q + lengths.first_offset, 0) // BLOCK_K
    else:
        return 0


@jit
def count_kept_blocks(kv_num_blocks_ptr, row, q_block, lengths, SPEC: gl.constexpr):
    """Return the number of key blocks that a tile visits; ``row`` is its query block's index in the lists."""
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
    """Return the end of a tile's stages of means; causal tiles use means of blocks before their first query."""
    count = lengths.kv_blocks
    if SPEC.has_last:
        last_key = q_block * BLOCK_Q + last_offset_of(lengths, SPEC)
        count = gl.minimum(count, gl.maximum(last_key + BLOCK_K, 0) // BLOCK_K)
    return (count + SPEC.keys - 1) // SPEC.keys


@jit
def first_mean_stage(q_block, end, lengths, SPEC: gl.constexpr):
    """Return the start of a tile's stages of means, at most ``end``: blocks inside the windows of all its queries."""
    if SPEC.has_first:
        first_key = gl.minimum((q_block + 1) * BLOCK_Q, lengths.q_len) - 1 + lengths.first_offset
        return gl.minimum(gl.maximum(first_key, 0) // (BLOCK_K * SPEC.keys), end)
    else:
        return 0
