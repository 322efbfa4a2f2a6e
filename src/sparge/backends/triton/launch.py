"""What every launcher needs: padded widths, strides, optional tensors, a launch that costs the host little."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from sparge.config import PerHead
from sparge.geometry import Shape

LARGEST_INT32 = 2**31 - 1
_compiled: dict[tuple[Any, ...], CompiledKernel] = {}


@functools.cache
def _borders(kernel: Any) -> tuple[int, int, int, int]:
    """Where pointers, strides, numbers and compile-time values end in a kernel's signature: they come in this order."""
    names = kernel.arg_names
    kinds = [0 if x.endswith("_ptr") else 1 if x.endswith("_strides") else 3 if x.isupper() else 2 for x in names]
    assert kinds == sorted(kinds), f"{kernel.__name__}: expected *_ptr, *_strides, numbers, CONSTANTS, got {names}"
    return kinds.count(0), kinds.index(2), len(names) - kinds.count(3), len(names)


def launch(kernel: Any, programs: int, **arguments: Any) -> None:
    """Start so many programs of a kernel, with its arguments in the order of its signature, then Triton's options.

    Triton inspects every argument of every launch, which takes the host longer than a short kernel takes the device. It
    looks for dtypes, alignment to 16, strides of 1 or of 64 bits, and compile-time values; kernels are not specialised
    on lengths and other numbers. The same facts are collected here at a fraction of the cost, and what was compiled for
    them before is started as it is.
    """
    values = list(arguments.values())
    pointers_end, strides_end, numbers_end, end = _borders(kernel)
    tensors = values[:pointers_end]
    facts = (
        kernel,
        torch.cuda.current_device() if tensors[0].is_cuda else -1,
        tuple([tensor.dtype for tensor in tensors]),
        tuple([tensor.data_ptr() & 15 == 0 for tensor in tensors]),
        tuple(
            [(x & 15 == 0, x == 1, x > LARGEST_INT32) for strides in values[pointers_end:strides_end] for x in strides]
        ),
        tuple(values[numbers_end:]),
    )
    compiled = _compiled.get(facts)
    if compiled is not None:
        compiled[(programs, 1, 1)](*values[:end])
        return
    compiled = kernel[(programs,)](**arguments)
    if isinstance(compiled, CompiledKernel):  # an interpreter returns nothing
        assert list(arguments)[:end] == kernel.arg_names, f"{kernel.__name__}: expected the order of its signature"
        _compiled[facts] = compiled


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
    expanded = seen.contiguous().expand(shape)  # a stride of 1: positions times strides stay within 32 bits
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
        return value.to(device=device, dtype=torch.float32).contiguous()
    return torch.full((shape.heads,), float(value), dtype=torch.float32, device=device)
