"""Tables of docs/scale.md: what is sent, from `plan`; seconds, from it and the rows of scale.jsonl.

What was not measured yet says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import read_rows
from benchmarks.scale import plan
from benchmarks.scale.calls import MODES
from benchmarks.scale.measure import Part, parts_of
from benchmarks.scale.parts import BESIDES, COPIES, VARIANTS, besides
from benchmarks.scale.plan import CLUSTERS, WORKLOADS, Cluster, Split, Workload

Row = dict[str, Any]
Made = tuple[list[str], list[list[str]], list[Row]]
Key = tuple[Any, ...]

NOT_MEASURED = "not measured"
MEGA = 1e6


def rows_of(results: Path) -> dict[Key, Row]:
    """The newest row of every part and variant that was measured on a GPU and gave a time."""
    rows = [row for row in read_rows(results / "scale.jsonl") if "gpu" in row and row["ms"] is not None]
    return {_key(row, row["variant"]): row for row in rows}


def _key(fields: Row, variant: str | None) -> Key:
    names = ("workload", "tokens", "heads", "kv_heads", "head_dim", "ulysses", "shards", "way", "case", "shard")
    return (*(fields[name] for name in names), variant)


def row_of(rows: dict[Key, Row], part: Part, variant: str | None = None) -> Row | None:
    return rows.get(_key(part.fields(), variant))


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer on the slowest rank that was measured: attention, and what its exchange adds."""

    attention: float
    copies: float
    exposed: float

    @property
    def exchange(self) -> float:
        return self.copies + self.exposed

    @property
    def total(self) -> float:
        return self.attention + self.exchange


def layer_of(rows: dict[Key, Row], workload: Workload, split: Split, cluster: Cluster, variant: str) -> Layer | None:
    """None where a part of it was not measured."""
    parts = [part for part in parts_of(workload, (cluster,)) if part.split == split]
    attention = [row_of(rows, part, variant) for part in parts if part.case == "attention"]
    copies = [row_of(rows, part) for part in parts if part.case in COPIES]
    if not attention or any(row is None for row in (*attention, *copies)):
        return None
    seconds = max(row["ms"] for row in attention if row) / 1e3
    exposed = plan.exposed_seconds(workload, split, cluster, seconds)
    return Layer(seconds, sum(row["ms"] for row in copies if row) / 1e3, exposed)


def sent_table(results: Path) -> Made:  # noqa: ARG001
    """Bytes, time and memory of one layer, by what is assumed of the links alone."""
    body = []
    for workload in WORKLOADS:
        for cluster in CLUSTERS:
            for split in (*plan.splits(workload, cluster), *plan.reversed_splits(workload, cluster)):
                moved = plan.sent(workload, split, cluster)
                is_ring = split.shards > 1 and split.way == "ring"
                # With no attention to hide behind, all of it is exposed.
                exchange = 1e3 * plan.exposed_seconds(workload, split, cluster, 0.0)
                body.append(
                    [
                        workload.name,
                        cluster.name,
                        split.name,
                        f"{moved.inside / MEGA:.0f}",
                        f"{moved.across / MEGA:.0f}" if cluster.nodes > 1 else "",
                        f"{exchange:.2f}",
                        f"{1e3 * plan.ring_step_seconds(workload, split, cluster):.2f}" if is_ring else "",
                        f"{plan.kv_memory(workload, split) / MEGA:.0f}",
                    ]
                )
    header = ["layer of", "on", "split, inside a node first", "sent inside, MB", "sent across, MB", "exchange, ms"]
    return [*header, "of it a step of the ring, ms", "K and V held, MB"], body, []


def seconds_table(results: Path) -> Made:
    """Attention and exchange of all layers, by variant; the fastest split of a column is bold."""
    rows, body = rows_of(results), []
    for workload in WORKLOADS:
        for cluster in CLUSTERS:
            splits = plan.splits(workload, cluster)
            table = {
                (split, variant): layer_of(rows, workload, split, cluster, variant)
                for split in splits
                for variant in VARIANTS
            }
            best = {variant: _fastest([table[split, variant] for split in splits]) for variant in VARIANTS}
            for split in splits:
                cells = [_seconds(table[split, name], workload.layers, best[name]) for name in VARIANTS]
                body.append([workload.name, cluster.name, split.name, *cells])
    header = ["pass of", "on", "split, inside a node first", "16 bits", "8 bits"]
    return [*header, *(f"topk {share}" for share in VARIANTS[2:])], body, list(rows.values())


def _fastest(layers: list[Layer | None]) -> float:
    return min((layer.total for layer in layers if layer is not None), default=0.0)


def _seconds(layer: Layer | None, layers: int, best: float) -> str:
    """ "1.23 + 0.04", attention and exchange of all layers."""
    if layer is None:
        return NOT_MEASURED
    text = f"{layers * layer.attention:.2f} + {layers * layer.exchange:.2f}"
    return f"**{text}**" if layer.total == best else text


def parts_table(results: Path) -> Made:
    """What was timed: milliseconds of one layer's part, with its error beside dense attention in 16 bits."""
    rows, body = rows_of(results), []
    for workload in WORKLOADS:
        for part in (part for part in parts_of(workload) if part.case == "attention"):
            cells = [_part(row_of(rows, part, variant)) for variant in VARIANTS]
            others = []
            for case in BESIDES:
                row = row_of(rows, Part(workload, part.split, case))
                others.append(_milliseconds(row) if case in besides(workload, part.split) else "")
            shard = str(part.shard) if part.split.shards > 1 else ""
            body.append([workload.name, part.split.name, shard, *cells, *others])
    header = ["layer of", "split", "shard", "16 bits", "8 bits", *(f"topk {share}" for share in VARIANTS[2:])]
    return [*header, *BESIDES], body, list(rows.values())


def _part(row: Row | None) -> str:
    if row is None or row["relative_l1"] is None:
        return _milliseconds(row)
    return f"{_milliseconds(row)} ({row['relative_l1']:.3f})"


def _milliseconds(row: Row | None) -> str:
    return NOT_MEASURED if row is None else f"{row['ms']:.0f}" if row["ms"] >= 100 else f"{row['ms']:.3g}"


def calls_table(results: Path) -> Made:
    """What the functions take on one rank: all in all, and on the host alone."""
    rows = read_rows(results / "scale_calls.jsonl")
    newest = {(row["workload"], row["topk"], row["mode"]): row for row in rows}
    body = []
    for workload, topk in dict.fromkeys(key[:2] for key in newest):
        found = [newest[workload, topk, mode] for mode in MODES if (workload, topk, mode) in newest]
        cells = [f"{row['ms']:.2f} ({row['host_ms']:.1f})" for row in found]
        eighths = {row["whole_ms"] / row["ranks"] for row in found}
        body.append([workload, str(topk), f"{max(eighths):.2f}", *cells])
    return ["layer of", "topk", "an eighth of one GPU's call", *MODES], body, list(newest.values())


SCALE_TABLES: dict[str, Callable[[Path], Made]] = {
    "scale_sent": sent_table,
    "scale_seconds": seconds_table,
    "scale_parts": parts_table,
    "scale_calls": calls_table,
}
