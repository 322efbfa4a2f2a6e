"""Groups of values with named fields: the kernel's arguments, and the arguments of its roles."""

from __future__ import annotations

from typing import Any, NamedTuple

from sparge.backends.gpu.gluon import aggregate, gl, shared_memory_descriptor, tensor_descriptor

PLAIN = gl.constexpr(0)
"""Flags of a stage whose keys are all visible. Other stages have the sum of some of the following flags."""
MASKED = gl.constexpr(1)  # some keys are hidden
NON_FINITE = gl.constexpr(2)  # some key is not finite
PEAK = gl.constexpr(4)  # some block has a shared peak (`gpu.stages.peaks`)
MEANS = gl.constexpr(8)  # the keys are means of blocks
EMPTY = gl.constexpr(16)  # the only stage of a tile without kept blocks; set only if skipped products are counted
COARSE = gl.constexpr(32)  # INT8 is too coarse: scores are computed from unquantized Q and K (`coarse`)


@aggregate
class Descriptors:
    """TMA descriptors of the global tensors."""

    query: tensor_descriptor
    key: tensor_descriptor
    value: tensor_descriptor


@aggregate
class Buffers:
    """Shared memory that TMA fills: one or two stages of Q, several stages of K and V."""

    query: shared_memory_descriptor
    key: shared_memory_descriptor
    value: shared_memory_descriptor


@aggregate
class Metadata:
    """Shared memory through which the producer passes the properties of stages and tiles to the consumers."""

    key_scale: shared_memory_descriptor  # 4 scales for each key block of each stage; consumers index it by block
    block: shared_memory_descriptor  # indices of the key blocks of each stage; kv_blocks for a missing block
    flags: shared_memory_descriptor  # flags of each stage (`MASKED` and others)
    # for each query stage, the tile's index, number of stages, coordinates, and `scheduler.Lengths` if packed
    tile: shared_memory_descriptor
    bias: shared_memory_descriptor  # for each stage of means the bias of the scores; consumers index it by block


@aggregate
class Barriers:
    """Barriers of query stages (Q) and stages (K and V): copied by TMA (full), or released by consumers (empty)."""

    query_full: shared_memory_descriptor
    query_empty: shared_memory_descriptor
    full: shared_memory_descriptor
    empty: shared_memory_descriptor


@aggregate
class SharedMemory:
    """All shared memory of a program. ``ones`` [64, 8] are FP8 ones, which P is multiplied by for its row sums."""

    buffers: Buffers
    metadata: Metadata
    barriers: Barriers
    ones: shared_memory_descriptor


@aggregate
class Sizes:
    """Sizes of the problem; ``group`` query heads share one head of K and V.

    If segments are packed, these are the sizes of the padded batch, which determine the layout of all tensors except
    the results. The lengths of a tile's own segment are in `scheduler.Lengths`. ``total_q`` is the number of queries of
    the pack.

    Query i sees keys from i + first_offset to i + last_offset (`Spec.has_first`, `Spec.has_last`). If V is not
    quantized, its tensor starts at key ``first_value``.
    """

    heads: gl.tensor
    group: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    first_offset: gl.tensor
    last_offset: gl.tensor
    q_blocks: gl.tensor
    kv_blocks: gl.tensor
    first_value: gl.tensor
    num_tiles: gl.tensor
    bias_columns: gl.tensor
    total_q: gl.tensor


class ScalePointers(NamedTuple):
    """Scales of quantized Q, K, mean keys and V, float32."""

    query: Any  # (B, H, q_blocks * 128), one per query, times softmax_scale log2 e
    key: Any  # (B, Hkv, kv_blocks, 4), one per group of keys; negative if the block has a shared peak
    mean_key: Any  # (B, Hkv, tiles of means, 4), one per group of means
    value: Any  # (B, Hkv, D_v padded), one per channel
    lse_shift: Any  # (B, H, q_len) in nats, subtracted from all scores of a query by smoothing K


class ExactPointers(NamedTuple):
    """Unquantized Q and K of the caller, (B, H | Hkv, q_len | kv_len, D), for coarse stages."""

    query: Any
    key: Any
    mean_key: Any  # (B, Hkv, kv_blocks, D padded) float32


class CounterPointers(NamedTuple):
    """Counters that all programs increment."""

    totals: Any  # (3,), numbers of kept blocks, of visible blocks, and of halves of kept blocks whose P V was skipped
    turns: Any  # (1,), initially 0: number of turns taken, not counting the first turn of each program


class ResultPointers(NamedTuple):
    """Outputs of the kernel."""

    output: Any  # (B, H, q_len, D_v); SPEC.tokens_first (B, q_len, H, D_v); SPEC.packed (total_q, H, D_v)
    lse: Any  # (B, H, q_len); SPEC.packed (H, total_q)


class ExactOperands(NamedTuple):
    """Inputs of the scores of coarse stages (`coarse`)."""

    ptrs: Any  # `ExactPointers`
    query_strides: Any  # batch, head, token
    key_strides: Any
    lse_shift_ptr: Any
    segments_ptr: Any
    softmax_scale: Any
    sizes: Any  # `Sizes`
