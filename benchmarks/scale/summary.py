"""The table of docs/scale.md, from `plan` and scale.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import Row, markdown, with_source
from benchmarks.measure import read_rows
from benchmarks.scale import plan
from benchmarks.scale.measure import Part, parts_of
from benchmarks.scale.parts import COPIES
from benchmarks.scale.plan import CLUSTERS, WORKLOADS, Cluster, Split, Workload

Key = tuple[Any, ...]

NOT_MEASURED = "not measured"
ON_PAGE = WORKLOADS[:2]
"""Workloads of the table."""
SHOWN = {"16 bits": "dense, 16 bits", "8 bits": "dense, quantized", "0.5": "topk 0.5", "0.1": "topk 0.1"}
"""Variants of the table of seconds, and their titles."""


def rows_of(results: Path) -> dict[Key, Row]:
    """Return the newest row of each part and variant with a time on a GPU."""
    rows = [row for row in read_rows(results / "scale.jsonl") if "gpu" in row and row["ms"] is not None]
    return {_key(row, row["variant"]): row for row in rows}


def _key(fields: Row, variant: str | None) -> Key:
    names = ("workload", "tokens", "heads", "kv_heads", "head_dim", "ulysses", "shards", "way", "case", "shard")
    return (*(fields[name] for name in names), variant)


def row_of(rows: dict[Key, Row], part: Part, variant: str | None = None) -> Row | None:
    return rows.get(_key(part.fields(), variant))


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer on the slowest measured rank: attention, copies, and the exchange that is not hidden."""

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
    """Return the seconds of a layer, or None if a part was not measured."""
    parts = [part for part in parts_of(workload, (cluster,)) if part.split == split]
    attention = [row_of(rows, part, variant) for part in parts if part.case == "attention"]
    copies = [row_of(rows, part) for part in parts if part.case in COPIES]
    if not attention or any(row is None for row in (*attention, *copies)):
        return None
    seconds = max(row["ms"] for row in attention if row) / 1e3
    exposed = plan.exposed_seconds(workload, split, cluster, seconds)
    return Layer(seconds, sum(row["ms"] for row in copies if row) / 1e3, exposed)


def seconds_table(results: Path) -> str:
    """Return the table of attention and exchange of all layers by variant, in seconds. The fastest split is bold.

    Missing measurements are marked in their cells."""
    rows, body = rows_of(results), []
    for workload in ON_PAGE:
        for cluster in CLUSTERS:
            splits = plan.splits(workload, cluster)
            table = {
                (split, variant): layer_of(rows, workload, split, cluster, variant)
                for split in splits
                for variant in SHOWN
            }
            best = {variant: _fastest([table[split, variant] for split in splits]) for variant in SHOWN}
            for split in splits:
                cells = [_seconds(table[split, name], workload.layers, best[name]) for name in SHOWN]
                body.append([workload.name, cluster.name, split.name, *cells])
    header = ["pass of", "on", "split", *SHOWN.values()]
    return with_source(header, body, list(rows.values()), "bf16, B 1; ") or markdown(header, body)


def _fastest(layers: list[Layer | None]) -> float:
    return min((layer.total for layer in layers if layer is not None), default=0.0)


def _seconds(layer: Layer | None, layers: int, best: float) -> str:
    """Return the seconds of attention and exchange of all layers: "1.23 + 0.04"."""
    if layer is None:
        return NOT_MEASURED
    text = f"{layers * layer.attention:.2f} + {layers * layer.exchange:.2f}"
    return f"**{text}**" if layer.total == best else text


SCALE_TABLES: dict[str, Callable[[Path], str | None]] = {"scale_seconds": seconds_table}
