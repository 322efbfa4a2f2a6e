"""The stages in order: statistics -> quantization, scores -> selection -> attention.

In a replayed call, which is one CUDA graph, some stages run concurrently: statistics of keys and of queries; then
selection, quantization, and quantization of the block means.

    prepare           run all stages before the attention kernel, in shared passes over Q, K, V and the mask
    predict           compute the block mask only
    attend            compute attention over a given block mask, or over every visible block
    dense             compute attention over every visible block, by torch's SDPA if it supports the call
    attention         predict and attend

``launcher`` launches the attention kernel of the Triton or the Hopper backend; all other stages are shared. No stage
synchronizes with the device. `stages.key_mask` reads bool masks of keys, `stages.mask_blocks` all other masks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.backends.gpu.launch import per_head_tensor, zeros_like
from sparge.backends.gpu.operands import AttentionLauncher, MeanOperands, Operands
from sparge.backends.gpu.peak_handling import peak_handling
from sparge.backends.gpu.replay import Replay, in_branch, recorded, register_constant, replayed
from sparge.backends.gpu.stages.key_mask import has_key_mask, key_mask
from sparge.backends.gpu.stages.mask_blocks import MaskFacts, mask_blocks
from sparge.backends.gpu.stages.order import moved_copy
from sparge.backends.gpu.stages.peaks import mark_peaks
from sparge.backends.gpu.stages.quantize import QuerySummary, quantize_key_value, summarize_query
from sparge.backends.gpu.stages.replacement import replaced_bias
from sparge.backends.gpu.stages.score import block_probabilities, score_inputs
from sparge.backends.gpu.stages.select import select
from sparge.backends.gpu.stages.summary import KeyValueSummary, summarize_key_value
from sparge.backends.output_layout import is_tokens_first
from sparge.call import Call, interned
from sparge.masks.block_mask import BlockMask
from sparge.masks.ordering import TokenOrder, order_of
from sparge.masks.window import Window
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
    """Compute the operands of the attention kernel, and the predicted block mask; each is None unless requested.

    Args:
        value: V; None unless operands are requested.
        with_mask: whether to predict a block mask.
        with_operands: whether to compute the operands.
        mask: a given block mask, if none is predicted. It determines the biases of the means of skipped blocks.
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
    """Return the selected block mask, and the order of query blocks and the bias of means if they are computed."""
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
        bias: the bias if `select` computed it; None for a given block mask.
    """
    assert mask is not None and key_value.means is not None
    key, value, block_bias, usable = key_value.means
    key_scale = exact_key = key
    if call.is_quantized:
        key, key_scale, value = quantize_key_value(key, value, key_value.scales, call, usable, are_means=True)
    if bias is None:
        bias = replaced_bias(mask, block_bias, call)
    return MeanOperands(key, value, key_scale, exact_key, bias)


def predict(query: Tensor, key: Tensor, call: Call) -> BlockMask:
    """Select the blocks of the attention map to compute. See `reference.predict`."""

    def run() -> tuple[Tensor, Tensor, Tensor]:
        _, mask = prepare(query, key, None, call, with_mask=True, with_operands=False)
        assert mask is not None
        return lists_of(mask)

    counts, indices, visible = replayed(recordings_of(call), "predict", (query, key, call.attn_mask), run)
    return BlockMask(counts, indices, visible, call.shape.q_len, call.shape.kv_len, window=call.window)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask | None,
    call: Call,
    *,
    launcher: AttentionLauncher,
    totals: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention over a given block mask, or over every visible block. See `reference.attention`."""
    lists: list[Tensor] = []
    if mask is not None:  # made contiguous here, because a call in which torch copies a tensor cannot be replayed
        lists = [x.contiguous() for x in lists_of(mask)]
        mask = BlockMask(lists[0], lists[1], lists[2], mask.q_len, mask.kv_len, window=mask.window)

    def run() -> tuple[Tensor, Tensor]:
        operands, _ = prepare(query, key, value, call, with_mask=False, with_operands=True, mask=mask)
        assert operands is not None
        return launcher(operands, mask, call, totals=totals)

    inputs = (*inputs_of(query, key, value, call, totals), *lists)
    return replayed(recordings_of(call), (launcher, mask is None), inputs, run)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    *,
    launcher: AttentionLauncher,
    totals: Tensor | None = None,
    order: TokenOrder | None = None,
) -> tuple[Tensor, Tensor]:
    """Predict and attend with shared passes over K; see `base.Backend.attention_in_order` for ``order``."""
    # Created before recording starts, because torch computes it
    found = None if order is None else order_of(order.grid, order.name, query.device)

    def run() -> tuple[Tensor, Tensor]:
        q, k, v = query, key, value
        if order is not None and found is not None:
            register_constant(found.permutation)
            register_constant(found.inverse)
            q, k, v = (
                moved_copy(tokens, found.permutation, order.start, tokens_first=is_tokens_first(tokens))
                for tokens in (query, key, value)
            )
        operands, mask = prepare(q, k, v, call, with_mask=True, with_operands=True)
        assert operands is not None
        output, lse = launcher(operands, mask, call, totals=totals)
        if order is not None and found is not None:
            output = moved_copy(output, found.inverse, order.start, tokens_first=True)
        return output, lse

    kind = launcher if order is None else (launcher, order)
    return replayed(recordings_of(call), kind, inputs_of(query, key, value, call, totals), run)


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    *,
    with_lse: bool,
    may_use_torch: bool,
    launcher: AttentionLauncher,
) -> tuple[Tensor, Tensor]:
    """Compute attention over every visible block. The LSE is empty if torch's SDPA computes the output."""
    if may_use_torch:
        if call.is_causal and call.shape.q_len == 1:  # the only query is the last: causality hides no key from it
            call = interned(replace(call, is_causal=False, window=Window(call.window.left)))
        if not with_lse and torch_serves(query, call):
            output = F.scaled_dot_product_attention(
                query, key, value, is_causal=call.is_causal, scale=call.scale, enable_gqa=call.shape.group > 1
            )
            return output, query.new_empty(0, dtype=torch.float32)
    return attend(query, key, value, None, call, launcher=launcher)


def torch_serves(query: Tensor, call: Call) -> bool:
    """Return whether SDPA has a fast kernel for a call.

    SDPA aligns causality top-left, so bottom-right causality and windows would need a full (S_q x S_k) mask. Our kernel
    only visits the blocks inside of the window.
    """
    shape = call.shape
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and not call.is_quantized
        and call.attn_mask is None
        and (call.window == Window() or (call.window == Window(None, 0) and shape.q_len == shape.kv_len))
        and shape.head_dim == shape.value_dim
        and shape.head_dim % 8 == 0
    )


def recorded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    *,
    launcher: AttentionLauncher,
    totals: Tensor | None,
    blocks: BlockMask | None = None,
    order: TokenOrder | None = None,
) -> Replay | None:
    """Return the recording of `attention` or `attend` on such tensors; None if there is none that can be replayed."""
    inputs = inputs_of(query, key, value, call, totals)
    if order is not None:
        return recorded(recordings_of(call), (launcher, order), inputs)
    if blocks is not None:
        return recorded(recordings_of(call), (launcher, False), (*inputs, *lists_of(blocks)))
    return recorded(recordings_of(call), (launcher, True) if isinstance(call.sparsity, Dense) else launcher, inputs)


def lists_of(mask: BlockMask) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three tensors of a block mask."""
    return mask.kv_num_blocks, mask.kv_indices, mask.visible_num_blocks


def inputs_of(
    query: Tensor, key: Tensor, value: Tensor, call: Call, totals: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the tensors that a call reads and may differ between calls, and existing tensors that it writes to."""
    tensors = query, key, value, call.attn_mask, totals
    return tensors if call.segments is None else (*tensors, call.segments.output, call.segments.lse)


def recordings_of(call: Call) -> dict[Any, Any] | None:
    """Return the recordings of a call; None if it cannot be recorded, because torch computes per-head tensors."""
    return None if call.has_per_head_numbers else call.recordings
