"""Charts of the pages: what is drawn lies inside, and what cannot be drawn is not named."""

from __future__ import annotations

import re

import pytest

from sparge.evaluate.charts import BOTTOM, HEIGHT, TOP, Curve, Point, curves


def whiskers(svg: str) -> list[tuple[float, float]]:
    found = re.findall(r"class='whisker' d='M[\d.]+ ([\d.]+)V([\d.]+)'", svg)
    return [(float(top), float(bottom)) for top, bottom in found]


def ticks(svg: str) -> list[float]:
    return [float(text) for text in re.findall(r"text-anchor='end'>([\d.]+)</text>", svg)]


def test_intervals_are_drawn_whole() -> None:
    svg = curves("PSNR", [Curve("topk", [Point(0.5, 33.0, 13.4), Point(1.0, 50.9, 10.5)])], "density", "dB")
    shown = ticks(svg)
    assert shown[0] <= 33.0 - 13.4 and shown[-1] >= 50.9 + 10.5
    a_db = (HEIGHT - BOTTOM - TOP) / (shown[-1] - shown[0])
    assert [bottom - top for top, bottom in whiskers(svg)] == pytest.approx([26.8 * a_db, 21.0 * a_db], abs=0.2)


def test_intervals_beyond_a_logarithm_reach_the_axis() -> None:
    svg = curves("KL", [Curve("topk", [Point(0.5, 0.01, 0.02)])], "density", "nats", log_y=True)
    assert whiskers(svg)[0][1] == HEIGHT - BOTTOM


def test_what_has_no_logarithm_is_not_named() -> None:
    drawn = [Curve("kept", [Point(0.5, 0.01)]), Curve("equal", [Point(1.0, 0.0), Point(0.9, -1e-9)])]
    svg = curves("KL", drawn, "density", "nats", log_y=True)
    assert "kept" in svg and "equal" not in svg
    assert curves("KL", drawn[1:], "density", "nats", log_y=True) == ""


def test_shares_end_at_one() -> None:
    svg = curves("score", [Curve("topk", [Point(0.5, 1.0)])], "density", "score", y_range=(0.0, 1.0))
    assert (ticks(svg)[0], ticks(svg)[-1]) == (0.0, 1.0)
