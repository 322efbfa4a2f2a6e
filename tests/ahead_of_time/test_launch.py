"""`launch` starts the kernel Triton would start, with the arguments Triton would pass.

A process of its own compiles for a stand-in device and records what would reach the GPU. The same call is made twice:
the first goes through Triton, the second takes the short way. Then one fact at a time changes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, sys
import torch
from triton.compiler import CompiledKernel
from triton.runtime import driver

sys.path.insert(0, FOLDER)
from worker import Device
from sparge.backends.triton import launch as module
from sparge.backends.triton.statistics import reduce_kernel, key_similarity_kernel

driver.set_active(Device(90))
started = []
CompiledKernel._init_handles = lambda self: None
CompiledKernel.launch_metadata = lambda self, *_: None
CompiledKernel.function = 0
CompiledKernel.run = property(lambda self: lambda *arguments: started.append((self.hash, arguments)))

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
        kv_heads=1, kv_len=use["kv_len"], kv_blocks=2,
        HEAD_DIM=use["dim"], HEAD_DIM_PADDED=use["dim"], HAS_SEEN=False, num_warps=use["num_warps"],
    )
    kernel, arguments = started[-1]
    shown = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments if not hasattr(a, "hash")]
    return kernel, len(module._compiled), repr(shown[:4] + shown[6:])

cases = CASES
print(json.dumps([call(), call(), *[call(**eval(case)) for case in cases]]))
"""
CHANGES = {
    "the same": ("{}", False),
    "another length": ("{'kv_len': 101}", False),
    "other programs": ("{'programs': 9}", False),
    "other memory": ("{'similarity': torch.zeros(4096)}", False),
    "another dtype": ("{'key': memory.half()}", True),
    "memory off by 4 bytes": ("{'center': memory[1:]}", True),
    "a stride of no multiple of 16": ("{'key_strides': (4096, 512, 72)}", True),
    "another multiple of 16": ("{'key_strides': (4096, 512, 128)}", False),
    "a stride of 1": ("{'center_strides': (1, 0)}", True),
    "a stride of 64 bits": ("{'key_strides': (2**33, 512, 64)}", True),
    "another constant": ("{'dim': 32}", True),
    "another option": ("{'num_warps': 8}", True),
}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    cases = [case for case, _ in CHANGES.values()]
    program = f"FOLDER = {str(Path(__file__).parent)!r}\n" + PROGRAM.replace("CASES", repr(cases))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_short_way_passes_the_same_arguments(calls: list[Any]) -> None:
    by_triton, by_us = calls[:2]
    assert by_us == by_triton
    assert by_triton[1] == 1


@pytest.mark.parametrize("name", CHANGES)
def test_a_kernel_is_compiled_anew_when_a_fact_changes(calls: list[Any], name: str) -> None:
    position = 2 + list(CHANGES).index(name)
    kernel, known, _ = calls[position]
    is_new = CHANGES[name][1]
    assert known - calls[position - 1][1] == is_new
    assert (kernel != calls[0][0]) == is_new
