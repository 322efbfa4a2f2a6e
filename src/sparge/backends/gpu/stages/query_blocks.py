"""Load the key blocks of one query block for the selection kernels: visible and forced blocks, probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import power_of_two, segments_argument
from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q, NOWHERE, head_base, segment_sizes
from sparge.backends.gpu.replay import constant
from sparge.backends.gpu.stages.arguments import WindowSpec, sizes_of, spec_of, tensor_and_strides, tensor_or
from sparge.backends.gpu.stages.mask_blocks import HIDDEN, MaskFacts
from sparge.call import Call
from sparge.masks import geometry
from sparge.masks.geometry import ceil_div

INFINITY_BITS = tl.constexpr(0x7F800000)


class SelectionPointers(NamedTuple):
    """Inputs of the selection kernels."""

    probability: Any  # [B * H, q_blocks, kv_blocks] float32, from `score_kernel`; NaN forces a block
    always: Any  # [kv_blocks] int8, 1 for blocks that every query block keeps (SPEC.has_always)
    exact: Any  # [q_blocks] int8, 1 for query blocks that keep every block (SPEC.has_exact)
    first_seen: Any  # [B, H, kv_blocks] int32, see `visibility.first_seen_keys` (SPEC.has_seen)
    kind: Any  # [B, H, q_blocks, kv_blocks] int8, see `mask_blocks` (SPEC.has_blocks, which excludes has_seen)
    column: Any  # [B, H, kv_blocks] int8, see `mask_blocks` (SPEC.has_blocks and SPEC.sink)
    # key_similarity, query_similarity, threshold: [B * Hkv, kv_blocks], [B * H, q_blocks] and [H] float32: blocks below
    # the threshold are not eligible (SPEC.has_similarity)
    key_similarity: Any
    query_similarity: Any
    threshold: Any
    segments: Any  # `Segments.table`; query blocks after the end of their segment see nothing (SPEC.packed)


@dataclass(frozen=True)
class SelectionSpec(WindowSpec):
    """Compile-time values of the selection kernels."""

    # sink, diagonal: each query block keeps the first visible block, and the blocks on its diagonal
    sink: bool
    diagonal: bool
    # has_always, has_exact, has_seen, has_blocks, has_similarity: see `SelectionPointers`
    has_always: bool
    has_exact: bool
    has_seen: bool
    has_blocks: bool
    has_similarity: bool
    columns: int  # number of key blocks padded to a power of two, so that few variants serve all lengths


class KeyBlocks(NamedTuple):
    """The key blocks of one query block, [COLUMNS] each."""

    columns: Any  # indices of the blocks
    inside: Any  # True for blocks that exist
    bits: Any  # float32 bits of the probabilities, integers in the same order
    visible: Any  # True for blocks in which some query sees some key
    eligible: Any  # True for visible blocks that a rule may select, because their mean represents them well enough
    forced: Any  # True for blocks that are kept regardless of their score, if visible


@triton.jit
def load_blocks(flat_q_block, ptrs, strides, sizes, SPEC: tl.constexpr):
    """Return the `KeyBlocks` of one query block.

    Args:
        flat_q_block: index of the query block over all heads, int64.
        ptrs: `SelectionPointers`.
        strides: strides of ``first_seen``, ``kind`` and ``column``, without the last dimension.
        sizes: `arguments.Sizes`.
    """
    first_seen_strides, kind_strides, column_strides = strides
    heads, group, q_len, kv_len, first_offset, last_offset, q_blocks, kv_blocks = sizes
    COLUMNS: tl.constexpr = SPEC.columns
    # Coordinates
    q_block = (flat_q_block % q_blocks).to(tl.int32)
    flat_head = flat_q_block // q_blocks
    batch = flat_head // heads
    head = flat_head % heads
    first_query = q_block * BLOCK_Q
    columns = tl.arange(0, COLUMNS)
    inside = columns < kv_blocks
    if SPEC.packed:
        q_len, kv_len, first_offset, last_offset = segment_sizes(ptrs.segments, batch, first_offset, last_offset)
        inside = columns < tl.where(first_query < q_len, tl.cdiv(kv_len, BLOCK_K), 0)
    last_query = tl.minimum((q_block + 1) * BLOCK_Q, q_len) - 1
    first_key = columns * BLOCK_K
    last_key = tl.minimum(first_key + BLOCK_K, kv_len) - 1

    # Visible blocks
    visible = inside
    seen_from = first_key
    if SPEC.has_seen:
        seen_base = head_base(ptrs.first_seen, first_seen_strides, batch, head)
        seen_from = tl.load(seen_base + columns, mask=inside, other=NOWHERE)
        visible = visible & (seen_from < NOWHERE)
    if SPEC.has_blocks:  # the kinds include the window
        tl.static_assert(not SPEC.has_seen)
        kind_ptrs = head_base(ptrs.kind, kind_strides, batch, head) + q_block.to(tl.int64) * kind_strides[2]
        visible = tl.load(kind_ptrs + columns, mask=inside, other=HIDDEN) != HIDDEN
    else:
        if SPEC.has_last:
            visible = visible & (seen_from <= last_query + last_offset)
        if SPEC.has_first:
            tl.static_assert(not SPEC.has_seen)
            visible = visible & (last_key >= first_query + first_offset)

    # Forced blocks
    probability = tl.load(ptrs.probability + flat_q_block * kv_blocks + columns, mask=inside, other=0.0)
    bits = probability.to(tl.int32, bitcast=True)
    forced = (bits & 0x7FFFFFFF) > INFINITY_BITS  # NaN: the score was not finite
    bits = tl.where(forced, 0, bits)
    if SPEC.sink:
        sink = 0
        if SPEC.has_seen:  # the first keys may be padding
            sink = tl.min(tl.where(seen_from < NOWHERE, columns, COLUMNS), 0)
        if SPEC.has_blocks:
            reached = head_base(ptrs.column, column_strides, batch, head) + columns
            sink = tl.min(tl.where(tl.load(reached, mask=inside, other=0) != 0, columns, COLUMNS), 0)
        forced = forced | (columns == sink)
    if SPEC.diagonal:
        diagonal = kv_len - q_len
        forced = forced | ((first_key <= last_query + diagonal) & (first_query + diagonal < first_key + BLOCK_K))
    # The mean of a block on the edge of the window would include keys outside of it, such as future keys.
    on_edge = columns < 0
    if SPEC.has_last:
        last_seen = last_query + last_offset
        on_edge = (first_key <= last_seen) & (last_seen < last_key)
    if SPEC.has_first:
        first_seen = first_query + first_offset
        on_edge = on_edge | ((first_key < first_seen) & (first_seen <= last_key))
    if SPEC.has_last or SPEC.has_first:
        forced = forced | on_edge
    if SPEC.has_always:
        forced = forced | (tl.load(ptrs.always + columns, mask=inside, other=0) != 0)
    if SPEC.has_exact:
        forced = forced | (inside & (tl.load(ptrs.exact + q_block) != 0))

    # Eligible blocks
    eligible = visible
    if SPEC.has_similarity:
        threshold = tl.load(ptrs.threshold + head)
        similarity_ptrs = ptrs.key_similarity + (flat_head // group) * kv_blocks + columns
        similarity = tl.load(similarity_ptrs, mask=inside, other=1.0)
        query_similarity = tl.load(ptrs.query_similarity + flat_q_block)
        eligible = eligible & ((similarity < threshold) == 0) & ((query_similarity < threshold) == 0)
        eligible = eligible | (visible & on_edge)  # blocks on the edge count as eligible, whatever their similarity
    return KeyBlocks(columns, inside, bits, visible, eligible, forced)


class SelectionArguments:
    """Launch arguments shared by all kernels that call `load_blocks`."""

    def __init__(
        self,
        probability: Tensor,
        query_similarity: Tensor,
        key_similarity: Tensor | None,
        call: Call,
        mask: MaskFacts | None,
        threshold: Tensor | None,
    ) -> None:
        """See `select.select`."""
        shape, rules = call.shape, call.selection
        facts = (None, None, None) if mask is None else (mask.first_seen, mask.kind, mask.column)
        first_seen, first_seen_strides = tensor_and_strides(facts[0], 2, probability)
        kind, kind_strides = tensor_and_strides(facts[1], 3, probability)
        column, column_strides = tensor_and_strides(facts[2], 2, probability)
        self.columns = max(32, power_of_two(shape.kv_blocks))
        self.probability = probability
        self.ptrs = SelectionPointers(
            probability=probability,
            always=tensor_or(_marked(call.always_keep, shape.kv_blocks, geometry.BLOCK_K, probability), probability),
            exact=tensor_or(_marked(call.exact_queries, shape.q_blocks, geometry.BLOCK_Q, probability), probability),
            first_seen=first_seen,
            kind=kind,
            column=column,
            key_similarity=tensor_or(key_similarity, probability),
            query_similarity=query_similarity,
            threshold=tensor_or(threshold, probability),
            segments=segments_argument(call, probability),
        )
        self.strides = first_seen_strides, kind_strides, column_strides
        self.sizes = {**sizes_of(call), "min_blocks": min(rules.min_blocks, shape.kv_blocks)}
        self.spec = SelectionSpec(
            **spec_of(call),
            sink=rules.keeps_sink(call.is_causal),
            diagonal=rules.keeps_diagonal(call.is_causal),
            has_always=bool(call.always_keep),
            has_exact=bool(call.exact_queries),
            has_seen=facts[0] is not None,
            has_blocks=facts[1] is not None,
            has_similarity=threshold is not None,
            columns=self.columns,
        )


def _marked(ranges: tuple[tuple[int, int], ...], blocks: int, size: int, like: Tensor) -> Tensor | None:
    """Return int8 (blocks,), 1 for each block of ``size`` tokens that overlaps a range; None without ranges."""
    if not ranges:
        return None

    def make() -> Tensor:
        marks = torch.zeros(blocks, dtype=torch.int8, device=like.device)
        for start, stop in ranges:
            marks[start // size : ceil_div(stop, size)] = 1
        return marks

    return constant(("marked", ranges, blocks, size), like.device, make)
