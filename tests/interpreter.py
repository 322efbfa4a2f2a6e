"""Triton's interpreter with the arithmetic of the hardware.

It truncates to bfloat16 (a GPU rounds), loses the carry when rounding to FP8, and multiplies the bit patterns of
bfloat16 operands as integers. It also remaps the language at every call of a device function, 40 % of its time.
`repair` replaces its conversion, its matrix product and that call; the kernels under test stay as they are.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

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
    """Round to nearest, ties to even; FP8 saturates; the result is the bits."""
    values = _as_torch(data, source).float()
    if str(target) == "fp8e4nv":
        values = values.clamp(-FP8_MAX, FP8_MAX)
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[target.primitive_bitwidth // 8]
    return values.to(DTYPES[str(target)]).view(bits).numpy()


def dot(_builder: Any, a: Any, b: Any, d: Any, _precision: Any, _imprecise: Any) -> Any:
    """a b + d in the accumulator's type, whatever the operands'."""
    operands = [x.data if x.dtype.is_int() else _as_torch(x.data, x.dtype).float().numpy() for x in (a, b)]
    product = np.matmul(*operands, dtype=d.data.dtype) + d.data
    return interpreter.TensorHandle(product, d.dtype.scalar)


_remapped: set[int] = set()


def call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Launches remap `triton.language` and restore it; what device functions of Triton's own modules see stays."""
    module = id(function.fn.__globals__)
    if module not in _remapped:
        interpreter._patch_lang(function.fn)
        _remapped.add(module)
    return function.rewrite()(*args, **kwargs)


def repair() -> None:
    interpreter._convert_float = convert_float
    interpreter.InterpretedFunction.__call__ = call_device_function
    interpreter.InterpreterBuilder.create_dot = dot
    assert tl.float8e4nv.name in DTYPES
