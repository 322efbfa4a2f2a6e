"""Dense attention on CUDA: torch's fastest kernel where it can serve the call, else our kernel over all blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.backends.cuda import pipeline
from sparge.geometry import Shape


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    *,
    is_causal: bool,
    scale: float,
    attn_mask: Tensor | None,
    quantization: str,
    with_lse: bool,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    """Attention over every visible key: output (B, H, Sq, Dv) in the query's dtype, lse (B, H, Sq) float32 or empty."""
    is_causal = is_causal and shape.q_len > 1  # the last query sees every key
    if quantization == "none" and not with_lse and _torch_can(query, shape, is_causal, attn_mask):
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=shape.group > 1
        )
        return output.contiguous(), query.new_empty(0, dtype=torch.float32)
    return pipeline.attention(
        query,
        key,
        value,
        None,
        shape,
        is_causal=is_causal,
        scale=scale,
        attn_mask=attn_mask,
        quantization=quantization,
        kernels=kernels,
    )


def _torch_can(query: Tensor, shape: Shape, is_causal: bool, attn_mask: Tensor | None) -> bool:
    """What torch's fast kernels serve (it chooses which); it aligns causality top-left, all else needs a mask."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and attn_mask is None
        and (not is_causal or shape.q_len == shape.kv_len)
        and shape.head_dim == shape.value_dim
        and shape.head_dim % 8 == 0
    )
