"""Codes of P whose row maximum is guessed, and how to tell that a guess was too low.

There are 126 codes, eight to the octave; a guess above the maximum costs some of the smallest. So the guess follows
what the row's scores reach, slowly up and down. It does not fall below ``base``, the largest score measured, because
scores far below that one count for little. docs/hopper.md has the reasons.
"""

from __future__ import annotations

from sparge.backends.hopper.arithmetic import CODE_STEP, ROWS, TOP_CODE, as_operand, as_scores, code_line
from sparge.backends.hopper.gluon import gl, jit
from sparge.backends.triton.primitives import FLOAT_OFFSET

HEADROOM = gl.constexpr(56.0)
"""Steps that a guess lies above what the latest tiles reached: seven octaves."""
LARGEST_ROOM = gl.constexpr(48.0)
"""Steps that a guess lies above the largest score of all, at most: six octaves."""
FIRST_ROOM = gl.constexpr(16.0)
"""Steps more above the first tiles that a row sees. Guesses keep them until they come down."""
FIRST_PAIRS = gl.constexpr(3)
"""Pairs that are measured before the first guess. Where few blocks are kept, half of all rows would fail in the second
pair and a quarter in the third, and a failure adds one or two pairs to a row, measuring a sixth of one
(docs/performance.md, "Short rows"). A causal row ascends to its highest scores, and measures one pair."""
DESCENT = gl.constexpr(8.0)
"""Steps that a guess comes down by from one pair of tiles to the next, at most."""
ASCENT = gl.constexpr(16.0)
"""Steps that a guess goes up by from one pair of tiles to the next, at most. A peak is no reason to expect another."""
LARGEST_LEAD = gl.constexpr(512.0)
"""Steps that a guess may lie above the base. A sum in units of the latter overflows beyond 800."""
LOWEST = gl.constexpr(-1e30)
"""Below every score. A guess this low is always wrong."""


@jit
def _room_above(reached, base, more):
    room = gl.minimum(reached + HEADROOM, gl.maximum(reached, base) + LARGEST_ROOM) + more
    return gl.maximum(room, base)


@jit
def guess_after_measuring(reached, base, guess):
    """The guess after tiles that were measured: the row's first, masked ones, or because ``guess`` was too low."""
    more = gl.where(guess == LOWEST, FIRST_ROOM, 0.0)
    return gl.maximum(_room_above(reached, base, more), guess)


@jit
def next_guess(reached, base, guess):
    """The guess after a pair of tiles for which ``guess`` was right."""
    following = gl.maximum(_room_above(reached, base, 0.0), guess - DESCENT)
    return gl.minimum(following, gl.minimum(guess + ASCENT, base + LARGEST_LEAD))


def _packed_codes(clamp: str) -> gl.constexpr:
    """Codes from scores, slopes and offsets, four at a time: bytes in $0; the same in 16 bits in $1 and $2."""
    return gl.constexpr(
        f"""{{
        .reg .f32 x<4>;
        .reg .b32 most;
        fma.rn.sat.f32 x0, $3, $7, $11;
        fma.rn.sat.f32 x1, $4, $8, $12;
        fma.rn.sat.f32 x2, $5, $9, $13;
        fma.rn.sat.f32 x3, $6, $10, $14;
        cvt.rn.f16x2.f32 $1, x1, x0;
        cvt.rn.f16x2.f32 $2, x3, x2;
        {clamp}
        prmt.b32 $0, $1, $2, 0x6420;
        }}"""
    )


FREE = _packed_codes("")
CLAMPED = _packed_codes("mov.b32 most, 0x007e007e; min.s16x2 $1, $1, most; min.s16x2 $2, $2, most;")


@jit
def codes_below(half, unit, top, HOW: gl.constexpr, FORM: gl.constexpr):
    """Codes of P of one key block relative to a score, and the same in 16 bits, where one that is too high can be seen.

    CLAMPED is for a score that was measured: rounding can lift its own code by a fraction of what an integer is worth.

    Args:
        half: raw scores [64, 64].
        unit: what a raw score is worth, in steps.
        top: [64], the score of the largest code, in steps.
    """
    slope, offset = code_line(unit, FLOAT_OFFSET, top - TOP_CODE)
    codes, words = gl.inline_asm_elementwise(
        HOW,
        "=r,=&r,=&r,f,f,f,f,f,f,f,f,f,f,f,f",
        [as_operand(as_scores(half), FORM), slope[:, None], offset[:, None]],
        dtype=(gl.int8, gl.int16),
        is_pure=True,
        pack=4,
    )
    return codes.to(gl.float8e4nv, bitcast=True), words


@jit
def larger(a, b):
    """Maximum of 16-bit numbers, two at a time."""
    return gl.inline_asm_elementwise("max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int16, is_pure=True, pack=2)


@jit
def _left_and_right(words):
    columns: gl.constexpr = words.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(words, (ROWS, 2, columns)), (0, 2, 1)))


@jit
def largest_words(words):
    """Each thread's largest, [64, 4, 2], of the words [64, 64] of a key block."""
    words = larger(*_left_and_right(words))
    words = larger(*_left_and_right(words))  # [64, 16]
    left, right = gl.split(gl.permute(gl.reshape(words, (ROWS, 4, 2, 2)), (0, 1, 3, 2)))
    return larger(left, right)


@jit
def reached_score(largest, guess, FORM: gl.constexpr):
    """The largest score of each row, in steps; at least that of code 0. Only for a guess that was right."""
    codes = largest.to(gl.float16, bitcast=True).to(gl.float32) * (1.0 / CODE_STEP)
    return guess - TOP_CODE + gl.convert_layout(gl.max(gl.max(codes, 2), 1), FORM.rows)


@jit
def declare_largest():
    """Declare the register that `fits` uses, once per kernel."""
    gl.inline_asm_elementwise(".reg .b32 largest; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def clear_largest():
    """Before the first `fits` of a consumer."""
    gl.inline_asm_elementwise("mov.b32 largest, 0; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def fits(words, PART: gl.constexpr):
    """Whether no word of this warpgroup exceeds the largest code.

    A reduction to one number would take nine shuffles and two barriers. Here each thread brings its words into a
    register of its own, and a barrier collects one bit of each.
    """
    gl.inline_asm_elementwise(
        "max.s16x2 largest, largest, $1; mov.b32 $0, 0;", "=r,r", [words], dtype=gl.int16, is_pure=False, pack=2
    )
    barrier_number: gl.constexpr = 14 + PART  # Triton takes the first ones
    answer = gl.inline_asm_elementwise(
        """{
        .reg .b32 high;
        .reg .pred exceeds;
        add.u32 high, largest, 0x00010001;
        and.b32 high, high, 0xff80ff80;
        setp.ne.u32 exceeds, high, 0;
        barrier.cta.red.or.pred exceeds, $1, 128, exceeds;
        vote.sync.any.pred exceeds, exceeds, 0xffffffff;
        selp.b32 $0, 0, 1, exceeds;
        mov.b32 largest, 0;
        }""",
        "=r,n",
        [gl.to_tensor(barrier_number)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    return answer != 0
