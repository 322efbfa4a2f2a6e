"""Record what attention receives in trained models, for the tests: `python -m benchmarks.capture language`.

    language   three layers of SmolLM2-135M-Instruct that differ, one head of the keys and its three query heads each,
               after the rotary embedding: 1024 tokens of the essays; of the queries the last 512 are kept. --data is
               that of `benchmarks.evaluation`.

It writes float16 to tests/data; `sparge.evaluate.captured` makes families of it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.evaluation import ESSAYS, WEIGHTS
from sparge.evaluate import Recorder
from sparge.evaluate.capture import Captured, save
from sparge.evaluate.captured import FOLDER, RECORDED
from sparge.evaluate.language.load import load
from sparge.evaluate.language.texts import read_text

TOKENS, QUERIES = 1024, 512
HEADS = {1: 0, 18: 2, 27: 1}
"""Layer: head of the keys. Layer 1 has no sink, but outlier channels in K (4x) and Q (8x). In layer 18 the sink lies 23
nats above the median, and its value is 12 times as small as the others. Layer 27 has both, and V's largest mean."""


def language(args: argparse.Namespace) -> list[Captured]:
    model, tokenizer = load(str(args.data / WEIGHTS), "cpu", torch.float32)
    tokens = tokenizer(read_text(str(args.data / ESSAYS)), return_tensors="pt").input_ids[:, :TOKENS]
    recorder = Recorder(layers=rf"\.({'|'.join(map(str, HEADS))})\.")
    with torch.no_grad(), recorder.recording(model):
        model(tokens)
    calls = zip(HEADS.values(), recorder.calls, strict=True)
    return [cut(call, head) for head, call in calls]


def cut(call: Captured, head: int) -> Captured:
    """One head of the keys, and the last queries of those that use it."""
    group = call.query.shape[1] // call.key.shape[1]
    return replace(
        call,
        query=call.query[:, head * group : (head + 1) * group, -QUERIES:],
        key=call.key[:, head : head + 1],
        value=call.value[:, head : head + 1],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="model", required=True)
    one = commands.add_parser("language")
    one.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()
    path = FOLDER / RECORDED["smollm2"].file
    save(language(args), path)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
