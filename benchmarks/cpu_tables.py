"""Tables of CPU measurements: cpu.jsonl and processor.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.markdown import Row, cpu_source, markdown
from benchmarks.measure import read_rows


def newest_rows(results: Path, suite: str) -> list[Row]:
    """Return the last row of each case of a suite, in the order in which cases were first measured."""
    rows: dict[tuple[Any, ...], Row] = {}
    for row in read_rows(results / "cpu.jsonl"):
        if row["suite"] == suite:
            rows[tuple(row[name] for name in ("tokens", "is_causal", "topk", "heads", "queries", "dtype"))] = row
    return list(rows.values())


def _attention(row: Row) -> str:
    return "causal, text-like" if row["is_causal"] else "full, video-like"


def speed_table(results: Path) -> str:
    rows = newest_rows(results, "speed")
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
    shape = f"fp32, B 1, H {rows[0]['heads']}, D {rows[0]['head_dim']}, N {rows[0]['tokens']}"
    return f"{markdown(header, body)}\n\n{shape}; {cpu_source(rows)}"


def processor_table(results: Path) -> str | None:
    """Return the speed-up over SDPA by processor, dtype, head_dim and length (`benchmarks.processor`)."""
    names = ("processor", "threads", "dtype", "is_causal", "head_dim")
    groups: dict[tuple[Any, ...], dict[tuple[int, float], Row]] = {}
    for row in read_rows(results / "processor.jsonl"):
        if row["variant"] == "as it is":
            groups.setdefault(tuple(row[name] for name in names), {})[row["tokens"], row["topk"]] = row
    if not groups:
        return None
    newest = [row for group in groups.values() for row in group.values()]
    lengths = sorted({row["tokens"] for row in newest})
    topks = sorted({row["topk"] for row in newest}, reverse=True)
    body = []
    for _, group in sorted(groups.items(), key=lambda entry: entry[0]):
        first = next(iter(group.values()))
        speedups = [_cell(group, tokens, topks, lambda row: f"{row['speedup']:.2f}x") for tokens in lengths]
        errors = _cell(group, lengths[-1], topks, lambda row: f"{row['relative_l1']:.4f}")
        name = f"{first['processor']}, {first['threads']}"
        body.append([name, first["dtype"], _attention(first), f"{first['head_dim']}", *speedups, errors])
    header = ["processor, threads", "dtype", "attention", "D", *(f"N {tokens}" for tokens in lengths)]
    shares = "/".join(f"{topk:g}" for topk in topks)
    note = f"Speed-up over SDPA at density {shares}; B 1, H 8; {cpu_source(newest)}"
    return f"{markdown([*header, f'rel. L1, N {lengths[-1]}'], body)}\n\n{note}"


def _cell(group: dict[tuple[int, float], Row], tokens: int, topks: list[float], text: Callable[[Row], str]) -> str:
    """Return the texts of one length, the largest topk first, with "-" for missing measurements."""
    return "/".join(text(group[tokens, topk]) if (tokens, topk) in group else "-" for topk in topks)


CPU_TABLES: dict[str, Callable[[Path], str | None]] = {
    "speed": speed_table,
    "processor": processor_table,
}
