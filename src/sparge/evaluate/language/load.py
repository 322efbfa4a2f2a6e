"""Load a causal language model of transformers from a hub name, a folder or a GGUF file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sparge.options.extras import install_command


def load(name: str, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the model, ready to run, and the tokenizer.

    Args:
        name: hub name, folder, or GGUF file. A folder with one GGUF file and no config stands for that file.

    Raises:
        ImportError: transformers is missing, or gguf if the model is a GGUF file.
        ValueError: there is nothing that can be loaded.
    """
    return load_model(name, device, dtype), load_tokenizer(name)


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer, which loads fast."""
    return _loaded("AutoTokenizer", name)


def load_model(name: str, device: str, dtype: torch.dtype) -> Any:
    """Return the model."""
    return _loaded("AutoModelForCausalLM", name, dtype=dtype).to(device).eval()


def _loaded(kind: str, name: str, **more: Any) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"expected transformers to be installed: {install_command('transformers')}") from error
    place, options = located(name)
    if options and find_spec("gguf") is None:
        raise ImportError(f"expected the package gguf for {name!r}: pip install gguf")
    try:
        return getattr(transformers, kind).from_pretrained(place, **more, **options)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"model: expected a hub name, a folder or a GGUF file, got {name!r} ({first})") from error


def located(name: str) -> tuple[str, dict[str, str]]:
    """Return the arguments of `from_pretrained` for a name.

    Example:
        >>> located("org/model")
        ('org/model', {})
    """
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model: expected a GGUF file, got {name!r}, which is not there")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ValueError(f"model: expected a config.json or one GGUF file in {name!r}, got {len(files)} GGUF files")
        return str(path), {"gguf_file": files[0].name}
    return name, {}
