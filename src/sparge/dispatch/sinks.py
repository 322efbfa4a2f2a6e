"""Attention sinks: a learned logit per head that adds to the softmax denominator but has no value, as in GPT-OSS.

A sink with logit s adds exp(s) to the denominator. Given the LSE of a call, this scales its output:

    output' = output * exp(lse) / (exp(lse) + exp(s)) = output * sigmoid(lse - s)

The output of queries that see no key (LSE -inf) stays 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparge.dispatch import run


def apply_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Apply sinks (H,) to an output (..., H, S, D) whose LSE is (..., H, S)."""
    share = torch.sigmoid(lse - sinks.float()[:, None])
    return (output.float() * share[..., None]).to(output.dtype)


def with_sinks(attention: Callable[..., Any], sinks: Tensor) -> Callable[..., Tensor]:
    """Wrap a function like `sparge.attention` so that it applies sinks to its output."""

    def attend(*tensors: Any, **options: Any) -> Tensor:
        output, lse = attention(*tensors, **options, return_lse=True)
        return apply_sinks(output, lse, sinks)

    return attend


def with_dense_lse_sinks(attention: Callable[..., Tensor], sinks: Tensor) -> Callable[..., Tensor]:
    """Wrap a function that returns no LSE so that it applies sinks, using the LSE of dense attention."""

    def attend(*tensors: Any, is_causal: bool, scale: float | None, enable_gqa: bool, **options: Any) -> Tensor:
        call: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        _, lse = run.dense(*tensors, **call, window=options.get("window"), return_lse=True)
        return apply_sinks(attention(*tensors, **call, **options), lse, sinks)

    return attend
