"""Record kernel launches without a GPU: kernels are built for a fake device and not started.

A launch depends on the source, types and options of the kernel but not on its machine code, so no code is generated.

Import this module in a separate process only (`run_program` in conftest.py), because it patches Triton permanently.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel
from triton.runtime import driver as triton_driver
from worker import Device

sys.path.insert(0, str(Path(__file__).parents[1]))

from fake_driver import FakeDriver
from sparge.backends.gpu import driver, launch, replay
from sparge.dispatch import call_cache

FIRST_KERNEL_ARGUMENT = 9
"""The arguments of a launch are the grid (3), arguments of Triton (6), and then the arguments of the kernel."""

CODE_METADATA = {
    "shared": 0,
    "tmem_size": 0,
    "global_scratch_size": 0,
    "global_scratch_align": 1,
    "profile_scratch_size": 0,
    "profile_scratch_align": 1,
    "tensordesc_meta": [{"swizzle": 0, "elem_size": 2, "elem_type": 0, "block_size": [1], "fp4_padded": False}] * 8,
}
"""Placeholders for the metadata that code generation adds."""


def add_stages_without_code(_backend: Any, stages: dict[str, Any], *_: Any) -> None:
    """Replace all compilation stages by empty ones. The front end still parses a kernel and checks its types."""

    def skip(_module: Any, metadata: dict[str, Any]) -> bytes:
        metadata |= CODE_METADATA | {"name": "kernel"}
        return b""

    stages |= dict.fromkeys(("glir", "ttgir", "ttir", "cubin"), skip)  # Gluon starts with the first or second


FORMATS = {
    "i1": "b",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "fp32": "f",
    "u64": "Q",
    "u32": "I",
    "map": "Q120x",
}
RANK = re.compile(r"tensordesc<[^\[]*\[([^\]]*)\]")


def types_of(kernel: CompiledKernel) -> list[str]:
    """Return the type of each argument. A tensor descriptor is expanded to its tensor map, sizes and strides."""

    def flattened(kind: Any) -> list[str]:
        if isinstance(kind, tuple):
            return [each for part in kind for each in flattened(part)]
        described = RANK.match(kind)
        if described is not None:
            rank = described.group(1).count(",") + 1
            return ["map", *["i32"] * rank, *["i64"] * rank]
        return ["u64" if kind.startswith("*") else kind]

    return flattened(tuple(kernel.src.signature.values()))


def arguments_of(kernel: CompiledKernel, arguments: Iterable[Any]) -> list[Any]:
    """Return the numbers and addresses that a kernel receives for its arguments."""

    def flattened(value: Any) -> list[Any]:
        if isinstance(value, tuple):
            return [each for part in value for each in flattened(part)]
        if hasattr(value, "block_shape"):  # a descriptor
            return [value.base.data_ptr(), *value.shape, *value.strides]
        return [value.data_ptr() if hasattr(value, "data_ptr") else value]

    values = zip(types_of(kernel), flattened(tuple(arguments)), strict=True)
    passed = [value for kind, value in values if kind != "constexpr"]
    return [struct.unpack("f", struct.pack("f", value))[0] if isinstance(value, float) else value for value in passed]


def record_launches(architecture: int = 90) -> list[tuple[str, list[Any]]]:
    """Return a list that records (kernel, [programs, *arguments]) of each launch, including replays."""
    started: list[tuple[str, list[Any]]] = []
    fake = FakeDriver(reorders=False)
    handles: dict[str, int] = {}

    def start(kernel: CompiledKernel, arguments: tuple[Any, ...]) -> None:
        started.append((kernel.hash, [arguments[0], *arguments_of(kernel, arguments[FIRST_KERNEL_ARGUMENT:])]))

    def handle_of(kernel: CompiledKernel) -> int:
        if kernel.hash not in handles:
            formats = [f"={FORMATS[kind]}" for kind in types_of(kernel) if kind != "constexpr"]

            def replay(programs: int, arguments: list[bytes]) -> None:
                values = [struct.unpack(kind, each)[0] for kind, each in zip(formats, arguments, strict=True)]
                started.append((kernel.hash, [programs, *values]))

            handles[kernel.hash] = fake.add_function(replay, [struct.calcsize(kind) for kind in formats])
        return handles[kernel.hash]

    triton_driver.set_active(Device(architecture))
    launch._architecture = lambda *_: architecture  # type: ignore[assignment]
    CUDABackend.add_stages = add_stages_without_code
    CompiledKernel._init_handles = lambda *_: None
    CompiledKernel.launch_metadata = lambda *_: None
    CompiledKernel.function = property(handle_of, lambda *_: None)
    CompiledKernel.run = property(lambda self: lambda *arguments: start(self, arguments))
    driver.load = lambda: fake  # type: ignore[assignment]
    replay._current_stream = lambda _: 0
    replay._is_capturing = lambda: False
    call_cache._can_replay = lambda _: True
    return started
