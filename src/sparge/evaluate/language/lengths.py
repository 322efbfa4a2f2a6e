"""Which lengths go sparse: sizes and device decide this before the model reads the first token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparge.backends import base
from sparge.evaluate.variants import Variant

DEFAULT_LENGTHS = (4096, 8192)
STEP, MAX_LENGTH = 1024, 2**20
"""Lengths that `shortest_sparse` tries."""


def default_lengths(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Return `DEFAULT_LENGTHS`, raised to the crossover of causal attention on a device."""
    keys = base.crossover_for(device.type, device.index, dtype).causal_keys
    if keys > MAX_LENGTH:  # sparse attention was never measured to be faster here
        return DEFAULT_LENGTHS
    return tuple(sorted({max(length, keys) for length in DEFAULT_LENGTHS}))


def goes_sparse(model: Any, variant: Variant, tokens: int) -> bool:
    """Return whether a causal prefill of a length is long enough for the policy of a variant."""
    if tokens < variant.policy.min_tokens:
        return False
    if variant.policy.backend != "auto":
        return True
    weight = next(model.parameters())
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None) or MAX_LENGTH
    crossover = base.crossover_for(weight.device.type, weight.device.index, weight.dtype)
    return not base.is_below(crossover, heads, tokens, tokens, True)


def shortest_sparse(model: Any, variants: Sequence[Variant]) -> int | None:
    """Return the shortest length, a multiple of 1024, at which a variant goes sparse; None if there is none."""
    lengths = range(STEP, MAX_LENGTH + 1, STEP)
    return next((tokens for tokens in lengths if any(goes_sparse(model, one, tokens) for one in variants)), None)


def check_lengths(model: Any, variants: Sequence[Variant], lengths: Sequence[int]) -> None:
    """Check that the model has positions for every length, and that a variant is sparse at every length.

    Raises:
        ValueError: a length is too long for the model, or so short that all variants would run dense.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or MAX_LENGTH
    if max(lengths) > positions:
        raise ValueError(
            f"tokens: expected at most {positions}, the model's max_position_embeddings, got {max(lengths)}"
        )
    affected = [variant for variant in variants if variant.kind != "sdpa"]
    short = [tokens for tokens in lengths if not any(goes_sparse(model, one, tokens) for one in affected)]
    if not affected or not short:
        return
    shortest = shortest_sparse(model, affected)
    fits = shortest is not None and shortest <= positions
    raise ValueError(
        f"tokens: expected {shortest or 'a longer sequence than any'} or more (the crossover of causal attention for "
        f"this model and device: below it dense attention is faster, so every variant would run dense), got "
        f"{', '.join(map(str, short))}; " + (f"take --tokens {shortest}, or " if fits else "take ") + "--force to go "
        "sparse all the same"
    )
