"""The stages in order, for the operators of `ops`: statistics -> codes, scores -> selection -> attention.

    prepare           everything before the attention kernel, in shared passes over Q, K and V
    predict           the mask alone
    attention         over a given mask, or over every visible block
    sparse_attention  prepare, then attend

The last stage has two kernels, Triton's own and Hopper's (``kernels``); all others are shared. Nothing here waits for
the device. Masks with an entry per query, and additive ones, are scored by `torch_predict`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparge.backends.cuda.launch import per_head_tensor
from sparge.backends.cuda.operands import Operands
from sparge.backends.cuda.peaks import way_with_peaks
from sparge.backends.cuda.replay import replayed
from sparge.backends.cuda.stages.quantize import quantize_key_value, read_query
from sparge.backends.cuda.stages.score import block_probabilities
from sparge.backends.cuda.stages.select import select
from sparge.backends.cuda.stages.sinks import mark_sinks
from sparge.backends.cuda.stages.statistics import summarize
from sparge.backends.torch import predict as torch_predict
from sparge.backends.triton import attention as triton_attention
from sparge.block_mask import BlockMask
from sparge.config import Mean, PerHead, Score, Sparsity, TopCdf, TopK
from sparge.geometry import Shape
from sparge.visibility import find_visibility, first_seen_keys


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    shape: Shape,
    *,
    is_causal: bool,
    scale: float,
    attn_mask: Tensor | None = None,
    sparsity: Sparsity | None = None,
    score: Score | None = None,
    always_keep: Sequence[tuple[int, int]] = (),
    quantization: str | None = None,
) -> tuple[Operands | None, BlockMask | None]:
    """Operands for the attention kernel and the predicted mask, each None where it is not asked for.

    Args:
        sparsity, score: how to predict; None makes no mask.
        quantization: "none", "int8_fp8", "int8_fp8_codes" or "int8_fp16" of a ``value``; None makes no operands.
    """
    seen = None if attn_mask is None else find_visibility(shape, is_causal, attn_mask, query.device)
    hides_keys_alone = attn_mask is None or (attn_mask.shape[2] == 1 and attn_mask.dtype == torch.bool)
    rules = sparsity if isinstance(sparsity, TopK | TopCdf) and hides_keys_alone else None
    eight_bits = quantization is not None and quantization != "none"
    fp8_values = quantization in ("int8_fp8", "int8_fp8_codes")
    judge = rules is not None and rules.similarity_threshold is not None
    summary = summarize(
        query,
        key,
        key if value is None else value,
        shape,
        seen,
        scale=scale,
        is_causal=is_causal,
        statistics=rules is not None,
        smoothing=eight_bits,
        value_scales=fp8_values,
        judge=judge,
    )
    facts = read_query(
        query,
        summary,
        shape,
        seen,
        scale=scale,
        is_causal=is_causal,
        codes=eight_bits,
        mean=rules is not None and isinstance(score, Mean),
        similarity=judge,
    )
    mask = None
    if rules is not None:
        assert score is not None
        first_seen, first_query = (None, None) if attn_mask is None else first_seen_keys(shape, is_causal, attn_mask)
        threshold = per_head_tensor(rules.similarity_threshold, shape, query.device)
        probability = block_probabilities(
            query, shape, summary, facts, first_seen, first_query, threshold, score=score, is_causal=is_causal
        )
        mask = select(
            probability,
            shape,
            facts.similarity,
            summary.key_similarity,
            first_seen,
            threshold,
            sparsity=rules,
            is_causal=is_causal,
            always_keep=always_keep,
        )
    elif sparsity is not None:
        mask = torch_predict.predict(
            query,
            key,
            shape,
            sparsity=sparsity,
            score=Mean() if score is None else score,
            is_causal=is_causal,
            scale=scale,
            attn_mask=attn_mask,
            always_keep=always_keep,
        )
    if quantization is None:
        return None, mask
    assert value is not None
    dtype, key_scale = query.dtype, key
    if eight_bits:
        query = facts.codes
        key, key_scale, value = quantize_key_value(key, value, shape, seen, summary, quantization)
    if way_with_peaks(quantization, shape.kv_len) == "known":
        mark_sinks(query, facts.scale, key, key_scale, shape, is_causal=is_causal)
    operands = Operands(
        query=query,
        key=key,
        value=value,
        query_scale=facts.scale,
        key_scale=key_scale,
        value_scale=summary.value_scale,
        lse_shift=facts.lse_shift,
        quantization=quantization,
        dtype=dtype,
        scale=scale,
        is_causal=is_causal,
        attn_mask=attn_mask,
        keys_seen=seen.keys if seen else None,
    )
    return operands, mask


def predict(
    query: Tensor,
    key: Tensor,
    shape: Shape,
    *,
    sparsity: Sparsity,
    score: Score,
    is_causal: bool,
    scale: float,
    attn_mask: Tensor | None = None,
    always_keep: Sequence[tuple[int, int]] = (),
) -> BlockMask:
    """Stage 1: which blocks of the attention map to compute. See `reference.predict`."""
    _, mask = prepare(
        query,
        key,
        None,
        shape,
        is_causal=is_causal,
        scale=scale,
        attn_mask=attn_mask,
        sparsity=sparsity,
        score=score,
        always_keep=always_keep,
    )
    assert mask is not None
    return mask


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask | None,
    shape: Shape,
    *,
    is_causal: bool,
    scale: float,
    attn_mask: Tensor | None = None,
    quantization: str = "none",
    pv_threshold: PerHead | None = None,
    totals: Tensor | None = None,
    kernels: str = "triton",
) -> tuple[Tensor, Tensor]:
    """Attention over a given mask, or over every visible block without one. See `reference.attention`."""
    lists: list[Tensor] = []
    if mask is not None:  # copied here, not by `attend`: a call that copies cannot be replayed
        lists = [x.contiguous() for x in (mask.kv_num_blocks, mask.kv_indices, mask.visible_num_blocks)]
        mask = BlockMask(lists[0], lists[1], lists[2], mask.q_len, mask.kv_len, mask.is_causal)

    def call() -> tuple[Tensor, Tensor]:
        operands, _ = prepare(
            query, key, value, shape, is_causal=is_causal, scale=scale, attn_mask=attn_mask, quantization=quantization
        )
        assert operands is not None
        return attend(operands, mask, shape, pv_threshold=pv_threshold, totals=totals, kernels=kernels)

    if attn_mask is not None or pv_threshold is not None:
        return call()  # some of it is computed by torch
    kind = ("attention", kernels, shape, is_causal, scale, quantization)
    return replayed(kind, (query, key, value, totals, *lists), call)


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    *,
    sparsity: TopK | TopCdf,
    score: Score,
    is_causal: bool,
    scale: float,
    attn_mask: Tensor | None,
    always_keep: Sequence[tuple[int, int]],
    quantization: str,
    pv_threshold: PerHead | None,
    totals: Tensor | None,
    kernels: str = "triton",
) -> tuple[Tensor, Tensor]:
    """Prediction and attention, sharing the passes over K."""

    def call() -> tuple[Tensor, Tensor]:
        operands, mask = prepare(
            query,
            key,
            value,
            shape,
            is_causal=is_causal,
            scale=scale,
            attn_mask=attn_mask,
            sparsity=sparsity,
            score=score,
            always_keep=always_keep,
            quantization=quantization,
        )
        assert operands is not None
        return attend(operands, mask, shape, pv_threshold=pv_threshold, totals=totals, kernels=kernels)

    thresholds = sparsity.similarity_threshold, pv_threshold
    if attn_mask is not None or always_keep or sparsity.is_per_head or any(x is not None for x in thresholds):
        return call()  # some of it is computed by torch
    kind = ("sparse_attention", kernels, shape, sparsity, score, is_causal, scale, quantization)
    return replayed(kind, (query, key, value, totals), call)


def attend(
    operands: Operands,
    mask: BlockMask | None,
    shape: Shape,
    *,
    pv_threshold: PerHead | None = None,
    totals: Tensor | None = None,
    kernels: str = "triton",
) -> tuple[Tensor, Tensor]:
    """The last stage, with Triton's kernel or Hopper's (`dispatch.kernels_for` says which serves a call)."""
    if kernels == "hopper":
        from sparge.backends.hopper import launcher

        return launcher.attend(operands, mask, shape, pv_threshold=pv_threshold, totals=totals)
    assert operands.quantization != "int8_fp8_codes", "dispatch.resolve_quantization refuses what has no kernel"
    return triton_attention.attend(operands, mask, shape, pv_threshold=pv_threshold, totals=totals)
