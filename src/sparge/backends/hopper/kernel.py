"""Attention over the kept blocks on Hopper: one producer warp copies, two consumer warpgroups compute.

The kernel computes the same as `triton.attention`, which is its oracle in the tests. `attention_kernel` allocates
shared memory and starts the roles:

    producer    copies Q of a tile, then K and V of its kept blocks, stage by stage, with metadata
    consumer    computes S = Q K^T, softmax and P V, where products overlap with the computation of P; then the epilogue

`producer.py` and `consumer.py` are the roles; `mma.py`, `softmax.py`, `coarse.py`, `accumulator.py` and `epilogue.py`
are parts of the consumer. docs/hopper.md explains layouts, barriers, and P without exp2.
"""

from __future__ import annotations

from functools import partial

from sparge.backends.gpu.gluon import allocate_barriers, barrier, fence_async_shared, gl, jit, reinterpret
from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q, KEY_GROUPS, kernel
from sparge.backends.hopper.aggregates import (
    Barriers,
    Buffers,
    Descriptors,
    ExactOperands,
    Metadata,
    SharedMemory,
    Sizes,
)
from sparge.backends.hopper.consumer import consume
from sparge.backends.hopper.producer import produce
from sparge.backends.hopper.softmax import ABOVE_REGISTER, FAR_REGISTER, declare_register

ONES_BITS = gl.constexpr(0x38383838)
"""The bytes of four E4M3 ones."""


@partial(kernel, jit=jit)
def attention_kernel(
    query_desc,
    key_desc,
    value_desc,
    mean_key_desc,
    mean_value_desc,
    scale_ptrs,
    exact_ptrs,
    list_ptrs,
    mean_bias_ptr,
    counter_ptrs,
    threshold_ptr,
    result_ptrs,
    exact_query_strides,
    exact_key_strides,
    softmax_scale,
    heads,
    group,
    q_len,
    kv_len,
    first_offset,
    last_offset,
    q_blocks,
    kv_blocks,
    first_value,
    num_tiles,
    bias_columns,
    total_q,
    SPEC: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Compute output and LSE of every query by online softmax over the key blocks that its query block keeps.

    Grid: one persistent program per multiprocessor, with 9 active warps. A tile is 128 queries of a head (and a slice
    of the value channels). Programs take tiles from a counter, longest first (`scheduler`). Each consumer computes 64
    of the queries. A stage is one or two kept blocks of 64 keys.

    Stages of means follow the stages of kept blocks. A mean is a key with a bias, which is -inf if the mean is unused.

    For each stage, with S in score units (`Spec.units_per_log2`; here log2 units) and m, l, O starting at -inf, 0, 0:

        S  = Q K^T, times the scales of Q (which include the softmax scale) and K; -inf where a key is hidden
        m' = row reference
             FP8 values: max(row maximum of the stage, running maximum - 64)
             unquantized, no threshold: row maximum of an earlier stage, until P grows too large
             (`accumulator.issue_stage_without_maximum`)
             otherwise: running maximum
        P  = 2^(S - m'), times the stored value of 1, rounded to FP8 or 16 bits
        l' = l 2^(m - m') + row sums of P
        O' = O 2^(m - m') + P V

    Finally, output = O / l times the scale of each value channel, and LSE = (m + log2 l) ln 2 + lse_shift. A query that
    sees no key gets 0 and -inf.

    Args:
        query_desc: (B, H, q_len, D), for TMA; INT8 values padded to whole blocks, or 16 bits.
        key_desc: (B, Hkv, kv_len, D), the same.
        value_desc: (B, Hkv, D_v, kv_len) in FP8, padded, keys in `fp8_token_order`; or (B, Hkv, kv_len, D_v).
        mean_key_desc, mean_value_desc: `operands.MeanOperands` as K and V, one token per key block (SPEC.means).
        scale_ptrs, exact_ptrs, counter_ptrs, result_ptrs: see `aggregates`. For a pack, all tensors except the results
            have the layout of a batch of sequences of the maximum length.
        list_ptrs: see `arguments.ListPointers`.
        mean_bias_ptr: (B * H * q_blocks, bias_columns), bias added to the logits of the means, in log2 units.
        threshold_ptr: (H,), natural log: the threshold for skipping P V.
        exact_query_strides, exact_key_strides: strides of batch, head and token.
        softmax_scale: scale of scores that are not computed from INT8 values; ``scale_ptrs.query`` includes it.
        first_offset, last_offset: query i sees keys from i + first_offset to i + last_offset, as flagged in SPEC.
        first_value: the key at which ``value_desc`` begins; earlier values are unseen and copied as 0.
    """
    # Declare the PTX registers of inline assembly
    if SPEC.peaks == "every_tile":
        declare_register(FAR_REGISTER)
    if SPEC.rescales_rarely:
        declare_register(ABOVE_REGISTER)

    # Shared memory: buffers of Q, K and V, metadata, FP8 ones, barriers
    query_smem = gl.allocate_shared_memory(
        query_desc.dtype, [SPEC.query_stages * SPEC.chunks, BLOCK_Q, SPEC.chunk], SPEC.key_smem_layout
    )
    key_smem = gl.allocate_shared_memory(
        key_desc.dtype, [SPEC.stages * SPEC.chunks * SPEC.blocks, BLOCK_K, SPEC.chunk], SPEC.key_smem_layout
    )
    value_smem = gl.allocate_shared_memory(
        value_desc.dtype,
        [SPEC.stages * SPEC.blocks * SPEC.value_copies, SPEC.value_rows, SPEC.value_columns],
        SPEC.value_smem_layout,
    )
    plain: gl.constexpr = SPEC.metadata_smem_layout
    metadata = Metadata(
        key_scale=gl.allocate_shared_memory(gl.float32, [SPEC.stages, SPEC.blocks * KEY_GROUPS], plain),
        block=gl.allocate_shared_memory(gl.int32, [SPEC.stages, SPEC.blocks], plain),
        flags=gl.allocate_shared_memory(gl.int32, [SPEC.stages, SPEC.blocks * KEY_GROUPS], plain),
        tile=gl.allocate_shared_memory(gl.int32, [SPEC.tile_numbers * SPEC.query_stages, 1], plain),
        bias=gl.allocate_shared_memory(gl.float32, [SPEC.stages, SPEC.blocks * SPEC.bias_columns], plain),
    )
    # Stored as integers because Triton 3.6 miscompiles small FP8 tiles. All bytes are equal, so the layout does not
    # matter.
    ones_smem = gl.allocate_shared_memory(gl.int32, [8 * BLOCK_K // 4], plain)
    ones_smem.store(gl.full((8 * BLOCK_K // 4,), ONES_BITS, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    ones = reinterpret(ones_smem, gl.float8e4nv, [8, BLOCK_K], SPEC.ones_smem_layout).permute((1, 0))
    full, empty = allocate_barriers(SPEC.stages, 2)
    query_full, query_empty = allocate_barriers(SPEC.query_stages, 2)
    fence_async_shared()
    barrier()

    # Roles and their arguments
    descriptors = Descriptors(query_desc, key_desc, value_desc)
    means = Descriptors(query_desc, mean_key_desc, mean_value_desc)
    barriers = Barriers(query_full, query_empty, full, empty)
    shared = SharedMemory(Buffers(query_smem, key_smem, value_smem), metadata, barriers, ones)
    lengths = q_len, kv_len, first_offset, last_offset
    sizes = Sizes(heads, group, *lengths, q_blocks, kv_blocks, first_value, num_tiles, bias_columns, total_q)
    segments_ptr, lse_shift_ptr = list_ptrs.segments, scale_ptrs.lse_shift
    exact = ExactOperands(
        exact_ptrs, exact_query_strides, exact_key_strides, lse_shift_ptr, segments_ptr, softmax_scale, sizes
    )
    gl.warp_specialize(
        [
            (consume, (0, shared, scale_ptrs, exact, threshold_ptr, counter_ptrs, result_ptrs, SPEC)),
            (consume, (1, shared, scale_ptrs, exact, threshold_ptr, counter_ptrs, result_ptrs, SPEC)),
            (produce, (descriptors, means, shared, sizes, scale_ptrs, list_ptrs, mean_bias_ptr, counter_ptrs, SPEC)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
