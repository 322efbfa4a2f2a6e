"""The softmax of a consumer: what it computes between S = Q K^T and P V.

    load_key_scales -> mask_scores or add_bias -> max_by_lane -> [any_far_below -> part_of_scores] -> probabilities

Scores count steps (`Spec.steps_per_octave`): octaves, or eighths of one where P's codes come straight from them;
docs/hopper.md explains these codes. S is [64, keys], raw: INT32 sums that are floats above 1.5 * 2^23, or float32.
A row's columns lie in four threads, its lanes.
"""

from __future__ import annotations

from sparge.backends.cuda import primitives
from sparge.backends.cuda.primitives import BLOCK_K, FAR, FLOAT_OFFSET
from sparge.backends.hopper.gluon import aggregate, gl, jit
from sparge.backends.hopper.scheduler import last_offset_of
from sparge.backends.hopper.spec import ROWS

in_fp8_token_order = jit(primitives.in_fp8_token_order.fn)

HIDDEN_BITS = gl.constexpr(-0x00800000)
"""-inf as bits: the least of all scores, compared as integers or as floats."""
LOWEST = gl.constexpr(-3e38)
"""Below every score but those that are hidden."""
CODE_STEP = gl.constexpr(2.0**-24)
"""The smallest float16. Codes are rounded as multiples of it: such a number's bits are the code."""


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
def _score_scale(query_scale, key_scale, SPEC: gl.constexpr):
    """The scale of a key block's raw scores, [64, 4], in steps; of unquantised scores, one number."""
    if SPEC.quantized:
        return query_scale[:, None] * key_scale[None, :]
    else:
        return query_scale


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
def _add_block_bias(block, query_scale, key_scale, bias_smem, SPEC: gl.constexpr):
    """Raw scores of a key block [64, 64] with what they get besides, [64] in steps; -inf where that is.

    Of INT8 codes the bias is rounded to a whole number of raw units, far less than what the codes are rounded by.
    """
    bias = bias_smem.load(gl.SliceLayout(0, block.type.layout))
    if SPEC.quantized:
        grouped = gl.reshape(_as_floats(block), (ROWS, 8, 4, 2))
        lanes: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, grouped.type.layout))
        units = gl.convert_layout(1.0 / _score_scale(query_scale, key_scale, SPEC), lanes)[:, None, :, None]
        bias = gl.convert_layout(gl.reshape(bias, (8, 4, 2)), gl.SliceLayout(0, grouped.type.layout))[None, :, :, :]
        return gl.reshape(gl.fma(bias, units, grouped), (ROWS, BLOCK_K)).to(gl.int32, bitcast=True)
    else:
        return block + (bias * (1.0 / query_scale))[None, :]


@jit
def add_bias(scores, metadata, stage, query_scale, key_scales, SPEC: gl.constexpr):
    """Raw scores of a stage of means [64, keys], with their bias; -inf where a mean does not enter."""
    place = stage * SPEC.blocks
    first, second = split_blocks(scores, SPEC.blocks)
    first = _add_block_bias(first, query_scale, key_scales.first, metadata.bias.index(place), SPEC)
    if SPEC.blocks == 2:
        second = _add_block_bias(second, query_scale, key_scales.second, metadata.bias.index(place + 1), SPEC)
        return _join_blocks(first, second, SPEC)
    else:
        return gl.convert_layout(first, SPEC.scores_layout)


@jit
def split_blocks(scores, BLOCKS: gl.constexpr):
    """The key blocks of a stage's scores: [64, 128] as two [64, 64]; twice the same if there is one."""
    if BLOCKS == 1:
        return scores, scores
    else:
        return gl.split(gl.permute(gl.reshape(scores, (ROWS, 2, BLOCK_K)), (0, 2, 1)))


@jit
def _join_blocks(first, second, SPEC: gl.constexpr):
    """The inverse of `split_blocks` of two blocks."""
    scores = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), (ROWS, 2 * BLOCK_K))
    return gl.convert_layout(scores, SPEC.scores_layout)


@jit
def _as_floats(scores):
    """INT32 sums that started at `INT32_AS_FLOAT` as floats; floats as they are."""
    if scores.dtype == gl.int32:
        return scores.to(gl.float32, bitcast=True)
    else:
        return scores


@jit
def _block_max_by_lane(block, key_scale, SPEC: gl.constexpr):
    """The maximum of each lane's own columns of a key block's scores [64, 64], not yet scaled by query: [64, 4]."""
    largest = _as_floats(gl.max(gl.max(gl.reshape(block, (ROWS, 8, 4, 2)), 3), 1))
    largest = gl.convert_layout(largest, SPEC.lane_layout)
    if SPEC.quantized:
        return (largest - FLOAT_OFFSET) * key_scale[None, :]
    else:
        return largest


@jit
def max_by_lane(scores, query_scale, key_scales, SPEC: gl.constexpr):
    """The maximum of each lane's own columns of a stage's scores, [64, 4], in steps."""
    first, second = split_blocks(scores, SPEC.blocks)
    largest = _block_max_by_lane(first, key_scales.first, SPEC)
    if SPEC.blocks == 2:
        largest = gl.maximum(largest, _block_max_by_lane(second, key_scales.second, SPEC))
    if SPEC.quantized:
        return largest * query_scale[:, None]
    else:
        return largest * query_scale


@jit
def _part_of_block(block, query_scale, key_scale, edge, IS_UPPER: gl.constexpr, SPEC: gl.constexpr):
    """Raw scores of a key block above a score ``edge`` [64], or up to it, with -inf for the others."""
    limit = edge[:, None] / _score_scale(query_scale, key_scale, SPEC) + FLOAT_OFFSET
    grouped = gl.reshape(block, (ROWS, 8, 4, 2))
    lanes: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, grouped.type.layout))
    is_upper = _as_floats(grouped) > gl.convert_layout(limit, lanes)[:, None, :, None]
    kept = gl.where(is_upper == IS_UPPER, grouped, HIDDEN_BITS)
    return gl.reshape(kept, (ROWS, BLOCK_K))


@jit
def part_of_scores(scores, query_scale, key_scales, edge, IS_UPPER: gl.constexpr, SPEC: gl.constexpr):
    """Raw scores of a stage above a score ``edge`` [64], or up to it, with -inf for the others."""
    first, second = split_blocks(scores, SPEC.blocks)
    first = _part_of_block(first, query_scale, key_scales.first, edge, IS_UPPER, SPEC)
    if SPEC.blocks == 2:
        second = _part_of_block(second, query_scale, key_scales.second, edge, IS_UPPER, SPEC)
        return _join_blocks(first, second, SPEC)
    else:
        return gl.convert_layout(first, SPEC.scores_layout)


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
def probabilities(block, query_scale, key_scale, origin, P_TYPE: gl.constexpr, SPEC: gl.constexpr):
    """P of one key block as the left operand of P V, and each lane's sum of it, [64, 4] (0 if exponential-free).

    What is subtracted is of the size of FLOAT_OFFSET and rounded (once: fma), by up to three quarters of an integer;
    the maximum itself by a quarter. So one integer more is subtracted, far less than what rounding Q and K to 8 bits
    does. Else the largest P could exceed 448: code 127 is NaN, and an exponential would be cut off in P V alone.

    Args:
        block: raw scores [64, 64].
        query_scale, key_scale: scales of the codes of the queries [64], in steps, and of the keys [4].
        origin: [64], the score that P counts from, less what P = 1 is stored as; in steps.
    """
    scores = _as_operand(_as_floats(block), SPEC)
    lane_sum = 0.0
    if SPEC.exponential_free:
        slope = _score_scale(query_scale * CODE_STEP, key_scale, SPEC)
        offset = gl.fma(slope, -(FLOAT_OFFSET + 1.0), (origin * -CODE_STEP)[:, None])
        p = _fp8_from_scores(scores, _for_lanes(slope), _for_lanes(offset))
    else:
        score_scale = _score_scale(query_scale, key_scale, SPEC)
        if SPEC.quantized:
            offset = gl.fma(score_scale, FLOAT_OFFSET + 1.0, origin[:, None])
            scores = scores * _for_lanes(score_scale) - _for_lanes(offset)
        else:
            scores = scores * score_scale - _for_lanes(origin[:, None])
        exact = gl.exp2(scores)
        lane_sum = gl.convert_layout(gl.sum(gl.sum(exact, 3), 1), SPEC.lane_layout)
        p = exact.to(P_TYPE)
    return gl.convert_layout(gl.reshape(p, (ROWS, BLOCK_K)), SPEC.p_layout), lane_sum
