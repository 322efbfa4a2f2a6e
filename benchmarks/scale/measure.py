"""Measure the parts of all ranks one after another on one device. Each row has time, density and error."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sparge
from benchmarks.scale.parts import COPIES, VARIANTS, Attend, Inputs, copies_of, make_inputs, part_of
from benchmarks.scale.plan import CLUSTERS, WORKLOADS, Cluster, Split, Workload, splits
from sparge.bench.timing import UNTIMED_MS, reason, repeats_for
from sparge.evaluate.metrics import relative_l1
from sparge.evaluate.timing import device_seconds, host_seconds, take_turns

SAMPLED = 16
"""Every 16th query is compared with dense attention."""
LONG_FLOP = 1e14
"""Parts with more operations take at least 0.1 s and need no warm-up."""
BUDGET_S = 2.0
"""Seconds after which no further turn of a part's variants starts."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """The part of a layer that one rank computes; ``case`` is "attention" or an entry of `parts.COPIES`."""

    workload: Workload
    split: Split
    case: str = "attention"
    shard: int = 0

    @property
    def name(self) -> str:
        return f"{self.workload.name}: {self.split.name}, {self.case}, shard {self.shard}"

    @property
    def flop(self) -> float:
        """Number of operations of dense attention."""
        workload, pairs = self.workload, self.workload.tokens**2 / (2 if self.workload.is_causal else 1)
        return 4 * workload.heads * workload.head_dim * pairs / self.split.ranks

    def fields(self) -> Row:
        """Return the fields that identify a row."""
        row = {"suite": "scale", "case": self.case, "workload": self.workload.name, **asdict(self.workload)}
        row |= asdict(self.split) | {"shard": self.shard}
        if self.split.shards == 1:
            row["way"] = None
        del row["name"]
        return row


def parts_of(workload: Workload, clusters: Sequence[Cluster] = CLUSTERS) -> list[Part]:
    """Return all parts to time; for causal splits the first and the last shard, whose keys have different shapes."""
    parts = []
    for split in dict.fromkeys(split for cluster in clusters for split in splits(workload, cluster)):
        shards = (0, split.shards - 1) if workload.is_causal and split.shards > 1 else (0,)
        parts += [Part(workload, split, shard=shard) for shard in shards]
        parts += [Part(workload, split, case) for case in copies_of(workload, split)]
    return parts


def measure(part: Part, inputs: Inputs, repeats: int) -> Iterator[Row]:
    """Yield the rows of a part: one for each variant of attention, or one for copies."""
    if part.case == "attention":
        yield from _attention_rows(part, inputs, repeats)
        return
    row = {**part.fields(), "variant": None, "ms": None, "repeats": 0, "problem": None}
    try:
        run = COPIES[part.case](inputs, part.workload, part.split)
        run()
        row |= _median(times_of({"": run}, repeats, is_long=False)[""])
    except Exception as error:  # any error of a kernel becomes a row
        row["problem"] = reason(error)
    yield row


def _attention_rows(part: Part, inputs: Inputs, repeats: int) -> Iterator[Row]:
    run = part_of(inputs, part.workload, part.split, part.shard)
    runs = {variant: partial(run, Attend(variant, drops=part.workload.is_causal)) for variant in VARIANTS}
    rows: dict[str, Row] = {}
    exact: Tensor | None = None
    for variant in VARIANTS:
        row = rows[variant] = {**part.fields(), "variant": variant, "ms": None, "density": None, "relative_l1": None}
        row |= {"repeats": 0, "problem": None}
        sparge.reset_stats()
        try:
            output = runs[variant]()[:, :, ::SAMPLED].clone()
        except Exception as error:
            row["problem"] = reason(error)
            del runs[variant]
            continue
        stats = sparge.stats()
        row["density"] = stats.density if stats.sparse else 1.0
        if variant == VARIANTS[0]:
            exact = output
        elif exact is not None:
            row["relative_l1"] = relative_l1(output, exact)
    for variant, seconds in times_of(runs, repeats, is_long=part.flop > LONG_FLOP).items():
        rows[variant] |= _median(seconds)
    yield from rows.values()


def times_of(runs: Mapping[str, Callable[[], Any]], repeats: int, *, is_long: bool) -> dict[str, list[float]]:
    """Return the times of each call in seconds, by name. The calls take turns, so that drift affects all of them.

    On a GPU, a turn averages several runs of a short call, after untimed runs of the same call for about 60 ms. A call
    longer than 60 ms has no untimed runs.

    Args:
        is_long: whether each turn is a single run, without untimed runs.
    """
    seconds = device_seconds if torch.cuda.is_available() else host_seconds

    def clock(run: Callable[[], Any]) -> Callable[[], float]:
        if is_long or not torch.cuda.is_available():
            return partial(seconds, run)
        milliseconds = 1e3 * seconds(run)
        untimed, timed = repeats_for(milliseconds)
        return partial(seconds, run, untimed=0 if milliseconds > UNTIMED_MS else untimed, timed=timed)

    clocks = {name: clock(run) for name, run in runs.items()}
    return take_turns(clocks, repeats, discarded=0, budget_s=BUDGET_S)


def _median(seconds: list[float]) -> Row:
    return {"ms": 1e3 * statistics.median(seconds), "repeats": len(seconds)}


@torch.no_grad()
def all_rows(
    device: str,
    *,
    repeats: int,
    only: list[str],
    budget_s: float = math.inf,
    workloads: Sequence[Workload] = WORKLOADS,
    clusters: Sequence[Cluster] = CLUSTERS,
) -> Iterator[Row]:
    """Yield the rows of all parts whose name contains an entry of `only`, and print progress.

    No part starts after ``budget_s``; the remaining parts are listed.
    """
    begin = time.perf_counter()
    for workload in workloads:
        parts = [part for part in parts_of(workload, clusters) if not only or any(word in part.name for word in only)]
        if not parts:
            continue
        inputs = make_inputs(workload, device)
        for place, part in enumerate(parts):
            if time.perf_counter() - begin > budget_s:
                print(f"out of time: {part.name}", flush=True)
                continue
            print(f"{time.perf_counter() - begin:6.1f} s  {place + 1}/{len(parts)}  {part.name}", flush=True)
            yield from measure(part, inputs, repeats)
        del inputs
        if device == "cuda":
            torch.cuda.empty_cache()
