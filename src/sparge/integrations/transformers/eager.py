"""transformers: run dense calls that SDPA cannot compute on the model's own function.

The file of every model has an ``eager_attention_forward``, which supports soft-capped scores (Gemma 2) and attention
sinks (GPT-OSS). It materializes all scores, so long calls with sinks run on sparge's dense 16-bit attention instead
where possible.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
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
"""Calls with sinks and at most this many scores (B x H x S_q x S_k) run on the model's function: 128 MB in 16 bits."""


def needs_own_function(arguments: dict[str, Any]) -> bool:
    """Return whether SDPA would return a wrong result for these arguments."""
    return arguments.get(SINKS) is not None or arguments.get(CAP) is not None


def may_need_own_function(kind: type) -> bool:
    """Return whether a class may call attention with sinks or a cap, and has an ``eager_attention_forward``.

    It may if one of its methods passes ``s_aux`` or ``softcap`` by keyword, to any function.
    """
    if _function_of(kind) is None:
        return False
    # The names of the keyword arguments of a call are a tuple among the constants of the code.
    keywords = [constant for code in code_of(kind) for constant in code.co_consts if isinstance(constant, tuple)]
    return any(SINKS in names or CAP in names for names in keywords)


def code_of(kind: type) -> list[CodeType]:
    """Return the code of the methods of a class and its bases."""
    methods = [inspect.unwrap(method) for base in kind.__mro__ for method in vars(base).values() if callable(method)]
    return [method.__code__ for method in methods if inspect.isfunction(method)]


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
) -> Tensor:
    """Compute dense attention with sinks or soft-capped scores.

    Shapes and masks are those of transformers' SDPA function.

    Raises:
        NotImplementedError: the model's file does not define ``eager_attention_forward``.
    """
    function = _function_of(type(module))
    if function is None:
        raise NotImplementedError(
            f"{type(module).__name__}: expected a function {FUNCTION} in the model's file, for attention sinks (s_aux) "
            "or soft-capped scores (softcap), got none"
        )
    is_causal = causal and attention_mask is None and query.shape[2] > 1
    if is_causal:  # the entries of a static cache after the queries are empty
        key, value, _ = aligned_top_left(query, key, value)
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    tensors = (query, key, value, attention_mask)
    if (
        scores > MAX_SCORES
        and query.shape[2] > 1
        and kwargs.get(CAP) is None
        and kwargs[SINKS].shape == query.shape[1:2]
        and dense_rules.not_plain_tensor(*tensors) is None
        and dense_rules.unsupported_call(*tensors, dropout, enable_gqa=True) is None
    ):
        call: dict[str, Any] = {"is_causal": is_causal, "scale": scaling, "enable_gqa": True}
        output, lse = run.dense(*tensors, **call, return_lse=True)
        return apply_sinks(output, lse, kwargs[SINKS]).transpose(1, 2).contiguous()
    if is_causal:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        hidden = torch.full((), torch.finfo(query.dtype).min, dtype=query.dtype, device=query.device)
        attention_mask = torch.where(attention_mask, hidden.new_zeros(()), hidden)
    return function(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)[0]


def _function_of(kind: type) -> Callable[..., tuple[Tensor, Any]] | None:
    """Return ``eager_attention_forward`` from the file of a class or of one of its bases; None if no file has it."""
    files = (sys.modules.get(base.__module__) for base in kind.__mro__)
    return next((vars(file)[FUNCTION] for file in files if file is not None and FUNCTION in vars(file)), None)
