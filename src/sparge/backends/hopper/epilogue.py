"""The end of a row: output and LSE leave the registers."""

from __future__ import annotations

from sparge.backends.cuda.primitives import LN_2
from sparge.backends.hopper.gluon import gl, jit
from sparge.backends.hopper.softmax import LOWEST, ROWS


@jit
def load_row_scales(scales, target, flat_kv_head, FORM: gl.constexpr):
    """What the LSE of a row's queries is shifted by, and what its value channels are worth."""
    _, _, value_scale_ptr, lse_shift_ptr = scales
    flat_head, first_query, value_slice, q_len = target
    shift = 0.0
    value_scale = 1.0
    if FORM.quantized:
        positions = first_query + gl.arange(0, ROWS, FORM.output_rows)
        flat_queries = flat_head.to(gl.int64) * q_len + positions
        shift = gl.load(lse_shift_ptr + flat_queries, mask=positions < q_len, other=0.0)
    if FORM.fp8_values:
        channels = value_slice * FORM.value_dim + gl.arange(0, FORM.value_dim, FORM.output_columns)
        scale_base = value_scale_ptr + flat_kv_head.to(gl.int64) * FORM.value_scales
        value_scale = gl.load(scale_base + channels, mask=channels < FORM.output_dim, other=0.0)
    return shift, value_scale


def _exchange_with(lane: int) -> gl.constexpr:
    """Two words of each thread, $2 and $3, against those of the thread whose number differs in one bit.

    The thread without the bit keeps the first and gets the other one's first; the other keeps the second.
    """
    return gl.constexpr(
        f"""{{
        .reg .pred has_bit;
        .reg .b32 number, given, got;
        mov.u32 number, %laneid;
        and.b32 number, number, {lane};
        setp.ne.u32 has_bit, number, 0;
        selp.b32 given, $2, $3, has_bit;
        shfl.sync.bfly.b32 got, given, {lane}, 31, 0xffffffff;
        selp.b32 $0, got, $2, has_bit;
        selp.b32 $1, $3, got, has_bit;
        }}"""
    )


LANE_BIT_0 = _exchange_with(1)
LANE_BIT_1 = _exchange_with(2)


@jit
def _exchange(first, second, WITH: gl.constexpr):
    return gl.inline_asm_elementwise(
        WITH,
        "=&r,=&r,r,r",
        [first, second],
        dtype=(first.dtype, first.dtype),
        is_pure=False,
        pack=32 // first.dtype.primitive_bitwidth,
    )


@jit
def in_groups_of_8(output, FORM: gl.constexpr):
    """The output with 8 neighbouring channels per thread: 16 bytes, if they have 16 bits each.

    In a product, the four threads of a row hold two neighbours each of every 8 channels. They exchange them: first
    those 8 channels apart against those 2 apart, then 16 against 4.
    """
    groups: gl.constexpr = FORM.value_dim // 32
    bits = gl.reshape(output, (ROWS, groups, 2, 2, 2, 2, 2))  # of a channel's number, the lowest last
    first, second = gl.split(gl.permute(bits, (0, 1, 2, 4, 5, 6, 3)))
    bits = gl.permute(gl.join(*_exchange(first, second, LANE_BIT_0)), (0, 1, 2, 4, 3, 6, 5))
    first, second = gl.split(gl.permute(bits, (0, 1, 3, 4, 5, 6, 2)))
    bits = gl.permute(gl.join(*_exchange(first, second, LANE_BIT_1)), (0, 1, 3, 2, 6, 4, 5))
    return gl.convert_layout(gl.reshape(bits, (ROWS, FORM.value_dim)), FORM.stored)


@jit
def write_row(output, row_sum, row_top, row_scales, target, results, FORM: gl.constexpr):
    """Divide by the row sums; write output and LSE of 64 queries."""
    output_ptr, lse_ptr = results
    shift, value_scale = row_scales
    flat_head, first_query, value_slice, q_len = target
    if FORM.codes:
        total = gl.convert_layout(gl.max(row_sum, 1), FORM.output_rows)
    else:
        total = gl.convert_layout(gl.sum(row_sum, 1), FORM.output_rows)
    row_top = gl.convert_layout(row_top, FORM.output_rows)
    # Only both: a row of NaN has no maximum, and where scores are huge all codes may be 0.
    empty = (total == 0.0) & (row_top == LOWEST)
    positions = first_query + gl.arange(0, ROWS, FORM.output_rows)
    lse_ptrs = lse_ptr + (flat_head.to(gl.int64) * q_len + positions)
    lse = (row_top * (1.0 / FORM.steps) + gl.log2(total * FORM.inverse_one)) * LN_2 + shift
    gl.store(lse_ptrs, gl.where(empty, float("-inf"), lse), mask=(positions < q_len) & (value_slice == 0))

    output = output * (1.0 / gl.where(empty, 1.0, total))[:, None]
    if FORM.fp8_values:
        output = output * value_scale[None, :]
    output = in_groups_of_8(output.to(output_ptr.dtype.element_ty), FORM)
    rows: gl.constexpr = gl.SliceLayout(1, FORM.stored)
    channels = value_slice * FORM.value_dim + gl.arange(0, FORM.value_dim, gl.SliceLayout(0, FORM.stored))
    positions = first_query + gl.arange(0, ROWS, rows)
    flat_queries = flat_head.to(gl.int64) * q_len + positions
    pointers = output_ptr + flat_queries[:, None] * FORM.output_dim + channels[None, :]
    inside = (positions < q_len)[:, None] & (channels < FORM.output_dim)[None, :]
    empty = gl.convert_layout(empty, rows)[:, None]
    gl.store(pointers, output, mask=inside & (empty == 0))
    gl.store(pointers, gl.zeros_like(output), mask=inside & empty)  # what was computed may be NaN
