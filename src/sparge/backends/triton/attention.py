"""Attention over the kept blocks of 128 queries x 64 keys: online softmax, stage-2 skipping, LSE.

FP8 holds fewer octaves than lie between a sink and a long tail. There P counts from the maximum of the latest step
alone, so that its range belongs to a step, not to a row. What is lost beside a peak of the same step, `peaks` adds at
the end. FP8 tensor cores add in 13 bits: each step of 64 or 128 keys gets a fresh accumulator, added in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import (
    architecture_of,
    buffer_like,
    launch,
    list_arguments,
    output_buffer,
    padded,
    per_head_tensor,
    seen_argument,
    segments_argument,
    strides_of,
    window_flags,
    window_offsets,
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
    REACH,
    SMALLEST_SCALE,
    by_group,
    in_fp8_token_order,
    segment_keys,
    segment_queries,
    segment_sizes,
)
from sparge.backends.gpu.stages.mask_blocks import WHOLLY
from sparge.backends.triton import configs
from sparge.backends.triton.coarse import ExactHead, ExactRow, add_coarse, add_coarse_means
from sparge.backends.triton.epilogue import Results, count_skipped, locate, lse_shift, write_rows
from sparge.backends.triton.means import add_means, blocks_with_means
from sparge.backends.triton.peaks import Head, Row, add_lost, bits_of_far
from sparge.backends.triton.softmax import (
    Sums,
    apply_mask,
    block_probability,
    block_scores,
    halves,
    largest_of_groups,
    load_values,
    may_see,
    raw_scores,
    side_by_side,
)
from sparge.call import Call
from sparge.masks import geometry
from sparge.masks.block_mask import BlockMask
from sparge.numerics import quantization as quant

NUMBERS = [
    "scale",
    "heads",
    "group",
    "q_len",
    "kv_len",
    "first_offset",
    "last_offset",
    "q_blocks",
    "kv_blocks",
    "bias_columns",
    "total_q",
]


@triton.jit(do_not_specialize=NUMBERS)
def attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    query_scale_ptr,
    key_scale_ptr,
    value_scale_ptr,
    lse_shift_ptr,
    exact_query_ptr,
    exact_key_ptr,
    largest_key_scale_ptr,
    kv_num_blocks_ptr,
    kv_indices_ptr,
    visible_num_blocks_ptr,
    order_ptr,
    totals_ptr,
    mask_ptr,
    kind_ptr,
    seen_ptr,
    threshold_ptr,
    mean_key_ptr,
    mean_value_ptr,
    mean_scale_ptr,
    mean_exact_key_ptr,
    mean_bias_ptr,
    output_ptr,
    lse_ptr,
    segments_ptr,
    query_strides,
    key_strides,
    value_strides,
    exact_query_strides,
    exact_key_strides,
    mean_key_strides,
    mean_value_strides,
    mask_strides,
    kind_strides,
    seen_strides,
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
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    QUANTIZATION: tl.constexpr,
    COARSE_UNIT: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr,
    MASK: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    HAS_KINDS: tl.constexpr,
    LOWEST: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    PEAKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    ORDERED: tl.constexpr,
    PACKED: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    MEAN_WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Output and LSE of BLOCK_M queries over the key blocks that their query block keeps.

        s      = c_q c_k (q . k) + mask log2 e            in octaves; c_q carries the softmax scale
        t'     = max(t, row maximum of s)                 FP8: max(row maximum of s, largest of all so far - REACH)
        P      = 2^(s - t')
        l'     = l 2^(t - t') + row sum of P
        acc'   = acc 2^(t - t') + P V                     not where HAS_THRESHOLD and all of s lies below it
        output = acc / l * value scale,  lse = (t + log2 l) ln 2 + lse_shift;  0 and -inf for a row that sees nothing

    Grid: one program for each BLOCK_M queries of each head, in one dimension, in a given order (ORDERED); in that of
    heads else, causal rows starting with the longest. A program walks its row's kept blocks in ascending order, BLOCKS
    at a time. Query i sees keys from i + first_offset (HAS_FIRST) to i + last_offset (HAS_LAST). Only the last blocks
    (causal diagonal, ragged end) and the first ones of a window need an element mask, so it is a branch that is seldom
    taken. A tile is coarse where an integer of Q K^T may be worth COARSE_UNIT (`coarse`).

    Reads
        query, key, value      [B, H | Hkv, Sq | Sk, D | Dv], or the codes of `quantize`
        exact_query, exact_key, largest_key_scale    of `operands.Operands`, if these are codes
        query_scale, key_scale, value_scale, lse_shift    float32, of `quantize.QuerySummary` and `reduce_kernel`
        kv_num_blocks [B * H, q_blocks], kv_indices [B * H, q_blocks, kv_blocks], int32 (not ALL_BLOCKS)
        visible_num_blocks     [B * H, q_blocks] int32 (COUNT)
        order                  [B * H * q_blocks] int32 (ORDERED), rows of blocks as they are to be computed
        mask                   [B, H, Sq | 1, Sk] bool or additive (MASK), which keys it leaves: seen [B, Hkv, Sk]
        kind                   [B, H, q_blocks, kv_blocks] int8 (HAS_KINDS), of `mask_blocks`: what is WHOLLY seen needs
                               no entries of the mask
        threshold              [H] float32 (HAS_THRESHOLD), natural log
        mean_key, mean_value, mean_scale, mean_exact_key, mean_bias    of `operands.MeanOperands` (MEAN_WIDTH, the width
                               of its values)
        segments               of `Segments.table` (PACKED, which needs ORDERED and TOKENS_FIRST)
    Writes
        output [B, H, Sq, Dv] in its dtype, TOKENS_FIRST [B, Sq, H, Dv], PACKED [total_q, H, Dv]
        lse [B, H, Sq] float32, PACKED [H, total_q]
        totals                 [3] int64 (COUNT), to which kept and visible blocks and, if HAS_THRESHOLD, halves of kept
                               blocks whose P V was skipped are added; that is one step of one program (`configs`)
    """
    is_quantized: tl.constexpr = QUANTIZATION != "none"
    has_fp8_values: tl.constexpr = QUANTIZATION == "int8_fp8"
    tiles_per_block: tl.constexpr = BLOCK_Q // BLOCK_M
    pid = tl.program_id(0)
    if ORDERED:
        pid = tl.load(order_ptr + pid // tiles_per_block) * tiles_per_block + pid % tiles_per_block
    is_reversed: tl.constexpr = HAS_LAST and not ORDERED
    place = locate(pid, heads, group, q_blocks, tiles_per_block, is_reversed)
    tile, q_block, flat_head, batch, head, kv_head, flat_kv_head, row = place
    indices_base = kv_indices_ptr + row * kv_blocks
    key_scale_base = key_scale_ptr + flat_kv_head * kv_blocks * KEY_GROUPS
    mean_scale_base = mean_scale_ptr + flat_kv_head * tl.cdiv(kv_blocks, BLOCK_K) * KEY_GROUPS
    query_base = query_ptr + batch * query_strides[0] + head * query_strides[1]
    key_base = key_ptr + batch * key_strides[0] + kv_head * key_strides[1]
    value_base = value_ptr + batch * value_strides[0] + kv_head * value_strides[1]
    q_start = tl.zeros((), tl.int64)
    padded_q_len, padded_kv_blocks = q_len, kv_blocks
    if PACKED:  # from here on the sizes are the segment's own
        q_start, _ = segment_queries(segments_ptr, batch)
        kv_start, _ = segment_keys(segments_ptr, batch)
        q_len, kv_len, first_offset, last_offset = segment_sizes(segments_ptr, batch, first_offset, last_offset)
        kv_blocks = tl.cdiv(kv_len, BLOCK_K)
        if not is_quantized:
            query_base += q_start * query_strides[2]
            key_base += kv_start * key_strides[2]
            value_base += kv_start * value_strides[2]

    offs_m = tl.arange(0, BLOCK_M)
    query_positions = tile * BLOCK_M + offs_m
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    query_ptrs = query_base + query_positions.to(tl.int64)[:, None] * query_strides[2] + offs_d[None, :]
    if not is_quantized:
        present = (query_positions < q_len)[:, None] & (offs_d < HEAD_DIM)[None, :]
        query = tl.load(query_ptrs, mask=present, other=0.0)
        # Scores are scaled after their maximum is taken, so a negative scale moves into the query.
        query = tl.where(scale < 0, -query, query)
        query_scale = tl.maximum(tl.abs(scale) * LOG2_E, SMALLEST_SCALE)
    else:
        query = tl.load(query_ptrs)
        query_scale = tl.load(query_scale_ptr + flat_head * q_blocks * BLOCK_Q + query_positions)  # [M]

    plain_blocks = kv_len // BLOCK_K  # blocks from here on need an element mask; they are the last of a list
    if HAS_LAST:
        plain_blocks = tl.minimum(plain_blocks, tl.maximum(tile * BLOCK_M + last_offset + 1, 0) // BLOCK_K)
    first_plain = 0  # and blocks before here, the first of a list
    if HAS_FIRST:
        first_plain = tl.maximum(tile * BLOCK_M + (BLOCK_M - 1 + BLOCK_K - 1) + first_offset, 0) // BLOCK_K
    first_block = 0  # of all that are visible
    if ALL_BLOCKS:
        count = kv_blocks
        if HAS_LAST:
            last_key = tl.minimum((q_block + 1) * BLOCK_Q, q_len) - 1 + last_offset
            count = tl.minimum(kv_blocks, tl.maximum(last_key + BLOCK_K, 0) // BLOCK_K)
        if HAS_FIRST:
            first_block = tl.maximum(tile * BLOCK_M + first_offset, 0) // BLOCK_K
            count = tl.maximum(count - first_block, 0)
    else:
        count = tl.load(kv_num_blocks_ptr + row)
    if COUNT and tile % tiles_per_block == 0:  # first, because at the end it would cost registers in the loop
        tl.atomic_add(totals_ptr, count.to(tl.int64), sem="relaxed")
        tl.atomic_add(totals_ptr + 1, tl.load(visible_num_blocks_ptr + row).to(tl.int64), sem="relaxed")

    count = tl.where(tile * BLOCK_M < q_len, count, 0)  # a tile without queries

    key_stride = HEAD_DIM_PADDED if is_quantized else key_strides[2]  # codes lie close together
    mask_base = mask_ptr + batch * mask_strides[0] + head * mask_strides[1]
    kind_base = kind_ptr + batch * kind_strides[0] + head * kind_strides[1] + q_block.to(tl.int64) * kind_strides[2]
    seen_base = seen_ptr + batch * seen_strides[0] + kv_head * seen_strides[1]
    threshold = 0.0
    if HAS_THRESHOLD:
        threshold = tl.load(threshold_ptr + head) * LOG2_E

    columns: tl.constexpr = BLOCK_K * BLOCKS
    offs_n = tl.arange(0, columns)
    within = offs_n % BLOCK_K
    offs_dv = tl.arange(0, VALUE_DIM_PADDED).to(tl.int64)  # times a stride that is the number of keys
    # P times 448 fills E4M3's range, P times 2^15 FP16's; the row sums carry the same factor.
    p_dtype: tl.constexpr = tl.float8e4nv if has_fp8_values else value_ptr.dtype.element_ty
    log2_unit: tl.constexpr = LOG2_FP8_MAX if has_fp8_values else FP16_ROOM if p_dtype == tl.float16 else 0.0
    two_units: tl.constexpr = BLOCKS == 2 and is_quantized
    accumulator = tl.zeros((BLOCK_M, VALUE_DIM_PADDED), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    origin = row_max  # what sums count from
    far_steps = tl.zeros((BLOCK_M, KEY_GROUPS), tl.int64)
    skipped = 0
    results = Results(
        output_ptr,
        lse_ptr,
        totals_ptr,
        value_scale_ptr,
        lse_shift_ptr,
        heads,
        padded_q_len,
        q_len,
        q_start,
        total_q,
    )

    if is_quantized:
        scale_bits = tl.load(largest_key_scale_ptr + flat_kv_head)
        is_coarse = tl.max(query_scale, 0) * scale_bits.to(tl.float32, bitcast=True) >= COARSE_UNIT
        if is_coarse:
            # The sign of a scale is 0, which the compiler does not know: what follows from `at` is computed here, and
            # not kept in registers across the main loop because the end of the kernel needs it as well.
            at = locate(pid + (scale_bits >> 31), heads, group, q_blocks, tiles_per_block, is_reversed)
            exact_query_base = exact_query_ptr + at.batch * exact_query_strides[0] + at.head * exact_query_strides[1]
            exact_key_base = exact_key_ptr + at.batch * exact_key_strides[0] + at.kv_head * exact_key_strides[1]
            if PACKED:
                exact_query_base += q_start * exact_query_strides[2]
                exact_key_base += kv_start * exact_key_strides[2]
            exact_row = ExactRow(
                exact_query_base,
                exact_query_strides[2],
                at.number * BLOCK_M + offs_m,
                lse_shift(results, at, BLOCK_M) * LOG2_E,
                scale * LOG2_E,
                kv_indices_ptr + at.row * padded_kv_blocks,
                first_block,
                count,
                q_len,
                kv_len,
                first_offset,
                last_offset,
            )
            sums, skipped = add_coarse(
                Sums(accumulator, row_sum, row_max, origin),
                exact_row,
                ExactHead(
                    exact_key_base,
                    exact_key_strides[2],
                    value_ptr + at.batch * value_strides[0] + at.kv_head * value_strides[1],
                    value_strides[2],
                    mask_ptr + at.batch * mask_strides[0] + at.head * mask_strides[1],
                    mask_strides,
                    seen_ptr + at.batch * seen_strides[0] + at.kv_head * seen_strides[1],
                    seen_strides[2],
                ),
                threshold,
                HEAD_DIM,
                VALUE_DIM,
                HEAD_DIM_PADDED,
                VALUE_DIM_PADDED,
                has_fp8_values,
                log2_unit,
                HAS_FIRST,
                HAS_LAST,
                MASK,
                MASK_PER_QUERY,
                LOWEST,
                HAS_THRESHOLD,
                ALL_BLOCKS,
                BLOCK_M,
            )
            if MEAN_WIDTH:
                mean_begin, mean_end = blocks_with_means(
                    at.q_block, q_len, kv_blocks, first_offset, last_offset, HAS_FIRST, HAS_LAST
                )
                sums = add_coarse_means(
                    sums,
                    exact_row,
                    mean_bias_ptr + at.row * bias_columns,
                    mean_exact_key_ptr + at.flat_kv_head * padded_kv_blocks * HEAD_DIM_PADDED,
                    mean_value_ptr + at.batch * mean_value_strides[0] + at.kv_head * mean_value_strides[1],
                    mean_value_strides[2],
                    kv_blocks,
                    mean_begin,
                    mean_end,
                    HEAD_DIM,
                    HEAD_DIM_PADDED,
                    VALUE_DIM_PADDED,
                    MEAN_WIDTH,
                    has_fp8_values,
                    log2_unit,
                    BLOCK_M,
                )
            if COUNT and HAS_THRESHOLD:
                count_skipped(results, at, skipped, BLOCK_M)
            write_rows(
                sums,
                results,
                at,
                VALUE_DIM,
                VALUE_DIM_PADDED,
                is_quantized,
                has_fp8_values,
                log2_unit,
                PACKED,
                TOKENS_FIRST,
                BLOCK_M,
            )
            return

    for position in tl.range(0, count, BLOCKS, num_stages=STAGES):
        block = first_block + position if ALL_BLOCKS else tl.load(indices_base + position)
        last_block = block
        blocks = tl.where(offs_n < BLOCK_K, block, block)
        if BLOCKS == 2:
            next_position = tl.minimum(position + 1, count - 1)
            last_block = first_block + next_position if ALL_BLOCKS else tl.load(indices_base + next_position)
            blocks = tl.where(offs_n < BLOCK_K, block, last_block)
        first_keys = blocks.to(tl.int64) * BLOCK_K
        key_positions = blocks * BLOCK_K + within
        is_plain = tl.maximum(block, last_block) < plain_blocks
        if HAS_FIRST:
            is_plain = is_plain & (tl.minimum(block, last_block) >= first_plain)
        if BLOCKS == 2:
            missing = position + 1 >= count
            is_plain = is_plain & (missing == 0)
            key_positions = tl.where((offs_n >= BLOCK_K) & missing, kv_len, key_positions)
        in_range = key_positions < kv_len

        key_ptrs = key_base + (first_keys * key_stride)[:, None] + within[:, None] * key_stride + offs_d[None, :]
        if not is_quantized:
            key_present = in_range[:, None]
            if HEAD_DIM != HEAD_DIM_PADDED:
                key_present = key_present & (offs_d < HEAD_DIM)[None, :]
            key = tl.load(key_ptrs, mask=key_present, other=0.0)
            raw = tl.dot(query, key.T, input_precision=DOT_PRECISION)
        else:
            raw = raw_scores(query, key_ptrs, BLOCK_M, columns)
            groups = key_scale_base + tl.arange(0, KEY_GROUPS)
            unit = query_scale[:, None] * tl.abs(tl.load(groups + block * KEY_GROUPS))[None, :]  # [M, groups]
            if two_units:
                last_unit = query_scale[:, None] * tl.abs(tl.load(groups + last_block * KEY_GROUPS))[None, :]

        if MASK != "none":
            scores = block_scores(raw, unit, BLOCK_M) if is_quantized else raw * query_scale
            is_whole = False
            if HAS_KINDS:
                is_whole = tl.load(kind_base + block) == WHOLLY
                if BLOCKS == 2:
                    is_whole = is_whole & (tl.load(kind_base + last_block) == WHOLLY) & (missing == 0)
            if is_whole == 0:
                scores = apply_mask(
                    scores,
                    may_see(query_positions, key_positions, kv_len, first_offset, last_offset, HAS_FIRST, HAS_LAST),
                    query_positions,
                    key_positions,
                    mask_base,
                    mask_strides[2],
                    mask_strides[3],
                    q_len,
                    kv_len,
                    MASK,
                    MASK_PER_QUERY,
                    LOWEST,
                )
            group_max = tl.max(tl.max(by_group(scores, BLOCK_M), 3), 1) if BLOCKS == 1 else scores
            local_max = tl.max(group_max, 1)
        else:
            if is_plain == 0:
                allowed = may_see(
                    query_positions, key_positions, kv_len, first_offset, last_offset, HAS_FIRST, HAS_LAST
                )
                raw = tl.where(allowed, raw, float("-inf"))
            if two_units:
                first_raw, last_raw = halves(raw, BLOCK_M)
                group_max = largest_of_groups(first_raw, unit, BLOCK_M)
                group_max = tl.maximum(group_max, largest_of_groups(last_raw, last_unit, BLOCK_M))
                local_max = tl.max(group_max, 1)
            elif is_quantized:
                group_max = largest_of_groups(raw, unit, BLOCK_M)
                local_max = tl.max(group_max, 1)
            else:
                local_max = tl.max(raw, 1) * query_scale

        new_max = tl.maximum(row_max, local_max)
        new_origin = new_max
        if has_fp8_values:
            new_origin = tl.maximum(local_max, new_max - REACH)
        safe_origin = tl.where(new_origin == float("-inf"), 0.0, new_origin)
        needed = True
        if HAS_THRESHOLD:
            gap = tl.where(local_max == float("-inf"), float("-inf"), local_max - new_max)
            # A maximum ignores NaN, and NaN must not be skipped.
            broken = (scores != scores) if MASK != "none" else (raw != raw)
            below = ((gap < threshold) & (tl.max(broken.to(tl.int32), 1) == 0)) | (query_positions >= q_len)
            is_skipped = tl.min(below.to(tl.int32))
            needed = is_skipped == 0
            if COUNT:
                skipped += is_skipped
        if needed:
            value_ptrs = value_base + first_keys[None, :] + within[None, :] + offs_dv[:, None] * value_strides[2]
            if PEAKS == "every_tile":
                far_steps |= bits_of_far(group_max, local_max, position // BLOCKS)
            one = safe_origin - log2_unit  # the score whose P is stored as 1
            if MASK != "none":
                probability = tl.exp2(scores - one[:, None])
                total = tl.sum(probability, 1)
            elif two_units:
                first = block_probability(first_raw, unit, one, BLOCK_M)
                last = block_probability(last_raw, last_unit, one, BLOCK_M)
                total = tl.sum(first + last, 1)
                probability = side_by_side(first.to(p_dtype), last.to(p_dtype), BLOCK_M)
            elif is_quantized:
                probability = block_probability(raw, unit, one, BLOCK_M)
                total = tl.sum(probability, 1)
            else:
                probability = tl.exp2(raw * query_scale - one[:, None])
                total = tl.sum(probability, 1)
            decay = tl.exp2(origin - safe_origin)
            row_sum = row_sum * decay + total
            row_max = new_max
            origin = new_origin

            if has_fp8_values:
                value = tl.load(value_ptrs).T  # loaded here: any earlier, Triton 3.6 gets addresses wrong
                tile_sum = tl.dot(in_fp8_token_order(probability.to(p_dtype)), value)
                accumulator = accumulator * decay[:, None] + tile_sum
            else:
                value_ptrs = value_base + (first_keys * value_strides[2])[:, None]
                value_ptrs = value_ptrs + within[:, None] * value_strides[2] + offs_dv[None, :]
                value = load_values(
                    value_ptrs,
                    offs_dv,
                    key_positions,
                    kv_len,
                    first_offset,
                    seen_base,
                    seen_strides[2],
                    VALUE_DIM,
                    VALUE_DIM_PADDED,
                    HAS_FIRST,
                    MASK != "none",
                )
                accumulator = tl.dot(
                    probability.to(p_dtype), value, accumulator * decay[:, None], input_precision=DOT_PRECISION
                )

    if COUNT and HAS_THRESHOLD:
        count_skipped(results, place, skipped, BLOCK_M)

    if MEAN_WIDTH:
        mean_begin, mean_end = blocks_with_means(
            q_block, q_len, kv_blocks, first_offset, last_offset, HAS_FIRST, HAS_LAST
        )
        accumulator, row_sum, row_max, origin = add_means(
            Sums(accumulator, row_sum, row_max, origin),
            query,
            query_scale,
            mean_bias_ptr + row * bias_columns,
            mean_key_ptr + batch * mean_key_strides[0] + kv_head * mean_key_strides[1],
            mean_key_strides[2],
            mean_scale_base,
            mean_value_ptr + batch * mean_value_strides[0] + kv_head * mean_value_strides[1],
            mean_value_strides[2],
            kv_blocks,
            mean_begin,
            mean_end,
            HEAD_DIM_PADDED,
            VALUE_DIM_PADDED,
            MEAN_WIDTH,
            QUANTIZATION,
            DOT_PRECISION,
            BLOCK_M,
        )

    if PEAKS != "ignored":
        accumulator = add_lost(
            accumulator,
            origin,
            far_steps,
            Row(
                query,
                query_scale,
                query_positions,
                indices_base,
                first_block,
                count,
                q_len,
                kv_len,
                first_offset,
                last_offset,
            ),
            Head(key_base, key_scale_base, value_base, value_strides[2], mask_base, mask_strides),
            VALUE_DIM_PADDED,
            HAS_FIRST,
            HAS_LAST,
            MASK,
            MASK_PER_QUERY,
            LOWEST,
            PEAKS,
            ALL_BLOCKS,
            BLOCK_M,
            BLOCKS,
        )

    sums = Sums(accumulator, row_sum, row_max, origin)
    write_rows(
        sums,
        results,
        place,
        VALUE_DIM,
        VALUE_DIM_PADDED,
        is_quantized,
        has_fp8_values,
        log2_unit,
        PACKED,
        TOKENS_FIRST,
        BLOCK_M,
    )


def attend(
    operands: Operands, mask: BlockMask | None, call: Call, *, totals: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over a mask's blocks, or over all visible ones without a mask: see `operands.AttentionLauncher`."""
    assert call.quantization in ("none", "int8_fp16", "int8_fp8"), f"no kernel for {call.quantization!r}"
    shape, query = call.shape, operands.query
    device, stand_in = query.device, operands.query
    attn_mask, mask_kind, lowest = call.attn_mask, "none", 0.0
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(shape.batch, shape.heads, -1, shape.kv_len)
        mask_strides = attn_mask.stride()
        mask_kind = "bool" if attn_mask.dtype == torch.bool else "additive"
        lowest = 0.0 if mask_kind == "bool" else torch.finfo(attn_mask.dtype).min
    keys_seen, seen_strides = seen_argument(operands.keys_seen, (shape.batch, shape.kv_heads, shape.kv_len), stand_in)
    threshold = per_head_tensor(call.pv_threshold, shape, device)
    segments = call.segments
    if segments is None:
        output = output_buffer(operands, shape)
        lse = buffer_like(query, True, shape.batch, shape.heads, shape.q_len)
    else:
        output, lse = segments.output, segments.lse
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
    rows = shape.batch * shape.heads * shape.q_blocks if segments is None else segments.order.numel()
    means = operands.means
    mean_key, mean_value = (query, query) if means is None else (means.key, means.value)
    launch(
        attention_kernel,
        rows * (geometry.BLOCK_Q // config.block_m),
        query_ptr=query,
        key_ptr=operands.key,
        value_ptr=operands.value,
        query_scale_ptr=operands.query_scale,
        key_scale_ptr=operands.key_scale,
        value_scale_ptr=operands.value_scale,
        lse_shift_ptr=operands.lse_shift,
        exact_query_ptr=operands.exact_query,
        exact_key_ptr=operands.exact_key,
        largest_key_scale_ptr=operands.largest_key_scale,
        **list_arguments(mask, stand_in),
        order_ptr=stand_in if operands.order is None else operands.order,
        totals_ptr=stand_in if totals is None else totals,
        mask_ptr=stand_in if attn_mask is None else attn_mask,
        kind_ptr=stand_in if operands.kind is None else operands.kind,
        seen_ptr=keys_seen,
        threshold_ptr=stand_in if threshold is None else threshold,
        mean_key_ptr=mean_key,
        mean_value_ptr=mean_value,
        mean_scale_ptr=stand_in if means is None else means.key_scale,
        mean_exact_key_ptr=stand_in if means is None else means.exact_key,
        mean_bias_ptr=stand_in if means is None else means.bias,
        output_ptr=output,
        lse_ptr=lse,
        segments_ptr=segments_argument(call, stand_in),
        query_strides=strides_of(query),
        key_strides=strides_of(operands.key),
        value_strides=strides_of(operands.value),
        exact_query_strides=strides_of(operands.exact_query),
        exact_key_strides=strides_of(operands.exact_key),
        mean_key_strides=strides_of(mean_key),
        mean_value_strides=strides_of(mean_value),
        mask_strides=mask_strides,
        kind_strides=(0, 0, 0) if operands.kind is None else operands.kind.stride()[:3],
        seen_strides=seen_strides,
        scale=call.scale,
        heads=shape.heads,
        group=shape.group,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        **window_offsets(call),
        q_blocks=shape.q_blocks,
        kv_blocks=shape.kv_blocks,
        bias_columns=0 if means is None else means.bias.shape[1],
        total_q=0 if segments is None else segments.total_q,
        HEAD_DIM=shape.head_dim,
        VALUE_DIM=shape.value_dim,
        HEAD_DIM_PADDED=width,
        VALUE_DIM_PADDED=value_width,
        QUANTIZATION=call.quantization,
        COARSE_UNIT=quant.coarse_unit(shape.head_dim),
        DOT_PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
        **window_flags(call),
        MASK=mask_kind,
        MASK_PER_QUERY=mask_per_query,
        HAS_KINDS=operands.kind is not None,
        LOWEST=lowest,
        HAS_THRESHOLD=threshold is not None,
        PEAKS=peak_handling(call),
        ALL_BLOCKS=mask is None,
        ORDERED=operands.order is not None,
        PACKED=segments is not None,
        TOKENS_FIRST=operands.tokens_first,
        MEAN_WIDTH=0 if means is None else mean_value.shape[3],
        COUNT=totals is not None,
        BLOCK_M=config.block_m,
        BLOCKS=config.blocks,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.max_registers,
    )
    return output, lse
