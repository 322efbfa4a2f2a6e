"""What the stages hand to an attention kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Operands:
    """What the attention kernel reads. Codes are padded to whole blocks; unquantised tensors are the caller's own.

    The scales and ``lse_shift`` of `quantize.QueryFacts` and `statistics.Summary` mean nothing when quantization is
    "none". ``key_scale`` is negative where a block holds a sink (`sinks.mark_sinks`). ``dtype`` is the output's.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_scale: Tensor
    key_scale: Tensor
    value_scale: Tensor
    lse_shift: Tensor
    quantization: str
    dtype: torch.dtype
    scale: float
    is_causal: bool
    attn_mask: Tensor | None
    keys_seen: Tensor | None
