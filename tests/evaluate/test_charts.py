"""Charts: bounded axes, a list of values outside of them, colors of the page, and a note without matplotlib."""

from __future__ import annotations

import math
import re
import sys

import pytest

from page_parser import Page
from sparge.evaluate.charts import Chart, Point, Series, line_chart, view_of
from sparge.evaluate.page import render

DECIBEL = (0.0, math.inf)


def kl_chart(*values: float) -> Chart | None:
    points = [Point(0.1 * place, value, None, f"v{place}") for place, value in enumerate(values, start=1)]
    return line_chart("KL", [Series("topk", points)], "density", "nats", log_y=True)


def test_axes_include_intervals() -> None:
    low, high = view_of([Point(0.5, 33.0, 13.4), Point(1.0, 50.9, 10.5)], False, DECIBEL)
    assert low <= 33.0 - 13.4 and high >= 50.9 + 10.5


def test_wide_intervals_are_cut() -> None:
    points = [Point(0.25, 28.0, 48.0), Point(0.5, 34.0, 60.0)]
    low, high = view_of(points, False, DECIBEL)
    assert low >= 20.0 and high <= 42.0
    chart = line_chart("PSNR", [Series("topk", points)], "density", "dB", limits=DECIBEL)
    assert chart is not None and chart.notes == ("Intervals that extend beyond the axis are clipped.",)


@pytest.mark.parametrize(
    "points", [[Point(0, 5.0, 9.0), Point(1, 9.0)], [Point(0, 0.0)], [Point(0, 30.0)], [Point(0, 30.0, 1e9)]]
)
def test_axes_contain_all_points_and_stay_in_the_limits(points: list[Point]) -> None:
    low, high = view_of(points, False, DECIBEL)
    assert 0.0 <= low <= min(point.y for point in points) and high > max(point.y for point in points)
    assert high < 70


def test_value_near_zero_does_not_stretch_a_logarithmic_axis() -> None:
    chart = kl_chart(0.02, 0.004, 1e-9)
    assert chart is not None and chart.svg is not None
    assert chart.notes == ("Below the axis: v3 (1e-09).",)
    ticks = [float(text) for text in re.findall(r">([\d.e-]+)</text>", chart.svg)]
    assert {0.003, 0.01, 0.03} <= set(ticks) and min(tick for tick in ticks if tick) >= 1e-3


def test_zero_is_listed_below_a_logarithmic_axis() -> None:
    curves = [
        Series("kept", [Point(0.5, 0.01)]),
        Series("equal", [Point(1.0, 0.0, None, "all"), Point(0.9, -1e-9, None, "more")]),
    ]
    chart = line_chart("KL", curves, "density", "nats", log_y=True)
    assert chart is not None and chart.svg is not None
    assert ">kept<" in chart.svg and ">equal<" not in chart.svg
    assert chart.notes == ("Below the axis: all (0); more (0).",)
    assert line_chart("KL", curves[1:], "density", "nats", log_y=True) is None


def test_reference_levels_outside_of_the_axis_are_omitted() -> None:
    curves = [Series("topk", [Point(0.5, 30.0), Point(1.0, 35.0)])]
    for level, is_drawn in ((33.0, True), (90.0, False)):
        chart = line_chart("PSNR", curves, "density", "dB", level=("sdpa=math", level))
        assert chart is not None and chart.svg is not None and ("sdpa=math" in chart.svg) == is_drawn


def test_svg_is_inline_and_in_the_colors_of_the_page() -> None:
    chart = kl_chart(0.02, 0.004)
    assert chart is not None and chart.svg is not None
    page = Page(chart.svg)
    page.check()
    assert "var(--mark0)" in chart.svg and "var(--ink)" in chart.svg
    assert re.match(r'<svg role="img" aria-label="KL" viewBox="[\d. ]+">', chart.svg)
    assert 'id="' not in re.sub(r"<(?:path|clipPath) id=\"[mp][0-9a-f]+\"", "", chart.svg), (
        "all ids belong to paths and clip paths"
    )


def test_without_matplotlib_the_page_has_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    chart = kl_chart(0.02, 0.004)
    assert chart is not None and chart.svg is None
    section = {"tokens": 1, "first": None, "rows": [[("variant", "x")]], "remarks": [], "is_sparse": True}
    values = {"explanations": [], "needle_maps": [], "has_tasks": False, "command": "c", "text": ""}
    page = render(
        "language.html", title="", heading="", machine=[], sections=[{**section, "charts": [chart]}], **values
    )
    assert "There is no chart, because matplotlib is not installed" in page
