"""Record what attention receives in SmolLM2-135M-Instruct: `python -m benchmarks.capture --data FOLDER`.

Writes tests/data/smollm2_qkv.npz: query, key and value after the rotary embedding, float16, of three layers that
differ, one head of the keys and its three query heads each. The text is the first 1024 tokens of the essays; of the
queries the last 512 are kept. The folder is that of `benchmarks.language`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.language import essays, load

RECORDED = Path(__file__).parent.parent / "tests" / "data" / "smollm2_qkv.npz"
TOKENS, QUERIES = 1024, 512
HEADS = {1: 0, 18: 2, 27: 1}
"""Layer: head of the keys. Layer 1 has no sink, but outlier channels in K (4x) and Q (8x). In layer 18 the sink lies 23
nats above the median, and its value is 12 times as small as the others. Layer 27 has both, and V's largest mean."""


def attention_inputs(model: Any, tokens: Tensor) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Query (1, 9, S, D), key and value (1, 3, S, D) of every layer."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    inputs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs[module.layer_idx] = query, key, value
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("record", record)
    model.set_attn_implementation("record")
    with torch.no_grad():
        model(tokens)
    return inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data
    model, tokenizer = load(data, "cpu", torch.float32)
    tokens = tokenizer(essays(data), return_tensors="pt").input_ids[:, :TOKENS]
    inputs = attention_inputs(model, tokens)
    arrays = {}
    for layer, head in HEADS.items():
        query, key, value = inputs[layer]
        group = query.shape[1] // key.shape[1]
        arrays[f"query_{layer}"] = query[0, head * group : (head + 1) * group, -QUERIES:].half().numpy()
        arrays[f"key_{layer}"], arrays[f"value_{layer}"] = (x[0, head : head + 1].half().numpy() for x in (key, value))
    np.savez_compressed(RECORDED, **arrays)
    print(f"{RECORDED}: {RECORDED.stat().st_size} bytes")


if __name__ == "__main__":
    main()
