"""Checks of tensors and options, with errors of the form "expected X, got Y". They run before any computation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from sparge.dispatch.dense_rules import DTYPES
from sparge.masks.block_mask import BlockMask
from sparge.masks.causal_bias import alignment_of, lengths_of
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape
from sparge.masks.window import Window, window_of, without_redundant_bounds
from sparge.numerics import block_means
from sparge.options.checks import LAYOUTS, SKIPPED, check_choice, check_flag, rule_from_topk
from sparge.options.common import PerHead
from sparge.options.rules import SELECTIONS, Dense, Selection, Sparsity


def resolve_window(
    window: tuple[int | None, int | None] | None, is_causal: bool, q_len: int, kv_len: int, name: str = "window"
) -> Window:
    """Check a window, combine it with causality, and remove bounds that have no effect; -1 or None means no bound."""
    if window is None:
        return window_of(is_causal)
    if not isinstance(window, (list, tuple)) or len(window) != 2:
        raise TypeError(f"{name}: expected None or a pair (left, right), got {window!r}")
    bounds: list[int | None] = []
    for bound in window:
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
            raise TypeError(f"{name}: expected two ints (or None, no bound), got {window!r}")
        if bound is not None and bound < -1:
            raise ValueError(f"{name}: expected numbers from 0 up (or -1 or None, no bound), got {window!r}")
        bounds.append(None if bound == -1 else bound)
    return without_redundant_bounds(window_of(is_causal, (bounds[0], bounds[1])), q_len, kv_len)


def check_query_key_value(
    query: Tensor, key: Tensor, value: Tensor, layout: str, enable_gqa: bool, *, may_be_empty: bool = False
) -> tuple[Tensor, Tensor, Tensor, Shape]:
    """Check query, key and value, and return them heads-first with the sizes of the call.

    The shapes are (B, H, S_q, D), (B, H_kv, S_k, D) and (B, H_kv, S_k, D_v).
    """
    check_choice("layout", layout, LAYOUTS)
    check_flag("enable_gqa", enable_gqa)
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.is_nested or tensor.layout != torch.strided:
            got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
            raise TypeError(f"{name}: expected a plain tensor (torch.strided), got {got}")
        if tensor.ndim != 4:
            order = "(B, H, S, D)" if layout == "HND" else "(B, S, H, D)"
            raise ValueError(f"{name}: expected 4 dimensions {order}, got shape {tuple(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name}: expected float16, bfloat16 or float32, got {tensor.dtype}")
        empty = () if not may_be_empty else (0, 2 if layout == "HND" else 1) if name == "query" else (0,)
        if any(size == 0 and dim not in empty for dim, size in enumerate(tensor.shape)):
            raise ValueError(f"{name}: expected no empty dimension, got shape {tuple(tensor.shape)}")
    for name, tensor in named.items():
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name}: expected the query's dtype {query.dtype}, got {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{name}: expected the query's device {query.device}, got {tensor.device}")
    query, key, value = (_heads_first(tensor, layout) for tensor in (query, key, value))
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    if key.shape[0] != batch or key.shape[3] != head_dim:
        raise ValueError(
            f"key: expected batch {batch} and head_dim {head_dim} as in the query, "
            f"got batch {key.shape[0]} and head_dim {key.shape[3]}"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value: expected the key's batch, heads and length {tuple(key.shape[:3])}, got {tuple(value.shape[:3])}"
        )
    if heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"key: expected {heads} heads as in the query, got {kv_heads} (pass enable_gqa=True for grouped queries)"
        )
    if heads % kv_heads:
        raise ValueError(f"query: expected a multiple of the key's {kv_heads} heads, got {heads}")
    return query, key, value, Shape(batch, heads, kv_heads, q_len, kv_len, head_dim, value.shape[3])


def _heads_first(tensor: Tensor, layout: str) -> Tensor:
    """Return the tensor as (B, H, S, D) with a unit last stride, which kernels require; copy it only if necessary."""
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return tensor.transpose(1, 2) if layout == "NHD" else tensor


def check_scale(scale: float | None, head_dim: int) -> float:
    """Check the scale and return it. Default: 1 / sqrt(head_dim)."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, (Real, torch.SymFloat)):
        raise TypeError(f"scale: expected a number or None, got {type(scale).__name__}")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale: expected a finite number, got {scale}")
    return float(scale)


def resolve_causal_bias(
    attn_mask: Tensor | None, is_causal: bool, shape: Shape, device: torch.device, *, as_mask: bool = False
) -> tuple[Tensor | None, bool]:
    """Convert a torch ``CausalBias`` to ``is_causal`` or to a bool mask, and return mask and ``is_causal``.

    Args:
        as_mask: always convert to a bool mask.
    """
    alignment = alignment_of(attn_mask)
    if attn_mask is None or alignment is None:
        return attn_mask, is_causal
    if is_causal:
        raise ValueError("attn_mask: expected no CausalBias together with is_causal=True, got both")
    lengths = lengths_of(attn_mask)
    if lengths != (shape.q_len, shape.kv_len):
        raise ValueError(f"attn_mask: expected a CausalBias of size {(shape.q_len, shape.kv_len)}, got {lengths}")
    offset = shape.causal_offset if alignment == "bottom-right" else 0
    if offset == shape.causal_offset and not as_mask:
        return None, True
    return torch.ones(shape.q_len, shape.kv_len, dtype=torch.bool, device=device).tril(offset), False


def check_attn_mask(attn_mask: Tensor | None, shape: Shape, device: torch.device) -> Tensor | None:
    """Check a mask and return it with 4 dimensions, each either 1 or the size of the call."""
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask: expected a torch.Tensor or None, got {type(attn_mask).__name__}")
    if attn_mask.dtype not in (torch.bool, *DTYPES):
        raise TypeError(f"attn_mask: expected bool, float16, bfloat16 or float32, got {attn_mask.dtype}")
    if attn_mask.device != device:
        raise ValueError(f"attn_mask: expected the query's device {device}, got {attn_mask.device}")
    full = (shape.batch, shape.heads, shape.q_len, shape.kv_len)
    sizes = _with_four_sizes(attn_mask, full)
    if sizes is None:
        hint = ""
        if tuple(attn_mask.shape) == (shape.batch, shape.kv_len):
            hint = "; a key-padding mask (B, S_k) is passed as mask[:, None, None, :]"
        raise ValueError(
            f"attn_mask: expected a shape that broadcasts to (B, H, S_q, S_k) = {full}, "
            f"got {tuple(attn_mask.shape)}{hint}"
        )
    return attn_mask.reshape(sizes)


def _with_four_sizes(mask: Tensor, full: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of a mask with leading ones; None if it does not broadcast to ``full``, which has 4 sizes."""
    sizes = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    fits = len(sizes) == 4 and all(size in (1, expected) for size, expected in zip(sizes, full, strict=True))
    return sizes if fits else None


def resolve_sparsity(topk: PerHead | None, sparsity: Sparsity | None, heads: int) -> Sparsity:
    """Return the selection rule from ``topk`` or ``sparsity``, and check its per-head tensors."""
    if sparsity is None:
        sparsity = rule_from_topk(topk)
    elif topk is not None:
        raise ValueError(f"expected topk or sparsity, got both: topk={topk!r} and sparsity={sparsity!r}")
    if isinstance(sparsity, Selection) and isinstance(sparsity, SELECTIONS.get(sparsity.name, ())):
        for name in (sparsity.amount_field, "similarity_threshold", "pv_threshold"):
            check_per_head(name, getattr(sparsity, name), heads)
    elif not isinstance(sparsity, Dense):
        kind = type(sparsity).__name__
        raise TypeError(f"sparsity: expected Budget(...), TopK(...), TopCdf(...) or Dense(), got {kind}")
    return sparsity


def check_per_head(name: str, value: PerHead | None, heads: int) -> None:
    """Raise unless a per-head tensor has one entry per query head."""
    if isinstance(value, Tensor) and value.numel() != heads:
        raise ValueError(f"{name}: expected one entry per query head ({heads}), got {value.numel()}")


def resolve_skipped(skipped: str, is_causal: bool, attn_mask: Tensor | None, shape: Shape) -> str:
    """Resolve ``skipped`` to "mean" or "drop"; "auto" is "mean" unless attention is causal or the mask rules it out."""
    check_choice("skipped", skipped, SKIPPED)
    if skipped == "drop" or (skipped == "auto" and is_causal):
        return "drop"
    unfit = block_means.unfit_for_means(attn_mask, shape.group)
    if unfit is None:
        return "mean"
    if skipped == "mean":
        raise NotImplementedError(unfit)
    return "drop"


def check_ranges(
    name: str, ranges: Sequence[tuple[int, int]] | None, length: int, tokens: str
) -> tuple[tuple[int, int], ...]:
    """Check that 0 <= start < stop <= length for all ranges of keys or queries, and return them as tuples."""
    if ranges is None:
        return ()
    if not isinstance(ranges, (list, tuple)):
        raise TypeError(f"{name}: expected a list of (start, stop) pairs of ints, got {ranges!r}")
    checked = []
    for entry in ranges:
        is_pair = isinstance(entry, (list, tuple)) and len(entry) == 2
        if not is_pair or not all(isinstance(edge, int) and not isinstance(edge, bool) for edge in entry):
            raise TypeError(f"{name}: expected (start, stop) pairs of ints, got {entry!r}")
        start, stop = entry
        if not 0 <= start < stop <= length:
            raise ValueError(f"{name}: expected 0 <= start < stop <= {length} (the number of {tokens}), got {entry!r}")
        checked.append((start, stop))
    return tuple(checked)


def check_block_mask(
    mask: BlockMask | Tensor,
    shape: Shape,
    is_causal: bool | None,
    device: torch.device,
    window: tuple[int | None, int | None] | None = None,
) -> BlockMask:
    """Check a mask, and return it as a `BlockMask` with causality and window from the caller or the mask."""
    requested = resolve_window(window, bool(is_causal), shape.q_len, shape.kv_len)
    full = (shape.batch, shape.heads, shape.q_blocks, shape.kv_blocks)
    geometry = (
        f"(B, H, ceil(S_q / {BLOCK_Q}), ceil(S_k / {BLOCK_K})) = {full} "
        f"for {shape.q_len} queries and {shape.kv_len} keys in blocks of {BLOCK_Q} x {BLOCK_K}"
    )
    if not isinstance(mask, (BlockMask, Tensor)) or (isinstance(mask, Tensor) and mask.dtype != torch.bool):
        got = f"dtype {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask: expected a BlockMask or a bool tensor, got {got}")
    mask_device = mask.device if isinstance(mask, Tensor) else mask.kv_indices.device
    if mask_device != device:
        raise ValueError(f"mask: expected the query's device {device}, got {mask_device}")
    if isinstance(mask, Tensor):
        sizes = _with_four_sizes(mask, full)
        if sizes is None:
            raise ValueError(f"mask: expected a shape that broadcasts to {geometry}, got {tuple(mask.shape)}")
        dense = mask.reshape(sizes).expand(full)
        return BlockMask.from_dense(dense, q_len=shape.q_len, kv_len=shape.kv_len, window=requested)
    mask = _broadcast_heads(mask, shape)
    lengths = (mask.q_len, mask.kv_len)
    if mask.shape != full or lengths != (shape.q_len, shape.kv_len):
        raise ValueError(f"mask: expected {geometry}, got {mask.shape} for {mask.q_len} queries and {mask.kv_len} keys")
    if is_causal is not None and is_causal != mask.is_causal:
        raise ValueError(f"is_causal: expected {mask.is_causal} as in the mask, got {is_causal}")
    if window is not None and requested != mask.window:
        raise ValueError(f"window: expected {tuple(mask.window)} as in the mask, got {tuple(window)}")
    return mask


def _broadcast_heads(mask: BlockMask, shape: Shape) -> BlockMask:
    """Expand a mask of batch 1 or one head (common with FlexAttention) to every batch entry and head."""
    batch, heads = (
        full if size == 1 else size for size, full in zip(mask.shape[:2], (shape.batch, shape.heads), strict=True)
    )
    if (batch, heads) == mask.shape[:2]:
        return mask
    return replace(
        mask,
        kv_num_blocks=mask.kv_num_blocks.expand(batch, heads, -1).contiguous(),
        kv_indices=mask.kv_indices.expand(batch, heads, -1, -1).contiguous(),
        visible_num_blocks=mask.visible_num_blocks.expand(batch, heads, -1).contiguous(),
    )


def check_packed(query: Tensor, key: Tensor, value: Tensor) -> Shape:
    """Check packed tensors (total_q, H, D), (total_k, H_kv, D), (total_k, H_kv, D_v), which may have no tokens.

    Returns:
        The sizes of the pack as one sequence.
    """
    whole = []
    for name, tensor in (("q", query), ("k", key), ("v", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.is_nested or tensor.ndim != 3:
            got = "a nested tensor" if tensor.is_nested else f"shape {tuple(tensor.shape)}"
            raise ValueError(f"{name}: expected 3 dimensions (tokens, H, D), got {got}")
        whole.append(tensor[None] if len(tensor) else tensor.new_empty(1, 1, *tensor.shape[1:]))
    if len(value) != len(key):
        raise ValueError(f"v: expected {len(key)} tokens as in k, got {len(value)}")
    *_, shape = check_query_key_value(whole[0], whole[1], whole[2], "NHD", enable_gqa=True)
    return shape


def check_segments(
    bounds_q: Sequence[int], bounds_k: Sequence[int], totals: tuple[int, int], longest: tuple[int | None, int | None]
) -> None:
    """Check the bounds of segments against each other, the numbers of tokens and the maximum lengths."""
    for side, bounds, total, limit in zip("qk", (bounds_q, bounds_k), totals, longest, strict=True):
        name = f"cu_seqlens_{side}"
        if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != total:
            got = f"{bounds[0]} ... {bounds[-1]}" if len(bounds) else "none"
            raise ValueError(f"{name}: expected bounds from 0 to the {total} tokens of {side}, got {got}")
        lengths = [stop - start for start, stop in pairwise(bounds)]
        if min(lengths, default=0) < 0:
            at = next(index for index, length in enumerate(lengths) if length < 0)
            raise ValueError(f"{name}: expected ascending bounds, got {bounds[at + 1]} after {bounds[at]}")
        if limit is not None and max(lengths, default=0) > limit:
            raise ValueError(f"max_seqlen_{side}: expected at least {max(lengths)}, the longest segment, got {limit}")
    if len(bounds_q) != len(bounds_k):
        raise ValueError(f"cu_seqlens_k: expected {len(bounds_q)} bounds as in cu_seqlens_q, got {len(bounds_k)}")


def check_softcap(softcap: Any) -> None:
    """Raise NotImplementedError if scores are soft-capped."""
    if softcap != 0:
        raise NotImplementedError(f"softcap: expected 0.0 (scores are not capped), got {softcap!r}")
