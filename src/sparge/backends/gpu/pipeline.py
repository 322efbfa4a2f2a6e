"""The stages before the attention kernel: statistics -> quantization, scores -> selection.

`prepare` runs them in shared passes over Q, K, V and the mask. In a replayed call, some of them run concurrently: first
the statistics of keys and of queries, then selection, quantization, and quantization of the block means.
`stages.key_mask` reads bool masks over keys, and `stages.mask_blocks` reads all other masks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from sparge.backends.gpu.launch import per_head_tensor, zeros_like
from sparge.backends.gpu.operands import MeanOperands, Operands
from sparge.backends.gpu.peak_handling import peak_handling
from sparge.backends.gpu.replay import in_branch, register_constant
from sparge.backends.gpu.stages.key_mask import has_key_mask, key_mask
from sparge.backends.gpu.stages.mask_blocks import MaskFacts, mask_blocks
from sparge.backends.gpu.stages.peaks import mark_peaks
from sparge.backends.gpu.stages.quantize import QuerySummary, quantize_key_value, summarize_query
from sparge.backends.gpu.stages.replacement import replaced_bias
from sparge.backends.gpu.stages.score import block_probabilities, score_inputs
from sparge.backends.gpu.stages.select import select
from sparge.backends.gpu.stages.summary import KeyValueSummary, summarize_key_value
from sparge.backends.output_layout import is_tokens_first
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.options.rules import Dense, TopK

ALL_BLOCKS = TopK(1.0, min_blocks=0, sink=False, diagonal=False)


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    call: Call,
    *,
    with_mask: bool,
    with_operands: bool,
    mask: BlockMask | None = None,
) -> tuple[Operands | None, BlockMask | None]:
    """Compute the operands of the attention kernel, and predict the block mask; each is None unless requested.

    Args:
        value: V; None unless operands are requested.
        with_mask: whether to predict a block mask.
        with_operands: whether to compute the operands.
        mask: the caller's block mask, if none is predicted. It determines which blocks are replaced by their means.
    """
    # Statistics of K and V, and the mask's visible tokens
    has_scores = with_mask and not isinstance(call.sparsity, Dense)
    quantizes = with_operands and call.is_quantized
    replaces = with_operands and call.replaces_skipped and (with_mask or mask is not None)
    has_similarity = has_scores and call.selection.similarity_threshold is not None
    inputs = score_inputs(call.score) if has_scores else None
    facts = mask_facts(call, has_scores=has_scores)
    seen = None if facts is None else facts.tokens
    key_value = summarize_key_value(
        query,
        key,
        key if value is None else value,
        call,
        seen,
        means=has_scores,
        variance=inputs is not None and inputs.variance,
        blocks=replaces,
        quantized=quantizes,
        similarity=has_similarity,
    )
    parts = inputs.parts(call.score) if inputs is not None else 0
    summarize = partial(
        summarize_query,
        query,
        key_value.scales,
        call,
        seen,
        quantized=quantizes,
        parts=parts,
        similarity=has_similarity,
    )
    summary = summarize() if parts or has_similarity else None  # otherwise, Q is summarized beside the selection

    # Selection
    order, bias = None, None
    if call.segments is not None:
        order = call.segments.order
        register_constant(call.segments.table)
        register_constant(order)
    if with_mask:
        with in_branch("selection"):
            mask, shared, bias = _select_mask(query, key_value, summary, call, facts, has_scores=has_scores)
        order = order if shared is None else shared
    if not with_operands:
        return None, mask

    # Quantization
    assert value is not None
    dtype, key_scale, exact_query, exact_key = query.dtype, key, query, key
    tokens_first = call.segments is not None or is_tokens_first(query)
    means = None
    with in_branch("quantization"):
        if quantizes:
            key, key_scale, value = quantize_key_value(key, value, key_value.scales, call, seen.keys if seen else None)
        if summary is None:
            summary = summarize()
    if quantizes:
        query = summary.quantized
    if replaces:
        with in_branch("means"):
            means = _means(key_value, bias, mask, call)
    if peak_handling(call) == "marked":
        with in_branch("quantization"):
            mark_peaks(query, summary.scale, key, key_scale, call)
    operands = Operands(
        query=query,
        key=key,
        value=value,
        query_scale=summary.scale,
        key_scale=key_scale,
        value_scale=key_value.scales.value,
        lse_shift=summary.lse_shift,
        exact_query=exact_query,
        exact_key=exact_key,
        largest_key_scale=key_value.scales.largest_key,
        dtype=dtype,
        tokens_first=tokens_first,
        keys_seen=seen.keys if seen else None,
        means=means,
        order=order,
        kind=None if facts is None else facts.kind,
    )
    return operands, mask


def _select_mask(
    query: Tensor,
    key_value: KeyValueSummary,
    summary: QuerySummary | None,
    call: Call,
    facts: MaskFacts | None,
    *,
    has_scores: bool,
) -> tuple[BlockMask, Tensor | None, Tensor | None]:
    """Select the blocks to compute.

    Returns:
        The block mask, the order in which to process query blocks (or None), and the bias added to the scores of block
        means (None unless skipped blocks are replaced by means).
    """
    shape = call.shape
    query_means, query_similarity = (query, query) if summary is None else (summary.mean, summary.similarity)
    threshold, rules = None, call
    if has_scores:
        threshold = per_head_tensor(call.selection.similarity_threshold, shape, query.device)
        probability = block_probabilities(query, key_value, query_means, call, facts, threshold)
    else:
        rules = replace(call, sparsity=ALL_BLOCKS)
        probability = zeros_like(query, shape.batch * shape.heads, shape.q_blocks, shape.kv_blocks)
    similarities = query_similarity, key_value.key_similarity
    block_bias = None if key_value.means is None else key_value.means.bias
    return select(probability, *similarities, rules, facts, threshold, block_bias)


def mask_facts(call: Call, *, has_scores: bool) -> MaskFacts | None:
    """Return the facts about a call's mask that the stages need; None without a mask."""
    if call.attn_mask is None:
        return None
    if has_key_mask(call):
        return key_mask(call)
    if not has_scores:
        return mask_blocks(call, scored=0)
    inputs = score_inputs(call.score)
    return mask_blocks(call, scored=inputs.rows(call.score), are_means=inputs.are_means)


def _means(key_value: KeyValueSummary, bias: Tensor | None, mask: BlockMask | None, call: Call) -> MeanOperands:
    """Return the means of key blocks, with the bias that hides the means of kept blocks.

    Args:
        bias: the bias that `select` computed; None for the caller's block mask.
    """
    assert mask is not None and key_value.means is not None
    key, value, block_bias, usable = key_value.means
    key_scale = exact_key = key
    if call.is_quantized:
        key, key_scale, value = quantize_key_value(key, value, key_value.scales, call, usable, are_means=True)
    if bias is None:
        bias = replaced_bias(mask, block_bias, call)
    return MeanOperands(key, value, key_scale, exact_key, bias)
