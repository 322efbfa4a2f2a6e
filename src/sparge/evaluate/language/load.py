"""Load a causal language model with transformers, and check the lengths at which it is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sparge.backends import base
from sparge.evaluate.variants import Variant
from sparge.options.extras import install_command

DEFAULT_LENGTHS = (4096, 8192)
MAX_LENGTH = 2**20
"""Lengths above this one are not tried."""


def load(name: str, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the model, ready to run, and the tokenizer (`load_model`, `load_tokenizer`)."""
    return load_model(name, device, dtype), load_tokenizer(name)


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model, with the arguments and errors of `load_model`."""
    return _from_pretrained("AutoTokenizer", name)


def load_model(name: str, device: str, dtype: torch.dtype) -> Any:
    """Return a model, ready to run.

    Args:
        name: hub name, folder, or GGUF file. A folder with one GGUF file and no config stands for that file.

    Raises:
        ImportError: transformers is missing, or gguf if the model is a GGUF file.
        ValueError: no model can be loaded under this name.
    """
    return _from_pretrained("AutoModelForCausalLM", name, dtype=dtype).to(device).eval()


def _from_pretrained(kind: str, name: str, **options: Any) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"expected transformers to be installed: {install_command('transformers')}") from error
    path = Path(name)
    files = [path] if path.suffix == ".gguf" else []
    if files and not path.is_file():
        raise ValueError(f"model: expected a GGUF file, got {name!r}, which does not exist")
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ValueError(f"model: expected a config.json or one GGUF file in {name!r}, got {len(files)} GGUF files")
    if files:
        if find_spec("gguf") is None:
            raise ImportError(f"expected the package gguf for {name!r}: pip install gguf")
        name, options["gguf_file"] = str(files[0].parent), files[0].name
    try:
        return getattr(transformers, kind).from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"model: expected a hub name, a folder or a GGUF file, got {name!r} ({first})") from error


def default_lengths(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Return `DEFAULT_LENGTHS`, raised to the crossover of causal attention on a device where they are below it."""
    keys = base.crossover_for(device, dtype).causal_keys
    if keys > MAX_LENGTH:  # sparse attention is not faster at any measured length
        return DEFAULT_LENGTHS
    return tuple(sorted({max(length, keys) for length in DEFAULT_LENGTHS}))


def is_long_enough(model: Any, variant: Variant, tokens: int) -> bool:
    """Return whether a causal prefill of this length is long enough to run sparse under a variant's policy."""
    if tokens < variant.policy.min_tokens:
        return False
    if variant.policy.backend != "auto":
        return True
    weight = next(model.parameters())
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None) or MAX_LENGTH
    crossover = base.crossover_for(weight.device, weight.dtype)
    return not base.is_below(crossover, heads, tokens, tokens, True)


def check_lengths(model: Any, variants: Sequence[Variant], lengths: Sequence[int]) -> None:
    """Check that no length exceeds the model's maximum, and that each is long enough for some variant to run sparse.

    Raises:
        ValueError: a length is too long for the model, or so short that all variants would run dense.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or MAX_LENGTH
    if max(lengths) > positions:
        raise ValueError(
            f"tokens: expected at most {positions}, the model's max_position_embeddings, got {max(lengths)}"
        )
    checked = [variant for variant in variants if variant.kind != "sdpa"]

    def is_sparse(tokens: int) -> bool:
        return any(is_long_enough(model, variant, tokens) for variant in checked)

    short = [tokens for tokens in lengths if not is_sparse(tokens)]
    if not checked or not short:
        return
    shortest = next(filter(is_sparse, range(1024, MAX_LENGTH + 1, 1024)), None)
    expected = "a device with a crossover" if shortest is None else f"{shortest} or more"
    advice = f"--tokens {shortest}, or " if shortest is not None and shortest <= positions else ""
    raise ValueError(
        f"tokens: expected {expected} (below the crossover of causal attention for this model and device, dense "
        f"attention is faster, so every variant would run dense), got {', '.join(map(str, short))}; use {advice}"
        "--force for sparse attention at any length"
    )
