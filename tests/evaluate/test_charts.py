"""Charts: bounded logarithmic axes, reference levels, colors of the page, and a note without matplotlib."""

from __future__ import annotations

import math
import re
import sys

import pytest

from page_parser import Page
from sparge.evaluate.charts import Chart, line_chart
from sparge.evaluate.page import render

OMITTED = "Points below the axis are omitted."


def kl_chart(*values: float) -> Chart | None:
    points = [(0.1 * place, value) for place, value in enumerate(values, start=1)]
    return line_chart("KL", {"topk": points}, "density", "nats", log_y=True)


def test_value_near_zero_does_not_stretch_a_logarithmic_axis() -> None:
    chart = kl_chart(0.02, 0.004, 1e-9)
    assert chart is not None and chart.svg is not None and chart.note == OMITTED
    ticks = [float(text) for text in re.findall(r">([\d.e-]+)</text>", chart.svg)]
    assert {0.01, 0.003} <= set(ticks) and min(tick for tick in ticks if tick) >= 1e-3


def test_zero_is_not_on_a_logarithmic_axis() -> None:
    curves = {"kept": [(0.5, 0.01)], "equal": [(1.0, 0.0), (0.9, -1e-9)]}
    chart = line_chart("KL", curves, "density", "nats", log_y=True)
    assert chart is not None and chart.svg is not None and chart.note == OMITTED
    assert ">kept<" in chart.svg and ">equal<" not in chart.svg
    assert line_chart("KL", {"equal": curves["equal"]}, "density", "nats", log_y=True) is None
    assert line_chart("KL", {}, "density", "nats") is None


@pytest.mark.parametrize("log_y", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_ignored(value: float, log_y: bool) -> None:
    """A model that overflows has a KL of NaN."""
    for values in ((value, 0.02, 0.004), (0.02, 0.004, value)):
        curves = {"finite": list(zip((0.1, 0.2, 0.3), values, strict=True)), "other": [(0.5, value)]}
        chart = line_chart("KL", curves, "density", "nats", log_y=log_y)
        assert chart is not None and chart.svg is not None and chart.note == ""
        assert ">finite<" in chart.svg and ">other<" not in chart.svg


def test_low_reference_levels_are_omitted_on_logarithmic_axes() -> None:
    for level, is_drawn in ((0.002, True), (0.0, False), (1e-9, False)):
        chart = line_chart("KL", {"topk": [(0.5, 0.01)]}, "density", "nats", log_y=True, level=("noise", level))
        assert chart is not None and chart.svg is not None and (">noise<" in chart.svg) == is_drawn


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
    section = {"title": "", "rows": [[("variant", "x")]], "remarks": [], "charts": [chart, None]}
    values = {"explanations": [], "needle_maps": [], "has_tasks": False, "command": "c"}
    page = render("language.html", title="", heading="", machine=[], sections=[section], **values)
    assert page.count("There is no chart, because matplotlib is not installed") == 1
