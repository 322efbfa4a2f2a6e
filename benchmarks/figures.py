"""Draw the figures in docs/figures: `python -m benchmarks.figures [name ...]`.

idea      an attention map, the kept blocks, and the resulting error and time
scores    true attention mass beside the blocks that each score keeps
rules     blocks of two heads that TopK, TopCdf and one budget keep
error     the error of the output by density, on three kinds of input
fp8-bits  why P needs no exp2: the bits of an FP8 value are almost linear in its logarithm
quality   loss and needles of a trained language model by density
video     PSNR of clips of a trained video model by density and by time
replacement   errors on smooth fields: skipped blocks dropped, replaced by means, and in Hilbert order
order     tokens of a video in one key block, in raster and in Hilbert order
calibration   errors of each layer of a language model by density, and the resulting budgets

Each figure is drawn twice, for light and dark pages: idea-light.png and idea-dark.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import sparge
from benchmarks.accuracy_tables import VIDEO, rows_of
from benchmarks.attention_figures import (
    draw_error,
    draw_fp8_bits,
    draw_idea,
    draw_order,
    draw_rules,
    draw_scores,
)
from benchmarks.looks import DENSITY, LOOKS, Look
from benchmarks.measure import read_rows

FOLDER = Path(__file__).parent.parent / "docs" / "figures"
RESULTS = Path(__file__).parent / "results"
QUALITY_TOKENS = 8192


def draw_quality(look: Look) -> Figure:
    """Draw KL and needles of SmolLM2 by density: budgets, TopK, TopCdf and the oracle.

    Per-layer budgets were measured with twice as many needles, so they are only in the left panel.
    """
    rows = [row for row in rows_of(RESULTS, "language") if row["tokens"] == QUALITY_TOKENS]
    figure = look.figure(8.6, 3.3)
    left, right = figure.subplots(1, 2)
    kinds = (
        ("topk", "one budget (topk)", look.marks[0], "o"),
        ("rows", "equal share per query block (TopK)", look.marks[1], "s"),
        ("cdf", "TopCdf", look.ink, "D"),
        ("topk oracle", "one budget, oracle", look.marks[2], "^"),
    )
    for kind, label, color, mark in kinds:
        of_kind = [row for row in rows if _kind(row["variant"]) == kind]
        style = {"color": color, "marker": mark, "ms": 4, "lw": 1.4, "label": label}
        densities, kl, halves = _columns(of_kind, "density", "kl", "kl_half")
        left.errorbar(densities, kl, halves, elinewidth=0.8, capsize=2, **style)
        right.plot(*_columns((row for row in of_kind if "needle" in row), "density", "needle"), **style)
    layers = [row for row in rows_of(RESULTS, "layers") if row["variant"].startswith("layers=")]
    style = {"color": look.marks[0], "marker": "o", "mfc": look.page, "ms": 4, "lw": 1.2, "ls": "--"}
    left.plot(*_columns(layers, "density", "kl"), **style)
    right.plot([], [], label="budgets by layer (left)", **style)
    quantized = next(row for row in rows if row["variant"] == "dense,quantization=int8_fp8")
    look.level(left, quantized["kl"], "dense, quantized")
    look.level(right, next(row for row in rows if "dense_needle" in row)["dense_needle"], "dense")
    left.set(yscale="log", xlabel=DENSITY, ylabel="KL from dense, nats a token")
    left.set_yticks((0.0005, 0.002, 0.005, 0.02, 0.1), labels=("0.0005", "0.002", "0.005", "0.02", "0.1"))
    left.minorticks_off()
    right.set(ylim=(0, 1.02), xlabel=DENSITY, ylabel="needles found")
    look.style(left, 8.5, grid=True)
    look.style(right, 8.5, grid=True)
    look.legend(right, 8, loc="lower right")
    return figure


def draw_video(look: Look) -> Figure:
    """Draw the PSNR of the tiny video model's clips against dense ones, by density and by time of a forward pass."""
    rows = rows_of(RESULTS, "tiny video", VIDEO)
    figure = look.figure(8.6, 3.3)
    left, right = figure.subplots(1, 2, sharey=True)
    fast = "quantization=int8_fp8_fast"
    kinds = (
        (f"topk {fast}", "topk: means, Hilbert order", look.marks[0], "o-"),
        (f"topk {fast} dense_first_steps=0.2", "the same, first fifth of the steps dense", look.ink, "D-"),
        (f"topk {fast} order=row", "topk in raster order", look.marks[2], "^"),
        (f"topk {fast} skipped=drop", "topk, skipped blocks dropped", look.marks[2], "v"),
        (f"rows {fast} skipped=drop order=row", "equal shares, dropped, raster", look.marks[1], "s-"),
    )
    for kind, label, color, mark in kinds:
        points = _columns((row for row in rows if _kind(row["variant"], fast) == kind), "density", "psnr")
        left.plot(*points, mark, color=color, ms=4, lw=1.4, label=label)
    by_precision = {"16 bits": "quantization=none", "quantized, and dense quantized": fast}
    for (label, option), mark, color in zip(by_precision.items(), "ov", look.marks[:2], strict=True):
        kept = (
            row for row in rows if row["variant"].endswith(option) and row["variant"].startswith(("topk", "dense,"))
        )
        points = _columns(kept, "forward_graph_ms", "psnr")
        right.plot(*points, color=color, marker=mark, ms=4, lw=1.4, label=label)
    dense = next(row for row in rows if row["variant"] == "dense")["forward_graph_ms"]
    right.axvline(dense, color=look.quiet, lw=0.8, ls="--")
    right.text(dense, 0.03, "dense ", ha="right", va="bottom", fontsize=7.5, color=look.quiet,
               transform=right.get_xaxis_transform())  # fmt: skip
    noise = next(row for row in rows if row["variant"] == "sdpa=flash")
    look.level(left, noise["psnr"], "dense, another kernel", x=0.01, ha="left", va="top")
    look.level(right, noise["psnr"])
    look.style(left, 8.5, grid=True)
    look.style(right, 8.5, grid=True)
    left.set(ylim=(20, 55), xlabel="density: share of the blocks", ylabel="PSNR against dense, dB")
    right.set(xlabel="forward pass on the device, ms")
    look.legend(left, 7, loc="upper left", bbox_to_anchor=(0, 0.9))
    look.legend(right, 8, loc="upper left", bbox_to_anchor=(0, 0.9))
    return figure


def _columns(rows: Iterable[dict[str, Any]], *names: str) -> list[list[float]]:
    """Return one list per field, with rows sorted by density."""
    kept = sorted(rows, key=lambda row: row["density"])
    return [[row[name] for row in kept] for name in names]


def _kind(variant: str, quantization: str = "quantization=none") -> str:
    """Return the kind of a variant with this quantization, without its density; "" for all others.

    Example:
        >>> _kind("topk=0.5,score=mean,quantization=none"), _kind("topk=0.5,quantization=int8_fp8")
        ('topk score=mean', '')
    """
    rule, *options = variant.split(",")
    if quantization not in options or not rule.startswith(("topk=", "rows=", "cdf=")):
        return ""
    return " ".join([rule.partition("=")[0], *(option for option in options if option != "quantization=none")])


def draw_replacement(look: Look) -> Figure:
    """Draw one panel for each field of `benchmarks.fields`, quantized on a GPU."""
    rows = [row for row in read_rows(RESULTS / "fields.jsonl") if row["suite"] == "error"]
    fields = list(dict.fromkeys((row["amplitude"], row["noise"]) for row in rows))
    figure = look.figure(9.6, 2.7)
    panels = figure.subplots(1, len(fields), sharey=True)
    curves = (
        ("dropped", "drop", "row", "--", look.marks[1]),
        ("replaced by means", "mean", "row", "-", look.marks[2]),
        ("the same, Hilbert order", "mean", "hilbert", "-", look.marks[0]),
    )
    for panel, (amplitude, noise) in zip(panels, fields, strict=True):
        for label, skipped, order, style, color in curves:
            case = {"amplitude": amplitude, "noise": noise, "skipped": skipped, "order": order}
            points = {row["density"]: row["relative_l1"] for row in rows if case.items() <= row.items()}
            panel.loglog(list(points), list(points.values()), style, marker="o", ms=3, lw=1.4, color=color, label=label)
        panel.set_title(f"amplitude {amplitude}, noise {noise}", fontsize=9)
        panel.set_xticks([0.05, 0.1, 0.25, 0.5], ["5 %", "10 %", "25 %", "50 %"])
        panel.minorticks_off()
        panel.set_xlabel("blocks kept", fontsize=8)
        look.style(panel)
    panels[0].set_ylabel("relative L1 error", fontsize=8)
    panels[0].set_yticks([0.003, 0.01, 0.03, 0.1, 0.3], ["0.003", "0.01", "0.03", "0.1", "0.3"])
    handles, labels = panels[0].get_legend_handles_labels()
    look.legend(figure, 8, handles=handles, labels=labels, loc="outside lower center", ncols=3)
    return figure


def draw_calibration(look: Look) -> Figure:
    """Draw the profile of `benchmarks/results/smollm2-profile.json`."""
    profile = sparge.Profile.load(RESULTS / "smollm2-profile.json")
    budgets = profile.by_layer()
    shades = look.colormap(look.marks[0], look.marks[1])
    colors = [shades(place / (len(budgets) - 1)) for place in range(len(budgets))]
    figure = look.figure(9.6, 3.2)
    left, right = figure.subplots(1, 2)
    for color, curve in zip(colors, profile.curves.values(), strict=True):
        left.loglog(curve.densities, curve.worst(), color=color, lw=1)
    left.axhline(profile.max_error, color=look.ink, lw=1, ls=":")
    left.set_xticks([0.05, 0.1, 0.2, 0.4, 0.8], ["5 %", "10 %", "20 %", "40 %", "80 %"])
    left.minorticks_off()
    left.set(xlabel="blocks kept", ylabel="relative L1 error, worst input")
    right.bar(range(len(budgets)), budgets, color=colors)
    shared = profile.at(density=profile.density).by_layer()
    right.plot(range(len(shared)), shared, "o", color=look.ink, ms=3, label="the same mean, allocated by mass")
    right.axhline(profile.density, color=look.ink, lw=1, ls=":")
    look.legend(right, 8, loc="upper right")
    right.set(xlabel="layer", ylabel="budget", ylim=(0, 1))
    look.style(left, 8)
    look.style(right, 8)
    return figure


DRAWN: dict[str, Callable[[Look], Figure]] = {
    "idea": draw_idea,
    "scores": draw_scores,
    "rules": draw_rules,
    "error": draw_error,
    "fp8-bits": draw_fp8_bits,
    "quality": draw_quality,
    "video": draw_video,
    "replacement": draw_replacement,
    "order": draw_order,
    "calibration": draw_calibration,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="figures to draw; all by default")
    FOLDER.mkdir(exist_ok=True)
    for name in parser.parse_args().names or DRAWN:
        for look in LOOKS:
            file = FOLDER / f"{name}-{look.name}.png"
            DRAWN[name](look).savefig(file)
            print(f"wrote {file}")


if __name__ == "__main__":
    main()
