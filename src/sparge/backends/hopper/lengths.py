"""How long the sequences of a tile are: all alike, or its own segment's where segments of unequal lengths are packed.

To every stride a packed call is a padded batch, whose elements are the segments (`Sizes`). What is bounded by a length
goes by the segment's own. The producer reads them from the table of segments and leaves them beside the tile's number;
consumers read them there.
"""

from __future__ import annotations

from sparge.backends.gpu.gluon import aggregate, gl, jit
from sparge.backends.gpu.primitives import BLOCK_K, KV_LEN, Q_LEN, Q_START, SEGMENT_COLUMNS, SHIFT

TILE, NUM_STAGES = gl.constexpr(0), gl.constexpr(1)
"""Places of `Metadata.tile`: the number of the tile, how many stages it has."""
OWN_Q_START, OWN_Q_LEN, OWN_KV_LEN, OWN_FIRST_OFFSET, OWN_LAST_OFFSET = (gl.constexpr(place) for place in range(2, 7))
"""And, where segments are packed, the `Lengths`."""


@aggregate
class Lengths:
    """What `Sizes` says of a padded batch, of one element; ``q_start`` is where its queries begin in the pack."""

    q_start: gl.tensor | gl.constexpr
    q_len: gl.tensor
    kv_len: gl.tensor
    kv_blocks: gl.tensor
    first_offset: gl.tensor
    last_offset: gl.tensor


@jit
def _blocks_of(kv_len):
    """How many blocks so many keys are."""
    return (kv_len + BLOCK_K - 1) // BLOCK_K


@jit
def lengths_of(batch, segments_ptr, sizes, SPEC: gl.constexpr):
    """The lengths of a batch element, for the producer."""
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
    """The lengths of every batch element, where they are alike."""
    return Lengths(
        q_start=0,
        q_len=sizes.q_len,
        kv_len=sizes.kv_len,
        kv_blocks=sizes.kv_blocks,
        first_offset=sizes.first_offset,
        last_offset=sizes.last_offset,
    )


@jit
def store_of_tile(metadata, query_stage, place, number, zero, SPEC: gl.constexpr):
    """Tell consumers a number about the tile of a query stage; every thread writes the same."""
    metadata.tile.index(query_stage * SPEC.tile_numbers + place).store(zero + number)


@jit
def load_number(smem, SPEC: gl.constexpr):
    """Load a number from shared memory [1], the same for all threads."""
    return gl.max(smem.load(SPEC.row_layout), 0)


@jit
def load_of_tile(metadata, query_stage, place, SPEC: gl.constexpr):
    """What `store_of_tile` stored."""
    return load_number(metadata.tile.index(query_stage * SPEC.tile_numbers + place), SPEC)


@jit
def store_lengths(metadata, query_stage, lengths, zero, SPEC: gl.constexpr):
    """Tell consumers the lengths of a tile's batch element, where they cannot know them."""
    if SPEC.packed:
        store_of_tile(metadata, query_stage, OWN_Q_START, lengths.q_start, zero, SPEC)
        store_of_tile(metadata, query_stage, OWN_Q_LEN, lengths.q_len, zero, SPEC)
        store_of_tile(metadata, query_stage, OWN_KV_LEN, lengths.kv_len, zero, SPEC)
        store_of_tile(metadata, query_stage, OWN_FIRST_OFFSET, lengths.first_offset, zero, SPEC)
        store_of_tile(metadata, query_stage, OWN_LAST_OFFSET, lengths.last_offset, zero, SPEC)


@jit
def load_lengths(metadata, query_stage, sizes, SPEC: gl.constexpr):
    """The lengths of a tile's batch element, for consumers, while they hold its query stage."""
    if SPEC.packed:
        kv_len = load_of_tile(metadata, query_stage, OWN_KV_LEN, SPEC)
        return Lengths(
            q_start=load_of_tile(metadata, query_stage, OWN_Q_START, SPEC),
            q_len=load_of_tile(metadata, query_stage, OWN_Q_LEN, SPEC),
            kv_len=kv_len,
            kv_blocks=_blocks_of(kv_len),
            first_offset=load_of_tile(metadata, query_stage, OWN_FIRST_OFFSET, SPEC),
            last_offset=load_of_tile(metadata, query_stage, OWN_LAST_OFFSET, SPEC),
        )
    else:
        return _common_lengths(sizes)
