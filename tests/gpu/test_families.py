"""The accuracy contract on the device: every quantization of the backend, families of inputs, 1024 to 131 072 keys.

Output and LSE of 256 queries are compared with float64; `FamilyProblem.check` compares the errors with the limits.
"""

from __future__ import annotations

import pytest
import torch
from benchmarks.numerics.captured import captured_families
from benchmarks.numerics.families import ESSENTIAL, FAMILIES, SINK_HEADS, Family, of_kind
from benchmarks.numerics.problem import FamilyProblem, call, problem_of

from gpu.conftest import BACKEND, DEVICE, FP8, ON_CUDA, cuda_only, quantized_modes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
QUERIES = 256 if ON_CUDA else 64
LENGTHS = (1024, 8192, 32768, 131072) if ON_CUDA else (1024,)
TAILS, FIELD = of_kind("sink", "own sink", "peaks", "one row", "slope"), of_kind("field")
by_family = {"ids": lambda family: family.name}
lengths = pytest.mark.parametrize("kv_len", LENGTHS)


def on_device(family: Family, kv_len: int, *, head_dim: int = 128, is_causal: bool = False) -> FamilyProblem:
    heads = SINK_HEADS if "sink" in family.kind else 2
    sizes = {"heads": heads if ON_CUDA else 1, "head_dim": head_dim, "is_causal": is_causal}
    return problem_of(family, QUERIES, kv_len, dtype=torch.bfloat16, device=DEVICE, **sizes)


@quantized_modes
@lengths
@pytest.mark.parametrize("family", TAILS, **by_family)
def test_keys_far_below_the_maximum(family: Family, kv_len: int, quantization: str) -> None:
    """Keys far below the maximum of a row keep their share at every length."""
    problem = on_device(family, kv_len)
    problem.check(*call(problem, quantization, BACKEND), quantization)


@quantized_modes
@pytest.mark.parametrize("kv_len", LENGTHS[1:] or LENGTHS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_field(head_dim: int, kv_len: int, quantization: str) -> None:
    problem = on_device(*FIELD, kv_len, head_dim=head_dim)
    problem.check(*call(problem, quantization, BACKEND), quantization)


@quantized_modes
@pytest.mark.parametrize("kv_len", LENGTHS[::2])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in TAILS + FIELD], **by_family)
def test_other_families(family: Family, kv_len: int, quantization: str) -> None:
    problem = on_device(family, kv_len)
    problem.check(*call(problem, quantization, BACKEND), quantization)


@quantized_modes
@pytest.mark.parametrize("family", ESSENTIAL, **by_family)
def test_head_dim_64(family: Family, quantization: str) -> None:
    problem = on_device(family, LENGTHS[min(1, len(LENGTHS) - 1)], head_dim=64)
    problem.check(*call(problem, quantization, BACKEND), quantization)


@quantized_modes
@pytest.mark.parametrize("family", [family for family in ESSENTIAL if family.may_be_causal], **by_family)
def test_causal(family: Family, quantization: str) -> None:
    problem = on_device(family, LENGTHS[min(1, len(LENGTHS) - 1)], is_causal=True)
    problem.check(*call(problem, quantization, BACKEND), quantization)


@quantized_modes
@pytest.mark.parametrize("family", captured_families(), **by_family)
def test_recorded_models(family: Family, quantization: str) -> None:
    problem = on_device(family, 0)
    problem.check(*call(problem, quantization, BACKEND), quantization)


@cuda_only
@pytest.mark.skipif("int8_fp8_fast" not in FP8, reason="this backend computes P with exp2")
@pytest.mark.parametrize("kv_len", LENGTHS[::2])
@pytest.mark.parametrize("family", (*FAMILIES, *captured_families()), **by_family)
def test_without_exp2(family: Family, kv_len: int) -> None:
    problem = on_device(family, kv_len)
    problem.check_without_exp2({name: call(problem, name, BACKEND) for name in FP8})
