"""Render the evaluation of a pipeline as one self-contained HTML page: table, curves, frames side by side, errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparge.evaluate.charts import Chart, line_chart
from sparge.evaluate.page import render
from sparge.evaluate.pipeline.gallery import GAIN, galleries
from sparge.evaluate.pipeline.run import Result
from sparge.evaluate.pipeline.summary import Line, lines_of, remarks, table_of
from sparge.evaluate.report import DENSITY, curves, machine_parts
from sparge.evaluate.timing import time_text
from sparge.evaluate.variants import spaced


def render_page(result: Result, command: str) -> str:
    """Return the whole page.

    Args:
        command: the command that reproduces the run.
    """
    lines, run = lines_of(result), result.rows[0]["run"]
    table = table_of(lines)
    dense, runs = result.row("dense", result.items[0], None), len(result.items)
    frames, height, width, _ = dense["shape"]
    return render(
        "pipeline.html",
        title=f"{run['model']}: sparse against dense",
        heading=f"{run['model']}, sparse against dense",
        machine=machine_parts(result.rows[0], run["pipeline"]),
        settings=[
            f"{runs} combination{'s' * (runs > 1)} of prompt and seed",
            f"{f'clips of {frames} frames' if dense['is_video'] else 'images'}, {width} x {height} pixels",
            *(f"{name} {value}" for name, value in run["arguments"].items()),
        ],
        rows=table,
        remarks=list(remarks(result, lines)),
        charts=_charts(result, lines),
        galleries=galleries(result),
        gain=GAIN,
        **_error_maps(result),
        columns={column for column, _ in table[0]},
        command=command,
    )


def _charts(result: Result, lines: Sequence[Line]) -> list[Chart | None] | None:
    """Return charts of quality by density and by time; None if nothing ran sparse."""
    if not any(line.is_sparse for line in lines):
        return None
    dense, *others = lines
    kinds = {variant.label: variant.kind for variant in result.variants}
    drawn = [line for line in others if kinds[line.variant] != "sdpa" and line.density is not None]
    timed = [line for line in drawn if kinds[line.variant] != "oracle"]  # an oracle computes all attention first
    noise = ((line.variant, line.psnr.mean) for line in others if kinds[line.variant] == "sdpa" and line.psnr)
    decibel: dict[str, Any] = {"y_label": "dB", "level": next(noise, None)}
    charts = []
    for name, options in (("PSNR", decibel), ("SSIM", {"y_label": "SSIM"}), ("LPIPS", {"y_label": "LPIPS"})):
        values = [(line, getattr(line, name.lower())) for line in drawn]
        points = curves((line.variant, line.density or 0.0, value and value.mean) for line, value in values)
        charts.append(line_chart(f"{name} against density", points, DENSITY, **options))
    by_time = curves((line.variant, line.seconds, line.psnr and line.psnr.mean) for line in timed)
    charts.append(
        line_chart("PSNR against time", by_time, f"seconds per call (dense: {time_text(dense.seconds)})", **decibel)
    )
    return charts


def _error_maps(result: Result) -> dict[str, Any]:
    """Return maps of the errors in percent by layer and step, and the largest error of all maps."""
    rows = [row for row in result.rows if row["part"] == "errors" and row["layers"]]
    errors = [value for row in rows for values in row["values"] for value in values if value is not None]
    largest = max(errors, default=0.0) or 1.0

    def cell(value: float | None) -> tuple[float, str] | None:
        return None if value is None else (1 - value / largest, f"{100 * value:.2g}")

    maps = [
        (
            spaced(row["variant"]),
            row["steps"],
            [(layer, list(map(cell, values))) for layer, values in zip(row["layers"], row["values"], strict=True)],
        )
        for row in rows
    ]
    return {"largest": f"{100 * largest:.3g} %", "error_maps": maps}
