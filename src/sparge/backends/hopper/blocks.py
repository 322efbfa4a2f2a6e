"""Split the scores of a stage into key blocks: one or two of 64 keys."""

from __future__ import annotations

from sparge.backends.gpu.gluon import gl, jit
from sparge.backends.gpu.primitives import BLOCK_K
from sparge.backends.hopper.spec import ROWS


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
