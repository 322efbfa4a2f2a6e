"""Attention over the kept blocks of 128 queries x 64 keys: online softmax, skipping of P V, LSE.

`attention_kernel` calls, in this order:

    tiles       queries, key blocks and results of a program
    coarse      the same attention without quantization, for tiles that INT8 would round too coarsely
    scores      Q K^T, masks, row maxima
    softmax     P, running sums, P V
    means       means that replace skipped blocks
    peaks       small P that FP8 loses beside a peak
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import (
    architecture_of,
    launch,
    padded,
    per_head_tensor,
    seen_argument,
    strides_of,
)
from sparge.backends.gpu.operands import Operands
from sparge.backends.gpu.peak_handling import peak_handling
from sparge.backends.gpu.primitives import (
    BLOCK_K,
    BLOCK_Q,
    FP16_ROOM,
    KEY_GROUPS,
    LOG2_E,
    LOG2_FP8_MAX,
    SMALLEST_SCALE,
    Lengths,
    head_base,
    kernel,
    segment_keys,
    segment_queries,
    segment_sizes,
)
from sparge.backends.gpu.stages.arguments import (
    list_pointers,
    result_buffers,
    sizes_of,
    spec_of,
    tensor_and_strides,
    tensor_or,
)
from sparge.backends.triton import configs
from sparge.backends.triton.arguments import (
    AttentionSpec,
    ExactPointers,
    Head,
    KeptBlocks,
    MaskPointers,
    MeanPointers,
    OperandPointers,
    Queries,
    ResultPointers,
    RunningSums,
    Strides,
    head_mask,
)
from sparge.backends.triton.coarse import ExactQueries, add_coarse, add_coarse_means
from sparge.backends.triton.means import add_means, head_means
from sparge.backends.triton.peaks import add_fp8_loss, far_group_bits
from sparge.backends.triton.scores import step_scores
from sparge.backends.triton.softmax import (
    add_product,
    empty_sums,
    is_negligible,
    load_fp8_values,
    load_step_values,
    next_row_ref,
    step_probability,
)
from sparge.backends.triton.tiles import (
    Results,
    count_skipped,
    full_blocks_of,
    kept_blocks,
    load_lse_shift,
    load_step,
    locate,
    write_results,
)
from sparge.call import Call
from sparge.masks import geometry
from sparge.masks.block_mask import BlockMask
from sparge.numerics import quantization as quant


@kernel
def attention_kernel(
    operand_ptrs,
    exact_ptrs,
    list_ptrs,
    mask_ptrs,
    mean_ptrs,
    result_ptrs,
    threshold_ptr,
    tensor_strides,
    scale,
    heads,
    group,
    q_len,
    kv_len,
    first_offset,
    last_offset,
    q_blocks,
    kv_blocks,
    bias_columns,
    total_q,
    SPEC: tl.constexpr,
):
    """Compute output and LSE of BLOCK_M queries over the key blocks that their query block keeps.

        s        = c_q c_k (q . k) + mask log2 e          in log2 units; c_q includes the softmax scale
        row_ref' = max(row_max, row maximum of s)         FP8: max(row maximum of s, row_max - ROW_REF_RANGE)
        P        = 2^(s - row_ref')
        row_sum' = row_sum 2^(row_ref - row_ref') + row sum of P
        acc'     = acc 2^(row_ref - row_ref') + P V       both skipped if all of s is below a threshold
        output   = acc / row_sum * value scale,  lse = (row_ref + log2 row_sum) ln 2 + lse_shift

    A query that sees no key gets output 0 and LSE -inf.

    Grid: one program for each BLOCK_M queries of each head, in one dimension. Programs follow a given order
    (SPEC.ordered), or else go head by head, starting each causal head with its longest tile. A program visits the kept
    blocks of its query block in ascending order, ``SPEC.blocks`` at a time.

    Args:
        operand_ptrs, exact_ptrs, list_ptrs, mask_ptrs, mean_ptrs, result_ptrs, tensor_strides: see `arguments`.
        threshold_ptr: [H] float32, natural log (SPEC.has_threshold).
        scale: softmax scale.
        first_offset, last_offset: query i sees keys from i + first_offset to i + last_offset, if set in SPEC.
        bias_columns: stride between the mean biases of consecutive query blocks.
        total_q: queries of a pack.
        SPEC: `arguments.AttentionSpec`.
    """
    BLOCK_M: tl.constexpr = SPEC.block_m
    HEAD_DIM_PADDED: tl.constexpr = SPEC.head_dim_padded
    TILES_PER_BLOCK: tl.constexpr = BLOCK_Q // BLOCK_M

    # Prologue: the tile of this program
    pid = tl.program_id(0)
    if SPEC.ordered:
        pid = tl.load(list_ptrs.order + pid // TILES_PER_BLOCK) * TILES_PER_BLOCK + pid % TILES_PER_BLOCK
    tile = locate(pid, heads, group, q_blocks, SPEC)
    indices_base = list_ptrs.kv_indices + tile.flat_q_block * kv_blocks
    key_scale_base = operand_ptrs.key_scale + tile.flat_kv_head * kv_blocks * KEY_GROUPS
    query_base = head_base(operand_ptrs.query, tensor_strides.query, tile.batch, tile.head)
    key_base = head_base(operand_ptrs.key, tensor_strides.key, tile.batch, tile.kv_head)
    value_base = head_base(operand_ptrs.value, tensor_strides.value, tile.batch, tile.kv_head)
    q_start = tl.zeros((), tl.int64)
    padded_q_len, padded_kv_blocks = q_len, kv_blocks
    if SPEC.packed:  # from here on, lengths are those of the segment
        q_start, _ = segment_queries(list_ptrs.segments, tile.batch)
        kv_start, _ = segment_keys(list_ptrs.segments, tile.batch)
        q_len, kv_len, first_offset, last_offset = segment_sizes(
            list_ptrs.segments, tile.batch, first_offset, last_offset
        )
        kv_blocks = tl.cdiv(kv_len, BLOCK_K)
        if not SPEC.is_quantized:  # quantized tensors are padded batches instead of packs
            query_base += q_start * tensor_strides.query[2]
            key_base += kv_start * tensor_strides.key[2]
            value_base += kv_start * tensor_strides.value[2]
    lengths = Lengths(q_len, kv_len, first_offset, last_offset)

    # Load Q
    offs_m = tl.arange(0, BLOCK_M)
    query_positions = tile.number * BLOCK_M + offs_m  # [BLOCK_M]
    channels = tl.arange(0, HEAD_DIM_PADDED)
    query_ptrs = query_base + query_positions.to(tl.int64)[:, None] * tensor_strides.query[2] + channels[None, :]
    if SPEC.is_quantized:
        query = tl.load(query_ptrs)  # [BLOCK_M, HEAD_DIM]
        query_scale_base = operand_ptrs.query_scale + tile.flat_head * q_blocks * BLOCK_Q
        query_scale = tl.load(query_scale_base + query_positions)  # [BLOCK_M]
    else:
        present = (query_positions < q_len)[:, None] & (channels < SPEC.head_dim)[None, :]
        query = tl.load(query_ptrs, mask=present, other=0.0)
        # The row maximum is taken before scaling, so the sign of a negative scale moves into the query.
        query = tl.where(scale < 0, -query, query)
        query_scale = tl.maximum(tl.abs(scale) * LOG2_E, SMALLEST_SCALE)
    queries = Queries(query, query_scale, query_positions)

    # Key blocks to visit, and the subset that needs no element mask
    full_blocks = full_blocks_of(tile, lengths, SPEC)
    blocks = kept_blocks(tile, indices_base, list_ptrs, result_ptrs.totals, lengths, kv_blocks, SPEC)
    key_stride = HEAD_DIM_PADDED if SPEC.is_quantized else tensor_strides.key[2]  # INT8 keys have no gaps
    head = Head(key_base, key_stride, key_scale_base, value_base, tensor_strides.value[2])
    mask = head_mask(mask_ptrs, tensor_strides, tile)
    threshold = 0.0
    if SPEC.has_threshold:
        threshold = tl.load(threshold_ptr + tile.head) * LOG2_E

    P_DTYPE: tl.constexpr = operand_ptrs.value.dtype.element_ty
    sums = empty_sums(SPEC)
    far_steps = tl.zeros((BLOCK_M, KEY_GROUPS), tl.int64)  # one bit per step, see `peaks`
    skipped = 0
    value_scale_ptr, lse_shift_ptr = operand_ptrs.value_scale, operand_ptrs.lse_shift
    results = Results(result_ptrs, value_scale_ptr, lse_shift_ptr, heads, padded_q_len, q_len, q_start, total_q)

    # Coarse tiles: compute everything from unquantized Q and K, and return
    if SPEC.is_quantized:
        scale_bits = tl.load(exact_ptrs.largest_key_scale + tile.flat_kv_head)
        is_coarse = tl.max(query_scale, 0) * scale_bits.to(tl.float32, bitcast=True) >= SPEC.coarse_unit
        if is_coarse:
            # `scale_bits >> 31` is 0, because scales are positive, but the compiler cannot assume this. It therefore
            # computes the coordinates again here, instead of keeping them in registers across the main loop.
            coarse_tile = locate(pid + (scale_bits >> 31), heads, group, q_blocks, SPEC)
            exact_query_base = head_base(
                exact_ptrs.query, tensor_strides.exact_query, coarse_tile.batch, coarse_tile.head
            )
            exact_key_base = head_base(exact_ptrs.key, tensor_strides.exact_key, coarse_tile.batch, coarse_tile.kv_head)
            if SPEC.packed:
                exact_query_base += q_start * tensor_strides.exact_query[2]
                exact_key_base += kv_start * tensor_strides.exact_key[2]
            exact_queries = ExactQueries(
                base=exact_query_base,
                stride=tensor_strides.exact_query[2],
                positions=coarse_tile.number * BLOCK_M + offs_m,
                shift=load_lse_shift(results, coarse_tile, BLOCK_M) * LOG2_E,
                scale=scale * LOG2_E,
            )
            exact_blocks = KeptBlocks(
                indices_base=list_ptrs.kv_indices + coarse_tile.flat_q_block * padded_kv_blocks,
                first=blocks.first,
                count=blocks.count,
            )
            exact_head = Head(
                key_base=exact_key_base,
                key_stride=tensor_strides.exact_key[2],
                key_scale_base=key_scale_base,
                value_base=head_base(operand_ptrs.value, tensor_strides.value, coarse_tile.batch, coarse_tile.kv_head),
                value_stride=tensor_strides.value[2],
            )
            exact_mask = head_mask(mask_ptrs, tensor_strides, coarse_tile)
            sums, skipped = add_coarse(
                sums, exact_queries, exact_head, exact_mask, exact_blocks, lengths, threshold, SPEC
            )
            if SPEC.mean_width:
                means = head_means(
                    mean_ptrs, tensor_strides, coarse_tile, padded_kv_blocks, kv_blocks, bias_columns, lengths, SPEC
                )
                sums = add_coarse_means(sums, exact_queries, means, q_len, SPEC)
            if SPEC.counts_blocks and SPEC.has_threshold:
                count_skipped(results, coarse_tile, skipped, BLOCK_M)
            write_results(sums, results, coarse_tile, SPEC)
            return

    # Main loop over the kept key blocks
    for index in tl.range(0, blocks.count, SPEC.blocks, num_stages=SPEC.stages):
        # Scores
        step = load_step(blocks, index, full_blocks, lengths, SPEC)
        scores = step_scores(queries, head, mask, step, lengths, SPEC)

        # Softmax
        row_max = tl.maximum(sums.row_max, scores.local_max)  # [BLOCK_M]
        row_ref, safe_ref = next_row_ref(row_max, scores.local_max, SPEC)
        is_needed = True
        if SPEC.has_threshold:
            is_skipped = is_negligible(scores.tile, scores.local_max, row_max, threshold, query_positions, q_len)
            is_needed = is_skipped == 0
            if SPEC.counts_blocks:
                skipped += is_skipped
        if is_needed:
            if SPEC.peaks == "every_tile":
                far_steps |= far_group_bits(scores.group_max, scores.local_max, index // SPEC.blocks)
            p_ref = safe_ref - SPEC.log2_one
            probability, total = step_probability(scores, query_scale, p_ref, P_DTYPE, SPEC)
            decay = tl.exp2(sums.row_ref - safe_ref)  # [BLOCK_M]
            row_sum = sums.row_sum * decay + total

            # P V. V is loaded here: any earlier, Triton 3.6 computes wrong addresses of FP8 values.
            if SPEC.has_fp8_values:
                value = load_fp8_values(head, step, SPEC)  # [N, VALUE_DIM]
            else:
                value = load_step_values(head, mask, step, lengths, SPEC)
            accumulator = add_product(sums.accumulator, decay, probability.to(P_DTYPE), value, SPEC)
            sums = RunningSums(accumulator, row_sum, row_max, row_ref)

    if SPEC.counts_blocks and SPEC.has_threshold:
        count_skipped(results, tile, skipped, BLOCK_M)

    # Means of skipped blocks
    if SPEC.mean_width:
        means = head_means(mean_ptrs, tensor_strides, tile, padded_kv_blocks, kv_blocks, bias_columns, lengths, SPEC)
        sums = add_means(sums, queries, means, SPEC)

    # Small P that FP8 lost beside peaks
    if SPEC.peaks != "ignored":
        accumulator = add_fp8_loss(
            sums.accumulator, sums.row_ref, far_steps, queries, head, mask, blocks, lengths, SPEC
        )
        sums = RunningSums(accumulator, sums.row_sum, sums.row_max, sums.row_ref)

    # Epilogue
    write_results(sums, results, tile, SPEC)


def attend(
    operands: Operands, mask: BlockMask | None, call: Call, *, totals: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention over a mask's blocks, or over all visible blocks without one: see `AttentionLauncher`."""
    assert call.quantization in ("none", "int8_fp16", "int8_fp8"), f"no kernel for {call.quantization!r}"
    shape, query = call.shape, operands.query
    placeholder = query
    attn_mask, mask_kind, lowest = call.attn_mask, "none", 0.0
    if attn_mask is not None:
        attn_mask = attn_mask.expand(shape.batch, shape.heads, -1, shape.kv_len)
        mask_kind = "bool" if attn_mask.dtype == torch.bool else "additive"
        lowest = 0.0 if mask_kind == "bool" else torch.finfo(attn_mask.dtype).min
    mask_entries, mask_strides = tensor_and_strides(attn_mask, 4, placeholder)
    kind, kind_strides = tensor_and_strides(operands.kind, 3, placeholder)
    keys_seen, seen_strides = seen_argument(
        operands.keys_seen, (shape.batch, shape.kv_heads, shape.kv_len), placeholder
    )
    threshold = per_head_tensor(call.pv_threshold, shape, query.device)
    output, lse, num_q_blocks = result_buffers(operands, call)
    width, value_width = padded(shape.head_dim), padded(shape.value_dim)
    if operands.value.element_size() == 2:
        # Triton 3.6 miscompiles 16-bit products 32 columns wide on Hopper when the values are not copied asynchronously
        # (unaligned strides): wrong numbers, bad addresses.
        value_width = max(value_width, 64)
    mask_per_query = attn_mask is not None and attn_mask.shape[2] > 1
    config = configs.attention_config(
        call.quantization,
        max(width, value_width),
        architecture=architecture_of(query),
        is_float32=query.dtype == torch.float32,
        has_threshold=threshold is not None,
        has_mask=attn_mask is not None,
        mask_per_query=mask_per_query,
    )
    means = operands.means
    mean_ptrs = MeanPointers(*[placeholder] * 5)
    if means is not None:
        mean_ptrs = MeanPointers(means.key, means.value, means.key_scale, means.exact_key, means.bias)
    log2_one = FP16_ROOM.value if operands.value.dtype == torch.float16 else 0.0
    spec = AttentionSpec(
        quantization=call.quantization,
        is_quantized=call.is_quantized,
        has_fp8_values=call.has_fp8_values,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        head_dim_padded=width,
        value_dim_padded=value_width,
        coarse_unit=quant.coarse_unit(shape.head_dim),
        log2_one=LOG2_FP8_MAX.value if call.has_fp8_values else log2_one,
        dot_precision="tf32x3" if query.dtype == torch.float32 else "tf32",
        **spec_of(call),
        mask=mask_kind,
        mask_per_query=mask_per_query,
        has_kinds=operands.kind is not None,
        lowest=lowest,
        has_threshold=threshold is not None,
        peaks=peak_handling(call),
        all_blocks=mask is None,
        ordered=operands.order is not None,
        tokens_first=operands.tokens_first,
        mean_width=0 if means is None else means.value.shape[3],
        counts_blocks=totals is not None,
        block_m=config.block_m,
        blocks=config.blocks,
        stages=config.stages,
    )
    launch(
        attention_kernel,
        num_q_blocks * (geometry.BLOCK_Q // config.block_m),
        operand_ptrs=OperandPointers(
            query=query,
            key=operands.key,
            value=operands.value,
            query_scale=operands.query_scale,
            key_scale=operands.key_scale,
            value_scale=operands.value_scale,
            lse_shift=operands.lse_shift,
        ),
        exact_ptrs=ExactPointers(operands.exact_query, operands.exact_key, operands.largest_key_scale),
        list_ptrs=list_pointers(operands, mask, call),
        mask_ptrs=MaskPointers(mask_entries, kind, keys_seen),
        mean_ptrs=mean_ptrs,
        result_ptrs=ResultPointers(output, lse, tensor_or(totals, placeholder)),
        threshold_ptr=tensor_or(threshold, placeholder),
        tensor_strides=Strides(
            query=strides_of(query),
            key=strides_of(operands.key),
            value=strides_of(operands.value),
            exact_query=strides_of(operands.exact_query),
            exact_key=strides_of(operands.exact_key),
            mean_key=strides_of(mean_ptrs.key),
            mean_value=strides_of(mean_ptrs.value),
            mask=mask_strides,
            kind=kind_strides,
            seen=seen_strides,
        ),
        scale=call.scale,
        **sizes_of(call),
        bias_columns=0 if means is None else means.bias.shape[1],
        total_q=0 if call.segments is None else call.segments.total_q,
        SPEC=spec,
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.max_registers,
    )
    return output, lse
