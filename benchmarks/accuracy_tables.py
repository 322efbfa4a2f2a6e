"""Tables of docs/numerics.md, and of quality on trained models. A table without measurements is None.

Rows come from numerics.jsonl (`benchmarks.numerics`) and evaluation.jsonl (`benchmarks.evaluation`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.markdown import Row, with_source
from benchmarks.measure import newest, read_rows
from sparge.evaluate.intervals import Interval
from sparge.evaluate.language.summary import perplexity_increase

QUANTIZATIONS = ("int8_fp8_fast", "int8_fp8", "int8_fp16", "none")
TOKENS = 8192
NAMES = {
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
"""Names of options in tables. A variant without a quantization is 16-bit."""

FAST = "quantization=int8_fp8_fast"
LANGUAGE = (
    *("sdpa=math", f"dense,{FAST}"),
    *(f"topk={share},quantization=none" for share in ("0.5", "0.25", "0.1")),
    *(f"topk={share},oracle,quantization=none" for share in ("0.5", "0.25")),
    "rows=0.5,quantization=none",
    "topk=0.25,score=mean,quantization=none",
    "cdf=0.95,quantization=none",
    *(f"topk={share},{FAST}" for share in ("0.5", "0.25")),
)
DENSE = tuple(f"dense,quantization={name}" for name in reversed(QUANTIZATIONS))
LAYERS = ("topk=0.5", "topk=0.33", "topk=0.25", *(f"layers={share}" for share in ("0.5", "0.33", "0.25", "0.2")))
VIDEO = (
    *("dense", "sdpa=flash", f"dense,{FAST}", "topk=0.25,quantization=none"),
    *(f"topk={share},{FAST}" for share in ("0.5", "0.25", "0.15", "0.1")),
    f"topk=0.15,{FAST},dense_first_steps=0.2",
    *(f"topk=0.15,{FAST},{more}" for more in ("order=row", "skipped=drop", "skipped=drop,order=row")),
    f"rows=0.5,{FAST},skipped=drop,order=row",
)
"""Variants on the page; the results contain more."""


def numerics_kinds(results: Path) -> str | None:
    """Return the worst relative L1 error of each kind of family over all lengths and backends, by quantization.

    Includes only full attention with 128 channels and inputs recorded from models. Errors above their limit are bold.
    """
    rows = newest(read_rows(results / "numerics.jsonl"), "numerics")
    rows = [row for row in rows if row["relative_l1"] is not None]
    rows = [row for row in rows if row["kind"] == "captured" or (row["head_dim"] == 128 and not row["is_causal"])]
    kernels = sorted({row["kernel"] for row in rows}, key=QUANTIZATIONS.index)
    body = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        same = [row for row in rows if row["kind"] == kind]
        cudnn = [row["cudnn_relative_l1"] for row in same if row["cudnn_relative_l1"] is not None]
        errors = [_worst([row for row in same if row["kernel"] == kernel]) for kernel in kernels]
        limit = f"{max(row['target'] for row in same):.3f}"
        body.append([kind, limit, *errors, f"{max(cudnn):.4f}" if cudnn else "n/a"])
    return with_source(["families", "limit", *(f"`{kernel}`" for kernel in kernels), "cuDNN bf16"], body, rows)


def _worst(rows: list[Row]) -> str:
    if not rows:
        return ""
    text = f"{max(row['relative_l1'] for row in rows):.4f}"
    return text if all(row["passes"] for row in rows) else f"**{text}**"


def rows_of(results: Path, case: str, shown: tuple[str, ...] = ()) -> list[Row]:
    """Return the newest row of each length and variant of a case in evaluation.jsonl.

    Only rows of the newest commit that measured all variants of ``shown`` count.
    """
    rows = [row for row in read_rows(results / "evaluation.jsonl") if row["case"] == case]
    variants_of: dict[str, set[str]] = {}
    for row in rows:
        variants_of.setdefault(row["commit"], set()).add(row["variant"])
    complete = [row["commit"] for row in rows if variants_of[row["commit"]].issuperset(shown)]
    rows = [row for row in rows if row["commit"] in complete[-1:]]  # the meaning of "topk" changed
    return list({(row.get("tokens"), row["variant"]): row for row in rows}.values())


def describe(variant: str) -> str:
    """Return the name of a variant in tables.

    Example:
        >>> describe("topk=0.25,score=mean,quantization=none"), describe("dense,quantization=int8_fp8")
        ('topk 0.25, score mean', 'dense, INT8 + FP8')
    """
    names = [NAMES.get(option, option.replace("=", " ").replace("_", " ")) for option in variant.split(",")]
    return ", ".join(filter(None, names))


def _density(row: Row) -> str:
    return "" if row["density"] is None else f"{row['density']:.3f}"


def language(
    results: Path, case: str, shown: tuple[str, ...], digits: int = 4, name: Callable[[str], str] = describe
) -> str | None:
    """Return KL, agreement, perplexity and needles at 8192 tokens, one line per variant."""
    rows = [row for row in rows_of(results, case) if row["tokens"] == TOKENS and row["variant"] in shown]
    has_density = any(row["density"] is not None for row in rows)
    body = [
        [
            name(row["variant"]),
            *([_density(row)] if has_density else []),
            f"{row['kl']:.{digits}f} ± {row['kl_half']:.{digits}f}",
            f"{row['agreement']:.1%}",
            perplexity_increase(Interval(row["rise"], row["rise_half"], row["windows"])).text(2, percent=True),
            "" if "needle" not in row else f"{row['needle']:.2f} ({row['dense_needle']:.2f})",
        ]
        for row in rows
    ]
    header = ["attention", *(["density"] if has_density else []), "KL", "same token", "perplexity"]
    return with_source([*header, "needles found (dense)"], body, rows)


def video(results: Path) -> str | None:
    """Return PSNR and the time of a pass, one line per variant."""
    rows = [row for row in rows_of(results, "tiny video", VIDEO) if row["variant"] in VIDEO]
    body = [
        [
            describe(row["variant"]),
            _density(row),
            _psnr(row),
            "" if row.get("forward_graph_ms") is None else f"{row['forward_graph_ms']:.2f}",
        ]
        for row in rows
    ]
    return with_source(["attention", "density", "PSNR, dB", "pass by graph, ms"], body, rows)


def video_steps(results: Path) -> str | None:
    """Return PSNR and the time of a step without CUDA graphs, dense and sparse."""
    shown = ("dense", f"topk=0.25,{FAST}")
    rows = [row for row in rows_of(results, "tiny video", shown) if row["variant"] in shown]
    body = [
        [
            describe(row["variant"]),
            _density(row),
            _psnr(row),
            f"{1000 * row['step_seconds']:.1f}",
            f"{row['forward_ms']:.1f}",
            f"{row['forward_graph_ms']:.1f}",
        ]
        for row in rows
    ]
    return with_source(["attention", "density", "PSNR, dB", "step, ms", "pass, ms", "pass by graph, ms"], body, rows)


def _psnr(row: Row) -> str:
    return "" if row["psnr"] is None else Interval(row["psnr"], row["psnr_half"], row["clips"]).text(1)


def quantization_of(variant: str) -> str:
    """Return the quantization of a dense variant, as code."""
    return f"`{variant.rpartition('=')[2]}`"


NUMERIC_TABLES: dict[str, Callable[[Path], str | None]] = {
    "numerics_kinds": numerics_kinds,
    "numerics_language": partial(language, case="language", shown=DENSE, digits=5, name=quantization_of),
}
QUALITY_TABLES: dict[str, Callable[[Path], str | None]] = {
    "quality_language": partial(language, case="language", shown=LANGUAGE),
    "quality_layers": partial(language, case="layers", shown=LAYERS),
    "quality_video": video,
    "video_steps": video_steps,
}
