"""Aggregates that the kernel passes to its roles, with named fields."""

from __future__ import annotations

from sparge.backends.gpu.gluon import aggregate, gl, shared_memory_descriptor, tensor_descriptor

PLAIN, MASKED, NON_FINITE, PEAK = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(4)
"""Flags of a stage, which can be added: all keys visible; some hidden; a key is not finite; a key is a peak."""
MEANS = gl.constexpr(8)
"""Flag of a stage whose keys are block means."""
COARSE = gl.constexpr(32)
"""Flag of a stage whose scores INT8 would round too coarsely; they are computed from unquantized Q and K (`coarse`)."""
EMPTY = gl.constexpr(16)
"""Flag of the stage of a tile that keeps no block; set only if skipped products are counted."""


@aggregate
class Descriptors:
    """TMA descriptors of the global tensors."""

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
    """Shared memory that the producer's threads fill with the properties of stages and tiles for the consumers."""

    key_scale: shared_memory_descriptor  # 4 scales for each key block of each stage; consumers index it by block
    block: shared_memory_descriptor  # key-block indices of each stage; kv_blocks where a stage has no block
    flags: shared_memory_descriptor  # flags of each stage (`MASKED` and others)
    # for each query stage the tile index, the tile's number of stages, and its `lengths` if packed
    tile: shared_memory_descriptor
    bias: shared_memory_descriptor  # for each stage of means the bias of the scores; consumers index it by block


@aggregate
class Barriers:
    """Barriers in shared memory: Q of a query stage, or K and V of a stage, were copied (full) or released (empty)."""

    query_full: shared_memory_descriptor
    query_empty: shared_memory_descriptor
    full: shared_memory_descriptor
    empty: shared_memory_descriptor


@aggregate
class Sizes:
    """Sizes of the problem; ``group`` query heads share one head of K and V.

    If segments are packed, these are the sizes of the padded batch, which determine the layout of everything except the
    results; `lengths.Lengths` are the lengths of a tile's own segment. ``total_q`` is the number of queries of the
    pack.

    Query i sees keys from i + first_offset to i + last_offset (`Spec.has_first`, `Spec.has_last`). ``first_value`` is
    the key at which V begins, if V is not quantized.
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
    """Pointers to the scales of quantized Q, K, V and mean keys, and to the shift of each query's LSE."""

    query_ptr: gl.tensor
    key_ptr: gl.tensor
    mean_key_ptr: gl.tensor
    value_ptr: gl.tensor
    lse_shift_ptr: gl.tensor


@aggregate
class BlockLists:
    """Pointers to the kept key blocks of each query block: their number, their indices, the number of visible key
    blocks, and the bias of the block means.

    ``order_ptr`` is the order of the query blocks, ``segments_ptr`` the table with the lengths of each batch element.
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
    """Pointers to the kernel's outputs."""

    output_ptr: gl.tensor
    lse_ptr: gl.tensor
    totals_ptr: gl.tensor
