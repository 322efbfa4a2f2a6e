"""Load a diffusers pipeline from a hub name or a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sparge.options.extras import install_command


def load(name: str, device: str, dtype: torch.dtype, trust_remote_code: bool = False, offload: bool = False) -> Any:
    """Return the pipeline on a device, ready to run.

    Args:
        name: hub name, or folder with a model_index.json.
        trust_remote_code: run code from the repository of the weights, which pipelines with custom classes need.
        offload: keep models in host memory while they are not needed.

    Raises:
        ImportError: diffusers is missing.
        ValueError: no pipeline can be loaded under this name.
    """
    try:
        from diffusers import DiffusionPipeline
    except ImportError as error:
        raise ImportError(f"expected diffusers to be installed: {install_command('diffusers')}") from error
    path = Path(name)
    if path.is_dir() and not (path / "model_index.json").is_file():
        raise ValueError(f"pipeline: expected a folder with a model_index.json, got {name!r}, which has none")
    if path.is_file():
        raise ValueError(f"pipeline: expected a hub name or a folder with a model_index.json, got the file {name!r}")
    if not path.exists() and (name.startswith((".", "/")) or len(path.parts) != 2):
        raise ValueError(f"pipeline: expected a hub name (owner/name) or a folder, got {name!r}, which does not exist")
    try:
        pipe = DiffusionPipeline.from_pretrained(name, dtype=dtype, trust_remote_code=trust_remote_code)
    except (AttributeError, OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "trust_remote_code" in str(error):
            first = "it has custom code; if you trust it, use --trust-remote-code"
        raise ValueError(f"pipeline: expected a hub name or a folder of diffusers, got {name!r} ({first})") from error
    if offload:
        pipe.enable_model_cpu_offload(device=device)
        return pipe
    return pipe.to(device)
