"""What the examples share: a command line, the device, files of videos."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import sparge


def command_line(description: str, *, model: str, **options: Any) -> argparse.Namespace:
    """--model, --topk, --policy, and an option for each further keyword, with its default."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--model", default=model, help="hub id or local folder (default: %(default)s)")
    parser.add_argument("--topk", type=read_share, default=0.5, help="share of the blocks that are kept (default: 0.5)")
    parser.add_argument("--policy", type=read_policy, help="JSON file of a sparge.Policy, in place of the example's")
    for name, default in options.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help="default: %(default)s")
    args = parser.parse_args()
    if str(vars(args).get("output")).endswith(".mp4") and not all(map(find_spec, ("imageio", "imageio_ffmpeg"))):
        parser.error("--output: .mp4 takes the packages imageio and imageio-ffmpeg; .webp and .gif take none")
    return args


def read_share(text: str) -> float:
    """A share of the blocks, checked before a model is loaded."""
    try:
        share = float(text)
        sparge.Policy(topk=share)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return share


def read_policy(path: str) -> sparge.Policy:
    """A policy from what `Policy.to_json` wrote."""
    try:
        return sparge.Policy.from_json(Path(path).read_text())
    except (OSError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def device_and_dtype() -> tuple[str, torch.dtype]:
    """A GPU if there is one; CPUs are faster in float32."""
    return ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def save_video(frames: list[Any], path: str, fps: int) -> None:
    """Write PIL images as a video; .webp (full colour) and .gif need nothing but PIL."""
    if Path(path).suffix == ".mp4":
        from diffusers.utils import export_to_video

        export_to_video(frames, path, fps=fps)
    else:
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=round(1000 / fps), loop=0)
