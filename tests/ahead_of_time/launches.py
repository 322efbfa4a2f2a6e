"""What would reach a GPU: kernels are compiled for a stand-in device, their launches noted instead of started.

Only for processes of their own (see `run_program` in conftest.py): Triton is patched for good.
"""

from __future__ import annotations

from typing import Any

from triton.compiler import CompiledKernel
from triton.runtime import driver
from worker import Device

from sparge.backends.cuda import launch

AFTER_HANDLES = 9
"""A launch is: programs in three dimensions, six of Triton's own things, the kernel's arguments."""


def note_launches(architecture: int = 90) -> list[tuple[str, list[Any]]]:
    """From now on, (kernel, [programs in three dimensions, then its arguments]) of every launch goes to this list."""
    started: list[tuple[str, list[Any]]] = []

    def start(kernel: CompiledKernel, arguments: tuple[Any, ...]) -> None:
        shown = [*arguments[:3], *arguments[AFTER_HANDLES:]]
        addresses = [x.data_ptr() if hasattr(x, "data_ptr") else x for x in shown]
        started.append((kernel.hash, addresses))

    driver.set_active(Device(architecture))
    launch._architecture = lambda *_: architecture  # type: ignore[assignment]
    CompiledKernel._init_handles = lambda *_: None
    CompiledKernel.launch_metadata = lambda *_: None
    CompiledKernel.function = 0
    CompiledKernel.run = property(lambda self: lambda *arguments: start(self, arguments))
    return started
