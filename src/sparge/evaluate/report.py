"""Build the parts that the reports on language models and pipelines share: tables, curves and remarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from sparge.console import print_table, print_written
from sparge.dispatch.reasons import POLICY_RULES, Reason, describe
from sparge.evaluate.rows import Row
from sparge.evaluate.variants import family_of

DENSITY = "density: share of the visible blocks that is computed"

Cells = list[tuple[str, str]]
"""One line of a table, as pairs (column, text)."""


@dataclass(frozen=True)
class Line:
    """A variant in a table."""

    variant: str
    ran: str  # `how_it_ran`
    density: float | None  # `share_computed`

    @property
    def is_sparse(self) -> bool:
        return "sparse" in self.ran


def how_it_ran(rows: Sequence[Row]) -> str:
    """Describe how the attention calls in ``rows`` ran; cross-attention is not counted.

    The text is "sparse", "40% sparse; REASON" or "dense: REASON", with the most frequent reason of the dense calls. If
    there are calls with the rule `Dense` but no sparse calls, "all blocks" replaces "sparse". Without any calls, the
    text is "dense".
    """
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["reasons"])
    del counts[Reason.CROSS_ATTENTION.label]
    sparse = sum(count for reason, count in counts.items() if reason.startswith("sparse"))
    all_blocks = 0 if sparse else counts.pop(Reason.REQUESTED.label, 0)
    count, word = (sparse, "sparse") if sparse else (all_blocks, "all blocks")
    dense = Counter({reason: number for reason, number in counts.items() if reason.startswith("dense")})
    if not dense:
        return word if count else "dense"
    reason = dense.most_common()[0][0].removeprefix("dense").lstrip(": ")
    return f"{count / (count + dense.total()):.0%} {word}; {reason}" if count else f"dense: {reason}"


def share_computed(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of the visible blocks that was computed, from rows with the fields of `stats_of_run`.

    Calls that run dense by a rule about steps or layers count as fully computed. Other dense calls (too short,
    cross-attention) are ignored. The share is None if no call is counted.
    """
    sparse = sum(row["sparse"] for row in rows)
    labels = [describe(reason, is_quantized=quantized) for reason in POLICY_RULES for quantized in (False, True)]
    dense_by_rule = sum(row["reasons"].get(label, 0) for row in rows for label in labels)
    if not sparse + dense_by_rule:
        return None
    computed = sum(row["density"] * row["sparse"] for row in rows if row["density"] is not None)
    return float((computed + dense_by_rule) / (sparse + dense_by_rule))


def sparsity_remark(line: Line, longer: str) -> str | None:
    """Return why the results of a variant do not show the effect of sparsity, or None if they do."""
    if line.ran.startswith("dense"):
        advice = f" {longer} run sparse; --force runs any size sparse." if "crossover" in line.ran else ""
        return f"nothing ran sparse ({line.ran}), so the results do not show the effect of sparsity.{advice}"
    if line.is_sparse and line.density is not None and line.density >= 0.9995:
        return (
            "every block was kept, so the results do not show the effect of sparsity. Every query block keeps at least "
            "min_blocks key blocks; for rows= and cdf=, the default is 16 blocks, or 1024 tokens."
        )
    return None


def cells_of(lines: Sequence[Line], columns: Mapping[str, Callable[[Any], str | None]]) -> list[Cells]:
    """Return the cells of every line. Columns that are empty in all lines are dropped."""
    cells = [[(column, text_of(line) or "") for column, text_of in columns.items()] for line in lines]
    used = [any(text for _, text in column) for column in zip(*cells, strict=True)]
    return [[cell for cell, is_used in zip(row, used, strict=True) if is_used] for row in cells]


def curves(points: Iterable[tuple[str, float, float | None]]) -> dict[str, list[tuple[float, float]]]:
    """Return a curve for each family of variants, from points (variant, x, y). Points without y are omitted."""
    families: dict[str, list[tuple[float, float]]] = {}
    for variant, x, y in points:
        if y is not None:
            families.setdefault(family_of(variant), []).append((x, y))
    return families


def machine_parts(row: Row, *details: str) -> list[str]:
    """Return device, ``details``, dtype and versions of a row."""
    device = row.get("gpu") or f"{row['processor']}, {row['threads']} threads"
    commit = f" ({row['commit']})" if row.get("commit") else ""
    return [device, *details, row["run"]["dtype"], f"torch {row['torch']}", f"sparge {row['sparge']}{commit}"]


def print_report(
    console: Console,
    tables: Iterable[tuple[str, Sequence[Cells]]],
    remarks: Iterable[str],
    written: Iterable[object],
    reused: int,
) -> None:
    """Print the number of reused rows, tables with their titles, remarks, and the paths of the written files."""
    if reused:
        console.print(f"{reused} rows of an earlier run were reused")
    for title, rows in tables:
        if title:
            console.print(title, style="bold")
        print_table(console, rows, left=("variant", "ran"))
    for text in remarks:
        console.print(f"- {text}")
    print_written(console, *written)
