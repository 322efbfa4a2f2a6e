"""Suite "numerics" of ``sparge bench``: errors of dense attention on families of inputs, against the contract's limits.

Each row is one quantization of one backend: the errors of output and LSE, their limits, the error of cuDNN in bfloat16,
and whether all errors are within their limits. All queries are compared, not a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparge import api
from sparge.bench.cases import Group, Problem, Row
from sparge.bench.timing import attempt
from sparge.evaluate.captured import captured_families, recorded_of
from sparge.evaluate.families import Family, Inputs, by_name
from sparge.evaluate.numerics import Errors, errors_of, exponential_free_limit, lse_limits, output_limit
from sparge.evaluate.oracle import ExactRows, exact_rows, sampled_error
from sparge.options.common import Quantization
from sparge.options.rules import Dense

KERNELS = {
    "hopper": [
        ("hopper", "int8_fp8"),
        ("hopper", "int8_fp8_fast"),
        ("hopper", "int8_fp16"),
        ("triton", "int8_fp8"),
        ("triton", "int8_fp16"),
    ]
}
"""(backend, quantization) pairs, keyed by the device's best backend; other backends measure only their own
quantizations. "int8_fp8" comes first, because the limit of "int8_fp8_fast" depends on the error of "int8_fp8"."""


def family_named(name: str) -> Family:
    """Return a constructed or captured family by its name."""
    captured = {family.name: family for family in captured_families()} if recorded_of(name) else {}
    return captured.get(name) or by_name(name)


def inputs_of(name: str, problem: Problem, device: torch.device) -> Inputs:
    """Return query (1, H, queries, D), key and value (1, H, tokens, D) in bfloat16; grouped heads are repeated."""
    recorded, heads = recorded_of(name), problem.heads
    kv_heads = heads if recorded is None else recorded.sizes["kv_heads"]
    sizes = (problem.queries, problem.tokens, heads, problem.head_dim)
    query, key, value = family_named(name).make(*sizes, device, kv_heads=kv_heads)
    return query, key.repeat_interleave(heads // kv_heads, 1), value.repeat_interleave(heads // kv_heads, 1)


def numerics_rows(backend: str, group: Group, inputs: Inputs) -> Iterator[Row]:
    """Yield one row for each kernel."""
    assert group.family is not None
    family, problem, (query, key, value) = family_named(group.family), group.problem, inputs
    rows = torch.arange(problem.queries, device=query.device)
    exact = exact_rows(query, key, value, rows, is_causal=problem.is_causal)
    common: dict[str, str] = {}
    cudnn = attempt(common, "cudnn", partial(_cudnn_error, inputs, problem, rows, exact))
    with_exponentials: dict[str, float] = {}
    limits_of_lse = cache(
        partial(lse_limits, query, key, rows, exact, is_causal=problem.is_causal, is_lattice=family.is_lattice)
    )
    for kernel_backend, quantization in KERNELS.get(backend, [(backend, "int8_fp8"), (backend, "int8_fp16")]):
        problems = dict(common)
        run = partial(_errors, inputs, problem, kernel_backend, quantization, rows, exact)
        errors = attempt(problems, quantization, run)
        limit = output_limit(family, problem.head_dim, problem.tokens)
        if errors is not None and quantization == "int8_fp8":
            with_exponentials[kernel_backend] = errors.relative_l1
        if quantization == "int8_fp8_fast" and kernel_backend in with_exponentials:
            limit = min(limit, exponential_free_limit(with_exponentials[kernel_backend], family, problem.tokens))
        lse = limits_of_lse(exponential_free=quantization == "int8_fp8_fast")
        limits = Errors(limit, *lse)
        yield {
            "kind": family.kind,
            "backend": kernel_backend,
            "kernel": quantization,
            **(Errors(None, None, None) if errors is None else errors)._asdict(),  # type: ignore[arg-type]
            "target": limit,
            "lse_mean_target": lse.mean,
            "lse_worst_target": lse.worst,
            "cudnn_relative_l1": cudnn,
            "passes": errors is not None and all(error <= limit for error, limit in zip(errors, limits, strict=True)),
            "problems": problems,
        }


def _errors(
    inputs: Inputs, problem: Problem, backend: str, quantization: str, rows: Tensor, exact: ExactRows
) -> Errors:
    output, lse = api.attention(
        *inputs,
        is_causal=problem.is_causal,
        sparsity=Dense(),
        quantization=cast(Quantization, quantization),
        return_lse=True,
        backend=backend,
    )
    return errors_of(output, lse, rows, exact)


def _cudnn_error(inputs: Inputs, problem: Problem, rows: Tensor, exact: ExactRows) -> float:
    """Return cuDNN's error. Causality is passed as a mask, because cuDNN's ``is_causal`` is aligned top-left."""
    query, key, value = inputs
    mask = None
    if problem.is_causal:
        seen = torch.ones(problem.queries, problem.tokens, dtype=torch.bool, device=query.device)
        mask = seen.tril(problem.tokens - problem.queries)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return sampled_error(output, rows, exact.output)
