"""Render the evaluation of a pipeline as one self-contained HTML page: table, curves, frames side by side, errors."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from markupsafe import Markup

from sparge.evaluate.charts import Chart, line_chart
from sparge.evaluate.page import render
from sparge.evaluate.pipeline.gallery import GAIN, Gallery, galleries
from sparge.evaluate.pipeline.run import Result
from sparge.evaluate.pipeline.summary import Line, lines_of, remarks, table_of
from sparge.evaluate.report import DENSITY, curves, machine_parts
from sparge.evaluate.rows import Row
from sparge.evaluate.timing import time_text
from sparge.evaluate.variants import spaced

MAX_STEPS = 12
"""Maximum number of columns of an error map. If there are more steps, adjacent steps are merged."""


def render_page(result: Result, command: str) -> str:
    """Return the whole page.

    Args:
        command: the command that reproduces the run.
    """
    lines, run = lines_of(result), result.rows[0]["run"]
    shown = galleries(result)
    table = table_of(lines)
    return render(
        "pipeline.html",
        title=f"{run['model']}: sparse against dense",
        heading=f"{run['model']}, sparse against dense",
        machine=machine_parts(result.rows[0], run["pipeline"]),
        setting=_setting(result),
        rows=table,
        remarks=list(remarks(result, lines)),
        charts=_charts(result, lines),
        galleries=shown,
        dense_images=_dense_images(shown),
        gain=GAIN,
        **_error_maps(result),
        columns={column for column, _ in table[0]},
        command=command,
    )


def _setting(result: Result) -> str:
    frames, height, width = result.row("dense", result.items[0], None)["shape"][:3]
    kind = "images" if frames == 1 else f"clips of {frames} frames,"
    prompts = len({item.prompt for item in result.items})
    seeds = len({item.seed for item in result.items})
    count = f"{prompts} prompt{'s' * (prompts > 1)}, " if result.items[0].prompt is not None else ""
    arguments = [f"{name} {value}" for name, value in result.rows[0]["run"]["arguments"].items()]
    parts = [f"{count}{seeds} seed{'s' * (seeds > 1)}", f"{kind} {width} x {height} pixels", ", ".join(arguments)]
    return "; ".join(part for part in parts if part) + "."


def _charts(result: Result, lines: Sequence[Line]) -> list[Chart | None] | None:
    """Return charts of quality by density and by time; None if nothing ran sparse."""
    if not any(line.is_sparse for line in lines):
        return None
    dense, *others = lines
    kinds = {variant.label: variant.kind for variant in result.variants}
    drawn = [line for line in others if kinds[line.variant] != "sdpa" and line.density is not None]
    timed = [line for line in drawn if kinds[line.variant] != "oracle"]  # an oracle computes all attention first
    noise = ((line.variant, line.psnr.mean) for line in others if kinds[line.variant] == "sdpa" and line.psnr)
    density, seconds = attrgetter("density"), attrgetter("seconds")

    def metric(name: str) -> Callable[[Line], float | None]:
        return lambda line: getattr(line, name) and getattr(line, name).mean

    decibel: dict[str, Any] = {"y_label": "dB", "level": next(noise, None)}
    time_label = f"seconds per call (dense: {time_text(dense.seconds)})"
    return [
        line_chart("PSNR against density", curves(drawn, density, metric("psnr")), DENSITY, **decibel),
        line_chart("PSNR against time", curves(timed, seconds, metric("psnr")), time_label, **decibel),
        line_chart("SSIM against density", curves(drawn, density, metric("ssim")), DENSITY, "SSIM"),
        line_chart("LPIPS against density", curves(drawn, density, metric("lpips")), DENSITY, "LPIPS"),
    ]


def _dense_images(shown: Sequence[Gallery]) -> list[tuple[str, Markup]]:
    """Return (CSS class, URI) of the dense images, so that the page embeds each image only once."""
    return [
        (f"dense-{number}-{column}", Markup(uri))
        for number, gallery in enumerate(shown, start=1)
        for column, uri in enumerate(gallery.strips[0].images, start=1)
    ]


def _error_maps(result: Result) -> dict[str, Any]:
    """Return maps of the errors in percent by layer and step, and the largest error of all maps."""
    rows = [row for row in result.rows if row["part"] == "errors" and row["layers"]]
    known = [value for row in rows for values in row["values"] for value in values if value is not None]
    largest = max(known, default=0.0) or 1.0
    return {"largest": f"{100 * largest:.3g} %", "error_maps": [_error_map(row, largest) for row in rows]}


def _error_map(row: Row, largest: float) -> tuple[str, list[str], list[tuple[str, list[tuple[float, str] | None]]]]:
    """Return caption, columns and lines of a map. Adjacent steps are merged if there are more than `MAX_STEPS`."""
    steps = row["steps"]
    size = -(-len(steps) // MAX_STEPS)
    groups = [range(start, min(start + size, len(steps))) for start in range(0, len(steps), size)]
    columns = [
        f"{steps[group[0]]} to {steps[group[-1]]}" if len(group) > 1 else str(steps[group[0]]) for group in groups
    ]

    def cell(values: Sequence[float | None]) -> tuple[float, str] | None:
        known = [value for value in values if value is not None]
        mean = statistics.fmean(known) if known else None
        return None if mean is None else (1 - mean / largest, f"{100 * mean:.2g}")

    lines = [
        (layer, [cell([values[index] for index in group]) for group in groups])
        for layer, values in zip(row["layers"], row["values"], strict=True)
    ]
    return spaced(row["variant"]), columns, lines
