"""What an integration adds to an attention call that runs dense: `python -m benchmarks.overhead`.

The call is tiny, so its time is the host's; stock and integrated calls take turns, and the difference of the medians is
what deciding and counting cost. It touches no tensor, so it is the same for calls of any size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import sparge
from benchmarks.measure import append_row
from sparge.bench.timing import Variant, time_on_host
from sparge.integrations import diffusers_backend
from sparge.integrations import transformers as integration

RESULTS = Path(__file__).parent / "results" / "overhead.jsonl"
CALLS, TURNS = 200, 25


def compare(stock: Variant, integrated: Variant) -> dict[str, float]:
    """Medians of both, of one call among many."""
    times = time_on_host({"stock": stock, "integrated": integrated}, TURNS, timed=CALLS)
    stock_us, integrated_us = 1e6 * times["stock"], 1e6 * times["integrated"]
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
    module.is_causal = True  # as all attention modules of transformers have it
    integration.register(sparge.Policy())
    backend = diffusers_backend.register(sparge.Policy())

    def attention() -> object:
        return F.scaled_dot_product_attention(tensor, tensor, tensor)  # looked up at every call, as in a model

    def forward(function: Callable[..., object]) -> Variant:
        return Variant(lambda: function(module, tensor, tensor, tensor, None))

    def dispatched(name: AttentionBackendName) -> Variant:
        return Variant(lambda: dispatch_attention_fn(tensor, tensor, tensor, backend=name))

    rows = {
        "replace_sdpa": compare(Variant(attention), Variant(attention, context=sparge.replace_sdpa)),
        "transformers": compare(forward(sdpa_attention_forward), forward(integration.attention_forward)),
        "diffusers": compare(dispatched(AttentionBackendName.NATIVE), dispatched(backend)),
    }
    for name, row in rows.items():
        append_row(args.results, {"case": name, "device": args.device, **row}, gpu=args.device == "cuda")
        print(
            f"{name:14} {row['stock_us']:6.1f} -> {row['integrated_us']:6.1f} us: {row['overhead_us']:+.1f}", flush=True
        )


if __name__ == "__main__":
    main()
