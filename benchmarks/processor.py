"""Measure from which size on sparse attention is faster than SDPA on this CPU, by length, dtype and head_dim.

    python -m benchmarks.processor [--quick] [--seconds 160] [--dtypes bfloat16 float32 float16]

Each case runs SDPA and the torch backend (also below the crossover) in turns, at topk 0.5 and 0.25, prediction
included. At 8192 tokens the backend's optimizations for the processor are also disabled one at a time (`VARIANTS`).
Errors of the output and of SDPA are against float32 attention of the same inputs. A case is timed only if sparse
attention at topk=1 is as exact as SDPA (the gate).

Rows are appended to benchmarks/results/processor.jsonl. The last lines propose `processor.CROSSOVERS`. No case starts
after ``--seconds``; the most informative ones come first. Without ``--dtypes``, bfloat16 is measured only if the
processor has instructions for it: elsewhere SDPA takes minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import sparge
from benchmarks.measure import environment
from sparge.backends.torch import blocks, processor
from sparge.evaluate.inputs import text_like, video_like
from sparge.evaluate.metrics import relative_l1
from sparge.evaluate.timing import host_seconds, take_turns

RESULTS = Path(__file__).parent / "results" / "processor.jsonl"
HEADS = 8
TOPKS = (0.5, 0.25)
GATE_TOKENS = 4096
PAYS = 1.05
"""Minimum speed-up that counts as a gain; less may be noise."""

Row = dict[str, Any]
LINE = (
    "{dtype:>8} causal {is_causal} N {tokens:>5} D {head_dim:>3} topk {topk:<4} SDPA {dense_s:.4f} s  sparge "
    "{sparse_s:.4f} s ({predict_s:.4f} predicting)  {speedup:.2f}x  density {density:.3f}  L1 {relative_l1:.4f} "
    "(SDPA {dense_relative_l1:.4f})  {variant}"
)


@dataclass(frozen=True)
class Case:
    """One problem: text-like input if causal, otherwise video-like."""

    tokens: int
    is_causal: bool
    dtype: str
    head_dim: int
    heads: int = HEADS


def cases(dtypes: list[str], *, quick: bool) -> list[Case]:
    """Return the cases, the most informative first."""
    lengths = (8192, 4096, 2048, 16384) if quick else (8192, 4096, 2048, 16384, 3072, 6144, 1536, 12288)
    return [
        Case(tokens, is_causal, dtype, head_dim)
        for tokens in lengths
        for dtype in dtypes
        for head_dim in (128, 64)
        for is_causal in (False, True)
    ]


def widened() -> AbstractContextManager[object]:
    """Disable the processor's units for 16 bits."""
    real = processor.units
    plain = {processor.Units.NATIVE: processor.Units.NATIVE}
    return mock.patch.object(processor, "units", lambda dtype: plain.get(real(dtype), processor.Units.NONE))


VARIANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "as it is": nullcontext,
    "products in float32": widened,
    "shared by 8, 4, 2": partial(mock.patch.object, blocks, "SPANS", (8, 4, 2)),
    "shared by 2": partial(mock.patch.object, blocks, "SPANS", (2,)),
    "not shared": partial(mock.patch.object, blocks, "SPANS", ()),
    "not shared, rows uncut": partial(mock.patch.multiple, blocks, SPANS=(), STEP_BLOCKS=1),
    "chunks twice as large": partial(mock.patch.object, blocks, "CHUNK_BYTES", 2 * blocks.CHUNK_BYTES),
    "chunks half as large": partial(mock.patch.object, blocks, "CHUNK_BYTES", blocks.CHUNK_BYTES // 2),
}
VARIANT_TOKENS = 8192


def measure(case: Case, turns: int, budget_s: float) -> Iterator[Row]:
    """Yield the rows of a case: one for each topk, and one for each variant at its size."""
    sample = (text_like if case.is_causal else video_like)(case.tokens, case.heads, case.head_dim)
    tensors = [tensor.to(getattr(torch, case.dtype)) for tensor in (sample.query, sample.key, sample.value)]
    options = {"is_causal": case.is_causal}
    exact = F.scaled_dot_product_attention(*(tensor.float() for tensor in tensors), **options)
    dense = partial(F.scaled_dot_product_attention, *tensors, **options)
    sparse = partial(sparge.attention, *tensors, backend="torch", quantization="none", **options)
    predict = partial(sparge.predict, *tensors[:2], backend="torch", **options)
    dense_l1 = relative_l1(dense(), exact)
    if case.tokens <= GATE_TOKENS:
        allowed, error = 2 * dense_l1 + 1e-5, relative_l1(sparse(topk=1.0), exact)
        if not error <= allowed:
            raise RuntimeError(f"expected topk=1 within {allowed:.2g} of float32, got {error:.2g} for {case}")
    names = list(VARIANTS) if case.tokens == VARIANT_TOKENS else ["as it is"]
    units = processor.units(tensors[0].dtype)
    if units is not processor.Units.MATRIX:
        names = [name for name in names if name != "products in float32"]  # this is the default there
    calls: dict[tuple[str, float], Callable[[], Any]] = {("dense", 0.0): dense}
    for topk in TOPKS:
        calls["predict", topk] = partial(predict, topk=topk)
        for name in names if topk == TOPKS[0] else names[:1]:
            calls[name, topk] = partial(_within, VARIANTS[name], partial(sparse, topk=topk))
    clocks = {key: partial(host_seconds, call) for key, call in calls.items()}
    times = {key: statistics.median(found) for key, found in take_turns(clocks, turns, budget_s=budget_s).items()}
    for (name, topk), call in calls.items():
        if name in VARIANTS:
            yield {
                "suite": "processor",
                **asdict(case),
                "units": units.value,
                "variant": name,
                "topk": topk,
                "dense_s": times["dense", 0.0],
                "sparse_s": times[name, topk],
                "predict_s": times["predict", topk],
                "speedup": times["dense", 0.0] / times[name, topk],
                "density": predict(topk=topk).density(),
                "relative_l1": relative_l1(call(), exact),
                "dense_relative_l1": dense_l1,
            }


def _within(context: Callable[[], AbstractContextManager[object]], call: Callable[[], Any]) -> Any:
    with context():
        return call()


def crossovers(rows: list[Row]) -> list[str]:
    """Return for each dtype and kind the shortest length from which on topk 0.5 pays at all measured lengths."""
    worst: dict[tuple[str, str, bool], dict[int, float]] = {}
    for row in rows:
        speedups = worst.setdefault((row["dtype"], row["units"], row["is_causal"]), {})
        if (row["variant"], row["topk"]) == ("as it is", TOPKS[0]):
            speedups[row["tokens"]] = min(speedups.get(row["tokens"], math.inf), row["speedup"])
    lines = []
    for (dtype, units, is_causal), speedups in sorted(worst.items()):
        losing = [tokens for tokens, speedup in speedups.items() if speedup < PAYS]
        paying = [tokens for tokens in speedups if tokens > max(losing, default=0)]
        shown = ", ".join(f"{tokens}: {speedups[tokens]:.2f}x" for tokens in sorted(speedups))
        kind = "causal" if is_causal else "full"
        lines.append(f"{dtype} ({units}), {kind}: pays from {min(paying, default='no length')} on ({shown})")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four lengths, three turns")
    parser.add_argument("--seconds", type=float, default=160.0)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--longest", type=int, default=16384, help="omit longer sequences")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    begin = time.perf_counter()
    has_bfloat16 = processor.units(torch.bfloat16) is not processor.Units.NONE
    dtypes = options.dtypes or (["bfloat16", "float32"] if has_bfloat16 else ["float32"])
    chosen = cases(dtypes, quick=options.quick)
    chosen = [case for case in chosen if case.tokens <= options.longest]
    turns, budget_s = (3, 1.5) if options.quick else (7, 6.0)
    rows: list[Row] = []
    options.results.parent.mkdir(exist_ok=True, parents=True)
    stamp = environment()
    print(f"{stamp['processor']}, {stamp['threads']} threads, {stamp['system']}; torch {stamp['torch']}", flush=True)
    with options.results.open("a") as results, torch.inference_mode():
        for case in chosen:
            if time.perf_counter() - begin > options.seconds:
                print(f"left out after {options.seconds:g} s: {case}")
                continue
            for row in measure(case, turns, budget_s):
                rows.append(row)
                results.write(json.dumps({**row, **stamp}) + "\n")
                results.flush()
                print(LINE.format(**row), flush=True)
    print("\n".join(crossovers(rows)))
    print(f"{time.perf_counter() - begin:.0f} s; rows appended to {options.results}")


if __name__ == "__main__":
    main()
