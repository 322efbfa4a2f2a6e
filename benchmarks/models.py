"""Time of a forward pass of whole models with random weights, stock and sparse: `python -m benchmarks.models`.

Shapes are those of published models; weights are random, so attention has little structure and the error says how far
sparse and stock outputs differ on such input, not how a trained model looks. What it shows is the speed that is left
when everything around attention runs as well. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparge
from benchmarks.measure import append_row
from sparge.bench.timing import Variant, time_on_cuda

RESULTS = Path(__file__).parent / "results" / "models.jsonl"


def wan() -> tuple[Any, Callable[[Any], Tensor]]:
    """Wan 2.1 T2V 1.3B: 81 frames of 832 x 480 are 32 760 tokens."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(num_attention_heads=12, ffn_dim=8960, num_layers=30)
    video = torch.randn(1, 16, 21, 60, 104, device="cuda", dtype=torch.bfloat16)
    text = torch.randn(1, 512, 4096, device="cuda", dtype=torch.bfloat16)
    step = torch.tensor([500], device="cuda")
    return model, lambda model: model(video, step, text, return_dict=False)[0]


def llama() -> tuple[Any, Callable[[Any], Tensor]]:
    """Llama 3.1 8B: prefill of 32 768 tokens."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    )
    tokens = torch.randint(0, 1024, (1, 32768), device="cuda")
    return LlamaModel(config), lambda model: model(tokens, use_cache=False).last_hidden_state


MODELS = {"Wan 2.1 1.3B": wan, "Llama 3.1 8B": llama}


@contextmanager
def enabled(model: Any, policy: sparge.Policy) -> Iterator[None]:
    """The model with sparse attention, and as it was afterwards."""
    sparge.enable(model, policy)
    try:
        yield
    finally:
        sparge.disable(model)


@torch.no_grad()
def measure(name: str, shares: list[float], repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each share of kept blocks."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model, forward = MODELS[name]()
    torch.set_default_dtype(torch.float32)
    model.eval()
    stock = forward(model).float()
    run = partial(forward, model)
    policies = {f"{topk}": partial(enabled, model, sparge.Policy(topk=topk)) for topk in shares}
    variants = {"stock": Variant(run)} | {topk: Variant(run, context) for topk, context in policies.items()}
    timings = time_on_cuda(variants, repeats, graphs=False)
    for variant, timing in timings.items():
        if timing.ms is None:
            raise RuntimeError(f"expected a forward pass of {name}, {variant}, got {timing.problem}")
    for topk in shares:
        with policies[f"{topk}"]():
            sparge.reset_stats()
            error = float((run().float() - stock).abs().sum() / stock.abs().sum())
            stats = sparge.stats()
        row = {"case": "forward", "model": name, "topk": topk}
        row |= {"stock_ms": timings["stock"].ms, "sparse_ms": timings[f"{topk}"].ms}
        yield {**row, "density": stats.density, "relative_l1": error, "reasons": stats.reasons}
    assert torch.equal(forward(model).float(), stock), "disable restores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topk", type=float, nargs="+", default=[0.5, 0.25, 0.15])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    for name in args.models:
        for row in measure(name, args.topk, args.repeats):
            append_row(args.results, row, gpu=True)
            print(
                "{model} topk {topk}: {stock_ms:.1f} -> {sparse_ms:.1f} ms, density {density:.3f}, "
                "relative L1 {relative_l1:.4f}, {reasons}".format(**row),
                flush=True,
            )


if __name__ == "__main__":
    main()
