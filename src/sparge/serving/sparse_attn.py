"""vLLM-Omni's open proposal of one function for each sparse kernel (its pull request 4493): no class, no engine needed.

The entry point group ``vllm_omni.sparse_attn`` names the function. `vllm_omni` has the backend for versions as they
are.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.dispatch.reasons import Reason
from sparge.integrations import calls, layers
from sparge.integrations.model_call import ModelCall
from sparge.policy import Policy
from sparge.serving.options import VARIABLE, check_served, policy_from

SOURCE = "params"
OPTIONS = {field.name for field in fields(Policy)}


def sparse_attn(
    query: Tensor, key: Tensor, value: Tensor, params: dict[str, Any], is_causal: bool, softmax_scale: float
) -> Tensor:
    """Sparse attention as vLLM-Omni's dispatcher calls it.

    Args:
        query: (B, S, H, D).
        key, value: (B, S_k, H_kv, D).
        params: fields of `sparge.Policy` that a user configured; without any, the policy of the environment variable
            ``SPARGE_POLICY``. The engine puts what it knows of a call beside them, of which ``attn_mask`` (True is
            visible), the sizes of a video that is the whole sequence and, for rules about steps, ``denoise_step_idx``
            and ``total_denoise_steps`` are read; the rest is left alone.
        is_causal: a query sees no key behind it.
        softmax_scale: factor on the scores.

    Returns:
        The output (B, S, H, D). Calls that run dense are computed by PyTorch.

    Raises:
        TypeError, ValueError: a field of the policy is not what was expected, or a rule is about layers, which the
            dispatcher does not number.

    Example:
        >>> import torch
        >>> q, k, v = (torch.randn(1, 640, 2, 16) for _ in range(3))
        >>> sparse_attn(q, k, v, {"topk": 0.4, "backend": "torch"}, False, 0.25).shape
        torch.Size([1, 640, 2, 16])
    """
    chosen = {name: params[name] for name in sorted(OPTIONS & params.keys())}
    policy = _policy(json.dumps(chosen) if chosen else "", os.environ.get(VARIABLE, ""))
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    mask = of_four(params.get("attn_mask"))
    call: dict[str, Any] = {
        "is_causal": is_causal,
        "scale": softmax_scale,
        "enable_gqa": query.shape[2] != key.shape[2],
    }
    layer = layers.Layer("", policy)
    if policy.has_step_rules:
        layer.steps = Steps(policy, params.get("denoise_step_idx"), params.get("total_denoise_steps"))
    output = calls.attend(
        layer, ModelCall(q, k, v, mask, **call, grid=_grid(params), unsupported=why_unaligned(query, key, is_causal))
    )
    if output is None:
        output = F.scaled_dot_product_attention(q, k, v, mask, **call)
    return output.transpose(1, 2)


sparse_attn.capabilities = {"supports_attention_mask": True}  # type: ignore[attr-defined]


class Steps(layers.Steps):
    """Where a denoising schedule stands, as an engine says for each call; unknown without either number."""

    def __init__(self, policy: Policy, index: Any, total: Any) -> None:
        super().__init__(policy)
        if index is not None and total is not None:
            self.dense = Reason.STEP if policy.is_dense_step(_number(index), _number(total)) else None


def of_four(mask: Tensor | None) -> Tensor | None:
    """A mask over keys (B, S_k) with all four dimensions, as vLLM-Omni's SDPA backend reads it; any other as it is."""
    return mask[:, None, None].to(torch.bool) if mask is not None and mask.ndim == 2 else mask


def why_unaligned(query: Tensor, key: Tensor, is_causal: bool) -> str | None:
    """vLLM-Omni's backends do not agree where causality begins between sequences (B, S, ...) of different lengths."""
    return "causal, with lengths that differ" if is_causal and query.shape[1] != key.shape[1] else None


@functools.lru_cache(maxsize=64)
def _policy(chosen: str, environment: str) -> Policy:
    """The policy of a call, read once; the environment is part of the key."""
    del environment
    policy = policy_from(json.loads(chosen) if chosen else None, SOURCE)
    check_served(policy, SOURCE, has_steps=True, total=None)
    if policy.has_layer_rules:
        raise ValueError(f"{SOURCE}: expected no rules about layers (calls have no names), got {policy.to_json()}")
    return policy


def _grid(params: dict[str, Any]) -> tuple[int, ...] | None:
    """Frames, rows and columns of a video, by the sizes before it was cut into patches."""
    latent, patch = params.get("latent_shape"), params.get("patch_size")
    if latent is None or patch is None:
        return None
    return tuple(size // part for size, part in zip(_triple(latent), _triple(patch), strict=True))


def _triple(sizes: Any) -> list[int]:
    """Three numbers; of a batch those of the first sample, which has the sizes of all."""
    rows = torch.as_tensor(sizes).reshape(-1, 3)
    return [int(size) for size in rows[0].tolist()]


def _number(value: Any) -> int:
    """A number, or that of the first sample of a batch."""
    return int(value.flatten()[0]) if isinstance(value, Tensor) else int(value)
