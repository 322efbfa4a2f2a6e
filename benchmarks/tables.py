"""Write the tables of README and docs from benchmarks/results: `python -m benchmarks.tables [--check]`.

A table stands between ``<!-- table: name -->`` and ``<!-- /table -->``. The newest row of each case is shown. Tables
``gpu_*`` come from gpu.jsonl, which ``sparge bench --json`` writes, and gpu_tests.jsonl, which the programs in
tests/gpu write; ``host`` comes from host.jsonl (``sparge bench --suite host``). Without rows of theirs they, and those
of `numeric_tables` and `quality_tables`, stay as they are.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.cpu_tables import CPU_TABLES
from benchmarks.markdown import Row, cpu_source, gpu_source, markdown
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


def gpu_table(name: str) -> str | None:
    """A view of ``sparge bench``, or None where nothing of it was measured yet."""
    view = VIEWS[name]
    rows = [row for row in newest(_rows_of("gpu"), view.suite) if view.on_page(row)]
    if not rows:
        return None
    rows = _by_problem(rows)
    shown = [dict(view.page_cells(row)) for row in rows]
    unmeasured = {
        name for name in _rival_columns() if all(cells.get(name, NOT_MEASURED) == NOT_MEASURED for cells in shown)
    }
    header = [column for column in shown[0] if column not in unmeasured]
    body = [[f"**{cells[name]}**" if name == "speed-up" else cells[name] for name in header] for cells in shown]
    notes = _without_fa4(rows) if "speed-up" in header else ""
    notes += "".join(f"\n\nn/a: {note}" for note in problem_notes(rows))
    return f"{markdown(header, body)}\n\nbf16, B 1; {gpu_source(rows)}{notes}"


def _rival_columns() -> list[str]:
    return [f"{rival.column} ms" for rival in RIVALS.values()]


def _by_problem(rows: list[Row]) -> list[Row]:
    """Rows of a problem side by side, from the densest on, wherever they were measured."""
    fields = ("tokens", "heads", "head_dim", "is_causal", "segments", "mask")
    problems = [tuple(row.get(name) for name in fields) for row in rows]
    places = {problem: place for place, problem in reversed(list(enumerate(problems)))}
    order = sorted(range(len(rows)), key=lambda at: (places[problems[at]], -(rows[at].get("topk") or 0)))
    return [rows[at] for at in order]


def best_table() -> str:
    """The README's four rows: attention without and with causality, with means, and a whole model."""
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
    """A note about rows with dense times in whose run FlashAttention-4 was not measured."""
    dense = [row for row in rows if "cudnn_ms" in row or "stock_ms" in row]
    commits = sorted({str(row["commit"]) for row in dense if row.get("fa4_ms") is None})
    return f"\n\nMeasured without FlashAttention-4: commit {', '.join(commits)}." if commits else ""


def _baseline(row: Row) -> tuple[str, float]:
    """Name and milliseconds of the fastest dense kernel of a row; in a model, SDPA is one of them."""
    name = fastest(row)
    rival = (float("inf"), "") if name is None else (row[f"{name}_ms"], RIVALS[name].title)
    milliseconds, title = min(rival, (row.get("stock_ms", float("inf")), "torch's SDPA"))
    return title, milliseconds


def _three_digits(milliseconds: float) -> str:
    """31.0: as fine as times repeat."""
    places = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2
    return f"{milliseconds:.{places}f}"


def gpu_tests_table() -> str | None:
    """The last run of tests/gpu and of every tool in tools/gpu, for each backend; None before the first."""
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
"""How racecheck's hazards are told; rows older than the word metadata say "notes"."""


def _counts(lines: list[Row]) -> str:
    """ "130 passed, 2 skipped"; what is none is not told."""
    sums = {kind: sum(line[kind] for line in lines) for kind in ("passed", "failed", "skipped")}
    return ", ".join(f"{count} {kind}" for kind, count in sums.items() if count)


def _tool_note(tool: str, backend: str, row: Row) -> str:
    if tool == "soak":
        told = f"{row['launches']} launches of {row['problems']} problems in {row['seconds']} s, none hung"
        told += f"; {row['unequal']} problems whose bits changed, {row['inexact']} inexact"
    else:
        told = f"{row['errors']} errors in {row['calls']} calls"
        if row.get("control_errors") is not None:
            told += f" ({row['control_errors']} in a call made to fail)"
        apart = {kind: count for kind, count in row.get("apart", {}).items() if count}
        if apart:
            controls = row["controls"]
            told += "; apart from " + " and ".join(
                f"{count} {HAZARDS[kind]}{_control_note(kind, controls)}" for kind, count in apart.items()
            )
    return f"{tool}, {backend!r}: {told}; {gpu_source([row])}"


def _control_note(kind: str, controls: dict[str, int]) -> str:
    """What racecheck says of the smallest kernels that show why a kind of hazard is counted apart."""
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


def rules_table() -> str:
    """Return how far perplexity rises above the dense one under rules other than the defaults, in 16 bits."""
    rows = {(row["tokens"], row["policy"]): row for row in _rows_of("language") if row.get("rules")}
    names = dict.fromkeys(row["rules"] for row in rows.values())
    lengths = sorted({tokens for tokens, _ in rows})
    found = {(row["rules"], row["tokens"]): row for row in rows.values()}
    body = []
    for name in names:
        cells = [found[name, tokens] for tokens in lengths]
        body.append(
            [name, *(f"{row['density']:.3f}: {row['loss']:+.2%} ± {row['loss_error'] * 100:.2f}" for row in cells)]
        )
    header = ["rules", *(f"{tokens} tokens: density, loss" for tokens in lengths)]
    return f'{markdown(header, body)}\n\n16 bits, score "moment"; {gpu_source(list(rows.values()))}'


def models_table() -> str:
    """Forward passes of whole models: stock, dense in 8 bits, and with shares of the blocks."""
    rows = [row for row in _rows_of("models") if row["case"] == "forward" and "variant" in row]
    groups: dict[tuple[str, bool], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["compiled"]), {})[row["variant"]] = row
    variants = ["8 bits", "0.5", "0.25", "0.15"]
    body = []
    for (model, is_compiled), of in sorted(groups.items()):
        cells = [_model_cell(of.get(variant)) for variant in variants]
        name = f"{model}, compiled" if is_compiled else model
        dense, milliseconds = _baseline(next(iter(of.values())))
        body.append([name, f"{milliseconds:.0f}, {dense}", *cells])
    header = ["model", "dense, 16 bits", "dense, 8 bits", *(f"topk {share}" for share in variants[1:])]
    source = f"{gpu_source(rows)}{_without_fa4(rows)}"
    return f"{markdown(header, body)}\n\nbf16, B 1; ms, times faster, relative L1; {source}"


def _model_cell(row: Row | None) -> str:
    if row is None:
        return ""
    faster = _baseline(row)[1] / row["sparse_ms"]
    return f"{row['sparse_ms']:.0f}, **{faster:.2f}x**, {row['relative_l1']:.4f}"


def schedules_table() -> str:
    """Whole schedules with dense first steps, in 16 bits and in 8."""
    newest_of = {(row["model"], row["variant"]): row for row in _rows_of("models") if row["case"] == "schedule"}
    body = [
        [
            model,
            {"16bit": "16 bits", "8bit": "8 bits"}[variant],
            f"{_baseline(row)[1] / 1e3:.1f}, {_baseline(row)[0]}",
            f"{row['sparse_ms'] / 1e3:.1f}",
            f"**{_baseline(row)[1] / row['sparse_ms']:.2f}x**",
            f"{row['density']:.3f}",
            f"{row['relative_l1']:.4f}",
        ]
        for (model, variant), row in sorted(newest_of.items())
    ]
    header = ["model", "dense steps", "dense s", "sparge s", "speed-up", "density of sparse steps", "rel. L1"]
    note = "20 steps, the first 4 dense, topk 0.25; bf16, B 1"
    rows = list(newest_of.values())
    return f"{markdown(header, body)}\n\n{note}; {gpu_source(rows)}{_without_fa4(rows)}"


def _field_speeds(rule: str = "topk", skipped: str = "mean") -> list[Row]:
    """The newest timed calls of `benchmarks.fields`."""
    found = {
        (row["tokens"], row["density"]): row
        for row in _rows_of("fields")
        if row["suite"] == "speed" and (row["rule"], row["skipped"]) == (rule, skipped)
    }
    return list(found.values())


def fields_table() -> str:
    """Whole calls on a smooth field, skipped blocks dropped and replaced by their means."""
    rows = list(zip(_field_speeds(skipped="drop"), _field_speeds(), strict=True))
    body = [
        [
            str(row["tokens"]),
            str(row["heads"]),
            f"{row['density']:g}",
            f"{_baseline(row)[1]:.1f}, {_baseline(row)[0]}",
            f"{dropped['ms']:.2f}",
            f"{dropped['relative_l1']:.4f}",
            f"{row['ms']:.2f}",
            f"{row['relative_l1']:.4f}",
            f"**{_baseline(row)[1] / row['ms']:.2f}x**",
        ]
        for dropped, row in rows
    ]
    header = ["N", "H", "density", "fastest dense, ms", "dropped ms", "rel. L1", "means ms", "rel. L1", "speed-up"]
    means = [row for _, row in rows]
    return f"{markdown(header, body)}\n\nbf16, B 1, D 128; {gpu_source(means)}{_without_fa4(means)}"


def field_errors_table() -> str:
    """Errors at one tenth of the blocks on smooth fields."""
    rows = [row for row in _rows_of("fields") if row["suite"] == "error" and row["density"] == 0.1]
    found = {(row["amplitude"], row["noise"], row["order"], row["skipped"]): row for row in rows}
    body = [
        [f"{amplitude:g}, {noise:g}"]
        + [
            f"{found[amplitude, noise, order, skipped]['relative_l1']:.4f}"
            for order, skipped in (("row", "drop"), ("row", "mean"), ("hilbert", "mean"))
        ]
        for amplitude, noise in dict.fromkeys((row["amplitude"], row["noise"]) for row in rows)
    ]
    header = ["amplitude, noise", "dropped", "means", "means, along Hilbert's curve"]
    sizes = f"{rows[-1]['tokens']} tokens, {rows[-1]['heads']} heads, D 128, density .1, 8 bits"
    return f"{markdown(header, body)}\n\n{sizes}; {gpu_source(list(found.values()))}"


def host_table() -> str | None:
    """Launch overhead of each kind of call, a table for every machine; None before the first run."""
    view = VIEWS["host"]
    machines: dict[tuple[str, str | None], dict[str, Row]] = {}
    for row in _rows_of("host"):
        if not row["quick"]:
            machines.setdefault((row["processor"], row.get("gpu")), {})[row["call"]] = row
    tables = []
    for (processor, gpu), calls in machines.items():
        rows = list(calls.values())
        shown = [dict(view.page_cells(row)) for row in rows]
        measured = [name for name in shown[0] if any(cells[name] != NOT_MEASURED for cells in shown)]
        body = [["" if cells[name] == NOT_MEASURED else cells[name] for name in measured] for cells in shown]
        size = f"{rows[-1]['tokens']} tokens, {rows[-1]['heads']} head, D {rows[-1]['head_dim']}"
        source = f"{processor}; {gpu_source(rows)}" if gpu else cpu_source(rows)
        tables.append(f"{markdown(measured, body)}\n\n{size}; {source}")
    return "\n\n".join(tables) or None


def cpu_table(name: str) -> str | None:
    return CPU_TABLES[name](RESULTS)


def made_elsewhere(name: str) -> str | None:
    """One of `numeric_tables` or `quality_tables`, or None where nothing of it was measured yet."""
    made = {**NUMERIC_TABLES, **QUALITY_TABLES}[name](RESULTS)
    return None if made is None else f"{markdown(made[0], made[1])}\n\n{gpu_source(made[2])}"


def scale_table(name: str) -> str:
    """A table of docs/scale.md; what was not measured yet says so in its cell."""
    header, body, rows = SCALE_TABLES[name](RESULTS)
    source = f"\n\nbf16, B 1; {gpu_source(rows)}" if rows else ""
    return f"{markdown(header, body)}{source}"


TABLES: dict[str, Callable[[], str | None]] = {
    "best": best_table,
    **{f"gpu_{name}": partial(gpu_table, name) for name in VIEWS if name != "host"},
    "gpu_tests": gpu_tests_table,
    "rules": rules_table,
    "models": models_table,
    "schedules": schedules_table,
    "host": host_table,
    "fields": fields_table,
    "field_errors": field_errors_table,
    **{name: partial(cpu_table, name) for name in CPU_TABLES},
    **{name: partial(made_elsewhere, name) for name in (*NUMERIC_TABLES, *QUALITY_TABLES)},
    **{name: partial(scale_table, name) for name in SCALE_TABLES},
}


def pages() -> list[Path]:
    """Every page that may hold tables."""
    return [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def fill(text: str) -> str:
    """The page with every marked table made anew; one without rows is left alone."""

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
