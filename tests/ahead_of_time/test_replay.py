"""A replayed call launches what the recorded one launched: same kernels, programs and numbers, on other memory."""

from __future__ import annotations

from typing import Any

import pytest

from ahead_of_time.conftest import run_program

PROGRAM = """
import json
import torch
from launches import note_launches
from sparge.backends.triton import pipeline, replay
from sparge.config import Moment, TopK
from sparge.geometry import Shape

started = note_launches()
shape = Shape(2, 4, 2, 300, 520, 64, 64)
common = {"is_causal": True, "scale": 0.125}
totals = torch.zeros(2, dtype=torch.int64)
rules = {"sparsity": TopK(0.5), "score": Moment(), "attn_mask": None, "always_keep": (), "pv_threshold": None}
functions = {
    "sparse, 8 bits": lambda *x: pipeline.sparse_attention(
        *x, shape, **common, **rules, quantization="int8_fp8", totals=totals),
    "sparse, 16 bits": lambda *x: pipeline.sparse_attention(
        *x, shape, **common, **rules, quantization="none", totals=None),
    "dense, 8 bits": lambda *x: pipeline.attention(*x, None, shape, **common, quantization="int8_fp16"),
}
found = {}
for name, function in functions.items():
    calls, alive = [], []
    for _ in range(3):
        tensors = [torch.zeros(2, heads, length, 64, dtype=torch.bfloat16)
                   for heads, length in ((4, 300), (2, 520), (2, 520))]
        started.clear()
        output, lse = function(*tensors)
        alive += [tensors, output, lse]
        memory = [x.data_ptr() for x in (*tensors, output, lse, totals)]
        calls.append((list(started), memory, [list(output.shape), str(output.dtype), list(lse.shape), str(lse.dtype)]))
    found[name] = calls
assert len(replay._replays) == len(functions) and all(replay._replays.values())
print(json.dumps(found))
"""
LAUNCHES = {"sparse, 8 bits": 7, "sparse, 16 bits": 4, "dense, 8 bits": 5}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_program(PROGRAM)


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("again", [1, 2])
def test_a_replay_launches_the_same(found: dict[str, Any], name: str, again: int) -> None:
    recorded, memory, results = found[name][0]
    replayed, new_memory, new_results = found[name][again]
    assert len(recorded) == LAUNCHES[name]
    assert new_results == results
    assert [kernel for kernel, _ in replayed] == [kernel for kernel, _ in recorded]
    moved = dict(zip(memory, new_memory, strict=True))
    for (_, arguments), (_, new_arguments) in zip(recorded, replayed, strict=True):
        pairs = list(zip(arguments, new_arguments, strict=True))
        for old, new in pairs:
            if isinstance(old, int) and old > 2**32:  # an address
                assert moved.setdefault(old, new) == new, "one buffer has one place"
                assert new % 16 == 0
            else:
                assert new == old
        addresses = {pair[0]: pair[1] for pair in pairs if isinstance(pair[0], int) and pair[0] > 2**32}
        assert len(set(addresses.values())) == len(addresses), "two buffers of one kernel share a place"
    others = set(moved) - set(memory)
    assert others, "there were buffers besides inputs and results"
