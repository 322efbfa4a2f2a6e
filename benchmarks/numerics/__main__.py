"""Measure the errors of dense quantized attention on families of inputs: `python -m benchmarks.numerics`.

Needs a CUDA device. Appends a row for each input, backend and quantization to benchmarks/results/numerics.jsonl: the
errors of output and LSE on all queries, their limits, cuDNN's error in bfloat16, and whether all errors are within
their limits. ``--family NAME`` measures one family.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import append_row
from benchmarks.numerics.captured import captured_families
from benchmarks.numerics.families import ESSENTIAL, FAMILIES, SINK_HEADS, Family
from benchmarks.numerics.limits import Errors, limit_without_exp2
from benchmarks.numerics.problem import FamilyProblem, call, problem_of
from sparge.backends.base import resolve
from sparge.bench.timing import attempt
from sparge.evaluate.oracle import sampled_error

RESULTS = Path(__file__).parents[1] / "results" / "numerics.jsonl"
QUERIES = 512
LENGTHS = (1024, 8192, 32768, 131072)
HOPPER_KERNELS = (
    *(("hopper", quantization) for quantization in ("int8_fp8", "int8_fp8_fast", "int8_fp16")),
    *(("triton", quantization) for quantization in ("int8_fp8", "int8_fp16")),
)
"""Backends and quantizations on Hopper GPUs. The limit of "int8_fp8_fast" depends on the error of "int8_fp8", which
therefore comes first."""


def sizes_of(family: Family) -> Iterator[dict[str, Any]]:
    """Yield the sizes of a family's inputs, as arguments of `problem_of`.

    Sinks have all lengths, the field the longer ones, and the others a short and a long one. Families in `ESSENTIAL`
    also have a case with head_dim 64 and, if possible, a causal one.
    """
    if family.recorded_sizes is not None:
        yield {"kv_len": family.recorded_sizes["kv_len"]}
        return
    is_sink = family.kind in ("sink", "own sink")
    heads = SINK_HEADS if is_sink else 2
    for kv_len in LENGTHS if is_sink else LENGTHS[1:] if family.kind == "field" else LENGTHS[::2]:
        yield {"kv_len": kv_len, "heads": heads}
    if family in ESSENTIAL:
        yield {"kv_len": 8192, "heads": heads, "head_dim": 64}
        if family.may_be_causal:
            yield {"kv_len": 8192, "heads": heads, "is_causal": True}


def rows_of(problem: FamilyProblem, kernels: tuple[tuple[str, str], ...]) -> Iterator[dict[str, Any]]:
    """Yield one row for each backend and quantization."""
    common: dict[str, str] = {}
    cudnn = attempt(common, "cudnn", partial(cudnn_error, problem))
    limits = {quantization: problem.limits(quantization) for _, quantization in kernels}
    fp8_errors: dict[str, float] = {}
    for backend, quantization in kernels:
        problems = dict(common)
        errors = attempt(problems, quantization, partial(errors_of_call, problem, quantization, backend))
        limit = limits[quantization]
        if errors is not None and quantization == "int8_fp8":
            fp8_errors[backend] = errors.relative_l1
        if quantization == "int8_fp8_fast" and backend in fp8_errors:
            relative = limit_without_exp2(fp8_errors[backend], problem.family, problem.key.shape[2])
            limit = limit._replace(relative_l1=min(limit.relative_l1, relative))
        yield {
            **{"suite": "numerics", "family": problem.family.name, "kind": problem.family.kind},
            **{"backend": backend, "kernel": quantization, "is_causal": problem.is_causal},
            **{"tokens": problem.key.shape[2], "queries": problem.query.shape[2]},
            **{"heads": problem.query.shape[1], "head_dim": problem.query.shape[3]},
            "relative_l1": errors and errors.relative_l1,
            "lse_mean": errors and errors.lse_mean,
            "lse_worst": errors and errors.lse_worst,
            **{"target": limit.relative_l1, "lse_mean_target": limit.lse_mean, "lse_worst_target": limit.lse_worst},
            "cudnn_relative_l1": cudnn,
            "passes": errors is not None and all(error <= most for error, most in zip(errors, limit, strict=True)),
            "problems": problems,
        }


def errors_of_call(problem: FamilyProblem, quantization: str, backend: str) -> Errors:
    return problem.errors(*call(problem, quantization, backend))


def cudnn_error(problem: FamilyProblem) -> float:
    """Return cuDNN's error. Causality is passed as a mask, because cuDNN's ``is_causal`` is aligned top-left."""
    query, key, value = problem.query, problem.key, problem.value
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    mask = None
    if problem.is_causal:
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = visible.tril(key.shape[2] - query.shape[2])
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return sampled_error(output, problem.rows, problem.exact.output)


@torch.no_grad()
def main() -> None:
    families = {family.name: family for family in (*FAMILIES, *captured_families())}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=families, metavar="NAME", help="measure only this family, such as sink-13")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, got none")
    device = torch.device("cuda", torch.cuda.current_device())
    backend = resolve("auto", device)
    kernels = HOPPER_KERNELS if backend == "hopper" else tuple((backend, name) for name in ("int8_fp8", "int8_fp16"))
    for family in [families[args.family]] if args.family else families.values():
        for sizes in sizes_of(family):
            problem = problem_of(family, QUERIES, **sizes, dtype=torch.bfloat16, device=device)
            for row in rows_of(problem, kernels):
                append_row(args.results, row, gpu=True)


if __name__ == "__main__":
    main()
