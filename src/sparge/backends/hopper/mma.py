"""Asynchronous matrix products of a consumer (warpgroup_mma)."""

from __future__ import annotations

from sparge.backends.gpu.gluon import gl, jit, warpgroup_mma
from sparge.backends.gpu.primitives import INT32_AS_FLOAT
from sparge.backends.hopper.spec import ROWS


@jit
def issue_qk(query, key, SPEC: gl.constexpr):
    """Issue S = Q K^T of a stage: [64, keys] INT32 whose bits are floats above 1.5 * 2^23, or float32."""
    if SPEC.quantized:
        start = gl.full((ROWS, SPEC.keys), INT32_AS_FLOAT, gl.int32, SPEC.scores_layout)
        return warpgroup_mma(query, key.permute((1, 0)), start, is_async=True)
    else:
        nothing = gl.full((ROWS, SPEC.keys), 0.0, gl.float32, SPEC.scores_layout)
        return warpgroup_mma(query, key.permute((1, 0)), nothing, use_acc=False, is_async=True)


@jit
def issue_pv(p, value, accumulator, FRESH: gl.constexpr, SPEC: gl.constexpr):
    """Issue P V of one key block, added to the accumulator, or to zero if FRESH."""
    if SPEC.fp8_values:
        value = value.permute((1, 0))
    return warpgroup_mma(p, value, accumulator, use_acc=not FRESH, is_async=True)


@jit
def issue_row_sums(p, ones, accumulator, FRESH: gl.constexpr, SPEC: gl.constexpr):
    """Issue the row sums of one key block's rounded P as a product with ones."""
    p = gl.convert_layout(p, SPEC.summed_p_layout)
    return warpgroup_mma(p, ones, accumulator, use_acc=not FRESH, is_async=True)
