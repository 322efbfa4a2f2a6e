"""Types, constants and checks that selection rules, scores and calls share."""

from __future__ import annotations

from numbers import Real
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

PerHead: TypeAlias = float | Tensor
"""One number for all heads, or a one-dimensional tensor with one number per query head."""

Layout = Literal["HND", "NHD"]
Quantization = Literal["auto", "none", "int8_fp8", "int8_fp8_fast", "int8_fp16"]
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)
RENAMED_QUANTIZATIONS = {"int8_fp8_codes": "int8_fp8_fast"}
"""Old names of quantizations that are still accepted, and their current names."""
BACKENDS = ("hopper", "triton", "torch", "reference")
"""The names of all backends, in the order in which "auto" prefers them."""
OnUnsupported = Literal["raise", "warn", "dense"]
Skipped = Literal["auto", "mean", "drop"]
ScoreName = Literal["moment", "mean", "spread"]


def check_range(name: str, value: PerHead, low: float, high: float, interval: str) -> None:
    """Raise unless every number is in the interval; ``interval`` is its notation in the error message."""
    if isinstance(value, Tensor):
        if value.ndim != 1 or not value.is_floating_point() or value.numel() == 0:
            raise TypeError(
                f"{name}: expected a number or a one-dimensional floating-point tensor with one entry per query "
                f"head, got a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
            )
        if torch.compiler.is_compiling() or value.device.type != "cpu":
            return  # reading values would cause a graph break, or synchronize with the device
        numbers = value.detach().double().tolist()
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number or a per-head tensor, got {type(value).__name__}")
    else:
        numbers = [float(value)]
    open_low, open_high = interval.startswith("("), interval.endswith(")")
    for number in numbers:
        above = number > low if open_low else number >= low
        below = number < high if open_high else number <= high
        if not (above and below):  # NaN fails both comparisons
            raise ValueError(f"{name}: expected a value in {interval}, got {number}")


def per_head(value: PerHead, heads: int, device: torch.device) -> Tensor:
    """Return the value as a tensor (heads, 1, 1), which broadcasts over (B, H, q_blocks, kv_blocks)."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype).reshape(heads, 1, 1)
    return torch.full((heads, 1, 1), float(value), dtype=dtype, device=device)
