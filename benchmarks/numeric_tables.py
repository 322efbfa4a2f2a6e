"""Tables of docs/numerics.md, from numerics.jsonl (``sparge bench --suite numerics --json``) and divergence.jsonl.

Each returns None where nothing was measured yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import read_rows
from sparge.bench.table import newest
from sparge.options.common import RENAMED_QUANTIZATIONS

Row = dict[str, Any]
Kernel = tuple[str, str]

ORDER = ("int8_fp8_fast", "int8_fp8", "int8_fp16", "none")
SINK = re.compile(r"sink-(\d+)$")
BROKEN = "**"
"""Marks what breaks its limit."""


def renamed(quantization: str) -> str:
    """A quantization by its present name; rows keep the one they were measured under."""
    return RENAMED_QUANTIZATIONS.get(quantization, quantization)


def measured(results: Path) -> list[Row]:
    """The newest row of each case whose kernel gave a result."""
    rows = [row | {"kernel": renamed(row["kernel"])} for row in read_rows(results / "numerics.jsonl")]
    return [row for row in newest(rows, "numerics") if row["relative_l1"] is not None]


def kernels_in(rows: list[Row]) -> list[Kernel]:
    """(backend, quantization), by backend, then from the fastest to the most exact."""
    found = {(row["backend"], row["kernel"]) for row in rows}
    return sorted(found, key=lambda kernel: (kernel[0], ORDER.index(kernel[1])))


def titles(kernels: list[Kernel]) -> list[str]:
    return [f"{backend} `{quantization}`" for backend, quantization in kernels]


def is_usual(row: Row) -> bool:
    """Full attention, 128 channels; what is recorded has its own sizes."""
    return row["kind"] == "captured" or (row["head_dim"] == 128 and not row["is_causal"])


def worst_of(rows: list[Row], field: str, form: str = ".4f") -> str:
    """The largest number of these rows; marked where a row breaks a limit."""
    if not rows:
        return ""
    text = format(max(row[field] for row in rows), form)
    return text if all(row["passes"] for row in rows) else f"{BROKEN}{text}{BROKEN}"


def pivot(
    rows: list[Row], key: Callable[[Row], tuple[str, ...]], cell: Callable[[list[Row]], str], *, with_cudnn: bool = True
) -> tuple[list[str], list[list[str]]]:
    """Titles and lines of a table with a line for each key and a column for each kernel, and cuDNN's."""
    kernels = kernels_in(rows)
    lines = []
    for name in dict.fromkeys(map(key, rows)):
        same = [row for row in rows if key(row) == name]
        cells = [cell([row for row in same if (row["backend"], row["kernel"]) == kernel]) for kernel in kernels]
        if with_cudnn:
            known = [row["cudnn_relative_l1"] for row in same if row["cudnn_relative_l1"] is not None]
            cells.append(format(max(known), ".4f") if known else "n/a")
        lines.append([*name, *cells])
    return titles(kernels) + (["cuDNN bf16"] if with_cudnn else []), lines


def numerics_kinds(results: Path) -> tuple[list[str], list[list[str]], list[Row]] | None:
    """Worst relative L1 error of each kind of family, by length."""
    rows = [row for row in measured(results) if is_usual(row)]
    limits: dict[tuple[str, int], float] = {}
    for row in rows:
        place = row["kind"], row["tokens"]
        limits[place] = max(row["target"], limits.get(place, 0.0))

    def key(row: Row) -> tuple[str, ...]:
        return row["kind"], str(row["tokens"]), f"{limits[row['kind'], row['tokens']]:.3f}"

    columns, lines = pivot(rows, key, lambda same: worst_of(same, "relative_l1"))
    return (["families", "N", "limit", *columns], lines, rows) if rows else None


def numerics_sinks(results: Path) -> tuple[list[str], list[list[str]], list[Row]] | None:
    """Relative L1 error by the height of a sink over an even tail, and by length."""
    rows = [row for row in measured(results) if is_usual(row) and SINK.match(row["family"])]

    def key(row: Row) -> tuple[str, ...]:
        found = SINK.match(row["family"])
        assert found
        return found[1], str(row["tokens"])

    columns, lines = pivot(rows, key, lambda same: worst_of(same, "relative_l1"))
    return (["gap, nats", "N", *columns], lines, rows) if rows else None


def numerics_lse(results: Path) -> tuple[list[str], list[list[str]], list[Row]] | None:
    """Error of the LSE in nats: the mean over a family's rows and its worst row, for the worst family of a kind."""
    rows = measured(results)

    def cell(same: list[Row]) -> str:
        return f"{worst_of(same, 'lse_mean')} / {worst_of(same, 'lse_worst', '.3f')}" if same else ""

    columns, lines = pivot(rows, lambda row: (row["kind"],), cell, with_cudnn=False)
    return (["families", *columns], lines, rows) if rows else None


def numerics_held(results: Path) -> tuple[list[str], list[list[str]], list[Row]] | None:
    """How many cases hold all their limits."""
    rows = measured(results)

    def key(row: Row) -> tuple[str, ...]:
        return (f"{'causal' if row['is_causal'] else 'full'}, head_dim {row['head_dim']}",)

    def cell(same: list[Row]) -> str:
        return f"{sum(row['passes'] for row in same)} of {len(same)}" if same else ""

    columns, lines = pivot(rows, key, cell, with_cudnn=False)
    return (["attention", *columns], lines, rows) if rows else None


def divergence(results: Path) -> tuple[list[str], list[list[str]], list[Row]] | None:
    """What dense 8-bit attention costs a language model, by quantization."""
    newest_of = {
        (row["attention"], renamed(row["quantization"]), row["tokens"]): row
        for row in read_rows(results / "divergence.jsonl")
        if "gpu" in row
    }
    lines = [
        [
            backend,
            f"`{quantization}`",
            row["dtype"],
            f"{row['windows']} x {tokens}",
            f"{row['kl']:.5f}" + ("" if row["kl_error"] is None else f" ± {row['kl_error']:.5f}"),
            f"{row['loss']:+.2%}" + ("" if row["loss_error"] is None else f" ± {100 * row['loss_error']:.2f}"),
            f"{row['agreement']:.4f}",
        ]
        for (backend, quantization, tokens), row in newest_of.items()
    ]
    header = ["backend", "quantization", "dtype", "windows", "KL", "perplexity", "same most likely token"]
    return (header, lines, list(newest_of.values())) if lines else None


NUMERIC_TABLES = {
    "numerics_kinds": numerics_kinds,
    "numerics_sinks": numerics_sinks,
    "numerics_lse": numerics_lse,
    "numerics_held": numerics_held,
    "divergence": divergence,
}
