"""Times the parts of ranks one after another on one device; a row each, with density and error beside the time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sparge
from benchmarks.scale.parts import BESIDES, VARIANTS, Attend, Inputs, besides, make_inputs, part_of
from benchmarks.scale.plan import CLUSTERS, NETWORK, NVLINK, WORKLOADS, Cluster, Split, Workload, splits
from sparge.bench.timing import UNTIMED_MS, device_seconds, host_seconds, reason, repeats_for, take_turns
from sparge.evaluate.metrics import relative_l1

SAMPLED = 16
"""Of so many queries one is compared with dense attention."""
LONG_FLOP = 1e14
"""Of a part that needs no others of its kind before it to find the device at work: a tenth of a second."""
BUDGET_S = 2.0
"""No further turn of a part's variants starts after so many seconds."""

TINY_CLUSTERS = (Cluster("2 GPUs", 1, 2, NVLINK, NETWORK), Cluster("2 x 2 GPUs", 2, 2, NVLINK, NETWORK))
TINY_WORKLOADS = (
    Workload("tiny video", 1, 1000, 6, 6, 16, is_causal=False),
    Workload("tiny text", 1, 1024, 4, 2, 16, is_causal=True),
)
"""Six heads do not divide by four, four ranks are more than two key heads: as with the real ones."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One rank's share of a layer; ``case`` is "attention", or one of `parts.BESIDES`."""

    workload: Workload
    split: Split
    case: str = "attention"
    shard: int = 0

    @property
    def name(self) -> str:
        return f"{self.workload.name}: {self.split.name}, {self.case}, shard {self.shard}"

    @property
    def flop(self) -> float:
        """Of dense attention."""
        workload, pairs = self.workload, self.workload.tokens**2 / (2 if self.workload.is_causal else 1)
        return 4 * workload.heads * workload.head_dim * pairs / self.split.ranks

    def fields(self) -> Row:
        """What names a row."""
        workload, split = asdict(self.workload), self.split
        ways = {"ulysses": split.ulysses, "shards": split.shards, "way": split.way if split.shards > 1 else None}
        return {"suite": "scale", "case": self.case, "workload": workload.pop("name"), **workload, **ways} | {
            "shard": self.shard
        }


def parts_of(workload: Workload, clusters: tuple[Cluster, ...] = CLUSTERS) -> list[Part]:
    """All that is timed: of a causal split the first shard and the last, which see keys in other shapes."""
    found = []
    for split in dict.fromkeys(split for cluster in clusters for split in splits(workload, cluster)):
        shards = (0, split.shards - 1) if workload.is_causal and split.shards > 1 else (0,)
        found += [Part(workload, split, shard=shard) for shard in shards]
        found += [Part(workload, split, case) for case in besides(workload, split)]
    return found


def measure(part: Part, inputs: Inputs, repeats: int) -> Iterator[Row]:
    """The rows of one part: one for each variant of attention, or one."""
    if part.case == "attention":
        yield from _attention_rows(part, inputs, repeats)
        return
    row = {**part.fields(), "variant": None, "ms": None, "repeats": 0, "problem": None}
    try:
        run = BESIDES[part.case](inputs, part.workload, part.split)
        run()
        row |= _median(times_of({"": run}, repeats, is_long=False)[""])
    except Exception as error:  # whatever a kernel throws becomes a cell of a table
        row["problem"] = reason(error)
    yield row


def _attention_rows(part: Part, inputs: Inputs, repeats: int) -> Iterator[Row]:
    run = part_of(inputs, part.workload, part.split, part.shard)
    runs = {variant: partial(run, Attend(variant, drops=part.workload.is_causal)) for variant in VARIANTS}
    found: dict[str, Row] = {}
    exact: Tensor | None = None
    for variant in VARIANTS:
        row = found[variant] = {**part.fields(), "variant": variant, "ms": None, "density": None, "relative_l1": None}
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
        found[variant] |= _median(seconds)
    yield from found.values()


def times_of(runs: Mapping[str, Callable[[], Any]], repeats: int, *, is_long: bool) -> dict[str, list[float]]:
    """Seconds of calls that ran before, in turns: short ones behind 60 ms of their own kind."""
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
def all_rows(device: str, *, repeats: int, only: list[str], tiny: bool, budget_s: float = math.inf) -> Iterator[Row]:
    """Every row of every part whose name has one of these words in it, with a line of progress.

    After ``budget_s`` no further part begins; those that are left are named.
    """
    workloads, clusters = (TINY_WORKLOADS, TINY_CLUSTERS) if tiny else (WORKLOADS, CLUSTERS)
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
            for row in measure(part, inputs, repeats):
                seconds = f"{time.perf_counter() - begin:6.1f} s"
                print(f"{seconds}  {place + 1}/{len(parts)}  {part.name}{_told(row)}", flush=True)
                yield row
        del inputs
        if device == "cuda":
            torch.cuda.empty_cache()


def _told(row: Row) -> str:
    """ ", topk 0.5: 4.321 ms, density 0.500, relative L1 0.0123"."""
    told = f", {row['variant']}: " if row["variant"] else ": "
    told += row["problem"] or f"{row['ms']:.3f} ms"
    if row.get("relative_l1") is not None:
        told += f", density {row['density']:.3f}, relative L1 {row['relative_l1']:.4f}"
    return told
