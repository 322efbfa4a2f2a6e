"""Dense attention with LSE, bottom-right causality, and output 0 for queries that see no key.

Torch's CPU kernel computes the output, in float32 if 16-bit arithmetic would be emulated (`processor`). Calls with a
mask are computed in parts with an element mask each, so memory is not quadratic in the length. Long calls with a window
and no mask use block-sparse attention that keeps every visible block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.backends.torch import blocks, predict
from sparge.backends.torch.processor import dtype_of_dense, has_cpu_kernel
from sparge.call import Call
from sparge.masks.geometry import Shape
from sparge.masks.visibility import window_elements
from sparge.masks.window import Window, first_offset, last_offset

MAX_MASK_ELEMENTS = 2**22
"""Number of elements (batch x heads x queries x keys) of the element mask of one part: 16 MiB in float32."""
MIN_QUERIES = 256
"""Queries of a part, even if its element mask exceeds `MAX_MASK_ELEMENTS`, because every part reads all of its keys."""
MAX_MAGNITUDE = 2.0**56
"""Scores of tokens up to this magnitude do not overflow float32."""


def attention(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Compute attention over every visible key: output (B, H, Sq, Dv) in the query's dtype, lse (B, H, Sq) float32."""
    shape = call.shape
    if call.is_causal and shape.q_len == 1:  # the only query is the last: causality hides no key from it
        call = replace(call, is_causal=False, window=Window(call.window.left))
    is_small = shape.heads * shape.q_len * shape.kv_len <= MAX_MASK_ELEMENTS  # independent of the batch size
    if query.device.type == "cpu" and call.attn_mask is None and _is_aligned(call):
        output, lse = _without_mask(query, key, value, call)
    elif call.attn_mask is not None or is_small:
        output, lse = _with_element_masks(query, key, value, call)
    else:
        return blocks.attention(query, key, value, predict.predict(query, key, call), call)
    return output.to(query.dtype).contiguous(), lse.contiguous()


def torch_serves(query: Tensor, call: Call) -> bool:
    """Return whether torch's SDPA can compute the output of a call in the query's own dtype, if no LSE is needed."""
    return (
        query.device.type == "cpu"
        and call.attn_mask is None
        and not call.is_quantized
        and _is_aligned(call)
        and call.shape.head_dim == call.shape.value_dim
        and dtype_of_dense(query, exact_lse=False) == query.dtype
    )


def _is_aligned(call: Call) -> bool:
    """Return whether a call has no window, or is causal with as many queries as keys: alignment then has no effect."""
    is_square = call.shape.q_len == call.shape.kv_len
    return call.window == Window() or (call.window == Window(None, 0) and is_square)


def _without_mask(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Run torch's CPU flash attention, which returns the LSE and requires equal widths and equal numbers of heads."""
    shape, dtype = call.shape, dtype_of_dense(query, exact_lse=call.exact_lse)
    query, key, value = query.to(dtype), *_for_every_head(key, value, shape, dtype)
    if shape.head_dim != shape.value_dim:
        width = max(shape.head_dim, shape.value_dim)
        query, key, value = (F.pad(tensor, (0, width - tensor.shape[3])) for tensor in (query, key, value))
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=call.is_causal, scale=call.scale
    )
    return output[..., : shape.value_dim], lse


class _Part(NamedTuple):
    """A range of batch elements, KV heads, queries and keys."""

    batch: slice
    kv_heads: slice
    queries: slice
    keys: slice


def _parts(call: Call, *, shares_mask: bool) -> Iterator[_Part]:
    """Split a call into parts with about `MAX_MASK_ELEMENTS` elements, and the keys that their queries may see.

    Args:
        shares_mask: whether batch elements and heads with the same call mask share one element mask.
    """
    shape, mask = call.shape, call.attn_mask
    shared = (1, 1) if mask is None else mask.shape[:2]
    masks, head_masks = shared if shares_mask else (shape.batch, shape.heads)
    queries = min(shape.q_len, max(MAX_MASK_ELEMENTS // shape.kv_len, MIN_QUERIES))
    room = max(MAX_MASK_ELEMENTS // (queries * shape.kv_len), 1)  # element masks of a part
    kv_heads = shape.kv_heads if head_masks == 1 else min(shape.kv_heads, max(room // shape.group, 1))
    is_shared = masks == head_masks == 1  # otherwise a part of several batch elements has a copy for every head
    batch = shape.batch if is_shared else min(shape.batch, max(room // (kv_heads * shape.group), 1))
    first, last = first_offset(call.window, shape), last_offset(call.window, shape)
    for batch_start in range(0, shape.batch, batch):
        for head_start in range(0, shape.kv_heads, kv_heads):
            for start in range(0, shape.q_len, queries):
                stop = min(start + queries, shape.q_len)
                first_key = 0 if first is None else min(max(start + first, 0), shape.kv_len)
                end = shape.kv_len if last is None else min(max(stop + last, first_key), shape.kv_len)
                yield _Part(
                    slice(batch_start, batch_start + batch),
                    slice(head_start, head_start + kv_heads),
                    slice(start, stop),
                    slice(first_key, end),
                )


def _with_element_masks(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    shape = call.shape
    dtype = dtype_of_dense(query, exact_lse=call.exact_lse)
    output = query.new_zeros((*query.shape[:3], shape.value_dim), dtype=dtype)
    lse = query.new_full(query.shape[:3], -math.inf, dtype=torch.float32)
    is_bounded = all(map(_is_bounded, (query, key, value)))
    for part in _parts(call, shares_mask=is_bounded and has_cpu_kernel(query, value)):
        if part.keys.start == part.keys.stop:
            continue
        heads = slice(part.kv_heads.start * shape.group, part.kv_heads.stop * shape.group)
        place, keys = (part.batch, heads, part.queries), (part.batch, part.kv_heads, part.keys)
        bias = _element_bias(call, part, heads, query.device)
        q, (k, v) = query[place].to(dtype), _for_every_head(key[keys], value[keys], shape, dtype)
        if not is_bounded:  # tokens that are not seen may be NaN, or overflow in a score
            allowed = bias != -math.inf
            q = torch.where(allowed.any(3, keepdim=True), q, 0.0)
            k, v = (torch.where(allowed.any(2)[..., None], tensor, 0.0) for tensor in (k, v))
        sizes = q.shape[:2]
        flat_bias = bias.expand(*sizes, -1, -1).flatten(0, 1)
        part_output, part_lse = blocks.attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), flat_bias, call.scale)
        output[place], lse[place] = part_output.unflatten(0, sizes), part_lse.unflatten(0, sizes)
    return output, lse


def _is_bounded(tensor: Tensor) -> bool:
    """Return whether all elements are at most `MAX_MAGNITUDE`; False for NaN."""
    lowest, highest = torch.aminmax(tensor)
    return float(lowest) >= -MAX_MAGNITUDE and float(highest) <= MAX_MAGNITUDE


def _element_bias(call: Call, part: _Part, heads: slice, device: torch.device) -> Tensor:
    """Return the bias on the scores of a part, float32 (b, h, q, k); -inf for hidden keys. b and h may be 1."""
    window, mask = None, call.attn_mask
    if call.window != Window():
        rows = torch.arange(part.queries.start, part.queries.stop, device=device)
        window = window_elements(call.shape, call.window, rows)[:, part.keys]
    if mask is not None:
        ranges = part.batch, heads, part.queries, part.keys
        mask = mask[tuple(cut if size > 1 else slice(None) for cut, size in zip(ranges, mask.shape, strict=True))]
    if mask is None or mask.dtype == torch.bool:
        visible = torch.ones((), dtype=torch.bool, device=device)
        for allowed in (window, mask):
            visible = visible if allowed is None else visible & allowed
        bias = torch.zeros(visible.shape, dtype=torch.float32, device=device).masked_fill_(~visible, -math.inf)
    else:
        lowest = mask == torch.finfo(mask.dtype).min  # hides keys, as -inf does
        bias = mask.float().masked_fill(lowest, -math.inf) if bool(lowest.any()) else mask.float()
        bias = bias if window is None else bias.masked_fill(~window, -math.inf)
    sizes = part.queries.stop - part.queries.start, part.keys.stop - part.keys.start
    return bias[(None,) * (4 - bias.ndim)].expand(-1, -1, *sizes)


def _for_every_head(key: Tensor, value: Tensor, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Convert K and V to a dtype and repeat their heads for every query head; no copy if neither is needed."""
    if shape.group > 1:
        key, value = key.repeat_interleave(shape.group, 1), value.repeat_interleave(shape.group, 1)
    return key.to(dtype), value.to(dtype)
