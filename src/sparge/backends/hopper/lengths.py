"""Lengths of the sequences of a tile: the same for all tiles, or those of a tile's own segment in a packed call.

A packed call has the strides of a padded batch whose elements are the segments (`Sizes`), whereas bounds use the
lengths of the segment. The producer reads these from the table of segments and stores them with the tile index, and
consumers load them from there.
"""

from __future__ import annotations

from sparge.backends.gpu.gluon import aggregate, gl, jit
from sparge.backends.gpu.primitives import BLOCK_K, KV_LEN, Q_LEN, Q_START, SEGMENT_COLUMNS, SHIFT

TILE, NUM_STAGES = gl.constexpr(0), gl.constexpr(1)
"""Indices into `Metadata.tile`: the tile index, and the tile's number of stages."""
OWN_Q_START, OWN_Q_LEN, OWN_KV_LEN, OWN_FIRST_OFFSET, OWN_LAST_OFFSET = (gl.constexpr(place) for place in range(2, 7))
"""Indices of the `Lengths`, if segments are packed."""


@aggregate
class Lengths:
    """Lengths and offsets of one batch element, see `Sizes`; ``q_start`` is the start of its queries in the pack."""

    q_start: gl.tensor | gl.constexpr
    q_len: gl.tensor
    kv_len: gl.tensor
    kv_blocks: gl.tensor
    first_offset: gl.tensor
    last_offset: gl.tensor


@aggregate
class ConsumerTile:
    """A consumer's part of a tile: its query stage, the first of its 64 queries, and the lengths of its sequence."""

    query_stage: gl.tensor | gl.constexpr
    first_query: gl.tensor
    lengths: Lengths


@jit
def _blocks_of(kv_len):
    """Return the number of key blocks of ``kv_len`` keys."""
    return (kv_len + BLOCK_K - 1) // BLOCK_K


@jit
def lengths_of(batch, segments_ptr, sizes, SPEC: gl.constexpr):
    """Return the lengths of a batch element, for the producer."""
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
    """Return the lengths of every batch element of a call that is not packed."""
    return Lengths(
        q_start=0,
        q_len=sizes.q_len,
        kv_len=sizes.kv_len,
        kv_blocks=sizes.kv_blocks,
        first_offset=sizes.first_offset,
        last_offset=sizes.last_offset,
    )


@jit
def store_tile_value(metadata, query_stage, place, number, zero, SPEC: gl.constexpr):
    """Store a property of a query stage's tile for the consumers; every thread stores the same value."""
    metadata.tile.index(query_stage * SPEC.tile_numbers + place).store(zero + number)


@jit
def load_number(smem, SPEC: gl.constexpr):
    """Load a number from shared memory [1], the same for all threads."""
    return gl.max(smem.load(SPEC.row_layout), 0)


@jit
def load_tile_value(metadata, query_stage, place, SPEC: gl.constexpr):
    """Load a property stored by `store_tile_value`."""
    return load_number(metadata.tile.index(query_stage * SPEC.tile_numbers + place), SPEC)


@jit
def store_lengths(metadata, query_stage, lengths, zero, SPEC: gl.constexpr):
    """Store the lengths of a tile's batch element for the consumers, if segments are packed."""
    if SPEC.packed:
        store_tile_value(metadata, query_stage, OWN_Q_START, lengths.q_start, zero, SPEC)
        store_tile_value(metadata, query_stage, OWN_Q_LEN, lengths.q_len, zero, SPEC)
        store_tile_value(metadata, query_stage, OWN_KV_LEN, lengths.kv_len, zero, SPEC)
        store_tile_value(metadata, query_stage, OWN_FIRST_OFFSET, lengths.first_offset, zero, SPEC)
        store_tile_value(metadata, query_stage, OWN_LAST_OFFSET, lengths.last_offset, zero, SPEC)


@jit
def load_lengths(metadata, query_stage, sizes, SPEC: gl.constexpr):
    """Load the lengths of a tile's batch element, for consumers; valid while they hold the query stage."""
    if SPEC.packed:
        kv_len = load_tile_value(metadata, query_stage, OWN_KV_LEN, SPEC)
        return Lengths(
            q_start=load_tile_value(metadata, query_stage, OWN_Q_START, SPEC),
            q_len=load_tile_value(metadata, query_stage, OWN_Q_LEN, SPEC),
            kv_len=kv_len,
            kv_blocks=_blocks_of(kv_len),
            first_offset=load_tile_value(metadata, query_stage, OWN_FIRST_OFFSET, SPEC),
            last_offset=load_tile_value(metadata, query_stage, OWN_LAST_OFFSET, SPEC),
        )
    else:
        return _common_lengths(sizes)
