"""Draw charts with matplotlib as inline SVG.

Figures are drawn in placeholder colors. `inline_svg` replaces them with variables of the stylesheet, so charts follow
the light and dark mode of the page. Without matplotlib, `Chart.svg` is None, and pages show a note instead.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIABLES = ("ink", "quiet", "line", "paper", "lost", *(f"mark{number}" for number in range(6)))
COLORS = {name: f"#abcd{number:02x}" for number, name in enumerate(VARIABLES)}
"""Placeholder colors, keyed by the CSS variables that replace them."""

STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": COLORS["line"],
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": COLORS["ink"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": COLORS["line"],
    "legend.frameon": False,
    "legend.labelcolor": COLORS["ink"],
    "lines.markeredgecolor": COLORS["paper"],
    "lines.markeredgewidth": 0.8,
    "xtick.color": COLORS["quiet"],
    "xtick.major.size": 0,
    "ytick.color": COLORS["quiet"],
    "ytick.major.size": 0,
}
"""Matplotlib settings."""

MARKERS = "osD^vP"
DECADES = 4
"""A logarithmic axis spans at most this many powers of ten."""


@dataclass(frozen=True)
class Chart:
    """A chart of a page. ``svg`` is None without matplotlib, and ``note`` is the text below the chart."""

    title: str
    svg: Markup | None
    note: str = ""


def line_chart(
    title: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    y_label: str,
    *,
    log_y: bool = False,
    level: tuple[str, float] | None = None,
    y_range: tuple[float, float] | None = None,
) -> Chart | None:
    """Draw curves through points (x, y); return None if there is no point. Points with a y of NaN or Inf are ignored.

    Args:
        log_y: use a logarithmic y axis. Points of 0 or far below the others are omitted.
        level: name and value of a horizontal reference line.
        y_range: ends of the y axis; by default it fits the points.
    """
    curves = {name: [point for point in points if math.isfinite(point[1])] for name, points in curves.items()}
    highest = max((y for points in curves.values() for _, y in points), default=0.0)
    floor = max(highest * 10.0**-DECADES, 1e-30) if log_y else -math.inf
    drawn = {name: sorted(point for point in points if point[1] >= floor) for name, points in curves.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    if not drawn:
        return None
    is_complete = sum(map(len, drawn.values())) == sum(map(len, curves.values()))
    note = "" if is_complete else "Points below the axis are omitted."
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
    except ImportError:
        return Chart(title, None, note)
    columns = 1 if max(map(len, drawn)) > 28 else 2
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.6 + 0.24 * math.ceil(len(drawn) / columns)), layout="constrained")
        panel = figure.subplots()
        for number, (name, points) in enumerate(drawn.items()):
            look: Any = {"color": COLORS[f"mark{number % 6}"], "marker": MARKERS[number % len(MARKERS)]}
            panel.plot(*zip(*points, strict=True), label=name, **look)
        panel.set(xlabel=x_label, ylabel=y_label)
        if level is not None and level[1] >= floor:
            panel.axhline(level[1], color=COLORS["quiet"], linestyle="--", linewidth=1, zorder=1)
            anchor: Any = {"transform": panel.get_yaxis_transform(), "ha": "right", "va": "bottom"}
            panel.text(0.99, level[1], level[0], fontsize=9, color=COLORS["quiet"], **anchor)
        if log_y:
            panel.set_yscale("log")
            panel.yaxis.set(major_locator=LogLocator(subs=(1, 3)), major_formatter=StrMethodFormatter("{x:g}"))
            panel.yaxis.set_minor_locator(NullLocator())
            low, high = panel.dataLim.intervaly
            panel.set_ylim(low / 2, high * 2)
        if y_range is not None:
            panel.set_ylim(*y_range)
        panel.set_xlim(left=0)
        figure.legend(loc="outside lower left", ncols=columns, fontsize=9.5)
        return Chart(title, inline_svg(figure, title), note)


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
    svg = re.sub(r"#abcd(\w\w)", lambda color: f"var(--{VARIABLES[int(color[1], 16)]})", svg)
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1))
