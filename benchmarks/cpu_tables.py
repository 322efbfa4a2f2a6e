"""Tables of what was measured on CPUs: cpu.jsonl, processor.jsonl and demo.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.markdown import Row, cpu_source, markdown
from benchmarks.measure import read_rows


def newest_rows(results: Path, suite: str) -> list[Row]:
    """The last row of every case of a suite, in the order the cases were first measured."""
    rows: dict[tuple[Any, ...], Row] = {}
    for row in read_rows(results / "cpu.jsonl"):
        if row["suite"] == suite:
            case = (
                row["tokens"],
                row["is_causal"],
                row["topk"],
                row["heads"],
                row["queries"],
                row["dtype"],
            )
            rows[case] = row
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
    header = [
        "attention",
        "topk",
        "SDPA",
        "sparge",
        "speed-up",
        "density",
        "mass recall",
        "rel. L1",
        "of it prediction",
    ]
    shape = f"fp32, B 1, H {rows[0]['heads']}, D {rows[0]['head_dim']}, N {rows[0]['tokens']}"
    return f"{markdown(header, body)}\n\n{shape}; {cpu_source(rows)}"


def memory_table(results: Path) -> str:
    rows = newest_rows(results, "memory")
    body = [
        [
            f"{row['tokens']}",
            _attention(row),
            f"{row['input_bytes'] / 2**20:.0f} MiB",
            f"{row['extra_bytes'] / 2**20:.0f} MiB",
            f"{row['extra_ratio']:.2f}x",
        ]
        for row in rows
    ]
    header = ["N", "attention", "q + k + v", "peak extra (output included)", "ratio"]
    return f"{markdown(header, body)}\n\nfp32, topk {rows[0]['topk']:g}; {cpu_source(rows)}"


def crossover_table(results: Path) -> str:
    rows = newest_rows(results, "crossover") + newest_rows(results, "few queries") + newest_rows(results, "few heads")
    body = [
        [
            f"{row['heads']}",
            f"{row['queries'] or row['tokens']}",
            f"{row['tokens']}",
            _attention(row),
            f"{row['topk']:g}",
            f"{row['density']:.3f}",
            f"{row['speedup']:.2f}x",
            f"{row['relative_l1']:.4f}",
        ]
        for row in sorted(rows, key=lambda row: (row["suite"], row["is_causal"], row["topk"]))
    ]
    header = ["heads", "queries", "keys", "attention", "topk", "density", "speed-up", "rel. L1"]
    return f"{markdown(header, body)}\n\n{cpu_source(rows)}"


def processor_table(results: Path, *, variants: bool) -> str | None:
    """Speed by processor, dtype, head_dim and length (`benchmarks.processor`); or the variants of one length."""
    rows: dict[tuple[Any, ...], Row] = {}
    for row in read_rows(results / "processor.jsonl"):
        if not variants and row["variant"] != "as it is":
            continue
        fields = ("processor", "threads", "dtype", "is_causal", "head_dim", "tokens", "topk", "variant")
        rows[tuple(row[name] for name in fields)] = row
    if variants:  # beside each other, and beside what they vary
        varied = {case[:-1] for case in rows if case[-1] != "as it is"}
        rows = {case: row for case, row in rows.items() if case[:-1] in varied}
    if not rows:
        return None
    body = [
        [
            f"{row['processor']}, {row['threads']}",
            row["dtype"],
            _attention(row),
            f"{row['head_dim']}",
            f"{row['tokens']}",
            f"{row['topk']:g}",
            *([row["variant"]] if variants else []),
            f"{row['dense_s'] * 1e3:.0f} ms",
            f"{row['sparse_s'] * 1e3:.0f} ms",
            f"{row['speedup']:.2f}x",
            f"{row['density']:.3f}",
            f"{row['relative_l1']:.4f} ({row['dense_relative_l1']:.4f})",
        ]
        for _, row in sorted(rows.items(), key=lambda entry: (*entry[0][:6], -entry[0][6]))
    ]
    header = ["processor, threads", "dtype", "attention", "D", "N", "topk", *(["variant"] if variants else [])]
    header += ["SDPA", "sparge", "speed-up", "density", "rel. L1 (SDPA's)"]
    return f"{markdown(header, body)}\n\nB 1, H 8; {cpu_source(list(rows.values()))}"


def demo_table(results: Path) -> str:
    demo = json.loads((results / "demo.json").read_text())
    body = [
        [
            row["input"],
            row["score"],
            f"{row['speedup']:.2f}x",
            f"{row['density']:.3f}",
            f"{row['recall']:.3f}",
            f"{row['error']:.4f}",
            "" if row["needle_mean"] is None else f"{row['needle_mean']:.0%} / {row['needle_min']:.0%}",
        ]
        for row in demo["rows"]
    ]
    header = ["input", "score", "speed-up", "density", "mass recall", "rel. L1", "needles kept: mean / worst"]
    return f"{markdown(header, body)}\n\ntopk {demo['settings']['topk']:g}; {cpu_source([demo['machine']])}"


CPU_TABLES: dict[str, Callable[[Path], str | None]] = {
    "speed": speed_table,
    "demo": demo_table,
    "memory": memory_table,
    "crossover": crossover_table,
    "processor": partial(processor_table, variants=False),
    "processor_variants": partial(processor_table, variants=True),
}
