"""Run the calls of the public functions. Repeated calls are looked up; new calls are resolved, then run by `ops`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.backends import base
from sparge.call import Call
from sparge.dispatch import call_cache, ops, validation
from sparge.dispatch.reasons import Obstacle, Reason, count, describe
from sparge.dispatch.resolve import (
    Options,
    Tensors,
    check_tensors,
    resolve,
    resolve_block_sparse_attention,
    resolve_prediction,
)
from sparge.masks.block_mask import BlockMask
from sparge.masks.causal_bias import alignment_of
from sparge.masks.visibility import allowed_elements, window_elements
from sparge.masks.window import Window
from sparge.options.checks import warn_caller
from sparge.options.common import Quantization


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Compute `sparge.attention`, and return the output and the LSE, which is undefined unless requested."""
    kind, runner = call_cache.find(query, key, value, attn_mask, options)
    if runner is None:
        output, lse, runner = resolve_and_run(query, key, value, attn_mask, options)
        call_cache.remember(kind, runner)
    else:
        output, lse = runner(query, key, value, attn_mask)
    return output, lse


def resolve_and_run(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, call_cache.Runner | None]:
    """Resolve a call of `sparge.attention` and run it.

    Returns:
        The output, the LSE, and a runner for calls of the same kind; None if the call cannot be cached.
    """
    query, key, value, attn_mask = as_autocast(query, key, value, attn_mask)
    tensors = check_tensors(query, key, value, options, may_be_empty=True)
    resolved = resolve(tensors, attn_mask, options)
    # torch.compile of torch 2.6 cannot trace slices of named tuples.
    query, key, value = tensors.query, tensors.key, tensors.value
    call, backend, reason = resolved.call, resolved.backend, resolved.reason
    runner: call_cache.Runner | None = None
    if query.numel() == 0:
        output, lse = _empty_result(tensors)
    elif resolved.obstacle is not None:
        output = lse = _run_unsupported(tensors, call, resolved.obstacle, options)
    elif reason is not None:
        label = describe(reason)
        if resolved.is_repeatable:
            runner = call_cache.DenseCalls(call, backend, query, options, label)
        output, lse = ops.dense(query, key, value, call, options.backend, with_lse=options.return_lse, label=label)
    else:
        if resolved.is_repeatable:
            runner = call_cache.SparseCalls(call, backend, query.dtype, options)
        output, lse = ops.attention(query, key, value, call, backend, options.order, or_dense=resolved.is_deferred)
    return _in_layout(output, options.layout), lse, runner


def predict(query: Tensor, key: Tensor, attn_mask: Tensor | None, options: Options) -> BlockMask:
    """Compute `sparge.predict`."""
    kind, runner = call_cache.find(query, key, key, attn_mask, options, "predict")
    if runner is not None:
        mask: BlockMask = runner(query, key, attn_mask)
        return mask
    query, key, _, attn_mask = as_autocast(query, key, key, attn_mask)
    tensors = check_tensors(query, key, key, options)
    resolved = resolve_prediction(tensors, attn_mask, options)
    if resolved.is_repeatable:
        call_cache.remember(kind, call_cache.Predictions(resolved.call, resolved.backend, options))
    return ops.predict(tensors.query.detach(), tensors.key.detach(), resolved.call, resolved.backend)


def block_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask | Tensor, attn_mask: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Compute `sparge.block_sparse_attention`, and return the output and the LSE."""
    mask_kind = None if torch.compiler.is_compiling() else call_cache.kind_of_blocks(mask)
    kind = None
    if mask_kind is not None:
        kind, runner = call_cache.find(query, key, value, attn_mask, options, mask_kind)
        if runner is not None:
            output, lse = runner(query, key, value, attn_mask, mask)
            return output, lse
    query, key, value, attn_mask = as_autocast(query, key, value, attn_mask)
    tensors = check_tensors(query, key, value, options)
    blocks, resolved = resolve_block_sparse_attention(tensors, mask, attn_mask, options)
    call, backend = resolved.call, resolved.backend
    if resolved.is_repeatable:
        call_cache.remember(kind, call_cache.SparseCalls(call, backend, query.dtype, options))
    output, lse = ops.attend(tensors.query, tensors.key, tensors.value, blocks, call, backend)
    return _in_layout(output, options.layout), lse


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    quantization: Quantization = "none",
    backend: str = "auto",
    return_lse: bool = False,
    label: str = "",
    window: tuple[int | None, int | None] | None = None,
) -> Any:
    """Compute attention over all blocks, for calls that an integration runs dense.

    Args:
        label: the label of the call in `sparge.stats`; empty if the call is already counted.

    The other arguments and the result are those of `sparge.attention`.
    """
    options = Options(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    query, key, value, shape, scale, _ = check_tensors(query, key, value, options)
    attn_mask = validation.check_attn_mask(attn_mask, shape, query.device)
    resolved = base.resolve_quantization(
        quantization, base.resolve(backend, query.device), query.device, has_mask=attn_mask is not None
    )
    bounds = validation.resolve_window(window, is_causal, shape.q_len, shape.kv_len)
    call = Call(shape, bounds.right == 0, scale, quantization=resolved, attn_mask=attn_mask, window=bounds)
    output, lse = ops.dense(query, key, value, call, backend, with_lse=return_lse, label=label)
    return (output, lse) if return_lse else output


def as_autocast(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Cast the tensors of a call as autocast casts the arguments of SDPA."""
    mask = attn_mask if not isinstance(attn_mask, Tensor) or alignment_of(attn_mask) else autocast_tensor(attn_mask)
    return autocast_tensor(query), autocast_tensor(key), autocast_tensor(value), mask


def autocast_tensor(tensor: Tensor) -> Tensor:
    """Cast a tensor as autocast casts an argument of SDPA."""
    if not isinstance(tensor, Tensor) or tensor.is_meta:  # autocast does not support the meta device
        return tensor
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    if not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _empty_result(tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE of a call without queries."""
    query, value = tensors.query, tensors.value
    sizes = query.shape[:3]
    return query.new_empty(*sizes, value.shape[3]), query.new_empty(sizes, dtype=torch.float32)


def _in_layout(output: Tensor, layout: str) -> Tensor:
    return output.transpose(1, 2) if layout == "NHD" else output


def _run_unsupported(tensors: Tensors, call: Call, obstacle: Obstacle, options: Options) -> Tensor:
    """Compute a call that no sparse backend supports by SDPA, with sparge's causal alignment, window and masks."""
    if options.on_unsupported == "warn":
        warn_caller(f"sparge runs dense: {obstacle.message}", UserWarning)
    count(Reason.UNSUPPORTED, detail=obstacle.label)
    query, shape, attn_mask, is_causal = tensors.query, call.shape, call.attn_mask, call.is_causal
    is_aligned = is_causal and call.window.left is None and shape.q_len == shape.kv_len
    if (call.window != Window() and not is_aligned) or (is_causal and attn_mask is not None):
        inside = window_elements(shape, call.window, torch.arange(shape.q_len, device=query.device))
        if attn_mask is None or attn_mask.dtype == torch.bool:
            attn_mask = inside if attn_mask is None else attn_mask & inside
        else:
            attn_mask = attn_mask.masked_fill(~inside, -torch.inf)
        is_causal = False
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.masked_fill(~allowed_elements(attn_mask), -torch.inf).to(query.dtype)
    key, value, enable_gqa = tensors.key, tensors.value, options.enable_gqa
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, options.dropout_p, is_causal, scale=call.scale, enable_gqa=enable_gqa
    )
