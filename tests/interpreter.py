"""Fixes to Triton's interpreter: the arithmetic of the hardware, in a third of the time.

The interpreter truncates to bfloat16 where a GPU rounds, loses the carry when it rounds to FP8, and multiplies the bit
patterns of bfloat16 operands as integers. `repair` replaces its conversion and its matrix product. The interpreter also
patches the language at every launch and every call of a device function, and computes types and shapes again for every
operation, which `repair` caches. `shorten_language` makes the most frequent operators call numpy directly. The kernels
under test are unchanged.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import cache
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language.semantic import TritonSemantic

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
}
FP8_MAX = 448.0


def _as_torch(data: np.ndarray, dtype: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.tobytes()), dtype=DTYPES[str(dtype)]).reshape(data.shape)


def convert_float(data: np.ndarray, source: Any, target: Any, _rounding_mode: Any) -> np.ndarray:
    """Round to nearest, ties to even, and return the bits. FP8 saturates."""
    values = _as_torch(data, source).float()
    if str(target) == "fp8e4nv":
        values = values.clamp(-FP8_MAX, FP8_MAX)
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[target.primitive_bitwidth // 8]
    return values.to(DTYPES[str(target)]).view(bits).numpy()


def dot(_builder: Any, a: Any, b: Any, d: Any, _precision: Any, _imprecise: Any) -> Any:
    """Compute a b + d in the type of the accumulator.

    Sums of up to 1040 INT8 products are exact in float32, and numpy multiplies integers many times slower.
    """
    assert not a.dtype.is_int() or (a.dtype.primitive_bitwidth == 8 and a.data.shape[-1] <= 1040)
    operands = [
        x.data.astype(np.float32) if x.dtype.is_int() else _as_torch(x.data, x.dtype).float().numpy() for x in (a, b)
    ]
    product = np.matmul(*operands).astype(d.data.dtype) + d.data
    return interpreter.TensorHandle(product, d.dtype.scalar)


class Remapped:
    """The handle of a patched language. The patch is never removed, because the next launch needs it again."""

    def restore(self) -> None:
        pass


_remap = interpreter._patch_lang
_remapped: set[int] = set()


def remap_once(function: Any) -> Remapped:
    """Patch `triton.language` for the module of a function, once per module."""
    module = id(function.__globals__)
    if module not in _remapped:
        _remap(function)
        if not _remapped:
            shorten_language()
        _remapped.add(module)
    return Remapped()


def call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    remap_once(function.fn)
    return function.rewrite()(*args, **kwargs)


@cache
def _shape_facts(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return a tensor's shape and number of elements as constants of the language: one object for each shape."""
    return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.facts if type.is_block() else _shape_facts(())


def reduce_halves(self: Any, tensors: Any) -> list[Any]:
    """Reduce by a function of two elements: combine the two halves of the axis until one element is left.

    The interpreter would call the function once for each pair of elements.
    """
    assert self.axis is not None and not self.keep_dims
    parts = [np.moveaxis(tensor.handle.data, self.axis, 0) for tensor in tensors]
    dtypes = [tensor.dtype for tensor in tensors]
    while len(parts[0]) > 1:
        half = len(parts[0]) // 2
        pairs = [
            self.to_tensor(part[rows], dtype)
            for rows in (slice(half), slice(half, None))
            for part, dtype in zip(parts, dtypes, strict=True)
        ]
        combined = self.combine_fn.fn(*pairs)
        parts = [tensor.handle.data for tensor in (combined if isinstance(combined, tuple) else (combined,))]
    return [self.to_tensor(part[0], dtype) for part, dtype in zip(parts, dtypes, strict=True)]


_find_numpy_dtype = interpreter._get_np_dtype
_numpy_dtypes: dict[str, np.dtype] = {}


def numpy_dtype(dtype: Any) -> np.dtype:
    name = dtype.scalar.name
    if name not in _numpy_dtypes:
        _numpy_dtypes[name] = _find_numpy_dtype(dtype)
    return _numpy_dtypes[name]


_make_block_type = tl.block_type.__init__
_block_types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}


def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = shape if type(shape) is tuple else tuple([getattr(size, "value", size) for size in shape])
    key = element_ty.name, sizes
    if key not in _block_types:
        _make_block_type(self, element_ty, list(sizes))
        _block_types[key] = {**vars(self), "facts": _shape_facts(sizes)}
    vars(self).update(_block_types[key], element_ty=element_ty)


_cast = TritonSemantic.cast
_find_common_type = TritonSemantic.computation_type_impl
_common_types: dict[tuple[Any, ...], Any] = {}


def broadcast(_semantic: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Broadcast without copies."""
    if lhs.shape is rhs.shape:
        return lhs, rhs
    shape = _broadcast_shape(_sizes(lhs), _sizes(rhs))
    return _expand(lhs, shape), _expand(rhs, shape)


_broadcast_shape = cache(np.broadcast_shapes)


def _sizes(tensor: Any) -> tuple[int, ...]:
    return tensor.handle.data.shape if tensor.type.is_block() else ()


def _expand(tensor: Any, shape: tuple[int, ...]) -> Any:
    if _sizes(tensor) == shape:
        return tensor
    handle = interpreter.TensorHandle(np.broadcast_to(tensor.handle.data, shape), tensor.dtype)
    return tl.tensor(handle, tl.block_type(tensor.dtype, shape))


def cast(self: Any, input: Any, dst_ty: Any, *rounding: Any) -> Any:
    source, target = input.dtype, dst_ty.scalar
    if source is target:
        return input
    if source.name in CONVERTIBLE and target.name in NUMBERS and not any(rounding):
        handle = interpreter.TensorHandle(input.handle.data.astype(numpy_dtype(target)), target)
        return tl.tensor(handle, tl.block_type(target, handle.data.shape) if input.type.is_block() else target)
    return _cast(self, input, dst_ty, *rounding)


_unwrap = tl.core._unwrap_if_constexpr


def unwrap(value: Any) -> Any:
    if isinstance(value, tl.constexpr):
        return value.value
    return _unwrap(value) if isinstance(value, (list, tuple, tl.core.tuple)) else value


def common_type(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
    key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
    if key not in _common_types:
        _common_types[key] = _find_common_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
    return _common_types[key]


INTEGERS = ("int32", "int64")
NUMBERS = {**dict.fromkeys(INTEGERS, (int,)), **dict.fromkeys(("fp16", "fp32"), (int, float))}
"""Types that numpy computes with as a GPU does, and the Python numbers that become such a type beside a tensor."""
CONVERTIBLE = {"int1", "int8", *NUMBERS}
"""Types that numpy converts to `NUMBERS` as a GPU does."""
ARITHMETIC = {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply}
COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
LOGIC = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}


def shorten(operator: str, compute: np.ufunc) -> None:
    """Let numpy compute an operator of two numeric operands, or of a pointer and an offset.

    The interpreter passes through some twenty functions for each operation, which takes longer than the arithmetic.
    """
    general = getattr(tl.tensor, operator)
    kinds = {"int1": (), **dict.fromkeys(INTEGERS, ())} if operator in LOGIC else NUMBERS

    def run(left: Any, right: Any) -> Any:
        dtype, name = left.dtype, left.dtype.name
        number = right.value if type(right) is tl.constexpr else right
        if type(right) is tl.tensor:
            other, operand = right.dtype.name, right.handle.data
            if other in INTEGERS and dtype.is_ptr() and operator == "__add__":
                operand = max(1, dtype.element_ty.primitive_bitwidth // 8) * operand.astype(np.uint64)
            elif name in INTEGERS and other in INTEGERS:
                dtype = dtype if name == "int64" else right.dtype
            elif name not in kinds or name != other:
                return general(left, right)
        elif type(number) in kinds.get(name, ()):
            operand = numpy_dtype(dtype).type(number)
        else:
            return general(left, right)
        handle = interpreter.TensorHandle(compute(left.handle.data, operand), dtype)
        result = tl.int1 if operator in COMPARISONS else dtype
        is_block = left.type.is_block() or (type(right) is tl.tensor and right.type.is_block())
        return tl.tensor(handle, tl.block_type(result, handle.data.shape) if is_block else result)

    setattr(tl.tensor, operator, run)


def shorten_language() -> None:
    """Shorten the most frequent operations of `triton.language`, once it is patched."""
    for operator, compute in {**ARITHMETIC, **COMPARISONS, **LOGIC}.items():
        shorten(operator, compute)
    general = tl.tensor.__getitem__

    def index(tensor: Any, places: Any) -> Any:
        """Add dimensions of size 1."""
        if not tensor.type.is_block() or type(places) is not tuple:
            return general(tensor, places)
        assert all(place is None or place == slice(None) for place in places)
        data = tensor.handle.data[places]
        return tl.tensor(interpreter.TensorHandle(data, tensor.dtype), tl.block_type(tensor.dtype, data.shape))

    tl.tensor.__getitem__ = index


def repair() -> None:
    interpreter._convert_float = convert_float
    interpreter.InterpretedFunction.__call__ = call_device_function
    interpreter._patch_lang = remap_once
    interpreter._get_np_dtype = numpy_dtype
    interpreter.ReduceOps.generic_reduce = reduce_halves
    tl.tensor.__init__ = make_tensor
    tl.block_type.__init__ = make_block_type
    TritonSemantic.broadcast_impl_value = broadcast
    TritonSemantic.cast = cast
    tl.core._unwrap_if_constexpr = unwrap
    TritonSemantic.computation_type_impl = common_type
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)  # computed, but never reported
    interpreter.InterpreterBuilder.create_dot = dot
    assert tl.float8e4nv.name in DTYPES
