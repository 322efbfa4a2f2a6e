"""The functions of the published SpargeAttention code with their original names and signatures.

    spas_sage2_attn_meansim_topk_cuda, spas_sage_attn_meansim_topk_cuda     keep a share of the blocks
    spas_sage2_attn_meansim_cuda, spas_sage_attn_meansim_cuda               keep blocks up to a share of the mass
    block_sparse_sage2_attn_cuda                                            keep the blocks of a given mask

They are for programs that already call the published code; new programs should call `sparge.attention`. Every argument
has its published position, and either has an effect or raises. docs/migration.md describes each argument and all
changed results. The functions for SageAttention 1 and 2 are identical here: they use the fastest quantization of the
device (`sparge.attention` has a ``quantization`` argument). Despite their names, they run on any device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparge import api
from sparge.dispatch import dense_rules, validation
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape, ceil_div
from sparge.options import checks
from sparge.options.common import Layout, PerHead, check_range
from sparge.options.rules import DEFAULT_MIN_BLOCKS, Selection, TopCdf, TopK

PV_THRESHOLD_OFF = 50.0
"""The published default. It skips nothing, because 2^-50 is far below the resolution of any dtype."""


def spas_sage2_attn_meansim_topk_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: PerHead = -0.1,
    topk: PerHead = 0.5,
    pvthreshd: PerHead = 50,
    attention_sink: bool | None = None,
    tensor_layout: Layout = "HND",
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
) -> Tensor | tuple[Tensor, float]:
    """Compute attention over a share of the visible blocks, scored by the means of blocks as in the paper.

    Args:
        q: (B, H, S_q, D), or (B, S_q, H, D) with ``tensor_layout="NHD"``; float16, bfloat16 or float32.
        k: (B, H_kv, S_k, D); H is a multiple of H_kv.
        v: (B, H_kv, S_k, D_v).
        attn_mask: bool (True = may attend) or additive, broadcastable to (B, H, S_q, S_k).
        dropout_p: must be 0.0; sparse attention has no dropout.
        is_causal: query i sees keys up to i + S_k - S_q. Causal calls also keep the diagonal and at least 16
            blocks per query block.
        scale: factor on the scores. Default: 1 / sqrt(D).
        smooth_k: must be True. Smoothing does not change the softmax, and quantization needs it.
        simthreshd1: blocks whose tokens are less similar than this are always kept; 0 or less disables this.
        topk: share of the visible blocks that each query block keeps, in (0, 1]; at least one block.
        pvthreshd: skip P V of 64 queries if all of their probabilities are below 2^-pvthreshd of the running maximum;
            50 or more skips nothing.
        attention_sink: every query block keeps the first key block; None means "when causal".
        tensor_layout: "HND" or "NHD", the layout of inputs and output.
        output_dtype: a floating-point dtype. Default: the query's dtype.
        return_sparsity: also return the share of visible blocks that was skipped. This synchronizes with the device.
            Short calls, which otherwise run dense, are then sparse.

    The three thresholds may be tensors (H,), one entry per query head.

    Returns:
        The output (B, H, S_q, D_v) in the layout of the inputs, contiguous; with ``return_sparsity`` also a float.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
        NotImplementedError: the call needs dropout, ``smooth_k=False`` or gradients, or head_dim is outside 8..256.

    Example:
        >>> import torch
        >>> from sparge.compat import spas_sage2_attn_meansim_topk_cuda
        >>> q, k, v = (torch.randn(1, 2, 512, 64) for _ in range(3))
        >>> out, sparsity = spas_sage2_attn_meansim_topk_cuda(q, k, v, topk=0.25, return_sparsity=True)
        >>> out.shape, sparsity
        (torch.Size([1, 2, 512, 64]), 0.75)
    """
    _check(q, k, v, dropout_p, smooth_k, tensor_layout, output_dtype, return_sparsity)
    rule = TopK(_detached(topk), **_rules(is_causal, simthreshd1, pvthreshd, attention_sink))
    call: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "layout": tensor_layout}
    return _predicted_attention(q, k, v, rule, call, output_dtype, return_sparsity)


def spas_sage2_attn_meansim_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: PerHead = 0.6,
    cdfthreshd: PerHead = 0.98,
    pvthreshd: PerHead = 50,
    attention_sink: bool | None = None,
    tensor_layout: Layout = "HND",
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
) -> Tensor | tuple[Tensor, float]:
    """Compute attention over the best-scored blocks of each query block, until their mass reaches ``cdfthreshd``.

    Args:
        cdfthreshd: mass to cover, in (0, 1]. The block that crosses it is kept. A tensor (H,) sets a value per head.

    The other arguments, the result and the errors are those of `spas_sage2_attn_meansim_topk_cuda`;
    ``simthreshd1`` is on by default.

    Example:
        >>> import torch
        >>> from sparge.compat import spas_sage2_attn_meansim_cuda
        >>> q, v = torch.ones(1, 1, 128, 64), torch.randn(1, 1, 256, 64)
        >>> k = torch.zeros(1, 1, 256, 64)  # four blocks, a quarter of the mass each: three cover 60 %
        >>> spas_sage2_attn_meansim_cuda(q, k, v, simthreshd1=0.0, cdfthreshd=0.6, return_sparsity=True)[1]
        0.25
    """
    _check(q, k, v, dropout_p, smooth_k, tensor_layout, output_dtype, return_sparsity)
    rule = TopCdf(_detached(cdfthreshd), **_rules(is_causal, simthreshd1, pvthreshd, attention_sink))
    call: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "layout": tensor_layout}
    return _predicted_attention(q, k, v, rule, call, output_dtype, return_sparsity)


def block_sparse_sage2_attn_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_id: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    smooth_k: bool = True,
    pvthreshd: PerHead = 50,
    attention_sink: bool = False,
    tensor_layout: Layout = "HND",
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
) -> Tensor | tuple[Tensor, float]:
    """Compute attention without causality over the blocks that a mask keeps.

    Args:
        mask_id: integers or bools (B, H, ceil(S_q / 128), ceil(S_k / 64)), nonzero for kept blocks; None keeps all
            blocks.
        attention_sink: every query block also keeps the first key block.

    The other arguments, the result and the errors are those of `spas_sage2_attn_meansim_topk_cuda`. The output
    of a query block that keeps nothing is 0.

    Example:
        >>> import torch
        >>> from sparge.compat import block_sparse_sage2_attn_cuda
        >>> q, k, v = (torch.randn(1, 2, 256, 64) for _ in range(3))
        >>> mask = torch.eye(2, 4, dtype=torch.int32).expand(1, 2, 2, 4)
        >>> block_sparse_sage2_attn_cuda(q, k, v, mask, return_sparsity=True)[1]
        0.75
        >>> block_sparse_sage2_attn_cuda(q, k, v, mask.mT)
        Traceback (most recent call last):
        ...
        ValueError: mask_id: expected (B, H, ceil(S_q / 128), ceil(S_k / 64)) = (1, 2, 2, 4) ... blocks of 64 x 128, ...
    """
    shape = _check(q, k, v, dropout_p, smooth_k, tensor_layout, output_dtype, return_sparsity)
    pv_threshold = _pv_threshold(pvthreshd)
    kept = _kept_blocks(mask_id, attention_sink, shape, q.device)
    mask = validation.check_block_mask(kept, shape, is_causal=False, device=q.device)
    output = api.block_sparse_attention(
        q, k, v, mask, scale=scale, enable_gqa=True, pv_threshold=pv_threshold, layout=tensor_layout
    )
    output = _converted(output, output_dtype)
    return (output, 1.0 - mask.density()) if return_sparsity else output


spas_sage_attn_meansim_topk_cuda = spas_sage2_attn_meansim_topk_cuda
spas_sage_attn_meansim_cuda = spas_sage2_attn_meansim_cuda


def _predicted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Selection,
    call: dict[str, Any],
    output_dtype: torch.dtype | None,
    return_sparsity: bool,
) -> Tensor | tuple[Tensor, float]:
    """Compute attention over predicted blocks; ``call`` has the other options of `sparge.attention`."""
    call |= {"enable_gqa": True}
    if not return_sparsity:
        output = api.attention(q, k, v, skipped="drop", sparsity=rule, score="mean", **call)
        return _converted(output, output_dtype)
    mask = api.predict(q, k, sparsity=rule, score="mean", **call)
    del call["is_causal"]  # the mask is also causal for a causal `attn_mask` of torch
    output = api.block_sparse_attention(q, k, v, mask, pv_threshold=rule.pv_threshold, **call)
    return _converted(output, output_dtype), 1.0 - mask.density()


def _rules(is_causal: bool, simthreshd1: PerHead, pvthreshd: PerHead, attention_sink: bool | None) -> dict[str, Any]:
    """Convert the published thresholds to arguments of a selection rule.

    The published code has no minimum per query block. Causal attention uses this library's minimum, because language
    models lose most accuracy in query blocks that see few key blocks. In long sequences the minimum costs nothing.
    """
    return {
        "min_blocks": DEFAULT_MIN_BLOCKS if is_causal else 0,
        "similarity_threshold": _similarity_threshold(simthreshd1),
        "pv_threshold": _pv_threshold(pvthreshd),
        "sink": attention_sink,
    }


def _detached(threshold: PerHead) -> PerHead:
    """Detach a threshold, because tuned thresholds are parameters of a module."""
    return threshold.detach() if isinstance(threshold, Tensor) else threshold


def _similarity_threshold(simthreshd1: PerHead) -> PerHead | None:
    """Convert ``simthreshd1``; 0 or less becomes None, because similarity is never negative."""
    check_range("simthreshd1", simthreshd1, -math.inf, 1.0, "[-inf, 1]")
    if isinstance(simthreshd1, Tensor):
        return simthreshd1.detach().clamp(min=0.0)
    return simthreshd1 if simthreshd1 > 0 else None


def _pv_threshold(pvthreshd: PerHead) -> PerHead | None:
    """Convert ``pvthreshd``, a positive number of log2 units, to a negative natural logarithm.

    Return None if nothing is skipped, as far as this is known without synchronization. On a CPU, any threshold selects
    a slow simulation.
    """
    check_range("pvthreshd", pvthreshd, 0.0, math.inf, "(0, inf]")
    if not isinstance(pvthreshd, Tensor):
        return None if pvthreshd >= PV_THRESHOLD_OFF else -math.log(2.0) * pvthreshd
    log2_units = pvthreshd.detach().float()
    off = log2_units >= PV_THRESHOLD_OFF
    if off.device.type == "cpu" and not torch.compiler.is_compiling() and bool(off.all()):
        return None
    return torch.where(off, -math.inf, -math.log(2.0) * log2_units)


def _kept_blocks(mask_id: Tensor | None, attention_sink: bool, shape: Shape, device: torch.device) -> Tensor:
    """Convert ``mask_id`` to a bool tensor. Masks are not broadcast, so that masks of other block sizes raise."""
    checks.check_flag("attention_sink", attention_sink)
    full = (shape.batch, shape.heads, shape.q_blocks, shape.kv_blocks)
    if mask_id is None:
        return torch.ones(full, dtype=torch.bool, device=device)
    if not isinstance(mask_id, Tensor) or mask_id.is_floating_point() or mask_id.is_complex():
        got = mask_id.dtype if isinstance(mask_id, Tensor) else type(mask_id).__name__
        raise TypeError(f"mask_id: expected a tensor of integers or bools, or None, got {got}")
    if tuple(mask_id.shape) != full:
        hint = ""
        if tuple(mask_id.shape[-2:]) == (ceil_div(shape.q_len, BLOCK_K), ceil_div(shape.kv_len, BLOCK_Q)):
            hint = (
                f": these are blocks of {BLOCK_K} x {BLOCK_Q}, the published code's geometry on Hopper; here it is "
                f"{BLOCK_Q} x {BLOCK_K} on every device (docs/migration.md converts masks)"
            )
        raise ValueError(
            f"mask_id: expected (B, H, ceil(S_q / {BLOCK_Q}), ceil(S_k / {BLOCK_K})) = {full} for {shape.q_len} "
            f"queries and {shape.kv_len} keys, got {tuple(mask_id.shape)}{hint}"
        )
    kept = mask_id != 0
    if attention_sink:
        kept[..., 0] = True
    return kept


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    smooth_k: bool,
    tensor_layout: str,
    output_dtype: torch.dtype | None,
    return_sparsity: bool,
) -> Shape:
    """Check the arguments and return the sizes of the call."""
    if smooth_k is not True:
        raise NotImplementedError(
            f"smooth_k: expected True (smoothing only changes the precision of quantization), got {smooth_k!r}"
        )
    if output_dtype is not None and not (isinstance(output_dtype, torch.dtype) and output_dtype.is_floating_point):
        raise TypeError(f"output_dtype: expected a floating-point torch.dtype or None, got {output_dtype!r}")
    checks.check_choice("tensor_layout", tensor_layout, checks.LAYOUTS)
    checks.check_flag("return_sparsity", return_sparsity)
    *_, shape = validation.check_query_key_value(q, k, v, tensor_layout, enable_gqa=True)
    obstacle = dense_rules.unsupported(shape, dropout_p, needs_grad=False)  # `sparge.attention` checks gradients
    if obstacle is not None:
        raise NotImplementedError(obstacle.message)
    return shape


def _converted(output: Any, dtype: torch.dtype | None) -> Tensor:
    """Convert the output to a dtype, and make it contiguous: callers of SpargeAttn use ``view`` on it."""
    assert isinstance(output, Tensor)
    return output.to(output.dtype if dtype is None else dtype).contiguous()
