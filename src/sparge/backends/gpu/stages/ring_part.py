"""Attention over a part of the keys: restrict block lists to the part, and merge the results of all parts.

cut_kernel      restrict lists of key blocks to the blocks of a part
merge_kernel    merge outputs and LSEs over two sets of keys (`numerics.merge`)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import buffer_like, launch, power_of_two, strides_of
from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q, head_base, kernel, split_program
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import ceil_div

MAX_CUTS = 2
MERGED_NUMBERS, WARPS = 4096, 4


@kernel
def cut_kernel(
    kv_num_blocks_ptr,
    kv_indices_ptr,
    part_num_blocks_ptr,
    part_indices_ptr,
    part_visible_ptr,
    q_blocks,
    kv_blocks,
    part_q_blocks,
    part_blocks,
    first_q_block,
    q_len,
    kv_len,
    first_start,
    first_stop,
    second_start,
    second_stop,
    IS_CAUSAL: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Restrict a block list to key blocks first_start to first_stop - 1 and second_start to second_stop - 1.

    A list contains all blocks, the kept ones first. Blocks in these ranges keep their order, and are renumbered without
    gaps. Blocks of the part that the list does not contain follow. The part has ``part_blocks`` key blocks. Query block
    0 of the list is query block ``first_q_block`` of the part.

    Grid: query blocks of every head, in one dimension.

    Reads
        kv_num_blocks        [B * H, q_blocks] int32
        kv_indices           [B * H, q_blocks, kv_blocks] int32
    Writes, int32
        part_num_blocks      [B * H, part_q_blocks]
        part_indices         [B * H, part_q_blocks, part_blocks]
        part_visible         [B * H, part_q_blocks]
    """
    # Prologue
    q_block = tl.program_id(0) % q_blocks
    flat_head = (tl.program_id(0) // q_blocks).to(tl.int64)
    source = flat_head * q_blocks + q_block
    target = flat_head * part_q_blocks + first_q_block + q_block
    count = tl.load(kv_num_blocks_ptr + source)
    listed = 0
    kept = 0
    second_offset = first_stop - first_start - second_start

    # Blocks inside the ranges
    for start in range(0, kv_blocks, COLUMNS):
        places = start + tl.arange(0, COLUMNS)
        inside = places < kv_blocks
        blocks = tl.load(kv_indices_ptr + source * kv_blocks + places, mask=inside, other=-1)
        in_first = (blocks >= first_start) & (blocks < first_stop)
        in_second = (blocks >= second_start) & (blocks < second_stop)
        is_inside = in_first | in_second
        ranks = listed + tl.cumsum(is_inside.to(tl.int32), 0) - 1
        numbers = tl.where(in_first, blocks - first_start, blocks + second_offset)
        tl.store(part_indices_ptr + target * part_blocks + ranks, numbers, mask=is_inside)
        kept += tl.sum((is_inside & (places < count)).to(tl.int32), 0)
        listed += tl.sum(is_inside.to(tl.int32), 0)

    # Blocks that the list does not contain
    for start in range(0, part_blocks, COLUMNS):
        places = start + tl.arange(0, COLUMNS)
        is_unlisted = (places >= listed) & (places < part_blocks)
        tl.store(part_indices_ptr + target * part_blocks + places, places, mask=is_unlisted)

    # Counts
    visible = part_blocks
    if IS_CAUSAL:
        last_query = tl.minimum((first_q_block + q_block + 1) * BLOCK_Q, q_len) - 1
        visible = tl.minimum(tl.maximum(last_query + kv_len - q_len + BLOCK_K, 0) // BLOCK_K, part_blocks)
    tl.store(part_num_blocks_ptr + target, kept)
    tl.store(part_visible_ptr + target, visible)


def cut_lists(masks: Sequence[BlockMask], columns: Sequence[slice], call: Call) -> BlockMask:
    """Return the mask of a part of the keys, from masks over all keys.

    Args:
        masks: one mask per piece of the queries of the call, with contiguous block lists.
        columns: the key blocks of the part: ranges in ascending order, which form one or two contiguous ranges.
        call: the call over the part.
    """
    shape = call.shape
    cuts: list[int] = []
    for cut in columns:
        if cuts and cuts[-1] == cut.start:
            cuts[-1] = cut.stop
        else:
            cuts += [cut.start, cut.stop]
    assert 2 <= len(cuts) <= 2 * MAX_CUTS
    cuts += [0, 0] * (MAX_CUTS - len(cuts) // 2)
    like, rows_of_part = masks[0].kv_indices, (shape.batch, shape.heads, shape.q_blocks)
    counts = buffer_like(like, True, *rows_of_part, dtype=torch.int32)
    indices = buffer_like(like, True, *rows_of_part, shape.kv_blocks, dtype=torch.int32)
    visible = buffer_like(like, True, *rows_of_part, dtype=torch.int32)
    first_q_block = 0
    for mask in masks:
        batch, heads, q_blocks, kv_blocks = mask.shape
        launch(
            cut_kernel,
            batch * heads * q_blocks,
            kv_num_blocks_ptr=mask.kv_num_blocks,
            kv_indices_ptr=mask.kv_indices,
            part_num_blocks_ptr=counts,
            part_indices_ptr=indices,
            part_visible_ptr=visible,
            q_blocks=q_blocks,
            kv_blocks=kv_blocks,
            part_q_blocks=shape.q_blocks,
            part_blocks=shape.kv_blocks,
            first_q_block=first_q_block,
            q_len=shape.q_len,
            kv_len=shape.kv_len,
            first_start=cuts[0],
            first_stop=cuts[1],
            second_start=cuts[2],
            second_stop=cuts[3],
            IS_CAUSAL=call.is_causal,
            COLUMNS=min(max(power_of_two(kv_blocks), 32), 1024),
            num_warps=WARPS,
        )
        first_q_block += q_blocks
    return BlockMask(counts, indices, visible, shape.q_len, shape.kv_len, window=call.window)


@kernel
def merge_kernel(
    other_ptr,
    other_lse_ptr,
    output_ptr,
    lse_ptr,
    other_strides,
    other_lse_strides,
    output_strides,
    lse_strides,
    heads,
    q_len,
    chunks,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    IS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge attention over other keys into an output and its LSE. IS_FIRST: both are uninitialized and not read.

    Grid: chunks of ROWS queries of every head, in one dimension.

    Reads
        other        [B, H, Sq, WIDTH], 16 bits or float32
        other_lse    [B, H, Sq] float32
    Writes
        output       [B, H, Sq, WIDTH] float32
        lse          [B, H, Sq] float32
    """
    chunk, _, batch, head = split_program(tl.program_id(0), chunks, heads)
    rows = chunk * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, WIDTH_PADDED)
    is_row = rows < q_len
    inside = is_row[:, None] & (channels < WIDTH)[None, :]
    wide = rows.to(tl.int64)

    # Load both results
    output_ptrs = head_base(output_ptr, output_strides, batch, head)
    output_ptrs = output_ptrs + (wide * output_strides[2])[:, None] + channels[None, :]
    other_ptrs = head_base(other_ptr, other_strides, batch, head)
    other_ptrs = other_ptrs + (wide * other_strides[2])[:, None] + channels[None, :]
    lse_ptrs = head_base(lse_ptr, lse_strides, batch, head) + wide * lse_strides[2]
    other_lse_ptrs = head_base(other_lse_ptr, other_lse_strides, batch, head)
    other_lse = tl.load(other_lse_ptrs + wide * other_lse_strides[2], mask=is_row, other=0.0)
    other = tl.load(other_ptrs, mask=inside, other=0.0).to(tl.float32)  # [ROWS, WIDTH]
    if IS_FIRST:
        lse = tl.full((ROWS,), float("-inf"), tl.float32)
        output = tl.zeros((ROWS, WIDTH_PADDED), tl.float32)
    else:
        lse = tl.load(lse_ptrs, mask=is_row, other=0.0)
        output = tl.load(output_ptrs, mask=inside, other=0.0)

    # Merge. total = log(exp(lse) + exp(other_lse)); two equal infinities give the same infinity
    larger = tl.maximum(lse, other_lse, propagate_nan=tl.PropagateNan.ALL)
    total = larger + tl.log(1.0 + tl.exp(-tl.abs(lse - other_lse)))
    total = tl.where((lse == other_lse) & (tl.abs(lse) == float("inf")), lse, total)
    share = tl.exp(other_lse - total)
    share = tl.where(share == share, share, 0.0)  # NaN if a query sees no key of either set
    output = output * (1.0 - share)[:, None] + other * share[:, None]
    tl.store(output_ptrs, output, mask=inside)
    tl.store(lse_ptrs, total, mask=is_row)


def merge(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, *, is_first: bool) -> None:
    """Merge attention over other keys into an output (B, H, Sq, Dv) and LSE (B, H, Sq) in float32.

    ``is_first``: nothing was merged yet, and both are uninitialized.
    """
    batch, heads, q_len, width = output.shape
    padded = power_of_two(width)
    rows = max(MERGED_NUMBERS // padded, 1)
    chunks = ceil_div(q_len, rows)
    launch(
        merge_kernel,
        chunks * batch * heads,
        other_ptr=other,
        other_lse_ptr=other_lse,
        output_ptr=output,
        lse_ptr=lse,
        other_strides=strides_of(other),
        other_lse_strides=other_lse.stride(),
        output_strides=strides_of(output),
        lse_strides=lse.stride(),
        heads=heads,
        q_len=q_len,
        chunks=chunks,
        WIDTH=width,
        WIDTH_PADDED=padded,
        IS_FIRST=is_first,
        ROWS=rows,
        num_warps=WARPS,
    )
