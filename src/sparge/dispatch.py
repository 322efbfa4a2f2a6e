"""Which backend serves a call, in which arithmetic, and when dense attention is the better choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sparge.geometry import Shape

Function = TypeVar("Function", bound=Callable[..., Any])

BACKENDS = ("triton", "torch", "reference")
TRITON_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Choice:
    """A backend's name and why it was taken."""

    backend: str
    reason: str


@dataclass(frozen=True)
class Crossover:
    """Sizes below any of which dense attention is faster; ``scores`` counts them over all heads."""

    keys: int
    queries: int
    scores: int


CROSSOVERS = {
    "torch": Crossover(keys=2048, queries=128, scores=2**23),
    "triton": Crossover(keys=4096, queries=2048, scores=2**29),
}
"""Measured: docs/performance.md, "Crossover"."""


def choose_backend(backend: str, device: torch.device) -> Choice:
    """Resolve "auto", and raise where the chosen backend cannot serve the device.

    Raises:
        ValueError: unknown backend.
        NotImplementedError: the backend cannot serve the device.
    """
    if backend != "auto" and backend not in BACKENDS:
        listed = ", ".join(map(repr, ("auto", *BACKENDS)))
        raise ValueError(f"backend: expected one of {listed}, got {backend!r}")
    if device.type == "meta":
        raise NotImplementedError(f"backend {backend!r}: expected a device that holds data, got 'meta'")
    if backend == "auto":
        return _choose_for(device)
    if backend == "triton":
        missing = triton_missing(device.type, device.index)
        if missing is not None:
            raise NotImplementedError(f"backend 'triton': {missing}")
    if backend == "reference" and device.type == "mps":
        raise NotImplementedError("backend 'reference': expected a device with float64, got 'mps'")
    return Choice(backend, "asked for by name")


def _choose_for(device: torch.device) -> Choice:
    if device.type == "cpu":
        return Choice("torch", "gathers kept blocks for torch's CPU attention")
    if device.type != "cuda":
        return Choice("torch", f"runs on any device; no kernels for {device.type!r} in this version")
    missing = triton_missing(device.type, device.index)
    if missing is not None:
        return Choice("torch", f"runs on any device; not 'triton': {missing}")
    return Choice("triton", "block-sparse kernels")


def _constant(function: Function) -> Function:
    """For torch.compile: the result does not change. (torch.compiler's own decorator imports Triton.)"""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def triton_missing(device_type: str, index: int | None) -> str | None:
    """What keeps the Triton kernels from running on a device: "expected X, got Y", or None."""
    try:
        import triton
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError as error:
        return f"expected Triton to be installed, got {error!r}"
    if device_type == "cpu":
        from sparge.backends.triton.attention import attention_kernel

        interpreted = isinstance(attention_kernel, InterpretedFunction)
        return None if interpreted else "expected a CUDA device (or TRITON_INTERPRET=1), got 'cpu'"
    if device_type != "cuda":
        return f"expected a CUDA device, got {device_type!r}"
    if torch.version.hip is not None:
        return "expected an NVIDIA GPU, got ROCm (untested)"
    if not hasattr(triton, "knobs"):
        return f"expected Triton 3.4 or newer, got {triton.__version__}"
    capability = torch.cuda.get_device_capability(index)
    if capability < TRITON_CAPABILITY:
        return f"expected compute capability 8.0 or newer, got {capability[0]}.{capability[1]}"
    return None


def resolve_quantization(quantization: str, backend: str, device: torch.device) -> str:
    """ "auto" means the fastest arithmetic: 8 bits in Triton's kernels, none elsewhere.

    Raises:
        NotImplementedError: the device has no such arithmetic.
    """
    if backend != "triton":
        return "none" if quantization == "auto" else quantization
    missing = fp8_missing(device.type, device.index)
    if quantization == "int8_fp8" and missing is not None:
        raise NotImplementedError(f"quantization 'int8_fp8': {missing} ('int8_fp16' works there)")
    if quantization == "auto":
        return "int8_fp8" if missing is None else "int8_fp16"
    return quantization


@_constant
def fp8_missing(device_type: str, index: int | None) -> str | None:
    """What keeps a device from multiplying FP8 numbers: "expected X, got Y", or None."""
    capability = torch.cuda.get_device_capability(index) if device_type == "cuda" else FP8_CAPABILITY
    if capability >= FP8_CAPABILITY:
        return None
    return f"expected compute capability 8.9 or newer, got {capability[0]}.{capability[1]}"


def prefers_dense(shape: Shape, backend: str) -> bool:
    """Whether prediction would cost more than it saves at these sizes."""
    limit = CROSSOVERS.get(backend, CROSSOVERS["torch"])
    scores = shape.batch * shape.heads * shape.q_len * shape.kv_len
    return shape.kv_len < limit.keys or shape.q_len < limit.queries or scores < limit.scores
