"""Record what attention receives in SmolLM2-135M-Instruct: `python -m benchmarks.capture --data FOLDER`.

Writes tests/data/smollm2_qkv.npz: query, key and value after the rotary embedding, float16, of three layers that
differ, one head of the keys and its three query heads each. The text is the first 1024 tokens of the essays; of the
queries the last 512 are kept. The folder is that of `benchmarks.evaluation`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from benchmarks.evaluation import ESSAYS, WEIGHTS
from sparge.evaluate import Recorder
from sparge.evaluate.language.load import load
from sparge.evaluate.language.texts import read_text

RECORDED = Path(__file__).parent.parent / "tests" / "data" / "smollm2_qkv.npz"
TOKENS, QUERIES = 1024, 512
HEADS = {1: 0, 18: 2, 27: 1}
"""Layer: head of the keys. Layer 1 has no sink, but outlier channels in K (4x) and Q (8x). In layer 18 the sink lies 23
nats above the median, and its value is 12 times as small as the others. Layer 27 has both, and V's largest mean."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data
    model, tokenizer = load(str(data / WEIGHTS), "cpu", torch.float32)
    tokens = tokenizer(read_text(str(data / ESSAYS)), return_tensors="pt").input_ids[:, :TOKENS]
    recorder = Recorder(layers=rf"\.({'|'.join(map(str, HEADS))})\.")
    with torch.no_grad(), recorder.recording(model):
        model(tokens)
    arrays = {}
    for (layer, head), call in zip(HEADS.items(), recorder.calls, strict=True):
        group = call.query.shape[1] // call.key.shape[1]
        arrays[f"query_{layer}"] = call.query[0, head * group : (head + 1) * group, -QUERIES:].numpy()
        arrays[f"key_{layer}"], arrays[f"value_{layer}"] = (
            x[0, head : head + 1].numpy() for x in (call.key, call.value)
        )
    np.savez_compressed(RECORDED, **arrays)
    print(f"{RECORDED}: {RECORDED.stat().st_size} bytes")


if __name__ == "__main__":
    main()
