"""`launch` starts the same kernels as Triton, with the same arguments.

A separate process compiles for a fake device and records the launches. The same call runs twice: the first goes
through Triton, the second uses the cached kernel. Then one property of the arguments changes at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from sparge.backends.gpu.launch import launch

PROGRAM = """
import json
import torch
from launches import record_launches
from sparge.backends.gpu import launch as module
from sparge.backends.gpu.stages.summary import key_similarity_kernel

started = record_launches()
memory = torch.zeros(4096)
defaults = {
    "key": memory.bfloat16(), "seen": memory, "center": memory, "similarity": memory,
    "key_strides": (4096, 512, 64), "seen_strides": (0, 0, 0), "center_strides": (64, 0),
    "kv_len": 100, "dim": 64, "num_warps": 4,
}

def call(**changes):
    use = {**defaults, **changes}
    module.launch(
        key_similarity_kernel,
        use.get("programs", 8),
        key_ptr=use["key"], seen_ptr=use["seen"], center_ptr=use["center"], similarity_ptr=use["similarity"],
        key_strides=use["key_strides"], seen_strides=use["seen_strides"], center_strides=use["center_strides"],
        kv_heads=1, kv_len=use["kv_len"], kv_blocks=2, first_key=0,
        HEAD_DIM=use["dim"], HEAD_DIM_PADDED=use["dim"], HAS_SEEN=False, num_warps=use["num_warps"],
    )
    kernel, arguments = started[-1]
    return kernel, len(module._kernel_entry(key_similarity_kernel).compiled), arguments

cases = CASES
print(json.dumps([call(), call(), *[call(**eval(case)) for case in cases]]))
"""
CHANGES = {
    "no change": ("{}", False),
    "another length": ("{'kv_len': 101}", False),
    "other programs": ("{'programs': 9}", False),
    "other memory": ("{'similarity': torch.zeros(4096)}", False),
    "another dtype": ("{'key': memory.half()}", True),
    "memory off by 4 bytes": ("{'center': memory[1:]}", True),
    "a stride that is not a multiple of 16": ("{'key_strides': (4096, 512, 72)}", True),
    "another multiple of 16": ("{'key_strides': (4096, 512, 128)}", False),
    "a stride of 1": ("{'center_strides': (1, 0)}", True),
    "a stride of 64 bits": ("{'key_strides': (2**33, 512, 64)}", True),
    "another constant": ("{'dim': 32}", True),
    "another option": ("{'num_warps': 8}", True),
}


@pytest.fixture(scope="module")
def calls(run_once: Callable[[str], Any]) -> list[Any]:
    return run_once(PROGRAM.replace("CASES", repr([case for case, _ in CHANGES.values()])))


def test_cached_kernels_get_the_same_arguments(calls: list[Any]) -> None:
    by_triton, by_launch = calls[:2]
    assert by_launch == by_triton
    assert by_triton[1] == 1


@pytest.mark.parametrize("name", CHANGES)
def test_changed_specializations_recompile(calls: list[Any], name: str) -> None:
    position = 2 + list(CHANGES).index(name)
    kernel, known, _ = calls[position]
    is_new = CHANGES[name][1]
    assert known - calls[position - 1][1] == is_new
    assert (kernel != calls[0][0]) == is_new


@triton.jit(do_not_specialize=["length"])
def specialized_kernel(source_ptr, source_strides, scale, length, width, BLOCK: tl.constexpr):
    pass


def test_kernels_specialized_on_numbers_raise() -> None:
    """Such a kernel would run with another number than the one it was compiled for."""
    source = torch.zeros(4)
    arguments = {"source_ptr": source, "source_strides": (1,), "scale": 1.0, "length": 4, "width": 16, "BLOCK": 4}
    with pytest.raises(AssertionError, match=r"expected do_not_specialize for \['scale', 'width'\]"):
        launch(specialized_kernel, 1, **arguments)
