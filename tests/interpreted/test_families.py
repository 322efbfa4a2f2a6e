"""The accuracy contract in the interpreter: errors of the Triton kernels on input families are within the limits."""

from __future__ import annotations

import pytest
import torch
from benchmarks.numerics.captured import captured_families
from benchmarks.numerics.families import Family, by_name
from benchmarks.numerics.problem import problem_of

from interpreted.conftest import call_of, shape_of
from sparge.backends import base

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SELECTED = [
    by_name(name)
    for name in (
        *("sink-9", "sink-13", "sink-13-several", "peaks-128-8", "one-row-14", "rising-40", "step-down-12", "field"),
        *("outliers-k-matched-3x30", "outliers-q-matched-3x30", "outliers-both-3x30"),
        *("token-k-irrelevant-1e3", "token-k-decisive-1e2", "token-q-irrelevant-1e4", "token-v-decisive-1e4"),
        *("value-mean-10", "tiny-values", "one-hot", "same-keys", "random-4", "text"),
    )
]
"""A selection of families, because an interpreted call takes 0.5 s."""
CAPTURED = [family for family in captured_families() if family.name in ("smollm2-18", "tiny-video-3-15")]
"""For each model, the call with the largest quantization error."""


def assert_within_limits(
    family: Family, quantization: str, *, kv_len: int = 1024, head_dim: int | None = None, is_causal: bool = False
) -> None:
    """Check a call with 64 channels, or 128 for sinks, whose logit is then rounded less."""
    if head_dim is None:
        head_dim = 128 if "sink" in family.kind else 64
    problem = problem_of(family, 64, kv_len, head_dim=head_dim, is_causal=is_causal)
    shape = shape_of(problem.query, problem.key, problem.value)
    call = call_of(shape, is_causal=problem.is_causal, quantization=quantization)
    output, lse = base.get("triton").attend(problem.query, problem.key, problem.value, None, call)
    assert output.dtype == torch.float32
    problem.check(output, lse, quantization)


@pytest.mark.parametrize("family", (*SELECTED, *CAPTURED), ids=lambda family: family.name)
def test_fp8(family: Family) -> None:
    assert_within_limits(family, "int8_fp8")


@pytest.mark.parametrize("name", ["sink-13", "field", "outliers-k-matched-3x30", "tiny-values", "one-hot", "random-4"])
def test_fp16(name: str) -> None:
    assert_within_limits(by_name(name), "int8_fp16")


@pytest.mark.parametrize("name", ["sink-13", "outliers-k-matched-3x30"])
def test_causal(name: str) -> None:
    assert_within_limits(by_name(name), "int8_fp8", is_causal=True)


@pytest.mark.parametrize("name, head_dim", [("field", 128), ("outliers-q-matched-3x30", 40), ("sink-9", 64)])
def test_widths(name: str, head_dim: int) -> None:
    assert_within_limits(by_name(name), "int8_fp8", head_dim=head_dim)


def test_sinks_with_a_longer_tail() -> None:
    assert_within_limits(by_name("sink-13"), "int8_fp8", kv_len=4096)
