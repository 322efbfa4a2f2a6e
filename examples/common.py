"""Helpers of the examples: command line, device, and video files."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import sparge


def command_line(description: str, **options: Any) -> argparse.Namespace:
    """Parse --topk, --policy, and one option for each keyword argument; its value is the default."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    _add_options(parser, options)
    return _parse(parser)


def command_line_of_models(description: str, models: dict[str, dict[str, Any]]) -> argparse.Namespace:
    """Parse the name of a model (`args.name`), then the options of `command_line` with the model's defaults."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    names = parser.add_subparsers(dest="name", required=True)
    for name, options in models.items():
        _add_options(names.add_parser(name), options)
    return _parse(parser)


def _add_options(parser: argparse.ArgumentParser, options: dict[str, Any]) -> None:
    parser.add_argument("--topk", type=read_topk, default=0.5, help="fraction of blocks to keep (default: 0.5)")
    parser.add_argument("--policy", type=read_policy, help="JSON file of a sparge.Policy that replaces the example's")
    for name, default in options.items():
        kind = "hub id or local folder, " if name == "model" else ""
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=f"{kind}default: %(default)s")


def _parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if str(vars(args).get("output")).endswith(".mp4") and not all(map(find_spec, ("imageio", "imageio_ffmpeg"))):
        parser.error("--output: .mp4 needs the packages imageio and imageio-ffmpeg; .webp and .gif need none")
    return args


def read_topk(text: str) -> float:
    """Return the fraction of blocks to keep, checked before a model is loaded."""
    try:
        topk = float(text)
        sparge.Policy(topk=topk)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return topk


def read_policy(path: str) -> sparge.Policy:
    """Return the policy in a JSON file."""
    try:
        return sparge.Policy.from_json(Path(path).read_text())
    except (OSError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def device_and_dtype() -> tuple[str, torch.dtype]:
    """Return a GPU with bfloat16 if there is one, else the CPU with float32, which is faster on CPUs."""
    return ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def pipeline_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a diffusers pipeline from the command line."""
    arguments = {
        "prompt": args.prompt,
        "height": args.height,
        "width": args.width,
        "num_inference_steps": args.steps,
        "generator": torch.Generator().manual_seed(args.seed),
        "output_type": "pil",
    }
    return {**arguments, "num_frames": args.frames} if "frames" in args else arguments


def save_video(frames: list[Any], path: str, fps: int) -> None:
    """Write PIL images as a video; .webp (full color) and .gif need only PIL."""
    if Path(path).suffix == ".mp4":
        from diffusers.utils import export_to_video

        export_to_video(frames, path, fps=fps)
    else:
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=round(1000 / fps), loop=0)
