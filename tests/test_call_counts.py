"""Overhead of calls that run dense, in function calls; ahead_of_time/test_call_counts.py covers the GPU backends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sparge
from call_counts import LIMITS, count_calls

TENSORS = tuple(torch.randn(1, 2, 64, 32) for _ in range(3))


def sdpa() -> Tensor:
    return F.scaled_dot_product_attention(*TENSORS)


CALLS: dict[str, tuple[Callable[[], object], Callable[[], AbstractContextManager[object]]]] = {
    "attention, runs dense": (lambda: sparge.attention(*TENSORS), nullcontext),
    "attention, causal, runs dense": (lambda: sparge.attention(*TENSORS, is_causal=True), nullcontext),
    "replace_sdpa, runs dense": (sdpa, sparge.replace_sdpa),
}


@pytest.mark.parametrize("name", CALLS)
def test_steady_state_calls_stay_within_their_limits(name: str) -> None:
    run, context = CALLS[name]
    sparge.reset_stats()
    with torch.no_grad(), context():
        calls = count_calls(run)
        assert calls == count_calls(run), "counts are reproducible"
    assert sparge.stats().sparse == 0
    assert count_calls(sdpa) <= 2 < calls <= LIMITS[name]
