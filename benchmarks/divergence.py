"""What 8 bits cost a language model: `python -m benchmarks.divergence --data FOLDER`.

SmolLM2-135M-Instruct reads windows of essays with *dense* attention in every quantization. Against the same model on
torch's attention in the same dtype: KL divergence of the next-token distribution, rise of perplexity, and how often the
most likely token is the same. Row "none" is the noise of 16 bits alone. The folder is that of `benchmarks.language`; on
a GPU it takes a minute, on a CPU choose few --tokens and --windows.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import sparge
from benchmarks.language import essays, load, windows_of
from benchmarks.measure import append_row
from sparge.backends import base

RESULTS = Path(__file__).parent / "results" / "divergence.jsonl"
CHUNK_TOKENS = 512
INTERFACE = "sparge_dense"


class Window(NamedTuple):
    """Means over one window's tokens: KL in nats, agreement of the most likely token, rise of the log-perplexity."""

    kl: float
    agreement: float
    rise: float


@contextmanager
def dense_attention(model: Any, quantization: str, backend: str) -> Iterator[None]:
    """The model's attention is `sparge.attention` over all blocks, causal, without padding."""
    from transformers import AttentionInterface

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, **__: Any) -> Any:
        del module
        output = sparge.attention(
            query,
            key,
            value,
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
            sparsity=sparge.Dense(),
            quantization=quantization,
            backend=backend,
        )
        return output.transpose(1, 2), None

    before = model.config._attn_implementation
    AttentionInterface.register(INTERFACE, attend)
    model.set_attn_implementation(INTERFACE)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def hidden_states(model: Any, window: Tensor) -> Tensor:
    """What the output embedding receives: (1, N) -> (1, N - 1, C), without the last."""
    return model.base_model(window, use_cache=False).last_hidden_state[:, :-1]


def compare(model: Any, window: Tensor, dense: Tensor, other: Tensor) -> Window:
    """Next-token distributions of two runs over one window."""
    head = model.get_output_embeddings()
    targets = window[0, 1:]
    kl = agreement = rise = 0.0
    for start in range(0, len(targets), CHUNK_TOKENS):
        part = slice(start, start + CHUNK_TOKENS)
        log_p, log_q = (head(hidden[0, part]).float().log_softmax(-1) for hidden in (dense, other))
        kl += float(F.kl_div(log_q, log_p, reduction="sum", log_target=True))
        agreement += float((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        rise += float((log_p - log_q).gather(1, targets[part, None]).sum())
    return Window(*(total / len(targets) for total in (kl, agreement, rise)))


def summary(windows: list[Window]) -> dict[str, float | None]:
    """Means over the windows, with the standard errors of KL and of the loss."""

    def standard_error(values: list[float]) -> float | None:
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None

    kls, rises = [window.kl for window in windows], [window.rise for window in windows]
    return {
        "kl": statistics.fmean(kls),
        "kl_error": standard_error(kls),
        "loss": math.expm1(statistics.fmean(rises)),
        "loss_error": standard_error(rises),
        "agreement": statistics.fmean(window.agreement for window in windows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--quantization", nargs="+", help="all that the backend has, by default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()

    backend = base.resolve(args.backend, torch.device(args.device))
    fast = [name for name in base.get(backend).quantizations if name == "int8_fp8_fast"]
    quantizations = args.quantization or ["none", "int8_fp16", "int8_fp8", *fast]
    model, tokenizer = load(args.data, args.device, getattr(torch, args.dtype))
    tokens = tokenizer(essays(args.data), return_tensors="pt").input_ids[0].to(args.device)
    windows = windows_of(tokens, args.tokens, args.windows)
    found: dict[str, list[Window]] = {name: [] for name in quantizations}
    start = time.perf_counter()
    with torch.no_grad():
        for window in windows:
            dense = hidden_states(model, window)
            for name in quantizations:
                with dense_attention(model, name, backend):
                    other = hidden_states(model, window)
                found[name].append(compare(model, window, dense, other))
    seconds = time.perf_counter() - start
    common = {"case": "divergence", "model": "SmolLM2-135M-Instruct", "tokens": args.tokens, "windows": len(windows)}
    common |= {"dtype": args.dtype, "device": args.device, "attention": backend, "seconds": seconds}
    for name, measured in found.items():
        row = {**common, "quantization": name, **summary(measured)}
        append_row(args.results, row, gpu=args.device == "cuda")
        print(
            f"{args.tokens} tokens, {len(windows)} windows, {backend} {name}: KL {row['kl']:.5f} "
            f"(standard error {row['kl_error']}), perplexity {row['loss']:+.3%}, same token {row['agreement']:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
