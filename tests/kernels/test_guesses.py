"""Guessed row maxima (`backends/hopper/guess.py`), in a model of the kernel: it has no interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.guesses import STEPS, guess_after_measuring, next_guess, outwards, probability, walk
from torch import Tensor

from sparge.backends.hopper.guess import LOWEST
from sparge.reference import FP8_MAX

ROWS, TILE = 64, 128


def exact_lse(scores: Tensor) -> Tensor:
    return (scores.double().flatten(1) / STEPS).logsumexp(1)


def lse_of_the_specification(scores: Tensor) -> Tensor:
    """All codes relative to the row's maximum."""
    top = scores.flatten(1).amax(1)
    total = probability(scores.flatten(1), top).sum(1) / FP8_MAX
    return (top / 8 + total.log2()) * math.log(2)


def normal(tiles: int, octaves: float = 1.0, seed: int = 0) -> Tensor:
    return 8 * octaves * torch.randn(ROWS, tiles, TILE, generator=torch.Generator().manual_seed(seed))


def values(tiles: int) -> Tensor:
    return torch.randn(tiles, TILE, 8, generator=torch.Generator().manual_seed(1)) + 1


def number(value: float) -> Tensor:
    return torch.tensor([float(value)])


@pytest.mark.parametrize(
    ("reached", "guess", "following"),
    [
        (100, 148, 148),  # six octaves above what was reached, as before
        (100, 200, 192),  # slowly down
        (100, 110, 126),  # slowly up: one peak is no reason to expect another
        (0, 100, 100),  # not below the base
        (-1000, 700, 612),  # within reach of the base
    ],
)
def test_next_guess(reached: float, guess: float, following: float) -> None:
    assert float(next_guess(number(reached), number(100), number(guess))) == following


@pytest.mark.parametrize(
    ("reached", "guess", "following"),
    [
        (100, 0, 148),
        (60, 0, 116),
        (0, 0, 100),  # a peak in one of two tiles
        (100, 170, 170),  # rows that did not exceed their guess keep it
        (100, LOWEST.value, 164),  # a row's first tiles say little
        (0, LOWEST.value, 100),
        (-math.inf, LOWEST.value, 100),
    ],
)
def test_guess_after_measuring(reached: float, guess: float, following: float) -> None:
    assert float(guess_after_measuring(number(reached), number(100), number(guess))) == following


def test_even_scores_are_guessed() -> None:
    scores, value = normal(64), values(64)
    row = walk(scores, value)
    assert (row.failed, row.measured, row.pairs) == (0, 3, 32)
    exact = (scores.flatten(1) / STEPS).double().softmax(1) @ value.double().flatten(0, 1)
    assert float((row.output - exact).abs().sum() / exact.abs().sum()) < 0.01
    assert float((row.lse - exact_lse(scores)).abs().max()) < 0.01


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pairs", [4, 8, 32])
@pytest.mark.parametrize("octaves", [7, 9, 11, 13])
def test_a_peak_leaves_the_rest_its_codes(octaves: int, pairs: int, is_causal: bool) -> None:
    """Guesses far above the peak would cut off the rest: by 14 % of the sum at 11 octaves and 4 pairs (causal)."""
    scores = normal(2 * pairs)
    scores[:, 0, 5] = 8 * octaves
    error = walk(scores, values(2 * pairs), is_causal=is_causal).lse - exact_lse(scores)
    intended = lse_of_the_specification(scores) - exact_lse(scores)
    assert float(error.mean().abs()) <= float(intended.mean().abs()) + 2e-3


@pytest.mark.parametrize("octaves", [9, 11])
def test_a_peak_that_comes_late_is_measured(octaves: int) -> None:
    """A second guess would round the peak itself, half of the sum at 11 octaves: LSE off by .011 (root mean square)."""
    scores = normal(32)
    scores[:, 9, 5] = 8 * octaves + torch.rand(ROWS, generator=torch.Generator().manual_seed(2)) * 8
    row = walk(scores, values(32))
    assert (row.failed, row.measured) == (1, 4)
    assert float((row.lse - exact_lse(scores)).abs().max()) < 3e-3


@pytest.mark.parametrize("steps", [4, 20, 40, 100, 1000])
def test_scores_that_rise_stay_finite(steps: float) -> None:
    """From pair to pair by less than the room or more, in all by more than float32 has exponents."""
    pairs = 400
    scores = normal(2 * pairs) + steps * torch.arange(2 * pairs).div(2, rounding_mode="floor")[:, None]
    row = walk(scores, values(2 * pairs))
    assert row.output.isfinite().all()
    assert float((row.lse - exact_lse(scores)).abs().max()) < 0.1
    assert row.measured == row.failed + 3


def test_a_missing_block_is_guessed() -> None:
    scores = normal(8)
    scores[:, 7, 64:] = -math.inf
    row = walk(scores, values(8), missing=1)
    assert (row.failed, row.measured) == (0, 3)
    assert float((row.lse - exact_lse(scores)).abs().max()) < 0.05


@pytest.mark.parametrize(("is_causal", "measured"), [(False, 3), (True, 1)])
def test_a_missing_tile_says_nothing_about_the_row(is_causal: bool, measured: int) -> None:
    scores = normal(8)
    scores[:, 1] = -math.inf
    row = walk(scores, values(8), missing=2, is_causal=is_causal)
    assert (row.failed, row.measured) == (0, measured)


@pytest.mark.parametrize(
    ("pair", "is_causal", "outcome"),
    [(1, False, (0, 3)), (2, False, (0, 3)), (3, False, (1, 4)), (1, True, (1, 2))],
)
def test_where_a_row_starts_to_guess(pair: int, is_causal: bool, outcome: tuple[int, int]) -> None:
    scores = normal(16)
    scores[:, 2 * pair + 1, 5] = 8 * 11
    row = walk(scores, values(16), is_causal=is_causal)
    assert (row.failed, row.measured) == outcome


@pytest.mark.parametrize(("is_causal", "outcome"), [(False, (0, 3)), (True, (1, 2))])
def test_rows_that_see_nothing_at_first(is_causal: bool, outcome: tuple[int, int]) -> None:
    scores = normal(8)
    scores[:32, :2] = -math.inf
    row = walk(scores, values(8), is_causal=is_causal)
    assert (row.failed, row.measured) == outcome
    assert float((row.lse - exact_lse(scores)).abs().max()) < 0.05


@pytest.mark.parametrize("count", [1, 2, 3, 8, 13])
def test_outwards_visits_each_place_once(count: int) -> None:
    for center in range(count):
        places = outwards(count, center)
        assert places[0] == center
        assert sorted(places) == list(range(count))
