"""Requirements of the GPU kernels: the device, its compute capability, and the installed Triton."""

from __future__ import annotations

import torch

CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
"""The first compute capability with FP8 tensor cores."""
OLDEST_TRITON = (3, 4)
OLDEST_TRITON_WITH_GLUON = (3, 6)
"""The first Triton whose Gluon has all features that the kernels for compute capability 9.0 need."""


def triton_unavailable_reason(device: torch.device) -> str | None:
    """Return why Triton's kernels cannot run on a device; None if they can."""
    try:
        import triton
    except ImportError as error:
        return f"expected Triton to be installed, got {error!r}"
    if device.type == "cpu":
        from triton.runtime.interpreter import InterpretedFunction

        from sparge.backends.gpu.primitives import is_finite

        is_interpreted = isinstance(is_finite, InterpretedFunction)
        return None if is_interpreted else "expected a CUDA device (or TRITON_INTERPRET=1), got 'cpu'"
    if device.type != "cuda":
        return f"expected a CUDA device, got {device.type!r}"
    if torch.version.hip is not None:
        return "expected an NVIDIA GPU, got ROCm (untested)"
    if not hasattr(triton, "knobs"):
        return f"expected Triton {_dotted(OLDEST_TRITON)} or newer, got {triton.__version__}"
    return capability_unavailable_reason(device, CAPABILITY)


def gluon_unavailable_reason() -> str | None:
    """Return why Gluon kernels cannot be compiled; None if they can."""
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON_WITH_GLUON:
        return f"expected Triton {_dotted(OLDEST_TRITON_WITH_GLUON)} or newer, got {triton.__version__}"
    try:
        from sparge.backends.gpu import gluon  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"expected Gluon for Hopper in Triton {triton.__version__}, got {error!r}"
    return None


def capability_unavailable_reason(device: torch.device, least: tuple[int, int]) -> str | None:
    """Return why a CUDA device is too old for a compute capability; None if it is not."""
    actual = torch.cuda.get_device_capability(device)
    return None if actual >= least else f"expected compute capability {_dotted(least)} or newer, got {_dotted(actual)}"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
