"""How far a model's next-token distributions are from its dense ones on the same tokens.

Perplexity alone misleads: attention that is cut can make it better. The KL divergence cannot be fooled, and the
agreement of the most likely token is what greedy decoding would notice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_TOKENS = 512
"""Positions whose logits are made at once: 100 MB in float32 with a vocabulary of 50 000."""

PARTS = 8
"""Stretches of a window, by position, that have figures of their own."""


@dataclass(frozen=True)
class Fidelity:
    """Means over the tokens of one window; lists have one entry for each of `PARTS` stretches, from first to last.

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
    """Logits of a window, made a few positions at a time where the model's head allows it.

    Attributes:
        states: (1, N - 1, C): hidden states, or the logits themselves where a model scales or caps what its head gives.
        head: from states to logits.
    """

    states: Tensor
    head: Callable[[Tensor], Tensor]

    def logits(self, part: slice) -> Tensor:
        """(positions, vocabulary) in float32."""
        return self.head(self.states[0, part]).float()


@torch.no_grad()
def read(model: Any, window: Tensor) -> Readout:
    """Run a model over one window (1, N)."""
    if _has_plain_head(model):
        hidden = model.base_model(window, use_cache=False).last_hidden_state[:, :-1]
        return Readout(hidden, model.get_output_embeddings())
    return Readout(model(window, use_cache=False).logits[:, :-1], _unchanged)


@torch.no_grad()
def perplexity(model: Any, window: Tensor) -> float:
    """exp of the mean negative log-likelihood of tokens 1 .. N - 1 of a window (1, N), given all before them.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...                      num_attention_heads=1)
        >>> model = LlamaForCausalLM(config).eval()
        >>> _ = model.lm_head.weight.data.zero_()
        >>> round(perplexity(model, torch.arange(32)[None]), 3)  # knows nothing: every token is equally likely
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


def _has_plain_head(model: Any) -> bool:
    """Whether logits are what the output embedding makes of the last hidden states; looked up once for a model."""
    known = getattr(model, "_sparge_plain_head", None)
    if known is None:
        known = _compare_heads(model)
        model._sparge_plain_head = known
    return bool(known)


def _compare_heads(model: Any) -> bool:
    head = model.get_output_embeddings()
    if head is None:
        return False
    tokens = torch.arange(8, device=next(model.parameters()).device)[None]
    expected = model(tokens, use_cache=False).logits.float()
    logits = head(model.base_model(tokens, use_cache=False).last_hidden_state).float()
    return logits.shape == expected.shape and torch.allclose(
        logits, expected, rtol=0, atol=float(0.05 * expected.abs().max()) + 1e-6
    )


@torch.no_grad()
def compare(window: Tensor, dense: Readout, other: Readout) -> Fidelity:
    """Next-token distributions of two runs over one window (1, N)."""
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
