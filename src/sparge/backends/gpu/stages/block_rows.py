"""Rows of the block map as the selection kernels see them: what is visible, forced, eligible, and how probable."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import power_of_two, segments_argument, window_flags, window_offsets
from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q, NOWHERE, segment_sizes
from sparge.backends.gpu.replay import constant
from sparge.backends.gpu.stages.mask_blocks import HIDDEN, MaskBlocks
from sparge.call import Call
from sparge.masks import geometry
from sparge.masks.geometry import ceil_div

SIZES = ["heads", "group", "q_len", "kv_len", "first_offset", "last_offset", "q_blocks", "kv_blocks", "min_blocks"]
INFINITY_BITS = tl.constexpr(0x7F800000)


class Blocks(NamedTuple):
    """The blocks of one row, [COLUMNS] each.

    Fields:
        columns: their numbers.
        inside: whether they exist.
        bits: probabilities as integers, which order alike.
        visible: some query of the row may see some key.
        eligible: visible, and a rule may choose them: a summary speaks for them.
        forced: kept whatever their score, if they are visible.
    """

    columns: Any
    inside: Any
    bits: Any
    visible: Any
    eligible: Any
    forced: Any


@triton.jit
def load_row(
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
    """`Blocks` of one query block; ``row`` (int64) counts those of all heads. COLUMNS is a power of two that holds it.

    Query i sees keys from i + first_offset (HAS_FIRST, without HAS_SEEN) to i + last_offset (HAS_LAST).

    Reads
        probability       [B * H, q_blocks, kv_blocks] float32, of `score_kernel`; NaN forces a block
        always            [kv_blocks] int8 (HAS_ALWAYS), blocks that every row keeps
        exact             [q_blocks] int8 (HAS_EXACT), rows that keep every block
        first_seen        [B, H, kv_blocks] int32 (HAS_SEEN), of `first_seen_keys`
        kind              [B, H, q_blocks, kv_blocks] int8 (HAS_BLOCKS, without HAS_SEEN) and column [B, H, kv_blocks]
                          int8 (SINK besides), of `mask_blocks`
        key_similarity    [B * Hkv, kv_blocks], query_similarity [B * H, q_blocks] and threshold [H], float32
                          (HAS_SIMILARITY): blocks below it are dissimilar, and not eligible
        segments          of `Segments.table` (PACKED); a row that its segment does not have sees nothing
    """
    q_block = (row % q_blocks).to(tl.int32)
    flat_head = row // q_blocks
    batch = flat_head // heads
    head = flat_head % heads
    first_query = q_block * BLOCK_Q
    columns = tl.arange(0, COLUMNS)
    inside = columns < kv_blocks
    if PACKED:
        q_len, kv_len, first_offset, last_offset = segment_sizes(segments_ptr, batch, first_offset, last_offset)
        inside = columns < tl.where(first_query < q_len, tl.cdiv(kv_len, BLOCK_K), 0)
    last_query = tl.minimum((q_block + 1) * BLOCK_Q, q_len) - 1
    first_key = columns * BLOCK_K
    last_key = tl.minimum(first_key + BLOCK_K, kv_len) - 1
    visible = inside
    seen_from = first_key
    if HAS_SEEN:
        seen_base = first_seen_ptr + batch * first_seen_strides[0] + head * first_seen_strides[1]
        seen_from = tl.load(seen_base + columns, mask=inside, other=NOWHERE)
        visible = visible & (seen_from < NOWHERE)
    if HAS_BLOCKS:  # the window is in it
        tl.static_assert(not HAS_SEEN)
        kinds = kind_ptr + batch * kind_strides[0] + head * kind_strides[1] + q_block.to(tl.int64) * kind_strides[2]
        visible = tl.load(kinds + columns, mask=inside, other=HIDDEN) != HIDDEN
    else:
        if HAS_LAST:
            visible = visible & (seen_from <= last_query + last_offset)
        if HAS_FIRST:
            tl.static_assert(not HAS_SEEN)
            visible = visible & (last_key >= first_query + first_offset)

    bits = tl.load(probability_ptr + row * kv_blocks + columns, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    forced = (bits & 0x7FFFFFFF) > INFINITY_BITS  # NaN: the score was not finite
    bits = tl.where(forced, 0, bits)
    if SINK:
        sink = 0
        if HAS_SEEN:  # padding on the left
            sink = tl.min(tl.where(seen_from < NOWHERE, columns, COLUMNS), 0)
        if HAS_BLOCKS:
            reached = column_ptr + batch * column_strides[0] + head * column_strides[1] + columns
            sink = tl.min(tl.where(tl.load(reached, mask=inside, other=0) != 0, columns, COLUMNS), 0)
        forced = forced | (columns == sink)
    if DIAGONAL:
        diagonal = kv_len - q_len
        forced = forced | ((first_key <= last_query + diagonal) & (first_query + diagonal < first_key + BLOCK_K))
    unfinished = columns < 0  # its summary knows of keys outside of the window, of the future
    if HAS_LAST:
        last_seen = last_query + last_offset
        unfinished = (first_key <= last_seen) & (last_seen < last_key)
    if HAS_FIRST:
        first_seen = first_query + first_offset
        unfinished = unfinished | ((first_key < first_seen) & (first_seen <= last_key))
    if HAS_LAST or HAS_FIRST:
        forced = forced | unfinished
    if HAS_ALWAYS:
        forced = forced | (tl.load(always_ptr + columns, mask=inside, other=0) != 0)
    if HAS_EXACT:
        forced = forced | (inside & (tl.load(exact_ptr + q_block) != 0))

    eligible = visible
    if HAS_SIMILARITY:
        threshold = tl.load(threshold_ptr + head)
        similarity = tl.load(key_similarity_ptr + (flat_head // group) * kv_blocks + columns, mask=inside, other=1.0)
        row_similarity = tl.load(query_similarity_ptr + row)
        eligible = eligible & ((similarity < threshold) == 0) & ((row_similarity < threshold) == 0)
        eligible = eligible | (visible & unfinished)  # such a block takes a place whatever its keys are
    return Blocks(columns, inside, bits, visible, eligible, forced)


class RowArguments:
    """What every kernel that calls `load_row` is launched with, in the order of kernels' signatures."""

    def __init__(
        self,
        probability: Tensor,
        query_similarity: Tensor,
        key_similarity: Tensor | None,
        call: Call,
        first_seen: Tensor | None,
        threshold: Tensor | None,
        blocks: MaskBlocks | None,
    ) -> None:
        """See `select.select`."""
        shape, rules = call.shape, call.selection
        marks = marks_of(call, probability.device)
        always, exact = (probability if marked is None else marked for marked in marks)
        column = None if blocks is None else blocks.column
        self.columns = max(32, power_of_two(shape.kv_blocks))
        self.pointers = {
            "probability_ptr": probability,
            "always_ptr": always,
            "exact_ptr": exact,
            "first_seen_ptr": probability if first_seen is None else first_seen,
            "kind_ptr": probability if blocks is None else blocks.kind,
            "column_ptr": probability if column is None else column,
            "key_similarity_ptr": probability if key_similarity is None else key_similarity,
            "query_similarity_ptr": query_similarity,
            "threshold_ptr": probability if threshold is None else threshold,
            "segments_ptr": segments_argument(call, probability),
        }
        self.strides = {
            "first_seen_strides": (0, 0) if first_seen is None else first_seen.stride()[:2],
            "kind_strides": (0, 0, 0) if blocks is None else blocks.kind.stride()[:3],
            "column_strides": (0, 0) if column is None else column.stride()[:2],
        }
        self.sizes = {
            "heads": shape.heads,
            "group": shape.group,
            "q_len": shape.q_len,
            "kv_len": shape.kv_len,
            **window_offsets(call),
            "q_blocks": shape.q_blocks,
            "kv_blocks": shape.kv_blocks,
            "min_blocks": min(rules.min_blocks, shape.kv_blocks),
        }
        self.constants = {
            **window_flags(call),
            "SINK": rules.keeps_sink(call.is_causal),
            "DIAGONAL": rules.keeps_diagonal(call.is_causal),
            "HAS_ALWAYS": bool(call.always_keep),
            "HAS_EXACT": bool(call.exact_queries),
            "HAS_SEEN": first_seen is not None,
            "HAS_BLOCKS": blocks is not None,
            "HAS_SIMILARITY": threshold is not None,
            "PACKED": call.segments is not None,
            "COLUMNS": self.columns,
        }


def marks_of(call: Call, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return key blocks that every row keeps and rows that keep all, int8 with 1 for those; None without ranges."""
    always = _marked(call.always_keep, call.shape.kv_blocks, geometry.BLOCK_K, device)
    exact = _marked(call.exact_queries, call.shape.q_blocks, geometry.BLOCK_Q, device)
    return always, exact


def _marked(ranges: tuple[tuple[int, int], ...], blocks: int, size: int, device: torch.device) -> Tensor | None:
    """Return int8 (blocks,), 1 for those that hold tokens of the ranges."""
    if not ranges:
        return None

    def make() -> Tensor:
        marks = torch.zeros(blocks, dtype=torch.int8, device=device)
        for start, stop in ranges:
            marks[start // size : ceil_div(stop, size)] = 1
        return marks

    return constant(("marked", ranges, blocks, size), device, make)
