"""Launch kernels with low overhead, and prepare their arguments: padded widths, strides, placeholders, buffers."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction

from sparge.backends.gpu.operands import Operands
from sparge.backends.gpu.replay import constant, current_recorder
from sparge.backends.output_layout import gapless_strides
from sparge.call import Call
from sparge.masks.geometry import Shape
from sparge.masks.window import first_offset, first_seeing_query, first_seen_key, last_offset
from sparge.options.common import PerHead

LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True)
class _Kernel:
    """A kernel with its compiled variants.

    Attributes:
        function: the kernel. It is referenced so that its ``id``, the key of `_kernels`, is not reused.
        descriptors, pointers, strides, numbers: index after the last argument of each kind in the signature.
        compiled: compiled variants, by the properties that Triton specializes a kernel on.
    """

    function: Any
    descriptors: int
    pointers: int
    strides: int
    numbers: int
    compiled: dict[tuple[Any, ...], CompiledKernel]


_kernels: dict[int, _Kernel] = {}
"""Kernels by ``id``, because hashing a Triton function takes microseconds."""


def _kernel_entry(kernel: Any) -> _Kernel:
    entry = _kernels.get(id(kernel))
    if entry is None:
        names = kernel.arg_names
        kinds = [_kind(name) for name in names]
        order = "*_desc, *_ptr or *_ptrs, *_strides, numbers, CONSTANTS"
        assert kinds == sorted(kinds), f"{kernel.__name__}: expected {order}, got {names}"
        descriptors, pointers, strides, numbers = (sum(kind <= last for kind in kinds) for last in range(4))
        specialized = set(names[strides:numbers]) - _not_specialized(kernel)
        assert not specialized, f"{kernel.__name__}: expected do_not_specialize for {sorted(specialized)}"
        entry = _kernels[id(kernel)] = _Kernel(kernel, descriptors, pointers, strides, numbers, {})
    return entry


def _not_specialized(kernel: Any) -> set[str]:
    """Return the names in a kernel's ``do_not_specialize``, which Triton's interpreter stores in another attribute."""
    options = kernel.kwargs if isinstance(kernel, InterpretedFunction) else vars(kernel)
    return set(options["do_not_specialize"] or ())


def _kind(name: str) -> int:
    """Classify an argument by its name: 0 TMA descriptor, 1 tensor, 2 strides, 3 number, 4 compile-time value."""
    for kind, endings in enumerate((("_desc",), ("_ptr", "_ptrs"), ("_strides",))):
        if name.endswith(endings):
            return kind
    return 4 if name.isupper() else 3


def launch(kernel: Any, programs: int, **arguments: Any) -> None:
    """Launch a kernel whose numbers are all listed in ``do_not_specialize`` (see `primitives.kernel`).

    Triton inspects every argument of every launch, which can take longer than a short kernel runs. It specializes
    kernels on dtypes, alignment to 16 bytes, strides that are 1, a multiple of 16 or wider than 32 bits, compile-time
    values, and numbers that ``do_not_specialize`` does not list. This function collects the same properties at a
    fraction of the cost, except for numbers, and launches the kernel that was compiled for them.

    Args:
        programs: number of programs of the one-dimensional grid.
        arguments: arguments in the order of the kernel's signature, then Triton's options. A tensor may be passed as
            Gluon's TMA descriptor (``*_desc``). Related tensors may be passed as a named tuple (``*_ptrs``), and so may
            their strides. Numbers may not, because ``do_not_specialize`` does not apply inside tuples.
    """
    values = list(arguments.values())
    entry = _kernel_entry(kernel)
    descriptors, pointers = values[: entry.descriptors], _flattened(values[entry.descriptors : entry.pointers])
    tensors = [descriptor.base for descriptor in descriptors] + pointers
    specialization = (
        tensors[0].get_device(),
        tuple([tuple(descriptor.block_shape) for descriptor in descriptors]),
        tuple([tensor.dtype for tensor in tensors]),
        tuple([tensor.data_ptr() & 15 == 0 for tensor in tensors]),
        tuple([(x & 15 == 0, x == 1, x > LARGEST_INT32) for x in _flattened(values[entry.pointers : entry.strides])]),
        tuple(values[entry.numbers :]),
    )
    in_signature = values[: len(kernel.arg_names)]
    compiled = entry.compiled.get(specialization)
    if compiled is not None:
        compiled[(programs, 1, 1)](*in_signature)
    else:
        # The kernels rely on FMA contraction, which Triton 3.10 disables by default.
        compiled = kernel[(programs,)](**arguments, enable_fp_fusion=True)
        if isinstance(compiled, CompiledKernel):
            expected = kernel.arg_names
            assert list(arguments)[: len(expected)] == expected, f"{kernel.__name__}: expected the order {expected}"
            entry.compiled[specialization] = compiled
        else:  # Triton's interpreter
            compiled = None
    recorder = current_recorder.get()
    if recorder is not None:
        recorder.add_launch(compiled, programs, descriptors, tensors, in_signature[entry.pointers :])


def _flattened(values: Iterable[Any]) -> list[Any]:
    """Return the entries of nested tuples, in order."""
    flat = []
    for value in values:
        if isinstance(value, tuple):
            flat += _flattened(value)
        else:
            flat.append(value)
    return flat


def architecture_of(tensor: Tensor) -> int:
    """Return the compute capability of the tensor's device as one number (89, 90). On a CPU, return 90."""
    return _architecture(tensor.device.type, tensor.device.index)


@functools.cache
def _architecture(device_type: str, index: int | None) -> int:
    major, minor = torch.cuda.get_device_capability(index) if device_type == "cuda" else (9, 0)
    return 10 * major + minor


def multiprocessors(tensor: Tensor) -> int:
    """Return the number of SMs of the tensor's device. On a CPU, return 132 as on an H200."""
    return _multiprocessors(tensor.device.type, tensor.device.index)


@functools.cache
def _multiprocessors(device_type: str, index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count if device_type == "cuda" else 132


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``. (`triton.next_power_of_2` takes 10 us.)"""
    return 1 << (number - 1).bit_length()


def padded(width: int) -> int:
    """Return the padded width of a head: a power of two, and at least 16, as matrix instructions require."""
    return max(16, power_of_two(width))


def seen_argument(
    seen: Tensor | None, shape: tuple[int, int, int], placeholder: Tensor
) -> tuple[Tensor, tuple[int, ...]]:
    """Return a bool tensor expanded to (B, H, S) and its strides; ``placeholder`` if ``seen`` is None."""
    if seen is None:
        return placeholder, (0, 0, 0)
    if seen.stride(2) > 1:
        seen = seen.contiguous()  # keeps positions times strides within 32 bits
    expanded = seen.expand(shape)
    return expanded, expanded.stride()


NO_BOUND = -(2**30)


def first_query(call: Call) -> int:
    """Return the first query that sees a key. In causal calls with more queries than keys, the first queries see none.

    The result may be negative for a packed call: kernels apply a segment's shift and clamp the sum to 0.
    """
    if call.segments is None:
        return first_seeing_query(call.window, call.shape)
    last = last_offset(call.window, call.shape)
    return NO_BOUND if last is None else -last


def first_key(call: Call) -> int:
    """Return the first key that any query sees. With more keys than queries, a window may hide the first keys.

    The result may be negative for a packed call, see `first_query`.
    """
    if call.segments is None:
        return first_seen_key(call.window, call.shape)
    first = first_offset(call.window, call.shape)
    return NO_BOUND if first is None else first


def segments_argument(call: Call, placeholder: Tensor) -> Tensor:
    """Return the table of a packed call's segments; ``placeholder`` for any other call."""
    return placeholder if call.segments is None else call.segments.table


def window_offsets(call: Call) -> dict[str, int]:
    """Return first_offset and last_offset as kernel arguments: query i sees keys i + first_offset to i + last_offset.

    The offset of an unbounded side is 0.
    """
    first, last = first_offset(call.window, call.shape), last_offset(call.window, call.shape)
    return {"first_offset": 0 if first is None else first, "last_offset": 0 if last is None else last}


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, head and token; the last stride is 1."""
    return tensor.stride()[:3]


def buffer_like(tensor: Tensor, needed: bool, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate uninitialized memory on the tensor's device.

    If the buffer is not ``needed``, return the tensor itself as a placeholder that kernels do not access.
    """
    return _recorded(torch.empty(sizes, dtype=dtype, device=tensor.device)) if needed else tensor


def output_buffer(operands: Operands, shape: Shape) -> Tensor:
    """Allocate uninitialized memory for the output, (B, H, Sq, Dv), in the query's layout."""
    sizes = (shape.batch, shape.heads, shape.q_len, shape.value_dim)
    return strided_buffer(operands.query, sizes, operands.dtype, tokens_first=operands.tokens_first)


def strided_buffer(like: Tensor, sizes: tuple[int, int, int, int], dtype: torch.dtype, *, tokens_first: bool) -> Tensor:
    """Allocate uninitialized memory without gaps for (B, H, S, D), on the device of ``like``."""
    strides = gapless_strides(sizes, tokens_first=tokens_first)
    return _recorded(torch.empty_strided(sizes, strides, dtype=dtype, device=like.device))


def zeros_like(tensor: Tensor, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate zeros on the tensor's device."""
    return _recorded(torch.empty(sizes, dtype=dtype, device=tensor.device), is_zero=True).zero_()


def _recorded(buffer: Tensor, *, is_zero: bool = False) -> Tensor:
    recorder = current_recorder.get()
    if recorder is not None:
        recorder.add_buffer(buffer, is_zero=is_zero)
    return buffer


def per_head_tensor(value: PerHead | None, shape: Shape, device: torch.device) -> Tensor | None:
    """Return a per-head value as a float32 tensor (H,); None if the value is None."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=torch.float32).contiguous()
    number = float(value)
    return constant(
        ("per head", number, shape.heads),
        device,
        lambda: torch.full((shape.heads,), number, dtype=torch.float32, device=device),
    )
