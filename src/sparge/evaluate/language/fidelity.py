"""Compare a model's next-token distributions with its dense ones on the same tokens.

Perplexity alone misleads, because cut attention can improve it. The KL divergence shows every change, and the agreement
of the most likely token is the change that greedy decoding would show.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_TOKENS = 512
"""Positions whose logits are computed at once: 100 MB in float32 with a vocabulary of 50 000."""

PARTS = 8
"""Parts of a window, by position, that are also measured separately."""


@dataclass(frozen=True)
class Fidelity:
    """Means over the tokens of one window; lists have one entry for each of the `PARTS`, from first to last.

    Attributes:
        kl: KL divergence of the distribution from the dense one, in nats.
        agreement: share of the tokens whose most likely successor is the same.
        nll, dense_nll: negative log-likelihood of the text; its exponential is the perplexity.
    """

    kl: float
    agreement: float
    nll: float
    dense_nll: float
    kl_by_position: list[float]
    nll_by_position: list[float]
    dense_nll_by_position: list[float]


@dataclass(frozen=True)
class Readout:
    """Logits of a window, computed for a few positions at a time: those of a long window may not fit into memory.

    Attributes:
        states: (1, N - 1, C): last hidden states, or the logits themselves for models that cannot be split.
        head: from states (1, positions, C) to logits.
    """

    states: Tensor
    head: Callable[[Tensor], Tensor]

    def logits(self, part: slice) -> Tensor:
        """Return logits in float32: (positions, vocabulary)."""
        return self.head(self.states[:, part])[0].float()


@torch.no_grad()
def read(model: Any, window: Tensor) -> Readout:
    """Run a model over one window (1, N)."""
    if not _can_be_split(model):
        return Readout(model(window, use_cache=False).logits[:, :-1], _unchanged)
    output = model.base_model(window, use_cache=False)
    return Readout(output.last_hidden_state[:, :-1], partial(_logits_of, model, output))


def _logits_of(model: Any, output: Any, states: Tensor) -> Tensor:
    """Return the logits of last hidden states: the model's own forward pass with the base model replaced.

    This applies everything that a model does to its logits (scales, soft caps).
    """
    given = copy.copy(output)
    given["last_hidden_state"] = states
    base = model.base_model
    base.forward = lambda *_, **__: given  # on the object, which hides the method of its class
    try:
        logits: Tensor = model(torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)).logits
    finally:
        del base.forward
    return logits


def _can_be_split(model: Any) -> bool:
    """Return whether logits can be computed from last hidden states; tested once per model, on a few tokens."""
    known = getattr(model, "_sparge_can_be_split", None)
    if known is None:
        known = _splits(model)
        model._sparge_can_be_split = known
    return bool(known)


def _splits(model: Any) -> bool:
    tokens = torch.arange(8, device=next(model.parameters()).device)[None]
    expected = model(tokens, use_cache=False).logits
    if model.base_model is model or "forward" in vars(model.base_model):
        return False
    output = model.base_model(tokens, use_cache=False)
    logits = _logits_of(model, output, output.last_hidden_state)
    tolerance = float(0.05 * expected.float().abs().max()) + 1e-6
    return logits.shape == expected.shape and torch.allclose(logits.float(), expected.float(), rtol=0, atol=tolerance)


@torch.no_grad()
def perplexity(model: Any, window: Tensor) -> float:
    """Return exp of the mean negative log-likelihood of tokens 1 .. N - 1 of a window (1, N), given all before them.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...                      num_attention_heads=1)
        >>> model = LlamaForCausalLM(config).eval()
        >>> _ = model.lm_head.weight.data.zero_()
        >>> round(perplexity(model, torch.arange(32)[None]), 3)  # every token is equally likely
        32.0
    """
    read_out, targets = read(model, window), window[0, 1:]
    total = 0.0
    for start in range(0, len(targets), CHUNK_TOKENS):
        part = slice(start, start + CHUNK_TOKENS)
        total += float(F.cross_entropy(read_out.logits(part), targets[part], reduction="sum"))
    return math.exp(total / len(targets))


def _unchanged(states: Tensor) -> Tensor:
    return states


@torch.no_grad()
def compare(window: Tensor, dense: Readout, other: Readout) -> Fidelity:
    """Compare next-token distributions of two runs over one window (1, N)."""
    targets = window[0, 1:]
    sums = torch.zeros(4, len(targets), dtype=torch.float64)
    for start in range(0, len(targets), CHUNK_TOKENS):
        part = slice(start, start + CHUNK_TOKENS)
        log_p, log_q = (run.logits(part).log_softmax(-1) for run in (dense, other))
        wanted = targets[part, None]
        found = (
            F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1),
            log_p.argmax(-1) == log_q.argmax(-1),
            -log_q.gather(1, wanted)[:, 0],
            -log_p.gather(1, wanted)[:, 0],
        )
        for line, values in zip(sums, found, strict=True):
            line[part] = values.double().cpu()
    by_position = [[float(piece.mean()) for piece in line.tensor_split(PARTS)] for line in sums]
    kl, agreement, nll, dense_nll = (float(mean) for mean in sums.mean(1))
    return Fidelity(kl, agreement, nll, dense_nll, by_position[0], by_position[2], by_position[3])
