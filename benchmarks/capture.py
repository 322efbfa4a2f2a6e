"""Record attention inputs of trained models for the tests: `python -m benchmarks.capture language | video`.

    language   three layers of SmolLM2-135M-Instruct, each with one key head and its three query heads, after the rotary
               embedding: 1024 tokens of the essays, the last 512 queries. --data as in `benchmarks.evaluation`.
    video      two layers of the model of examples/tiny_video_dit (--pipeline FOLDER, written by its unpack.py), each at
               one step and with one head: queries of the third frame, keys of the first five frames. Takes hours
               without a GPU.

Writes float16 tensors to tests/data, from which `benchmarks.numerics.captured` makes families of inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.evaluation import ESSAYS, WEIGHTS
from benchmarks.numerics.captured import FOLDER, RECORDED, layer_number
from sparge.evaluate import Recorder
from sparge.evaluate.capture import Captured, save
from sparge.evaluate.language.load import load
from sparge.evaluate.language.texts import read_text

TOKENS, QUERIES = 1024, 512
HEADS = {1: 0, 18: 2, 27: 1}
"""Key head by layer. Layer 1 has no sink, but outlier channels in K (4x) and Q (8x). In layer 18 the sink is 23 nats
above the median, and its value is 12 times smaller than other values. Layer 27 has both, and the largest mean of V."""

VIDEO_HEADS = {(1, 4): 0, (3, 15): 1}
"""Head by (layer, step). The first head spreads over 900 keys of the five frames, where dropping blocks costs most. The
second attends to four keys with logits of up to 26 nats, where quantization costs most."""
FRAME, QUERY_FRAME, KEY_FRAMES = 1024, 2, 5


def language(args: argparse.Namespace) -> list[Captured]:
    model, tokenizer = load(str(args.data / WEIGHTS), "cpu", torch.float32)
    tokens = tokenizer(read_text(str(args.data / ESSAYS)), return_tensors="pt").input_ids[:, :TOKENS]
    recorder = Recorder(layers=rf"\.({'|'.join(map(str, HEADS))})\.")
    with torch.no_grad(), recorder.recording(model):
        model(tokens)
    group = recorder.calls[0].query.shape[1] // recorder.calls[0].key.shape[1]
    calls = zip(HEADS.values(), recorder.calls, strict=True)
    return [crop(call, head, group, slice(-QUERIES, None), slice(None)) for head, call in calls]


def video(args: argparse.Namespace) -> list[Captured]:
    from sparge.evaluate.pipeline.load import load as load_pipeline

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pipe = load_pipeline(str(args.pipeline), device, dtype, trust_remote_code=True)
    return video_calls(pipe, list(VIDEO_HEADS))


def video_calls(pipe: Any, places: Sequence[tuple[int, int]], **arguments: Any) -> list[Captured]:
    """Return the calls of one clip at these layers and steps, reduced to one head and some tokens."""
    layers, steps = ({place[axis] for place in places} for axis in (0, 1))
    recorder = Recorder(layers=rf"\.({'|'.join(map(str, layers))})\.", steps=sorted(steps), max_bytes=2**30)
    with recorder.recording(pipe):
        pipe(pipe.examples[0], generator=torch.Generator().manual_seed(0), **arguments)
    assert not recorder.omitted
    queries, keys = slice(FRAME * QUERY_FRAME, FRAME * (QUERY_FRAME + 1)), slice(0, FRAME * KEY_FRAMES)
    calls = {(layer_number(call), call.step): call for call in recorder.calls}
    return [crop(calls[place], VIDEO_HEADS[place], 1, queries, keys) for place in places]


def crop(call: Captured, head: int, group: int, queries: slice, keys: slice) -> Captured:
    """Return a call reduced to one key head, its query heads, and ranges of tokens."""
    return replace(
        call,
        query=call.query[:, head * group : (head + 1) * group, queries],
        key=call.key[:, head : head + 1, keys],
        value=call.value[:, head : head + 1, keys],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="model", required=True)
    commands.add_parser("language").add_argument("--data", type=Path, required=True)
    commands.add_parser("video").add_argument("--pipeline", type=Path, required=True)
    args = parser.parse_args()
    record, name = (language, "smollm2") if args.model == "language" else (video, "tiny-video")
    path = FOLDER / RECORDED[name].file
    save(record(args), path)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
