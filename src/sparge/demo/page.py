"""The demo as one self-contained HTML page: idea, table, maps, explanations and the command that reproduces it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from sparge.demo.maps import NEEDLE_KEPT, map_svg
from sparge.demo.measure import Demo, InputResult, table_cells
from sparge.evaluate.block_colors import MASS_FLOOR
from sparge.evaluate.charts import Chart
from sparge.evaluate.page import render
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, ceil_div

PANEL_PIXELS = 320
"""Approximate width of a panel on a page. The browser smooths maps with more blocks."""


def render_page(demo: Demo) -> str:
    """Return the whole page as text."""
    settings = demo.settings
    rounds = sorted({row.rounds for row in demo.rows})
    timing = "one round" if rounds == [1] else f"the median of {' or '.join(map(str, rounds))} interleaved rounds"
    return render(
        "demo.html",
        title=f"sparge demo: topk {settings.topk:g}, {settings.tokens} tokens",
        heading="Sparse attention, measured on this machine",
        machine=[*machine_parts(demo), demo.machine.system, f"Python {demo.machine.python}"],
        settings=settings,
        block=(BLOCK_Q, BLOCK_K),
        blocks=(ceil_div(settings.tokens, BLOCK_Q), ceil_div(settings.tokens, BLOCK_K)),
        rows=[(row, list(table_cells(row))) for row in demo.rows],
        timing=timing + ("" if demo.gpu is None else ", by CUDA events"),
        backend=demo.backend,
        quantization=demo.quantization,
        floor=f"{100 * MASS_FLOOR:g}%",
        ticks=[f"{100 * 10.0**power:g}%" for power in range(round(math.log10(MASS_FLOOR)), 1)],
        inputs=[_input(result) for result in demo.inputs],
        command=f"sparge demo --device {settings.device} --topk {settings.topk:g} --tokens {settings.tokens} "
        f"--heads {settings.heads} --seed {settings.seed}",
    )


def machine_parts(demo: Demo) -> Iterator[str]:
    """Yield device, versions and sizes, for the page and the terminal."""
    machine, gpu, settings = demo.machine, demo.gpu, demo.settings
    if gpu is None:
        yield f"{machine.processor}, {machine.threads} threads"
    else:
        yield f"{gpu.gpu}, CUDA {gpu.cuda}"
    yield f"backend {demo.backend}" + ("" if demo.quantization == "none" else f", {demo.quantization}")
    yield f"{settings.dtype}, B 1, H {settings.heads}, D {settings.head_dim}"
    yield f"torch {machine.torch}"
    if gpu is not None:
        yield f"triton {gpu.triton}"
    yield f"sparge {machine.sparge}" + (f" ({machine.commit})" if machine.commit else "")


def _input(result: InputResult) -> dict[str, Any]:
    """Return the template's values for one input: description, text of the result, maps, needles."""
    row = result.rows[0]
    panels: list[tuple[int | None, str, str]] = [(None, "True attention mass", "all visible blocks")]
    for index, (scored, kept) in enumerate(zip(result.rows, result.kept, strict=True)):
        density, recall = kept.sum() / result.visible.sum(), result.mass[kept].sum() / result.mass.sum()
        detail = f"{100 * density:.1f}% of blocks, {100 * recall:.1f}% of mass"
        panels.append((index, f"Kept by {scored.score}", detail))
    return {
        "name": result.name,
        "about": result.about,
        "row": row,
        "cells": dict(table_cells(row)),
        "is_fine": max(result.visible.shape) > PANEL_PIXELS,
        "panels": [
            Chart(title, map_svg(result, index, f"{result.name}: {title}, {detail}"), detail)
            for index, title, detail in panels
        ],
        "needles": [
            (row.score, [(f"{share:.0%}", share < NEEDLE_KEPT) for share in row.needles])
            for row in result.rows
            if row.needles
        ],
    }
