"""The stages in order: statistics -> codes, scores -> selection -> attention.

    prepare           everything before the attention kernel, in shared passes over Q, K, V and the mask
    predict           the mask alone
    attend            attention over a given mask, or over every visible block
    attention         prepare, then attend

The last stage is given: ``launcher`` starts Triton's attention kernel or Hopper's; all other stages are shared. Nothing
here waits for the device. Bool masks of keys are reduced to where keys begin to be seen, by torch; all others are read
by `stages.mask_blocks`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparge.backends.base import Candidates
from sparge.backends.cuda.launch import per_head_tensor, zeros_like
from sparge.backends.cuda.operands import AttentionLauncher, MeanOperands, Operands
from sparge.backends.cuda.peak_handling import peak_handling
from sparge.backends.cuda.replay import Replay, recorded, replayed
from sparge.backends.cuda.stages.block_rows import RowArguments
from sparge.backends.cuda.stages.budget import count_budget
from sparge.backends.cuda.stages.mask_blocks import MaskBlocks, mask_blocks
from sparge.backends.cuda.stages.quantize import KeyValueCodes, quantize_key_value, summarize_query
from sparge.backends.cuda.stages.replacement import replaced_bias
from sparge.backends.cuda.stages.score import block_probabilities, score_inputs
from sparge.backends.cuda.stages.select import select, select_rows
from sparge.backends.cuda.stages.summary import KeyValueSummary, summarize_key_value
from sparge.block_mask import BlockMask
from sparge.call import Call
from sparge.config import BUDGET_LEVELS, Dense, TopK
from sparge.layout import is_tokens_first
from sparge.visibility import SeenTokens, find_visibility, first_seen_keys

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
    """Operands for the attention kernel and the predicted mask, each None where it is not asked for.

    Args:
        value: None where no operands are asked for.
        mask: the given one, where none is asked for.
    """
    shape, attn_mask = call.shape, call.attn_mask
    has_scores = with_mask and not isinstance(call.sparsity, Dense)
    quantizes = with_operands and call.is_quantized
    replaces = with_operands and call.replaces_skipped
    has_similarity = has_scores and call.selection.similarity_threshold is not None
    inputs = score_inputs(call.score) if has_scores else None
    seen, blocks = _seen(call, query.device, has_scores=has_scores)
    key_value = summarize_key_value(
        query,
        key,
        key if value is None else value,
        call,
        seen,
        means=has_scores,
        variance=inputs is not None and inputs.variance,
        blocks=replaces,
        codes=quantizes,
        similarity=has_similarity,
    )
    summary = summarize_query(
        query,
        key_value,
        call,
        seen,
        codes=quantizes,
        parts=inputs.parts(call.score) if inputs is not None else 0,
        similarity=has_similarity,
    )
    order, bias = None if call.segments is None else call.segments.order, None
    if with_mask:
        first_seen = first_query = threshold = None
        if attn_mask is not None and blocks is None:
            first_seen, first_query = first_seen_keys(shape, call.window, attn_mask)
        rules = call
        if has_scores:
            threshold = per_head_tensor(call.selection.similarity_threshold, shape, query.device)
            probability = block_probabilities(
                query, key_value, summary, call, first_seen, first_query, threshold, blocks
            )
        else:
            rules = replace(call, sparsity=ALL_BLOCKS)
            probability = zeros_like(query, shape.batch * shape.heads, shape.q_blocks, shape.kv_blocks)
        similarities = summary.similarity, key_value.key_similarity
        mask, shared, bias = select(
            probability, *similarities, rules, first_seen, threshold, blocks, key_value.block_bias
        )
        order = order if shared is None else shared
    if not with_operands:
        return None, mask
    assert value is not None
    dtype, key_scale, mean_codes = query.dtype, key, None
    tokens_first = call.segments is not None or is_tokens_first(query)
    if quantizes:
        marking = summary if peak_handling(call) == "marked" else None
        keys_seen = seen.keys if seen else None
        codes, mean_codes = quantize_key_value(key, value, key_value, call, keys_seen, marking)
        query, key, key_scale, value = summary.codes, codes.key, codes.key_scale, codes.value
    operands = Operands(
        query=query,
        key=key,
        value=value,
        query_scale=summary.scale,
        key_scale=key_scale,
        value_scale=key_value.value_scale,
        lse_shift=summary.lse_shift,
        dtype=dtype,
        tokens_first=tokens_first,
        keys_seen=seen.keys if seen else None,
        means=_means(key_value, mean_codes, bias, mask, call) if replaces else None,
        order=order,
        kind=None if blocks is None else blocks.kind,
    )
    return operands, mask


def _seen(call: Call, device: torch.device, *, has_scores: bool) -> tuple[SeenTokens | None, MaskBlocks | None]:
    """What a mask says of tokens, and of blocks if it says more than which keys are hidden."""
    if call.attn_mask is None:
        return None, None
    if _hides_keys_alone(call.attn_mask, call):
        return find_visibility(call.shape, call.window, call.attn_mask, device), None
    scored, are_means = 0, False
    if has_scores:
        inputs = score_inputs(call.score)
        scored, are_means = inputs.rows(call.score), inputs.are_means
    blocks = mask_blocks(call, scored=scored, are_means=are_means)
    return blocks.tokens, blocks


def _hides_keys_alone(attn_mask: Tensor, call: Call) -> bool:
    """Whether all that a mask says is which keys are hidden, and a row's first visible block follows from that."""
    return attn_mask.shape[2] == 1 and attn_mask.dtype == torch.bool and call.window.left is None


def _means(
    key_value: KeyValueSummary,
    codes: KeyValueCodes | None,
    bias: Tensor | None,
    mask: BlockMask | None,
    call: Call,
) -> MeanOperands:
    """What stands for the blocks that a mask does not keep: their means or the codes of these, and the bias.

    Args:
        bias: of a mask that was selected; None where the mask was given.
    """
    key, value, block_bias = key_value.key_block, key_value.value_block, key_value.block_bias
    assert mask is not None and key is not None and value is not None and block_bias is not None
    key_scale = key
    if codes is not None:
        key, key_scale, value = codes.key, codes.key_scale, codes.value
    return MeanOperands(key, value, key_scale, replaced_bias(mask, block_bias, call) if bias is None else bias)


def summarize_keys(key: Tensor, call: Call) -> tuple[Tensor, ...]:
    """See `base.Backend.summarize_keys`."""
    inputs, shape = score_inputs(call.score), call.shape
    seen, _ = _seen(call, key.device, has_scores=False)
    summary = summarize_key_value(
        key, key, key, call, seen, means=True, variance=inputs.variance, codes=False, similarity=False
    )
    tensors = [summary.mean_high, summary.mean_low, *([summary.variance] if inputs.variance else [])]
    return tuple(tensor.view(shape.batch, shape.kv_heads, shape.kv_blocks, -1) for tensor in tensors)


class CudaCandidates(Candidates):
    """See `base.Candidates`."""

    def __init__(self, query: Tensor, keys: tuple[Tensor, ...], call: Call) -> None:
        inputs, first_seen, first_query = score_inputs(call.score), None, None
        seen, blocks = _seen(call, query.device, has_scores=True)
        if call.attn_mask is not None and blocks is None:
            first_seen, first_query = first_seen_keys(call.shape, call.window, call.attn_mask)
        flat = [tensor.flatten(0, 1).contiguous() for tensor in keys]
        key_value = KeyValueSummary(flat[0], flat[1], flat[-1], query, query, query)
        parts = inputs.parts(call.score)
        summary = summarize_query(query, key_value, call, seen, codes=False, parts=parts, similarity=False)
        probability = block_probabilities(query, key_value, summary, call, first_seen, first_query, None, blocks)
        self._call = call
        self._rows = RowArguments(probability, summary.similarity, None, call, first_seen, None, blocks)

    def kept_by_level(self, kv_blocks: int) -> tuple[Tensor, Tensor]:
        shape = self._call.shape
        kept, sums = count_budget(self._rows, self._call, kv_blocks, shares=False)
        by_row = kept.view(shape.batch, shape.heads, shape.q_blocks, -1)
        return by_row[..., : BUDGET_LEVELS + 1], sums[:, :, BUDGET_LEVELS + 1].sum(1)

    def choose(self, counts: Tensor | None) -> BlockMask:
        counted = None if counts is None else counts.int().contiguous()
        return select_rows(self._rows, self._call, counted).mask


def predict(query: Tensor, key: Tensor, call: Call) -> BlockMask:
    """Stage 1: which blocks of the attention map to compute. See `reference.predict`."""
    _, mask = prepare(query, key, None, call, with_mask=True, with_operands=False)
    assert mask is not None
    return mask


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
    """Attention over a given mask, or over every visible block without one. See `reference.attention`."""
    lists: list[Tensor] = []
    if mask is not None:  # copied here, not by the launcher: a call that copies cannot be replayed
        lists = [x.contiguous() for x in (mask.kv_num_blocks, mask.kv_indices, mask.visible_num_blocks)]
        mask = BlockMask(lists[0], lists[1], lists[2], mask.q_len, mask.kv_len, window=mask.window)

    def run() -> tuple[Tensor, Tensor]:
        operands, _ = prepare(query, key, value, call, with_mask=False, with_operands=True, mask=mask)
        assert operands is not None
        return launcher(operands, mask, call, totals=totals)

    if not _is_replayable(call):
        return run()
    return replayed(call, (launcher, mask is None), (query, key, value, totals, *lists), run)


def attention(
    query: Tensor, key: Tensor, value: Tensor, call: Call, *, launcher: AttentionLauncher, totals: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Prediction and attention, sharing the passes over K."""

    def run() -> tuple[Tensor, Tensor]:
        operands, mask = prepare(query, key, value, call, with_mask=True, with_operands=True)
        assert operands is not None
        return launcher(operands, mask, call, totals=totals)

    if not _is_replayable(call):
        return run()
    return replayed(call, launcher, (query, key, value, totals), run)


def recorded_attention(
    query: Tensor, key: Tensor, value: Tensor, call: Call, *, launcher: AttentionLauncher, totals: Tensor | None
) -> Replay | None:
    """Return what `attention` recorded for such tensors, None if it cannot be replayed."""
    return recorded(call, launcher, (query, key, value, totals)) if _is_replayable(call) else None


def _is_replayable(call: Call) -> bool:
    """Return whether a call launches the same kernels each time and torch computes nothing between them."""
    return call.attn_mask is None and call.segments is None and not call.has_per_head_numbers
