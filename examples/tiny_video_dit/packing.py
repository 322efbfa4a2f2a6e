"""Packed weights: matrices as int8 with one scale per output row, everything else as float16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from pipeline import TinyVideoPipeline
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

SCALE = ".scale"
PART_BYTES = 14 * 2**20
CONFIG = "config.json"


def pack_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return matrices as int8 in [-127, 127] with NAME.scale in float32, and vectors and tables in float16."""
    packed = {}
    for name, tensor in tensors.items():
        rows = tensor.detach().float().cpu()
        if tensor.ndim < 2 or "scale_shift_table" in name:
            packed[name] = rows.half().contiguous()
            continue
        scale = rows.flatten(1).abs().amax(1).clamp(min=1e-12) / 127
        shaped = scale.view(-1, *[1] * (rows.ndim - 1))
        packed[name] = (rows / shaped).round().to(torch.int8).contiguous()
        packed[name + SCALE] = scale
    return packed


def unpack_tensors(packed: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return float32 tensors. Values that were int8 are off by at most half a scale."""
    tensors = {}
    for name, tensor in packed.items():
        if name.endswith(SCALE):
            continue
        tensors[name] = tensor.float()
        if name + SCALE in packed:
            tensors[name] *= packed[name + SCALE].view(-1, *[1] * (tensor.ndim - 1))
    return tensors


def save_packed(transformer: WanTransformer3DModel, folder: Path, **defaults: Any) -> list[Path]:
    """Write the weights of a transformer in parts of at most PART_BYTES, and the configuration of its pipeline.

    Args:
        transformer: the model.
        folder: the folder to write, created if missing.
        defaults: default arguments of the pipeline; ``shift`` is the scheduler's.

    Returns:
        The paths of the parts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    room = PART_BYTES
    for name, tensor in pack_tensors(transformer.state_dict()).items():
        if tensor.nbytes > room:
            parts.append({})
            room = PART_BYTES
        parts[-1][name] = tensor
        room -= tensor.nbytes
    paths = [folder / f"part-{number}-of-{len(parts)}.safetensors" for number in range(1, len(parts) + 1)]
    for part, path in zip(parts, paths, strict=True):
        save_file(part, path)
    config = {name: value for name, value in transformer.config.items() if not name.startswith("_")}
    (folder / CONFIG).write_text(json.dumps({"transformer": config, "pipeline": defaults}, indent=2) + "\n")
    return paths


def load_packed(folder: Path) -> TinyVideoPipeline:
    """Return the pipeline with packed weights, in float32.

    Raises:
        FileNotFoundError: the folder has no packed weights.
    """
    paths = sorted(folder.glob("part-*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"expected packed weights (part-*.safetensors), got none in {folder}")
    packed: dict[str, Tensor] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            packed.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118, not a dict
    config = json.loads((folder / CONFIG).read_text())
    transformer = WanTransformer3DModel(**config["transformer"])
    transformer.load_state_dict(unpack_tensors(packed))
    defaults = config["pipeline"]
    scheduler = FlowMatchEulerDiscreteScheduler(shift=defaults.pop("shift", 1.0))
    return TinyVideoPipeline(transformer.eval(), scheduler, **defaults)
