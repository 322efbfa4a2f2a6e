"""From scores to P on Hopper: what a consumer computes between its two products.

    key_unit_of -> hide -> tile_max -> [any_far_below -> tile_part] -> probabilities

Scores count steps: octaves, or eighths of one where P is a code. docs/hopper.md explains the codes.
"""

from __future__ import annotations

from sparge import geometry
from sparge.backends.cuda import primitives
from sparge.backends.cuda.primitives import BLOCK_K, FAR, FLOAT_OFFSET
from sparge.backends.hopper.gluon import gl, jit

ROWS = gl.constexpr(geometry.ROW_GROUP)
"""Queries of one consumer: what a warpgroup's matrix instruction takes."""
in_fp8_token_order = jit(primitives.in_fp8_token_order.fn)

HIDDEN_BITS = gl.constexpr(-0x00800000)
"""-inf as bits: the least of all scores, compared as integers or as floats."""
LOWEST = gl.constexpr(-3e38)
"""Below every score but those that are hidden."""
TOP_CODE = gl.constexpr(126.0)
"""E4M3's code of 448."""
CODE_STEP = gl.constexpr(2.0**-24)
"""The smallest float16. Codes are rounded as multiples of it: such a number's bits are the code."""
ONES_BITS = gl.constexpr(0x38383838)
"""1.0 in E4M3, four times."""


@jit
def key_unit_of(units, place, FORM: gl.constexpr):
    """What a code of a key block is worth, [4]; of unquantised keys, 1."""
    if FORM.quantized:
        return units.index(place).load(FORM.groups)
    else:
        return 1.0


@jit
def _unit(row_unit, key_unit, FORM: gl.constexpr):
    """What an integer of a key block's scores is worth, [64, 4], in steps; of unquantised scores, one number."""
    if FORM.quantized:
        return row_unit[:, None] * key_unit[None, :]
    else:
        return row_unit


@jit
def hide(scores, blocks, place, first_query, sizes, FORM: gl.constexpr):
    """Scores of a tile [64, keys], with -inf where a key does not exist or follows the query.

    Args:
        blocks: block numbers in shared memory, from ``place`` on; beyond the last one where there is none.
    """
    _, _, q_len, kv_len, _, _, _ = sizes
    columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    rows: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    offsets = gl.arange(0, scores.shape[1], columns)
    block = blocks.index(place).load(columns)
    if scores.shape[1] == 2 * BLOCK_K:
        block = gl.where(offsets < BLOCK_K, block, blocks.index(place + 1).load(columns))
    last_key = gl.full((ROWS,), kv_len - 1, gl.int32, rows)
    if FORM.is_causal:
        last_key = gl.minimum(last_key, first_query + (kv_len - q_len) + gl.arange(0, ROWS, rows))
    # Seen from the block's first key, the last one is one number for each row, and a key is a constant.
    allowed = (offsets % BLOCK_K)[None, :] <= last_key[:, None] - (block * BLOCK_K)[None, :]
    if FORM.quantized:
        return gl.where(allowed, scores, HIDDEN_BITS)
    else:
        return gl.where(allowed, scores, float("-inf"))


@jit
def halves(tile, BLOCKS: gl.constexpr):
    """The key blocks of a tile: [M, 128] as two [M, 64]; twice the same if there is one."""
    if BLOCKS == 1:
        return tile, tile
    else:
        return gl.split(gl.permute(gl.reshape(tile, (ROWS, 2, BLOCK_K)), (0, 2, 1)))


@jit
def as_scores(values):
    """INT32 sums that started at `INT32_AS_FLOAT` as floats; floats as they are."""
    if values.dtype == gl.int32:
        return values.to(gl.float32, bitcast=True)
    else:
        return values


@jit
def _lane_max(block, key_unit, FORM: gl.constexpr):
    """Maximum of each thread's own columns of a key block's scores [64, 64], in units of the row: [64, 4]."""
    largest = as_scores(gl.max(gl.max(gl.reshape(block, (ROWS, 8, 4, 2)), 3), 1))
    largest = gl.convert_layout(largest, FORM.lanes)
    if FORM.quantized:
        return (largest - FLOAT_OFFSET) * key_unit[None, :]
    else:
        return largest


@jit
def tile_max(tile, row_unit, key_units, FORM: gl.constexpr):
    """The same of a tile's key blocks, in steps."""
    first, second = halves(tile, FORM.blocks)
    largest = _lane_max(first, key_units[0], FORM)
    if FORM.blocks == 2:
        largest = gl.maximum(largest, _lane_max(second, key_units[1], FORM))
    if FORM.quantized:
        return largest * row_unit[:, None]
    else:
        return largest * row_unit


@jit
def _block_part(block, row_unit, key_unit, edge, IS_UPPER: gl.constexpr, FORM: gl.constexpr):
    """Raw scores of a key block above a score ``edge`` [64], or up to it, with -inf for the others."""
    limit = edge[:, None] / _unit(row_unit, key_unit, FORM) + FLOAT_OFFSET
    grouped = gl.reshape(block, (ROWS, 8, 4, 2))
    lanes: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, grouped.type.layout))
    is_upper = as_scores(grouped) > gl.convert_layout(limit, lanes)[:, None, :, None]
    kept = gl.where(is_upper == IS_UPPER, grouped, HIDDEN_BITS)
    return gl.reshape(kept, (ROWS, BLOCK_K))


@jit
def _rejoined(first, second, FORM: gl.constexpr):
    """The inverse of `halves`."""
    tile = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), (ROWS, 2 * BLOCK_K))
    return gl.convert_layout(tile, FORM.scores)


@jit
def tile_part(tile, row_unit, key_units, edge, IS_UPPER: gl.constexpr, FORM: gl.constexpr):
    """The same of a tile."""
    first, second = halves(tile, FORM.blocks)
    first = _block_part(first, row_unit, key_units[0], edge, IS_UPPER, FORM)
    if FORM.blocks == 2:
        return _rejoined(first, _block_part(second, row_unit, key_units[1], edge, IS_UPPER, FORM), FORM)
    else:
        return gl.convert_layout(first, FORM.scores)


@jit
def any_far_below(lane_max, row_max, PART: gl.constexpr, FORM: gl.constexpr):
    """Whether a thread's own keys all lie so far below their row's maximum that FP8 does not hold both.

    A reduction to one number would take nine shuffles and two barriers. Here each thread brings its answer into a
    register of its own, and a barrier collects one bit of each.
    """
    is_far = (lane_max < row_max[:, None] - FAR * FORM.steps) & (lane_max > LOWEST)
    gl.inline_asm_elementwise(
        "or.b32 far, $2, $3; mov.b32 $0, 0; mov.b32 $1, 0;",
        "=r,=r,r,r",
        [is_far.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )
    barrier_number: gl.constexpr = 14 + PART  # Triton takes the first ones
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
def _as_operand(scores, FORM: gl.constexpr):
    """Scores of a key block as they lie in P, by lanes: [64, 16 / w, 4, w]."""
    if FORM.fp8_values:
        scores = in_fp8_token_order(scores)
    return gl.convert_layout(gl.reshape(scores, (ROWS, 16 // FORM.k_width, 4, FORM.k_width)), FORM.by_lanes)


@jit
def _for_lanes(numbers):
    """One number for each thread of a row [64, 4], to go with `_as_operand`."""
    return numbers[:, None, :, None]


@jit
def _codes(scores, slope, offset):
    """E4M3 codes of P: scores * slope + offset, from 0 up, rounded to the next multiple of 2^-24.

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
def probabilities(block, row_unit, key_unit, top, P_TYPE: gl.constexpr, FORM: gl.constexpr):
    """P of one key block as the left operand of P V, and the sum of each thread's own columns, [64, 4] (0 for codes).

    What is subtracted is of the size of FLOAT_OFFSET and rounded (once: fma), by up to three quarters of an integer;
    the maximum itself by a quarter. So one integer more is subtracted, far less than what rounding Q and K to 8 bits
    does. Else the largest P could exceed 448: code 127 is NaN, and an exponential would be cut off in P V alone.

    Args:
        block: raw scores [64, 64].
        row_unit, key_unit: what codes of the queries and keys are worth.
        top: [64], the score that P counts from, the maximum as a rule, less what P = 1 is stored as; in steps.
    """
    scores = _as_operand(as_scores(block), FORM)
    lane_sum = 0.0
    if FORM.codes:
        slope = _unit(row_unit * CODE_STEP, key_unit, FORM)
        offset = gl.fma(slope, -(FLOAT_OFFSET + 1.0), (top * -CODE_STEP)[:, None])
        probability = _codes(scores, _for_lanes(slope), _for_lanes(offset))
    else:
        unit = _unit(row_unit, key_unit, FORM)
        if FORM.quantized:
            offset = gl.fma(unit, FLOAT_OFFSET + 1.0, top[:, None])
            scores = scores * _for_lanes(unit) - _for_lanes(offset)
        else:
            scores = scores * unit - _for_lanes(top[:, None])
        exact = gl.exp2(scores)
        lane_sum = gl.convert_layout(gl.sum(gl.sum(exact, 3), 1), FORM.lanes)
        probability = exact.to(P_TYPE)
    return gl.convert_layout(gl.reshape(probability, (ROWS, BLOCK_K)), FORM.probability), lane_sum
