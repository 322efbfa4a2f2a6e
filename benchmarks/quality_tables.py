"""Quality on trained models as (header, lines, rows), from evaluation.jsonl (`benchmarks.evaluation`).

Tables are None if nothing was measured.
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
Table = tuple[list[str], list[list[str]], list[Row]]

TOKENS = 8192
WORDS = {
    "sdpa=math": "dense, another kernel",
    "sdpa=flash": "dense, another kernel (FA2)",
    "sdpa=efficient": "dense, another kernel (memory-efficient)",
    "quantization=none": "",
    "quantization=int8_fp8_fast": "quantized",
    "quantization=int8_fp8": "INT8 + FP8",
    "quantization=int8_fp16": "INT8 + FP16",
    "skipped=drop": "dropped",
    "order=row": "raster order",
}
"""Names of variants in tables; without a quantization they are 16-bit."""

LANGUAGE = (
    "sdpa=math",
    "dense,quantization=int8_fp8_fast",
    *(f"topk={share},quantization=none" for share in ("0.5", "0.25", "0.1")),
    *(f"topk={share},oracle,quantization=none" for share in ("0.5", "0.25")),
    "rows=0.5,quantization=none",
    "topk=0.25,score=mean,quantization=none",
    "cdf=0.95,quantization=none",
    *(f"topk={share},quantization=int8_fp8_fast" for share in ("0.5", "0.25")),
)
LAYERS = ("topk=0.5", "topk=0.33", "topk=0.25", *(f"layers={s}" for s in ("0.5", "0.33", "0.25", "0.2")))
FAST = "quantization=int8_fp8_fast"
VIDEO = (
    *("dense", "sdpa=flash", f"dense,{FAST}", "topk=0.25,quantization=none"),
    *(f"topk={share},{FAST}" for share in ("0.5", "0.25", "0.15", "0.1")),
    f"topk=0.15,{FAST},dense_first_steps=0.2",
    *(f"topk=0.15,{FAST},{more}" for more in ("order=row", "skipped=drop", "skipped=drop,order=row")),
    f"rows=0.5,{FAST},skipped=drop,order=row",
)
"""Variants on the page; the rows of the results have more."""


def rows_of(results: Path, case: str) -> list[Row]:
    """Return the newest row of each length and variant, at the newest commit of a case."""
    rows = [row for row in read_rows(results / "evaluation.jsonl") if row["case"] == case]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]  # the meaning of "topk" changed
    return list({(row.get("tokens"), row["variant"]): row for row in rows}.values())


def describe(variant: str) -> str:
    """Return the name of a variant in tables.

    Example:
        >>> describe("topk=0.25,score=mean,quantization=none"), describe("dense,quantization=int8_fp8")
        ('topk 0.25, score mean', 'dense, INT8 + FP8')
    """
    words = [WORDS.get(word, word.replace("=", " ").replace("_", " ")) for word in variant.split(",")]
    return ", ".join(filter(None, words))


def language(results: Path, case: str = "language", shown: tuple[str, ...] = LANGUAGE) -> Table | None:
    """Return KL, agreement, perplexity and needles, a line for each variant at 8192 tokens."""
    rows = [row for row in rows_of(results, case) if row["tokens"] == TOKENS and row["variant"] in shown]
    lines = [
        [
            describe(row["variant"]),
            "" if row["density"] is None else f"{row['density']:.3f}",
            f"{row['kl']:.4f} ± {row['kl_half']:.4f}",
            f"{row['agreement']:.1%}",
            risen(Interval(row["rise"], row["rise_half"], row["windows"])).text(2, percent=True),
            "" if "needle" not in row else f"{row['needle']:.2f} ({row['dense_needle']:.2f})",
        ]
        for row in rows
    ]
    header = ["attention", "density", "KL", "same token", "perplexity", "needles found (dense)"]
    return (header, lines, rows) if rows else None


def video(results: Path) -> Table | None:
    """Return PSNR and times, a line for each variant."""
    rows = [row for row in rows_of(results, "tiny video") if row["variant"] in VIDEO]
    lines = [
        [
            describe(row["variant"]),
            "" if row["density"] is None else f"{row['density']:.3f}",
            "" if row["psnr"] is None else Interval(row["psnr"], row["psnr_half"], row["clips"]).text(1),
            f"{1000 * row['step_seconds']:.1f}",
            "" if row.get("forward_graph_ms") is None else f"{row['forward_graph_ms']:.2f}",
        ]
        for row in rows
    ]
    header = ["attention", "density", "PSNR, dB", "step, ms", "pass by graph, ms"]
    return (header, lines, rows) if rows else None


QUALITY_TABLES: dict[str, Callable[[Path], Table | None]] = {
    "quality_language": language,
    "quality_layers": partial(language, case="layers", shown=LAYERS),
    "quality_video": video,
}
