"""Format rows of ``sparge bench`` as tables for the terminal and for Markdown pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sparge.bench.cases import Row
from sparge.bench.rivals import RIVALS, fastest

Cell = Callable[[Row], str]

NOT_MEASURED = "n/a"
KERNELS = {
    "int8_fp8_fast": "INT8 + FP8, no exp2",
    "int8_fp8": "INT8 + FP8",
    "int8_fp16": "INT8 + FP16",
    "none": "16 bits",
    "flex": "FlexAttention bf16",
}


def cell(field: str, form: Callable[[Any], str] = str) -> Cell:
    """Return a function that formats a field of a row, or returns "n/a" if it is missing or None."""

    def text(row: Row) -> str:
        value = row.get(field)
        return NOT_MEASURED if value is None else form(value)

    return text


def milliseconds(value: float) -> str:
    """Format milliseconds without an exponent, with the digits that repeated runs reproduce."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _microseconds(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def _mebibytes(value: int) -> str:
    return f"{value / 2**20:.0f} MiB"


def _fastest_dense(row: Row) -> str:
    name = fastest(row)
    return RIVALS[name].column if name else NOT_MEASURED


def _density(row: Row) -> str:
    """Return the requested density of random blocks, else the measured density."""
    name, form = ("density", "{:.3f}") if row.get("asked_density") is None else ("asked_density", "{:g}")
    return cell(name, form.format)(row)


COLUMNS: dict[str, Cell] = {
    "N": cell("tokens"),
    "queries": cell("queries"),
    "keys": cell("tokens"),
    "H": cell("heads"),
    "D": cell("head_dim"),
    "causal": cell("is_causal", lambda value: "yes" if value else "no"),
    "kernel": cell("kernel", lambda name: KERNELS.get(name, NOT_MEASURED)),
    "topk": cell("topk", lambda value: "dense" if value == 1.0 else f"{value:g}"),
    "dense": _fastest_dense,
    "dense ms": lambda row: cell(f"{fastest(row)}_ms", milliseconds)(row),
    "sparge ms": cell("sparge_ms", milliseconds),
    "prepare ms": cell("prepare_ms", milliseconds),
    "attend ms": cell("attend_ms", milliseconds),
    "call ms": cell("sparge_graph_ms", milliseconds),
    "call with launches ms": cell("sparge_ms", milliseconds),
    "ms": lambda row: cell("ms" if row.get("graph_ms") is None else "graph_ms", milliseconds)(row),
    "TFLOP/s": cell("sparge_tflops", "{:.0f}".format),
    "TOPS executed": cell("executed_tops", "{:.0f}".format),
    "speed-up": cell("speedup", "{:.2f}x".format),
    "by graph": cell("graph_speedup", "{:.2f}x".format),
    "density": _density,
    "rel. L1": cell("relative_l1", "{:.4f}".format),
    "q + k + v": cell("input_bytes", _mebibytes),
    "output": cell("output_bytes", _mebibytes),
    "peak extra": cell("extra_bytes", _mebibytes),
    "of q + k + v": cell("extra_share", "{:.2f}x".format),
    "call": cell("call"),
    "us": cell("total_us", _microseconds),
    "over SDPA": cell("over_sdpa_us", _microseconds),
    "launches": cell("launches"),
}


@dataclass(frozen=True)
class View:
    """A table: the suite of its rows, its title, and its columns (keys of `COLUMNS`)."""

    suite: str
    title: str
    columns: tuple[str, ...]

    def cells(self, row: Row) -> dict[str, str]:
        """Return the text of every column."""
        return {column: COLUMNS[column](row) for column in self.columns}


PROBLEM = ("N", "H", "D", "causal")
CALL = ("dense", "dense ms", "sparge ms")
VIEWS = {
    "end_to_end": View(
        "end_to_end",
        "Whole calls against the fastest dense kernel, prediction and quantization included",
        (*PROBLEM, "topk", *CALL, "TFLOP/s", "speed-up", "density", "rel. L1"),
    ),
    "prepare": View(
        "end_to_end",
        "Stages of a call, by graph replay",
        (*PROBLEM, "topk", "prepare ms", "attend ms", "call ms", "call with launches ms"),
    ),
    "kernel": View(
        "kernel",
        "Attention over random blocks, the kernel alone",
        ("N", "H", "D", "density", "kernel", "ms", "TOPS executed", "rel. L1"),
    ),
    "memory": View(
        "memory",
        "Peak device memory beyond inputs and output",
        (*PROBLEM, "topk", "q + k + v", "output", "peak extra", "of q + k + v"),
    ),
    "crossover": View(
        "crossover",
        "Sparse INT8/FP8 attention against the fastest dense kernel, by size",
        ("queries", "keys", "H", "D", "causal", "topk", *CALL, "speed-up", "by graph", "density"),
    ),
    "host": View("host", "Launch overhead per call, microseconds", ("call", "us", "over SDPA", "launches")),
}


def problem_notes(rows: Sequence[Row]) -> list[str]:
    """Return the reasons for n/a cells, such as "cudnn: reason", without duplicates."""
    return list(dict.fromkeys(f"{name}: {why}" for row in rows for name, why in row["problems"].items()))


def one_line(row: Row) -> str:
    """Return a row as one line of progress."""
    cells = VIEWS[row["suite"]].cells(row)
    return f"{row['suite']}: " + ", ".join(f"{column} {text}" for column, text in cells.items() if text)
