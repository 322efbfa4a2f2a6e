"""What would reach a GPU: kernels are built for a stand-in device, their launches noted instead of started.

A launch depends on the kernel's source, types and options, not on its machine code: none is made.

Only for processes of their own (see `run_program` in conftest.py): Triton is patched for good.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel
from triton.runtime import driver
from worker import Device

from sparge.backends.cuda import launch

AFTER_HANDLES = 9
"""A launch is: programs in three dimensions, six of Triton's own things, the kernel's arguments."""


WITHOUT_CODE = {
    "shared": 0,
    "tmem_size": 0,
    "global_scratch_size": 0,
    "global_scratch_align": 1,
    "profile_scratch_size": 0,
    "profile_scratch_align": 1,
    "tensordesc_meta": None,
}
"""What code generation would find out about a kernel."""


def add_stages_without_code(_backend: Any, stages: dict[str, Any], *_: Any) -> None:
    """Stages of compilation that stop where the language has been read and its types have been checked."""

    def skip(_module: Any, metadata: dict[str, Any]) -> bytes:
        metadata |= WITHOUT_CODE | {"name": "kernel"}
        return b""

    stages |= dict.fromkeys(("glir", "ttgir", "ttir", "cubin"), skip)  # Gluon begins with the first or second


def note_launches(architecture: int = 90) -> list[tuple[str, list[Any]]]:
    """From now on, (kernel, [programs in three dimensions, then its arguments]) of every launch goes to this list."""
    started: list[tuple[str, list[Any]]] = []

    def start(kernel: CompiledKernel, arguments: tuple[Any, ...]) -> None:
        shown = [*arguments[:3], *arguments[AFTER_HANDLES:]]
        tensors = [getattr(x, "base", x) for x in shown]  # of descriptors
        addresses = [x.data_ptr() if hasattr(x, "data_ptr") else x for x in tensors]
        addresses = [repr(x) if is_dataclass(x) else x for x in addresses]  # a `ScoreSpec`
        started.append((kernel.hash, addresses))

    driver.set_active(Device(architecture))
    launch._architecture = lambda *_: architecture  # type: ignore[assignment]
    CUDABackend.add_stages = add_stages_without_code
    CompiledKernel._init_handles = lambda *_: None
    CompiledKernel.launch_metadata = lambda *_: None
    CompiledKernel.function = 0
    CompiledKernel.run = property(lambda self: lambda *arguments: start(self, arguments))
    return started
