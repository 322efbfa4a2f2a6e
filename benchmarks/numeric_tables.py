"""Tables of docs/numerics.md as (header, lines, rows).

Rows come from numerics.jsonl (``sparge bench --suite numerics --json``) and divergence.jsonl. Tables without rows are
None.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import read_rows
from sparge.bench.table import newest
from sparge.options.common import RENAMED_QUANTIZATIONS

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]], list[Row]]

ORDER = ("int8_fp8_fast", "int8_fp8", "int8_fp16", "none")
BROKEN = "**"
"""Marks an error above its limit."""


def renamed(quantization: str) -> str:
    """Return the current name of a quantization; rows keep the name at the time of measurement."""
    return RENAMED_QUANTIZATIONS.get(quantization, quantization)


def measured(results: Path) -> list[Row]:
    """Return the newest row of each case with a result."""
    rows = [row | {"kernel": renamed(row["kernel"])} for row in read_rows(results / "numerics.jsonl")]
    return [row for row in newest(rows, "numerics") if row["relative_l1"] is not None]


def is_usual(row: Row) -> bool:
    """Return whether a row is full attention with 128 channels, or captured from a model (with sizes of its own)."""
    return row["kind"] == "captured" or (row["head_dim"] == 128 and not row["is_causal"])


def worst_of(rows: list[Row], field: str, form: str = ".4f") -> str:
    """Return the maximum over these rows, marked if a row exceeds a limit."""
    if not rows:
        return ""
    text = format(max(row[field] for row in rows), form)
    return text if all(row["passes"] for row in rows) else f"{BROKEN}{text}{BROKEN}"


def pivot(
    rows: list[Row], key: Callable[[Row], tuple[str, ...]], cell: Callable[[list[Row]], str], *, with_cudnn: bool = True
) -> tuple[list[str], list[list[str]]]:
    """Return titles and lines of a table with a line per key and a column per quantization, cuDNN last.

    A cell receives the rows of all backends.
    """
    kernels = sorted({row["kernel"] for row in rows}, key=ORDER.index)
    lines = []
    for name in dict.fromkeys(map(key, rows)):
        same = [row for row in rows if key(row) == name]
        cells = [cell([row for row in same if row["kernel"] == kernel]) for kernel in kernels]
        if with_cudnn:
            known = [row["cudnn_relative_l1"] for row in same if row["cudnn_relative_l1"] is not None]
            cells.append(format(max(known), ".4f") if known else "n/a")
        lines.append([*name, *cells])
    return [f"`{kernel}`" for kernel in kernels] + (["cuDNN bf16"] if with_cudnn else []), lines


def numerics_kinds(results: Path) -> Table | None:
    """Return the worst relative L1 error of each kind of family over all lengths."""
    rows = [row for row in measured(results) if is_usual(row)]
    limits: dict[str, float] = {}
    for row in rows:
        limits[row["kind"]] = max(row["target"], limits.get(row["kind"], 0.0))

    def key(row: Row) -> tuple[str, ...]:
        return row["kind"], f"{limits[row['kind']]:.3f}"

    columns, lines = pivot(rows, key, lambda same: worst_of(same, "relative_l1"))
    return (["families", "limit", *columns], lines, rows) if rows else None


def divergence(results: Path) -> Table | None:
    """Return the loss of a language model with dense attention by quantization."""
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
    "divergence": divergence,
}
