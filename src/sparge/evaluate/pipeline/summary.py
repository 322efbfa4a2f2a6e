"""Summarize the rows of an evaluation: one line per variant, means over prompts and seeds with intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sparge.evaluate import report
from sparge.evaluate.intervals import Interval, mean_interval
from sparge.evaluate.pipeline.image_metrics import lpips_unavailable_reason
from sparge.evaluate.pipeline.run import DENSE, Result
from sparge.evaluate.rows import Row
from sparge.evaluate.timing import time_text


@dataclass(frozen=True)
class Line(report.Line):
    """A variant, or the dense pipeline. Values that were not measured are None."""

    psnr: Interval | None  # mean over the clips that differ from the dense clips
    equal: int  # number of clips that are bitwise equal to the dense clips
    ssim: Interval | None
    lpips: Interval | None
    temporal_difference: Interval | None
    seconds: float  # median time of a call
    step_seconds: float | None  # median time of a step
    speed_up: Interval  # dense time divided by the variant's time, for the same prompt and seed; geometric mean
    count: int  # number of pairs of prompt and seed


def lines_of(result: Result) -> list[Line]:
    """Return the lines of the dense pipeline and of every variant."""
    dense = [result.row("dense", item, None) for item in result.items]
    lines = [_line(DENSE, "dense", 1.0, dense, dense)]
    for variant in result.variants:
        rows = [result.row("variant", item, variant) for item in result.items]
        density = report.share_computed(rows) if variant.is_sparse else 1.0
        lines.append(_line(variant.label, report.how_it_ran(rows), density, rows, dense))
    return lines


def _line(label: str, ran: str, density: float | None, rows: Sequence[Row], dense: Sequence[Row]) -> Line:
    psnr = [row["psnr"] for row in rows if row.get("psnr") is not None]
    steps = [row["step_seconds"] for row in rows if row["step_seconds"] is not None]
    return Line(
        label,
        ran,
        density,
        psnr=mean_interval(psnr) if psnr else None,
        equal=len(rows) - len(psnr),
        ssim=_mean(rows, "ssim"),
        lpips=_mean(rows, "lpips"),
        temporal_difference=_mean(rows, "temporal_difference"),
        seconds=statistics.median(row["seconds"] for row in rows),
        step_seconds=statistics.median(steps) if steps else None,
        speed_up=_geometric_mean([exact["seconds"] / row["seconds"] for exact, row in zip(dense, rows, strict=True)]),
        count=len(rows),
    )


def _mean(rows: Sequence[Row], name: str) -> Interval | None:
    """Return the mean of a field, or None if a row does not have it."""
    values = [row.get(name) for row in rows]
    return None if None in values else mean_interval([float(value) for value in values if value is not None])


def _geometric_mean(ratios: Sequence[float]) -> Interval:
    logarithm = mean_interval([math.log(ratio) for ratio in ratios])
    mean = math.exp(logarithm.mean)
    return logarithm._replace(mean=mean, half=None if logarithm.half is None else mean * logarithm.half)


def table_of(lines: Sequence[Line]) -> list[report.Cells]:
    """Return the table, for the page and the terminal."""
    dense = lines[0]
    columns: dict[str, Any] = {
        "variant": lambda line: line.variant,
        "ran": lambda line: line.ran,
        "density": lambda line: "none" if line.density is None else f"{line.density:.3f}",
        "PSNR dB": lambda line: "" if line is dense else _psnr_text(line),
        "SSIM": lambda line: line.ssim and line.ssim.text(4),
        "LPIPS": lambda line: line.lpips and line.lpips.text(4),
        "temporal difference": lambda line: line.temporal_difference and line.temporal_difference.text(4),
        "step": lambda line: line.step_seconds and time_text(line.step_seconds),
        "call": lambda line: time_text(line.seconds),
        "speed-up": lambda line: "" if line is dense else f"{line.speed_up.text(2)}x",
    }
    return report.cells_of(lines, columns)


def _psnr_text(line: Line) -> str:
    if line.psnr is None:
        return "equal"
    return line.psnr.text(1) + (f" ({line.equal} of {line.count} equal)" if line.equal else "")


def remarks(result: Result, lines: Sequence[Line]) -> Iterator[str]:
    """Yield remarks about the table."""
    if not result.is_supported:
        kind = result.rows[0]["run"]["pipeline"]
        yield (
            f"sparge.enable does not support {kind}. The policies were applied with sparge.replace_sdpa to all "
            "self-attention of its denoising model. This does not always keep the blocks of text tokens, and rules "
            "about layers and steps are not possible."
        )
    for variant, line in zip(result.variants, lines[1:], strict=True):
        if variant.is_sparse and (remark := report.sparsity_remark(line, "Larger images or longer clips")):
            yield f"{variant.label}: {remark}"
            if line.ran == "dense":
                yield f"{variant.label}: none of the pipeline's attention goes through torch's SDPA."
    if any(variant.is_sparse and variant.policy.backend != "auto" for variant in result.variants):
        yield (
            "Attention was sparse at any length, because a variant names a backend or --force was used. Short "
            "sequences may be slower than dense attention."
        )
    for row in result.rows:
        if row.get("is_finite") is False:
            yield f"{row['variant']}, seed {row['seed']}: some pixels were NaN or infinite and were replaced."
    if lines[-1].lpips is None:
        yield f"LPIPS is omitted: {lpips_unavailable_reason() or 'some rows were measured without it'}."
    if any(variant.kind == "sdpa" for variant in result.variants):
        yield "Lines with sdpa= show the dense model on another kernel: differences of that size are rounding noise."
    if len(result.items) == 1:
        yield "There are no intervals for one prompt and seed: use several to measure how much the results vary."
