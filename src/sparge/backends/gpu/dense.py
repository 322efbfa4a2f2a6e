"""Dense attention on CUDA: torch's fastest kernel where it supports the call, otherwise our kernel over all blocks."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.backends.gpu import pipeline
from sparge.backends.gpu.operands import AttentionLauncher
from sparge.call import Call, interned
from sparge.masks.window import Window


def attention(
    query: Tensor, key: Tensor, value: Tensor, call: Call, *, with_lse: bool, launcher: AttentionLauncher
) -> tuple[Tensor, Tensor]:
    """Compute attention over all visible keys: output (B, H, Sq, Dv) in the query's dtype, lse (B, H, Sq) or empty."""
    if call.is_causal and call.shape.q_len == 1:  # the only query is the last: causality hides no key from it
        call = interned(replace(call, is_causal=False, window=Window(call.window.left)))
    if not with_lse and torch_serves(query, call):
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=call.is_causal, scale=call.scale, enable_gqa=call.shape.group > 1
        )
        return output, query.new_empty(0, dtype=torch.float32)
    return pipeline.attend(query, key, value, None, call, launcher=launcher)


def torch_serves(query: Tensor, call: Call) -> bool:
    """Return whether torch's fast kernels support a call.

    They align causality top-left, so bottom-right causality and windows would need a full (S_q x S_k) mask. Our kernel
    visits only the blocks inside of the window.
    """
    shape = call.shape
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and not call.is_quantized
        and call.attn_mask is None
        and (call.window == Window() or (call.window == Window(None, 0) and shape.q_len == shape.kv_len))
        and shape.head_dim == shape.value_dim
        and shape.head_dim % 8 == 0
    )
