"""Overhead of a replayed call of a GPU backend: its function calls and launches against fixed limits.

The calls go through the public functions on CPU tensors. A stand-in driver notes the launches (`launches`), so that all
Python in front of the driver runs, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from call_counts import LAUNCHES, LIMITS

PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import ctypes
import json
import torch
import fake_driver
import launches
import sparge
from call_counts import count_calls
from sparge.dispatch import call_cache
from sparge.backends.gpu.backend import GpuBackend
from sparge.call import _calls, forget_recordings
from sparge.integrations.layers import Layer
from sparge.integrations.sdpa import Scope, sparse_sdpa

GpuBackend.unavailable_reason = lambda *_: None
started = launches.note_launches(parses=False)  # test_replay.py parses the kernels of such calls
tensors = [torch.zeros(1, 2, 512, 64, dtype=torch.bfloat16) for _ in range(3)]
options = {{"quantization": "int8_fp8", "backend": "triton"}}
mask = sparge.predict(*tensors[:2], topk=0.5, backend="triton")
padding, full = (torch.ones(1, 1, rows, 512, dtype=torch.bool) for rows in (1, 512))
pack = [tensor[0, :, :500].transpose(0, 1).contiguous() for tensor in tensors]
bounds, even = [0, 244, 500], [0, 250, 500]
calls = {{
    "replayed attention": lambda: sparge.attention(*tensors, topk=0.5, **options),
    "replayed attention, causal": lambda: sparge.attention(*tensors, topk=0.5, is_causal=True, **options),
    "replayed block_sparse_attention": lambda: sparge.block_sparse_attention(*tensors, mask, **options),
    "replayed attention, key padding": lambda: sparge.attention(*tensors, padding, topk=0.5, **options),
    "replayed attention, full mask": lambda: sparge.attention(*tensors, full, topk=0.5, **options),
    "replayed varlen_attention": lambda: sparge.varlen_attention(*pack, bounds, bounds, topk=0.5, **options),
    "replayed varlen_attention, equal lengths": lambda: sparge.varlen_attention(*pack, even, even, topk=0.5, **options),
    "replayed layer, Hilbert order": lambda: sparse_sdpa(scope, *tensors),
    "replayed predict": lambda: sparge.predict(*tensors[:2], topk=0.5, backend="triton"),
}}
scope = Scope(Layer("", sparge.Policy(topk=0.5, **options)), grid=(8, 8, 8))
found = {{}}
for name, call in calls.items():
    call_cache.forget()
    forget_recordings()
    count = count_calls(call, stand_ins=(launches.__file__, fake_driver.__file__, ctypes.__file__))
    (made,) = _calls.values()
    assert list(map(bool, made.recordings.values())) == [True], "one recording, which can be replayed"
    started.clear()
    call()
    found[name] = count, len(started)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(run_once: Callable[[str], Any]) -> dict[str, tuple[int, int]]:
    """Return the counts of each call."""
    return run_once(PROGRAM)


@pytest.mark.parametrize("name", LAUNCHES)
def test_replayed_calls_stay_within_their_limits(found: dict[str, tuple[int, int]], name: str) -> None:
    calls, launches = found[name]
    assert calls <= LIMITS[name]
    assert 0 < launches <= LAUNCHES[name]
