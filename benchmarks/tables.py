"""Fill the tables of README and docs from benchmarks/results: `python -m benchmarks.tables [--check]`.

A table is between ``<!-- table: name -->`` and ``<!-- /table -->`` and shows the newest row of each case. Tables
``gpu_*`` come from gpu.jsonl (`sparge bench --json`, `benchmarks.gpu_suites`), ``gpu_tests`` from gpu_tests.jsonl
(tests/gpu and tools/gpu). A table without rows is left unchanged.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.accuracy_tables import NUMERIC_TABLES, QUALITY_TABLES
from benchmarks.markdown import Row, markdown, source_of, with_source
from benchmarks.measure import newest, read_rows
from benchmarks.scale.summary import SCALE_TABLES
from sparge.backends.gpu.backend import CROSSOVER
from sparge.bench.rivals import RIVALS, fastest
from sparge.bench.table import COLUMNS, KERNELS, NOT_MEASURED, cell, milliseconds, problem_notes

REPOSITORY = Path(__file__).parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
MARKER = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)

LONGEST, BEST_TOPK, BEST_MODEL = 131072, {False: 0.1, True: 0.5}, ("Wan 2.1 14B", 0.25)
"""Cases in the README's table."""
BELOW_CROSSOVER = "Flux, 1024 x 1024"
"""A model that is omitted, because its calls ran dense."""


def _lengths(row: Row) -> str:
    return f"{row['tokens'] // 2} to {row['tokens']}" if row.get("unequal") else str(row["tokens"])


FORMATS = COLUMNS | {
    "N": _lengths,
    "segments": cell("segments"),
    "mask": cell("mask"),
    "kernel": lambda row: (KERNELS | {"twin int8_fp8": "INT8 + FP8, Triton"})[row["kernel"]],
}
"""Functions that format the columns of `Pivot`."""


class Pivot(NamedTuple):
    """A table of a suite in gpu.jsonl, with one row per problem and one column per variant."""

    problem: tuple[str, ...]
    """The columns that identify a problem."""
    note: str
    variant: str = "topk"
    """The column that names a variant."""
    cells: tuple[str, ...] = ("sparge ms", "speed-up", "rel. L1")
    """The columns that are merged into one cell of the table."""
    is_shown: Callable[[Row], bool] = bool
    """Predicate that selects the rows of the results on the page."""


NEAR_CROSSOVER = range(CROSSOVER.scores, CROSSOVER.scores * 6 // 5)
"""Numbers of scores just above the crossover on a GPU."""
CALL_NOTE = "ms, speed-up over the fastest dense kernel, rel. L1"
PIVOTS = {
    "end_to_end": Pivot(("N", "H", "D", "causal"), CALL_NOTE, is_shown=lambda row: row.get("backend") == "hopper"),
    "dense": Pivot(("N", "H", "D", "causal"), CALL_NOTE),
    "packed": Pivot(("segments", "N", "H", "causal"), CALL_NOTE),
    "masks": Pivot(("mask", "N", "H"), "ms, speed-up over SDPA, rel. L1"),
    "hopper": Pivot(
        ("N", "H", "D", "causal", "density"),
        "ms, executed TOPS, rel. L1",
        "kernel",
        ("ms", "TOPS executed", "rel. L1"),
        lambda row: row["tokens"] == 32768 and row["asked_density"] == 0.5,
    ),
    "crossover": Pivot(
        ("queries", "keys", "H", "D", "causal"),
        "speed-up over the fastest dense kernel: without and with a CUDA graph",
        cells=("speed-up", "by graph"),
        is_shown=lambda row: row["heads"] * row["queries"] * row["tokens"] in NEAR_CROSSOVER,
    ),
}


def gpu_table(name: str, results: Path) -> str | None:
    """Return the table of a suite, with the variants of a problem as columns."""
    pivot = PIVOTS[name]
    rows = [row for row in newest(read_rows(results / "gpu.jsonl"), name) if pivot.is_shown(row)]
    first = {_problem(row): index for index, row in reversed(list(enumerate(rows)))}
    rows.sort(key=lambda row: (first[_problem(row)], -(row.get("topk") or 0)))  # in the order of first measurement
    problems: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        problem = tuple(FORMATS[column](row) for column in pivot.problem)
        problems.setdefault(problem, {})[FORMATS[pivot.variant](row)] = row
    variants = list(dict.fromkeys(variant for by_variant in problems.values() for variant in by_variant))
    has_speedup = "speed-up" in pivot.cells
    dense = [_dense_times(next(iter(rows.values()))) if has_speedup else "" for rows in problems.values()]
    body = []
    for (problem, by_variant), times in zip(problems.items(), dense, strict=True):
        texts = [_variant_cell(by_variant[variant], pivot) if variant in by_variant else "" for variant in variants]
        body.append([*problem, *([times or NOT_MEASURED] if any(dense) else []), *texts])
    titles = [f"topk {name}" if pivot.variant == "topk" and name != "dense" else name for name in variants]
    header = [*pivot.problem, *(["dense kernels, ms"] if any(dense) else []), *titles]
    table = with_source(header, body, rows, f"{pivot.note}; bf16, B 1; ")
    notes = _without_fa4(rows) if has_speedup else ""
    return table and table + notes + "".join(f"\n\nn/a: {note}" for note in problem_notes(rows))


def _problem(row: Row) -> tuple[object, ...]:
    names = ("tokens", "queries", "heads", "head_dim", "is_causal", "segments", "mask")
    return tuple(row.get(name) for name in names)


def _dense_times(row: Row) -> str:
    """Return the times of dense kernels, fastest first: "14.1 cuDNN, 25.0 FA2"."""
    columns = {**{name: rival.column for name, rival in RIVALS.items()}, "sdpa": "SDPA"}
    times = {title: row[f"{name}_ms"] for name, title in columns.items() if row.get(f"{name}_ms") is not None}
    return ", ".join(f"{milliseconds(times[title])} {title}" for title in sorted(times, key=times.__getitem__))


def _variant_cell(row: Row, pivot: Pivot) -> str:
    """Return the text of a cell, "5.99, **2.35x**, 0.0125", with the density if it differs from topk."""
    cells = [FORMATS[column](row) for column in pivot.cells]
    texts = [f"**{text}**" if text.endswith("x") else text for text in cells]
    if pivot.variant == "topk" and abs(row["density"] - row["topk"]) > 5e-4:
        texts.append(f"density {row['density']:.3f}")
    return ", ".join(texts)


def best_table(results: Path) -> str:
    """Return the README's table of four rows: full attention, causal attention, a smooth field, and a whole model."""
    rows = [
        row
        for row in newest(read_rows(results / "gpu.jsonl"), "end_to_end")
        if (row.get("backend"), row["tokens"]) == ("hopper", LONGEST) and row["topk"] == BEST_TOPK[row["is_causal"]]
    ]
    fields = [row for row in read_rows(results / "fields.jsonl") if row["suite"] == "speed"]
    is_best = {"rule": "topk", "skipped": "mean", "tokens": LONGEST, "density": 0.1}
    rows.append([row for row in fields if is_best.items() <= row.items()][-1])
    models = {
        (row["model"], row["topk"]): row for row in read_rows(results / "models.jsonl") if not row.get("compiled")
    }
    rows.append(models[BEST_MODEL])
    body = []
    for row in rows:
        if "skipped" in row:
            name = f"Attention over {row['tokens']} tokens, smooth field, skipped blocks as means"
            command, after = "python -m benchmarks.fields", row["ms"]
        elif "model" in row:
            name, command = f"{row['model']}, forward pass (random weights)", "python -m benchmarks.models"
            after = row["sparse_ms"]
        else:
            kind = "causal, text-like" if row["is_causal"] else "video-like"
            name, command, after = f"Attention over {row['tokens']} tokens, {kind}", "sparge bench", row["sparge_ms"]
        dense, before = _baseline(row)
        times = f"{_three_digits(before)}&nbsp;→&nbsp;{_three_digits(after)}"
        errors = [f"{row['density']:.3f}", f"{row['relative_l1']:.4f}"]
        body.append([name, dense, times, f"**{before / after:.2f}x**", *errors, f"`{command}`"])
    header = ["bf16", "fastest dense kernel", "ms", "speed-up", "density", "rel. L1 error", "command"]
    sizes = "Attention: B 1, H {heads}, D {head_dim}; ".format(**rows[0])
    return f"{markdown(header, body)}\n\n{sizes}{source_of(rows)}{_without_fa4(rows)}"


def _without_fa4(rows: list[Row]) -> str:
    """Return a note that lists the commits measured without FlashAttention-4."""
    dense = [row for row in rows if "cudnn_ms" in row or "stock_ms" in row]
    commits = sorted({str(row["commit"]) for row in dense if row.get("fa4_ms") is None})
    return f"\n\nMeasured without FlashAttention-4: commit {', '.join(commits)}." if commits else ""


def _baseline(row: Row) -> tuple[str, float]:
    """Return name and milliseconds of the fastest dense kernel of a row, including SDPA for models."""
    name = fastest(row)
    rival = (float("inf"), "") if name is None else (row[f"{name}_ms"], RIVALS[name].title)
    time, title = min(rival, (row.get("stock_ms", float("inf")), "torch's SDPA"))
    return title, time


def _three_digits(value: float) -> str:
    """Return a time with three digits, such as "31.0"; further digits are not reproducible."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def models_table(results: Path) -> str | None:
    """Return the table of forward passes of whole models: stock, dense quantized, and sparse."""
    rows = [row for row in read_rows(results / "models.jsonl") if row["case"] == "forward" and "variant" in row]
    groups: dict[tuple[str, bool], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["compiled"]), {})[row["variant"]] = row
    variants = ["8 bits", "0.5", "0.25", "0.15"]  # names in the results
    body = []
    for (model, is_compiled), by_variant in sorted(groups.items()):
        if model == BELOW_CROSSOVER:
            continue
        dense, time = _baseline(next(iter(by_variant.values())))
        cells = [_model_cell(by_variant[variant]) if variant in by_variant else "" for variant in variants]
        body.append([f"{model}, compiled" if is_compiled else model, f"{time:.0f}, {dense}", *cells])
    header = ["model", "dense, ms", "dense, quantized", *(f"topk {share}" for share in variants[1:])]
    table = with_source(header, body, rows, "ms, speed-up, rel. L1; bf16, B 1; ")
    return table and table + _without_fa4(rows)


def _model_cell(row: Row) -> str:
    speedup = _baseline(row)[1] / row["sparse_ms"]
    return f"{row['sparse_ms']:.0f}, **{speedup:.2f}x**, {row['relative_l1']:.4f}"


def gpu_tests_table(results: Path) -> str | None:
    """Return the table of the last run of tests/gpu and of each tool in tools/gpu by backend, or None without runs."""
    rows = read_rows(results / "gpu_tests.jsonl")
    runs = {row["backend"]: row for row in rows if "files" in row}
    if not runs:
        return None
    files = sorted({line["file"] for run in runs.values() for line in run["files"]})
    body = [
        [f"`{name}`", *(_counts([line for line in run["files"] if line["file"] == name]) for run in runs.values())]
        for name in files
    ]
    body.append(["all", *(f"**{_counts(run['files'])}**" for run in runs.values())])
    notes = [f"Backend {backend!r}: {source_of([run])}" for backend, run in runs.items()]
    notes += [
        f"**{run['crashed']} processes crashed with {backend!r}; their tests are not counted.**"
        for backend, run in runs.items()
        if run.get("crashed")
    ]
    tools = {(row["tool"], row.get("backend", "triton")): row for row in rows if "tool" in row}
    notes += [f"{tool}, {backend!r}: {_tool_note(row)}; {source_of([row])}" for (tool, backend), row in tools.items()]
    return markdown(["tests", *map(repr, runs)], body) + "".join(f"\n\n{note}" for note in notes)


def _counts(lines: list[Row]) -> str:
    """Return nonzero counts of outcomes: "130 passed, 2 skipped"."""
    sums = {kind: sum(line[kind] for line in lines) for kind in ("passed", "failed", "skipped")}
    return ", ".join(f"{count} {kind}" for kind, count in sums.items() if count)


def _tool_note(row: Row) -> str:
    if row["tool"] == "soak":
        text = "{launches} launches of {problems} problems in {seconds} s, none hung; {unequal} problems whose bits "
        return (text + "changed, {inexact} inexact").format(**row)
    text = f"{row['errors']} errors in {row['calls']} calls"
    if row.get("control_errors") is not None:
        text += f" ({row['control_errors']} in a call made to fail)"
    names = {"roles": "between roles", "metadata": "of metadata"}
    excused = [f"{count} {names[kind]}" for kind, count in row.get("apart", {}).items() if count]
    return text + (f", and false positives: {' and '.join(excused)}" if excused else "")


def _attention(row: Row) -> str:
    return "causal, text-like" if row["is_causal"] else "full, video-like"


def speed_table(results: Path) -> str | None:
    """Return the table of the newest row of each case of `benchmarks.cpu`."""
    rows = [row for row in read_rows(results / "cpu.jsonl") if row["suite"] == "speed"]
    case = ("tokens", "is_causal", "topk", "heads", "dtype")
    rows = list({tuple(row[name] for name in case): row for row in rows}.values())
    body = [
        [
            _attention(row),
            f"{row['topk']:g}",
            f"{row['dense_s']:.2f} s",
            f"{row['sparse_s']:.2f} s",
            f"**{row['speedup']:.2f}x**",
            f"{row['density']:.3f}",
            f"{row['mass_recall']:.3f}",
            f"{row['relative_l1']:.4f}",
            f"{row['predict_s'] * 1e3:.0f} ms",
        ]
        for row in rows
    ]
    header = ["attention", "topk", "SDPA", "sparge", "speed-up", "density", "mass recall", "rel. L1", "prediction"]
    return with_source(header, body, rows, "fp32, B 1, H {heads}, D {head_dim}, N {tokens}; ".format(**rows[0]))


def processor_table(results: Path) -> str | None:
    """Return the table of speed-ups over SDPA by processor, dtype, head_dim and length (`benchmarks.cpu`)."""
    names = ("processor", "threads", "dtype", "is_causal", "head_dim")
    groups: dict[tuple[object, ...], dict[tuple[int, float], Row]] = {}
    for row in read_rows(results / "processor.jsonl"):
        if row.get("variant", "as it is") == "as it is":  # older rows include experimental variants of the backend
            groups.setdefault(tuple(row[name] for name in names), {})[row["tokens"], row["topk"]] = row
    rows = [row for group in groups.values() for row in group.values()]
    lengths = sorted({row["tokens"] for row in rows})
    topks = sorted({row["topk"] for row in rows}, reverse=True)

    def cell(group: dict[tuple[int, float], Row], tokens: int, form: str) -> str:
        """Return the values of one length, largest topk first, with "-" for missing measurements."""
        rows = [group.get((tokens, topk)) for topk in topks]
        return "/".join("-" if row is None else form.format(**row) for row in rows)

    body = []
    for _, group in sorted(groups.items(), key=lambda entry: entry[0]):
        first = next(iter(group.values()))
        speedups = [cell(group, tokens, "{speedup:.2f}x") for tokens in lengths]
        case = [f"{first['processor']}, {first['threads']}", first["dtype"], _attention(first), str(first["head_dim"])]
        body.append([*case, *speedups, cell(group, lengths[-1], "{relative_l1:.4f}")])
    header = ["processor, threads", "dtype", "attention", "D", *(f"N {tokens}" for tokens in lengths)]
    shares = "/".join(f"{topk:g}" for topk in topks)
    header.append(f"rel. L1, N {lengths[-1]}" if lengths else "")
    return with_source(header, body, rows, f"Speed-up over SDPA at density {shares}; B 1, H 8; ")


def host_table(results: Path) -> str | None:
    """Return the table of launch overhead by kind of call, on the host of a GPU (`sparge bench --suite host`)."""
    rows = [row for row in read_rows(results / "host.jsonl") if row["device"] == "cuda"]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    columns = ("call", "us", "over SDPA", "launches")
    return with_source(list(columns), [[FORMATS[column](row) for column in columns] for row in rows], rows)


TABLES: dict[str, Callable[[Path], str | None]] = {
    "best": best_table,
    **{f"gpu_{name}": partial(gpu_table, name) for name in PIVOTS},
    "gpu_tests": gpu_tests_table,
    "host": host_table,
    "models": models_table,
    "speed": speed_table,
    "processor": processor_table,
    **NUMERIC_TABLES,
    **QUALITY_TABLES,
    **SCALE_TABLES,
}


def pages() -> list[Path]:
    """Return all pages that may contain tables."""
    return [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def fill(text: str) -> str:
    """Return a page with its tables filled from the results."""

    def replaced(marker: re.Match[str]) -> str:
        table = TABLES[marker[2]](RESULTS)
        return marker[0] if table is None else f"{marker[1]}{table}\n{marker[3]}"

    return MARKER.sub(replaced, text)


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
