"""An input of a family with its exact attention: errors of quantized calls, and their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import sparge
from benchmarks.numerics.families import Family
from benchmarks.numerics.limits import Errors, errors_of, limit_without_exp2, lse_limits, output_limit
from sparge.evaluate.oracle import ExactRows, exact_rows


@dataclass(frozen=True)
class FamilyProblem:
    """Query (1, H, S_q, D), key and value (1, H_kv, S_k, D) of a family, and their exact attention."""

    family: Family
    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    exact: ExactRows

    @property
    def rows(self) -> Tensor:
        """Positions of all queries."""
        return torch.arange(self.query.shape[2], device=self.query.device)

    def errors(self, output: Tensor, lse: Tensor) -> Errors:
        """Return the errors of output (1, H, S_q, D) and LSE (1, H, S_q).

        Raises:
            ValueError: the output or the LSE contains NaN or Inf.
        """
        return errors_of(output, lse, self.rows, self.exact)

    def limits(self, quantization: str) -> Errors:
        """Return the limits of the errors of a quantization. `limit_without_exp2` may be lower."""
        return Errors(
            output_limit(self.family, self.query.shape[-1], self.key.shape[2]),
            *lse_limits(
                self.query,
                self.key,
                self.rows,
                self.exact,
                is_causal=self.is_causal,
                without_exp2=quantization == "int8_fp8_fast",
                is_lattice=self.family.is_lattice,
            ),
        )

    def check(self, output: Tensor, lse: Tensor, quantization: str) -> None:
        """Raise AssertionError if an error exceeds its limit."""
        names = ("a relative L1 error", "a mean LSE error", "a worst LSE error")
        for name, error, limit in zip(names, self.errors(output, lse), self.limits(quantization), strict=True):
            assert error <= limit, (
                f"{self.family.name}, {quantization}: expected {name} <= {limit:.3g}, got {error:.4f}"
            )

    def check_without_exp2(self, results: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Raise AssertionError if P without exp2 ("int8_fp8_fast") is much less accurate than P in FP8 ("int8_fp8")."""
        errors = {name: self.errors(*result).relative_l1 for name, result in results.items()}
        limit = limit_without_exp2(errors["int8_fp8"], self.family, self.key.shape[2])
        assert errors["int8_fp8_fast"] <= limit, (
            f"{self.family.name}: expected <= {limit:.4f} (from the error with exp2), got {errors['int8_fp8_fast']:.4f}"
        )


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
    """Create the bfloat16 inputs of a family, cast to ``dtype``, and compute their exact attention.

    A recorded family has its own sizes and causality; only a smaller ``q_len`` applies to it.
    """
    if family.recorded_sizes is None:
        inputs = family.make(q_len, kv_len, heads, head_dim, device)
    else:
        sizes = family.recorded_sizes
        inputs = family.make(**{**sizes, "q_len": min(q_len, sizes["q_len"])}, device=device)
        is_causal = family.may_be_causal
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
