"""The softmax of a consumer: what it computes between S = Q K^T and P V.

    load_key_scales -> score_scales -> [adjust_scores] -> max_by_lane -> [any_far_below -> part_of_scores]
        -> probabilities

Scores count steps (`Spec.steps_per_octave`): log2 units, or 2^-24 for an eighth of one where P's FP8 codes come
straight from them; docs/hopper.md explains these codes. S is [64, keys], raw, and times its `ScoreScales` a score:

    quantized   INT32 sums that are floats above 1.5 * 2^23 (`primitives.INT32_AS_FLOAT`)
    16 bits     float32

A row's columns lie in four threads, its lanes.
"""

from __future__ import annotations

from sparge.backends.gpu import primitives
from sparge.backends.gpu.gluon import aggregate, gl, jit
from sparge.backends.gpu.primitives import BLOCK_K, FAR, FLOAT_OFFSET, KEY_GROUPS
from sparge.backends.hopper.aggregates import COARSE, MEANS
from sparge.backends.hopper.blocks import join_blocks, split_blocks
from sparge.backends.hopper.coarse import exact_steps
from sparge.backends.hopper.scheduler import last_offset_of
from sparge.backends.hopper.spec import ROWS

in_fp8_token_order = jit(primitives.in_fp8_token_order.fn)

HIDDEN_BITS = gl.constexpr(-0x00800000)
"""-inf as bits: the least of all scores, compared as integers or as floats."""
LOWEST = gl.constexpr(-3e38)
"""Below every score but those that are hidden."""
RAW_RANGE = gl.constexpr(2.0**21)
"""The largest of a row's raw scores that `_raw_scores` makes. Floats above 1.5 * 2^23 bear twice that."""
RAW_DEPTH = gl.constexpr(128.0)
"""Log2 units below a row's largest score that `_raw_scores` keeps. No P is as small."""


@aggregate
class KeyScales:
    """Scales of the codes of a stage's first and second key block, [4] each; of unquantised keys, 1."""

    first: gl.tensor | gl.constexpr
    second: gl.tensor | gl.constexpr


@jit
def _load_key_scale(metadata, place, SPEC: gl.constexpr):
    """Load the scales of one key block, [4]; of unquantised keys, 1."""
    if SPEC.quantized:
        return metadata.key_scale.index(place).load(SPEC.group_layout)
    else:
        return 1.0


@jit
def load_key_scales(metadata, stage, SPEC: gl.constexpr):
    """Load the scales of a stage's key blocks; twice the same if there is one."""
    place = stage * SPEC.blocks
    first = _load_key_scale(metadata, place, SPEC)
    second = first
    if SPEC.blocks == 2:
        second = _load_key_scale(metadata, place + 1, SPEC)
    return KeyScales(first=first, second=second)


@jit
def no_key_scales(SPEC: gl.constexpr):
    """Scales of no keys: 0."""
    zeros = gl.full((KEY_GROUPS,), 0.0, gl.float32, SPEC.group_layout)
    return KeyScales(first=zeros, second=zeros)


@aggregate
class ScoreScales:
    """Scales of a stage's raw scores in steps, by key block: [64, 4] each; of unquantized scores, one number."""

    first: gl.tensor | gl.constexpr
    second: gl.tensor | gl.constexpr


@jit
def score_scales(query_scale, key_scales, SPEC: gl.constexpr):
    """The scales of a stage's raw scores, from those of its queries [64], in steps, and of its keys."""
    if SPEC.quantized:
        first = query_scale[:, None] * key_scales.first[None, :]
        second = first
        if SPEC.blocks == 2:
            second = query_scale[:, None] * key_scales.second[None, :]
        return ScoreScales(first=first, second=second)
    else:
        return ScoreScales(first=query_scale, second=query_scale)


@jit
def mask_scores(scores, metadata, stage, first_query, lengths, SPEC: gl.constexpr):
    """Scores of a stage [64, keys], with -inf where a key does not exist or lies outside of the query's window."""
    columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    rows: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    place = stage * SPEC.blocks
    offsets = gl.arange(0, scores.shape[1], columns)
    block = metadata.block.index(place).load(columns)
    if scores.shape[1] == 2 * BLOCK_K:
        block = gl.where(offsets < BLOCK_K, block, metadata.block.index(place + 1).load(columns))
    last_key = gl.full((ROWS,), lengths.kv_len - 1, gl.int32, rows)
    if SPEC.has_last and not SPEC.has_first:
        last_key = gl.minimum(last_key, first_query + last_offset_of(lengths, SPEC) + gl.arange(0, ROWS, rows))
    # Seen from the block's first key, the last one is one number for each row, and a key is a constant.
    allowed = (offsets % BLOCK_K)[None, :] <= last_key[:, None] - (block * BLOCK_K)[None, :]
    if SPEC.has_first:  # from the same first key, which keeps numbers of rows out of the loop's registers
        first_key = (first_query + lengths.first_offset - block * BLOCK_K)[None, :] + gl.arange(0, ROWS, rows)[:, None]
        allowed = allowed & ((offsets % BLOCK_K)[None, :] >= first_key)
        if SPEC.has_last:
            reach = last_offset_of(lengths, SPEC) - lengths.first_offset
            allowed = allowed & ((offsets % BLOCK_K)[None, :] <= first_key + reach)
    if SPEC.quantized:
        return gl.where(allowed, scores, HIDDEN_BITS)
    else:
        return gl.where(allowed, scores, float("-inf"))


@jit
def _by_group(block):
    """Scores of a key block [64, 64] as [64, 8, 4, 2]: the four groups are a row's lanes. Nothing moves."""
    return gl.reshape(block, (ROWS, 8, 4, 2))


@jit
def _for_groups(numbers, grouped):
    """One number for each lane of a row [64, 4], to go with `_by_group`."""
    lanes: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, grouped.type.layout))
    return gl.convert_layout(numbers, lanes)[:, None, :, None]


@jit
def _add_block_bias(block, scale, bias_smem, SPEC: gl.constexpr):
    """Raw scores of a key block [64, 64] with what they get besides, [64] in steps; -inf where that is.

    Of INT8 codes the bias is rounded to a whole number of raw units, far less than what the codes are rounded by.
    """
    bias = bias_smem.load(gl.SliceLayout(0, block.type.layout))
    if SPEC.quantized:
        grouped = _by_group(_as_floats(block))
        units = _for_groups(1.0 / scale, grouped)
        bias = gl.convert_layout(gl.reshape(bias, (8, 4, 2)), gl.SliceLayout(0, grouped.type.layout))[None, :, :, :]
        return gl.reshape(gl.fma(bias, units, grouped), (ROWS, BLOCK_K)).to(gl.int32, bitcast=True)
    else:
        return block + (bias * (1.0 / scale))[None, :]


@jit
def _add_bias(scores, scales, metadata, stage, SPEC: gl.constexpr):
    """Raw scores of a stage of means [64, keys], with their bias; -inf where a mean does not enter."""
    place = stage * SPEC.blocks
    first, second = split_blocks(scores, SPEC.blocks)
    first = _add_block_bias(first, scales.first, metadata.bias.index(place), SPEC)
    if SPEC.blocks == 2:
        second = _add_block_bias(second, scales.second, metadata.bias.index(place + 1), SPEC)
    return join_blocks(first, second, SPEC)


@jit
def _row_scales(unit, SPEC: gl.constexpr):
    """The scales of scores that have one unit [64] for each row, in steps."""
    scale = gl.full((ROWS, 4), 1.0, gl.float32, SPEC.lane_layout) * gl.convert_layout(unit, SPEC.row_layout)[:, None]
    return ScoreScales(first=scale, second=scale)


@jit
def _raw_scores(steps, SPEC: gl.constexpr):
    """Scores in steps [64, keys] as raw scores, and their scales: each row has a unit of its own.

    `probabilities` takes scores one unit lower than they are, and rounds by as much.
    """
    largest = gl.max(steps, 1)
    largest = gl.where(largest == float("-inf"), 0.0, largest)
    depth: gl.constexpr = RAW_DEPTH * SPEC.steps_per_octave
    unit = (gl.abs(largest) + depth) * (1.0 / RAW_RANGE)
    steps = gl.where(steps < (largest - depth)[:, None], float("-inf"), steps)  # NaN stays
    raw = gl.fma(steps, (1.0 / unit)[:, None], gl.full_like(steps, FLOAT_OFFSET))
    return raw.to(gl.int32, bitcast=True), _row_scales(unit, SPEC)


@jit
def adjust_scores(scores, scales, exact, metadata, query_stage, stage, flags, first_query, lengths, SPEC: gl.constexpr):
    """Raw scores and scales of a stage that is not plain: coarse, masked, or with a bias."""
    if SPEC.quantized:  # noqa: SIM102
        if (flags & COARSE) != 0:  # float32 in steps, to begin with
            steps = exact_steps(exact, metadata, query_stage, stage, flags, first_query, lengths, SPEC)
            scores = steps.to(gl.int32, bitcast=True)
            scales = _row_scales(gl.full((ROWS,), 1.0, gl.float32, SPEC.row_layout), SPEC)
    if SPEC.means:
        if (flags & MEANS) != 0:
            scores = _add_bias(scores, scales, metadata, stage, SPEC)
        else:
            scores = mask_scores(scores, metadata, stage, first_query, lengths, SPEC)
    else:
        scores = mask_scores(scores, metadata, stage, first_query, lengths, SPEC)
    if SPEC.quantized:  # noqa: SIM102
        if (flags & COARSE) != 0:
            scores, scales = _raw_scores(_as_floats(scores), SPEC)
    return scores, scales


@jit
def _as_floats(scores):
    """INT32 sums that started at `INT32_AS_FLOAT` as floats; floats as they are."""
    if scores.dtype == gl.int32:
        return scores.to(gl.float32, bitcast=True)
    else:
        return scores


@jit
def _block_max_by_lane(block, scale, SPEC: gl.constexpr):
    """The maximum of each lane's own columns of a key block's scores [64, 64], in steps: [64, 4]."""
    largest = gl.convert_layout(gl.max(gl.max(_by_group(block), 3), 1), SPEC.lane_layout)
    if SPEC.quantized:
        return (_as_floats(largest) - FLOAT_OFFSET) * scale
    else:
        return largest * scale


@jit
def max_by_lane(scores, scales, SPEC: gl.constexpr):
    """The maximum of each lane's own columns of a stage's scores, [64, 4], in steps."""
    first, second = split_blocks(scores, SPEC.blocks)
    largest = _block_max_by_lane(first, scales.first, SPEC)
    if SPEC.blocks == 2:
        largest = gl.maximum(largest, _block_max_by_lane(second, scales.second, SPEC))
    return largest


@jit
def _part_of_block(block, scale, edge, IS_UPPER: gl.constexpr):
    """Raw scores of a key block above a score ``edge`` [64], or up to it; the others are hidden."""
    grouped = _by_group(block)
    limit = edge[:, None] / scale + FLOAT_OFFSET
    is_upper = _as_floats(grouped) > _for_groups(limit, grouped)
    kept = gl.where(is_upper == IS_UPPER, grouped, HIDDEN_BITS)
    return gl.reshape(kept, (ROWS, BLOCK_K))


@jit
def part_of_scores(scores, scales, edge, IS_UPPER: gl.constexpr, SPEC: gl.constexpr):
    """Raw scores of a stage above a score ``edge`` [64], or up to it; the others are hidden."""
    first, second = split_blocks(scores, SPEC.blocks)
    first = _part_of_block(first, scales.first, edge, IS_UPPER)
    if SPEC.blocks == 2:
        second = _part_of_block(second, scales.second, edge, IS_UPPER)
    return join_blocks(first, second, SPEC)


@jit
def any_far_below(lane_max, row_max, CONSUMER: gl.constexpr, SPEC: gl.constexpr):
    """Whether a lane's own keys all lie so far below their row's maximum that FP8 does not hold both.

    A reduction to one number would take nine shuffles and two barriers. Here each thread brings its answer into a
    register of its own, and a barrier collects one bit of each.
    """
    is_far = (lane_max < row_max[:, None] - FAR * SPEC.steps_per_octave) & (lane_max > LOWEST)
    gl.inline_asm_elementwise(
        "or.b32 far, $2, $3; mov.b32 $0, 0; mov.b32 $1, 0;",
        "=r,=r,r,r",
        [is_far.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )
    barrier_number: gl.constexpr = 14 + CONSUMER  # Triton takes the first ones
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
    """Whether a number of [64, 4] exceeds a limit or is NaN: an answer for each warp.

    What depends on it must be a warp's own business: no barriers, no products.
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
def declare_above():
    """Declare the register that `any_above` uses, once per kernel."""
    gl.inline_asm_elementwise(".reg .pred above; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def declare_far():
    """Declare the register that `any_far_below` uses, once per kernel."""
    gl.inline_asm_elementwise(".reg .b32 far; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def _as_operand(scores, SPEC: gl.constexpr):
    """Scores of a key block as they lie in P, by lane: [64, 16 / w, 4, w]."""
    if SPEC.fp8_values:
        scores = in_fp8_token_order(scores)
    grouped = gl.reshape(scores, (ROWS, 16 // SPEC.k_width, 4, SPEC.k_width))
    return gl.convert_layout(grouped, SPEC.p_by_lane_layout)


@jit
def _for_lanes(numbers):
    """One number for each lane of a row [64, 4], to go with `_as_operand`."""
    return numbers[:, None, :, None]


@jit
def _fp8_from_scores(scores, slope, offset):
    """FP8 numbers whose codes are scores * slope + offset, from 0 up, rounded to the next multiple of 2^-24.

    The saturating multiply-add clamps at 0, and turns NaN into 0. Conversion to float16 rounds; a permutation collects
    the low bytes. 1.75 instructions for each score.
    """
    codes = gl.inline_asm_elementwise(
        """{
        .reg .f32 x<4>;
        .reg .b32 low, high;
        fma.rn.sat.f32 x0, $1, $5, $9;
        fma.rn.sat.f32 x1, $2, $6, $10;
        fma.rn.sat.f32 x2, $3, $7, $11;
        fma.rn.sat.f32 x3, $4, $8, $12;
        cvt.rn.f16x2.f32 low, x1, x0;
        cvt.rn.f16x2.f32 high, x3, x2;
        prmt.b32 $0, low, high, 0x6420;
        }""",
        "=r,f,f,f,f,f,f,f,f,f,f,f,f",
        [scores, slope, offset],
        dtype=gl.int8,
        is_pure=True,
        pack=4,
    )
    return codes.to(gl.float8e4nv, bitcast=True)


@jit
def probabilities(block, scale, origin, P_TYPE: gl.constexpr, SPEC: gl.constexpr):
    """P of one key block as the left operand of P V, and each lane's sum of it, [64, 4] (0 if exponential-free).

    What is subtracted is of the size of FLOAT_OFFSET and rounded (once: fma), by up to three quarters of an integer;
    the maximum itself by a quarter. So one integer more is subtracted, far less than what rounding Q and K to 8 bits
    does. Else the largest P could exceed 448: code 127 is NaN, and an exponential would be cut off in P V alone.

    Args:
        block: raw scores [64, 64].
        scale: of the scores, [64, 4] or one number.
        origin: [64], the score that P counts from, less what P = 1 is stored as; in steps.
    """
    scores = _as_operand(_as_floats(block), SPEC)
    lane_sum = 0.0
    if SPEC.exponential_free:
        offset = gl.fma(scale, -(FLOAT_OFFSET + 1.0), -origin[:, None])
        p = _fp8_from_scores(scores, _for_lanes(scale), _for_lanes(offset))
    else:
        if SPEC.quantized:
            offset = gl.fma(scale, FLOAT_OFFSET + 1.0, origin[:, None])
            scores = scores * _for_lanes(scale) - _for_lanes(offset)
        else:
            scores = scores * scale - _for_lanes(origin[:, None])
        exact = gl.exp2(scores)
        lane_sum = gl.convert_layout(gl.sum(gl.sum(exact, 3), 1), SPEC.lane_layout)
        p = exact.to(P_TYPE)
    return gl.convert_layout(gl.reshape(p, (ROWS, BLOCK_K)), SPEC.p_layout), lane_sum
