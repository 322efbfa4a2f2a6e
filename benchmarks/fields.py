"""Measure errors on smooth fields with skipped blocks dropped or replaced by means: `python -m benchmarks.fields`.

There are four fields: in the first, a tenth of the blocks has almost all attention, in the last it is spread over most
blocks. Each is measured in raster and in Hilbert order. On a GPU, calls on the first field are also timed at two
lengths, interleaved with dense kernels.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sparge
from benchmarks.measure import append_row
from sparge.bench.rivals import RIVALS, fa4_version
from sparge.bench.timing import TimedCall, time_on_cuda
from sparge.evaluate.inputs import Inputs, frame_grid, video_tensors
from sparge.evaluate.metrics import relative_l1
from sparge.masks.ordering import OrderName, order_of

RESULTS = Path(__file__).parent / "results" / "fields.jsonl"
FIELDS = ((1.6, 0.5), (1.0, 0.5), (0.7, 0.7), (0.5, 0.3))
"""Amplitude and noise of each field."""
DENSITIES = (0.05, 0.1, 0.15, 0.25, 0.5)
ORDERS: tuple[OrderName, ...] = ("row", "hilbert")
TOKENS, HEAD_DIM = 8192, 128
TIMED = ((32768, 16), (131072, 4))
TURNS = 9


def smooth_tensors(heads: int, tokens: int, device: str, *, amplitude: float, noise: float) -> Inputs:
    """Return query, key and value (1, H, S, D) of a smooth field. Values have a nonzero mean, as in models."""
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = video_tensors(
        (1, heads, tokens, HEAD_DIM), generator, amplitude=amplitude, noise=noise, frequency=2.0
    )
    return query, key, value + torch.randn((1, heads, 1, HEAD_DIM), generator=generator, device=device)


def make_inputs(tokens: int, heads: int, field: tuple[float, float], order: OrderName, device: str) -> list[Tensor]:
    """Return query, key and value, in bfloat16 on a GPU."""
    tensors = smooth_tensors(heads, tokens, device, amplitude=field[0], noise=field[1])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    along = order_of(frame_grid(tokens), order, device)
    return [along.apply(tensor, 2).to(dtype) for tensor in tensors]


def error_rows(field: tuple[float, float], order: OrderName, device: str, heads: int) -> list[dict[str, Any]]:
    """Return the error rows of one field, with the device's default quantization."""
    query, key, value = make_inputs(TOKENS, heads, field, order, device)
    exact = F.scaled_dot_product_attention(query.float(), key.float(), value.float())
    case = {
        "suite": "error",
        "amplitude": field[0],
        "noise": field[1],
        "order": order,
        "tokens": TOKENS,
        "heads": heads,
    }
    rows = []
    for density, skipped in itertools.product(DENSITIES, ("drop", "mean")):
        output = sparge.attention(query, key, value, topk=density, skipped=skipped)
        error = relative_l1(output, exact)
        rows.append({**case, "density": density, "skipped": skipped, "relative_l1": error})
    return rows


def speed_rows(tokens: int, heads: int) -> list[dict[str, Any]]:
    """Return the speed rows of the first field: times, dense times of the same run, and error relative to cuDNN."""
    query, key, value = make_inputs(tokens, heads, FIELDS[0], "row", "cuda")
    variants = {name: rival.call((query, key, value), False) for name, rival in RIVALS.items()}
    choices = list(itertools.product(("topk", "rows"), (0.1, 0.25), ("drop", "mean")))

    def call(rule: str, density: float, skipped: Any) -> Tensor:
        sparsity = sparge.Budget(density) if rule == "topk" else sparge.TopK(density)
        return sparge.attention(query, key, value, sparsity=sparsity, skipped=skipped)

    variants |= {str(choice): TimedCall(partial(call, *choice)) for choice in choices}
    exact = variants["cudnn"].once()
    times = time_on_cuda(variants, TURNS)
    case = {
        "suite": "speed",
        "tokens": tokens,
        "heads": heads,
        **{f"{name}_ms": times[name].graph_ms for name in RIVALS},
    }
    rows = []
    for rule, density, skipped in choices:
        row = {**case, "rule": rule, "density": density, "skipped": skipped}
        row["ms"] = times[str((rule, density, skipped))].graph_ms
        rows.append({**row, "relative_l1": relative_l1(call(rule, density, skipped), exact)})
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    heads = 8 if args.device == "cuda" else 2
    rows = [row for field in FIELDS for order in ORDERS for row in error_rows(field, order, args.device, heads)]
    if args.device == "cuda":
        rows += [row for tokens, heads in TIMED for row in speed_rows(tokens, heads)]
    for row in rows:
        append_row(args.results, row | {"flash_attn_4": fa4_version()}, gpu=args.device == "cuda")


if __name__ == "__main__":
    main()
