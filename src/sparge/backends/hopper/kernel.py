"""Attention over the kept blocks on Hopper: one producer warp copies, two consumer warpgroups compute.

The contract is that of `triton.attention`, which also serves as the oracle of the tests. `attention_kernel` allocates
shared memory and starts the roles:

    producer    copies Q of a tile, then K and V of its kept blocks, stage by stage, with metadata
    consumer    S = Q K^T, softmax, P V; products overlap with the computation of P; then the epilogue

`producer.py` and `consumer.py` are the roles; `mma.py`, `softmax.py`, `coarse.py`, `accumulator.py` and `epilogue.py`
are parts of the consumer. docs/hopper.md explains layouts, barriers, and P without exp2.
"""

from __future__ import annotations

from functools import partial

from sparge.backends.gpu.gluon import barrier, fence_async_shared, gl, jit, mbarrier, reinterpret
from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q, KEY_GROUPS, kernel
from sparge.backends.hopper.aggregates import (
    Barriers,
    BlockLists,
    Buffers,
    Descriptors,
    Metadata,
    Results,
    Scales,
    Sizes,
)
from sparge.backends.hopper.coarse import ExactOperands
from sparge.backends.hopper.consumer import consume
from sparge.backends.hopper.producer import produce
from sparge.backends.hopper.softmax import declare_above, declare_far

ONES_BITS = gl.constexpr(0x38383838)
"""1.0 in E4M3, four times."""


@partial(kernel, jit=jit)
def attention_kernel(
    query_desc,
    key_desc,
    value_desc,
    mean_key_desc,
    mean_value_desc,
    query_scale_ptr,
    key_scale_ptr,
    mean_scale_ptr,
    value_scale_ptr,
    lse_shift_ptr,
    exact_query_ptr,
    exact_key_ptr,
    mean_exact_key_ptr,
    kv_num_blocks_ptr,
    kv_indices_ptr,
    visible_num_blocks_ptr,
    order_ptr,
    segments_ptr,
    mean_bias_ptr,
    totals_ptr,
    turn_counter_ptr,
    threshold_ptr,
    output_ptr,
    lse_ptr,
    exact_query_strides,
    exact_key_strides,
    softmax_scale,
    heads,
    group,
    q_len,
    kv_len,
    first_offset,
    last_offset,
    first_value,
    q_blocks,
    kv_blocks,
    num_tiles,
    bias_columns,
    total_q,
    SPEC: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Block-sparse attention by online softmax: output and LSE of every query over its block's kept key blocks.

    Grid: one program per multiprocessor with 9 active warps. A tile is 128 queries of a head (and a slice of the value
    channels). Programs take tiles from a counter, longest first (`scheduler`). Each consumer computes 64 of the
    queries. A stage is one or two kept blocks of 64 keys.

    Stages of means follow those of kept blocks: a mean is a key, with a bias that is -inf where it is not used.

    For each stage, with S in log2 units (or other units, `Spec.units_per_log2`) and m, l, O starting at -inf, 0, 0:

        S  = Q K^T, times the scales of Q (which include the softmax scale) and K; -inf where a key is hidden
        m' = row reference. FP8: max(the stage's row maximum, the row maximum so far - 64);
             16 bits: the row maximum of an earlier stage, unless P grows too large
             (`accumulator.issue_stage_without_maximum`); with a threshold or INT8 scores, the row maximum so far
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
        query_scale_ptr: (B, H, q_blocks * 128), scale of each query, times softmax_scale log2 e.
        key_scale_ptr: (B, Hkv, kv_blocks, 4), scale of each group of keys; negative if the block has a shared peak.
        mean_scale_ptr: (B, Hkv, tiles of means, 4), the same for mean keys.
        value_scale_ptr: (B, Hkv, D_v padded), scale of each channel.
        lse_shift_ptr: (B, H, q_len), amount that smoothing of K subtracts from each query's scores.
        exact_query_ptr, exact_key_ptr: (B, H | Hkv, q_len | kv_len, D), unquantized Q and K of the caller, with their
            strides of batch, head and token: for coarse stages.
        mean_exact_key_ptr: (B, Hkv, kv_blocks, D padded) float32, the same for mean keys.
        kv_num_blocks_ptr: (B, H, q_blocks), number of key blocks that each query block keeps.
        kv_indices_ptr: (B, H, q_blocks, kv_blocks), their indices.
        visible_num_blocks_ptr: (B, H, q_blocks), number of visible key blocks.
        order_ptr: (B * H * q_blocks,), query blocks of every head in processing order (SPEC.ordered); for a pack, those
            that exist.
        segments_ptr: (B, 8), `segments.Segments.table` (SPEC.packed). All tensors except output and LSE have the layout
            of a batch of sequences of the maximum length.
        mean_bias_ptr: (B * H * q_blocks, bias_columns), bias added to the logits of the means, in log2 units.
        totals_ptr: (3,), incremented by kept and visible blocks of all tiles, and by halves of kept blocks whose P V
            was skipped.
        turn_counter_ptr: (1,), initially 0: number of turns taken after each program's first.
        threshold_ptr: (H,), natural log: the threshold for skipping P V.
        output_ptr: (B, H, q_len, D_v), or (B, q_len, H, D_v) if ``SPEC.tokens_first``; for a pack (total_q, H, D_v).
        lse_ptr: (B, H, q_len); for a pack (H, total_q).
        softmax_scale: of scores that are not computed from INT8 values.
        first_offset, last_offset: query i sees keys from i + first_offset to i + last_offset, as flagged in SPEC.
        first_value: the key at which ``value_desc`` begins; earlier values are unseen and copied as 0.
    """
    # Declarations: PTX registers of the inline assembly.
    if SPEC.peaks == "every_tile":
        declare_far()
    if SPEC.rescales_rarely:
        declare_above()

    # Shared memory: buffers of Q, K and V, metadata, FP8 ones, barriers.
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
    full = gl.allocate_shared_memory(gl.int64, [SPEC.stages, 1], SPEC.barrier_layout)
    empty = gl.allocate_shared_memory(gl.int64, [SPEC.stages, 1], SPEC.barrier_layout)
    query_full = gl.allocate_shared_memory(gl.int64, [SPEC.query_stages, 1], SPEC.barrier_layout)
    query_empty = gl.allocate_shared_memory(gl.int64, [SPEC.query_stages, 1], SPEC.barrier_layout)

    # Barriers: the producer fills (1 arrival), both consumers release (2 arrivals).
    stages: gl.constexpr = SPEC.stages
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    query_stages: gl.constexpr = SPEC.query_stages
    for i in gl.static_range(query_stages):
        mbarrier.init(query_full.index(i), count=1)
        mbarrier.init(query_empty.index(i), count=2)
    fence_async_shared()
    barrier()
    # Roles and their arguments.
    descriptors = Descriptors(query=query_desc, key=key_desc, value=value_desc)
    means = Descriptors(query=query_desc, key=mean_key_desc, value=mean_value_desc)
    buffers = Buffers(query=query_smem, key=key_smem, value=value_smem)
    barriers = Barriers(query_full=query_full, query_empty=query_empty, full=full, empty=empty)
    sizes = Sizes(
        heads=heads,
        group=group,
        q_len=q_len,
        kv_len=kv_len,
        first_offset=first_offset,
        last_offset=last_offset,
        first_value=first_value,
        q_blocks=q_blocks,
        kv_blocks=kv_blocks,
        num_tiles=num_tiles,
        total_q=total_q,
    )
    scales = Scales(
        query_ptr=query_scale_ptr,
        key_ptr=key_scale_ptr,
        mean_key_ptr=mean_scale_ptr,
        value_ptr=value_scale_ptr,
        lse_shift_ptr=lse_shift_ptr,
    )
    lists = BlockLists(
        kv_num_blocks_ptr=kv_num_blocks_ptr,
        kv_indices_ptr=kv_indices_ptr,
        visible_num_blocks_ptr=visible_num_blocks_ptr,
        order_ptr=order_ptr,
        segments_ptr=segments_ptr,
        mean_bias_ptr=mean_bias_ptr,
        bias_columns=bias_columns,
    )
    exact = ExactOperands(
        query_ptr=exact_query_ptr,
        key_ptr=exact_key_ptr,
        mean_key_ptr=mean_exact_key_ptr,
        lse_shift_ptr=lse_shift_ptr,
        segments_ptr=segments_ptr,
        query_batch_stride=exact_query_strides[0],
        query_head_stride=exact_query_strides[1],
        query_stride=exact_query_strides[2],
        key_batch_stride=exact_key_strides[0],
        key_head_stride=exact_key_strides[1],
        key_stride=exact_key_strides[2],
        softmax_scale=softmax_scale,
        sizes=sizes,
    )
    results = Results(output_ptr=output_ptr, lse_ptr=lse_ptr, totals_ptr=totals_ptr)
    gl.warp_specialize(
        [
            (
                consume,
                (
                    0,
                    buffers,
                    metadata,
                    barriers,
                    sizes,
                    ones,
                    scales,
                    threshold_ptr,
                    results,
                    softmax_scale,
                    exact,
                    SPEC,
                ),
            ),
            (
                consume,
                (
                    1,
                    buffers,
                    metadata,
                    barriers,
                    sizes,
                    ones,
                    scales,
                    threshold_ptr,
                    results,
                    softmax_scale,
                    exact,
                    SPEC,
                ),
            ),
            (
                produce,
                (
                    descriptors,
                    means,
                    buffers,
                    metadata,
                    barriers,
                    sizes,
                    scales,
                    lists,
                    totals_ptr,
                    turn_counter_ptr,
                    SPEC,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
