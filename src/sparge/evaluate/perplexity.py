"""How well a language model predicts a text: the measure of what sparsity costs it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_TOKENS = 512
"""Positions whose logits are made at once: 100 MB in float32 with a vocabulary of 50 000."""


@torch.no_grad()
def perplexity(model: Any, tokens: Tensor) -> float:
    """exp of the mean negative log-likelihood of tokens 1 .. N - 1, given all before them.

    Args:
        model: a causal language model of transformers.
        tokens: (B, N) token ids; the whole of it is one prefill.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...                      num_attention_heads=1)
        >>> model = LlamaForCausalLM(config).eval()
        >>> _ = model.lm_head.weight.data.zero_()
        >>> round(perplexity(model, torch.arange(32)[None]), 3)  # knows nothing: every token is equally likely
        32.0
    """
    _check_head(model, tokens[:, :8])
    hidden = model.base_model(tokens, use_cache=False).last_hidden_state[:, :-1]
    targets = tokens[:, 1:]
    total = 0.0
    for start in range(0, targets.shape[1], CHUNK_TOKENS):
        part = slice(start, start + CHUNK_TOKENS)
        logits = model.get_output_embeddings()(hidden[:, part]).float()
        total += float(F.cross_entropy(logits.flatten(0, 1), targets[:, part].flatten(), reduction="sum"))
    return math.exp(total / targets.numel())


def _check_head(model: Any, tokens: Tensor) -> None:
    """Logits are made in pieces here, by the output embedding alone; some models scale or cap them besides."""
    expected = model(tokens, use_cache=False).logits.float()
    logits = model.get_output_embeddings()(model.base_model(tokens, use_cache=False).last_hidden_state).float()
    if not torch.allclose(logits, expected, rtol=0, atol=float(0.05 * expected.abs().max()) + 1e-6):
        raise NotImplementedError(
            f"{type(model).__name__}: expected logits that are the output embedding's, got others"
        )
