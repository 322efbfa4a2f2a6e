"""How often guessed maxima fail, and what they cost in accuracy: `python -m benchmarks.guesses [TOKENS]`.

A model in PyTorch of `backends/hopper/guessed.py`, for one consumer's 64 queries over random blocks. Its only errors
are those of P's codes; the rest is float32.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparge.backends.hopper.guess import (
    ASCENT,
    DESCENT,
    FIRST_PAIRS,
    FIRST_ROOM,
    HEADROOM,
    LARGEST_LEAD,
    LARGEST_ROOM,
    LOWEST,
)
from sparge.evaluate import bench_inputs
from sparge.evaluate.metrics import relative_l1
from sparge.geometry import BLOCK_K, BLOCK_Q, ROW_GROUP
from sparge.reference import FP8_CODES_PER_OCTAVE, FP8_MAX, FP8_TOP_CODE, fp8_from_log2

TILE = 2 * BLOCK_K
STEPS = 8 * math.log2(math.e)
"""Of a score: eight to the octave."""
ROWS_MEASURED = 12


class Walk(NamedTuple):
    """Output and LSE of a row; pairs of tiles computed twice; pairs measured, of how many."""

    output: Tensor
    lse: Tensor
    failed: int
    measured: int
    pairs: int


def probability(scores: Tensor, top: Tensor) -> Tensor:
    """P as the kernel stores it, 448 at the score ``top``."""
    return fp8_from_log2((scores - top.view(-1, *[1] * (scores.ndim - 1))) / FP8_CODES_PER_OCTAVE)


def room_above(reached: Tensor, base: Tensor, more: Tensor | float) -> Tensor:
    room = torch.minimum(reached + HEADROOM.value, torch.maximum(reached, base) + LARGEST_ROOM.value) + more
    return torch.maximum(room, base)


def guess_after_measuring(reached: Tensor, base: Tensor, guess: Tensor) -> Tensor:
    more = torch.where(guess == LOWEST.value, FIRST_ROOM.value, 0.0)
    return torch.maximum(room_above(reached, base, more), guess)


def next_guess(reached: Tensor, base: Tensor, guess: Tensor) -> Tensor:
    following = torch.maximum(room_above(reached, base, 0.0), guess - DESCENT.value)
    return torch.minimum(following, torch.minimum(guess + ASCENT.value, base + LARGEST_LEAD.value))


def walk(scores: Tensor, value: Tensor, missing: int = 0, *, is_causal: bool = False) -> Walk:
    """A row's tiles, in the order given.

    Args:
        scores: [rows, tiles, 128] in steps, -inf where hidden; an even number of tiles.
        value: [tiles, 128, channels].
        missing: how many of the last blocks the row does not have, wherever its last pair comes. They are hidden.
        is_causal: one pair is measured before the first guess, not three. What is hidden is up to ``scores``.
    """
    rows, tiles, _ = scores.shape
    base = torch.full((rows,), LOWEST.value)
    guess = base
    total, output = torch.zeros(rows), torch.zeros(rows, value.shape[2])
    failed = measured = 0
    careful = 1 if is_causal else FIRST_PAIRS.value
    for first in range(0, tiles, 2):
        pair = scores[:, first : first + 2]
        both = pair.flatten(1)
        seen = (pair > -math.inf).unflatten(2, (2, BLOCK_K))  # by rows, tiles, blocks
        lacks_last = missing == 1 and not bool(seen[:, 1, 1].any())
        is_right = first >= 2 * careful and bool(seen.flatten(1, 2)[:, : 3 if lacks_last else 4].all())
        if is_right:
            is_right = not bool((both - guess[:, None]).round().gt(0).any())
            failed += not is_right
        if is_right:
            weight = 2.0 ** ((guess - base) / 8)
            weighted = probability(both, guess) * weight[:, None]
            output = output + weighted @ value[first : first + 2].flatten(0, 1)
            total = total + weighted.sum(1)
            reached = guess - FP8_TOP_CODE + (both.amax(1) - guess + FP8_TOP_CODE).round().clamp(min=0)
            guess = next_guess(reached, base, guess)
            continue
        measured += 1
        for tile in (first, first + 1):
            new_base = torch.maximum(base, scores[:, tile].amax(1))
            decay = 2.0 ** ((base - new_base) / 8)
            base = new_base
            fresh = probability(scores[:, tile], base)
            output = output * decay[:, None] + fresh @ value[tile]
            total = total * decay + fresh.sum(1)
        present = 1 if missing >= 2 and not bool(seen[:, 1].any()) else 2
        guess = guess_after_measuring(pair[:, :present].amax(2).amin(1), base, guess)
    lse = (base / 8 + (total / FP8_MAX).log2()) * math.log(2)
    return Walk(output / total[:, None], lse, failed, measured, tiles // 2)


def outwards(count: int, center: int) -> list[int]:
    """Places around a center in turns, in a circle (`backends/hopper/producer.py`)."""
    return [(center + ((i + 1) // 2 if i % 2 else -(i // 2))) % count for i in range(count)]


@dataclass
class Inputs:
    """One head: [tokens, channels] each."""

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool


def random_row(inputs: Inputs, density: float, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Scores and values of a row of random kept blocks, as the producer brings them; how many the last pair lacks."""
    tokens, dim = inputs.query.shape
    q_block = int(torch.randint(tokens // BLOCK_Q, (1,), generator=generator))
    first = q_block * BLOCK_Q
    visible = first // BLOCK_K + 2 if inputs.is_causal else tokens // BLOCK_K
    kept = torch.randperm(visible, generator=generator)[: max(1, round(visible * density))].sort().values
    missing = -len(kept) % 4
    blocks = torch.cat([kept, torch.full((missing,), -1)]).view(-1, 4)
    if not inputs.is_causal:
        own = max(int((kept <= first // BLOCK_K).sum()) - 1, 0) // 4
        blocks = blocks[outwards(len(blocks), own)]
    positions = (blocks.flatten()[:, None] * BLOCK_K + torch.arange(BLOCK_K)).view(-1, TILE)
    key, value = inputs.key[positions.clamp(min=0)], inputs.value[positions.clamp(min=0)]
    scores = torch.einsum("rd,tkd->rtk", inputs.query[first : first + ROW_GROUP], key) * (STEPS / math.sqrt(dim))
    hidden = (positions < 0).expand_as(scores)
    if inputs.is_causal:
        hidden = hidden | (positions > torch.arange(first, first + ROW_GROUP)[:, None, None])
    return scores.masked_fill(hidden, -math.inf), value, missing


def report(name: str, inputs: Inputs, density: float) -> None:
    generator = torch.Generator().manual_seed(1)
    walks, errors, lse_errors = [], [], []
    for _ in range(ROWS_MEASURED):
        scores, value, missing = random_row(inputs, density, generator)
        row = walk(scores, value, missing, is_causal=inputs.is_causal)
        logits = scores.double().flatten(1) / STEPS
        exact = logits.softmax(1) @ value.double().flatten(0, 1)
        walks.append(row)
        errors.append(relative_l1(row.output, exact))
        lse_errors.append(float((row.lse - logits.logsumexp(1)).abs().mean()))
    pairs, failed, measured = (sum(getattr(row, field) for row in walks) for field in ("pairs", "failed", "measured"))
    count = len(walks)
    print(
        f"{name:7s} density {density}: {pairs / count:5.1f} pairs a row, {measured / count:.1f} measured, "
        f"{failed / count:.1f} computed twice; "
        f"rel. L1 {sum(errors) / count:.4f}, LSE off by {sum(lse_errors) / count:.4f}"
    )


def main(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1, tokens, 128)
    kinds = {
        "video": (bench_inputs.video_like(shape, generator), False, (0.5, 0.25, 0.1)),
        "text": (bench_inputs.text_like(shape, generator), True, (0.5,)),
        "random": (tuple(torch.randn(shape, generator=generator) for _ in range(3)), False, (0.5,)),
    }
    print(f"{tokens} tokens, D 128, {ROWS_MEASURED} rows each")
    for name, ((query, key, value), is_causal, densities) in kinds.items():
        inputs = Inputs(query[0, 0], (key - key.mean(2, keepdim=True))[0, 0], value[0, 0], is_causal)
        for density in densities:
            report(name, inputs, density)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 32768)
