"""What an integration adds to an attention call that runs dense: `python -m benchmarks.overhead`.

The call is tiny, so its time is the host's; stock and integrated calls take turns, and the difference of the medians is
what deciding and counting cost. It touches no tensor, so it is the same for calls of any size.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import sparge
from benchmarks.measure import append_row
from sparge.integrations import diffusers_backend
from sparge.integrations import transformers as integration

RESULTS = Path(__file__).parent / "results" / "overhead.jsonl"
CALLS, TURNS = 200, 25


def microseconds(function: Callable[[], object]) -> float:
    """Of one call among many."""
    start = time.perf_counter()
    for _ in range(CALLS):
        function()
    return (time.perf_counter() - start) / CALLS * 1e6


def compare(stock: Callable[[], object], integrated: Callable[[], object]) -> dict[str, float]:
    """Medians of both, taking turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(TURNS):
        times[0].append(microseconds(stock))
        times[1].append(microseconds(integrated))
    stock_us, integrated_us = map(statistics.median, times)
    return {"stock_us": stock_us, "integrated_us": integrated_us, "overhead_us": integrated_us - stock_us}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    tensor = torch.randn(1, 8, 64, 64, device=args.device)
    module = nn.Module()
    integration.register(sparge.Policy())
    backend = diffusers_backend.register(sparge.Policy())

    def in_a_scope() -> Callable[[], object]:
        return lambda: F.scaled_dot_product_attention(tensor, tensor, tensor)

    def dispatched(name: AttentionBackendName) -> Callable[[], object]:
        return lambda: dispatch_attention_fn(tensor, tensor, tensor, backend=name)

    with sparge.replace_sdpa():
        scoped = statistics.median(microseconds(in_a_scope()) for _ in range(TURNS))
    plain = statistics.median(microseconds(in_a_scope()) for _ in range(TURNS))
    rows = {
        "replace_sdpa": {"stock_us": plain, "integrated_us": scoped, "overhead_us": scoped - plain},
        "transformers": compare(
            lambda: sdpa_attention_forward(module, tensor, tensor, tensor, None),
            lambda: integration.attention_forward(module, tensor, tensor, tensor, None),
        ),
        "diffusers": compare(dispatched(AttentionBackendName.NATIVE), dispatched(backend)),
    }
    for name, row in rows.items():
        append_row(args.results, {"case": name, "device": args.device, **row}, gpu=args.device == "cuda")
        print(
            f"{name:14} {row['stock_us']:6.1f} -> {row['integrated_us']:6.1f} us: {row['overhead_us']:+.1f}", flush=True
        )


if __name__ == "__main__":
    main()
