"""Stage 2: how much P V a threshold skips, and what that costs or saves: `python -m benchmarks.threshold`.

Whole calls in turns without and with thresholds, at three lengths. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sparge
from benchmarks.measure import append_row
from sparge.bench.timing import Variant, time_on_cuda
from sparge.evaluate.inputs import smooth_tensors, text_tensors, video_tensors
from sparge.evaluate.metrics import relative_l1

RESULTS = Path(__file__).parent / "results" / "threshold.jsonl"
LENGTHS = ((8192, 32), (32768, 16), (131072, 4))
"""Tokens and heads."""
RULES = {
    "budget .5": sparge.Budget(0.5),
    "budget .1": sparge.Budget(0.1),
    "rows .5": sparge.TopK(0.5),
}
THRESHOLDS = (-4.0, -6.0, -8.0, -12.0)
TURNS = 5


def made(kind: str, tokens: int, heads: int, device: str) -> tuple[list[Tensor], bool]:
    """Query, key and value in 16 bits, and whether they are causal."""
    generator, shape = torch.Generator(device).manual_seed(0), (1, heads, tokens, 128)
    if kind == "field":
        tensors = smooth_tensors(shape, generator, amplitude=1.6, noise=0.5)
    else:
        tensors = (video_tensors if kind == "video-like" else text_tensors)(shape, generator)
    return [tensor.bfloat16() for tensor in tensors], kind == "text-like"


def measured(kind: str, rule: str, tokens: int, heads: int) -> Iterator[dict[str, Any]]:
    """A row for each threshold, and one without."""
    inputs, is_causal = made(kind, tokens, heads, "cuda")
    exact = F.scaled_dot_product_attention(*inputs, is_causal=is_causal)

    def call(threshold: float | None) -> Tensor:
        sparsity = replace(RULES[rule], pv_threshold=threshold)
        return sparge.attention(*inputs, is_causal=is_causal, sparsity=sparsity)

    asked: list[float | None] = [None, *THRESHOLDS]
    times = time_on_cuda({f"{threshold}": Variant(lambda each=threshold: call(each)) for threshold in asked}, TURNS)
    for threshold in asked:
        sparge.reset_stats()
        error = relative_l1(call(threshold), exact)
        stats, timing = sparge.stats(), times[f"{threshold}"]
        if timing.graph_ms is None:
            raise RuntimeError(f"expected a call with pv_threshold={threshold}, got {timing.problem}")
        yield {
            **{"case": "threshold", "inputs": kind, "rule": rule, "tokens": tokens, "heads": heads},
            **{"threshold": threshold, "density": stats.density, "pv_skipped": stats.pv_skipped},
            **{"ms": timing.graph_ms, "plain_ms": times["None"].graph_ms, "relative_l1": error},
        }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    for tokens, heads in LENGTHS:
        for kind in ("field", "video-like", "text-like"):
            for rule in RULES:
                for row in measured(kind, rule, tokens, heads):
                    append_row(args.results, row, gpu=True)
                    print({key: round(item, 4) if isinstance(item, float) else item for key, item in row.items()})


if __name__ == "__main__":
    main()
