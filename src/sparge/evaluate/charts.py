"""Draw charts with matplotlib as inline SVG.

Figures are drawn in placeholder colors. `inline_svg` replaces them with variables of the stylesheet, so charts follow
the light and dark mode of the page. Without matplotlib, `Chart.svg` is None, and pages show a note instead.
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
"""Placeholder colors, keyed by the CSS variables that replace them."""

STYLE: Any = {
    **{"axes.edgecolor": COLORS["line"], "axes.labelcolor": COLORS["ink"], "axes.labelsize": 10},
    **{f"axes.spines.{side}": False for side in ("left", "right", "top")},
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": COLORS["line"]},
    **{
        f"{axis}.{name}": value
        for axis in ("xtick", "ytick")
        for name, value in (("labelsize", 9.5), ("major.size", 0))
    },
    **{"xtick.color": COLORS["quiet"], "ytick.color": COLORS["quiet"]},
    **{"lines.linewidth": 1.6, "lines.markersize": 6, "lines.markeredgewidth": 0.8},
    **{"lines.markeredgecolor": COLORS["paper"], "legend.labelcolor": COLORS["ink"], "legend.frameon": False},
}
"""Matplotlib settings."""

MARKERS = "osD^vP"
DECADES = 4
"""A logarithmic axis spans this many powers of ten below its largest value. Smaller values are listed in a note."""


@dataclass(frozen=True)
class Point:
    """A value with half the width of its interval."""

    x: float
    y: float
    half: float | None = None
    name: str = ""

    @property
    def interval(self) -> tuple[float, float]:
        return self.y - (self.half or 0.0), self.y + (self.half or 0.0)


@dataclass(frozen=True)
class Series:
    """Points that are connected in the order of x."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Chart:
    """A chart of a page."""

    title: str
    svg: Markup | None  # None if matplotlib is not installed
    notes: tuple[str, ...] = ()  # notes below the chart


def line_chart(
    title: str,
    curves: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    log_y: bool = False,
    level: tuple[str, float] | None = None,
    limits: tuple[float, float] = (-math.inf, math.inf),
    y_range: tuple[float, float] | None = None,
) -> Chart | None:
    """Draw curves with whiskers; return None if there is no finite value.

    Args:
        log_y: use a logarithmic y axis. Values of 0 or less are listed below the chart.
        level: name and value of a horizontal reference line, drawn if it is within the y axis.
        limits: smallest and largest possible value. The y axis does not extend beyond them.
        y_range: range of the y axis; by default it is derived from the points and their intervals (`view_of`).
    """
    points = [point for curve in curves for point in curve.points if math.isfinite(point.y)]
    floor = max((point.y for point in points), default=0.0) * 10.0**-DECADES if log_y else -math.inf
    shown = [point for point in points if point.y >= floor and (point.y > 0 or not log_y)]
    if not shown:
        return None
    low, high = y_range or view_of(shown, log_y, limits)
    notes = []
    if len(shown) < len(points):
        below = (f"{point.name} ({max(point.y, 0.0):.2g})" for point in points if point not in shown)
        notes.append(f"Below the axis: {'; '.join(below)}.")
    intervals = [point.interval for point in shown]
    if any(max(start, limits[0]) < low or min(end, limits[1]) > high for start, end in intervals):
        notes.append("Intervals that extend beyond the axis are clipped.")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
    except ImportError:
        return Chart(title, None, tuple(notes))
    drawn = [(curve.name, sorted(set(curve.points) & set(shown), key=lambda point: point.x)) for curve in curves]
    drawn = [(name, line) for name, line in drawn if line]
    columns = 1 if max(len(name) for name, _ in drawn) > 28 else 2
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.6 + 0.24 * math.ceil(len(drawn) / columns)), layout="constrained")
        panel = figure.subplots()
        for number, (name, line) in enumerate(drawn):
            look: dict[str, Any] = {
                "color": COLORS[f"mark{number % 6}"],
                "marker": MARKERS[number % len(MARKERS)],
                "elinewidth": 1,
            }
            halves = [point.half or 0.0 for point in line]
            x, y = [point.x for point in line], [point.y for point in line]
            panel.errorbar(x, y, yerr=halves if any(halves) else None, label=name, **look)
        panel.set(xlabel=x_label, ylabel=y_label)
        if log_y:
            panel.set_yscale("log")
            panel.yaxis.set(major_locator=LogLocator(subs=(1, 3)), major_formatter=StrMethodFormatter("{x:g}"))
            panel.yaxis.set_minor_locator(NullLocator())
        panel.set_ylim(low, high)
        panel.set_xlim(left=0)
        if level is not None and low <= level[1] <= high:
            panel.axhline(level[1], color=COLORS["quiet"], linestyle="--", linewidth=1, zorder=1)
            anchor: dict[str, Any] = {"transform": panel.get_yaxis_transform(), "ha": "right", "va": "bottom"}
            panel.text(0.99, level[1], level[0], fontsize=9, color=COLORS["quiet"], **anchor)
        figure.legend(loc="outside lower left", ncols=columns, fontsize=9.5)
        return Chart(title, inline_svg(figure, title), tuple(notes))


def view_of(points: Sequence[Point], log: bool, limits: tuple[float, float]) -> tuple[float, float]:
    """Return the range of an axis that contains all points, and their intervals unless these would flatten the curves.

    Intervals extend a linear axis by at most the span of the points, or by a tenth of the largest value if that is
    more.

    Example:
        >>> view_of([Point(0, 30.0, 60.0), Point(1, 40.0, 5.0)], False, (0.0, math.inf))
        (20.0, 50.0)
    """
    values = [point.y for point in points]
    low, high = min(values), max(values)
    if log:
        return low / 2, high * 2
    margin = max(high - low, 0.1 * max(abs(low), abs(high))) or 1.0
    pad = 0.08 * margin
    bottom = min(low - pad, *(point.interval[0] for point in points))
    top = max(high + pad, *(point.interval[1] for point in points))
    return max(bottom, low - margin, limits[0]), min(top, high + margin, limits[1])


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
    svg = re.sub(r' id="[A-Za-z][\w.]*_\d+"', "", svg)  # unused ids of groups, which are not unique in a page
    svg = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"|height="[\d.]+pt" width="[\d.]+pt"', "", svg, count=1)
    svg = re.sub(r"#abcd(\w\w)", lambda found: f"var(--{VARIABLES[int(found[1], 16)]})", svg)
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1))
