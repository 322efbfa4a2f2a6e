"""Tables of quality on trained models, from evaluation.jsonl (`benchmarks.evaluation`): header, lines, rows.

Each returns None where nothing was measured yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import read_rows
from sparge.evaluate.intervals import Interval
from sparge.evaluate.language.summary import risen

Row = dict[str, Any]
Made = tuple[list[str], list[list[str]], list[Row]]

WORDS = {
    "sdpa=math": "dense, another kernel",
    "sdpa=flash": "dense, another kernel (FA2)",
    "sdpa=efficient": "dense, another kernel (memory-efficient)",
    "quantization=none": "",
    "quantization=int8_fp8_fast": "8 bits (fast)",
    "quantization=int8_fp8": "8 bits",
    "quantization=int8_fp16": "INT8 + FP16",
    "skipped=drop": "dropped",
    "order=row": "raster order",
}
"""What variants are called in tables; 16 bits where nothing is said."""

FIGURES = {
    "psnr": ("PSNR, dB", 1),
    "ssim": ("SSIM", 4),
    "lpips": ("LPIPS", 4),
    "temporal_difference": ("temporal difference", 4),
}
"""Of a pipeline's rows: what a column is called, and its digits. Those that were not measured have none."""


def rows_of(results: Path, case: str) -> list[Row]:
    """The rows of the newest commit that a case was measured at, the newest of each length and variant."""
    rows = [row for row in read_rows(results / "evaluation.jsonl") if row["case"] == case]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]  # "topk" has not always meant the same
    return list({(row.get("tokens"), row["variant"]): row for row in rows}.values())


def told(variant: str) -> str:
    """A variant in words.

    Example:
        >>> told("topk=0.25,score=mean,quantization=none"), told("dense,quantization=int8_fp8")
        ('topk 0.25, score mean', 'dense, 8 bits')
    """
    words = [WORDS.get(word, word.replace("=", " ").replace("_", " ")) for word in variant.split(",")]
    return ", ".join(filter(None, words))


def language(results: Path, tokens: int | None = None, case: str = "language") -> Made | None:
    """KL, agreement, perplexity and needles, a line for each length (or the given one) and variant."""
    rows = [row for row in rows_of(results, case) if tokens in (None, row["tokens"])]
    if not rows:
        return None
    lines, before = [], None
    for row in rows:
        same_as_before = before is not None and all(row[name] == before[name] for name in ("tokens", "density", "kl"))
        before = row
        if same_as_before and row["density"] is not None:
            continue  # the floor of 16 blocks made two shares one
        lines.append(
            [
                f"{row['tokens']}",
                told(row["variant"]),
                "" if row["density"] is None else f"{row['density']:.3f}",
                f"{row['kl']:.4f} ± {row['kl_half']:.4f}",
                f"{row['agreement']:.1%}",
                risen(Interval(row["rise"], row["rise_half"], row["windows"])).text(2, percent=True),
                "" if "needle" not in row else f"{row['needle']:.2f} ({row['dense_needle']:.2f})",
                "" if "needle" not in row else f"{row['needle_nll']:.2f} ({row['dense_needle_nll']:.2f})",
            ]
        )
    header = ["tokens", "attention", "density", "KL", "same token", "perplexity"]
    return [*header, "needles found (dense)", "nats an answer's token (dense)"], lines, rows


def video(results: Path, case: str = "tiny video") -> Made | None:
    """PSNR, SSIM and times, a line for each variant."""
    rows = rows_of(results, case)
    if not rows:
        return None
    figures = {name: FIGURES[name] for name in FIGURES if any(row[name] is not None for row in rows)}
    masks = [(row["density"], row["psnr"]) for row in rows]
    lines = [
        [
            told(row["variant"]),
            "" if row["density"] is None else f"{row['density']:.3f}",
            *(_mean(row, name, digits) for name, (_, digits) in figures.items()),
            f"{1000 * row['step_seconds']:.1f}",
            "" if row.get("forward_graph_ms") is None else f"{row['forward_graph_ms']:.2f}",
        ]
        for place, row in enumerate(rows)
        if row["psnr"] is None or masks[place] not in masks[:place]  # the floor of 16 blocks made two shares one
    ]
    header = ["attention", "density", *(title for title, _ in figures.values()), "step, ms"]
    return [*header, "forward pass on the device, ms"], lines, rows


def _mean(row: Row, name: str, digits: int) -> str:
    return "" if row[name] is None else Interval(row[name], row[f"{name}_half"], row["clips"]).text(digits)


QUALITY_TABLES: dict[str, Callable[[Path], Made | None]] = {
    "quality_language": partial(language, tokens=8192),
    "quality_layers": partial(language, case="layers"),
    "quality_video": video,
    "quality_pictures": partial(video, case="tiny image"),
}
