"""A stage's scores by key block: one or two of 64 keys."""

from __future__ import annotations

from sparge.backends.gpu.gluon import gl, jit
from sparge.backends.gpu.primitives import BLOCK_K
from sparge.backends.hopper.spec import ROWS


@jit
def split_blocks(scores, BLOCKS: gl.constexpr):
    """The key blocks of a stage's scores: [64, 128] as two [64, 64]; twice the same if there is one."""
    if BLOCKS == 1:
        return scores, scores
    else:
        return gl.split(gl.permute(gl.reshape(scores, (ROWS, 2, BLOCK_K)), (0, 2, 1)))


@jit
def join_blocks(first, second, SPEC: gl.constexpr):
    """The inverse of `split_blocks`."""
    if SPEC.blocks == 1:
        return gl.convert_layout(first, SPEC.scores_layout)
    else:
        scores = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), (ROWS, 2 * BLOCK_K))
        return gl.convert_layout(scores, SPEC.scores_layout)
