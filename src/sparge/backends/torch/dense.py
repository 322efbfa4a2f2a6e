"""Dense attention with LSE, bottom-right causality, and output 0 for queries that see no key.

Calls without a mask use torch's CPU kernel, in float32 if 16-bit arithmetic would be emulated (`processor`). Short
calls with a mask or a window, for example decoding with padding, run as one batch with an element mask. All other calls
run as block-sparse attention that keeps every visible block: its memory is not quadratic in the length, and it skips
blocks outside of a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.backends.torch import blocks, predict
from sparge.backends.torch.processor import dtype_of_dense
from sparge.call import Call
from sparge.masks.geometry import Shape
from sparge.masks.visibility import allowed_elements, window_elements
from sparge.masks.window import Window

MAX_MASK_ELEMENTS = 2**22
"""Maximum number of elements (batch x heads x queries x keys) of an element mask: 16 MiB in float32."""


def attention(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Compute attention over every visible key: output (B, H, Sq, Dv) in the query's dtype, lse (B, H, Sq) float32."""
    shape = call.shape
    if call.is_causal and shape.q_len == 1:  # the only query is the last: causality hides no key from it
        call = replace(call, is_causal=False, window=Window(call.window.left))
    if query.device.type == "cpu" and call.attn_mask is None and _is_aligned(call):
        output, lse = _without_mask(query, key, value, call)
    elif shape.heads * shape.q_len * shape.kv_len <= MAX_MASK_ELEMENTS:  # independent of the batch size
        max_batch = MAX_MASK_ELEMENTS // (shape.heads * shape.q_len * shape.kv_len)
        parts = [_with_element_mask(*part) for part in _parts_of_batch(query, key, value, call, max_batch)]
        output, lse = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    else:
        return blocks.attention(query, key, value, predict.predict(query, key, call), call)
    return output.to(query.dtype).contiguous(), lse.contiguous()


def torch_serves(query: Tensor, call: Call) -> bool:
    """Return whether torch's SDPA computes the same output for a call without an LSE, in the query's own dtype."""
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


def _parts_of_batch(
    query: Tensor, key: Tensor, value: Tensor, call: Call, max_batch: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Call]]:
    """Split a call into calls with at most ``max_batch`` batch elements each."""
    for start in range(0, call.shape.batch, max_batch):
        part = slice(start, start + max_batch)
        mask = call.attn_mask
        if mask is not None and mask.shape[0] > 1:
            mask = mask[part]
        batch = len(query[part])
        yield query[part], key[part], value[part], replace(call, shape=replace(call.shape, batch=batch), attn_mask=mask)


def _with_element_mask(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    shape, attn_mask = call.shape, call.attn_mask
    sizes = (shape.batch, shape.heads, shape.q_len, shape.kv_len)
    allowed = torch.ones(sizes, dtype=torch.bool, device=query.device)
    bias = torch.zeros((), dtype=torch.float32, device=query.device)
    if call.window != Window():
        allowed = allowed & window_elements(shape, call.window, torch.arange(shape.q_len, device=query.device))
    if attn_mask is not None:
        allowed = allowed & allowed_elements(attn_mask)
        bias = bias if attn_mask.dtype == torch.bool else attn_mask.float()
    dtype = dtype_of_dense(query, exact_lse=call.exact_lse)
    key, value = _for_every_head(key, value, shape, dtype)
    # Unseen tokens may be NaN
    keys_seen = allowed.any(2)[..., None]
    output, lse = blocks.attend(
        torch.where(allowed.any(3, keepdim=True), query.to(dtype), 0.0).flatten(0, 1),
        torch.where(keys_seen, key, 0.0).flatten(0, 1),
        torch.where(keys_seen, value, 0.0).flatten(0, 1),
        torch.where(allowed, bias, -torch.inf).flatten(0, 1),
        call.scale,
    )
    return output.unflatten(0, sizes[:2]), lse.unflatten(0, sizes[:2])


def _for_every_head(key: Tensor, value: Tensor, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Convert K and V to a dtype and repeat their heads for every query head; no copy if neither is needed."""
    if shape.group > 1:
        key, value = key.repeat_interleave(shape.group, 1), value.repeat_interleave(shape.group, 1)
    return key.to(dtype), value.to(dtype)
