"""Measure the torch backend on a CPU, interleaved with torch's attention (SDPA): `python -m benchmarks.cpu`.

    speed       time, mass recall and error at 8192 tokens
    memory      peak memory beyond the inputs
    crossover   speed-up by length, dtype and head_dim; the last lines propose `processor.CROSSOVERS`

``--suite`` selects suites; the default is speed and memory. Sparse times include prediction. Errors of the output and
of SDPA are relative to float32 attention of the same inputs. Up to 8192 tokens, a case is timed only if sparse
attention with topk=1 is as exact as SDPA. The suite crossover measures bfloat16 only if the processor has instructions
for it (SDPA takes minutes elsewhere), and starts with the most informative cases.

Rows are appended to benchmarks/results/cpu.jsonl, and rows of the suite crossover to processor.jsonl.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sparge
from benchmarks.measure import append_row, peak_resident_bytes
from sparge.backends.torch import processor
from sparge.evaluate.inputs import text_like, video_like
from sparge.evaluate.metrics import block_mass, mass_recall, relative_l1
from sparge.evaluate.timing import host_seconds, take_turns

RESULTS = Path(__file__).parent / "results"
FILES = {"speed": "cpu.jsonl", "memory": "cpu.jsonl", "crossover": "processor.jsonl"}
GATE_TOKENS = 8192
MIN_SPEEDUP = 1.05
"""Minimum speed-up that counts as a gain; less may be noise."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One problem; causal inputs are text-like, others are video-like."""

    suite: str
    tokens: int
    is_causal: bool
    dtype: str = "float32"
    head_dim: int = 64
    heads: int = 8

    @property
    def topks(self) -> tuple[float, ...]:
        return {"speed": (0.5, 0.25, 0.1), "memory": (0.25,), "crossover": (0.5, 0.25)}[self.suite]

    def inputs(self) -> list[Tensor]:
        """Return query, key and value."""
        sample = (text_like if self.is_causal else video_like)(self.tokens, self.heads, self.head_dim)
        return [tensor.to(getattr(torch, self.dtype)) for tensor in (sample.query, sample.key, sample.value)]


def cases(suite: str, dtypes: list[str], *, quick: bool) -> list[Case]:
    """Return the cases of a suite."""
    if suite != "crossover":
        lengths = (8192,) if suite == "speed" else (8192, 32768)
        return [Case(suite, tokens, is_causal) for tokens in lengths for is_causal in (False, True)]
    lengths = (8192, 4096, 2048, 16384) if quick else (8192, 4096, 2048, 16384, 3072, 6144, 1536, 12288)
    return [
        Case(suite, tokens, is_causal, dtype, head_dim)
        for tokens in lengths
        for dtype in dtypes
        for head_dim in (128, 64)
        for is_causal in (False, True)
    ]


def measure(case: Case, turns: int, budget_s: float) -> Iterator[Row]:
    """Yield a row for each topk of a case."""
    for row in memory(case) if case.suite == "memory" else speed(case, turns, budget_s):
        yield {**asdict(case), **row}


def memory(case: Case) -> Iterator[Row]:
    """Yield the peak memory of a call for each topk, measured in a new process."""
    for topk in case.topks:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            extra = pool.apply(_extra_bytes, (case, topk))
        inputs = sum(tensor.nbytes for tensor in case.inputs())
        ratio = None if extra is None else extra / inputs
        yield {"topk": topk, "input_bytes": inputs, "extra_bytes": extra, "extra_ratio": ratio}


def _extra_bytes(case: Case, topk: float) -> int | None:
    tensors = case.inputs()
    call = partial(sparge.attention, is_causal=case.is_causal, topk=topk, backend="torch")
    call(*(tensor[:, :, :2048] for tensor in tensors))  # loads code and thread pools
    return peak_resident_bytes(partial(call, *tensors))


def speed(case: Case, turns: int, budget_s: float) -> Iterator[Row]:
    """Yield times, density and errors for each topk."""
    tensors, options = case.inputs(), {"is_causal": case.is_causal}
    exact = F.scaled_dot_product_attention(*(tensor.float() for tensor in tensors), **options)
    dense = partial(F.scaled_dot_product_attention, *tensors, **options)
    sparse = partial(sparge.attention, *tensors, backend="torch", quantization="none", **options)
    predict = partial(sparge.predict, *tensors[:2], backend="torch", **options)
    dense_l1 = relative_l1(dense(), exact)
    if case.tokens <= GATE_TOKENS:
        allowed, error = 2 * dense_l1 + 1e-5, relative_l1(sparse(topk=1.0), exact)
        if not error <= allowed:
            raise RuntimeError(f"expected topk=1 within {allowed:.2g} of float32, got {error:.2g} for {case}")
    calls: dict[tuple[str, float], Callable[[], Any]] = {("dense", 0.0): dense}
    for topk in case.topks:
        calls |= {("predict", topk): partial(predict, topk=topk), ("sparse", topk): partial(sparse, topk=topk)}
    clocks = {key: partial(host_seconds, call) for key, call in calls.items()}
    times = {key: statistics.median(seconds) for key, seconds in take_turns(clocks, turns, budget_s=budget_s).items()}
    for topk in case.topks:
        mask, dense_s, sparse_s = predict(topk=topk), times["dense", 0.0], times["sparse", topk]
        row = {"topk": topk, "dense_s": dense_s, "sparse_s": sparse_s, "predict_s": times["predict", topk]}
        row |= {"speedup": dense_s / sparse_s, "density": mask.density()}
        if case.suite == "speed":
            row["mass_recall"] = mass_recall(mask, block_mass(*tensors[:2], is_causal=case.is_causal))
        row |= {"relative_l1": relative_l1(sparse(topk=topk), exact), "dense_relative_l1": dense_l1}
        yield row | {"units": processor.units(tensors[0].dtype).value}


def crossovers(rows: list[Row]) -> list[str]:
    """Return, for each dtype and kind, the shortest length from which topk 0.5 is faster at all measured lengths."""
    worst: dict[tuple[str, str, bool], dict[int, float]] = {}
    for row in rows:
        speedups = worst.setdefault((row["dtype"], row["units"], row["is_causal"]), {})
        if row["topk"] == 0.5:
            speedups[row["tokens"]] = min(speedups.get(row["tokens"], math.inf), row["speedup"])
    lines = []
    for (dtype, units, is_causal), speedups in sorted(worst.items()):
        slower = [tokens for tokens, speedup in speedups.items() if speedup < MIN_SPEEDUP]
        faster = [tokens for tokens in speedups if tokens > max(slower, default=0)]
        shown = ", ".join(f"{tokens}: {speedups[tokens]:.2f}x" for tokens in sorted(speedups))
        kind = "causal" if is_causal else "full"
        lines.append(f"{dtype} ({units}), {kind}: faster from {min(faster, default='no length')} on ({shown})")
    return lines


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=list(FILES))
    parser.add_argument("--quick", action="store_true", help="fewer lengths and turns, and at most 160 seconds")
    parser.add_argument("--seconds", type=float, help="start no case after this many seconds")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    has_bfloat16 = processor.units(torch.bfloat16) is not processor.Units.NONE
    dtypes = args.dtypes or (["bfloat16", "float32"] if has_bfloat16 else ["float32"])
    turns, budget_s = (3, 1.5) if args.quick else (7, 30.0)
    seconds = args.seconds or (160.0 if args.quick else math.inf)
    begin, rows = time.perf_counter(), []
    for case in [
        case for suite in args.suite or ("speed", "memory") for case in cases(suite, dtypes, quick=args.quick)
    ]:
        if time.perf_counter() - begin > seconds:
            print(f"skipped after {seconds:g} s: {case}")
            continue
        for row in measure(case, turns, budget_s):
            append_row(args.results / FILES[case.suite], row)
            rows.append(row)
    print("\n".join(crossovers([row for row in rows if row["suite"] == "crossover"])))


if __name__ == "__main__":
    main()
