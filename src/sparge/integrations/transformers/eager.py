"""transformers: dense calls that SDPA gets wrong, by the model's own function.

Every model's file has an ``eager_attention_forward``. It knows what SDPA does not: scores that are capped by a tanh
(Gemma 2), and sinks (GPT-OSS). It computes all scores at once, so long calls with sinks run here, in 16 bits and over
all blocks, as far as that is possible.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from sparge.dispatch import dense_rules, run
from sparge.dispatch.sinks import apply_sinks
from sparge.integrations.model_call import aligned_top_left

FUNCTION = "eager_attention_forward"
SINKS, CAP = "s_aux", "softcap"
MAX_SCORES = 2**26
"""Batch x heads x queries x keys up to which the model's own function serves sinks: 128 MB in 16 bits."""


def needed(arguments: dict[str, Any]) -> bool:
    """Whether SDPA would get a call with these arguments wrong."""
    return arguments.get(SINKS) is not None or arguments.get(CAP) is not None


def asks_for_it(kind: type) -> bool:
    """Whether a class may need it, and has it: its code hands over sinks or a cap, its file has the function."""
    if _function_of(kind) is None:
        return False
    methods = (getattr(method, "__code__", None) for base in kind.__mro__ for method in vars(base).values())
    keywords = {name for code in methods if code is not None for name in _keywords(code)}
    return not keywords.isdisjoint((SINKS, CAP))


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """A dense call with sinks or a cap; shapes and masks are those of transformers' SDPA function.

    Raises:
        NotImplementedError: the model has no function of its own.
    """
    function = _function_of(type(module))
    if function is None:
        raise NotImplementedError(
            f"{type(module).__name__}: expected {FUNCTION} in its file, for attention sinks (s_aux) or soft-capped "
            "scores (softcap), got none"
        )
    applies_causality = causal and attention_mask is None and query.shape[2] > 1
    if applies_causality:  # behind the queries, a static cache is empty
        key, value, _ = aligned_top_left(query, key, value)
    if _runs_here(query, key, value, attention_mask, dropout, kwargs):
        call: dict[str, Any] = {"is_causal": applies_causality, "scale": scaling, "enable_gqa": True}
        output, lse = run.dense(query, key, value, attention_mask, **call, return_lse=True)
        return apply_sinks(output, lse, kwargs[SINKS]).transpose(1, 2).contiguous(), None
    if applies_causality:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        hidden = torch.full((), torch.finfo(query.dtype).min, dtype=query.dtype, device=query.device)
        attention_mask = torch.where(attention_mask, hidden.new_zeros(()), hidden)
    output, _ = function(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    return output, None


def _runs_here(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> bool:
    """Whether a call has sinks, no cap, more scores than memory should hold, and nothing that is not served."""
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    if kwargs.get(CAP) is not None or query.shape[2] == 1 or scores <= MAX_SCORES:
        return False
    if (
        kwargs[SINKS].shape != query.shape[1:2]
        or dense_rules.not_plain_tensor(query, key, value, attention_mask) is not None
    ):
        return False
    return dense_rules.unsupported_call(query, key, value, attention_mask, dropout, enable_gqa=True) is None


def _function_of(kind: type) -> Callable[..., tuple[Tensor, Any]] | None:
    """What the file of a class, or of one it is made from, has under the name."""
    files = (sys.modules.get(base.__module__) for base in kind.__mro__)
    return next((vars(file)[FUNCTION] for file in files if file is not None and FUNCTION in vars(file)), None)


def _keywords(code: CodeType) -> Iterator[str]:
    """Names of the arguments that a function hands to others by name: tuples among its constants."""
    for constant in code.co_consts:
        if isinstance(constant, tuple):
            yield from (name for name in constant if isinstance(name, str))
