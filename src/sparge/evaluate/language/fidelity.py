"""Compare a model's next-token distributions with the dense model's on the same tokens.

Perplexity alone is misleading, because sparse attention can improve it. The KL divergence shows every change, and the
agreement of the most likely tokens shows changes of greedy decoding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_TOKENS = 512
"""Number of positions whose logits are computed at once: 100 MB in float32 with a vocabulary of 50 000."""


@dataclass(frozen=True)
class Fidelity:
    """Means over the tokens of one window."""

    kl: float  # KL divergence from the dense distribution, in nats
    agreement: float  # share of the tokens whose most likely successor is the same
    nll: float  # negative log-likelihood of the text; its exponential is the perplexity
    dense_nll: float


@dataclass(frozen=True)
class Readout:
    """Logits of a window, computed for a few positions at a time, because all logits may not fit into memory."""

    states: Tensor  # [1, N - 1, C]: last hidden states, or the logits of models that cannot be split
    head: Callable[[Tensor], Tensor]  # from states [1, positions, C] to logits

    def logits(self, part: slice) -> Tensor:
        """Return logits in float32: (positions, vocabulary)."""
        return self.head(self.states[:, part])[0].float()


@torch.no_grad()
def read(model: Any, window: Tensor) -> Readout:
    """Run a model over one window (1, N)."""
    if not _can_be_split(model):
        return Readout(model(window, use_cache=False).logits[:, :-1], lambda logits: logits)
    output = model.base_model(window, use_cache=False)
    return Readout(output.last_hidden_state[:, :-1], partial(_logits_of, model, output))


def _logits_of(model: Any, output: Any, states: Tensor) -> Tensor:
    """Return the logits of last hidden states.

    The model's own forward pass runs with a stub in place of the base model, so scales and soft caps of the logits are
    included.
    """
    replaced = copy.copy(output)
    replaced["last_hidden_state"] = states
    base = model.base_model
    base.forward = lambda *_, **__: replaced  # set on the instance, so it hides the method of the class
    try:
        logits: Tensor = model(torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)).logits
    finally:
        del base.forward
    return logits


def _can_be_split(model: Any) -> bool:
    """Return whether logits can be computed from last hidden states. This is tested once per model, on a few tokens."""
    if "_sparge_can_be_split" not in vars(model):
        tokens = torch.arange(8, device=next(model.parameters()).device)[None]
        expected = model(tokens, use_cache=False).logits.float()
        can_be_split = model.base_model is not model and "forward" not in vars(model.base_model)
        if can_be_split:
            output = model.base_model(tokens, use_cache=False)
            logits = _logits_of(model, output, output.last_hidden_state).float()
            atol = float(0.05 * expected.abs().max()) + 1e-6
            can_be_split = logits.shape == expected.shape and torch.allclose(logits, expected, rtol=0, atol=atol)
        model._sparge_can_be_split = can_be_split
    return bool(model._sparge_can_be_split)


@torch.no_grad()
def compare(window: Tensor, dense: Readout, other: Readout) -> Fidelity:
    """Compare next-token distributions of two runs over one window (1, N)."""
    targets = window[0, 1:]
    sums = torch.zeros(4, dtype=torch.float64)
    for start in range(0, len(targets), CHUNK_TOKENS):
        part = slice(start, start + CHUNK_TOKENS)
        log_p, log_q = (run.logits(part).log_softmax(-1) for run in (dense, other))
        target = targets[part, None]
        metrics = (
            F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1),
            log_p.argmax(-1) == log_q.argmax(-1),
            -log_q.gather(1, target)[:, 0],
            -log_p.gather(1, target)[:, 0],
        )
        sums += torch.stack([values.double().sum() for values in metrics]).cpu()
    return Fidelity(*(sums / len(targets)).tolist())
