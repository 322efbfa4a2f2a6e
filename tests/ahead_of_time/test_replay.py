"""A replayed call launches what a fresh one would: same kernels, programs and numbers, on its own memory.

Calls that differ in one thing each are made in turn. With nothing recorded each gives the launches to expect; then all
of them are recorded, and each is made again on other tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PROGRAM = """
import json
import torch
from launches import note_launches
from sparge.backends.cuda import pipeline, replay
from sparge.backends.triton.attention import attend
from sparge.block_mask import BlockMask
from sparge.call import Call
from sparge.config import Mean, Moment, TopCdf, TopK
from sparge.geometry import Shape

started = note_launches()
totals = torch.zeros(3, dtype=torch.int64)

def call_of(lengths=(300, 520), **changes):
    options = {"is_causal": True, "scale": 0.125, "sparsity": TopK(0.5), **changes}
    return Call(Shape(1, 2, 1, *lengths, 64, 64), **options)

def sparse(*tensors, totals=totals, quantization="int8_fp8", **changes):
    call = call_of(quantization=quantization, **changes)
    return pipeline.attention(*tensors, call, launcher=attend, totals=totals)

def given(*tensors, mask=None, quantization="int8_fp16", **changes):
    return pipeline.attend(*tensors, mask, call_of(quantization=quantization, **changes), launcher=attend)

def over_blocks(*tensors, **changes):
    mask = BlockMask.from_dense(torch.ones(1, 2, 3, 9, dtype=torch.bool), q_len=300, kv_len=520)
    return given(*tensors, mask=mask, **changes), (mask.kv_num_blocks, mask.kv_indices)

calls = CALLS

def make(text):
    tensors = [torch.zeros(1, heads, 600, 64, dtype=torch.bfloat16) for heads in (2, 1, 1)]
    lengths = (300, 400, 400) if "400" in text else (300, 520, 520)
    tensors = [tensor[:, :, :length] for tensor, length in zip(tensors, lengths)]
    started.clear()
    results, lists = eval(text)(tensors), ()
    if "blocks" in text:
        results, lists = results
    known = [*tensors, *results, totals, *lists]
    return {
        "launches": list(started), "known": [tensor.data_ptr() for tensor in known],
        "results": [(list(tensor.shape), str(tensor.dtype)) for tensor in results],
    }, known

alive, found = [], {text: [] for text in calls}
for text in calls:
    replay.forget()
    found[text].append(make(text)[0])
replay.forget()
for turn in range(3):
    for text in calls:
        with torch.inference_mode(turn == 1):
            made, known = make(text)
        alive.append(known)
        if turn:
            found[text].append(made)
assert len(replay._replays) == len(calls), "every call is a kind of its own"
assert all(replay._replays.values()), "every kind can be replayed"
print(json.dumps(found))
"""
CALLS = {
    "sparse": "lambda x: sparse(*x)",
    "scale": "lambda x: sparse(*x, scale=0.25)",
    "full": "lambda x: sparse(*x, is_causal=False)",
    "16 bits": "lambda x: sparse(*x, quantization='none')",
    "not counted": "lambda x: sparse(*x, totals=None)",
    "another share": "lambda x: sparse(*x, sparsity=TopK(0.25))",
    "another floor": "lambda x: sparse(*x, sparsity=TopK(0.5, min_blocks=3))",
    "no sink": "lambda x: sparse(*x, sparsity=TopK(0.5, sink=False))",
    "no diagonal": "lambda x: sparse(*x, sparsity=TopK(0.5, diagonal=False))",
    "by mass": "lambda x: sparse(*x, sparsity=TopCdf(0.5))",
    "fewer samples": "lambda x: sparse(*x, score=Moment(4))",
    "means": "lambda x: sparse(*x, score=Mean())",
    "text": "lambda x: sparse(*x, always_keep=((0, 70),))",
    "exact text": "lambda x: sparse(*x, always_keep=((0, 70),), exact_queries=((0, 70),))",
    "shorter": "lambda x: sparse(*x, lengths=(300, 400))",
    "dense": "lambda x: given(*x)",
    "dense, scale": "lambda x: given(*x, scale=0.25)",
    "dense, full": "lambda x: given(*x, is_causal=False)",
    "dense, 16 bits": "lambda x: given(*x, quantization='none')",
    "blocks": "lambda x: over_blocks(*x)",
}
LAUNCHES = {"16 bits": 4, "dense, 16 bits": 1, "dense": 5, "dense, scale": 5, "dense, full": 5, "blocks": 5}
ADDRESSES_FROM = 2**32


@pytest.fixture(scope="module")
def found(run_once: Callable[[str], Any]) -> dict[str, Any]:
    return run_once(PROGRAM.replace("CALLS", repr(list(CALLS.values()))))


def addresses(launch: list[Any]) -> list[int]:
    return [value for value in launch[1] if isinstance(value, int) and value >= ADDRESSES_FROM]


@pytest.mark.parametrize("name", CALLS)
def test_a_replay_launches_the_same(found: dict[str, Any], name: str) -> None:
    fresh, *replays = found[CALLS[name]]
    assert len(fresh["launches"]) == LAUNCHES.get(name, 7)
    for replayed in replays:
        assert replayed["results"] == fresh["results"]
        assert [kernel for kernel, _ in replayed["launches"]] == [kernel for kernel, _ in fresh["launches"]]
        moved = dict(zip(fresh["known"], replayed["known"], strict=True))
        for old, new in zip(fresh["launches"], replayed["launches"], strict=True):
            for before, after in zip(old[1], new[1], strict=True):
                if isinstance(before, int) and before >= ADDRESSES_FROM:
                    assert moved.setdefault(before, after) == after, "one buffer has one place"
                    assert after % 16 == 0
                else:
                    assert after == before
            assert len(set(addresses(new))) == len(set(addresses(old))), "two buffers of one kernel share a place"


def test_different_calls_launch_differently(found: dict[str, Any]) -> None:
    """Otherwise a call could pass for another above."""
    seen = set()
    for calls in found.values():
        launches = [
            (kernel, [value for value in values if not (isinstance(value, int) and value >= ADDRESSES_FROM)])
            for kernel, values in calls[0]["launches"]
        ]
        seen.add(repr(launches) + str(len(calls[0]["launches"])))
    assert len(seen) == len(CALLS)
