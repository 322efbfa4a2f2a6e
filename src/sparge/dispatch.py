"""Which backend serves a call, in which arithmetic, and when dense attention is the better choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sparge.geometry import Shape

Function = TypeVar("Function", bound=Callable[..., Any])

BACKENDS = ("hopper", "triton", "torch", "reference")
TRITON_CAPABILITY = (8, 0)
HOPPER_CAPABILITY = (9, 0)
GLUON_TRITON = (3, 6)
"""The first Triton whose Gluon has all that the Hopper kernel needs."""
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
    "hopper": Crossover(keys=4096, queries=2048, scores=2**29),
}
"""Measured: docs/performance.md, "Crossover"; Hopper's is Triton's, where preparing and the host decide as well."""


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
    if backend in ("triton", "hopper"):
        missing = (triton_missing if backend == "triton" else hopper_missing)(device.type, device.index)
        if missing is not None:
            raise NotImplementedError(f"backend {backend!r}: {missing}")
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
    missing = hopper_missing(device.type, device.index)
    if missing is None:
        return Choice("hopper", "warp-specialised kernel for compute capability 9.0")
    return Choice("triton", f"block-sparse kernels; not 'hopper': {missing}")


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


@_constant
def hopper_missing(device_type: str, index: int | None) -> str | None:
    """What keeps the Hopper kernel from running on a device: "expected X, got Y", or None."""
    missing = triton_missing(device_type, index)
    if missing is not None:
        return missing
    if device_type != "cuda":
        return f"expected a CUDA device, got {device_type!r}"
    capability = torch.cuda.get_device_capability(index)
    if capability != HOPPER_CAPABILITY:
        return f"expected compute capability 9.0, got {capability[0]}.{capability[1]}"
    return gluon_missing()


def gluon_missing() -> str | None:
    """What keeps Gluon kernels from being compiled: "expected X, got Y", or None."""
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < GLUON_TRITON:
        return f"expected Triton {GLUON_TRITON[0]}.{GLUON_TRITON[1]} or newer, got {triton.__version__}"
    try:
        from sparge.backends.hopper import gluon  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"expected Gluon for Hopper in Triton {triton.__version__}, got {error!r}"
    return None


def kernels_for(backend: str, dtype: torch.dtype, quantization: str, *, has_mask: bool) -> str:
    """The backend whose attention kernel computes a call: masks and unquantised float32 are Triton's on Hopper, too."""
    if backend == "hopper" and (has_mask or (quantization == "none" and dtype == torch.float32)):
        return "triton"
    return backend


def resolve_quantization(quantization: str, backend: str, device: torch.device, *, has_mask: bool = False) -> str:
    """ "auto" means the fastest arithmetic: 8 bits in the GPU's kernels, none elsewhere.

    Raises:
        NotImplementedError: the device or the backend has no such arithmetic.
    """
    if quantization == "int8_fp8_codes":
        if backend not in ("hopper", "reference"):
            raise NotImplementedError(
                f"quantization 'int8_fp8_codes': expected backend 'hopper' or 'reference', got {backend!r}"
            )
        if backend == "hopper" and has_mask:
            raise NotImplementedError("quantization 'int8_fp8_codes': expected no attn_mask ('int8_fp8' takes one)")
    if backend == "hopper" and quantization == "auto":
        return "int8_fp8" if has_mask else "int8_fp8_codes"
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
    return below(CROSSOVERS.get(backend, CROSSOVERS["torch"]), shape.batch * shape.heads, shape.q_len, shape.kv_len)


def below(limit: Crossover, heads: int, q_len: int, kv_len: int) -> bool:
    """Whether a call is smaller than a crossover; ``heads`` are those of the whole batch."""
    return kv_len < limit.keys or q_len < limit.queries or heads * q_len * kv_len < limit.scores


@_constant
def crossover_for(device_type: str, index: int | None) -> Crossover:
    """The crossover of the backend that "auto" takes on a device, looked up once."""
    key = (device_type, index)
    if key not in _CROSSOVER_OF:
        device = torch.device(device_type) if index is None else torch.device(device_type, index)
        backend = choose_backend("auto", device).backend
        _CROSSOVER_OF[key] = CROSSOVERS.get(backend, CROSSOVERS["torch"])
    return _CROSSOVER_OF[key]


_CROSSOVER_OF: dict[tuple[str, int | None], Crossover] = {}
