"""Render the evaluation of a language model as one self-contained HTML page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from sparge.evaluate.charts import Chart, line_chart
from sparge.evaluate.language.run import DENSE, is_dense_model
from sparge.evaluate.language.summary import Line, by_length, explanations, lines_of, noise_of, remarks, table_of
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
    return render(
        "language.html",
        title=f"{model}: sparse against dense",
        heading=f"{model}, sparse against dense",
        machine=machine_parts(rows[0]),
        sections=[
            {
                "title": title,
                "rows": table_of(group),
                "remarks": list(remarks(group)),
                "charts": _charts(group, noise_of(rows)),
            }
            for title, group in by_length(lines, text)
        ],
        explanations=list(explanations(rows)),
        **_needle_maps(rows),
        has_tasks=any(line.scores for line in lines),
        command=command,
    )


def _charts(lines: Sequence[Line], noise: Row | None) -> list[Chart | None] | None:
    """Return charts of the KL divergence and of the score of each task by density; None if nothing ran sparse."""
    if not any(line.is_sparse for line in lines):
        return None

    density = [1.0 if line.density is None else line.density for line in lines]
    kl = curves((line.variant, x, line.kl and line.kl.mean) for line, x in zip(lines, density, strict=True))
    level = None if noise is None else ("noise", noise["kl"])
    charts = [line_chart("KL divergence against density", kl, DENSITY, "nats per token", log_y=True, level=level)]
    for task in dict.fromkeys(task for line in lines for task in line.scores):
        scored = [(line, x) for line, x in zip(lines, density, strict=True) if task in line.scores]
        drawn = curves((line.variant, x, line.scores[task].mean) for line, x in scored)
        level = ("dense", scored[0][0].scores[task].dense)
        title = f"{task}: score against density"
        charts.append(line_chart(title, drawn, DENSITY, "score", level=level, y_range=(-0.05, 1.05)))
    return charts


def _needle_maps(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the share of needles found by depth and length, one map for each variant."""
    needles = [row for row in rows if row["part"] == "needle"]
    lengths = sorted({row["tokens"] for row in needles})
    depths = sorted({row["depth"] for row in needles})
    scores: dict[tuple[str, float, int], list[float]] = {}
    for row in needles:
        variant = "" if is_dense_model(row) else row["variant"]
        scores.setdefault((variant, row["depth"], row["tokens"]), []).append(row["score"])

    def cell(variant: str, depth: float, tokens: int) -> tuple[float, str] | None:
        values = scores.get((variant, depth, tokens))
        return None if values is None else (statistics.fmean(values), f"{statistics.fmean(values):.2f}")

    maps = [
        (spaced(variant) or DENSE, [(f"{d:.0%}", [cell(variant, d, tokens) for tokens in lengths]) for d in depths])
        for variant in dict.fromkeys(variant for variant, _, _ in scores)
    ]
    return {"needle_maps": maps, "needle_lengths": lengths}
