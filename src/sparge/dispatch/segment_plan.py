"""Which calls the segments of a pack become: batches of equal neighbours, and packed calls of similar lengths.

A plan depends on lengths and options alone, and all layers of a model ask for the same one: it is remembered.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from sparge.backends import base
from sparge.backends.base import Crossover
from sparge.call import Call
from sparge.dispatch import dense_rules
from sparge.dispatch.reasons import Reason
from sparge.masks.segments import Run, Segment, group_segments, in_runs, runs_of
from sparge.masks.window import Window, without_idle_bounds
from sparge.options.rules import Budget, Dense

SMALL_SCORES = 2**26
"""Of a dense segment in 16 bits that is packed with others: torch's kernels take an H200 60 us for so many, not more
than a call takes the host (64 segments of 2048 tokens and 16 heads in a loop: 4.0 ms, docs/benchmarks.md)."""
MAX_PLANS = 64
"""So many are remembered."""


class Way(NamedTuple):
    """How segments are computed together.

    Attributes:
        reason: why they are dense; None: they are not.
        backend: by which backend.
        quantization: in which numbers.
        window: what the call's window is for each of them (`window.within`): stages go by which bounds there are.
    """

    reason: Reason | None
    backend: str
    quantization: str
    window: Window


class Group(NamedTuple):
    """Segments that are one packed call, and what they are where that cannot be made."""

    way: Way
    segments: tuple[Segment, ...]
    parts: tuple[Run, ...]


class Plan(NamedTuple):
    """The calls of a pack: batches of equal neighbours, in their order, and groups."""

    parts: tuple[Run, ...]
    groups: tuple[Group, ...]


def plan_of(
    bounds_q: Sequence[int],
    bounds_k: Sequence[int],
    call: Call,
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    may_pack: bool,
) -> Plan:
    """The calls that a pack becomes.

    Args:
        call: what is asked of every segment, with the sizes of the pack.
        backend: as the caller named it.
        device, dtype: those of the query.
        may_pack: nothing keeps the call from a backend's kernels.
    """
    chosen = base.resolve(backend, device)
    kind = Dense() if isinstance(call.sparsity, Dense) else Budget(0.5)  # whose numbers change nothing here
    asked = Call(call.shape, call.is_causal, call.scale, kind, quantization=call.quantization, window=call.window)
    crossover = base.crossover_of(chosen, device.type, dtype)
    return _plan(tuple(bounds_q), tuple(bounds_k), asked, backend, chosen, crossover, device, dtype, may_pack)


@functools.lru_cache(MAX_PLANS)
def _plan(
    bounds_q: tuple[int, ...],
    bounds_k: tuple[int, ...],
    call: Call,
    backend: str,
    chosen: str,
    crossover: Crossover,
    device: torch.device,
    dtype: torch.dtype,
    may_pack: bool,
) -> Plan:
    runs = runs_of(bounds_q, bounds_k)

    def reason_of(run: Run, batch: int = 1) -> Reason | None:
        """Why so many segments of a run are dense as one call; None: they are not."""
        shape = replace(call.shape, batch=batch, q_len=run.q_len, kv_len=run.kv_len)
        window = without_idle_bounds(call.window, run.q_len, run.kv_len)
        return dense_rules.by_arguments(shape, window, call.sparsity, call.quantization, backend, chosen, device, dtype)

    def decided_as_one(run: Run) -> Iterator[Run]:
        """The run in batches that are dense or sparse as each of their segments would be by itself.

        A batch has more scores than a segment, and may be above the crossover where that is below it.
        """
        at_once = run.count
        if reason_of(run) is not reason_of(run, batch=run.count):
            at_once = max(1, (crossover.scores - 1) // (call.shape.heads * run.q_len * run.kv_len))
        return run.batches(at_once)

    alone: list[Run] = []
    packable: dict[Way, list[Segment]] = {}
    for run in runs:
        way = None
        if may_pack and len(runs) > 1 and run.kv_len > 0:
            way = _way(run, reason_of(run), call, backend, chosen, device, dtype)
        if way is None:
            alone.append(run)
        else:
            packable.setdefault(way, []).extend(run.segments())
    groups = []
    for way, segments in packable.items():
        for group in group_segments(segments, call.shape.heads):
            of_group = in_runs(group)
            if len(of_group) == 1:  # as a batch it need not look anything up
                alone += of_group
            else:
                parts = tuple(part for run in of_group for part in decided_as_one(run))
                groups.append(Group(way, group, parts))
    alone.sort(key=lambda run: run.q_start)
    return Plan(tuple(part for run in alone for part in decided_as_one(run)), tuple(groups))


def _way(
    run: Run,
    reason: Reason | None,
    call: Call,
    backend: str,
    chosen: str,
    device: torch.device,
    dtype: torch.dtype,
) -> Way | None:
    """How the segments of a run are computed if they are packed with others; None: they cannot or need not be.

    Where torch would compute a dense segment, the portable kernel computes small ones: a call for each would take the
    host longer than the device.
    """
    quantization = dense_rules.resolve_quantization(call.quantization, chosen, device, reason, has_mask=False)
    asked = replace(call, quantization=quantization)
    serving = base.get(chosen).serving(asked, dtype)
    window = without_idle_bounds(call.window, run.q_len, run.kv_len)
    if not serving.packs:
        return None
    if reason is not None and not asked.is_quantized and backend == "auto":
        is_small = call.shape.heads * run.q_len * run.kv_len < SMALL_SCORES
        return Way(reason, serving.portable().name, quantization, window) if is_small else None
    if reason is not None and window.left is not None:
        return None  # a call by itself leaves out what lies before all windows, and its blocks begin there
    return Way(reason, serving.name, quantization, window)
