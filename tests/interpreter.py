"""Patch Triton's interpreter: correct its arithmetic and halve its run time.

The interpreter truncates to bfloat16 (a GPU rounds), loses the carry when rounding to FP8, and multiplies the bit
patterns of bfloat16 operands as integers. `repair` replaces the conversion and the matrix product. The interpreter also
patches the language at every launch and every call of a device function, and recomputes types and shapes for every
operation; `repair` caches them. The kernels under test are unchanged.
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
    """Handle of a patched language. It restores nothing, because the next launch needs the same patch."""

    def restore(self) -> None:
        pass


_remap = interpreter._patch_lang
_remapped: set[int] = set()


def remap_once(function: Any) -> Remapped:
    """Patch `triton.language` once for each module that defines functions."""
    module = id(function.__globals__)
    if module not in _remapped:
        _remap(function)
        _remapped.add(module)
    return Remapped()


def call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    remap_once(function.fn)
    return function.rewrite()(*args, **kwargs)


@cache
def _shape_and_numel(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return a tensor's shape and number of elements as constants of the language."""
    return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_and_numel(tuple(type.shape) if type.is_block() else ())


def reduce_halves(self: Any, tensors: Any) -> list[Any]:
    """Reduce an axis with a binary function: combine its two halves until one element is left.

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
    key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
    if key not in _block_types:
        _make_block_type(self, element_ty, shape)
        _block_types[key] = dict(vars(self))
    else:
        vars(self).update(_block_types[key], element_ty=element_ty)


_broadcast = TritonSemantic.broadcast_impl_value
_cast = TritonSemantic.cast
_find_common_type = TritonSemantic.computation_type_impl
_common_types: dict[tuple[Any, ...], Any] = {}


def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Broadcast only operands of different shape; `_shape_and_numel` returns the same object for equal shapes."""
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast(self, lhs, rhs)


def cast(self: Any, input: Any, dst_ty: Any, *rounding: Any) -> Any:
    return input if input.dtype is dst_ty else _cast(self, input, dst_ty, *rounding)


def common_type(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
    key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
    if key not in _common_types:
        _common_types[key] = _find_common_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
    return _common_types[key]


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
    TritonSemantic.computation_type_impl = common_type
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)  # computed, but never reported
    interpreter.InterpreterBuilder.create_dot = dot
    assert tl.float8e4nv.name in DTYPES
