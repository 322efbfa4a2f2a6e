"""Attention sinks: a learned logit of each head that takes weight and gives no value, as GPT-OSS has them.

A sink of logit s adds exp(s) to the denominator of softmax. With the log-sum-exp of a call that is a factor:

    output' = output * exp(lse) / (exp(lse) + exp(s)) = output * sigmoid(lse - s)

so that sparse attention needs nothing but its LSE. Rows that see nothing (LSE -inf) stay 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparge import api


def weighed(output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """An output (..., H, S, D) whose softmax has a sink (H,) in each head; ``lse`` is (..., H, S)."""
    share = torch.sigmoid(lse - sinks.float()[:, None])
    return (output.float() * share[..., None]).to(output.dtype)


def with_sinks(attention: Callable[..., Any], sinks: Tensor) -> Callable[..., Tensor]:
    """A function like `sparge.attention`, which it calls, with sinks."""

    def attend(*tensors: Any, **options: Any) -> Tensor:
        output, lse = attention(*tensors, **options, return_lse=True)
        return weighed(output, lse, sinks)

    return attend


def with_exact_sinks(attention: Callable[..., Tensor], sinks: Tensor) -> Callable[..., Tensor]:
    """The same for a function that gives no LSE: that of dense attention stands for it."""

    def attend(*tensors: Any, is_causal: bool, scale: float | None, enable_gqa: bool, **options: Any) -> Tensor:
        call: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        _, lse = api.dense(*tensors, **call, window=options.get("window"), return_lse=True)
        return weighed(attention(*tensors, **call, **options), lse, sinks)

    return attend
