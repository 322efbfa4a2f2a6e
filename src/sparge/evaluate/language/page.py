"""An evaluation of a language model as one self-contained HTML page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from sparge.evaluate.charts import Chart, Point, Series, line_chart
from sparge.evaluate.language.run import DENSE, FIDELITY, NOISE, is_stock
from sparge.evaluate.language.summary import Line, cells, explanations, lines_of, noise_of, remarks
from sparge.evaluate.page import machine_parts, render
from sparge.evaluate.rows import Row
from sparge.evaluate.variants import family_of, spaced

MAX_ALONG = 8
"""Variants in the charts by position: the first that went sparse."""

MAX_MAPS = 12
"""Heat maps of needles, dense first."""

DENSITY = "density: share of the visible blocks that is computed"


def render_page(rows: Sequence[Row], model: str, command: str, text: str = "") -> str:
    """Return the whole page.

    Args:
        rows: the rows of one run.
        model: the name of the model.
        command: the command that repeats the run.
        text: a description of the text that the model read.
    """
    lines = lines_of(rows)
    tasks = [part for part in dict.fromkeys(row["part"] for row in rows) if part not in (FIDELITY, NOISE)]
    lengths = sorted({line.tokens for line in lines})
    noise = noise_of(rows)
    level = None if noise is None or noise["kl"] <= 0 else ("noise", noise["kl"])
    return render(
        "language.html",
        title=f"{model}: sparse against dense",
        heading=f"{model}, sparse against dense",
        machine=machine_parts(rows[0]),
        text=text,
        sections=[_section([line for line in lines if line.tokens == tokens], tasks, level) for tokens in lengths],
        explanations=list(explanations(rows)),
        position_tokens=max(lengths),
        positions=_positions(rows, max(lengths)),
        **_needle_maps(rows),
        has_tasks=bool(tasks),
        command=command,
    )


def _section(lines: Sequence[Line], tasks: Sequence[str], level: tuple[str, float] | None) -> dict[str, Any]:
    """Return the template's values for one length. There are no charts if nothing ran sparse."""
    is_sparse = any(line.is_sparse for line in lines)
    return {
        "tokens": lines[0].tokens,
        "first": next((line for line in lines if line.kl is not None), None),
        "rows": [[("variant", spaced(line.variant)), *cells(line, tasks=tasks)[1:]] for line in lines],
        "remarks": list(remarks(lines)),
        "is_sparse": is_sparse,
        "charts": _charts(lines, tasks, level) if is_sparse else [],
    }


def _charts(lines: Sequence[Line], tasks: Sequence[str], level: tuple[str, float] | None) -> list[Chart]:
    def kl(line: Line) -> tuple[float, float | None] | None:
        return None if line.kl is None else (line.kl.mean, line.kl.half)

    curves = _by_family(lines, kl)
    charts = [line_chart("KL divergence against density", curves, DENSITY, "nats per token", log_y=True, level=level)]
    for task in tasks:

        def score(line: Line, task: str = task) -> tuple[float, float | None] | None:
            return (line.scores[task].mean, None) if task in line.scores else None

        dense = next((line.scores[task].dense for line in lines if task in line.scores), None)
        dense_level = None if dense is None else ("dense", dense)
        title = f"{task}: score against density"
        curves = _by_family(lines, score)
        charts.append(line_chart(title, curves, DENSITY, "score", level=dense_level, y_range=(-0.05, 1.05)))
    return [chart for chart in charts if chart is not None]


def _by_family(lines: Sequence[Line], value_of: Callable[[Line], tuple[float, float | None] | None]) -> list[Series]:
    """Return a curve over density for each family of variants."""
    found: dict[str, list[Point]] = {}
    for line in lines:
        value = value_of(line)
        if value is not None:
            density = 1.0 if line.density is None else line.density
            found.setdefault(family_of(line.variant), []).append(Point(density, *value, line.variant))
    return [Series(name, points) for name, points in found.items()]


def _positions(rows: Sequence[Row], tokens: int) -> list[Chart]:
    """Return the charts of KL and loss by position in windows of a length, of variants that went sparse."""
    measured = [row for row in rows if row["part"] == FIDELITY and row["tokens"] == tokens]
    variants = list(dict.fromkeys(row["variant"] for row in measured if row["density"] is not None))[:MAX_ALONG]

    def curve(variant: str, name: str, minus: str | None) -> Series:
        of_variant = [row for row in measured if row["variant"] == variant]
        parts = len(of_variant[0][name])
        points = []
        for part in range(parts):
            values = [row[name][part] - (row[minus][part] if minus else 0.0) for row in of_variant]
            points.append(Point((part + 0.5) / parts * tokens, statistics.fmean(values), None, variant))
        return Series(spaced(variant), points)

    kl = [curve(variant, "kl_by_position", None) for variant in variants]
    rise = [curve(variant, "nll_by_position", "dense_nll_by_position") for variant in variants]
    charts = (
        line_chart("KL by position", kl, "token", "nats per token", log_y=True),
        line_chart("Loss by position, above dense", rise, "token", "nats per token"),
    )
    return [chart for chart in charts if chart is not None]


def _needle_maps(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the share of right needles by depth and length, one map for each variant."""
    needles = [row for row in rows if row["part"] == "needle"]
    variants = [None, *dict.fromkeys(row["variant"] for row in needles if not is_stock(row))]
    lengths = sorted({row["tokens"] for row in needles})
    depths = sorted({row["depth"] for row in needles})
    found: dict[tuple[str | None, float, int], list[float]] = {}
    for row in needles:
        place = None if is_stock(row) else row["variant"], row["depth"], row["tokens"]
        found.setdefault(place, []).append(row["score"])

    def cell(variant: str | None, depth: float, tokens: int) -> tuple[float, str] | None:
        scores = found.get((variant, depth, tokens))
        return None if scores is None else (statistics.fmean(scores), f"{statistics.fmean(scores):.2f}")

    maps = [
        (spaced(variant or DENSE), [(f"{d:.0%}", [cell(variant, d, tokens) for tokens in lengths]) for d in depths])
        for variant in variants[:MAX_MAPS]
    ]
    return {
        "needle_maps": maps if needles else [],
        "needle_lengths": lengths,
        "maps_left_out": max(len(variants) - MAX_MAPS, 0),
    }
