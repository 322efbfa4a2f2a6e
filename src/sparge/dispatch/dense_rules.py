"""The rules that make calls run dense. `resolve`, the integrations and the distributed functions use them.

A rule returns a `Reason`, an `Obstacle` or a description for `sparge.stats`, or None if it does not apply.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from sparge.backends import base
from sparge.dispatch.gradients import inside_autograd_function, needs_grad_of
from sparge.dispatch.reasons import BY_SIZE, POLICY_RULES, Obstacle, Reason
from sparge.masks.geometry import Shape
from sparge.masks.window import Window, keys_of_query
from sparge.numerics import block_means
from sparge.options.rules import Dense, Sparsity
from sparge.policy import Policy

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_HEAD_DIM, MAX_HEAD_DIM = 8, 256
FULL_MASK = "full mask"
"""Label of full masks (S_q x S_k), with a value for every query and key."""
SHARING_HEADS = 4
"""Minimum number of heads that must share a full mask in sparse calls on a GPU. Reading one value of the mask takes as
long as SDPA needs for one score (docs/lab/models.md, "Masks in models")."""


class Target(NamedTuple):
    """The backend, device and dtype that a choice by size depends on.

    Attributes:
        requested: the backend that the caller named. An explicit backend never falls back to dense.
        backend: the backend that serves the call.
        device, dtype: device and dtype of the query.
    """

    requested: str
    backend: str
    device: torch.device
    dtype: torch.dtype


class ModelSizes(NamedTuple):
    """Sizes of a model's call, and device and dtype of its query.

    Attributes:
        heads: number of heads times batch size.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    q_len: int
    kv_len: int


def by_arguments(
    shape: Shape,
    window: Window,
    sparsity: Sparsity,
    quantization: str,
    target: Target,
    attn_mask: Tensor | None = None,
) -> Reason | None:
    """Return why `sparge.attention` runs a supported call dense; ``attn_mask`` has 4 dimensions."""
    if isinstance(sparsity, Dense):
        return Reason.REQUESTED
    if target.requested != "auto" or quantization not in ("auto", "none"):
        return None
    crossover = base.crossover_of(target.backend, target.device.type, target.dtype)
    heads = shape.batch * shape.heads
    if base.is_below(crossover, heads, shape.q_len, shape.kv_len, window.right == 0):
        return Reason.CROSSOVER
    keys = keys_of_query(window, shape.kv_len)
    if keys < shape.kv_len and base.is_below(crossover, heads, shape.q_len, keys, False):
        return Reason.WINDOW
    if attn_mask is not None and by_mask(attn_mask, shape, target.device) is not None:
        return Reason.MASK
    return None


def resolve_quantization(
    quantization: str, backend: str, device: torch.device, reason: Reason | None, *, has_mask: bool
) -> str:
    """Resolve the quantization of a call. It is always "none" for calls that run dense because of their size."""
    resolved = base.resolve_quantization(quantization, backend, device, has_mask=has_mask)
    return "none" if reason in BY_SIZE else resolved


def by_policy(
    policy: Policy,
    sizes: ModelSizes,
    *,
    is_self: bool | None,
    is_language: bool,
    is_causal: bool,
    is_cross: bool,
    is_dense_layer: bool,
) -> Reason | None:
    """Return why a policy runs a call of a model dense, apart from its rules about denoising steps.

    Args:
        is_self: whether the call is self-attention. None infers this: True in language models, and if the numbers of
            queries and keys are equal.
        is_language: whether the tokens are text in order. If there are fewer queries than keys, the queries are then a
            chunk after a prefix.
        is_cross: the layer is known to be cross-attention.
        is_dense_layer: the layer is among the policy's ``dense_layers``.
    """
    device, dtype, heads, q_len, kv_len = sizes
    if q_len == 1 and is_language:
        return Reason.DECODE
    if policy.self_attention_only:
        is_one_sequence = (q_len == kv_len or is_language) if is_self is None else is_self
        if is_cross or not is_one_sequence:
            return Reason.CROSS_ATTENTION
    if kv_len < policy.min_tokens or (q_len < policy.min_tokens and not is_language):
        return Reason.MIN_TOKENS
    if policy.backend == "auto" and device.type != "meta":
        crossover = base.crossover_for(device, dtype)
        if base.is_below(crossover, heads, q_len, kv_len, is_causal):
            return Reason.CROSSOVER
    return Reason.LAYER if is_dense_layer else None


def by_window(policy: Policy, query: Tensor, keys: int, kv_len: int) -> Reason | None:
    """Return `Reason.WINDOW` if queries see only some of the keys, and a call over so few keys is below the crossover.

    Args:
        keys: maximum number of the ``kv_len`` keys that a query sees.
    """
    if policy.backend != "auto" or keys >= kv_len or not is_below_crossover(query, keys, is_causal=False):
        return None
    return Reason.WINDOW


def is_below_crossover(query: Tensor, kv_len: int, *, is_causal: bool) -> bool:
    """Return whether a call over ``kv_len`` keys is below the crossover of the backend that "auto" selects."""
    crossover = base.crossover_for(query.device, query.dtype)
    return base.is_below(crossover, query.shape[0] * query.shape[1], query.shape[2], kv_len, is_causal)


def runs_quantized(policy: Policy, reason: Reason, device: torch.device) -> bool:
    """Return whether a call that a policy keeps dense runs in INT8/FP8 instead of the framework's attention."""
    if policy.dense != "8bit" or reason not in POLICY_RULES or device.type == "meta":
        return False
    if policy.backend != "auto" and policy.quantization != "auto":
        return True
    return base.resolve_quantization("auto", base.resolve(policy.backend, device), device) != "none"


def by_mask(attn_mask: Tensor, shape: Shape, device: torch.device, *, is_dense: bool = False) -> str | None:
    """Return a description of the mask if reading it costs more than sparsity saves.

    Key-padding masks are cheap. Full bool masks are cheap only on GPUs, in long calls whose heads share the mask.
    Additive masks were slower in all measurements, except on CPUs for masks over keys that all heads share.

    Args:
        shape: shape of the whole call.
        is_dense: the call computes all blocks. Such calls were not measured with full masks, so their masks are not
            considered cheap.
    """
    is_full = is_full_mask(attn_mask)
    mask_heads = attn_mask.shape[-3] if attn_mask.ndim > 2 else 1
    if attn_mask.dtype != torch.bool:
        is_cheap = device.type == "cpu" and not is_full and mask_heads == 1
        return None if is_cheap else "additive mask"
    if not is_full:
        return None
    if device.type != "cpu" and shape.heads < SHARING_HEADS * mask_heads:
        return f"mask that fewer than {SHARING_HEADS} heads share"
    crossover = base.crossover_under_mask_for(device)
    heads = shape.batch * shape.heads
    return FULL_MASK if is_dense or base.is_below(crossover, heads, shape.q_len, shape.kv_len, False) else None


def is_full_mask(attn_mask: Tensor) -> bool:
    """Return whether a mask has different values for different queries."""
    return attn_mask.ndim >= 2 and attn_mask.shape[-2] > 1


def unsupported(shape: Shape, dropout_p: float, needs_grad: bool) -> Obstacle | None:
    """Return an obstacle if no sparse backend supports a call."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p: expected a number, got {type(dropout_p).__name__}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p: expected a value in [0, 1], got {dropout_p}")
    if dropout_p > 0:
        return Obstacle("dropout", f"dropout_p: expected 0.0 (sparse attention has no dropout), got {dropout_p}")
    if needs_grad:
        return Obstacle(
            "gradients",
            "expected inputs without gradients (sparse attention has no derivatives; use torch.no_grad() or "
            "detach()), got requires_grad=True under autograd, or tangents of forward-mode AD",
        )
    return _unsupported_head_dim(shape.head_dim, shape.value_dim)


def unsupported_means(attn_mask: Tensor | None, group: int) -> Obstacle | None:
    """Return an obstacle if skipped blocks cannot be replaced by their means under a mask with 4 dimensions."""
    unfit = block_means.unfit_for_means(attn_mask, group)
    return None if unfit is None else Obstacle("means with this mask", unfit)


def _unsupported_head_dim(head_dim: int, value_dim: int) -> Obstacle | None:
    for name, size in (("head_dim", head_dim), ("value head_dim", value_dim)):
        if not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            message = f"{name}: expected a value in [{MIN_HEAD_DIM}, {MAX_HEAD_DIM}], got {size}"
            return Obstacle(f"{name} {size}", message)
    return None


def not_plain_tensor(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> str | None:
    """Return a description if the tensors of a model's call are not plain tensors on one device."""
    if query.is_nested or key.is_nested or value.is_nested:
        return "nested tensors"
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        return f"{query.ndim} dimensions"
    if any(type(tensor) is not Tensor for tensor in (query, key, value)):
        return "tensor subclass"
    if attn_mask is not None and type(attn_mask) not in (Tensor, nn.Parameter):
        return "mask of a tensor subclass"
    if not torch.compiler.is_compiling() and any(map(is_functorch_wrapped_tensor, (query, key, value))):
        return "a transform of torch.func"
    if key.device != query.device or value.device != query.device or query.device.type == "meta":
        return "devices"
    if attn_mask is not None and attn_mask.device != query.device:
        return "devices"
    return None


def unsupported_call(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, enable_gqa: bool
) -> str | None:
    """Return why a model's call must be left to SDPA: it cannot be sparse, or SDPA would raise."""
    if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        return f"{query.dtype}".removeprefix("torch.") if query.dtype not in DTYPES else "mixed dtypes"
    batch, heads, _, head_dim = query.shape
    obstacle = _unsupported_head_dim(head_dim, value.shape[3])
    if obstacle is not None:
        return obstacle.label
    fits = key.shape[0] == batch and key.shape[3] == head_dim and value.shape[:3] == key.shape[:3]
    groups = key.shape[1] == heads or (enable_gqa and heads % key.shape[1] == 0)
    if not (fits and groups) or 0 in query.shape or 0 in key.shape:
        return "shapes"
    if dropout_p:
        return "dropout"
    if needs_grad_of(query, key, value, attn_mask):
        return "gradients"
    if inside_autograd_function():
        return "inside an autograd.Function, such as a reentrant checkpoint"
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, *DTYPES):
        return f"mask of {attn_mask.dtype}"
    return None


def ambiguous_mask(attn_mask: Tensor) -> str | None:
    """Return a description of an additive mask that may mean different things in SDPA and in sparge.

    If all entries of a query are the dtype's lowest number, SDPA gives all keys equal weight, but `sparge.attention`
    hides all keys. The check reads the mask, which would synchronize on GPUs and is impossible in compiled programs. In
    these two cases, every additive mask counts as ambiguous.
    """
    if attn_mask.dtype == torch.bool:
        return None
    if attn_mask.device.type != "cpu" or torch.compiler.is_compiling():
        return "additive mask"
    lowest = torch.finfo(attn_mask.dtype).min
    return "mask with rows of only its lowest number" if bool((attn_mask.amax(-1) == lowest).any()) else None
