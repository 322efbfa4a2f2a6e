"""Summarize the rows of an evaluation: one line per variant, means over prompts and seeds with intervals."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparge.dispatch.reasons import Reason
from sparge.evaluate.intervals import Interval, mean_interval
from sparge.evaluate.pipeline.image_metrics import lpips_unavailable_reason
from sparge.evaluate.pipeline.run import DENSE, Result
from sparge.evaluate.rows import Row
from sparge.evaluate.timing import time_text
from sparge.evaluate.variants import Variant, kept_everything, share_computed


@dataclass(frozen=True)
class Line:
    """A variant, or the dense pipeline.

    Attributes:
        variant: its label.
        ran: "sparse", or how much of it ran dense and why.
        density: share of the blocks computed; steps and layers that a policy keeps dense count in full.
        psnr: mean over the clips that differ from the dense ones; None if all are equal.
        equal: number of clips that are equal to the dense ones, byte for byte.
        ssim, lpips, temporal_difference: means; None where not measured.
        seconds: median of a call.
        step_seconds: median of a step.
        speed_up: speed-up of a call, against the dense call of the same prompt and seed; the geometric mean.
        count: number of pairs of prompt and seed.
    """

    variant: str
    ran: str
    density: float | None
    psnr: Interval | None
    equal: int
    ssim: Interval | None
    lpips: Interval | None
    temporal_difference: Interval | None
    seconds: float
    step_seconds: float | None
    speed_up: Interval
    count: int


def lines_of(result: Result) -> list[Line]:
    """Return the lines of the dense pipeline and of every variant."""
    dense = [result.row("dense", item, None) for item in result.items]
    lines = [_line(DENSE, "dense", 1.0, dense, dense)]
    for variant in result.variants:
        rows = [result.row("variant", item, variant) for item in result.items]
        lines.append(_line(variant.label, _ran(variant, rows), _density(variant, rows), rows, dense))
    return lines


def _line(label: str, ran: str, density: float | None, rows: Sequence[Row], dense: Sequence[Row]) -> Line:
    psnr = [row["psnr"] for row in rows if row.get("psnr") is not None]
    steps = [row["step_seconds"] for row in rows if row["step_seconds"] is not None]
    return Line(
        variant=label,
        ran=ran,
        density=density,
        psnr=mean_interval(psnr) if psnr else None,
        equal=len(rows) - len(psnr),
        ssim=_mean(rows, "ssim"),
        lpips=_mean(rows, "lpips"),
        temporal_difference=_mean(rows, "temporal_difference"),
        seconds=statistics.median(row["seconds"] for row in rows),
        step_seconds=statistics.median(steps) if steps else None,
        speed_up=_geometric([exact["seconds"] / row["seconds"] for exact, row in zip(dense, rows, strict=True)]),
        count=len(rows),
    )


def _mean(rows: Sequence[Row], name: str) -> Interval | None:
    """Return the mean, or None unless every row has the value."""
    values = [row.get(name) for row in rows]
    return None if None in values else mean_interval([float(value) for value in values if value is not None])


def _geometric(ratios: Sequence[float]) -> Interval:
    """Return the geometric mean: that of 2 and 0.5 is 1."""
    logarithm = mean_interval([math.log(ratio) for ratio in ratios])
    mean = math.exp(logarithm.mean)
    return logarithm._replace(mean=mean, half=None if logarithm.half is None else mean * logarithm.half)


def _reasons(rows: Sequence[Row]) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row["reasons"])
    return total


def _density(variant: Variant, rows: Sequence[Row]) -> float | None:
    return share_computed(rows) if variant.is_sparse else 1.0


def _ran(variant: Variant, rows: Sequence[Row]) -> str:
    if variant.kind == "sdpa":
        return "dense"
    reasons = _reasons(rows)
    own = f"dense: {Reason.ASKED.value}"
    done = sum(count for reason, count in reasons.items() if reason.startswith("sparse"))
    done += reasons[own] if variant.kind == "dense" else 0
    shown = [
        (reason.removeprefix("dense").lstrip(": "), count)
        for reason, count in reasons.most_common()
        if not reason.startswith("sparse")
        and reason not in (f"dense: {Reason.CROSS_ATTENTION.value}", own if variant.kind == "dense" else "")
    ]
    word = "all blocks" if variant.kind == "dense" else "sparse"
    if not done:
        return f"dense: {shown[0][0]}" if shown else "dense: no attention call was seen"
    left = sum(count for _, count in shown)
    return word if not left else f"{done / (done + left):.0%} {word}; {shown[0][0]}"


def cells(line: Line, lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Return columns and texts, for the page and the terminal. Columns without values are left out."""
    is_dense = line is lines[0]
    shown: list[tuple[str, str]] = [("variant", line.variant), ("ran", line.ran)]
    shown.append(("density", "none" if line.density is None else f"{line.density:.3f}"))
    shown.append(("PSNR dB", "" if is_dense else _psnr_text(line)))
    for name, column, digits in (
        ("ssim", "SSIM", 4),
        ("lpips", "LPIPS", 4),
        ("temporal_difference", "temporal difference", 4),
    ):
        if any(getattr(other, name) is not None for other in lines):
            value = getattr(line, name)
            shown.append((column, "" if value is None else value.text(digits)))
    if any(other.step_seconds is not None for other in lines):
        shown.append(("step", "" if line.step_seconds is None else time_text(line.step_seconds)))
    shown.append(("call", time_text(line.seconds)))
    shown.append(("speed-up", "" if is_dense else f"{line.speed_up.text(2)}x"))
    return shown


def _psnr_text(line: Line) -> str:
    if line.psnr is None:
        return "equal"
    return line.psnr.text(1) + (f" ({line.equal} of {line.count} equal)" if line.equal else "")


def remarks(result: Result, lines: Sequence[Line]) -> Iterator[str]:
    """Yield remarks about the table."""
    if not result.is_known:
        yield (
            f"sparge.enable does not support {result.kind}: the policies were applied to all self-attention of its "
            "denoising model (sparge.replace_sdpa). Text tokens inside that attention are not always kept, and rules "
            "about layers and steps are not possible."
        )
    for variant, line in zip(result.variants, lines[1:], strict=True):
        if variant.is_sparse and line.ran.startswith("dense"):
            advice = ""
            if "crossover" in line.ran:
                advice = " Larger images or longer clips go sparse; --force goes sparse at any size."
            because = f"nothing ran sparse ({line.ran}), so its figures do not show effects of sparsity."
            yield f"{variant.label}: {because}{advice}"
        elif variant.is_sparse and (remark := kept_everything(line.density)):
            yield f"{variant.label}: {remark}."
        if line.ran.startswith("dense: no attention"):
            yield f"{variant.label}: none of the pipeline's attention goes through torch's SDPA."
    if any(variant.is_sparse and variant.policy.backend != "auto" for variant in result.variants):
        yield "A backend was named or --force was given: calls of any length went sparse, and short ones may be slower."
    broken = [row for row in result.rows if row.get("is_finite") is False]
    for row in broken:
        yield f"{row['variant']}, seed {row['seed']}: pixels were NaN or infinite; they count as black."
    if lines[-1].lpips is None:
        yield f"LPIPS is left out: {lpips_unavailable_reason() or 'some rows were measured without it'}."
    if any(variant.kind == "sdpa" for variant in result.variants):
        yield "An sdpa= line is the dense model on another kernel: differences of that size are rounding noise."
    if len(result.items) == 1:
        yield "One prompt and seed have no interval: give several to see how much the figures vary."
