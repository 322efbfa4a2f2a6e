"""Plan the calls for the segments of a pack: batches of neighbors with equal lengths, and packed calls of segments with
similar lengths.

A plan depends only on lengths and options. Plans are cached, because all layers of a model use the same plan.
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
from sparge.dispatch.dense_rules import Target
from sparge.dispatch.reasons import Reason
from sparge.masks.segments import Run, Segment, group_segments, in_runs, runs_of
from sparge.masks.window import Window, without_redundant_bounds
from sparge.options.rules import Budget, Dense

SMALL_SCORES = 2**26
"""Dense 16-bit segments with fewer scores are packed with others. At this size torch's kernels take 60 us on an H200,
no more than the launch overhead (64 segments of 2048 tokens and 16 heads in a loop: 4.0 ms, docs/benchmarks.md)."""
MAX_PLANS = 64
"""Number of cached plans."""


class PackedMode(NamedTuple):
    """How the segments of a packed call are computed. Only segments with equal modes can share a call.

    Attributes:
        reason: why the segments are dense; None if they are sparse.
        window: the window within each segment, without redundant bounds.
    """

    reason: Reason | None
    backend: str
    quantization: str
    window: Window


class Group(NamedTuple):
    """The segments of one packed call, and the separate calls to use if the packed call cannot run."""

    mode: PackedMode
    segments: tuple[Segment, ...]
    parts: tuple[Run, ...]


class Plan(NamedTuple):
    """The calls of a pack: batches of neighbors with equal lengths, in order, and groups for packed calls."""

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
    """Return the plan of a pack.

    Args:
        bounds_q, bounds_k: bounds of the queries and keys of all segments.
        call: the options of every segment, with the sizes of the pack.
        backend: the backend that the caller requested.
        may_pack: whether packed kernels support the call.
    """
    target = Target(backend, base.resolve(backend, device), device, dtype)
    kind = Dense() if isinstance(call.sparsity, Dense) else Budget(0.5)  # plans do not depend on the density
    plan_call = Call(call.shape, call.is_causal, call.scale, kind, quantization=call.quantization, window=call.window)
    crossover = base.crossover_of(target.backend, device.type, dtype)
    return _plan(tuple(bounds_q), tuple(bounds_k), plan_call, target, crossover, may_pack)


@functools.lru_cache(MAX_PLANS)
def _plan(
    bounds_q: tuple[int, ...],
    bounds_k: tuple[int, ...],
    call: Call,
    target: Target,
    crossover: Crossover,
    may_pack: bool,
) -> Plan:
    runs = runs_of(bounds_q, bounds_k)

    def reason_of(run: Run, batch: int = 1) -> Reason | None:
        """Return why a call over ``batch`` segments of a run is dense; None if it is sparse."""
        shape = replace(call.shape, batch=batch, q_len=run.q_len, kv_len=run.kv_len)
        window = without_redundant_bounds(call.window, run.q_len, run.kv_len)
        return dense_rules.by_arguments(shape, window, call.sparsity, call.quantization, target)

    def split_at_crossover(run: Run) -> Iterator[Run]:
        """Split a run into batches for which the choice between dense and sparse is that of a single segment.

        A batch has more scores than a single segment, so it may be above the crossover while the segment is below.
        """
        max_count = run.count
        if reason_of(run) is not reason_of(run, batch=run.count):
            max_count = max(1, (crossover.scores - 1) // (call.shape.heads * run.q_len * run.kv_len))
        return run.batches(max_count)

    separate: list[Run] = []
    packable: dict[PackedMode, list[Segment]] = {}
    for run in runs:
        mode = None
        if may_pack and len(runs) > 1 and run.kv_len > 0:
            mode = _packed_mode(run, reason_of(run), call, target)
        if mode is None:
            separate.append(run)
        else:
            packable.setdefault(mode, []).extend(map(run.segment, range(run.count)))
    groups = []
    for mode, segments in packable.items():
        for group in group_segments(segments, call.shape.heads):
            group_runs = in_runs(group)
            if len(group_runs) == 1:  # a batch needs no tables
                separate += group_runs
            else:
                parts = tuple(part for run in group_runs for part in split_at_crossover(run))
                groups.append(Group(mode, group, parts))
    separate.sort(key=lambda run: run.q_start)
    return Plan(tuple(part for run in separate for part in split_at_crossover(run)), tuple(groups))


def _packed_mode(run: Run, reason: Reason | None, call: Call, target: Target) -> PackedMode | None:
    """Return the mode of a run's segments in a packed call; None if packing is impossible or has no benefit.

    Small dense segments use the packed Triton kernel instead of separate calls of torch's kernels, which would take
    longer to launch than to run.
    """
    quantization = dense_rules.resolve_quantization(
        call.quantization, target.backend, target.device, reason, has_mask=False
    )
    segment_call = replace(call, quantization=quantization)
    serving = base.get(target.backend).serving(segment_call, target.dtype)
    window = without_redundant_bounds(call.window, run.q_len, run.kv_len)
    if not serving.packs:
        return None
    if reason is not None and not segment_call.is_quantized and target.requested == "auto":
        is_small = call.shape.heads * run.q_len * run.kv_len < SMALL_SCORES
        return PackedMode(reason, serving.portable().name, quantization, window) if is_small else None
    if reason is not None and window.left is not None:
        return None  # a separate call drops the keys before all windows, which shifts its blocks
    return PackedMode(reason, serving.name, quantization, window)
