"""Which skipped blocks enter the softmax as their means, and with what weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.cuda.launch import buffer_like, launch
from sparge.backends.cuda.operands import BIAS_COLUMNS
from sparge.backends.cuda.primitives import BLOCK_K, BLOCK_Q
from sparge.backends.cuda.stages import configs
from sparge.block_mask import BlockMask
from sparge.call import Call
from sparge.geometry import ceil_div
from sparge.visibility import Visibility, key_blocks


@triton.jit(do_not_specialize=["heads", "group", "q_len", "kv_len", "q_blocks", "kv_blocks", "columns"])
def replaced_bias_kernel(
    kv_num_blocks_ptr,
    kv_indices_ptr,
    seen_count_ptr,
    bias_ptr,
    heads,
    group,
    q_len,
    kv_len,
    q_blocks,
    kv_blocks,
    columns,
    IS_CAUSAL: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    STEP: tl.constexpr,
):
    """What the scores of mean keys get besides: log2 of how many keys they stand for, -inf where a row has no use of it.

    A row has the means of the blocks that it does not keep and whose keys all its queries see alike: causal rows those
    before all of them.

    Grid: one program per row of blocks.

    Reads
        kv_num_blocks [B * H, q_blocks], kv_indices [B * H, q_blocks, kv_blocks], int32; of a row no more than it keeps
        seen_count    [B, Hkv, kv_blocks] int32 (HAS_SEEN), visible keys of each block
    Writes
        bias          [B * H * q_blocks, columns] float32
    """
    row = tl.program_id(0).to(tl.int64)
    flat_head = row // q_blocks
    first_query = (row % q_blocks).to(tl.int32) * BLOCK_Q + kv_len - q_len
    kept = tl.load(kv_num_blocks_ptr + row)
    bias_row = bias_ptr + row * columns
    places = tl.arange(0, STEP)
    for start in range(0, columns, STEP):
        blocks = start + places
        count = tl.minimum(kv_len - blocks * BLOCK_K, BLOCK_K)  # 0 or less where there is no block
        is_replaced = blocks < kv_blocks
        if IS_CAUSAL:
            is_replaced = is_replaced & (tl.minimum(blocks * BLOCK_K + BLOCK_K, kv_len) - 1 <= first_query)
        if HAS_SEEN:
            kv_head = flat_head // heads * (heads // group) + flat_head % heads // group
            count = tl.load(seen_count_ptr + kv_head * kv_blocks + blocks, mask=blocks < kv_blocks, other=0)
        is_replaced = is_replaced & (count > 0)
        log2_count = tl.where(count == BLOCK_K, 6.0, tl.log2(tl.maximum(count, 1).to(tl.float32)))
        bias = tl.where(is_replaced, log2_count, float("-inf"))
        tl.store(bias_row + blocks, bias, mask=blocks < columns)
    tl.debug_barrier()  # what is written next stays
    for start in range(0, kept, STEP):
        listed = start + places < kept
        blocks = tl.load(kv_indices_ptr + row * kv_blocks + start + places, mask=listed, other=0)
        tl.store(bias_row + blocks, tl.full((STEP,), float("-inf"), tl.float32), mask=listed)


def replaced_bias(mask: BlockMask, call: Call, seen: Visibility | None) -> Tensor:
    """The bias of `operands.MeanOperands` for a mask."""
    shape, counts = call.shape, mask.kv_num_blocks
    rows = shape.batch * shape.heads * shape.q_blocks
    columns = ceil_div(shape.kv_blocks, BIAS_COLUMNS) * BIAS_COLUMNS
    bias = buffer_like(counts, True, rows, columns)
    seen_count = counts
    has_seen = seen is not None and seen.keys is not None
    if seen is not None and seen.keys is not None:
        seen_count = key_blocks(seen.keys, False).sum(-1, dtype=torch.int32)
        seen_count = seen_count.expand(shape.batch, shape.kv_heads, -1).contiguous()
    config = configs.replacement_config()
    launch(
        replaced_bias_kernel,
        rows,
        kv_num_blocks_ptr=counts.contiguous(),
        kv_indices_ptr=mask.kv_indices.contiguous(),
        seen_count_ptr=seen_count,
        bias_ptr=bias,
        heads=shape.heads,
        group=shape.group,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        q_blocks=shape.q_blocks,
        kv_blocks=shape.kv_blocks,
        columns=columns,
        IS_CAUSAL=call.is_causal,
        HAS_SEEN=has_seen,
        STEP=config.step,
        num_warps=config.warps,
    )
    return bias
