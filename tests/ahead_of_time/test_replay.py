"""A replayed call launches the same kernels with the same programs and numbers as a fresh call, on its own tensors.

The calls differ in one option each. First, each call runs without recordings, which gives the expected launches. Then
all calls are recorded, and each is replayed on other tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PROGRAM = """
import json
import torch
from launches import record_launches
from sparge.backends import base
from sparge.backends.base import KeptColumns, PartialResult
from sparge.masks.block_mask import BlockMask
from sparge.call import Call, _calls, forget_recordings, interned
from sparge.options.rules import Budget, TopCdf, TopK
from sparge.options.scores import Mean, Moment
from sparge.masks.geometry import Shape
from sparge.masks.segments import Segment, tables_of

started = record_launches()
triton = base.get("triton")
totals = torch.zeros(3, dtype=torch.int64)

def call_of(lengths=(300, 520), **changes):
    options = {"is_causal": True, "scale": 0.125, "sparsity": TopK(0.5), **changes}
    return interned(Call(Shape(1, 2, 1, *lengths, 64, 64), **options))

def sparse(*tensors, totals=totals, quantization="int8_fp8", **changes):
    call = call_of(quantization=quantization, **changes)
    return triton.attention(*tensors, call, totals=totals)

def given(*tensors, mask=None, quantization="int8_fp16", **changes):
    return triton.attend(*tensors, mask, call_of(quantization=quantization, **changes))

def over_blocks(*tensors, **changes):
    mask = BlockMask.from_dense(torch.ones(1, 2, 3, 9, dtype=torch.bool), q_len=300, kv_len=520)
    return given(*tensors, mask=mask, **changes), (mask.kv_num_blocks, mask.kv_indices)

def masked(*tensors, sizes=(1, 1, 1, 520), dtype=torch.bool, run=sparse, **changes):
    mask = torch.zeros(sizes, dtype=dtype)
    made = run(*tensors, attn_mask=mask, **changes)
    results, lists = made if run is over_blocks else (made, ())
    return results, (mask, *lists)

def packed(*tensors, dense=False, quantization="int8_fp8", **changes):
    results = torch.zeros(300, 2, 64, dtype=torch.bfloat16), torch.zeros(2, 300)
    parts = Segment(0, 140, 0, 250), Segment(140, 160, 250, 270)
    segments = tables_of(parts, 2, torch.device("cpu")).with_results(*results)
    options = {"is_causal": True, "scale": 0.125, "quantization": quantization, **changes}
    if not dense:
        options = {"sparsity": Budget(0.5), **options}
    call = interned(Call(Shape(2, 2, 1, 160, 270, 64, 64), segments=segments, **options))
    tensors = [tensor.expand(2, -1, -1, -1) for tensor in tensors]
    if dense:
        return triton.attend(*tensors, None, call)
    return triton.attention(*tensors, call, totals=totals)

def part(*tensors, dense=False, is_first=False, **changes):
    results = torch.zeros(1, 2, 300, 64), torch.zeros(1, 2, 300)
    masks = [
        BlockMask.from_dense(torch.ones(1, 2, rows, 40, dtype=torch.bool), q_len=rows * 128, kv_len=2560)
        for rows in (1, 2)
    ]
    columns = (slice(3, 8), slice(20, 24))
    call = call_of(sparsity=None, is_causal=False, quantization="int8_fp8", **changes)
    kept = None if dense else KeptColumns(masks, columns)
    triton.attend_part(*tensors, kept, call, PartialResult(*results, is_first), totals=None if dense else totals)
    return results

def predicted(query, key, value, **changes):
    mask = triton.predict(query, key, call_of(**changes))
    return mask.kv_num_blocks, mask.kv_indices

class Pool:
    width, first, order = 8, 0, torch.arange(16)
    total = staticmethod(lambda own: own)
    gather = staticmethod(lambda own: own.repeat(2, 1, 1))

def on_ranks(query, key, value, **changes):
    call = call_of(sparsity=Budget(0.5), **changes)
    keys = triton.summarize_keys(key, call)
    candidates = [triton.candidates(query, keys, call)]
    (mask,) = triton.choose_together(candidates, 9, Pool)
    return mask.kv_num_blocks, mask.kv_indices

calls = CALLS

def make(text):
    tensors = [torch.zeros(1, heads, 600, 64, dtype=torch.bfloat16) for heads in (2, 1, 1)]
    lengths = (300, 400, 400) if "400" in text else (300, 520, 520)
    tensors = [tensor[:, :, :length] for tensor, length in zip(tensors, lengths)]
    started.clear()
    results, lists = eval(text)(tensors), ()
    if isinstance(results[0], tuple):
        results, lists = results
    known = [*tensors, *results, totals, *lists]
    return {
        "launches": list(started), "known": [tensor.data_ptr() for tensor in known],
        "results": [(list(tensor.shape), str(tensor.dtype)) for tensor in results],
    }, known

alive, found = [], {text: [] for text in calls}
for text in calls:
    forget_recordings()
    found[text].append(make(text)[0])
forget_recordings()
for turn in range(3):
    for text in calls:
        with torch.inference_mode(turn == 1):
            made, known = make(text)
        alive.append(known)
        if turn:
            found[text].append(made)
recordings = [recorded for call in _calls.values() for recorded in call.recordings.values()]
several = sum("on_ranks" in text for text in calls)
assert len(recordings) == len(calls) + 3 * several, "every call has one recording; a call over ranks has four"
assert all(recordings), "every call can be replayed"
print(json.dumps(found))
"""
CALLS = {
    "sparse": "lambda x: sparse(*x)",
    "scale": "lambda x: sparse(*x, scale=0.25)",
    "full": "lambda x: sparse(*x, is_causal=False)",
    "unquantized": "lambda x: sparse(*x, quantization='none')",
    "no statistics": "lambda x: sparse(*x, totals=None)",
    "another share": "lambda x: sparse(*x, sparsity=TopK(0.25))",
    "another minimum": "lambda x: sparse(*x, sparsity=TopK(0.5, min_blocks=3))",
    "no sink": "lambda x: sparse(*x, sparsity=TopK(0.5, sink=False))",
    "no diagonal": "lambda x: sparse(*x, sparsity=TopK(0.5, diagonal=False))",
    "TopCdf": "lambda x: sparse(*x, sparsity=TopCdf(0.5))",
    "fewer samples": "lambda x: sparse(*x, score=Moment(4))",
    "means": "lambda x: sparse(*x, score=Mean())",
    "always_keep": "lambda x: sparse(*x, always_keep=((0, 70),))",
    "exact_queries": "lambda x: sparse(*x, always_keep=((0, 70),), exact_queries=((0, 70),))",
    "shorter": "lambda x: sparse(*x, lengths=(300, 400))",
    "dense": "lambda x: given(*x)",
    "dense, scale": "lambda x: given(*x, scale=0.25)",
    "dense, full": "lambda x: given(*x, is_causal=False)",
    "dense, unquantized": "lambda x: given(*x, quantization='none')",
    "blocks": "lambda x: over_blocks(*x)",
    "hidden keys": "lambda x: masked(*x)",
    "hidden keys per head": "lambda x: masked(*x, sizes=(1, 2, 1, 520))",
    "hidden keys, full": "lambda x: masked(*x, is_causal=False)",
    "hidden keys, unquantized": "lambda x: masked(*x, quantization='none')",
    "hidden keys, dense": "lambda x: masked(*x, run=given)",
    "hidden keys, blocks": "lambda x: masked(*x, run=over_blocks)",
    "hidden keys, window": "lambda x: masked(*x, window=(200, 0))",
    "bias per key": "lambda x: masked(*x, dtype=torch.bfloat16)",
    "bias per query": "lambda x: masked(*x, sizes=(1, 1, 300, 1), dtype=torch.bfloat16)",
    "a mask": "lambda x: masked(*x, sizes=(1, 1, 300, 520))",
    "a mask, means": "lambda x: masked(*x, sizes=(1, 1, 300, 520), score=Mean())",
    "a mask per head": "lambda x: masked(*x, sizes=(1, 2, 300, 520))",
    "a bias": "lambda x: masked(*x, sizes=(1, 1, 300, 520), dtype=torch.float32)",
    "a mask, unquantized": "lambda x: masked(*x, sizes=(1, 1, 300, 520), quantization='none')",
    "a mask, blocks": "lambda x: masked(*x, sizes=(1, 1, 300, 520), run=over_blocks)",
    "packed": "lambda x: packed(*x)",
    "packed, unquantized": "lambda x: packed(*x, quantization='none')",
    "packed, means": "lambda x: packed(*x, is_causal=False, skipped='mean')",
    "packed, dense": "lambda x: packed(*x, dense=True)",
    "packed, dense, unquantized": "lambda x: packed(*x, dense=True, quantization='none')",
    "part": "lambda x: part(*x)",
    "first part": "lambda x: part(*x, is_first=True)",
    "part, means": "lambda x: part(*x, skipped='mean')",
    "part, dense": "lambda x: part(*x, dense=True)",
    "ranks": "lambda x: on_ranks(*x)",
    "predicted": "lambda x: predicted(*x, scale=0.75)",
    "predicted, all": "lambda x: predicted(*x, sparsity=None)",
}
LAUNCHES = {
    "unquantized": 4,
    "dense, unquantized": 1,
    **dict.fromkeys(["dense", "dense, scale", "dense, full", "blocks"], 6),
    **dict.fromkeys(["hidden keys", "hidden keys per head", "hidden keys, full"], 10),
    "hidden keys, unquantized": 6,
    "hidden keys, dense": 8,
    "hidden keys, blocks": 8,
    **dict.fromkeys(["hidden keys, window", "bias per key", "bias per query", "a mask", "a mask per head"], 10),
    "a mask, means": 9,
    "a bias": 10,
    "a mask, unquantized": 6,
    "a mask, blocks": 7,
    "packed": 9,
    "packed, unquantized": 5,
    "packed, means": 10,
    "packed, dense": 6,
    "packed, dense, unquantized": 1,
    "part": 9,
    "first part": 9,
    "part, means": 11,
    "part, dense": 7,
    "ranks": 7,
    "predicted": 3,
    "predicted, all": 1,
}
FIRST_ADDRESS = 2**32


@pytest.fixture(scope="module")
def found(run_once: Callable[[str], Any]) -> dict[str, Any]:
    """Return the launches of each call. This takes 20 s, because Triton parses all kernels."""
    return run_once(PROGRAM.replace("CALLS", repr(list(CALLS.values()))))


def addresses(launch: list[Any]) -> list[int]:
    return [value for value in launch[1] if isinstance(value, int) and value >= FIRST_ADDRESS]


@pytest.mark.parametrize("name", CALLS)
def test_replays_launch_the_same_kernels(found: dict[str, Any], name: str) -> None:
    fresh, *replays = found[CALLS[name]]
    assert len(fresh["launches"]) == LAUNCHES.get(name, 8)
    for replayed in replays:
        assert replayed["results"] == fresh["results"]
        assert [kernel for kernel, _ in replayed["launches"]] == [kernel for kernel, _ in fresh["launches"]]
        moved = dict(zip(fresh["known"], replayed["known"], strict=True))
        for old, new in zip(fresh["launches"], replayed["launches"], strict=True):
            for before, after in zip(old[1], new[1], strict=True):
                if isinstance(before, int) and before >= FIRST_ADDRESS:
                    assert moved.setdefault(before, after) == after, "a buffer has one address in all launches"
                    assert after % 16 == 0
                else:
                    assert after == before
            assert len(set(addresses(new))) == len(set(addresses(old))), (
                "different buffers of a kernel have different addresses"
            )


def test_different_calls_launch_differently(found: dict[str, Any]) -> None:
    """Otherwise, the test above could not detect the replay of another call's recording."""
    seen = set()
    for calls in found.values():
        launches = [
            (kernel, [value for value in values if not (isinstance(value, int) and value >= FIRST_ADDRESS)])
            for kernel, values in calls[0]["launches"]
        ]
        seen.add(repr(launches) + str(len(calls[0]["launches"])))
    assert len(seen) == len(CALLS)
