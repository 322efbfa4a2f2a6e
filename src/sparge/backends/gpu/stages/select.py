"""Select the kept blocks of each query block by their probabilities, without sorting.

Probabilities are not negative, so their bit patterns have the same order as integers. A search over these integers
finds the smallest probability that is kept: each step counts or sums the entries above a candidate, in registers. Ties
go to the lower index. The kept blocks are then written in ascending order, followed by the others.

A selection rule is a function (`select_topk`, `select_topcdf`) that `_apply_rule` calls by the rule's name. A budget is
first allocated to all query blocks together (`budget`); this kernel then selects each query block's best blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import buffer_like, launch, per_head_tensor
from sparge.backends.gpu.primitives import TOP_LEVEL, kernel, segment_number
from sparge.backends.gpu.stages import configs
from sparge.backends.gpu.stages.arguments import Sizes, tensor_or
from sparge.backends.gpu.stages.budget import (
    LEVEL_WIDTH,
    LEVELS,
    allocated_blocks,
    count_budget,
    long_limit_of,
    place_q_block,
)
from sparge.backends.gpu.stages.mask_blocks import MaskFacts
from sparge.backends.gpu.stages.query_blocks import INFINITY_BITS, SelectionArguments, load_blocks
from sparge.backends.gpu.stages.replacement import bias_columns, is_replaceable
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.options import rules

ROUNDING_GUARD = tl.constexpr(rules.ROUNDING_GUARD)
SELECTIONS = ("topk", "topcdf", "budget")
"""Names of the rules that the kernel supports."""


@triton.jit
def _first_set(flags, count):
    """Clear all but the first ``count`` set flags. There are more of them only if probabilities are tied."""
    if tl.sum(flags.to(tl.int32)) > count:
        flags = flags & (tl.cumsum(flags.to(tl.int32), 0) <= count)
    return flags


@triton.jit
def _top_k(bits, count, low, high):
    """Mark the ``count`` largest entries that are not negative, [COLUMNS] bool; ties go to the lower index.

    The search for the smallest marked entry alternates between halving the range and interpolating in it, so smooth
    distributions need few steps.

    Args:
        low, high: likely range of the smallest marked entry, low <= bits < high.
    """
    # Start with the likely range, or with the range of all entries
    candidates = bits >= 0  # [COLUMNS]
    low = tl.zeros((), tl.int32) + low  # may be a constant, but loop variables must be run-time values
    high = tl.zeros((), tl.int32) + high
    count_low = tl.sum((bits >= low).to(tl.int32))  # entries at or above low
    count_high = tl.sum((bits >= high).to(tl.int32))  # entries at or above high
    if count_high == count:
        low = high
        count_low = count_high
    elif (count_low < count) | (count_high > count):
        low = tl.min(tl.where(candidates, bits, INFINITY_BITS), 0)
        high = tl.max(bits, 0) + 1
        count_low = tl.sum(candidates.to(tl.int32))
        count_high = 0

    # Narrow the range: at least `count` entries are >= low, fewer are >= high
    halve = False
    while (high - low > 1) & (count_low > count):
        share = tl.where(halve, 0.5, (count_low - count).to(tl.float32) / (count_low - count_high).to(tl.float32))
        step = ((high - low).to(tl.float32) * share).to(tl.int32)
        middle = tl.minimum(tl.maximum(low + step, low + 1), high - 1)
        count_middle = tl.sum((bits >= middle).to(tl.int32))
        is_enough = count_middle >= count
        low = tl.where(is_enough, middle, low)
        count_low = tl.where(is_enough, count_middle, count_low)
        high = tl.where(is_enough, high, middle)
        count_high = tl.where(is_enough, count_high, count_middle)
        halve = halve == 0
    above = bits > low
    return above | _first_set(candidates & (bits == low), count - tl.sum(above.to(tl.int32)))


@triton.jit
def _top_mass(bits, mass):
    """Mark the largest entries until their sum reaches a share of the total, including the one that crosses it.

    Negative entries are never marked.
    """
    probability = tl.where(bits > 0, bits, 0).to(tl.float32, bitcast=True)
    keeps_all = mass >= 1.0
    mass = mass * tl.sum(probability) * ROUNDING_GUARD
    low = -1  # invariant: it is -1, or the entries above it reach the mass
    high = tl.maximum(tl.max(bits, 0), 0)
    while high - low > 1:
        middle = low + (high - low) // 2
        is_reached = tl.sum(tl.where(bits > middle, probability, 0.0)) >= mass
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    above = bits > high
    remaining = mass - tl.sum(tl.where(above, probability, 0.0))
    size = high.to(tl.float32, bitcast=True)
    ties = tl.where(size > 0.0, tl.ceil(remaining / tl.where(size > 0.0, size, 1.0)), 2147483000.0)
    ties = tl.where(remaining > 0.0, ties, 0.0)
    kept = above | _first_set(bits == high, tl.minimum(ties, 2147483000.0).to(tl.int32))
    return tl.where(keeps_all, bits >= 0, kept)


@triton.jit
def _top_k_with_forced(bits, eligible, forced, count, visible_count, low, high):
    """Mark the best eligible blocks in addition to the forced ones, so that ``count`` blocks are kept in total.

    Args:
        low, high: see `_top_k`.
    """
    free_count = tl.minimum(count, visible_count) - tl.sum((forced & eligible).to(tl.int32))
    return _top_k(tl.where(eligible & (forced == 0), bits, -1), free_count, low, high)


@triton.jit
def select_topk(bits, eligible, forced, amount, min_blocks, visible_count):
    """Mark the best ceil(amount * visible blocks) blocks, at least ``min_blocks``."""
    share = tl.ceil(amount * visible_count.to(tl.float32) * ROUNDING_GUARD).to(tl.int32)
    return _top_k_with_forced(bits, eligible, forced, tl.maximum(tl.maximum(min_blocks, 1), share), visible_count, 0, 0)


@triton.jit
def select_topcdf(bits, eligible, forced, amount, min_blocks, visible_count):
    """Mark the best blocks until their probabilities sum to ``amount``, at least ``min_blocks`` blocks."""
    kept = _top_k_with_forced(bits, eligible, forced, tl.maximum(min_blocks, 1), visible_count, 0, 0)
    return kept | _top_mass(tl.where(eligible, bits, -1), amount)


@triton.jit
def _apply_rule(bits, eligible, forced, amount, min_blocks, visible_count, SELECTION: tl.constexpr):
    """Mark the eligible blocks that a rule keeps, [COLUMNS] bool.

    Args:
        bits: probabilities as integers.
        forced: blocks that are always kept. If eligible, they count toward the number of kept blocks.
        amount: `rules.Selection.amount`.
    """
    if SELECTION == "topk":
        kept = select_topk(bits, eligible, forced, amount, min_blocks, visible_count)
    else:
        tl.static_assert(SELECTION == "topcdf")
        kept = select_topcdf(bits, eligible, forced, amount, min_blocks, visible_count)
    return kept


@kernel
def select_kernel(
    selection_ptrs,
    amount_ptr,
    count_ptr,
    kept_ptr,
    sums_ptr,
    block_bias_ptr,
    kv_num_blocks_ptr,
    kv_indices_ptr,
    visible_num_blocks_ptr,
    bias_ptr,
    order_ptr,
    selection_strides,
    amount,
    long_limit,
    heads,
    group,
    q_len,
    kv_len,
    first_offset,
    last_offset,
    q_blocks,
    kv_blocks,
    min_blocks,
    top_level,
    batch_q_blocks,
    parts,
    bias_columns,
    SELECTION: tl.constexpr,
    AMOUNT_PER_HEAD: tl.constexpr,
    ALLOCATES: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Write the kept blocks of one query block: (selected by the rule | forced | not eligible) & visible.

    Grid: query blocks of every head, in one dimension.

    Reads
        selection_ptrs    see `query_blocks`, also for strides and SPEC
        amount            [H] float32, the rule's amount per head (AMOUNT_PER_HEAD); otherwise the number ``amount``
        count             [B * H, q_blocks] int32, number of blocks that the budget allocates
        kept, sums        from `count_kernel`, instead of ``count`` (ALLOCATES)
        block_bias        [B, Hkv, kv_blocks] float32, the bias of `BlockMeans` (WITH_BIAS)
    Writes, int32
        kv_num_blocks     [B * H, q_blocks], number of kept blocks
        kv_indices        [B * H, q_blocks, kv_blocks], the kept blocks in ascending order, then the others
        visible_num_blocks    [B * H, q_blocks]
        order             [B * batch_q_blocks], see `place_q_block` (ALLOCATES)
    and in float32
        bias              [B * H * q_blocks, bias_columns] (WITH_BIAS), as `replaced_bias_kernel` does

    ``long_limit`` is the number of kept blocks above which a query block is long (ALLOCATES). ``top_level``,
    ``batch_q_blocks`` and ``parts`` are those of `count_kernel`.
    """
    # Load the key blocks of the query block
    COLUMNS: tl.constexpr = SPEC.columns
    sizes = Sizes(heads, group, q_len, kv_len, first_offset, last_offset, q_blocks, kv_blocks)
    segments_ptr = selection_ptrs.segments
    flat_q_block = tl.program_id(0).to(tl.int64)
    blocks = load_blocks(flat_q_block, selection_ptrs, selection_strides, sizes, SPEC)
    columns = blocks.columns
    visible = blocks.visible
    visible_count = tl.sum(visible.to(tl.int32))

    # Apply the rule
    if SELECTION == "budget":
        low = 0
        high = 0
        if ALLOCATES:
            count, last = allocated_blocks(flat_q_block, kept_ptr, sums_ptr, batch_q_blocks, parts)
            if SPEC.packed:
                top_level = segment_number(segments_ptr, flat_q_block // batch_q_blocks, TOP_LEVEL)
            low = (last + (top_level - LEVELS + 1)) * LEVEL_WIDTH  # start the search in the budget's last level
            high = low + LEVEL_WIDTH
            place_q_block(
                flat_q_block,
                count,
                long_limit,
                order_ptr,
                sums_ptr,
                segments_ptr,
                batch_q_blocks,
                parts,
                sizes,
                SPEC.packed,
            )
        else:
            count = tl.load(count_ptr + flat_q_block)
        kept = _top_k_with_forced(blocks.bits, blocks.eligible, blocks.forced, count, visible_count, low, high)
    else:
        if AMOUNT_PER_HEAD:
            amount = tl.load(amount_ptr + flat_q_block // q_blocks % heads)
        kept = _apply_rule(blocks.bits, blocks.eligible, blocks.forced, amount, min_blocks, visible_count, SELECTION)
    kept = (kept | blocks.forced | (blocks.eligible == 0)) & visible  # [COLUMNS]

    # Write the lists
    kept_count = tl.sum(kept.to(tl.int32))
    kept_before = tl.cumsum(kept.to(tl.int32), 0) - kept.to(tl.int32)
    position = tl.where(kept, kept_before, kept_count + columns - kept_before)  # in the list
    tl.store(kv_indices_ptr + flat_q_block * kv_blocks + position, columns, mask=blocks.inside)
    tl.store(kv_num_blocks_ptr + flat_q_block, kept_count)
    tl.store(visible_num_blocks_ptr + flat_q_block, visible_count)

    # Write the bias of the means that replace skipped blocks
    if WITH_BIAS:
        replaced = is_replaceable(flat_q_block, columns, segments_ptr, sizes, SPEC)
        replaced = replaced & (kept == 0)
        block_bias_ptrs = block_bias_ptr + flat_q_block // q_blocks // group * kv_blocks + columns
        bias = tl.load(block_bias_ptrs, replaced, float("-inf"))
        bias_base = bias_ptr + flat_q_block * bias_columns
        tl.store(bias_base + columns, bias, mask=columns < bias_columns)
        for start in range(COLUMNS, bias_columns, COLUMNS):
            padding = tl.full((COLUMNS,), float("-inf"), tl.float32)
            tl.store(bias_base + start + columns, padding, mask=start + columns < bias_columns)


class Selected(NamedTuple):
    """The result of `select`."""

    mask: BlockMask  # the kept blocks of every query block
    # (existing query blocks,) int32, the order in which to compute query blocks; None if it does not matter
    order: Tensor | None
    bias: Tensor | None  # see `operands.MeanOperands`; None without ``block_bias``


def select(
    probability: Tensor,
    query_similarity: Tensor,
    key_similarity: Tensor | None,
    call: Call,
    mask: MaskFacts | None = None,
    threshold: Tensor | None = None,
    block_bias: Tensor | None = None,
) -> Selected:
    """Return the kept blocks of every query block.

    Args:
        probability: returned by `score.block_probabilities`.
        query_similarity, key_similarity: (B * H, q_blocks) and (B * Hkv, kv_blocks) float32, read with a threshold.
        mask: returned by `key_mask.key_mask` or `mask_blocks.mask_blocks`; None without a mask.
        threshold: (H,), similarity below which a query or key block is not eligible.
        block_bias: the bias of `key_value_statistics.BlockMeans`; None if skipped blocks are dropped.

    Raises:
        NotImplementedError: the kernel does not have the rule.
    """
    arguments = SelectionArguments(probability, query_similarity, key_similarity, call, mask, threshold)
    budget = (
        count_budget(arguments, call, call.shape.kv_blocks, allocates=True) if call.selection.is_call_wide else None
    )
    return select_blocks(arguments, call, None, budget, block_bias)


def select_blocks(
    arguments: SelectionArguments,
    call: Call,
    counted: Tensor | None,
    budget: tuple[Tensor, Tensor] | None = None,
    block_bias: Tensor | None = None,
) -> Selected:
    """Return the kept blocks of every query block.

    Args:
        counted: (B, H, q_blocks) int32, number of blocks that the budget allocates to each query block.
        budget: result of `count_budget`, instead of ``counted``.

    Raises:
        NotImplementedError: the kernel does not have the rule.
    """
    shape, rule, probability = call.shape, call.selection, arguments.probability
    if rule.name not in SELECTIONS:
        raise NotImplementedError(f"sparsity on a GPU: expected one of {SELECTIONS}, got {rule.name!r}")
    amount = rule.amount
    amount_per_head = per_head_tensor(amount, shape, probability.device) if isinstance(amount, Tensor) else None
    sizes = (shape.batch, shape.heads, shape.q_blocks)
    counts = buffer_like(probability, True, *sizes, dtype=torch.int32)
    indices = buffer_like(probability, True, *sizes, shape.kv_blocks, dtype=torch.int32)
    visible = buffer_like(probability, True, *sizes, dtype=torch.int32)
    allocates, with_bias = budget is not None, block_bias is not None
    kept, sums = (probability, probability) if budget is None else budget
    existing = counts.numel() if call.segments is None else call.segments.order.numel()
    order = buffer_like(probability, allocates, existing, dtype=torch.int32)
    columns = bias_columns(shape.kv_blocks)
    bias = buffer_like(probability, with_bias, counts.numel(), columns)
    launch(
        select_kernel,
        shape.q_blocks * shape.batch * shape.heads,
        selection_ptrs=arguments.ptrs,
        amount_ptr=tensor_or(amount_per_head, probability),
        count_ptr=tensor_or(counted, probability),
        kept_ptr=kept,
        sums_ptr=sums,
        block_bias_ptr=tensor_or(block_bias, probability),
        kv_num_blocks_ptr=counts,
        kv_indices_ptr=indices,
        visible_num_blocks_ptr=visible,
        bias_ptr=bias,
        order_ptr=order,
        selection_strides=arguments.strides,
        amount=1.0 if isinstance(amount, Tensor) else float(amount),
        long_limit=long_limit_of(call) if allocates else 0.0,
        **arguments.sizes,
        top_level=rules.budget_top(shape.kv_blocks),
        batch_q_blocks=shape.heads * shape.q_blocks,
        parts=sums.shape[1] if allocates else 0,
        bias_columns=columns,
        SELECTION=rule.name,
        AMOUNT_PER_HEAD=amount_per_head is not None,
        ALLOCATES=allocates,
        WITH_BIAS=with_bias,
        SPEC=arguments.spec,
        num_warps=configs.stage_config("select").warps(arguments.columns),
    )
    mask = BlockMask(counts, indices, visible, shape.q_len, shape.kv_len, window=call.window)
    return Selected(mask, order if allocates else None, bias if with_bias else None)
