"""Clips from captions: a strip of frames for each, and a moving picture.

python examples/tiny_video_dit/sample.py --prompt "a red striped star moves left over the cat, the camera pans right"
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from diffusers import DiffusionPipeline
from packing import load_packed
from PIL import Image
from unpack import WEIGHTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", nargs="+", help="captions; default: the model's six examples")
    parser.add_argument("--model", type=Path, help="folder that unpack.py wrote; default: the packed weights")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="folder of packed weights")
    parser.add_argument("--steps", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--guidance", type=float, help="default: the model's own")
    parser.add_argument("--shift", type=float, help="of the noise levels towards noise; default: the model's own")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--frames", type=int, help="default: the model's own")
    parser.add_argument("--size", type=int, help="height and width; default: the model's own")
    parser.add_argument("--columns", type=int, default=5, help="frames of a clip in the strip; default: %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="of the strip; default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("sample.png"), help="strips; moving: .webp beside it")
    args = parser.parse_args()

    pipe = load(args.model, args.weights)
    if args.shift is not None:
        pipe.scheduler.set_shift(args.shift)
    clips = []
    for number, prompt in enumerate(args.prompt or pipe.examples):
        clips += pipe(
            prompt,
            num_frames=args.frames,
            height=args.size,
            width=args.size,
            num_inference_steps=args.steps,
            guidance_scale=args.guidance,
            generator=torch.Generator().manual_seed(args.seed + number),
        ).frames
    picture = strip(clips, args.columns)
    picture.resize([round(side * args.scale) for side in picture.size], Image.Resampling.LANCZOS).save(args.output)
    if len(clips[0]) > 1:
        frames = [strip([[clip[place]] for clip in clips], 1, across=True) for place in range(len(clips[0]))]
        path = args.output.with_suffix(".webp")
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=80, loop=0)
    print(args.output)


def load(model: Path | None, weights: Path) -> DiffusionPipeline:
    """The pipeline in a folder, or else of the packed weights; on a GPU in bfloat16, norms in float32."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    with TemporaryDirectory() as unpacked:
        if model is None:
            load_packed(weights).save_pretrained(unpacked)
        pipe = DiffusionPipeline.from_pretrained(model or unpacked, trust_remote_code=True, torch_dtype=dtype)
        return pipe.to(device)


def strip(clips: list[list[Image.Image]], columns: int, across: bool = False) -> Image.Image:
    """Clips below one another (or beside), some frames of each, evenly spaced, side by side."""
    count = min(columns, len(clips[0]))
    places = [round(place * (len(clips[0]) - 1) / max(count - 1, 1)) for place in range(count)]
    width, height = clips[0][0].size
    size = (width * len(clips), height) if across else (width * count, height * len(clips))
    picture = Image.new("RGB", size)
    for row, clip in enumerate(clips):
        for column, place in enumerate(places):
            picture.paste(clip[place], (row * width, 0) if across else (column * width, row * height))
    return picture


if __name__ == "__main__":
    main()
