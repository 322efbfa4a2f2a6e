"""Measure how much P V a `pv_threshold` skips, and its effect on time and error: `python -m benchmarks.threshold`.

Times calls with and without thresholds, interleaved, at three lengths on a CUDA device. With --data FOLDER (as in
`benchmarks.evaluation`), measures skipped P V and KL of SmolLM2 instead, on any device.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sparge
from benchmarks.evaluation import ESSAYS, WEIGHTS
from benchmarks.fields import smooth_tensors
from benchmarks.measure import append_row
from sparge.backends.base import resolve
from sparge.bench.timing import TimedCall, time_on_cuda
from sparge.evaluate.inputs import text_tensors, video_tensors
from sparge.evaluate.language import fidelity
from sparge.evaluate.language.load import load
from sparge.evaluate.language.texts import read_text, windows_of
from sparge.evaluate.metrics import relative_l1
from sparge.evaluate.variants import enabled

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


def make_inputs(kind: str, tokens: int, heads: int, device: str) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return query, key and value in bfloat16, and whether attention is causal."""
    if kind == "field":
        tensors = smooth_tensors(heads, tokens, device, amplitude=1.6, noise=0.5)
    else:
        generator = torch.Generator(device).manual_seed(0)
        tensors = (video_tensors if kind == "video-like" else text_tensors)((1, heads, tokens, 128), generator)
    query, key, value = (tensor.bfloat16() for tensor in tensors)
    return query, key, value, kind == "text-like"


def call_rows(kind: str, rule: str, tokens: int, heads: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each threshold, and one without a threshold."""
    query, key, value, is_causal = make_inputs(kind, tokens, heads, "cuda")
    exact = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    def call(threshold: float | None) -> Tensor:
        sparsity = replace(RULES[rule], pv_threshold=threshold)
        return sparge.attention(query, key, value, is_causal=is_causal, sparsity=sparsity)

    thresholds: list[float | None] = [None, *THRESHOLDS]
    times = time_on_cuda({f"{threshold}": TimedCall(partial(call, threshold)) for threshold in thresholds}, TURNS)
    for threshold in thresholds:
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


def model_rows(data: Path, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each density and threshold of SmolLM2 on one window of essays, without quantization."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model, tokenizer = load(str(data / WEIGHTS), device.type, dtype)
    ids = torch.tensor(tokenizer(read_text(str(data / ESSAYS)), add_special_tokens=False).input_ids)
    window = windows_of(ids, tokens, 1)[0].to(device)
    dense = fidelity.read(model, window)
    for density in (0.5, 0.25):
        for threshold in (None, *THRESHOLDS):
            rule = sparge.Budget(density, pv_threshold=threshold)
            policy = sparge.Policy(sparsity=rule, quantization="none", backend=resolve("auto", device))
            sparge.reset_stats()
            with enabled(model, policy):
                difference = fidelity.compare(window, dense, fidelity.read(model, window))
            stats = sparge.stats()
            yield {
                **{"case": "model", "model": "SmolLM2-135M-Instruct", "tokens": tokens, "threshold": threshold},
                **{"density": stats.density, "pv_skipped": stats.pv_skipped, "kl": difference.kl},
            }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tokens", type=int, default=8192, help="length of the model's window; default: %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.data is not None:
        for row in model_rows(args.data, args.tokens):
            append_row(args.results, row, gpu=torch.cuda.is_available())
        return
    for (tokens, heads), kind, rule in itertools.product(LENGTHS, ("field", "video-like", "text-like"), RULES):
        for row in call_rows(kind, rule, tokens, heads):
            append_row(args.results, row, gpu=True)


if __name__ == "__main__":
    main()
