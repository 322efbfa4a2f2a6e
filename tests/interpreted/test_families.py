"""The accuracy contract in the interpreter: the Triton kernels on families of inputs, within their limits."""

from __future__ import annotations

import pytest
import torch

from interpreted.conftest import call_of, shape_of
from numerics import problem_of
from sparge.backends.gpu import pipeline
from sparge.backends.triton.attention import attend
from sparge.evaluate.captured import captured_families
from sparge.evaluate.families import Family, by_name

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
"""An interpreted call takes half a second."""
CAPTURED = [family for family in captured_families() if family.name in ("smollm2-18", "tiny-video-3-15")]
"""Of each model the call that 8 bits cost most."""


def assert_within_limits(
    family: Family, quantization: str, *, kv_len: int = 1024, head_dim: int | None = None, is_causal: bool = False
) -> None:
    """With 64 channels; of a sink with 128, where its logit is rounded less."""
    if head_dim is None:
        head_dim = 128 if "sink" in family.kind else 64
    problem = problem_of(family, 64, kv_len, head_dim=head_dim, is_causal=is_causal)
    shape = shape_of(problem.query, problem.key, problem.value)
    call = call_of(shape, is_causal=problem.is_causal, quantization=quantization)
    output, lse = pipeline.attend(problem.query, problem.key, problem.value, None, call, launcher=attend)
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


def test_a_longer_tail() -> None:
    assert_within_limits(by_name("sink-13"), "int8_fp8", kv_len=4096)
