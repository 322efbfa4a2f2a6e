"""Measure the Hopper kernel, dense calls, packed segments and masks: `python -m benchmarks.gpu_suites [SUITE ...]`.

    hopper   the Hopper kernel against the Triton kernel, over the same random blocks
    dense    dense calls in 16 bits, against the dense kernels of `sparge.bench.rivals`
    packed   calls over packed segments, against a loop of calls and against dense kernels
    masks    whole calls with a full mask, against SDPA with the same mask

Needs a CUDA device. Appends rows to benchmarks/results/gpu.jsonl, like `sparge bench --json`. The default is all
suites; --quick measures the first case of each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import append_row
from sparge import api
from sparge.backends import base
from sparge.bench.cases import CROSSOVER_TOPKS, Case, Problem, Row, ratio
from sparge.bench.inputs import make_inputs
from sparge.bench.rivals import RIVALS, fa4_version, import_fa4, output_of
from sparge.bench.run import (
    Bench,
    RowsOf,
    call_of,
    cuda_bench,
    dense_kernels,
    error_of,
    exact_error,
    kernel,
    measure,
    rows_by_topk,
    rule_of,
    stages,
    whole_call,
)
from sparge.bench.timing import TimedCall
from sparge.evaluate.inputs import Inputs
from sparge.evaluate.oracle import exact_rows, sampled_error, sampled_queries
from sparge.options.common import Quantization
from sparge.options.rules import Budget
from sparge.varlen import varlen_attention

RESULTS = Path(__file__).parent / "results" / "gpu.jsonl"
HOPPER_KERNELS = {
    **{name: (name, "hopper") for name in ("int8_fp8_fast", "int8_fp8", "none")},
    "twin int8_fp8": ("int8_fp8", "triton"),
}
DOCUMENTS = 8
"""Number of equally long documents in the mask "documents". A "window" extends by the length of one to either side."""


@dataclass(frozen=True)
class PackedProblem(Problem):
    """Segments of ``tokens`` each. With ``unequal``, all lengths differ, from half of ``tokens`` to ``tokens``."""

    segments: int = 1
    unequal: bool = False

    @property
    def lengths(self) -> list[int]:
        """Tokens of each segment."""
        if not self.unequal:
            return [self.tokens] * self.segments
        half, last = self.tokens // 2, max(self.segments - 1, 1)
        mixed = [index * 5 % self.segments for index in range(self.segments)]  # shuffled; 5 must not divide segments
        return [half + half * index // last for index in mixed]

    @property
    def flop(self) -> float:
        """Floating-point operations of dense attention."""
        return super().flop * sum((length / self.tokens) ** 2 for length in self.lengths)


@dataclass(frozen=True)
class MaskedProblem(Problem):
    """A problem with the mask "documents", "window", "random" or "bias" (`make_mask`)."""

    mask: str = ""


def packed_inputs(problem: PackedProblem, device: torch.device) -> Inputs:
    """Return query, key and value (segments, H, tokens, D), with different values in each segment."""
    parts = [make_inputs(problem, device, seed) for seed in range(problem.segments)]
    query, key, value = (torch.cat(side) for side in zip(*parts, strict=True))
    return query, key, value


def dense_calls(bench: Bench, case: Case, inputs: Inputs) -> Iterator[Row]:
    """Yield a row for a whole call in 16 bits that computes every block."""
    problem, (topk,) = case.problem, case.topks
    bench = replace(bench, quantization="none")
    sparse = {topk: {"sparge": whole_call(bench, inputs, problem, topk)}}
    error = exact_error(inputs, problem.is_causal)
    kernels = dense_kernels(inputs, problem)
    yield from rows_by_topk(bench, problem, kernels, sparse, lambda topk: topk, error, tuple(RIVALS))


def packed(bench: Bench, case: Case, inputs: Inputs) -> Iterator[Row]:
    """Yield a row for each topk: one call over all segments, and a loop of calls."""
    problem = cast(PackedProblem, case.problem)
    segments: list[Inputs] = [
        (q[None, :, :length], k[None, :, :length], v[None, :, :length])
        for q, k, v, length in zip(*inputs, problem.lengths, strict=True)
    ]
    rows = [sampled_queries(length, bench.device) for length in problem.lengths]
    exact = torch.cat(
        [
            exact_rows(*segment, sampled, is_causal=problem.is_causal).output
            for segment, sampled in zip(segments, rows, strict=True)
        ],
        2,
    )
    bounds = [0, *accumulate(problem.lengths)]  # on the host
    options: Any = {"causal": problem.is_causal, "backend": bench.backend}
    call = partial(varlen_attention, *tokens_of(segments), bounds, bounds, **options)

    def error(run: Callable[[], Tensor]) -> float:
        parts = zip(run().split(problem.lengths), rows, strict=True)
        output = torch.cat([part[sampled].transpose(0, 1)[None] for part, sampled in parts], 2)
        return sampled_error(output, torch.arange(output.shape[2], device=output.device), exact)

    def density(topk: float) -> float:
        """Return the density over all segments together."""
        if topk == 1.0:
            return 1.0
        rule: dict[str, Any] = {"topk": topk, "is_causal": problem.is_causal, "backend": bench.backend}
        masks = [api.predict(query, key, **rule) for query, key, _ in segments]
        kept = sum(int(mask.kv_num_blocks.sum()) for mask in masks)
        return kept / sum(int(mask.visible_num_blocks.sum()) for mask in masks)

    dense = {
        name: loop_over([rival.call(segment, problem.is_causal) for segment in segments])
        for name, rival in RIVALS.items()
    }
    dense["fa4"] = packed_fa4(segments, problem.is_causal)
    sparse = {
        topk: {
            "loop": loop_over([whole_call(bench, segment, problem, topk) for segment in segments]),
            "sparge": TimedCall(partial(call, sparsity=rule_of(topk), quantization=bench.quantization)),
        }
        for topk in case.topks
    }
    for row in rows_by_topk(bench, problem, dense, sparse, density, error, ("fa4",)):
        yield {**row, "loop_speedup": ratio(row["loop_ms"], row["sparge_ms"])}


def tokens_of(segments: list[Inputs]) -> list[Tensor]:
    """Return query, key and value of all segments as (tokens, H, D)."""
    return [torch.cat([part[0].transpose(0, 1) for part in side]) for side in zip(*segments, strict=True)]


def loop_over(calls: list[TimedCall]) -> TimedCall:
    """Return a call that runs several calls of one kernel after another."""
    return TimedCall(lambda: [call.run() for call in calls], calls[0].context)


def packed_fa4(segments: list[Inputs], is_causal: bool) -> TimedCall:
    """Return FlashAttention-4 over all segments in one call."""

    @cache
    def arguments() -> tuple[list[Tensor], dict[str, Any]]:
        lengths = [segment[0].shape[2] for segment in segments]
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=segments[0][0].device)
        longest = max(lengths)
        options = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return tokens_of(segments), options

    def run() -> Tensor:
        tokens, options = arguments()
        return output_of(import_fa4().flash_attn_varlen_func(*tokens, causal=is_causal, **options))

    return TimedCall(run)


def masks(bench: Bench, case: Case, inputs: Inputs) -> Iterator[Row]:
    """Yield a row for each topk, with the quantization that "auto" selects for calls with a mask."""
    problem = cast(MaskedProblem, case.problem)
    mask = make_mask(problem, bench.device)
    quantization = cast(Quantization, base.resolve_quantization("auto", bench.backend, bench.device, has_mask=True))
    rows = sampled_queries(problem.queries, bench.device)
    query, key, value = (tensor.double() for tensor in inputs)
    entries = mask[:, :, rows] if mask.dtype == torch.bool else mask[:, :, rows].double()
    exact = F.scaled_dot_product_attention(query[:, :, rows], key, value, attn_mask=entries)
    sparse = {}
    for topk in case.topks:
        call = call_of(problem, Budget(topk), quantization, attn_mask=mask)
        options: dict[str, Any] = {"topk": topk, "quantization": quantization, "backend": bench.backend}
        whole = TimedCall(partial(api.attention, *inputs, attn_mask=mask, **options))
        sparse[topk] = {"sparge": whole} | stages(bench, inputs, call)

    def density(topk: float) -> float:
        return api.predict(*inputs[:2], attn_mask=mask, topk=topk, backend=bench.backend).density()

    dense = {"sdpa": TimedCall(partial(F.scaled_dot_product_attention, *inputs, attn_mask=mask))}
    for row in rows_by_topk(bench, problem, dense, sparse, density, partial(error_of, rows, exact)):
        yield {**row, "quantization": quantization}


def make_mask(problem: MaskedProblem, device: torch.device) -> Tensor:
    """Return the mask "documents", "window" or "random", bool (1, 1, queries, tokens), or the bfloat16 mask "bias",
    (1, H, queries, tokens)."""
    generator = torch.Generator(device).manual_seed(1)
    size = (1, 1, problem.queries, problem.tokens)
    if problem.mask == "bias":
        size = (1, problem.heads, *size[2:])
        return torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator)
    if problem.mask == "random":
        return torch.randint(2, size, dtype=torch.uint8, device=device, generator=generator) == 1
    position = torch.arange(problem.tokens, device=device, dtype=torch.int32)
    if problem.mask == "window":
        return ((position[-problem.queries :, None] - position).abs() <= problem.tokens // DOCUMENTS)[None, None]
    document = position * DOCUMENTS // problem.tokens
    return (document[-problem.queries :, None] == document)[None, None]


_USUAL = Problem(32768, 16)
SUITES: dict[str, list[Case]] = {
    "hopper": [
        Case("hopper", problem, density=density)
        for problem, densities in (
            (_USUAL, (0.5, 1.0, 0.1)),
            (Problem(8192, 32), (0.5,)),
            (replace(_USUAL, head_dim=64), (0.5, 1.0)),
            (replace(_USUAL, is_causal=True), (0.5, 1.0)),
        )
        for density in densities
    ],
    "dense": [
        Case("dense", replace(_USUAL, head_dim=head_dim, is_causal=is_causal), (1.0,))
        for is_causal in (False, True)
        for head_dim in (128, 64)
    ],
    "packed": [  # the same number of tokens in short and in long segments
        Case("packed", PackedProblem(tokens, 16, 128, is_causal, 0, segments, unequal), (1.0, 0.5, 0.25))
        for segments, tokens in ((64, 2048), (8, 16384))
        for unequal in (False, True)
        for is_causal in (False, True)
    ],
    "masks": [  # a bias per head does not fit in memory at 32768 tokens
        Case("masks", MaskedProblem(tokens, heads, mask=mask), CROSSOVER_TOPKS)
        for tokens, heads, mask in (
            *((8192, 32, mask) for mask in ("documents", "window", "random")),
            *((32768, 8, mask) for mask in ("documents", "window", "random")),
            (8192, 32, "bias"),
        )
    ],
}
ROWS_OF: dict[str, RowsOf] = {
    "hopper": partial(kernel, kernels=HOPPER_KERNELS),
    "dense": dense_calls,
    "packed": packed,
    "masks": masks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="measure the first case of each suite, in fewer turns")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if unknown := set(args.suites) - set(SUITES):
        parser.error(f"expected suites of {', '.join(SUITES)}, got {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, got none")
    bench = cuda_bench(args.quick)
    versions = {"cudnn": torch.backends.cudnn.version(), "flash_attn_4": fa4_version()}
    for suite in args.suites or SUITES:
        make = packed_inputs if suite == "packed" else make_inputs
        for case in SUITES[suite][: 1 if args.quick else None]:
            for row in measure(bench, case, ROWS_OF[suite], make):
                append_row(args.results, {**row, "quick": args.quick, **versions}, gpu=True)


if __name__ == "__main__":
    main()
