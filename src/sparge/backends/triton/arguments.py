"""Groups of kernel arguments: tensors, their strides, and compile-time values.

Lengths and other numbers are separate arguments: inside a tuple, Triton would specialize the kernel on their values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparge.backends.gpu.primitives import head_base
from sparge.backends.gpu.stages.arguments import WindowSpec


class OperandPointers(NamedTuple):
    """Q, K and V, with their scales: see `operands.Operands`. Unquantized tensors have no scales."""

    # query, key: [B, H | Hkv, Sq | Sk, D], or INT8 values padded to whole blocks
    query: Any
    key: Any
    value: Any  # [B, Hkv, Sk, Dv]; or FP8 values [B, Hkv, Dv padded, Sk padded], keys in `fp8_token_order`
    query_scale: Any  # [B * H, q_blocks * 128] float32, with the softmax scale and log2 e
    key_scale: Any  # [B * Hkv, kv_blocks, 4] float32; negative if the block has a shared peak (`gpu.stages.peaks`)
    value_scale: Any  # [B * Hkv, Dv padded] float32 (FP8 values)
    lse_shift: Any  # [B * H, Sq] float32 in nats, subtracted from all scores of a query by smoothing K


class ExactPointers(NamedTuple):
    """Unquantized Q and K, for coarse tiles (`coarse`)."""

    # query, key: [B, H | Hkv, Sq | Sk, D]
    query: Any
    key: Any
    largest_key_scale: Any  # [B * Hkv] int32, the largest key scale of a head as float32 bits


class MaskPointers(NamedTuple):
    """The caller's mask, and what earlier stages computed from it."""

    entries: Any  # [B, H, Sq | 1, Sk] bool or additive (SPEC.mask)
    kind: Any  # [B, H, q_blocks, kv_blocks] int8, of `mask_blocks` (SPEC.has_kinds)
    seen: Any  # [B, Hkv, Sk] bool, keys that some query sees (SPEC.mask)


class MeanPointers(NamedTuple):
    """Means of key blocks, which replace skipped blocks: see `operands.MeanOperands` (SPEC.mean_width)."""

    key: Any
    value: Any
    key_scale: Any
    exact_key: Any
    bias: Any


class ResultPointers(NamedTuple):
    """Outputs of the kernel."""

    output: Any  # [B, H, Sq, Dv]; SPEC.tokens_first [B, Sq, H, Dv]; SPEC.packed [total_q, H, Dv]
    lse: Any  # [B, H, Sq] float32; SPEC.packed [H, total_q]
    # [3] int64, to which the kernel adds kept blocks, visible blocks, and halves of kept blocks whose P V product was
    # skipped (SPEC.counts_blocks)
    totals: Any


class Strides(NamedTuple):
    """Strides of batch, head and token of each tensor, unless a comment names other dimensions."""

    query: Any
    key: Any
    value: Any
    exact_query: Any
    exact_key: Any
    mean_key: Any  # batch, head, block
    mean_value: Any  # batch, head, block; FP8 values: batch, head, channel
    mask: Any  # batch, head, query, key
    kind: Any  # batch, head, query block
    seen: Any


@dataclass(frozen=True)
class AttentionSpec(WindowSpec):
    """Compile-time values of the attention kernel. ``packed`` needs ``ordered`` and ``tokens_first``.

    Triton caches a kernel by its source and the ``repr`` of this object, so derived values are fields, not properties.
    Triton 3.6 rejects a plain integer in the shape of a tensor: kernels first assign such fields to a `tl.constexpr`.
    """

    quantization: str  # "none", "int8_fp16" or "int8_fp8"
    is_quantized: bool  # Q and K are INT8
    has_fp8_values: bool  # V is FP8
    # head_dim, value_dim: channels of Q and K, and of V
    head_dim: int
    value_dim: int
    # head_dim_padded, value_dim_padded: the same padded to powers of two
    head_dim_padded: int
    value_dim_padded: int
    coarse_unit: float  # a tile is coarse if one unit of the INT8 product is at least this many log2 units
    log2_one: float  # log2 of the number that represents P = 1
    dot_precision: str  # "tf32x3" for float32 inputs
    mask: str  # "none", "bool" or "additive"
    mask_per_query: bool  # the mask has an entry for each query
    has_kinds: bool  # `MaskPointers.kind` is given
    lowest: float  # lowest finite number of an additive mask's dtype, which hides a key like -inf
    has_threshold: bool  # P V is skipped if all scores of a step are far below their row maximum
    peaks: str  # "ignored", "every_tile" or "marked" (`gpu.peak_handling`)
    all_blocks: bool  # every visible block is kept, and no lists are read
    ordered: bool  # query blocks are computed in the order of `ListPointers.order`
    tokens_first: bool  # the heads of a token are adjacent in the output
    mean_width: int  # channels of a mean value in memory; 0 where skipped blocks are dropped
    counts_blocks: bool  # the kernel adds to ``totals``
    block_m: int  # queries of one program
    blocks: int  # key blocks of one step, 1 or 2
    stages: int  # depth of the pipeline


class Queries(NamedTuple):
    """The queries of a program."""

    tile: Any  # [BLOCK_M, HEAD_DIM]
    scale: Any  # [BLOCK_M], factor of the INT8 products; a scalar without quantization
    positions: Any  # [BLOCK_M]


class Head(NamedTuple):
    """Pointers to a head's keys, key scales and values, and the strides of a token (FP8 values: of a channel)."""

    key_base: Any
    key_stride: Any
    key_scale_base: Any
    value_base: Any
    value_stride: Any


class HeadMask(NamedTuple):
    """Pointers to a head's mask, to the kinds of the query block's key blocks, and to the flags of seen keys."""

    base: Any
    stride_q: Any
    stride_k: Any
    kind_base: Any
    seen_base: Any
    seen_stride: Any


@triton.jit
def head_mask(mask_ptrs, strides, tile):
    """Return the `HeadMask` of a tile's head and query block."""
    kind_base = head_base(mask_ptrs.kind, strides.kind, tile.batch, tile.head)
    return HeadMask(
        base=head_base(mask_ptrs.entries, strides.mask, tile.batch, tile.head),
        stride_q=strides.mask[2],
        stride_k=strides.mask[3],
        kind_base=kind_base + tile.q_block.to(tl.int64) * strides.kind[2],
        seen_base=head_base(mask_ptrs.seen, strides.seen, tile.batch, tile.kv_head),
        seen_stride=strides.seen[2],
    )


class KeptBlocks(NamedTuple):
    """Key blocks that a tile visits: ``count`` entries of a list, or consecutive blocks from ``first`` (all_blocks)."""

    indices_base: Any
    first: Any
    count: Any


class RunningSums(NamedTuple):
    """State of the online softmax."""

    accumulator: Any  # [BLOCK_M, VALUE_DIM], sum of P V
    row_sum: Any  # [BLOCK_M], sum of P
    row_max: Any  # [BLOCK_M], largest score, in log2 units
    row_ref: Any  # [BLOCK_M], row reference: P = 2^(score - row_ref)
