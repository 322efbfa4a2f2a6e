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
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

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

Row = dict[str, object]


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


class Problem:
    """The tensors of a case and the calls on them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        sample = (text_like if case.is_causal else video_like)(case.tokens, case.heads, case.head_dim)
        dtype = getattr(torch, case.dtype)
        self.tensors = tuple(tensor.to(dtype) for tensor in (sample.query, sample.key, sample.value))
        self.exact = F.scaled_dot_product_attention(
            *(tensor.float() for tensor in self.tensors), is_causal=case.is_causal
        )

    def dense(self) -> Tensor:
        return F.scaled_dot_product_attention(*self.tensors, is_causal=self.case.is_causal)

    def sparse(self, topk: float) -> Tensor:
        output: Tensor = sparge.attention(
            *self.tensors, is_causal=self.case.is_causal, topk=topk, backend="torch", quantization="none"
        )
        return output

    def predict(self, topk: float) -> sparge.BlockMask:
        return sparge.predict(*self.tensors[:2], is_causal=self.case.is_causal, topk=topk, backend="torch")

    def check_gate(self) -> None:
        allowed = 2 * relative_l1(self.dense(), self.exact) + 1e-5
        got = relative_l1(self.sparse(1.0), self.exact)
        if not got <= allowed:
            raise RuntimeError(f"expected topk=1 within {allowed:.2g} of float32, got {got:.2g} for {self.case}")


def measure(case: Case, turns: int, budget_s: float) -> Iterator[Row]:
    """Yield the rows of a case: one for each topk, and one for each variant at its size."""
    problem = Problem(case)
    if case.tokens <= GATE_TOKENS:
        problem.check_gate()
    names = list(VARIANTS) if case.tokens == VARIANT_TOKENS else ["as it is"]
    if processor.units(problem.tensors[0].dtype) is not processor.Units.MATRIX:
        names = [name for name in names if name != "products in float32"]  # this is the default there
    calls: dict[tuple[str, float], Callable[[], object]] = {("dense", 0.0): problem.dense}
    for topk in TOPKS:
        calls["predict", topk] = partial(problem.predict, topk)
        for name in names if topk == TOPKS[0] else names[:1]:
            calls[name, topk] = partial(_within, VARIANTS[name], partial(problem.sparse, topk))
    clocks = {key: partial(host_seconds, call) for key, call in calls.items()}
    times = {key: statistics.median(found) for key, found in take_turns(clocks, turns, budget_s=budget_s).items()}
    dense_l1 = relative_l1(problem.dense(), problem.exact)
    for name, topk in calls:
        if name not in VARIANTS:
            continue
        seconds = times[name, topk]
        yield {
            "suite": "processor",
            **asdict(case),
            "units": processor.units(problem.tensors[0].dtype).value,
            "variant": name,
            "topk": topk,
            "dense_s": times["dense", 0.0],
            "sparse_s": seconds,
            "predict_s": times["predict", topk],
            "speedup": times["dense", 0.0] / seconds,
            "density": problem.predict(topk).density(),
            "relative_l1": relative_l1(_within(VARIANTS[name], partial(problem.sparse, topk)), problem.exact),
            "dense_relative_l1": dense_l1,
        }


def _within(context: Callable[[], AbstractContextManager[object]], call: Callable[[], Tensor]) -> Tensor:
    with context():
        return call()


def crossovers(rows: list[Row]) -> list[str]:
    """Return for each dtype and kind the shortest length from which on topk 0.5 pays at all measured lengths."""
    lines = []
    kinds = sorted({(str(row["dtype"]), str(row["units"]), bool(row["is_causal"])) for row in rows})
    for dtype, units, is_causal in kinds:
        worst: dict[int, float] = {}
        for row in rows:
            of_kind = (row["dtype"], row["is_causal"], row["variant"]) == (dtype, is_causal, "as it is")
            if of_kind and row["topk"] == TOPKS[0]:
                tokens = int(str(row["tokens"]))
                worst[tokens] = min(worst.get(tokens, float("inf")), float(str(row["speedup"])))
        losing = [tokens for tokens, speedup in worst.items() if speedup < PAYS]
        paying = [tokens for tokens in worst if tokens > max(losing, default=0)]
        shown = ", ".join(f"{tokens}: {worst[tokens]:.2f}x" for tokens in sorted(worst))
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
                print(_line(row), flush=True)
    print("\n".join(crossovers(rows)))
    print(f"{time.perf_counter() - begin:.0f} s; rows appended to {options.results}")


def _line(row: Row) -> str:
    kind = "causal" if row["is_causal"] else "full"
    return (
        f"{row['dtype']:>8} {kind:6} N {row['tokens']:>5} D {row['head_dim']:>3} topk {row['topk']:<4} "
        f"SDPA {1e3 * float(str(row['dense_s'])):8.1f} ms  sparge {1e3 * float(str(row['sparse_s'])):8.1f} ms "
        f"({1e3 * float(str(row['predict_s'])):.1f} predicting)  {row['speedup']:.2f}x  density {row['density']:.3f}  "
        f"L1 {row['relative_l1']:.4f} (SDPA {row['dense_relative_l1']:.4f})  {row['variant']}"
    )


if __name__ == "__main__":
    main()
