"""The values that the kernel hands its roles, with named fields."""

from __future__ import annotations

from sparge.backends.gpu.gluon import aggregate, gl, shared_memory_descriptor, tensor_descriptor

PLAIN, MASKED, NON_FINITE, PEAK = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(4)
"""Flags of a stage, which may be added: every query sees every key; some do not; a key is not finite; one is a peak."""
MEANS = gl.constexpr(8)
"""Flag of a stage whose keys are means of skipped blocks."""
COARSE = gl.constexpr(32)
"""Flag of a stage whose scores INT8 would round too far: they are computed from Q and K (`coarse`)."""
NOTHING = gl.constexpr(16)
"""Flag of the stage of a tile that keeps no block, where skipped products are counted."""


@aggregate
class Descriptors:
    """Global tensors as TMA sees them."""

    query: tensor_descriptor
    key: tensor_descriptor
    value: tensor_descriptor


@aggregate
class Buffers:
    """Shared memory that TMA fills: query stages of Q, stages of K and V."""

    query: shared_memory_descriptor
    key: shared_memory_descriptor
    value: shared_memory_descriptor


@aggregate
class Metadata:
    """Shared memory that the producer's threads fill: what a consumer must know about a stage or a tile.

    Fields:
        key_scale: of each stage, the scales of its key blocks, 4 each; by block where consumers read them.
        block: of each stage, the numbers of its key blocks; one beyond the last where there is none.
        flags: of each stage, what is unusual about it (`MASKED` and others).
        tile: of each query stage, the number of its tile, how many stages the tile has, its `lengths` where consumers
            cannot know them.
        bias: of each stage of means, what their scores get besides; by block where consumers read them.
    """

    key_scale: shared_memory_descriptor
    block: shared_memory_descriptor
    flags: shared_memory_descriptor
    tile: shared_memory_descriptor
    bias: shared_memory_descriptor


@aggregate
class Barriers:
    """Barriers in shared memory: Q of a query stage, or K and V of a stage, have landed (full) or were read (empty)."""

    query_full: shared_memory_descriptor
    query_empty: shared_memory_descriptor
    full: shared_memory_descriptor
    empty: shared_memory_descriptor


@aggregate
class Sizes:
    """Sizes of the problem; ``group`` query heads share one head of K and V.

    Where segments are packed, these are the sizes of the padded batch, by which all but the results lies in memory; a
    tile is bounded by its own `lengths.Lengths`. ``total_q`` is how many queries the pack has.

    Query i sees keys from i + first_offset to i + last_offset (`Spec.has_first`, `Spec.has_last`). ``first_value`` is
    the key whose values V begins with, where V holds no codes.
    """

    heads: gl.tensor
    group: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    first_offset: gl.tensor
    last_offset: gl.tensor
    first_value: gl.tensor
    q_blocks: gl.tensor
    kv_blocks: gl.tensor
    num_tiles: gl.tensor
    total_q: gl.tensor


@aggregate
class Scales:
    """Pointers to the scales of the codes of Q, K, V and mean keys, and to what the LSE of each query is shifted by."""

    query_ptr: gl.tensor
    key_ptr: gl.tensor
    mean_key_ptr: gl.tensor
    value_ptr: gl.tensor
    lse_shift_ptr: gl.tensor


@aggregate
class BlockLists:
    """Pointers to how many key blocks a query block keeps, which, how many it could see, and the bias of the others.

    ``order_ptr`` says which query block comes when, ``segments_ptr`` how long each batch element is.
    """

    kv_num_blocks_ptr: gl.tensor
    kv_indices_ptr: gl.tensor
    visible_num_blocks_ptr: gl.tensor
    order_ptr: gl.tensor
    segments_ptr: gl.tensor
    mean_bias_ptr: gl.tensor
    bias_columns: gl.tensor


@aggregate
class Results:
    """Pointers to what the kernel writes."""

    output_ptr: gl.tensor
    lse_ptr: gl.tensor
    totals_ptr: gl.tensor
