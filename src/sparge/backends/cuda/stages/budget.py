"""One budget for all rows of a batch element: where it ends, found by counting.

Probabilities as integers are cut into a quarter of an octave (the high part), 512 steps of it (the low part), and what
is ignored. Three passes over all rows find the last place of a budget, without a sort, without waiting for the host:

    HIGH    what each row is sure of; a histogram of the high parts of the rest -> the high part of the last place
    LOW     a histogram of the low parts below it -> the order of the last place, how many are tied there
    TIES    ties of each row -> how many come before each row, by which they are shared out

The last program of a pass to finish reads what all have added up. `within_budget` then tells each row what it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge import config
from sparge.backends.cuda.launch import buffer_like, launch, zeros_like
from sparge.backends.cuda.stages import configs
from sparge.backends.cuda.stages.block_rows import SIZES, RowArguments, load_row
from sparge.call import Call
from sparge.geometry import ceil_div

NUMBERS = ["amount", *SIZES, "rows_of_batch", "programs_of_batch"]
TIE_BITS = tl.constexpr(config.TIE_BITS)
COARSE_BITS = tl.constexpr(config.COARSE_BITS)
GUARANTEED = tl.constexpr(config.GUARANTEED)
ROUNDING_GUARD = tl.constexpr(config.ROUNDING_GUARD)
BINS = tl.constexpr(1 << (config.COARSE_BITS - config.TIE_BITS))
"""Of both histograms: a probability of at most 1 has 509 high parts, each of them 512 low ones."""
NONE = tl.constexpr(1 << 30)
"""Above every order: nothing has it."""

PASSES = ("HIGH", "LOW", "TIES")
# What is found, one number each for every batch element.
PLACES, ORDER, TIES, FOUND = (tl.constexpr(i) for i in range(4))
# What is counted for each of them, before its two histograms.
VISIBLE, SURE, DONE, COUNTERS = (tl.constexpr(i) for i in (0, 1, 2, 8))
CHUNK = tl.constexpr(1024)


@triton.jit
def _is_sure(blocks, coarse, stop):
    """Blocks that a row keeps whatever the others need, [COLUMNS]: forced ones, the best, and what it was sure of.

    Args:
        coarse, stop: of the row: the high part that its guaranteed share ends in, and the column before which.
    """
    free = blocks.eligible & (blocks.forced == 0)
    high = blocks.bits >> COARSE_BITS
    best = _best_column(blocks)
    is_guaranteed = (high > coarse) | ((high == coarse) & (blocks.columns < stop)) | (blocks.columns == best)
    return (blocks.eligible & blocks.forced) | (free & is_guaranteed)


@triton.jit
def _best_column(blocks):
    """The most probable eligible block of a row, the first of several; -1 where one is forced, or none is eligible."""
    size: tl.constexpr = blocks.columns.shape[0]
    has_forced = tl.max((blocks.eligible & blocks.forced).to(tl.int32), 0)
    bits = tl.where(blocks.eligible, blocks.bits, -1)
    largest = tl.max(bits, 0)
    column = tl.min(tl.where(bits == largest, blocks.columns, size), 0)
    return tl.where((has_forced == 1) | (largest < 0), -1, column)


@triton.jit
def _histogram(values, counted):
    """How many of the counted values, [COLUMNS], are 0, 1, ... [BINS]."""
    hidden = values.shape[0] - tl.sum(counted.to(tl.int32))
    counts = tl.histogram(tl.where(counted, values, 0), BINS)
    return counts - tl.where(tl.arange(0, BINS) == 0, hidden, 0)


@triton.jit
def _last_place(counts, places):
    """Of a histogram: the bin of the last of so many places from the top, and how many of them are in that bin."""
    bins = tl.arange(0, BINS)
    at_or_above = tl.cumsum(counts, 0, reverse=True)
    last = tl.max(tl.where(at_or_above >= places, bins, 0), 0)
    above = tl.sum(tl.where(bins > last, counts, 0), 0)
    return last, places - above


@triton.jit
def _guarantee(blocks, amount, min_blocks, visible_count):
    """The high part and the column at which the guaranteed share of a row ends, and a histogram of what is not sure."""
    best = _best_column(blocks)
    rest = blocks.eligible & (blocks.forced == 0) & (blocks.columns != best)
    high = blocks.bits >> COARSE_BITS
    counts = _histogram(high, rest)
    share = tl.ceil(amount * visible_count.to(tl.float32) * (GUARANTEED * ROUNDING_GUARD)).to(tl.int32)
    share = tl.minimum(tl.maximum(tl.maximum(share, min_blocks), 1), visible_count)
    sure = tl.sum((blocks.eligible & blocks.forced).to(tl.int32)) + (best >= 0).to(tl.int32)
    competing = tl.sum(counts, 0)
    places = tl.minimum(tl.maximum(share - sure, 0), competing)
    coarse, left = _last_place(counts, tl.maximum(places, 1))
    left = tl.where(places > 0, left, 0)
    coarse = tl.where(places > 0, coarse, BINS)
    in_last = rest & (high == coarse)
    before = tl.cumsum(in_last.to(tl.int32), 0)
    stop = tl.sum((before < left).to(tl.int32), 0) + 1  # the column that holds the last of them, and one
    bins = tl.arange(0, BINS)
    counts = tl.where(bins > coarse, 0, counts - tl.where(bins == coarse, left, 0))
    return coarse, tl.where(left > 0, stop, 0), counts, sure + places


@triton.jit(do_not_specialize=NUMBERS)
def budget_kernel(
    probability_ptr,
    always_ptr,
    first_seen_ptr,
    key_similarity_ptr,
    query_similarity_ptr,
    threshold_ptr,
    counters_ptr,
    found_ptr,
    sure_ptr,
    ties_before_ptr,
    first_seen_strides,
    amount,
    heads,
    group,
    q_len,
    kv_len,
    q_blocks,
    kv_blocks,
    min_blocks,
    rows_of_batch,
    programs_of_batch,
    PASS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    SINK: tl.constexpr,
    DIAGONAL: tl.constexpr,
    HAS_ALWAYS: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    HAS_SIMILARITY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One pass over all rows: see the top of this module.

    Grid: groups of ROWS rows of every batch element, in one dimension.

    Reads what `load_row` reads. Reads and writes, int32
        counters       [B, COUNTERS + 2 * BINS], 0 before the first pass: visible blocks, sure blocks, programs that
                       have finished each pass; histograms of the high and of the low parts
        found          [B, FOUND]: places that are left below what was found, the order of the last place, ties there
        sure           [B * rows, 2]: where the guaranteed share of a row ends, high part and column
        ties_before    [B * rows]: ties of a row, then of all rows of its batch element before it
    """
    batch = (tl.program_id(0) // programs_of_batch).to(tl.int64)
    first_row = tl.program_id(0) % programs_of_batch * ROWS
    bins = tl.arange(0, BINS)
    counters = counters_ptr + batch * (COUNTERS + 2 * BINS)
    found = found_ptr + batch * FOUND
    histogram = counters + COUNTERS
    if PASS == "LOW":
        histogram += BINS
    total = tl.zeros((BINS,), tl.int32)
    visible_total = 0
    sure_total = 0
    order = 0
    if PASS != "HIGH":
        order = tl.load(found + ORDER)
    for step in range(ROWS):
        if first_row + step < rows_of_batch:
            row = batch * rows_of_batch + first_row + step
            blocks = load_row(
                row,
                probability_ptr,
                always_ptr,
                first_seen_ptr,
                key_similarity_ptr,
                query_similarity_ptr,
                threshold_ptr,
                first_seen_strides,
                heads,
                group,
                q_len,
                kv_len,
                q_blocks,
                kv_blocks,
                IS_CAUSAL,
                SINK,
                DIAGONAL,
                HAS_ALWAYS,
                HAS_SEEN,
                HAS_SIMILARITY,
                COLUMNS,
            )
            if PASS == "HIGH":
                visible_count = tl.sum(blocks.visible.to(tl.int32))
                coarse, stop, counts, sure = _guarantee(blocks, amount, min_blocks, visible_count)
                tl.store(sure_ptr + 2 * row, coarse)
                tl.store(sure_ptr + 2 * row + 1, stop)
                total += counts
                visible_total += visible_count
                sure_total += sure
            else:
                is_sure = _is_sure(blocks, tl.load(sure_ptr + 2 * row), tl.load(sure_ptr + 2 * row + 1))
                rest = blocks.eligible & (is_sure == 0)
                own = blocks.bits >> TIE_BITS
                if PASS == "LOW":
                    total += _histogram(own % BINS, rest & (own // BINS == order))
                else:
                    tl.store(ties_before_ptr + row, tl.sum((rest & (own == order)).to(tl.int32)))
    if PASS != "TIES":
        tl.atomic_add(histogram + bins, total, mask=total > 0, sem="relaxed")
    if PASS == "HIGH":
        tl.atomic_add(counters + VISIBLE, visible_total, sem="relaxed")
        tl.atomic_add(counters + SURE, sure_total, sem="relaxed")
    tl.debug_barrier()  # what other threads of this program have added comes before the program is counted
    number: tl.constexpr = 0 if PASS == "HIGH" else 1 if PASS == "LOW" else 2
    finished = tl.atomic_add(counters + DONE + number, 1, sem="acq_rel")
    if finished == programs_of_batch - 1:
        tl.debug_barrier()
        if PASS == "TIES":
            before = 0
            for start in range(0, rows_of_batch, CHUNK):
                rows = start + tl.arange(0, CHUNK)
                pointers = ties_before_ptr + batch * rows_of_batch + rows
                ties = tl.load(pointers, mask=rows < rows_of_batch, other=0, cache_modifier=".cg")
                tl.store(pointers, before + tl.cumsum(ties, 0) - ties, mask=rows < rows_of_batch)
                before += tl.sum(ties, 0)
        else:
            counts = tl.load(histogram + bins, cache_modifier=".cg")
            competing = tl.sum(counts, 0)
            if PASS == "HIGH":
                visible = tl.load(counters + VISIBLE, cache_modifier=".cg").to(tl.float64)
                wanted = tl.ceil(visible * amount * ROUNDING_GUARD).to(tl.int32)
                places = wanted - tl.load(counters + SURE, cache_modifier=".cg")
                places = tl.minimum(places, competing)
            else:
                places = tl.load(found + PLACES)
            last, left = _last_place(counts, tl.maximum(places, 1))
            tl.store(found + PLACES, tl.where(places > 0, left, 0))
            if PASS == "LOW":
                last += order * BINS
                tl.store(found + TIES, tl.sum(tl.where(bins + order * BINS == last, counts, 0), 0))
            tl.store(found + ORDER, tl.where(places > 0, last, NONE // BINS if PASS == "HIGH" else NONE))


@triton.jit
def within_budget(row, batch, blocks, found_ptr, sure_ptr, ties_before_ptr):
    """What a row keeps of its eligible blocks, [COLUMNS]."""
    is_sure = _is_sure(blocks, tl.load(sure_ptr + 2 * row), tl.load(sure_ptr + 2 * row + 1))
    found = found_ptr + batch * FOUND
    order = tl.load(found + ORDER)
    places = tl.load(found + PLACES).to(tl.int64)
    ties = tl.maximum(tl.load(found + TIES), 1).to(tl.int64)
    rest = blocks.eligible & (is_sure == 0)
    own = blocks.bits >> TIE_BITS
    tied = rest & (own == order)
    before = tl.load(ties_before_ptr + row).to(tl.int64)
    after = before + tl.sum(tied.to(tl.int32), 0)
    share = (after * places // ties - before * places // ties).to(tl.int32)
    if share > 0:  # noqa: SIM108
        tied = tied & (tl.cumsum(tied.to(tl.int32), 0) <= share)
    else:
        tied = tied & (blocks.columns < 0)
    return is_sure | (rest & (own > order)) | tied


@dataclass(frozen=True)
class BudgetEnd:
    """What `budget_kernel` has found: see there."""

    found: Tensor
    sure: Tensor
    ties_before: Tensor


def find_budget(rows: RowArguments, call: Call) -> BudgetEnd:
    """Where the budget of each batch element ends."""
    shape, like = call.shape, rows.pointers["probability_ptr"]
    rows_of_batch = shape.heads * shape.q_blocks
    setting = configs.budget_config()
    programs = ceil_div(rows_of_batch, setting.rows)
    end = BudgetEnd(
        found=buffer_like(like, True, shape.batch, FOUND.value, dtype=torch.int32),
        sure=buffer_like(like, True, shape.batch, rows_of_batch, 2, dtype=torch.int32),
        ties_before=buffer_like(like, True, shape.batch, rows_of_batch, dtype=torch.int32),
    )
    counters = zeros_like(like, shape.batch, COUNTERS.value + 2 * BINS.value, dtype=torch.int32)
    for number in PASSES:
        launch(
            budget_kernel,
            programs * shape.batch,
            **rows.pointers,
            counters_ptr=counters,
            found_ptr=end.found,
            sure_ptr=end.sure,
            ties_before_ptr=end.ties_before,
            **rows.strides,
            amount=float(call.selection.amount),
            **rows.sizes,
            rows_of_batch=rows_of_batch,
            programs_of_batch=programs,
            PASS=number,
            ROWS=setting.rows,
            **rows.constants,
            num_warps=configs.select_config().warps(rows.columns),
        )
    return end
