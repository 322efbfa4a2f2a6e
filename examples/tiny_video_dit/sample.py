"""Generate clips from captions; write an image with some frames of each clip, and an animation.

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
    parser.add_argument("--shift", type=float, help="shift of the noise levels; default: the model's own")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--frames", type=int, help="default: the model's own")
    parser.add_argument("--size", type=int, help="height and width; default: the model's own")
    parser.add_argument("--columns", type=int, default=5, help="frames of each clip in the image; default: %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="scale of the image; default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("sample.png"), help="image; the animation is a .webp")
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
    image = strip(clips, args.columns)
    image.resize([round(side * args.scale) for side in image.size], Image.Resampling.LANCZOS).save(args.output)
    if len(clips[0]) > 1:
        frames = [strip([[clip[frame]] for clip in clips], 1, across=True) for frame in range(len(clips[0]))]
        path = args.output.with_suffix(".webp")
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=80, loop=0)
    print(args.output)


def load(model: Path | None, weights: Path) -> DiffusionPipeline:
    """Return the pipeline in a folder, or without one the packed weights: on a GPU in bfloat16, on a CPU in float32."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    with TemporaryDirectory() as unpacked:
        if model is None:
            load_packed(weights).save_pretrained(unpacked)
        pipe = DiffusionPipeline.from_pretrained(model or unpacked, trust_remote_code=True, torch_dtype=dtype)
        return pipe.to(device)


def strip(clips: list[list[Image.Image]], columns: int, across: bool = False) -> Image.Image:
    """Return an image with a row of evenly spaced frames for each clip (`across`: one frame of each clip in a row)."""
    count = min(columns, len(clips[0]))
    indices = [round(index * (len(clips[0]) - 1) / max(count - 1, 1)) for index in range(count)]
    width, height = clips[0][0].size
    size = (width * len(clips), height) if across else (width * count, height * len(clips))
    image = Image.new("RGB", size)
    for row, clip in enumerate(clips):
        for column, index in enumerate(indices):
            image.paste(clip[index], (row * width, 0) if across else (column * width, row * height))
    return image


if __name__ == "__main__":
    main()
