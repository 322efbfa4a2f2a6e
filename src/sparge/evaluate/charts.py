"""Charts as SVG inside a page, in the page's own colours: curves with intervals, and heat maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 44
MARKS = ("circle", "square", "diamond", "triangle")
STYLE = """
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(21rem,1fr));gap:1.6rem 2.4rem;margin-top:1.2rem}
.chart svg{display:block;width:100%;height:auto;overflow:visible}
.chart h4{margin:0 0 .4rem}
.chart .grid{stroke:var(--line);stroke-width:1;fill:none}
.chart .s0{--mark:var(--strong)}.chart .s1{--mark:var(--lost)}.chart .s2{--mark:#8a6d00}.chart .s3{--mark:#3c7a4f}
.chart .s4{--mark:#7d4ba3}.chart .s5{--mark:#5a626c}
@media(prefers-color-scheme:dark){.chart .s2{--mark:#d9b945}.chart .s3{--mark:#7fc796}.chart .s4{--mark:#c39be6}
.chart .s5{--mark:#9aa3ad}}
.chart .curve{fill:none;stroke:var(--mark);stroke-width:1.6}
.chart .dots{fill:var(--mark);stroke:var(--page);stroke-width:1}
.chart .whisker{stroke:var(--mark);stroke-width:1;opacity:.6;fill:none}
.chart .level{stroke:var(--quiet);stroke-dasharray:4 3;fill:none}
.chart ul{list-style:none;margin:.3rem 0 0;padding:0;font-size:.82rem;display:flex;flex-wrap:wrap;gap:.1rem 1.1rem}
.chart li svg{display:inline-block;width:.8rem;height:.8rem;margin-right:.35rem;vertical-align:-.1rem}
.heat td,.heat th{padding:.3rem .45rem;font-size:.8rem;text-align:center;font-weight:400;
font-variant-numeric:tabular-nums}
.heat th{color:var(--quiet);text-align:right;white-space:nowrap}
.heat thead th{text-align:center}
.heat td{min-width:2.6rem;color:#10141a;background:color-mix(in oklab,#f5a897,#86b0e0 calc(var(--share)*100%))}
.heat caption,.figures caption{text-align:left;font-weight:600;font-size:.92rem;padding-bottom:.4rem}
.figures{width:100%;margin-top:.8rem;font-size:.92rem}
.figures th,.figures td{padding:.35rem .6rem;text-align:right;white-space:nowrap}
.figures thead th{font-weight:500;color:var(--quiet);border-bottom:1px solid var(--ink);white-space:normal;
vertical-align:bottom}
.figures th:first-child{text-align:left;padding-left:0;font-weight:500;white-space:normal}
.figures tbody tr+tr>*{border-top:1px solid var(--line)}
.scroll{overflow-x:auto}
.remarks{margin:1rem 0 0;padding-left:1.1rem;font-size:.92rem;max-width:56rem}
"""


@dataclass(frozen=True)
class Point:
    """A value, where it lies, and half of its interval."""

    x: float
    y: float
    half: float | None = None
    name: str = ""


@dataclass(frozen=True)
class Curve:
    """Points of one kind, joined in the order of x where there are several."""

    name: str
    points: Sequence[Point]
    joined: bool = True


def curves(
    title: str,
    drawn: Sequence[Curve],
    x_label: str,
    y_label: str,
    *,
    log_y: bool = False,
    level: tuple[str, float] | None = None,
    whole_x: bool = True,
    y_range: tuple[float, float] | None = None,
) -> str:
    """Curves with whiskers.

    Args:
        level: a line with a name to compare with.
        whole_x: x starts at 0.
        y_range: what y covers at least; the values and their intervals by default.
    """
    drawn = [curve for curve in drawn if any(_fits(point.y, log_y) for point in curve.points)]
    points = [point for curve in drawn for point in curve.points if _fits(point.y, log_y)]
    if not points:
        return ""
    ends = [point.y + sign * (point.half or 0.0) for point in points for sign in (-1, 0, 1)]
    ends = [end for end in ends if _fits(end, log_y)] + list(y_range or ())
    levels = [] if level is None or (log_y and level[1] <= 0) else [level[1]]
    across = _Axis([point.x for point in points], LEFT, WIDTH - RIGHT, from_zero=whole_x)
    up = _Axis(ends + levels, HEIGHT - BOTTOM, TOP, log=log_y)
    parts = [
        "".join(
            f"<path class='grid' d='M{LEFT} {up(tick):.1f}H{WIDTH - RIGHT}'/>"
            f"<text x='{LEFT - 6}' y='{up(tick) + 3.5:.1f}' text-anchor='end'>{_number(tick)}</text>"
            for tick in up.ticks
        ),
        "".join(
            f"<text x='{across(tick):.1f}' y='{HEIGHT - BOTTOM + 16}' text-anchor='middle'>{_number(tick)}</text>"
            for tick in across.ticks
        ),
        f"<text class='axis' x='{(LEFT + WIDTH - RIGHT) / 2}' y='{HEIGHT - 8}' text-anchor='middle'>"
        f"{escape(x_label)}</text>",
        f"<text class='axis' transform='translate(12 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)' "
        f"text-anchor='middle'>{escape(y_label)}</text>",
    ]
    if levels and level is not None:
        at = up(level[1])
        parts.append(f"<path class='level' d='M{LEFT} {at:.1f}H{WIDTH - RIGHT}'/>")
        parts.append(f"<text x='{WIDTH - RIGHT}' y='{at - 4:.1f}' text-anchor='end'>{escape(level[0])}</text>")
    parts += [_drawn(number, curve, across, up) for number, curve in enumerate(drawn)]
    keys = "".join(
        f"<li class='s{number % 6}'><svg viewBox='-6 -6 12 12'>{_mark(number, 0, 0)}</svg>{escape(curve.name)}</li>"
        for number, curve in enumerate(drawn)
    )
    return (
        f"<figure class='chart'><h4>{escape(title)}</h4><svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' "
        f"aria-label='{escape(title)}'>{''.join(parts)}</svg><ul>{keys}</ul></figure>"
    )


def heat_map(
    title: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], corner: str = ""
) -> str:
    """Shares in [0, 1], one cell each: red is 0, blue is 1."""
    heading = "".join(f"<th scope='col'>{escape(column)}</th>" for column in columns)
    lines = ""
    for name, cells in zip(rows, values, strict=True):
        painted = "".join(
            "<td style='background:none'></td>"
            if value is None
            else f"<td style='--share:{value:.3f}'>{value:.2f}</td>"
            for value in cells
        )
        lines += f"<tr><th scope='row'>{escape(name)}</th>{painted}</tr>"
    return (
        f"<div class='scroll'><table class='heat'><caption>{escape(title)}</caption><thead><tr>"
        f"<th>{escape(corner)}</th>{heading}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


class _Axis:
    """From values to pixels."""

    def __init__(
        self, values: Sequence[float], start: float, stop: float, *, log: bool = False, from_zero: bool = False
    ) -> None:
        low, high = min(values), max(values)
        if log:
            self.ticks = _decades(low, high)
        else:
            self.ticks = _steps(0.0 if from_zero else low, high)
        self.is_log, self._start, self._stop = log, start, stop
        self._low, self._high = self._place(min(low, self.ticks[0])), self._place(max(high, self.ticks[-1]))

    def _place(self, value: float) -> float:
        return math.log10(value) if self.is_log else value

    def __call__(self, value: float) -> float:
        share = (self._place(value) - self._low) / ((self._high - self._low) or 1.0)
        return self._start + share * (self._stop - self._start)


def _steps(low: float, high: float) -> list[float]:
    """Four to eight round numbers around the values."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / 5
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    """1, 3, 10, 30, ... around the values."""
    marks = [
        factor * 10.0**power
        for power in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
        for factor in (1, 3)
    ]
    first = max(place for place, mark in enumerate(marks) if mark <= low * 1.0000001)
    last = min(place for place, mark in enumerate(marks) if mark >= high * 0.9999999)
    return marks[first : max(last, first + 1) + 1]


def _number(value: float) -> str:
    return f"{value:.6g}" if abs(value) < 1e5 else f"{value:.0e}"


def _fits(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _drawn(number: int, curve: Curve, across: _Axis, up: _Axis) -> str:
    shown = sorted((point for point in curve.points if _fits(point.y, up.is_log)), key=lambda point: point.x)
    places = [(across(point.x), up(point.y)) for point in shown]
    parts = []
    if curve.joined and len(places) > 1:
        parts.append(f"<path class='curve' d='M{'L'.join(f'{x:.1f} {y:.1f}' for x, y in places)}'/>")
    for (x, y), point in zip(places, shown, strict=True):
        if point.half:
            low = point.y - point.half
            bottom = min(up(low), HEIGHT - BOTTOM) if low > 0 or not up.is_log else HEIGHT - BOTTOM
            parts.append(f"<path class='whisker' d='M{x:.1f} {max(up(point.y + point.half), TOP):.1f}V{bottom:.1f}'/>")
        told = f"{point.name or curve.name}: {point.x:.3g}, {point.y:.4g}"
        parts.append(f"<g><title>{escape(told)}</title>{_mark(number, x, y)}</g>")
    return f"<g class='s{number % 6}'>{''.join(parts)}</g>"


def _mark(number: int, x: float, y: float) -> str:
    shape = MARKS[number % len(MARKS)]
    if shape == "circle":
        return f"<circle class='dots' cx='{x:.1f}' cy='{y:.1f}' r='4'/>"
    outline = {"square": "M-3.6-3.6h7.2v7.2h-7.2z", "diamond": "M0-5 5 0 0 5-5 0z", "triangle": "M0-5 4.6 3.4H-4.6z"}
    return f"<path class='dots' transform='translate({x:.1f} {y:.1f})' d='{outline[shape]}'/>"
