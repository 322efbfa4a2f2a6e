"""Plan the calls for the segments of a pack: batches of equal neighbors, and packed calls of similar lengths.

A plan depends only on lengths and options and is cached, because all layers of a model need the same one.
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
"""Most scores of a dense 16-bit segment that is packed with others. For this size torch's kernels take 60 us on an
H200, no more than the launch overhead (64 segments of 2048 tokens and 16 heads in a loop: 4.0 ms,
docs/benchmarks.md)."""
MAX_PLANS = 64
"""Number of cached plans."""


class PackedMode(NamedTuple):
    """The properties of segments that are computed together.

    Attributes:
        reason: why the segments are dense; None if they are sparse.
        window: the call's window within each segment; stages depend on its bounds.
    """

    reason: Reason | None
    backend: str
    quantization: str
    window: Window


class Group(NamedTuple):
    """Segments of one packed call, and their separate calls in case the packed call is not possible."""

    mode: PackedMode
    segments: tuple[Segment, ...]
    parts: tuple[Run, ...]


class Plan(NamedTuple):
    """The calls of a pack: batches of equal neighbors, in order, and groups."""

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
    """Return the calls for a pack.

    Args:
        call: the call of every segment, with the sizes of the pack.
        backend: the backend that the caller requested.
        may_pack: whether packed kernels support the call.
    """
    target = Target(backend, base.resolve(backend, device), device, dtype)
    kind = Dense() if isinstance(call.sparsity, Dense) else Budget(0.5)  # whose numbers change nothing here
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
        """Return why this many segments of a run are dense as one call; None if they are sparse."""
        shape = replace(call.shape, batch=batch, q_len=run.q_len, kv_len=run.kv_len)
        window = without_redundant_bounds(call.window, run.q_len, run.kv_len)
        return dense_rules.by_arguments(shape, window, call.sparsity, call.quantization, target)

    def split_at_crossover(run: Run) -> Iterator[Run]:
        """Split a run into batches that are dense or sparse as each single segment would be.

        A batch has more scores than a segment, and may exceed a crossover that the segment does not.
        """
        at_once = run.count
        if reason_of(run) is not reason_of(run, batch=run.count):
            at_once = max(1, (crossover.scores - 1) // (call.shape.heads * run.q_len * run.kv_len))
        return run.batches(at_once)

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
            of_group = in_runs(group)
            if len(of_group) == 1:  # as a batch it need not look anything up
                separate += of_group
            else:
                parts = tuple(part for run in of_group for part in split_at_crossover(run))
                groups.append(Group(mode, group, parts))
    separate.sort(key=lambda run: run.q_start)
    return Plan(tuple(part for run in separate for part in split_at_crossover(run)), tuple(groups))


def _packed_mode(run: Run, reason: Reason | None, call: Call, target: Target) -> PackedMode | None:
    """Return the properties of a run's segments in a packed call; None if packing is impossible or has no benefit.

    Small dense segments run on the Triton kernel instead of torch, because the launch overhead of separate calls would
    exceed their time on the device.
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
