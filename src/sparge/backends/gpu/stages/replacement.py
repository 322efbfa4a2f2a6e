"""Determine which skipped blocks are replaced by their means, and compute the bias of each mean."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import buffer_like, launch, segments_argument
from sparge.backends.gpu.operands import BIAS_COLUMNS
from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q, kernel, segment_queries, segment_sizes
from sparge.backends.gpu.stages import configs
from sparge.backends.gpu.stages.arguments import Sizes, WindowSpec, sizes_of, spec_of
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import ceil_div


@dataclass(frozen=True)
class ReplacementSpec(WindowSpec):
    """Compile-time values of `replaced_bias_kernel`."""

    step: int  # key blocks per step


@triton.jit
def is_replaceable(flat_q_block, blocks, segments_ptr, sizes, SPEC: tl.constexpr):
    """Return which of ``blocks`` a mean can replace: those inside the windows of all queries of the query block.

    In causal attention, these are the blocks before the first query.
    """
    heads, _, q_len, kv_len, first_offset, last_offset, q_blocks, kv_blocks = sizes
    first_query = (flat_q_block % q_blocks).to(tl.int32) * BLOCK_Q
    if SPEC.packed:
        batch = flat_q_block // q_blocks // heads
        q_len, kv_len, first_offset, last_offset = segment_sizes(segments_ptr, batch, first_offset, last_offset)
        kv_blocks = tl.cdiv(kv_len, BLOCK_K)
    allowed = blocks < kv_blocks
    if SPEC.has_last:
        last_key = tl.minimum(blocks * BLOCK_K + BLOCK_K, kv_len) - 1
        allowed = allowed & (last_key <= first_query + last_offset)
    if SPEC.has_first:
        last_query = tl.minimum(first_query + BLOCK_Q, q_len) - 1
        allowed = allowed & (blocks * BLOCK_K >= last_query + first_offset)
    return allowed


@kernel
def replaced_bias_kernel(
    kv_num_blocks_ptr,
    kv_indices_ptr,
    block_bias_ptr,
    bias_ptr,
    segments_ptr,
    heads,
    group,
    q_len,
    kv_len,
    first_offset,
    last_offset,
    q_blocks,
    kv_blocks,
    columns,
    SPEC: tl.constexpr,
):
    """Write the bias of every mean key for each query block: the block's own bias, or -inf.

    A query block uses the means of the blocks that it does not keep and that `is_replaceable` allows.

    Grid: one program for each query block of every head.

    Reads
        kv_num_blocks [B * H, q_blocks], kv_indices [B * H, q_blocks, kv_blocks], int32; only the kept entries
        block_bias    [B, Hkv, kv_blocks] float32, from `summarize_kernel`
        segments      `Segments.table` (SPEC.packed)
    Writes
        bias          [B * H * q_blocks, columns] float32
    """
    STEP: tl.constexpr = SPEC.step
    sizes = Sizes(heads, group, q_len, kv_len, first_offset, last_offset, q_blocks, kv_blocks)
    flat_q_block = tl.program_id(0).to(tl.int64)
    flat_head = flat_q_block // q_blocks
    if SPEC.packed:
        _, q_len = segment_queries(segments_ptr, flat_head // heads)
        if flat_q_block % q_blocks * BLOCK_Q >= q_len:
            return
    kept = tl.load(kv_num_blocks_ptr + flat_q_block)
    bias_base = bias_ptr + flat_q_block * columns
    places = tl.arange(0, STEP)

    # Biases of all blocks
    for start in range(0, columns, STEP):
        blocks = start + places
        is_replaced = is_replaceable(flat_q_block, blocks, segments_ptr, sizes, SPEC)
        block_bias_ptrs = block_bias_ptr + flat_head // group * kv_blocks + blocks
        tl.store(bias_base + blocks, tl.load(block_bias_ptrs, is_replaced, float("-inf")), mask=blocks < columns)

    # -inf for kept blocks
    tl.debug_barrier()  # the following stores overwrite those of other threads
    for start in range(0, kept, STEP):
        listed = start + places < kept
        blocks = tl.load(kv_indices_ptr + flat_q_block * kv_blocks + start + places, mask=listed, other=0)
        tl.store(bias_base + blocks, tl.full((STEP,), float("-inf"), tl.float32), mask=listed)


def bias_columns(kv_blocks: int) -> int:
    """Return the number of columns of the bias, padded to whole tiles of means."""
    return ceil_div(kv_blocks, BIAS_COLUMNS) * BIAS_COLUMNS


def replaced_bias(mask: BlockMask, block_bias: Tensor, call: Call) -> Tensor:
    """Return `operands.MeanOperands.bias` for a block mask; ``block_bias`` is the bias of `BlockMeans`."""
    shape, counts = call.shape, mask.kv_num_blocks
    q_blocks = shape.batch * shape.heads * shape.q_blocks
    columns = bias_columns(shape.kv_blocks)
    bias = buffer_like(counts, True, q_blocks, columns)
    config = configs.stage_config("replacement")
    launch(
        replaced_bias_kernel,
        q_blocks,
        kv_num_blocks_ptr=counts.contiguous(),
        kv_indices_ptr=mask.kv_indices.contiguous(),
        block_bias_ptr=block_bias,
        bias_ptr=bias,
        segments_ptr=segments_argument(call, bias),
        **sizes_of(call),
        columns=columns,
        SPEC=ReplacementSpec(**spec_of(call), step=config.step),
        num_warps=config.warps,
    )
    return bias
