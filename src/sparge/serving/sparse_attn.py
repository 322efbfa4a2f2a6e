"""vLLM-Omni's proposed interface for sparse kernels (its pull request 4493), which is a single function.

The function is registered in the entry point group ``vllm_omni.sparse_attn`` and does not import the engine. The
backend for released versions is in `vllm_omni`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.integrations.calls import attend
from sparge.integrations.layers import Layer, Steps
from sparge.integrations.model_call import ModelCall
from sparge.policy import Policy
from sparge.serving.options import VARIABLE, check_served, policy_from

SOURCE = "params"
OPTIONS = {field.name for field in dataclasses.fields(Policy)}


def sparse_attn(
    query: Tensor, key: Tensor, value: Tensor, params: dict[str, Any], is_causal: bool, softmax_scale: float
) -> Tensor:
    """Compute sparse attention for vLLM-Omni's dispatcher.

    Args:
        query: (B, S, H, D).
        key, value: (B, S_k, H_kv, D).
        params: fields of `sparge.Policy` from the user; without them, the policy of the environment variable
            ``SPARGE_POLICY`` applies. The engine adds properties of the call. This function reads ``attn_mask`` (True
            is visible), ``latent_shape`` and ``patch_size`` of a video that is the whole sequence, and
            ``denoise_step_idx`` and ``total_denoise_steps`` for rules about steps.
        is_causal: whether a query does not see keys after its position.
        softmax_scale: factor on the scores.

    Returns:
        The output (B, S, H, D). Calls that run dense are computed by PyTorch.

    Raises:
        TypeError, ValueError: a field of the policy has the wrong type or is out of range, or the policy has rules
            about layers, because the engine passes no layer names.

    Example:
        >>> import torch
        >>> q, k, v = (torch.randn(1, 640, 2, 16) for _ in range(3))
        >>> sparse_attn(q, k, v, {"topk": 0.4, "backend": "torch"}, False, 0.25).shape
        torch.Size([1, 640, 2, 16])
    """
    chosen = {name: params[name] for name in sorted(OPTIONS & params.keys())}
    policy = _policy(json.dumps(chosen) if chosen else "", os.environ.get(VARIABLE, ""))
    mask = with_heads(params.get("attn_mask"))
    layer = Layer("", policy)
    if policy.has_step_rules:
        layer.steps = steps_at(policy, params.get("denoise_step_idx"), params.get("total_denoise_steps"))
    output = attend_tokens_first(layer, query, key, value, mask, is_causal, softmax_scale, grid=_grid(params))
    if output is not None:
        return output
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    call: dict[str, Any] = {"is_causal": is_causal, "scale": softmax_scale, "enable_gqa": q.shape[1] != k.shape[1]}
    return F.scaled_dot_product_attention(q, k, v, mask, **call).transpose(1, 2)


sparse_attn.capabilities = {"supports_attention_mask": True}  # type: ignore[attr-defined]


def attend_tokens_first(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    **fields: Any,
) -> Tensor | None:
    """Return the output (B, S, H, D) of a call of vLLM-Omni, or None if the engine must compute it.

    Args:
        fields: other fields of the `ModelCall`.
    """
    if is_causal and query.shape[1] != key.shape[1]:  # vLLM-Omni's backends disagree on the alignment
        fields["unsupported"] = fields.get("unsupported") or "causal, with lengths that differ"
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    grouped = q.shape[1] != k.shape[1]
    call = ModelCall(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped, **fields)
    output = attend(layer, call)
    return None if output is None else output.transpose(1, 2)


def steps_at(policy: Policy, index: Any, total: Any) -> Steps:
    """Return the position in a denoising schedule; unknown if ``index`` or ``total`` is None."""
    steps = Steps(policy)
    if index is not None and total is not None:
        steps.total = _first(total)
        steps.go_to(_first(index))
    return steps


def with_heads(mask: Tensor | None) -> Tensor | None:
    """Return a mask over keys (B, S_k) with 4 dimensions, as in vLLM-Omni's SDPA backend; any other mask unchanged."""
    return mask[:, None, None].to(torch.bool) if mask is not None and mask.ndim == 2 else mask


@functools.lru_cache(maxsize=64)
def _policy(chosen: str, environment: str) -> Policy:
    """Return the policy of a call; cached, with the environment as part of the key."""
    del environment
    policy = policy_from(json.loads(chosen) if chosen else None, SOURCE)
    check_served(policy, SOURCE, has_steps=True, total=None)
    if policy.has_layer_rules:
        raise ValueError(f"{SOURCE}: expected no rules about layers (calls have no names), got {policy.to_json()}")
    return policy


def _grid(params: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the frames, rows and columns of a video from its latent sizes and patch sizes.

    In a batch, the sizes of the first sample are used for all samples.
    """
    latent, patch = params.get("latent_shape"), params.get("patch_size")
    if latent is None or patch is None:
        return None
    sizes, parts = (torch.as_tensor(value).reshape(-1, 3)[0].tolist() for value in (latent, patch))
    return tuple(int(size) // int(part) for size, part in zip(sizes, parts, strict=True))


def _first(value: Any) -> int:
    """Return an int from a number, or from the first entry of a batch of numbers."""
    return int(torch.as_tensor(value).flatten()[0])
