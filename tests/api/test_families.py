"""The accuracy contract on the CPU: 8-bit attention on families of inputs, output and LSE within their limits.

tests/interpreted and tests/gpu hold the kernels to the same limits; `FamilyProblem.check` is what all three ask.
"""

from __future__ import annotations

import pytest
import torch

from numerics import assert_without_exponentials, call, problem_of
from sparge.evaluate.captured import captured_families
from sparge.evaluate.families import ESSENTIAL, FAMILIES, Family, by_name

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.timeout(120)]
CAPTURED = captured_families()
by_family = {"ids": lambda family: family.name}
few_families = pytest.mark.parametrize("family", (*ESSENTIAL, *CAPTURED), **by_family)


def width_of(family: Family) -> int:
    """64, which takes half the time; sinks have 128 channels, where their logit is rounded less."""
    return 128 if "sink" in family.kind else 64


@pytest.mark.parametrize("family", (*FAMILIES, *CAPTURED), **by_family)
def test_torch_in_fp8(family: Family) -> None:
    problem = problem_of(family, 64, 1024)
    problem.check(*call(problem, "int8_fp8", "torch"), "int8_fp8")


@few_families
def test_torch_in_fp16(family: Family) -> None:
    problem = problem_of(family, 64, 1024)
    problem.check(*call(problem, "int8_fp16", "torch"), "int8_fp16")


@few_families
def test_reference_in_fp8(family: Family) -> None:
    """Both ways to P in FP8, and the one without exponentials hardly worse."""
    problem = problem_of(family, 64, 1024, head_dim=width_of(family))
    results = {name: call(problem, name, "reference") for name in ("int8_fp8", "int8_fp8_fast")}
    assert_without_exponentials(problem, results)
    for name, result in results.items():
        problem.check(*result, name)


@few_families
def test_reference_in_fp16(family: Family) -> None:
    problem = problem_of(family, 64, 1024, head_dim=width_of(family))
    problem.check(*call(problem, "int8_fp16", "reference"), "int8_fp16")


@pytest.mark.parametrize("name", ["sink-9", "sink-13", "outliers-k-matched-3x30", "peaks-128-8"])
@pytest.mark.parametrize("quantization", ["int8_fp8_fast", "int8_fp8", "int8_fp16"])
def test_causal(name: str, quantization: str) -> None:
    family = by_name(name)
    problem = problem_of(family, 64, 1024, head_dim=width_of(family), is_causal=True)
    problem.check(*call(problem, quantization, "reference"), quantization)


@pytest.mark.parametrize("name", ["sink-13", "sink-16"])
@pytest.mark.parametrize("quantization", ["int8_fp8_fast", "int8_fp8"])
def test_a_longer_tail(name: str, quantization: str) -> None:
    """4096 keys: what the sink's own tile may lose is a 32nd of the tail."""
    problem = problem_of(by_name(name), 64, 4096)
    problem.check(*call(problem, quantization, "reference"), quantization)


def test_16_bits_hold_the_same_limits() -> None:
    """The limits are those of 8 bits: exact arithmetic on the same inputs is far inside."""
    for family in (*ESSENTIAL, *CAPTURED):
        problem = problem_of(family, 64, 1024, head_dim=64)
        errors = problem.errors(*call(problem, "none", "torch"))
        assert errors.relative_l1 < 0.1 * problem.limit, family.name
        assert errors.lse_worst < 1e-2, family.name


def test_a_lost_tail_breaks_the_contract() -> None:
    """What per-row P in FP8 did: everything 11 nats below the maximum became 0."""
    problem = problem_of(by_name("sink-13"), 64, 1024)
    logits = (problem.query.double() @ problem.key.double().mT) / 128**0.5
    weights = torch.where(logits > logits.amax(-1, keepdim=True) - 11, logits, -torch.inf).softmax(-1)
    with pytest.raises(AssertionError, match=r"sink-13, int8_fp8: expected a relative L1 error <= 0.02, got 1.0"):
        problem.check(weights @ problem.value.double(), logits.logsumexp(-1), "int8_fp8")
