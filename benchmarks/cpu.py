"""Measure speed, error and memory of the torch backend on a CPU, in turns with torch's own attention.

    python -m benchmarks.cpu [--suite speed | crossover | "few queries" | "few heads" | memory | all] [--repeats 5]

Rows are appended to benchmarks/results/cpu.jsonl. Sparse times include prediction. A row is written only if topk=1
equals dense attention within float32 rounding (the gate).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track

import sparge
from benchmarks.measure import environment, peak_resident_bytes
from sparge.bench.timing import Variant, time_on_host
from sparge.evaluate.inputs import Sample, text_like, video_like
from sparge.evaluate.metrics import block_mass, mass_recall, relative_l1

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
    queries: int | None = None  # number of last queries; default all
    dtype: str = "float32"


SPEED = [Case("speed", 8192, is_causal, topk) for is_causal in (False, True) for topk in (0.5, 0.25, 0.1)]
CROSSOVER = [
    Case("crossover", tokens, is_causal, topk)
    for tokens in (1024, 1536, 2048, 3072, 4096)
    for is_causal in (False, True)
    for topk in (0.5, 0.25)
]
FEW_QUERIES = [
    Case("few queries", 8192, False, topk, queries=queries)
    for queries in (64, 128, 256, 512, 1024)
    for topk in (0.5, 0.25)
]
FEW_HEADS = [Case("few heads", tokens, True, topk, heads=1) for tokens in (2048, 4096, 8192) for topk in (0.5, 0.25)]
MEMORY = [Case("memory", tokens, is_causal, 0.25) for tokens in (8192, 32768) for is_causal in (False, True)]
SUITES = {"speed": SPEED, "crossover": CROSSOVER, "few queries": FEW_QUERIES, "few heads": FEW_HEADS, "memory": MEMORY}


def sample_for(case: Case) -> Sample:
    make = text_like if case.is_causal else video_like
    return make(case.tokens, case.heads, HEAD_DIM)


def measure_speed(case: Case, repeats: int) -> dict[str, object]:
    sample = sample_for(case)
    query, key, value = (tensor.to(getattr(torch, case.dtype)) for tensor in (sample.query, sample.key, sample.value))
    query = query[:, :, -(case.queries or case.tokens) :].contiguous()
    rule = sparge.Budget(case.topk)

    def dense() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=case.is_causal)

    def sparse(sparsity: sparge.Budget = rule) -> torch.Tensor:
        return sparge.attention(query, key, value, is_causal=case.is_causal, sparsity=sparsity, backend="torch")

    def predict() -> sparge.BlockMask:
        return sparge.predict(query, key, is_causal=case.is_causal, sparsity=rule)

    exact = dense()
    gate = relative_l1(sparse(sparge.Budget(1.0)), exact)
    if not gate < GATE:
        raise RuntimeError(f"expected topk=1 to equal dense attention within {GATE}, got {gate} for {case}")
    mask = predict()
    calls = {"dense": Variant(dense), "sparse": Variant(sparse), "predict": Variant(predict)}
    times = time_on_host(calls, repeats)
    mass = block_mass(query, key, is_causal=case.is_causal)
    return {
        "dense_s": times["dense"],
        "sparse_s": times["sparse"],
        "predict_s": times["predict"],
        "speedup": times["dense"] / times["sparse"],
        "density": mask.density(),
        "mass_recall": mass_recall(mask, mass),
        "relative_l1": relative_l1(sparse(), exact),
        "gate_relative_l1": gate,
    }


def measure_memory(case: Case, repeats: int) -> dict[str, object]:  # noqa: ARG001
    sample = sample_for(case)
    inputs = sum(tensor.nbytes for tensor in (sample.query, sample.key, sample.value))
    small = [tensor[:, :, :2048] for tensor in (sample.query, sample.key, sample.value)]
    sparge.attention(*small, is_causal=case.is_causal, topk=case.topk, backend="torch")  # loads code and thread pools
    extra = peak_resident_bytes(
        lambda: sparge.attention(
            sample.query, sample.key, sample.value, is_causal=case.is_causal, topk=case.topk, backend="torch"
        )
    )
    return {"input_bytes": inputs, "extra_bytes": extra, "extra_ratio": None if extra is None else extra / inputs}


def _row(job: tuple[Case, int]) -> dict[str, object]:
    case, repeats = job
    measured = (measure_memory if case.suite == "memory" else measure_speed)(case, repeats)
    return {**asdict(case), "head_dim": HEAD_DIM, "repeats": repeats, **measured, **environment()}


def run(cases: list[Case], repeats: int) -> Iterator[dict[str, object]]:
    """Yield one row per case, each in a new process, so that memory is measured separately."""
    context = multiprocessing.get_context("spawn")
    for case in track(cases, description="measuring"):
        with context.Pool(1) as pool:
            yield pool.apply(_row, ((case, repeats),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=[*SUITES, "all"], default="all")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    names = list(SUITES) if options.suite == "all" else [options.suite]
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as results:
        for row in run([case for name in names for case in SUITES[name]], options.repeats):
            results.write(json.dumps(row) + "\n")
            results.flush()
            shown = (
                "suite",
                "tokens",
                "is_causal",
                "topk",
                "speedup",
                "density",
                "relative_l1",
                "extra_ratio",
            )
            print("  ".join(f"{name} {_short(row[name])}" for name in shown if name in row))
    print(f"rows appended to {RESULTS}")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
