"""The epilogue of a tile: normalize the output and store output and LSE."""

from __future__ import annotations

from sparge.backends.gpu.gluon import aggregate, gl, jit
from sparge.backends.gpu.primitives import LN_2
from sparge.backends.hopper.softmax import LOWEST
from sparge.backends.hopper.spec import ROWS


@aggregate
class TileResult:
    """Results of the main loop for a consumer's 64 queries."""

    output: gl.tensor  # P V, [64, value_dim]
    row_sum: gl.tensor  # row sums of P, [64, 8] with equal columns, or one per lane, [64, 4]
    row_ref: gl.tensor  # [64], row reference of output and row sums, in score units
    skipped: gl.tensor | gl.constexpr  # number of kept blocks whose P V was skipped; 0 if not counted


@aggregate
class EpilogueScales:
    """The LSE shift of each query, [64], and the scale of each value channel, [value_dim]."""

    lse_shift: gl.tensor | gl.constexpr
    value: gl.tensor | gl.constexpr


@jit
def load_epilogue_scales(scales, coordinates, first_query, sizes, lengths, SPEC: gl.constexpr):
    """Load the scales of a tile's epilogue; without quantization, they are 0 and 1."""
    flat_kv_head = coordinates.batch * (sizes.heads // sizes.group) + coordinates.kv_head
    lse_shift = 0.0
    value_scale = 1.0
    if SPEC.quantized:
        positions = first_query + gl.arange(0, ROWS, SPEC.output_row_layout)
        flat_queries = coordinates.flat_head.to(gl.int64) * sizes.q_len + positions
        lse_shift = gl.load(scales.lse_shift + flat_queries, mask=positions < lengths.q_len, other=0.0)
    if SPEC.fp8_values:
        first_channel = coordinates.value_slice * SPEC.value_dim
        channels = first_channel + gl.arange(0, SPEC.value_dim, gl.SliceLayout(0, SPEC.output_layout))
        scale_ptr = scales.value + flat_kv_head.to(gl.int64) * SPEC.value_scale_stride
        value_scale = gl.load(scale_ptr + channels, mask=channels < SPEC.output_dim, other=0.0)
    return EpilogueScales(lse_shift=lse_shift, value=value_scale)


def _exchange_with(bit: int) -> gl.constexpr:
    """Return assembly that exchanges words ($2, $3) between two threads whose lane numbers differ in one bit.

    The thread without the bit receives the first words of both threads, the thread with the bit the second words.
    """
    return gl.constexpr(
        f"""{{
        .reg .pred has_bit;
        .reg .b32 lane, sent, received;
        mov.u32 lane, %laneid;
        and.b32 lane, lane, {bit};
        setp.ne.u32 has_bit, lane, 0;
        selp.b32 sent, $2, $3, has_bit;
        shfl.sync.bfly.b32 received, sent, {bit}, 31, 0xffffffff;
        selp.b32 $0, received, $2, has_bit;
        selp.b32 $1, $3, received, has_bit;
        }}"""
    )


LANE_BIT_0 = _exchange_with(1)
LANE_BIT_1 = _exchange_with(2)


@jit
def _exchange(first, second, WITH: gl.constexpr):
    """Apply the assembly of `_exchange_with` to two tensors."""
    return gl.inline_asm_elementwise(
        WITH,
        "=&r,=&r,r,r",
        [first, second],
        dtype=(first.dtype, first.dtype),
        is_pure=False,
        pack=32 // first.dtype.primitive_bitwidth,
    )


@jit
def in_groups_of_8(output, SPEC: gl.constexpr):
    """Redistribute the output to 8 adjacent channels per thread, so that 16-bit outputs are stored 16 bytes at a time.

    In a product, each of the four threads of a row has two adjacent channels of every 8. Two exchanges swap bits of the
    channel index between register and thread: first bit 3 with bit 1, then bit 4 with bit 2.
    """
    groups: gl.constexpr = SPEC.value_dim // 32
    bits = gl.reshape(output, (ROWS, groups, 2, 2, 2, 2, 2))  # bits of the channel index, lowest last
    first, second = gl.split(gl.permute(bits, (0, 1, 2, 4, 5, 6, 3)))
    bits = gl.permute(gl.join(*_exchange(first, second, LANE_BIT_0)), (0, 1, 2, 4, 3, 6, 5))
    first, second = gl.split(gl.permute(bits, (0, 1, 3, 4, 5, 6, 2)))
    bits = gl.permute(gl.join(*_exchange(first, second, LANE_BIT_1)), (0, 1, 3, 2, 6, 4, 5))
    return gl.convert_layout(gl.reshape(bits, (ROWS, SPEC.value_dim)), SPEC.store_layout)


@jit
def write_tile(result, epilogue_scales, coordinates, first_query, sizes, lengths, results, SPEC: gl.constexpr):
    """Divide the output by the row sums, and store output and LSE of 64 queries: 0 and -inf if a query sees no key."""
    # LSE, [64]
    q_len, value_slice = lengths.q_len, coordinates.value_slice
    if SPEC.exponential_free:
        total = gl.convert_layout(gl.max(result.row_sum, 1), SPEC.output_row_layout)
    else:
        total = gl.convert_layout(gl.sum(result.row_sum, 1), SPEC.output_row_layout)
    row_ref = gl.convert_layout(result.row_ref, SPEC.output_row_layout)
    # Both conditions are needed: the maximum of a row of NaN is LOWEST, and for huge scores all FP8 P may round to 0.
    is_empty = (total == 0.0) & (row_ref == LOWEST)
    positions = first_query + gl.arange(0, ROWS, SPEC.output_row_layout)
    if SPEC.packed:
        flat_queries = coordinates.head.to(gl.int64) * sizes.total_q + (lengths.q_start + positions)
    else:
        flat_queries = coordinates.flat_head.to(gl.int64) * q_len + positions
    lse_ptrs = results.lse + flat_queries
    log2_of_sum = row_ref * (1.0 / SPEC.units_per_log2) + gl.log2(total * 2.0**-SPEC.log2_one)
    lse = log2_of_sum * LN_2 + epilogue_scales.lse_shift
    gl.store(lse_ptrs, gl.where(is_empty, float("-inf"), lse), mask=(positions < q_len) & (value_slice == 0))

    # Output, [64, value_dim]
    output = result.output * (1.0 / gl.where(is_empty, 1.0, total))[:, None]
    if SPEC.fp8_values:
        output = output * epilogue_scales.value[None, :]
    output = in_groups_of_8(output.to(results.output.dtype.element_ty), SPEC)
    rows: gl.constexpr = gl.SliceLayout(1, SPEC.store_layout)
    columns: gl.constexpr = gl.SliceLayout(0, SPEC.store_layout)
    channels = value_slice * SPEC.value_dim + gl.arange(0, SPEC.value_dim, columns)
    positions = first_query + gl.arange(0, ROWS, rows)
    if SPEC.packed:
        flat_queries = (lengths.q_start.to(gl.int64) + positions) * sizes.heads + coordinates.head
    elif SPEC.tokens_first:
        flat_queries = (coordinates.batch.to(gl.int64) * q_len + positions) * sizes.heads + coordinates.head
    else:
        flat_queries = coordinates.flat_head.to(gl.int64) * q_len + positions
    pointers = results.output + flat_queries[:, None] * SPEC.output_dim + channels[None, :]
    inside = (positions < q_len)[:, None] & (channels < SPEC.output_dim)[None, :]
    is_empty = gl.convert_layout(is_empty, rows)[:, None]
    gl.store(pointers, output, mask=inside & (is_empty == 0))
    gl.store(pointers, gl.zeros_like(output), mask=inside & is_empty)  # the computed output may be NaN
