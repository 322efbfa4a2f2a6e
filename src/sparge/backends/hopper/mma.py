"""Matrix products of a consumer, started and left to the tensor cores, and what it waits for before them."""

from __future__ import annotations

from sparge.backends.cuda.primitives import INT32_AS_FLOAT
from sparge.backends.hopper.gluon import gl, jit, mbarrier, warpgroup_mma
from sparge.backends.hopper.softmax import ROWS


@jit
def await_stage(full, turn, pred, FORM: gl.constexpr):
    """Wait until the copies of a turn have landed. Turns are counted over all rows."""
    mbarrier.wait(full.index(turn % FORM.stages), (turn // FORM.stages) & 1, pred=pred)


@jit
def note_of(notes, stage, FORM: gl.constexpr):
    """A number that the producer wrote beside a stage."""
    return gl.max(notes.index(stage).load(FORM.rows), 0)


@jit
def start_scores(query, key, FORM: gl.constexpr):
    """Start Q K^T of a tile: [64, keys] INT32 that are floats above 1.5 * 2^23, or float32."""
    if FORM.quantized:
        start = gl.full((ROWS, FORM.keys), INT32_AS_FLOAT, gl.int32, FORM.scores)
        return warpgroup_mma(query, key.permute((1, 0)), start, is_async=True)
    else:
        nothing = gl.full((ROWS, FORM.keys), 0.0, gl.float32, FORM.scores)
        return warpgroup_mma(query, key.permute((1, 0)), nothing, use_acc=False, is_async=True)


@jit
def start_values(probability, value, sums, FRESH: gl.constexpr, FORM: gl.constexpr):
    """Start P V of one key block on top of ``sums``, or of nothing where FRESH."""
    if FORM.fp8_values:
        value = value.permute((1, 0))
    return warpgroup_mma(probability, value, sums, use_acc=not FRESH, is_async=True)


@jit
def start_sums(probability, ones, sums, FRESH: gl.constexpr, FORM: gl.constexpr):
    """Start the row sums of one key block's codes: a product with ones."""
    return warpgroup_mma(gl.convert_layout(probability, FORM.summand), ones, sums, use_acc=not FRESH, is_async=True)
