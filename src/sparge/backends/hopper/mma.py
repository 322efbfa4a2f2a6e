"""Matrix products of a consumer (warpgroup_mma), and helpers to split a stage's scores into its key blocks."""

from __future__ import annotations

from sparge.backends.gpu.gluon import gl, jit, warpgroup_mma
from sparge.backends.gpu.primitives import BLOCK_K, INT32_AS_FLOAT
from sparge.backends.hopper.spec import ROWS


@jit
def issue_qk(query, key, SPEC: gl.constexpr):
    """Issue S = Q K^T of a stage, [64, keys]: INT32 whose bits are floats offset by 1.5 * 2^23, or float32."""
    if SPEC.quantized:
        start = gl.full((ROWS, SPEC.keys), INT32_AS_FLOAT, gl.int32, SPEC.scores_layout)
        return warpgroup_mma(query, key.permute((1, 0)), start, is_async=True)
    else:
        zeros = gl.full((ROWS, SPEC.keys), 0.0, gl.float32, SPEC.scores_layout)
        return warpgroup_mma(query, key.permute((1, 0)), zeros, use_acc=False, is_async=True)


@jit
def issue_pv(p, value, accumulator, FRESH: gl.constexpr, SPEC: gl.constexpr):
    """Issue P V of one key block, added to the accumulator, or to zero if FRESH."""
    if SPEC.fp8_values:
        value = value.permute((1, 0))
    return warpgroup_mma(p, value, accumulator, use_acc=not FRESH, is_async=True)


@jit
def issue_row_sums(p, ones, accumulator, FRESH: gl.constexpr, SPEC: gl.constexpr):
    """Issue the row sums of one key block's rounded P, as a product with ones on the tensor cores."""
    p = gl.convert_layout(p, SPEC.summed_p_layout)
    return warpgroup_mma(p, ones, accumulator, use_acc=not FRESH, is_async=True)


@jit
def split_blocks(scores, BLOCKS: gl.constexpr):
    """Split a stage's scores [64, 128] into two key blocks [64, 64]; a single block is returned twice."""
    if BLOCKS == 1:
        return scores, scores
    else:
        return gl.split(gl.permute(gl.reshape(scores, (ROWS, 2, BLOCK_K)), (0, 2, 1)))


@jit
def join_blocks(first, second, SPEC: gl.constexpr):
    """Join two key blocks [64, 64]; the inverse of `split_blocks`."""
    if SPEC.blocks == 1:
        return gl.convert_layout(first, SPEC.scores_layout)
    else:
        scores = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), (ROWS, 2 * BLOCK_K))
        return gl.convert_layout(scores, SPEC.scores_layout)
