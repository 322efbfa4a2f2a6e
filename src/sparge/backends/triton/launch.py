"""What every launcher needs: padded widths, strides, optional tensors."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from sparge.config import PerHead
from sparge.geometry import Shape


def architecture_of(tensor: Tensor) -> int:
    """Compute capability of the tensor's device as one number (89, 90); 90 where an interpreter serves it."""
    return _architecture(tensor.device.type, tensor.device.index)


@functools.cache
def _architecture(device_type: str, index: int | None) -> int:
    major, minor = torch.cuda.get_device_capability(index) if device_type == "cuda" else (9, 0)
    return 10 * major + minor


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below it. (Triton's own takes ten microseconds.)"""
    return 1 << (number - 1).bit_length()


def padded(width: int) -> int:
    """The power of two a head's width is padded to inside kernels, at least a matrix instruction's 16."""
    return max(16, power_of_two(width))


def seen_argument(
    seen: Tensor | None, shape: tuple[int, int, int], otherwise: Tensor
) -> tuple[Tensor, tuple[int, ...]]:
    """A bool tensor that broadcasts to (B, H, S) and its strides; any tensor when there is none."""
    if seen is None:
        return otherwise, (0, 0, 0)
    expanded = seen.expand(shape)
    return expanded, expanded.stride()


def strides_of(tensor: Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and token; the last one is 1."""
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


def buffer_like(tensor: Tensor, wanted: bool, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialised memory on the tensor's device; the tensor itself where none is wanted (no kernel will read it)."""
    return torch.empty(sizes, dtype=dtype, device=tensor.device) if wanted else tensor


def per_head_tensor(value: PerHead | None, shape: Shape, device: torch.device) -> Tensor | None:
    """A float32 tensor (H,), None for None."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=torch.float32)
    return torch.full((shape.heads,), float(value), dtype=torch.float32, device=device)
