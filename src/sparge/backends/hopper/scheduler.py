"""The tile scheduler: the order of the output tiles, their coordinates, and the lengths of their sequences.

A tile is 128 queries of one head, with all value channels or a slice of them. Tiles are numbered head by head, and
computed in the order of turns. A program's first turn is its program ID; further turns come from a counter in global
memory, so that tiles of different lengths keep all programs busy. The producer maps turns to tiles; consumers receive
tile indices.

The tensors of a packed call are laid out as a padded batch whose elements are the segments (`Sizes`), but bounds use
the lengths of a segment. The producer reads these lengths from the table of segments. It passes them to the consumers
with the tile index and the coordinates, whose divisions would delay the first products of a tile.
"""

from __future__ import annotations

from sparge.backends.gpu.gluon import aggregate, gl, jit
from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q, KV_LEN, Q_LEN, Q_START, SEGMENT_COLUMNS, SHIFT

TILE, NUM_STAGES = gl.constexpr(0), gl.constexpr(1)
"""Indices into `Metadata.tile`: the tile index, and the tile's number of stages."""
TILE_BATCH, TILE_HEAD, TILE_KV_HEAD, TILE_Q_BLOCK = (gl.constexpr(place) for place in range(2, 6))
"""Indices into `Metadata.tile` of the tile's `TileCoordinates`."""
TILE_Q_START, TILE_Q_LEN, TILE_KV_LEN, TILE_FIRST_OFFSET, TILE_LAST_OFFSET = (
    gl.constexpr(place) for place in range(6, 11)
)
"""Indices into `Metadata.tile` of the tile's `Lengths`, if segments are packed."""
BEYOND_TILES = gl.constexpr(2**31 - 1)
"""Sentinel tile index of a packed call: the largest int32."""


@aggregate
class TileCoordinates:
    """Coordinates of an output tile; ``flat_head`` is batch * heads + head."""

    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    flat_head: gl.tensor
    q_block: gl.tensor
    value_slice: gl.tensor | gl.constexpr


@jit
def coordinates_of(tile, sizes, SPEC: gl.constexpr):
    """Return the coordinates of a tile. Consecutive tiles share a head, and its K and V in the L2 cache.

    Called by the producer; consumers call `load_coordinates`.
    """
    value_slice = tile % SPEC.value_slices
    tile = tile // SPEC.value_slices
    q_block = tile % sizes.q_blocks
    flat_head = tile // sizes.q_blocks
    batch = flat_head // sizes.heads
    head = flat_head % sizes.heads
    return TileCoordinates(batch, head, head // sizes.group, flat_head, q_block, value_slice)


@jit
def tile_of_turn(turn, order_ptr, sizes, SPEC: gl.constexpr):
    """Return the tile of a turn: in the given order, or else head by head, with the longest causal tiles first."""
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
    if SPEC.packed:  # tile indices of shorter segments have gaps, so an index may exceed the number of tiles
        return BEYOND_TILES
    else:
        return sizes.num_tiles


@jit
def take_turn(turn_counter_ptr, number):
    """Take the next turn from the counter, and return it for `turn_of`, [32].

    Unlike the result of a scalar atomic, this one is not waited for until it is used. ``number`` is any number of at
    least 0. As far as ptxas knows, it makes addresses differ between lanes; with equal addresses, ptxas would wait for
    the result to broadcast it.
    """
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    pointers = turn_counter_ptr + lanes * (number >> 31)  # number >> 31 is 0
    return gl.atomic_add(pointers, gl.full_like(lanes, 1), mask=lanes == 0, sem="relaxed")


@jit
def turn_of(taken):
    """Return the turn that `take_turn` took. Turns 0 to num_programs - 1 are the first turns of the programs."""
    lanes = gl.arange(0, 32, taken.type.layout)
    return gl.num_programs(0) + gl.sum(gl.where(lanes == 0, taken, 0), 0)


@jit
def last_offset_of(lengths, SPEC: gl.constexpr):
    """Return the offset of the last visible key: query i sees no key after i + offset."""
    if SPEC.is_causal:
        return lengths.kv_len - lengths.q_len
    else:
        return lengths.last_offset


@jit
def first_visible_block(q_block, lengths, SPEC: gl.constexpr):
    """Return the first key block in which some query of a tile sees a key."""
    if SPEC.has_first:
        return gl.maximum(q_block * BLOCK_Q + lengths.first_offset, 0) // BLOCK_K
    else:
        return 0


@jit
def count_kept_blocks(kv_num_blocks_ptr, row, q_block, lengths, SPEC: gl.constexpr):
    """Return the number of key blocks that a tile visits; ``row`` is the index of its query block in the lists."""
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
    """Return the end of a tile's stages of means. Causal tiles only use means of blocks before their first query."""
    count = lengths.kv_blocks
    if SPEC.has_last:
        last_key = q_block * BLOCK_Q + last_offset_of(lengths, SPEC)
        count = gl.minimum(count, gl.maximum(last_key + BLOCK_K, 0) // BLOCK_K)
    return (count + SPEC.keys - 1) // SPEC.keys


@jit
def first_mean_stage(q_block, end, lengths, SPEC: gl.constexpr):
    """Return the start of a tile's stages of means, at most ``end``. Means are inside the windows of all queries."""
    if SPEC.has_first:
        first_key = gl.minimum((q_block + 1) * BLOCK_Q, lengths.q_len) - 1 + lengths.first_offset
        return gl.minimum(gl.maximum(first_key, 0) // (BLOCK_K * SPEC.keys), end)
    else:
        return 0


@aggregate
class Lengths:
    """Lengths and offsets of one batch element, see `Sizes`; ``q_start`` is its first query in the pack."""

    q_start: gl.tensor | gl.constexpr
    q_len: gl.tensor
    kv_len: gl.tensor
    kv_blocks: gl.tensor
    first_offset: gl.tensor
    last_offset: gl.tensor


@aggregate
class ConsumerTile:
    """A consumer's half of a tile: the query stage, the first of its 64 queries, and the lengths of the sequence."""

    query_stage: gl.tensor | gl.constexpr
    first_query: gl.tensor
    lengths: Lengths


@jit
def _blocks_of(kv_len):
    """Return the number of key blocks of a sequence."""
    return (kv_len + BLOCK_K - 1) // BLOCK_K


@jit
def lengths_of(batch, segments_ptr, sizes, SPEC: gl.constexpr):
    """Return the `Lengths` of a batch element. Called by the producer."""
    if SPEC.packed:
        segment_ptr = segments_ptr + batch * SEGMENT_COLUMNS
        kv_len = gl.load(segment_ptr + KV_LEN)
        shift = gl.load(segment_ptr + SHIFT)
        return Lengths(
            q_start=gl.load(segment_ptr + Q_START),
            q_len=gl.load(segment_ptr + Q_LEN),
            kv_len=kv_len,
            kv_blocks=_blocks_of(kv_len),
            first_offset=sizes.first_offset + shift,
            last_offset=sizes.last_offset + shift,
        )
    else:
        return _common_lengths(sizes)


@jit
def _common_lengths(sizes):
    """Return the `Lengths` shared by all batch elements of a call that is not packed."""
    return Lengths(0, sizes.q_len, sizes.kv_len, sizes.kv_blocks, sizes.first_offset, sizes.last_offset)


@jit
def store_tile_value(metadata, query_stage, place, number, zero, SPEC: gl.constexpr):
    """Store a property of a query stage's tile for the consumers. Every thread stores the same value."""
    metadata.tile.index(query_stage * SPEC.tile_numbers + place).store(zero + number)


@jit
def load_number(smem, SPEC: gl.constexpr):
    """Load one number from shared memory [1], uniform over threads."""
    return gl.max(smem.load(SPEC.row_layout), 0)


@jit
def load_tile_value(metadata, query_stage, place, SPEC: gl.constexpr):
    """Load a property stored by `store_tile_value`."""
    return load_number(metadata.tile.index(query_stage * SPEC.tile_numbers + place), SPEC)


@jit
def store_coordinates(metadata, query_stage, coordinates, zero, SPEC: gl.constexpr):
    """Store the coordinates of a tile for the consumers."""
    store_tile_value(metadata, query_stage, TILE_BATCH, coordinates.batch, zero, SPEC)
    store_tile_value(metadata, query_stage, TILE_HEAD, coordinates.head, zero, SPEC)
    store_tile_value(metadata, query_stage, TILE_KV_HEAD, coordinates.kv_head, zero, SPEC)
    store_tile_value(metadata, query_stage, TILE_Q_BLOCK, coordinates.q_block, zero, SPEC)


@jit
def load_coordinates(metadata, query_stage, sizes, SPEC: gl.constexpr):
    """Load the coordinates of a tile. Called by consumers, before they release the query stage."""
    batch = load_tile_value(metadata, query_stage, TILE_BATCH, SPEC)
    head = load_tile_value(metadata, query_stage, TILE_HEAD, SPEC)
    value_slice = 0
    if SPEC.value_slices > 1:
        value_slice = load_tile_value(metadata, query_stage, TILE, SPEC) % SPEC.value_slices
    return TileCoordinates(
        batch=batch,
        head=head,
        kv_head=load_tile_value(metadata, query_stage, TILE_KV_HEAD, SPEC),
        flat_head=batch * sizes.heads + head,
        q_block=load_tile_value(metadata, query_stage, TILE_Q_BLOCK, SPEC),
        value_slice=value_slice,
    )


@jit
def store_lengths(metadata, query_stage, lengths, zero, SPEC: gl.constexpr):
    """Store the `Lengths` of a tile for the consumers, if segments are packed."""
    if SPEC.packed:
        store_tile_value(metadata, query_stage, TILE_Q_START, lengths.q_start, zero, SPEC)
        store_tile_value(metadata, query_stage, TILE_Q_LEN, lengths.q_len, zero, SPEC)
        store_tile_value(metadata, query_stage, TILE_KV_LEN, lengths.kv_len, zero, SPEC)
        store_tile_value(metadata, query_stage, TILE_FIRST_OFFSET, lengths.first_offset, zero, SPEC)
        store_tile_value(metadata, query_stage, TILE_LAST_OFFSET, lengths.last_offset, zero, SPEC)


@jit
def load_lengths(metadata, query_stage, sizes, SPEC: gl.constexpr):
    """Load the `Lengths` of a tile. Called by consumers, before they release the query stage."""
    if SPEC.packed:
        kv_len = load_tile_value(metadata, query_stage, TILE_KV_LEN, SPEC)
        return Lengths(
            q_start=load_tile_value(metadata, query_stage, TILE_Q_START, SPEC),
            q_len=load_tile_value(metadata, query_stage, TILE_Q_LEN, SPEC),
            kv_len=kv_len,
            kv_blocks=_blocks_of(kv_len),
            first_offset=load_tile_value(metadata, query_stage, TILE_FIRST_OFFSET, SPEC),
            last_offset=load_tile_value(metadata, query_stage, TILE_LAST_OFFSET, SPEC),
        )
    else:
        return _common_lengths(sizes)
