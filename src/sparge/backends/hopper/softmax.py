"""The softmax of a consumer, from S = Q K^T to P.

    load_key_scales -> score_scales -> [adjust_scores] -> max_by_lane -> [any_far_below -> part_of_scores]
        -> probabilities

Scores are in score units: log2 units, or eighths of a log2 unit if P's FP8 bits are derived from the scores
(`Spec.units_per_log2`, docs/hopper.md). S [64, keys] holds raw scores, which `BlockScales` convert to score units:

    quantized       INT32 sums whose bits are floats offset by 1.5 * 2^23 (`primitives.INT32_AS_FLOAT`)
    unquantized     float32

The columns of a row are distributed over four threads, the lanes of the row.
"""

from __future__ import annotations

from sparge.backends.gpu import primitives
from sparge.backends.gpu.gluon import aggregate, gl, jit
from sparge.backends.gpu.primitives import BLOCK_K, FAR, FLOAT_OFFSET, KEY_GROUPS
from sparge.backends.hopper.aggregates import COARSE, MEANS
from sparge.backends.hopper.coarse import exact_scores
from sparge.backends.hopper.mma import join_blocks, split_blocks
from sparge.backends.hopper.scheduler import last_offset_of
from sparge.backends.hopper.spec import ROWS

by_group = jit(primitives.by_group.fn)
in_fp8_token_order = jit(primitives.in_fp8_token_order.fn)

HIDDEN_BITS = gl.constexpr(-0x00800000)
"""The bits of -inf as an integer, which is below all raw scores whether compared as integers or as floats."""
LOWEST = gl.constexpr(-3e38)
"""Initial row maximum, below every visible score. Finite, so that differences of maxima are never NaN."""
RAW_RANGE = gl.constexpr(2.0**21)
"""Largest magnitude of a row's raw scores in `_raw_scores`. The offset of 1.5 * 2^23 leaves room for twice this."""
RAW_DEPTH = gl.constexpr(128.0)
"""Log2 units below a row's largest score that `_raw_scores` represents. P of lower scores is 0."""
FAR_REGISTER = gl.constexpr(".reg .b32 far; mov.b32 $0, 0;")
"""Declares the register of `any_far_below`."""
ABOVE_REGISTER = gl.constexpr(".reg .pred above; mov.b32 $0, 0;")
"""Declares the register of `any_above`."""


@aggregate
class BlockScales:
    """Scales of a stage's key blocks: of keys [4], or of raw scores [64, 4]; scalars without quantization."""

    first: gl.tensor | gl.constexpr
    second: gl.tensor | gl.constexpr


@jit
def _load_key_scale(metadata, place, SPEC: gl.constexpr):
    """Load the scales of one key block, [4]; 1 without quantization."""
    if SPEC.quantized:
        return metadata.key_scale.index(place).load(SPEC.group_layout)
    else:
        return 1.0


@jit
def load_key_scales(metadata, stage, SPEC: gl.constexpr):
    """Load the scales of a stage's key blocks; a single block is returned twice."""
    place = stage * SPEC.blocks
    first = _load_key_scale(metadata, place, SPEC)
    second = first
    if SPEC.blocks == 2:
        second = _load_key_scale(metadata, place + 1, SPEC)
    return BlockScales(first, second)


@jit
def no_key_scales(SPEC: gl.constexpr):
    """Return scales of 0, used after the last stage of a tile."""
    zeros = gl.full((KEY_GROUPS,), 0.0, gl.float32, SPEC.group_layout)
    return BlockScales(zeros, zeros)


@jit
def score_scales(query_scale, key_scales, SPEC: gl.constexpr):
    """Return the scales of a stage's raw scores from the scales of the queries [64] and of the keys."""
    if SPEC.quantized:
        first = query_scale[:, None] * key_scales.first[None, :]
        second = first
        if SPEC.blocks == 2:
            second = query_scale[:, None] * key_scales.second[None, :]
        return BlockScales(first, second)
    else:
        return BlockScales(query_scale, query_scale)


@jit
def mask_scores(scores, metadata, stage, tile, SPEC: gl.constexpr):
    """Set scores of a stage [64, keys] to -inf where a key does not exist or is outside of the query's window."""
    first_query, lengths = tile.first_query, tile.lengths
    columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    rows: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    place = stage * SPEC.blocks
    offsets = gl.arange(0, scores.shape[1], columns)
    block = metadata.block.index(place).load(columns)  # [keys], the key block of each column
    if scores.shape[1] == 2 * BLOCK_K:
        block = gl.where(offsets < BLOCK_K, block, metadata.block.index(place + 1).load(columns))
    last_key = gl.full((ROWS,), lengths.kv_len - 1, gl.int32, rows)
    if SPEC.has_last and not SPEC.has_first:
        last_key = gl.minimum(last_key, first_query + last_offset_of(lengths, SPEC) + gl.arange(0, ROWS, rows))
    # Compare positions relative to the block's first key: key offsets are then constants, the bound one per row.
    allowed = (offsets % BLOCK_K)[None, :] <= last_key[:, None] - (block * BLOCK_K)[None, :]  # [64, keys]
    if SPEC.has_first:  # relative to the same key, so that no per-row number stays in registers through the main loop
        first_key = (first_query + lengths.first_offset - block * BLOCK_K)[None, :] + gl.arange(0, ROWS, rows)[:, None]
        allowed = allowed & ((offsets % BLOCK_K)[None, :] >= first_key)
        if SPEC.has_last:
            last_from_first = last_offset_of(lengths, SPEC) - lengths.first_offset
            allowed = allowed & ((offsets % BLOCK_K)[None, :] <= first_key + last_from_first)
    if SPEC.quantized:
        return gl.where(allowed, scores, HIDDEN_BITS)
    else:
        return gl.where(allowed, scores, float("-inf"))


@jit
def _for_groups(numbers, grouped):
    """Broadcast one number per lane, [64, 4], to the shape of `by_group`'s result."""
    lanes: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, grouped.type.layout))
    return gl.convert_layout(numbers, lanes)[:, None, :, None]


@jit
def _add_block_bias(block, scale, bias_smem, SPEC: gl.constexpr):
    """Add a bias [64] in score units to raw scores of 64 means [64, 64]; a bias of -inf hides a mean.

    For INT8, the bias is rounded to whole raw units. This error is much smaller than that of rounding Q and K.
    """
    bias = bias_smem.load(gl.SliceLayout(0, block.type.layout))
    if SPEC.quantized:
        grouped = by_group(_as_floats(block), ROWS)
        units = _for_groups(1.0 / scale, grouped)
        bias = gl.convert_layout(gl.reshape(bias, (8, 4, 2)), gl.SliceLayout(0, grouped.type.layout))[None, :, :, :]
        return gl.reshape(gl.fma(bias, units, grouped), (ROWS, BLOCK_K)).to(gl.int32, bitcast=True)
    else:
        return block + (bias * (1.0 / scale))[None, :]


@jit
def _add_bias(scores, scales, metadata, stage, SPEC: gl.constexpr):
    """Add the bias to the raw scores of a stage of means [64, keys]."""
    place = stage * SPEC.blocks
    first, second = split_blocks(scores, SPEC.blocks)
    first = _add_block_bias(first, scales.first, metadata.bias.index(place), SPEC)
    if SPEC.blocks == 2:
        second = _add_block_bias(second, scales.second, metadata.bias.index(place + 1), SPEC)
    return join_blocks(first, second, SPEC)


@jit
def _row_scales(unit, SPEC: gl.constexpr):
    """Return the `BlockScales` of raw scores whose rows have one unit each, [64]."""
    scale = gl.full((ROWS, 4), 1.0, gl.float32, SPEC.lane_layout) * gl.convert_layout(unit, SPEC.row_layout)[:, None]
    return BlockScales(scale, scale)


@jit
def _raw_scores(scores, SPEC: gl.constexpr):
    """Convert scores [64, keys] to raw scores and their scales, with one unit per row.

    The unit is small, because `probabilities` lowers all scores by one unit and rounds by about as much.
    """
    largest = gl.max(scores, 1)
    largest = gl.where(largest == float("-inf"), 0.0, largest)
    depth: gl.constexpr = RAW_DEPTH * SPEC.units_per_log2
    unit = (gl.abs(largest) + depth) * (1.0 / RAW_RANGE)
    scores = gl.where(scores < (largest - depth)[:, None], float("-inf"), scores)  # NaN stays
    raw = gl.fma(scores, (1.0 / unit)[:, None], gl.full_like(scores, FLOAT_OFFSET))
    return raw.to(gl.int32, bitcast=True), _row_scales(unit, SPEC)


@jit
def adjust_scores(scores, scales, exact, metadata, tile, stage, flags, SPEC: gl.constexpr):
    """Return raw scores and scales of a stage that has flags: coarse, masked, or with a bias."""
    if SPEC.quantized:  # noqa: SIM102
        if (flags & COARSE) != 0:  # the bits of float32 scores, until masks and biases are applied
            unquantized = exact_scores(exact, metadata, tile, stage, flags, SPEC)
            scores = unquantized.to(gl.int32, bitcast=True)
            scales = _row_scales(gl.full((ROWS,), 1.0, gl.float32, SPEC.row_layout), SPEC)
    if SPEC.means:
        if (flags & MEANS) != 0:
            scores = _add_bias(scores, scales, metadata, stage, SPEC)
        else:
            scores = mask_scores(scores, metadata, stage, tile, SPEC)
    else:
        scores = mask_scores(scores, metadata, stage, tile, SPEC)
    if SPEC.quantized:  # noqa: SIM102
        if (flags & COARSE) != 0:
            scores, scales = _raw_scores(_as_floats(scores), SPEC)
    return scores, scales


@jit
def _as_floats(scores):
    """Return INT32 sums that started at `INT32_AS_FLOAT` as floats, and floats unchanged."""
    if scores.dtype == gl.int32:
        return scores.to(gl.float32, bitcast=True)
    else:
        return scores


@jit
def _block_max_by_lane(block, scale, SPEC: gl.constexpr):
    """Return the maximum over each lane's columns of a key block's scores, [64, 4], in score units."""
    largest = gl.convert_layout(gl.max(gl.max(by_group(block, ROWS), 3), 1), SPEC.lane_layout)
    if SPEC.quantized:
        return (_as_floats(largest) - FLOAT_OFFSET) * scale
    else:
        return largest * scale


@jit
def max_by_lane(scores, scales, SPEC: gl.constexpr):
    """Return the maximum over each lane's columns of a stage's scores, [64, 4], in score units."""
    first, second = split_blocks(scores, SPEC.blocks)
    largest = _block_max_by_lane(first, scales.first, SPEC)
    if SPEC.blocks == 2:
        largest = gl.maximum(largest, _block_max_by_lane(second, scales.second, SPEC))
    return largest


@jit
def _part_of_block(block, scale, edge, IS_UPPER: gl.constexpr):
    """Keep raw scores of a key block above ``edge`` [64] (IS_UPPER) or up to it, and hide the others."""
    grouped = by_group(block, ROWS)
    limit = edge[:, None] / scale + FLOAT_OFFSET
    is_upper = _as_floats(grouped) > _for_groups(limit, grouped)
    kept = gl.where(is_upper == IS_UPPER, grouped, HIDDEN_BITS)
    return gl.reshape(kept, (ROWS, BLOCK_K))


@jit
def part_of_scores(scores, scales, edge, IS_UPPER: gl.constexpr, SPEC: gl.constexpr):
    """Keep raw scores of a stage above ``edge`` [64] (IS_UPPER) or up to it, and hide the others."""
    first, second = split_blocks(scores, SPEC.blocks)
    first = _part_of_block(first, scales.first, edge, IS_UPPER)
    if SPEC.blocks == 2:
        second = _part_of_block(second, scales.second, edge, IS_UPPER)
    return join_blocks(first, second, SPEC)


@jit
def any_far_below(lane_max, row_max, CONSUMER: gl.constexpr, SPEC: gl.constexpr):
    """Return whether the keys of any lane are too far below their row's maximum for FP8, uniform over the warpgroup.

    `gl.max` would take nine shuffles and two barriers. Instead, each thread stores its result in a PTX register, and
    one barrier instruction reduces one bit per thread.
    """
    is_far = (lane_max < row_max[:, None] - FAR * SPEC.units_per_log2) & (lane_max > LOWEST)
    gl.inline_asm_elementwise(
        "or.b32 far, $2, $3; mov.b32 $0, 0; mov.b32 $1, 0;",
        "=r,=r,r,r",
        [is_far.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )
    barrier_number: gl.constexpr = 14 + CONSUMER  # Triton uses the named barriers from 0 on
    answer = gl.inline_asm_elementwise(
        """{
        .reg .pred is_far;
        setp.ne.u32 is_far, far, 0;
        barrier.cta.red.or.pred is_far, $1, 128, is_far;
        vote.sync.any.pred is_far, is_far, 0xffffffff;
        selp.b32 $0, 1, 0, is_far;
        }""",
        "=r,n",
        [gl.to_tensor(barrier_number)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    return answer != 0


@jit
def any_above(lane_sum, LIMIT: gl.constexpr):
    """Return whether any entry of ``lane_sum`` [64, 4] in this warp exceeds LIMIT or is NaN.

    Warps of a warpgroup can get different results. A branch on the result must therefore not contain barriers or
    warpgroup products.
    """
    gl.inline_asm_elementwise(
        "setp.gtu.f32 above, $2, $4; setp.gtu.or.f32 above, $3, $5, above; mov.b32 $0, 0; mov.b32 $1, 0;",
        "=r,=r,f,f,f,f",
        [lane_sum, gl.full_like(lane_sum, LIMIT)],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )
    answer = gl.inline_asm_elementwise(
        "{ .reg .pred any; vote.sync.any.pred any, above, 0xffffffff; selp.b32 $0, 1, 0, any; }",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    return answer != 0


@jit
def declare_register(DECLARATION: gl.constexpr):
    """Declare a PTX register that keeps its value between pieces of inline assembly, once per kernel."""
    gl.inline_asm_elementwise(DECLARATION, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def _as_operand(scores, SPEC: gl.constexpr):
    """View scores of a key block in the layout of P, [64, 16 / w, 4, w], where w is `Spec.k_width`. No data moves."""
    if SPEC.fp8_values:
        scores = in_fp8_token_order(scores)
    grouped = gl.reshape(scores, (ROWS, 16 // SPEC.k_width, 4, SPEC.k_width))
    return gl.convert_layout(grouped, SPEC.p_by_lane_layout)


@jit
def _for_lanes(numbers):
    """Broadcast one number per lane [64, 4] to the shape of `_as_operand`'s result."""
    return numbers[:, None, :, None]


@jit
def _fp8_from_scores(scores, slope, offset):
    """Return FP8 numbers whose bit patterns are scores * slope + offset, rounded, at least 0.

    Conversion to integers maps NaN to 0. The packing conversion clamps negative integers to 0; ptxas fuses both
    conversions of two scores into one instruction. 1.5 instructions per score.
    """
    bits = gl.inline_asm_elementwise(
        """{
        .reg .f32 x<4>;
        .reg .b32 bits<4>, upper;
        fma.rn.f32 x0, $1, $5, $9;
        fma.rn.f32 x1, $2, $6, $10;
        fma.rn.f32 x2, $3, $7, $11;
        fma.rn.f32 x3, $4, $8, $12;
        cvt.rni.s32.f32 bits0, x0;
        cvt.rni.s32.f32 bits1, x1;
        cvt.rni.s32.f32 bits2, x2;
        cvt.rni.s32.f32 bits3, x3;
        cvt.pack.sat.u8.s32.b32 upper, bits3, bits2, 0;
        cvt.pack.sat.u8.s32.b32 $0, bits1, bits0, upper;
        }""",
        "=r,f,f,f,f,f,f,f,f,f,f,f,f",
        [scores, slope, offset],
        dtype=gl.int8,
        is_pure=True,
        pack=4,
    )
    return bits.to(gl.float8e4nv, bitcast=True)


@jit
def probabilities(block, scale, p_ref, P_TYPE: gl.constexpr, SPEC: gl.constexpr):
    """Return P of one key block as the left operand of P V, and each lane's sum of it, [64, 4] (0 if exponential-free).

    Rounding could raise the largest P above 448, the maximum of FP8. The subtrahend is as large as FLOAT_OFFSET times
    the scale, so rounding it (once, in the fma) changes it by up to 0.75 of a raw unit; the row maximum was rounded by
    up to 0.25. Exponential-free P could then have FP8 bits 127, which is NaN. With exp2, P V would saturate, but not
    the row sum. One more raw unit is therefore subtracted, which is much less than the error of rounding Q and K.

    Args:
        block: raw scores [64, 64].
        scale: scale of the raw scores, [64, 4] or a scalar.
        p_ref: [64], the row reference lowered by the stored value of P = 1, in score units.
    """
    scores = _as_operand(_as_floats(block), SPEC)  # [64, 16 / w, 4, w]
    lane_sum = 0.0
    if SPEC.exponential_free:
        offset = gl.fma(scale, -(FLOAT_OFFSET + 1.0), -p_ref[:, None])  # [64, 4]
        p = _fp8_from_scores(scores, _for_lanes(scale), _for_lanes(offset))
    else:
        if SPEC.quantized:
            offset = gl.fma(scale, FLOAT_OFFSET + 1.0, p_ref[:, None])
            scores = scores * _for_lanes(scale) - _for_lanes(offset)
        else:
            scores = scores * scale - _for_lanes(p_ref[:, None])
        exact = gl.exp2(scores)
        lane_sum = gl.convert_layout(gl.sum(gl.sum(exact, 3), 1), SPEC.lane_layout)
        p = exact.to(P_TYPE)
    return gl.convert_layout(gl.reshape(p, (ROWS, BLOCK_K)), SPEC.p_layout), lane_sum
