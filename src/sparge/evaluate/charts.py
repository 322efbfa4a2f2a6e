"""Charts as inline SVG, drawn by matplotlib.

Figures are drawn in placeholder colors. `inline_svg` replaces them by variables of the stylesheet, so that a chart
follows the light and dark mode of the page. Without matplotlib, `Chart.svg` is None and pages show a note instead.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIABLES = ("ink", "quiet", "line", "paper", "lost", *(f"mark{number}" for number in range(6)))
COLORS = {name: f"#abcd{number:02x}" for number, name in enumerate(VARIABLES)}
"""Placeholder colors by the CSS variables that replace them."""

MARKERS = "osD^vP"
DECADES = 4
"""A logarithmic axis ends this many powers of ten below its largest value. Smaller values are listed."""


@dataclass(frozen=True)
class Point:
    """A value with half of its interval."""

    x: float
    y: float
    half: float | None = None
    name: str = ""


@dataclass(frozen=True)
class Series:
    """Points that are connected in the order of x."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Chart:
    """A chart of a page.

    Attributes:
        title: the title of the chart.
        svg: the drawing; None if matplotlib is not installed.
        notes: values outside of the axes.
    """

    title: str
    svg: Markup | None
    notes: tuple[str, ...] = ()


def line_chart(
    title: str,
    curves: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    log_y: bool = False,
    level: tuple[str, float] | None = None,
    from_zero: bool = True,
    limits: tuple[float, float] = (-math.inf, math.inf),
    y_range: tuple[float, float] | None = None,
) -> Chart | None:
    """Draw curves with whiskers; return None if there is no finite value.

    Args:
        log_y: use a logarithmic y axis. Values of 0 or less are listed below the chart.
        level: name and value of a horizontal line to compare with.
        from_zero: start the x axis at 0; otherwise x has integer ticks.
        limits: values that the quantity can have. The y axis does not extend beyond them.
        y_range: the y axis; by default it follows the points and their intervals (`view_of`).
    """
    points = [point for curve in curves for point in curve.points if math.isfinite(point.y)]
    positive = [point.y for point in points if point.y > 0]
    floor = max(positive, default=0.0) * 10.0**-DECADES if log_y else -math.inf
    shown = [point for point in points if point.y >= floor and (point.y > 0 or not log_y)]
    if not shown:
        return None
    view = y_range or view_of(shown, log_y, limits)
    notes = _notes(points, shown, view, limits)
    names = [curve.name for curve in curves if any(point in shown for point in curve.points)]
    columns = 1 if max(map(len, names)) > 28 else 2
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return Chart(title, None, notes)
    figure = Figure(figsize=(5.6, 3.6 + 0.24 * math.ceil(len(names) / columns)), layout="constrained")
    panel = figure.subplots()
    for number, name in enumerate(names):
        of_curve = next(curve.points for curve in curves if curve.name == name)
        _draw(panel, name, sorted((p for p in of_curve if p in shown), key=lambda point: point.x), number)
    panel.set(xlabel=x_label, ylabel=y_label)
    _dress(panel, view, log_y=log_y, from_zero=from_zero)
    if level is not None and view[0] <= level[1] <= view[1]:
        panel.axhline(level[1], color=COLORS["quiet"], linestyle="--", linewidth=1, zorder=1)
        place: dict[str, Any] = {"transform": panel.get_yaxis_transform(), "ha": "right", "va": "bottom"}
        panel.text(0.99, level[1], level[0], fontsize=9, color=COLORS["quiet"], **place)
    figure.legend(loc="outside lower left", ncols=columns, frameon=False, fontsize=9.5, labelcolor=COLORS["ink"])
    return Chart(title, inline_svg(figure, title), notes)


def _notes(
    points: Sequence[Point], shown: Sequence[Point], view: tuple[float, float], limits: tuple[float, float]
) -> tuple[str, ...]:
    """Return notes about the points below the axis and the intervals that extend beyond it."""
    below = "; ".join(f"{point.name} ({max(point.y, 0.0):.2g})" for point in points if point not in shown)
    notes = [f"Below the axis: {below}."] if below else []
    ends = [(point.y - (point.half or 0.0), point.y + (point.half or 0.0)) for point in shown]
    if any(max(start, limits[0]) < view[0] or min(end, limits[1]) > view[1] for start, end in ends):
        notes.append("Intervals that reach beyond the axis are cut.")
    return tuple(notes)


def view_of(points: Sequence[Point], log: bool, limits: tuple[float, float]) -> tuple[float, float]:
    """Return the range of an axis: all points, and their intervals as far as these do not flatten the curves.

    Intervals extend a linear axis by at most the span of the points, and by a tenth of the largest value where the
    points are close together.

    Example:
        >>> view_of([Point(0, 30.0, 60.0), Point(1, 40.0, 5.0)], False, (0.0, math.inf))
        (20.0, 50.0)
    """
    values = [point.y for point in points]
    low, high = min(values), max(values)
    if log:
        return low / 2, high * 2
    margin = max(high - low, 0.1 * max(abs(low), abs(high))) or 1.0
    ends = [point.y + sign * (point.half or 0.0) for point in points for sign in (-1, 1)]
    pad = 0.08 * margin
    bottom, top = min(min(ends), low - pad), max(max(ends), high + pad)
    return max(bottom, low - margin, limits[0]), min(top, high + margin, limits[1])


def _dress(panel: Any, view: tuple[float, float], *, log_y: bool, from_zero: bool) -> None:
    """Set the axes and their colors."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    if log_y:
        panel.set_yscale("log")
        panel.yaxis.set(major_locator=LogLocator(subs=(1, 3)), major_formatter=StrMethodFormatter("{x:g}"))
        panel.yaxis.set_minor_locator(NullLocator())
    panel.set_ylim(*view)
    if from_zero:
        panel.set_xlim(left=0)
    else:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(axis="y", color=COLORS["line"], linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=COLORS["quiet"], labelsize=9.5, length=0)
    for axis in (panel.xaxis, panel.yaxis):
        axis.label.set(color=COLORS["ink"], fontsize=10)
    for side, spine in panel.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(COLORS["line"])


def _draw(panel: Any, name: str, points: Sequence[Point], number: int) -> None:
    color = COLORS[f"mark{number % 6}"]
    halves = [point.half or 0.0 for point in points]
    panel.errorbar(
        [point.x for point in points],
        [point.y for point in points],
        yerr=halves if any(halves) else None,
        label=name,
        color=color,
        marker=MARKERS[number % len(MARKERS)],
        markersize=6,
        markeredgecolor=COLORS["paper"],
        markeredgewidth=0.8,
        linewidth=1.6,
        elinewidth=1,
    )


def inline_svg(figure: Figure, label: str) -> Markup:
    """Return a figure as an SVG element without fixed size, namespaces or metadata, in the colors of the page."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sparge", "image.composite_image": False}):
        figure.savefig(file, format="svg", transparent=True)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<style .*?</style>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:xmlns(?::\w+)?|version)="[^"]*"', "", svg)
    svg = re.sub(r' id="[A-Za-z][\w.]*_\d+"', "", svg)  # of groups that nothing refers to, and not unique in a page
    svg = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"|height="[\d.]+pt" width="[\d.]+pt"', "", svg, count=1)
    svg = re.sub(r"#abcd(\w\w)", lambda found: f"var(--{VARIABLES[int(found[1], 16)]})", svg)
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1))
