"""From block probabilities to the lists of kept blocks, without sorting.

Probabilities are not negative, so their bit patterns order like integers. The smallest probability that is still kept
is searched for on those bits: each step counts or sums what lies above a candidate, in registers. Ties go to the lower
index. Then the kept blocks are written in ascending order, followed by the others.

A selection rule is a function (`select_topk`, `select_topcdf`), which `_selected` calls by the rule's name. How many
blocks a row keeps of a budget is counted before, for all rows together (`budget`); here each keeps its best.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import buffer_like, launch, per_head_tensor
from sparge.backends.gpu.primitives import TOP_LEVEL, segment_number
from sparge.backends.gpu.stages import configs
from sparge.backends.gpu.stages.block_rows import INFINITY_BITS, SIZES, RowArguments, load_row
from sparge.backends.gpu.stages.budget import (
    LEVEL_WIDTH,
    LEVELS,
    count_budget,
    many_blocks,
    place_row,
    share_of_row,
)
from sparge.backends.gpu.stages.mask_blocks import MaskBlocks
from sparge.backends.gpu.stages.replacement import bias_columns, has_mean
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.options import rules

NUMBERS = ["amount", "many", *SIZES, "top_level", "rows_of_batch", "parts", "bias_columns"]
ROUNDING_GUARD = tl.constexpr(rules.ROUNDING_GUARD)
SELECTIONS = ("topk", "topcdf", "budget")
"""The rules that the kernel knows."""


@triton.jit
def _first_of(flags, count):
    """The first ``count`` set flags. There are seldom more."""
    if tl.sum(flags.to(tl.int32)) > count:
        flags = flags & (tl.cumsum(flags.to(tl.int32), 0) <= count)
    return flags


@triton.jit
def _best(bits, count, low, high):
    """Return the ``count`` entries with the largest bits (entries below 0 never), ties to the lower index.

    Steps alternate between halving the range and interpolating in it: smooth rows end after a few.

    Args:
        low, high: a range of bits that the last of them is likely to lie in, low <= bits < high.
    """
    competing = bits >= 0
    low = tl.zeros((), tl.int32) + low  # no longer a compile-time value
    high = tl.zeros((), tl.int32) + high
    left = tl.sum((bits >= low).to(tl.int32))  # entries at or above low, at least `count` if there are as many
    right = tl.sum((bits >= high).to(tl.int32))  # entries at or above high, fewer than `count`
    if right == count:
        low = high
        left = right
    elif (left < count) | (right > count):
        low = tl.min(tl.where(competing, bits, INFINITY_BITS), 0)
        high = tl.max(bits, 0) + 1
        left = tl.sum(competing.to(tl.int32))
        right = 0
    halve = False
    while (high - low > 1) & (left > count):
        share = tl.where(halve, 0.5, (left - count).to(tl.float32) / (left - right).to(tl.float32))
        step = ((high - low).to(tl.float32) * share).to(tl.int32)
        middle = tl.minimum(tl.maximum(low + step, low + 1), high - 1)
        found = tl.sum((bits >= middle).to(tl.int32))
        enough = found >= count
        low = tl.where(enough, middle, low)
        left = tl.where(enough, found, left)
        high = tl.where(enough, high, middle)
        right = tl.where(enough, right, found)
        halve = halve == 0
    above = bits > low
    return above | _first_of(competing & (bits == low), count - tl.sum(above.to(tl.int32)))


@triton.jit
def _covering(bits, mass):
    """The largest entries (those below 0 never) until their sum reaches a share of all, the crossing one included."""
    probability = tl.where(bits > 0, bits, 0).to(tl.float32, bitcast=True)
    keeps_all = mass >= 1.0
    mass = mass * tl.sum(probability) * ROUNDING_GUARD
    low = -1  # what lies above it covers the mass, or it is -1
    high = tl.maximum(tl.max(bits, 0), 0)
    while high - low > 1:
        middle = low + (high - low) // 2
        covered = tl.sum(tl.where(bits > middle, probability, 0.0)) >= mass
        low = tl.where(covered, middle, low)
        high = tl.where(covered, high, middle)
    above = bits > high
    missing = mass - tl.sum(tl.where(above, probability, 0.0))
    size = high.to(tl.float32, bitcast=True)
    ties = tl.where(size > 0.0, tl.ceil(missing / tl.where(size > 0.0, size, 1.0)), 2147483000.0)
    ties = tl.where(missing > 0.0, ties, 0.0)
    kept = above | _first_of(bits == high, tl.minimum(ties, 2147483000.0).to(tl.int32))
    return tl.where(keeps_all, bits >= 0, kept)


@triton.jit
def _at_least(bits, eligible, forced, count, visible_count, low, high):
    """The best eligible blocks, so many that they and the forced ones are ``count`` (or all that are visible).

    Args:
        low, high: see `_best`.
    """
    places = tl.minimum(count, visible_count) - tl.sum((forced & eligible).to(tl.int32))
    return _best(tl.where(eligible & (forced == 0), bits, -1), places, low, high)


@triton.jit
def select_topk(bits, eligible, forced, amount, min_blocks, visible_count):
    """The best blocks: ceil(amount * visible blocks), at least ``min_blocks``."""
    share = tl.ceil(amount * visible_count.to(tl.float32) * ROUNDING_GUARD).to(tl.int32)
    return _at_least(bits, eligible, forced, tl.maximum(tl.maximum(min_blocks, 1), share), visible_count, 0, 0)


@triton.jit
def select_topcdf(bits, eligible, forced, amount, min_blocks, visible_count):
    """The best blocks until their probabilities sum to ``amount``, at least ``min_blocks``."""
    kept = _at_least(bits, eligible, forced, tl.maximum(min_blocks, 1), visible_count, 0, 0)
    return kept | _covering(tl.where(eligible, bits, -1), amount)


@triton.jit
def _selected(bits, eligible, forced, amount, min_blocks, visible_count, SELECTION: tl.constexpr):
    """What a rule that looks at one row keeps of its eligible blocks, [COLUMNS], by the rule's name.

    Args:
        bits: probabilities as integers.
        forced: blocks that are kept anyway, and take a place where they are eligible.
        amount: `rules.Selection.amount`.
    """
    if SELECTION == "topk":
        kept = select_topk(bits, eligible, forced, amount, min_blocks, visible_count)
    else:
        tl.static_assert(SELECTION == "topcdf")
        kept = select_topcdf(bits, eligible, forced, amount, min_blocks, visible_count)
    return kept


@triton.jit(do_not_specialize=NUMBERS)
def select_kernel(
    probability_ptr,
    always_ptr,
    exact_ptr,
    first_seen_ptr,
    kind_ptr,
    column_ptr,
    key_similarity_ptr,
    query_similarity_ptr,
    threshold_ptr,
    segments_ptr,
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
    first_seen_strides,
    kind_strides,
    column_strides,
    amount,
    many,
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
    rows_of_batch,
    parts,
    bias_columns,
    SELECTION: tl.constexpr,
    AMOUNT_PER_HEAD: tl.constexpr,
    SHARES: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
    SINK: tl.constexpr,
    DIAGONAL: tl.constexpr,
    HAS_ALWAYS: tl.constexpr,
    HAS_EXACT: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    HAS_SIMILARITY: tl.constexpr,
    PACKED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The kept blocks of one query block: kept = (selected of the eligible | forced | not eligible) & visible.

    Grid: query blocks of every head, in one dimension. COLUMNS is the power of two that holds a row, so that lengths
    share few variants.

    Reads
        what `load_row` reads
        amount            [H] float32 (AMOUNT_PER_HEAD), instead of the number
        count             [B * H, q_blocks] int32, what a row keeps of a budget
        kept, sums        of `count_kernel` (SHARES), instead
        block_bias        [B, Hkv, kv_blocks] float32, of `summarize_kernel` (WITH_BIAS)
    Writes, int32
        kv_num_blocks     [B * H, q_blocks], how many blocks are kept
        kv_indices        [B * H, q_blocks, kv_blocks], the kept ones in ascending order, then the others
        visible_num_blocks    [B * H, q_blocks]
        order             [B * rows], see `place_row` (SHARES)
    and in float32
        bias              [B * H * q_blocks, bias_columns] (WITH_BIAS), as `replaced_bias_kernel` does
    """
    row = tl.program_id(0).to(tl.int64)
    blocks = load_row(
        row,
        probability_ptr,
        always_ptr,
        exact_ptr,
        first_seen_ptr,
        kind_ptr,
        column_ptr,
        key_similarity_ptr,
        query_similarity_ptr,
        threshold_ptr,
        segments_ptr,
        first_seen_strides,
        kind_strides,
        column_strides,
        heads,
        group,
        q_len,
        kv_len,
        first_offset,
        last_offset,
        q_blocks,
        kv_blocks,
        HAS_FIRST,
        HAS_LAST,
        SINK,
        DIAGONAL,
        HAS_ALWAYS,
        HAS_EXACT,
        HAS_SEEN,
        HAS_BLOCKS,
        HAS_SIMILARITY,
        PACKED,
        COLUMNS,
    )
    columns = blocks.columns
    visible = blocks.visible
    visible_count = tl.sum(visible.to(tl.int32))
    if SELECTION == "budget":
        low = 0
        high = 0
        if SHARES:
            count, last = share_of_row(row, kept_ptr, sums_ptr, rows_of_batch, parts)
            if PACKED:
                top_level = segment_number(segments_ptr, row // rows_of_batch, TOP_LEVEL)
            low = (last + (top_level - LEVELS + 1)) * LEVEL_WIDTH
            high = low + LEVEL_WIDTH
            place_row(
                row,
                count,
                many,
                order_ptr,
                sums_ptr,
                segments_ptr,
                rows_of_batch,
                parts,
                heads,
                q_blocks,
                PACKED,
            )
        else:
            count = tl.load(count_ptr + row)
        kept = _at_least(blocks.bits, blocks.eligible, blocks.forced, count, visible_count, low, high)
    else:
        if AMOUNT_PER_HEAD:
            amount = tl.load(amount_ptr + row // q_blocks % heads)
        kept = _selected(blocks.bits, blocks.eligible, blocks.forced, amount, min_blocks, visible_count, SELECTION)
    kept = (kept | blocks.forced | (blocks.eligible == 0)) & visible

    kept_count = tl.sum(kept.to(tl.int32))
    kept_before = tl.cumsum(kept.to(tl.int32), 0) - kept.to(tl.int32)
    place = tl.where(kept, kept_before, kept_count + columns - kept_before)
    tl.store(kv_indices_ptr + row * kv_blocks + place, columns, mask=blocks.inside)
    tl.store(kv_num_blocks_ptr + row, kept_count)
    tl.store(visible_num_blocks_ptr + row, visible_count)
    if WITH_BIAS:
        replaced = has_mean(
            row,
            columns,
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
        replaced = replaced & (kept == 0)
        bias = tl.load(block_bias_ptr + row // q_blocks // group * kv_blocks + columns, replaced, float("-inf"))
        tl.store(bias_ptr + row * bias_columns + columns, bias, mask=columns < bias_columns)
        for start in range(COLUMNS, bias_columns, COLUMNS):
            nothing = tl.full((COLUMNS,), float("-inf"), tl.float32)
            tl.store(bias_ptr + row * bias_columns + start + columns, nothing, mask=start + columns < bias_columns)


class Selected(NamedTuple):
    """What `select` returns.

    Attributes:
        mask: the kept blocks of every row.
        order: (rows that exist,) int32, in which order rows are best computed, None where any will do.
        bias: of `operands.MeanOperands`, None where none was asked for.
    """

    mask: BlockMask
    order: Tensor | None
    bias: Tensor | None


def select(
    probability: Tensor,
    query_similarity: Tensor,
    key_similarity: Tensor | None,
    call: Call,
    first_seen: Tensor | None,
    threshold: Tensor | None,
    blocks: MaskBlocks | None = None,
    block_bias: Tensor | None = None,
) -> Selected:
    """The kept blocks of every row.

    Args:
        probability: of `score.block_probabilities`.
        query_similarity, key_similarity: (B * H, q_blocks) and (B * Hkv, kv_blocks) float32, read with a threshold.
        first_seen: of `visibility.first_seen_keys` where keys are hidden.
        threshold: (H,), similarity under which a query or key block is not eligible.
        blocks: of `mask_blocks.mask_blocks` where a mask has more to say than which keys are hidden.
        block_bias: of `summary.KeyValueSummary`, where means stand for the blocks that are not kept.

    Raises:
        NotImplementedError: the kernel does not know the rule.
    """
    rows = RowArguments(probability, query_similarity, key_similarity, call, first_seen, threshold, blocks)
    counts = count_budget(rows, call, call.shape.kv_blocks, shares=True) if call.selection.is_call_wide else None
    return select_rows(rows, call, None, counts, block_bias)


def select_rows(
    row_arguments: RowArguments,
    call: Call,
    counted: Tensor | None,
    budget: tuple[Tensor, Tensor] | None = None,
    block_bias: Tensor | None = None,
) -> Selected:
    """The kept blocks of every row; of a budget so many, (B, H, q_blocks) int32, or its share of ``budget``.

    Args:
        budget: of `count_budget`.

    Raises:
        NotImplementedError: the kernel does not know the rule.
    """
    shape, rule, probability = call.shape, call.selection, row_arguments.pointers["probability_ptr"]
    if rule.name not in SELECTIONS:
        raise NotImplementedError(f"sparsity on a GPU: expected one of {SELECTIONS}, got {rule.name!r}")
    amount = rule.amount
    amount_per_head = per_head_tensor(amount, shape, probability.device) if isinstance(amount, Tensor) else None
    rows = (shape.batch, shape.heads, shape.q_blocks)
    counts = buffer_like(probability, True, *rows, dtype=torch.int32)
    indices = buffer_like(probability, True, *rows, shape.kv_blocks, dtype=torch.int32)
    visible = buffer_like(probability, True, *rows, dtype=torch.int32)
    shares, with_bias = budget is not None, block_bias is not None
    kept, sums = (probability, probability) if budget is None else budget
    many_rows = counts.numel() if call.segments is None else call.segments.order.numel()
    order = buffer_like(probability, shares, many_rows, dtype=torch.int32)
    columns = bias_columns(shape.kv_blocks)
    bias = buffer_like(probability, with_bias, counts.numel(), columns)
    launch(
        select_kernel,
        shape.q_blocks * shape.batch * shape.heads,
        **row_arguments.pointers,
        amount_ptr=probability if amount_per_head is None else amount_per_head,
        count_ptr=probability if counted is None else counted,
        kept_ptr=kept,
        sums_ptr=sums,
        block_bias_ptr=probability if block_bias is None else block_bias,
        kv_num_blocks_ptr=counts,
        kv_indices_ptr=indices,
        visible_num_blocks_ptr=visible,
        bias_ptr=bias,
        order_ptr=order,
        **row_arguments.strides,
        amount=1.0 if isinstance(amount, Tensor) else float(amount),
        many=many_blocks(call) if shares else 0.0,
        **row_arguments.sizes,
        top_level=rules.budget_top(shape.kv_blocks),
        rows_of_batch=shape.heads * shape.q_blocks,
        parts=sums.shape[1] if shares else 0,
        bias_columns=columns,
        SELECTION=rule.name,
        AMOUNT_PER_HEAD=amount_per_head is not None,
        SHARES=shares,
        WITH_BIAS=with_bias,
        **row_arguments.constants,
        num_warps=configs.select_config().warps(row_arguments.columns),
    )
    mask = BlockMask(counts, indices, visible, shape.q_len, shape.kv_len, window=call.window)
    return Selected(mask, order if shares else None, bias if with_bias else None)
