"""Measure speed, error and memory of the torch backend on a CPU, in turns with torch's own attention.

    python -m benchmarks.cpu [--suite speed | memory] [--repeats 5]

Rows are appended to benchmarks/results/cpu.jsonl. Sparse times include prediction. A row is written only if topk=1
equals dense attention within float32 rounding (`GATE`). `benchmarks.processor` measures the crossover.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from rich.progress import track

import sparge
from benchmarks.measure import environment, peak_resident_bytes
from sparge.evaluate.inputs import Sample, text_like, video_like
from sparge.evaluate.metrics import block_mass, mass_recall, relative_l1
from sparge.evaluate.timing import host_seconds, take_turns

RESULTS = Path(__file__).parent / "results" / "cpu.jsonl"
GATE = 1e-5
HEAD_DIM = 64


@dataclass(frozen=True)
class Case:
    """One row: text-like input if causal, otherwise video-like."""

    suite: str
    tokens: int
    is_causal: bool
    topk: float
    heads: int = 8
    queries: int | None = None  # all
    dtype: str = "float32"


CASES = [
    *(Case("speed", 8192, is_causal, topk) for is_causal in (False, True) for topk in (0.5, 0.25, 0.1)),
    *(Case("memory", tokens, is_causal, 0.25) for tokens in (8192, 32768) for is_causal in (False, True)),
]


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Return the row of a case."""
    sample = (text_like if case.is_causal else video_like)(case.tokens, case.heads, HEAD_DIM)
    measured = memory(sample, case) if case.suite == "memory" else speed(sample, case, repeats)
    return {**asdict(case), "head_dim": HEAD_DIM, "repeats": repeats, **measured, **environment()}


def speed(sample: Sample, case: Case, repeats: int) -> dict[str, Any]:
    query, key, options = sample.query, sample.key, {"is_causal": case.is_causal}
    sparse = partial(sparge.attention, query, key, sample.value, backend="torch", **options)
    predict = partial(sparge.predict, query, key, topk=case.topk, **options)
    dense = partial(F.scaled_dot_product_attention, query, key, sample.value, **options)
    exact = dense()
    gate = relative_l1(sparse(topk=1.0), exact)
    if not gate < GATE:
        raise RuntimeError(f"expected topk=1 to equal dense attention within {GATE}, got {gate} for {case}")
    calls: dict[str, Callable[[], object]] = {"dense": dense, "sparse": partial(sparse, topk=case.topk)}
    calls["predict"] = predict
    times = take_turns({name: partial(host_seconds, call) for name, call in calls.items()}, repeats)
    seconds = {f"{name}_s": statistics.median(values) for name, values in times.items()}
    mask, mass = predict(), block_mass(query, key, is_causal=case.is_causal)
    return {
        **seconds,
        "speedup": seconds["dense_s"] / seconds["sparse_s"],
        "density": mask.density(),
        "mass_recall": mass_recall(mask, mass),
        "relative_l1": relative_l1(sparse(topk=case.topk), exact),
        "gate_relative_l1": gate,
    }


def memory(sample: Sample, case: Case) -> dict[str, Any]:
    tensors = (sample.query, sample.key, sample.value)
    call = partial(sparge.attention, is_causal=case.is_causal, topk=case.topk, backend="torch")
    call(*(tensor[:, :, :2048] for tensor in tensors))  # loads code and thread pools
    inputs, extra = sum(tensor.nbytes for tensor in tensors), peak_resident_bytes(partial(call, *tensors))
    return {"input_bytes": inputs, "extra_bytes": extra, "extra_ratio": None if extra is None else extra / inputs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=["speed", "memory", "all"], default="all")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    cases = [case for case in CASES if options.suite in (case.suite, "all")]
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as results:
        for case in track(cases, description="measuring"):
            with multiprocessing.get_context("spawn").Pool(1) as pool:  # a process for each, to measure its memory
                row = pool.apply(measure, (case, options.repeats))
            results.write(json.dumps(row) + "\n")
            results.flush()
            shown = ("suite", "tokens", "is_causal", "topk", "speedup", "density", "relative_l1", "extra_ratio")
            print("  ".join(f"{name} {row[name]}" for name in shown if name in row))
    print(f"rows appended to {RESULTS}")


if __name__ == "__main__":
    main()
