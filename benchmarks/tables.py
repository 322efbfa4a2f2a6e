"""Fill the tables of README and docs from benchmarks/results: `python -m benchmarks.tables [--check]`.

A table stands between ``<!-- table: name -->`` and ``<!-- /table -->`` and shows the newest row of each case. Tables
``gpu_*`` come from gpu.jsonl (``sparge bench --json``), ``gpu_tests`` from gpu_tests.jsonl (tests/gpu and tools/gpu). A
table without rows is left unchanged.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.cpu_tables import CPU_TABLES
from benchmarks.markdown import Row, gpu_source, markdown
from benchmarks.measure import read_rows
from benchmarks.numeric_tables import NUMERIC_TABLES
from benchmarks.quality_tables import QUALITY_TABLES
from benchmarks.scale.summary import SCALE_TABLES
from sparge.bench.rivals import RIVALS, fastest
from sparge.bench.table import NOT_MEASURED, VIEWS, newest, problem_notes

REPOSITORY = Path(__file__).parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
MARKER = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)

LONGEST, BEST_TOPK, BEST_MODEL = 131072, {False: 0.1, True: 0.5}, ("Wan 2.1 14B", 0.25)
"""Cases of the README's table."""
BELOW_CROSSOVER = "Flux, 1024 x 1024"
"""A model that ran dense when it was measured."""
DENSE_COLUMNS = {**{f"{rival.column} ms": rival.column for rival in RIVALS.values()}, "SDPA ms": "SDPA"}


class Pivot(NamedTuple):
    """A table with a row for each problem: a column holds its variants, cells that belong together share one.

    Attributes:
        variant: the cell that names a variant. The cells before it identify the problem.
        cells: the cells that are shown of each variant.
        note: what they are.
    """

    variant: str
    cells: tuple[str, ...]
    note: str


CALLS = Pivot("topk", ("sparge ms", "speed-up", "rel. L1"), "ms, speed-up over the fastest dense kernel, rel. L1")
PIVOTS = {
    "end_to_end": CALLS,
    "packed": CALLS,
    "masks": CALLS._replace(note="ms, speed-up over SDPA, rel. L1"),
    "hopper": Pivot("kernel", ("ms", "TOPS executed", "rel. L1"), "ms, executed TOPS, rel. L1"),
}


ON_PAGE: dict[str, Callable[[Row], bool]] = {
    "hopper": lambda row: row["tokens"] == 32768 and row["asked_density"] == 0.5,
}
"""Rows of a view that stand on the page; all by default."""


def gpu_table(name: str) -> str | None:
    """Return a view of ``sparge bench``, or None if nothing was measured."""
    view = VIEWS[name]
    rows = [row for row in newest(_rows_of("gpu"), view.suite) if view.on_page(row) and ON_PAGE.get(name, bool)(row)]
    if not rows:
        return None
    rows = _by_problem(rows)
    shown = [dict(view.page_cells(row)) for row in rows]
    header, body = _pivoted(shown, PIVOTS[name])
    notes = _without_fa4(rows) if "speed-up" in shown[0] else ""
    notes += "".join(f"\n\nn/a: {note}" for note in problem_notes(rows))
    return f"{markdown(header, body)}\n\n{PIVOTS[name].note}; bf16, B 1; {gpu_source(rows)}{notes}"


def _pivoted(shown: list[dict[str, str]], pivot: Pivot) -> tuple[list[str], list[list[str]]]:
    """Return header and body of a table with the variants of a problem beside each other."""
    names = list(shown[0])
    fields = names[: names.index(pivot.variant)]
    variants = list(dict.fromkeys(cells[pivot.variant] for cells in shown))
    problems: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for cells in shown:
        problems.setdefault(tuple(cells[name] for name in fields), {})[cells[pivot.variant]] = cells
    dense = [_dense_times(next(iter(found.values()))) for found in problems.values()]
    has_dense = any(dense)
    body = []
    for (problem, found), times in zip(problems.items(), dense, strict=True):
        texts = [_variant_cell(found[name], pivot) if name in found else "" for name in variants]
        body.append([*problem, *([times or NOT_MEASURED] if has_dense else []), *texts])
    titles = [f"topk {name}" if pivot.variant == "topk" and name != "dense" else name for name in variants]
    return [*fields, *(["dense kernels, ms"] if has_dense else []), *titles], body


def _dense_times(cells: dict[str, str]) -> str:
    """Return "14.1 cuDNN, 25.0 FA2", the fastest first."""
    times = {title: cells.get(column, NOT_MEASURED) for column, title in DENSE_COLUMNS.items()}
    known = sorted((float(text), text, title) for title, text in times.items() if text != NOT_MEASURED)
    return ", ".join(f"{text} {title}" for _, text, title in known)


def _variant_cell(cells: dict[str, str], pivot: Pivot) -> str:
    """Return "5.99, **2.35x**, 0.0125", and the density where it is not the asked one."""
    texts = [cells[name] for name in pivot.cells]
    texts = [f"**{text}**" if text.endswith("x") else text for text in texts]
    asked = cells["topk"] if pivot.variant == "topk" else cells["density"]
    asked = "1" if asked == "dense" else asked
    if pivot.variant == "topk" and abs(float(cells["density"]) - float(asked)) > 5e-4:
        texts.append(f"density {cells['density']}")
    return ", ".join(texts)


def _by_problem(rows: list[Row]) -> list[Row]:
    """Return rows of a problem side by side, the densest first, in the order in which problems were first measured."""
    fields = ("tokens", "heads", "head_dim", "is_causal", "segments", "mask")
    problems = [tuple(row.get(name) for name in fields) for row in rows]
    places = {problem: place for place, problem in reversed(list(enumerate(problems)))}
    order = sorted(range(len(rows)), key=lambda at: (places[problems[at]], -(rows[at].get("topk") or 0)))
    return [rows[at] for at in order]


def best_table() -> str:
    """Return the README's four rows: full attention, causal attention, means, and a whole model."""
    attention = [
        row
        for row in newest(_rows_of("gpu"), "end_to_end")
        if row.get("backend") == "hopper" and row["tokens"] == LONGEST
    ]
    rows = [row for row in attention if row["topk"] == BEST_TOPK[row["is_causal"]]]
    rows += [row for row in _field_speeds() if row["tokens"] == LONGEST and row["density"] == 0.1]
    models = {(row["model"], row["topk"]): row for row in _rows_of("models") if not row.get("compiled")}
    rows.append(models[BEST_MODEL])
    body = []
    for row in rows:
        if "skipped" in row:
            what = f"Attention over {row['tokens']} tokens, smooth field, skipped blocks as means"
            command, after = "python -m benchmarks.fields", row["ms"]
        elif "model" in row:
            what, command = f"{row['model']}, forward pass (random weights)", "python -m benchmarks.models"
            after = row["sparse_ms"]
        else:
            kind = "causal, text-like" if row["is_causal"] else "video-like"
            what, command, after = f"Attention over {row['tokens']} tokens, {kind}", "sparge bench", row["sparge_ms"]
        dense, before = _baseline(row)
        body.append(
            [
                what,
                dense,
                f"{_three_digits(before)}&nbsp;→&nbsp;{_three_digits(after)}",
                f"**{before / after:.2f}x**",
                f"{row['density']:.3f}",
                f"{row['relative_l1']:.4f}",
                f"`{command}`",
            ]
        )
    header = ["bf16", "fastest dense kernel", "ms", "speed-up", "density", "rel. L1 error", "command"]
    return f"{markdown(header, body)}\n\n{gpu_source(rows)}{_without_fa4(rows)}"


def _without_fa4(rows: list[Row]) -> str:
    """Return a note on the commits that were measured without FlashAttention-4."""
    dense = [row for row in rows if "cudnn_ms" in row or "stock_ms" in row]
    commits = sorted({str(row["commit"]) for row in dense if row.get("fa4_ms") is None})
    return f"\n\nMeasured without FlashAttention-4: commit {', '.join(commits)}." if commits else ""


def _baseline(row: Row) -> tuple[str, float]:
    """Return name and milliseconds of the fastest dense kernel of a row; in a model, SDPA is one of them."""
    name = fastest(row)
    rival = (float("inf"), "") if name is None else (row[f"{name}_ms"], RIVALS[name].title)
    milliseconds, title = min(rival, (row.get("stock_ms", float("inf")), "torch's SDPA"))
    return title, milliseconds


def _three_digits(milliseconds: float) -> str:
    """Return a time with as many digits as are reproducible: 31.0."""
    places = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2
    return f"{milliseconds:.{places}f}"


def gpu_tests_table() -> str | None:
    """Return the last run of tests/gpu and of each tool in tools/gpu by backend, or None without runs."""
    rows = _rows_of("gpu_tests")
    runs = {row["backend"]: row for row in rows if "files" in row}
    if not runs:
        return None
    files = sorted({line["file"] for run in runs.values() for line in run["files"]})
    body = [
        [f"`{name}`", *(_counts([line for line in run["files"] if line["file"] == name]) for run in runs.values())]
        for name in files
    ]
    body.append(["all", *(f"**{_counts(run['files'])}**" for run in runs.values())])
    tools = {(row["tool"], row.get("backend", "triton")): row for row in rows if "tool" in row}
    notes = [f"Backend {backend!r}: {gpu_source([run])}" for backend, run in runs.items()]
    notes += [
        f"**{run['crashed']} processes crashed with {backend!r}; their tests are not counted.**"
        for backend, run in runs.items()
        if run.get("crashed")
    ]
    notes += [_tool_note(tool, backend, row) for (tool, backend), row in tools.items()]
    return markdown(["tests", *map(repr, runs)], body) + "".join(f"\n\n{note}" for note in notes)


HAZARDS = {"roles": "between roles", "metadata": "of metadata", "notes": "of metadata"}
"""Names of racecheck's hazards; older rows have "notes" for metadata."""


def _counts(lines: list[Row]) -> str:
    """Return "130 passed, 2 skipped", without counts of zero."""
    sums = {kind: sum(line[kind] for line in lines) for kind in ("passed", "failed", "skipped")}
    return ", ".join(f"{count} {kind}" for kind, count in sums.items() if count)


def _tool_note(tool: str, backend: str, row: Row) -> str:
    if tool == "soak":
        text = f"{row['launches']} launches of {row['problems']} problems in {row['seconds']} s, none hung"
        text += f"; {row['unequal']} problems whose bits changed, {row['inexact']} inexact"
    else:
        text = f"{row['errors']} errors in {row['calls']} calls"
        if row.get("control_errors") is not None:
            text += f" ({row['control_errors']} in a call made to fail)"
        apart = {kind: count for kind, count in row.get("apart", {}).items() if count}
        if apart:
            controls = row["controls"]
            text += "; apart from " + " and ".join(
                f"{count} {HAZARDS[kind]}{_control_note(kind, controls)}" for kind, count in apart.items()
            )
    return f"{tool}, {backend!r}: {text}; {gpu_source([row])}"


def _control_note(kind: str, controls: dict[str, int]) -> str:
    """Return racecheck's counts for the control kernels of a kind of hazard that is counted separately."""
    if kind != "roles":
        counts = (
            f"{controls['one_arrives']} if one thread arrives for those it met, {controls['all_arrive']} if all arrive"
        )
    elif "meeting" in controls:
        counts = f"{controls['meeting']} if some warps met before, {controls['alone']} if not"
    else:
        return ""
    return f" (in the control: {counts})"


def _rows_of(name: str) -> list[Row]:
    return read_rows(RESULTS / f"{name}.jsonl")


def models_table() -> str:
    """Return forward passes of whole models: stock, dense and quantized, sparse."""
    rows = [row for row in _rows_of("models") if row["case"] == "forward" and "variant" in row]
    groups: dict[tuple[str, bool], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["compiled"]), {})[row["variant"]] = row
    variants = ["8 bits", "0.5", "0.25", "0.15"]  # as rows name them
    body = []
    for (model, is_compiled), of in sorted(groups.items()):
        if model == BELOW_CROSSOVER:
            continue
        cells = [_model_cell(of.get(variant)) for variant in variants]
        name = f"{model}, compiled" if is_compiled else model
        dense, milliseconds = _baseline(next(iter(of.values())))
        body.append([name, f"{milliseconds:.0f}, {dense}", *cells])
    header = ["model", "dense, ms", "dense, quantized", *(f"topk {share}" for share in variants[1:])]
    source = f"{gpu_source(rows)}{_without_fa4(rows)}"
    return f"{markdown(header, body)}\n\nms, speed-up, rel. L1; bf16, B 1; {source}"


def _model_cell(row: Row | None) -> str:
    if row is None:
        return ""
    faster = _baseline(row)[1] / row["sparse_ms"]
    return f"{row['sparse_ms']:.0f}, **{faster:.2f}x**, {row['relative_l1']:.4f}"


def _field_speeds(rule: str = "topk", skipped: str = "mean") -> list[Row]:
    """Return the newest timed calls of `benchmarks.fields`."""
    found = {
        (row["tokens"], row["density"]): row
        for row in _rows_of("fields")
        if row["suite"] == "speed" and (row["rule"], row["skipped"]) == (rule, skipped)
    }
    return list(found.values())


def cpu_table(name: str) -> str | None:
    return CPU_TABLES[name](RESULTS)


def made_elsewhere(name: str) -> str | None:
    """Return a table of `numeric_tables` or `quality_tables`, or None if nothing was measured."""
    made = {**NUMERIC_TABLES, **QUALITY_TABLES}[name](RESULTS)
    return None if made is None else f"{markdown(made[0], made[1])}\n\n{gpu_source(made[2])}"


def scale_table(name: str) -> str:
    """Return a table of docs/scale.md. Missing measurements are marked in their cells."""
    header, body, rows = SCALE_TABLES[name](RESULTS)
    source = f"\n\nbf16, B 1; {gpu_source(rows)}" if rows else ""
    return f"{markdown(header, body)}{source}"


TABLES: dict[str, Callable[[], str | None]] = {
    "best": best_table,
    **{f"gpu_{name}": partial(gpu_table, name) for name in PIVOTS},
    "gpu_tests": gpu_tests_table,
    "models": models_table,
    **{name: partial(cpu_table, name) for name in CPU_TABLES},
    **{name: partial(made_elsewhere, name) for name in (*NUMERIC_TABLES, *QUALITY_TABLES)},
    **{name: partial(scale_table, name) for name in SCALE_TABLES},
}


def pages() -> list[Path]:
    """Return all pages that may contain tables."""
    return [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def fill(text: str) -> str:
    """Return a page with its tables filled from the results."""

    def made(found: re.Match[str]) -> str:
        table = TABLES[found[2]]()
        return found[0] if table is None else f"{found[1]}{table}\n{found[3]}"

    return MARKER.sub(made, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page differs from its results")
    check = parser.parse_args().check
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = fill(before)
        if check and before != after:
            name = page.relative_to(REPOSITORY)
            sys.exit(f"{name}: expected the tables of benchmarks/results, got others; run make tables")
        if before != after:
            page.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
