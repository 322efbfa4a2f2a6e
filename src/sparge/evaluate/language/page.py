"""Render the evaluation of a language model as one self-contained HTML page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from sparge.evaluate.charts import Chart, line_chart
from sparge.evaluate.intervals import Interval
from sparge.evaluate.language.run import DENSE, is_dense_model
from sparge.evaluate.language.summary import Line, explanations, lines_of, noise_of, remarks, table_of
from sparge.evaluate.page import render
from sparge.evaluate.report import DENSITY, curves, machine_parts
from sparge.evaluate.rows import Row
from sparge.evaluate.variants import spaced


def render_page(rows: Sequence[Row], model: str, command: str, text: str = "") -> str:
    """Return the whole page.

    Args:
        rows: the rows of one run.
        model: the name of the model.
        command: the command that reproduces the run.
        text: a description of the text that the model was evaluated on.
    """
    lines = lines_of(rows)
    lengths = sorted({line.tokens for line in lines})
    noise = noise_of(rows)
    level = None if noise is None or noise["kl"] <= 0 else ("noise", noise["kl"])
    return render(
        "language.html",
        title=f"{model}: sparse against dense",
        heading=f"{model}, sparse against dense",
        machine=machine_parts(rows[0]),
        text=text,
        sections=[_section([line for line in lines if line.tokens == tokens], level) for tokens in lengths],
        explanations=list(explanations(rows)),
        **_needle_maps(rows),
        has_tasks=any(line.scores for line in lines),
        command=command,
    )


def _section(lines: Sequence[Line], level: tuple[str, float] | None) -> dict[str, Any]:
    """Return the template's values for one length. There are no charts if nothing ran sparse."""
    is_sparse = any(line.is_sparse for line in lines)
    return {
        "tokens": lines[0].tokens,
        "first": next((line for line in lines if line.kl is not None), None),
        "rows": table_of(lines),
        "remarks": list(remarks(lines)),
        "is_sparse": is_sparse,
        "charts": _charts(lines, level) if is_sparse else [],
    }


def _charts(lines: Sequence[Line], level: tuple[str, float] | None) -> list[Chart]:
    def density(line: Line) -> float:
        return 1.0 if line.density is None else line.density

    kl = curves(lines, density, lambda line: line.kl)
    charts = [line_chart("KL divergence against density", kl, DENSITY, "nats per token", log_y=True, level=level)]
    for task in dict.fromkeys(task for line in lines for task in line.scores):

        def score(line: Line, task: str = task) -> Interval | None:
            return Interval(line.scores[task].mean, None, 1) if task in line.scores else None

        dense = ("dense", next(line.scores[task].dense for line in lines if task in line.scores))
        title, drawn = f"{task}: score against density", curves(lines, density, score)
        charts.append(line_chart(title, drawn, DENSITY, "score", level=dense, y_range=(-0.05, 1.05)))
    return [chart for chart in charts if chart is not None]


def _needle_maps(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the share of needles found by depth and length, one map for each variant."""
    needles = [row for row in rows if row["part"] == "needle"]
    lengths = sorted({row["tokens"] for row in needles})
    depths = sorted({row["depth"] for row in needles})
    scores: dict[tuple[str, float, int], list[float]] = {}
    for row in needles:
        variant = "" if is_dense_model(row) else row["variant"]
        scores.setdefault((variant, row["depth"], row["tokens"]), []).append(row["score"])
    variants = list(dict.fromkeys(["", *(variant for variant, _, _ in scores)]))

    def cell(variant: str, depth: float, tokens: int) -> tuple[float, str] | None:
        found = scores.get((variant, depth, tokens))
        return None if found is None else (statistics.fmean(found), f"{statistics.fmean(found):.2f}")

    maps = [
        (spaced(variant) or DENSE, [(f"{d:.0%}", [cell(variant, d, tokens) for tokens in lengths]) for d in depths])
        for variant in variants
    ]
    return {
        "needle_maps": maps if needles else [],
        "needle_lengths": lengths,
    }
