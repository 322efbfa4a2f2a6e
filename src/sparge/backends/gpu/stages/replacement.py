"""Which skipped blocks enter the softmax as their means, and with what weight."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import buffer_like, launch, segments_argument, window_flags, window_offsets
from sparge.backends.gpu.operands import BIAS_COLUMNS
from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q, segment_queries, segment_sizes
from sparge.backends.gpu.stages import configs
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import ceil_div

NUMBERS = ["heads", "group", "q_len", "kv_len", "first_offset", "last_offset", "q_blocks", "kv_blocks", "columns"]


@triton.jit
def has_mean(
    row,
    blocks,
    segments_ptr,
    heads,
    q_len,
    kv_len,
    first_offset,
    last_offset,
    q_blocks,
    kv_blocks,
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Whether all queries of a row see the keys of a block alike, so that its mean can stand for it: causal rows have
    the blocks before all of their queries, with a window those inside of all their windows."""
    first_query = (row % q_blocks).to(tl.int32) * BLOCK_Q
    if PACKED:
        batch = row // q_blocks // heads
        q_len, kv_len, first_offset, last_offset = segment_sizes(segments_ptr, batch, first_offset, last_offset)
        kv_blocks = tl.cdiv(kv_len, BLOCK_K)
    found = blocks < kv_blocks
    if HAS_LAST:
        last_key = tl.minimum(blocks * BLOCK_K + BLOCK_K, kv_len) - 1
        found = found & (last_key <= first_query + last_offset)
    if HAS_FIRST:
        last_query = tl.minimum(first_query + BLOCK_Q, q_len) - 1
        found = found & (blocks * BLOCK_K >= last_query + first_offset)
    return found


@triton.jit(do_not_specialize=NUMBERS)
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
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
    PACKED: tl.constexpr,
    STEP: tl.constexpr,
):
    """What the scores of mean keys get besides: each block's own bias, -inf where a row has no use of it.

    A row has the means of the blocks that it does not keep and that `has_mean` allows.

    Grid: one program per row of blocks.

    Reads
        kv_num_blocks [B * H, q_blocks], kv_indices [B * H, q_blocks, kv_blocks], int32; of a row no more than it keeps
        block_bias    [B, Hkv, kv_blocks] float32, of `summarize_kernel`
        segments      of `Segments.table` (PACKED)
    Writes
        bias          [B * H * q_blocks, columns] float32
    """
    row = tl.program_id(0).to(tl.int64)
    flat_head = row // q_blocks
    if PACKED:
        _, q_len = segment_queries(segments_ptr, flat_head // heads)
        if row % q_blocks * BLOCK_Q >= q_len:
            return
    kept = tl.load(kv_num_blocks_ptr + row)
    bias_row = bias_ptr + row * columns
    places = tl.arange(0, STEP)
    for start in range(0, columns, STEP):
        blocks = start + places
        is_replaced = has_mean(
            row,
            blocks,
            segments_ptr,
            heads,
            q_len,
            kv_len,
            first_offset,
            last_offset,
            q_blocks,
            kv_blocks,
            HAS_FIRST,
            HAS_LAST,
            PACKED,
        )
        pointers = block_bias_ptr + flat_head // group * kv_blocks + blocks
        tl.store(bias_row + blocks, tl.load(pointers, is_replaced, float("-inf")), mask=blocks < columns)
    tl.debug_barrier()  # what is written next stays
    for start in range(0, kept, STEP):
        listed = start + places < kept
        blocks = tl.load(kv_indices_ptr + row * kv_blocks + start + places, mask=listed, other=0)
        tl.store(bias_row + blocks, tl.full((STEP,), float("-inf"), tl.float32), mask=listed)


def bias_columns(kv_blocks: int) -> int:
    """Columns of the bias."""
    return ceil_div(kv_blocks, BIAS_COLUMNS) * BIAS_COLUMNS


def replaced_bias(mask: BlockMask, block_bias: Tensor, call: Call) -> Tensor:
    """The bias of `operands.MeanOperands` for a mask, from that of every block (`summary.KeyValueSummary`)."""
    shape, counts = call.shape, mask.kv_num_blocks
    rows = shape.batch * shape.heads * shape.q_blocks
    columns = bias_columns(shape.kv_blocks)
    bias = buffer_like(counts, True, rows, columns)
    config = configs.replacement_config()
    launch(
        replaced_bias_kernel,
        rows,
        kv_num_blocks_ptr=counts.contiguous(),
        kv_indices_ptr=mask.kv_indices.contiguous(),
        block_bias_ptr=block_bias,
        bias_ptr=bias,
        segments_ptr=segments_argument(call, bias),
        heads=shape.heads,
        group=shape.group,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        **window_offsets(call),
        q_blocks=shape.q_blocks,
        kv_blocks=shape.kv_blocks,
        columns=columns,
        **window_flags(call),
        PACKED=call.segments is not None,
        STEP=config.step,
        num_warps=config.warps,
    )
    return bias
