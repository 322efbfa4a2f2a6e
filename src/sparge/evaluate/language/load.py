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
STEP, MAX_LENGTH = 1024, 2**20
"""`shortest_sparse` tries multiples of ``STEP`` up to ``MAX_LENGTH``."""


def load(name: str, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the model, ready to run, and the tokenizer.

    Args:
        name: hub name, folder, or GGUF file. A folder with one GGUF file and no config stands for that file.

    Raises:
        ImportError: transformers is missing, or gguf if the model is a GGUF file.
        ValueError: no model can be loaded under this name.
    """
    return load_model(name, device, dtype), load_tokenizer(name)


def load_tokenizer(name: str) -> Any:
    return _loaded("AutoTokenizer", name)


def load_model(name: str, device: str, dtype: torch.dtype) -> Any:
    return _loaded("AutoModelForCausalLM", name, dtype=dtype).to(device).eval()


def _loaded(kind: str, name: str, **more: Any) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"expected transformers to be installed: {install_command('transformers')}") from error
    path, options = from_pretrained_arguments(name)
    if options and find_spec("gguf") is None:
        raise ImportError(f"expected the package gguf for {name!r}: pip install gguf")
    try:
        return getattr(transformers, kind).from_pretrained(path, **more, **options)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"model: expected a hub name, a folder or a GGUF file, got {name!r} ({first})") from error


def from_pretrained_arguments(name: str) -> tuple[str, dict[str, str]]:
    """Return the arguments of `from_pretrained` for a name.

    Example:
        >>> from_pretrained_arguments("org/model")
        ('org/model', {})
    """
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model: expected a GGUF file, got {name!r}, which does not exist")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ValueError(f"model: expected a config.json or one GGUF file in {name!r}, got {len(files)} GGUF files")
        return str(path), {"gguf_file": files[0].name}
    return name, {}


def default_lengths(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Return `DEFAULT_LENGTHS`, each at least the crossover of causal attention on a device."""
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


def shortest_sparse(model: Any, variants: Sequence[Variant]) -> int | None:
    """Return the shortest length, a multiple of 1024, at which a variant runs sparse; None if there is none."""
    lengths = range(STEP, MAX_LENGTH + 1, STEP)
    return next((tokens for tokens in lengths if any(is_long_enough(model, one, tokens) for one in variants)), None)


def check_lengths(model: Any, variants: Sequence[Variant], lengths: Sequence[int]) -> None:
    """Check that the model has positions for every length, and that at least one variant is sparse at every length.

    Raises:
        ValueError: a length is too long for the model, or so short that all variants would run dense.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or MAX_LENGTH
    longest = max(lengths)
    if longest > positions:
        raise ValueError(f"tokens: expected at most {positions}, the model's max_position_embeddings, got {longest}")
    affected = [variant for variant in variants if variant.kind != "sdpa"]
    short = [tokens for tokens in lengths if not any(is_long_enough(model, one, tokens) for one in affected)]
    if not affected or not short:
        return
    shortest = shortest_sparse(model, affected)
    fits = shortest is not None and shortest <= positions
    raise ValueError(
        f"tokens: expected {shortest or 'a longer sequence than any'} or more (the crossover of causal attention for "
        f"this model and device: below it dense attention is faster, so every variant would run dense), got "
        f"{', '.join(map(str, short))}; use " + (f"--tokens {shortest}, or " if fits else "") + "--force for sparse "
        "attention at any length"
    )
