"""The accuracy contract on the CPU: errors of quantized attention on families of inputs are within the limits.

tests/interpreted and tests/gpu check the kernels against the same limits, also with `FamilyProblem.check`.
"""

from __future__ import annotations

import pytest
import torch
from benchmarks.numerics.captured import captured_families
from benchmarks.numerics.families import ESSENTIAL, FAMILIES, Family, by_name
from benchmarks.numerics.problem import call, problem_of

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.timeout(120)]
CAPTURED = captured_families()
by_family = {"ids": lambda family: family.name}
essential_families = pytest.mark.parametrize("family", (*ESSENTIAL, *CAPTURED), **by_family)


def head_dim_of(family: Family) -> int:
    """Return 64 channels, which take half the time, or 128 for sinks, whose logit is then rounded less."""
    return 128 if "sink" in family.kind else 64


@pytest.mark.parametrize("family", (*FAMILIES, *CAPTURED), **by_family)
def test_torch_in_fp8(family: Family) -> None:
    problem = problem_of(family, 64, 1024)
    problem.check(*call(problem, "int8_fp8", "torch"), "int8_fp8")


@essential_families
def test_torch_in_fp16(family: Family) -> None:
    problem = problem_of(family, 64, 1024)
    problem.check(*call(problem, "int8_fp16", "torch"), "int8_fp16")


@essential_families
def test_reference_in_fp8(family: Family) -> None:
    """P with and without exp2 is within the limits, and leaving out exp2 hardly increases the error."""
    problem = problem_of(family, 64, 1024, head_dim=head_dim_of(family))
    results = {name: call(problem, name, "reference") for name in ("int8_fp8", "int8_fp8_fast")}
    problem.check_without_exp2(results)
    for name, result in results.items():
        problem.check(*result, name)


@essential_families
def test_reference_in_fp16(family: Family) -> None:
    problem = problem_of(family, 64, 1024, head_dim=head_dim_of(family))
    problem.check(*call(problem, "int8_fp16", "reference"), "int8_fp16")


@pytest.mark.parametrize("name", ["sink-9", "sink-13", "outliers-k-matched-3x30", "peaks-128-8"])
@pytest.mark.parametrize("quantization", ["int8_fp8_fast", "int8_fp8", "int8_fp16"])
def test_causal(name: str, quantization: str) -> None:
    family = by_name(name)
    problem = problem_of(family, 64, 1024, head_dim=head_dim_of(family), is_causal=True)
    problem.check(*call(problem, quantization, "reference"), quantization)


@pytest.mark.parametrize("name", ["sink-13", "sink-16"])
@pytest.mark.parametrize("quantization", ["int8_fp8_fast", "int8_fp8"])
def test_sinks_with_a_longer_tail(name: str, quantization: str) -> None:
    """The tail is all keys but the sink, whose logit is 13 or 16 nats higher. 1/64 of 4096 keys share the sink's tile.

    Only these keys are rounded relative to the sink. With 1024 keys, as in the other tests, 1/16 are.
    """
    problem = problem_of(by_name(name), 64, 4096)
    problem.check(*call(problem, quantization, "reference"), quantization)


def test_unquantized_calls_are_far_within_the_limits() -> None:
    for family in (*ESSENTIAL, *CAPTURED):
        problem = problem_of(family, 64, 1024, head_dim=64)
        errors = problem.errors(*call(problem, "none", "torch"))
        assert errors.relative_l1 < 0.1 * family.limit, family.name
        assert errors.lse_worst < 1e-2, family.name


def test_losing_the_tail_exceeds_the_limit() -> None:
    """P in FP8 with one scale per row becomes 0 for all scores 11 nats below the maximum."""
    problem = problem_of(by_name("sink-13"), 64, 1024)
    logits = (problem.query.double() @ problem.key.double().mT) / 128**0.5
    weights = torch.where(logits > logits.amax(-1, keepdim=True) - 11, logits, -torch.inf).softmax(-1)
    with pytest.raises(AssertionError, match=r"sink-13, int8_fp8: expected a relative L1 error <= 0.02, got 1.0"):
        problem.check(weights @ problem.value.double(), logits.logsumexp(-1), "int8_fp8")
