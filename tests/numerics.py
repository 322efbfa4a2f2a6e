"""A problem from an input family with its exact answer, for the accuracy tests of the API, the kernels and the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import sparge
from sparge.evaluate.captured import recorded_of
from sparge.evaluate.families import Family
from sparge.evaluate.numerics import Errors, errors_of, exponential_free_limit, lse_limits, output_limit
from sparge.evaluate.oracle import ExactRows, exact_rows


@dataclass(frozen=True)
class FamilyProblem:
    """Query (1, H, S_q, D), key and value (1, H_kv, S_k, D) from a family, and their exact attention."""

    family: Family
    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    exact: ExactRows

    @property
    def rows(self) -> Tensor:
        return torch.arange(self.query.shape[2], device=self.query.device)

    @property
    def limit(self) -> float:
        """Limit of the relative L1 error."""
        return output_limit(self.family, self.query.shape[-1], self.key.shape[2])

    def errors(self, output: Tensor, lse: Tensor) -> Errors:
        return errors_of(output, lse, self.rows, self.exact)

    def check(self, output: Tensor, lse: Tensor, quantization: str) -> None:
        """Check that the errors of output and LSE are within the documented limits."""
        errors = self.errors(output, lse)
        call = {"is_causal": self.is_causal, "exponential_free": quantization == "int8_fp8_fast"}
        limits = lse_limits(self.query, self.key, self.rows, self.exact, **call, is_lattice=self.family.is_lattice)
        named = {
            "a relative L1 error": (errors.relative_l1, self.limit),
            "a mean LSE error": (errors.lse_mean, limits.mean),
            "a worst LSE error": (errors.lse_worst, limits.worst),
        }
        for what, (got, limit) in named.items():
            assert got <= limit, f"{self.family.name}, {quantization}: expected {what} <= {limit:.3g}, got {got:.4f}"


def problem_of(
    family: Family,
    q_len: int,
    kv_len: int,
    *,
    heads: int = 1,
    head_dim: int = 128,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    is_causal: bool = False,
) -> FamilyProblem:
    """Build a problem from bfloat16 inputs, cast to ``dtype``. A recorded family has its own sizes and causality."""
    recorded = recorded_of(family.name)
    if recorded is not None:
        inputs = family.make(**{**recorded.sizes, "q_len": min(q_len, recorded.sizes["q_len"])}, device=device)
        is_causal = recorded.is_causal
    else:
        inputs = family.make(q_len, kv_len, heads, head_dim, device)
    query, key, value = (tensor.to(dtype) for tensor in inputs)
    rows = torch.arange(query.shape[2], device=query.device)
    return FamilyProblem(family, query, key, value, is_causal, exact_rows(query, key, value, rows, is_causal=is_causal))


def call(problem: FamilyProblem, quantization: Any, backend: str) -> tuple[Tensor, Tensor]:
    """Run dense attention and return output and LSE."""
    return sparge.attention(
        problem.query,
        problem.key,
        problem.value,
        is_causal=problem.is_causal,
        sparsity=sparge.Dense(),
        quantization=quantization,
        return_lse=True,
        enable_gqa=True,
        backend=backend,
    )


def assert_exponential_free_error(problem: FamilyProblem, results: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Check that computing FP8 values of P without exp2 is about as accurate as rounding P to FP8."""
    errors = {name: problem.errors(*result).relative_l1 for name, result in results.items()}
    limit, got = (
        exponential_free_limit(errors["int8_fp8"], problem.family, problem.key.shape[2]),
        errors["int8_fp8_fast"],
    )
    assert got <= limit, f"{problem.family.name}: expected <= {limit:.4f} (from the error with exp2), got {got:.4f}"
