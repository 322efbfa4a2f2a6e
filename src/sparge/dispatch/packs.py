"""Compute a pack: plan the calls for its segments, and run them.

Neighboring segments of equal lengths are one batch, and segments of similar lengths are one packed call. A plan depends
only on lengths and options, so it is made once for each kind of pack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sparge.backends import base
from sparge.call import Call
from sparge.dispatch import dense_rules, reasons, validation
from sparge.dispatch.call_cache import PackedCalls, Runner
from sparge.dispatch.dense_rules import Target
from sparge.dispatch.gradients import inside_autograd_function, needs_grad_of
from sparge.dispatch.reasons import Reason
from sparge.dispatch.resolve import Options
from sparge.dispatch.run import resolve_and_run
from sparge.masks.geometry import Shape
from sparge.masks.segments import Run, Segment, group_segments, in_runs, longest, runs_of
from sparge.masks.window import Window, without_redundant_bounds
from sparge.options.common import OnUnsupported, Quantization, Skipped
from sparge.options.rules import Dense

SMALL_SCORES = 2**26
"""Dense 16-bit segments with fewer scores are packed with others. At this size torch's kernels take 60 us on an H200,
no more than the launch overhead (64 segments of 2048 tokens and 16 heads in a loop: 4.0 ms, docs/benchmarks.md)."""


class PackedSequences:
    """The calls that compute a pack. They can be repeated on other tensors with equal bounds, shapes and dtypes."""

    def __init__(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        bounds: tuple[tuple[int, ...], tuple[int, ...]],
        max_lengths: tuple[int | None, int | None],
        call: Call,
        *,
        with_lse: bool,
        backend: str,
        dropout_p: float = 0.0,
        on_unsupported: OnUnsupported = "raise",
    ) -> None:
        """Check the bounds and plan the calls.

        Args:
            bounds, max_lengths: bounds of the segments and upper bounds of their lengths, for queries and for keys.
            call: the options of every segment, with the sizes of the pack.
        """
        query, key, _ = tensors
        validation.check_segments(*bounds, (len(query), len(key)), max_lengths)
        target = Target(backend, base.resolve(backend, query.device), query.device, query.dtype)
        plan = plan_of(*bounds, call, target, may_pack=_may_pack(tensors, call, dropout_p))
        self._parts = plan.parts
        self._groups = [(_packed_calls(group, call, query.dtype, with_lse), group.parts) for group in plan.groups]
        self._shape = call.shape
        self._with_lse = with_lse
        self._options = Options(
            dropout_p=dropout_p,
            is_causal=call.is_causal,
            scale=call.scale,
            enable_gqa=True,
            window=call.window,
            sparsity=call.sparsity,
            score=call.score,
            quantization=cast(Quantization, call.quantization),
            layout="NHD",
            skipped=cast(Skipped, call.skipped),
            return_lse=with_lse,
            backend=backend,
            on_unsupported=on_unsupported,
        )
        self._runners: dict[Run, Runner] = {}

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, _attn_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output (total_q, H, D_v) and the LSE (H, total_q), which is undefined unless requested."""
        with_lse, shape, parts = self._with_lse, self._shape, self._parts
        if not self._groups:
            results = [self._attend(part, query, key, value) for part in parts]
            if len(results) == 1:
                return results[0]
            no_queries = _no_key_result(query[:0], shape)
            output = torch.cat([*(output for output, _ in results), no_queries[0]])
            return output, torch.cat([*(lse for _, lse in results), no_queries[1]], 1) if with_lse else output
        output = query.new_empty(len(query), shape.heads, shape.value_dim)
        lse = query.new_empty(shape.heads, len(query), dtype=torch.float32)
        for group, parts_of_group in self._groups:
            if group.is_ready(query.device):
                group(query, key, value, output, lse)
            else:
                parts += parts_of_group
        for part in parts:
            rows = slice(part.q_start, part.q_start + part.count * part.q_len)
            output[rows], part_lse = self._attend(part, query, key, value)
            if with_lse:
                lse[:, rows] = part_lse
        return output, lse

    def _attend(self, segments: Run, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the segments of a run.

        Return the output (tokens, H, D_v) and the LSE (H, tokens), which is undefined unless requested.
        """
        queries = segments.queries(query)
        if segments.kv_len == 0:
            reasons.count(Reason.NOTHING_VISIBLE)
            return _no_key_result(queries.flatten(0, 1), self._shape)
        tensors = queries, segments.keys(key), segments.keys(value)
        runner = self._runners.get(segments)
        if runner is not None:
            output, lse = runner(*tensors, None)
        else:
            output, lse, runner = resolve_and_run(*tensors, None, self._options)
            if runner is not None:
                self._runners[segments] = runner
        output = output.flatten(0, 1)
        return output, lse.transpose(0, 1).flatten(1) if self._with_lse else output


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


def plan_of(bounds_q: Sequence[int], bounds_k: Sequence[int], call: Call, target: Target, *, may_pack: bool) -> Plan:
    """Return the plan of a pack; ``may_pack`` permits packed calls, and ``call`` has the sizes of the pack."""
    crossover = base.crossover_of(target.backend, target.device.type, target.dtype)
    runs = runs_of(bounds_q, bounds_k)

    def reason_of(run: Run, batch: int = 1) -> Reason | None:
        """Return why a call over ``batch`` segments of a run is dense; None if it is sparse."""
        shape = replace(call.shape, batch=batch, q_len=run.q_len, kv_len=run.kv_len)
        window = without_redundant_bounds(call.window, run.q_len, run.kv_len)
        return dense_rules.by_arguments(shape, window, call.sparsity, call.quantization, target)

    def split_at_crossover(run: Run) -> Iterator[Run]:
        """Split a run so that each batch makes the same choice between dense and sparse as a single segment.

        A batch has more scores than a segment, so it may be above the crossover although the segment is below.
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


def _may_pack(tensors: tuple[Tensor, Tensor, Tensor], call: Call, dropout_p: float) -> bool:
    """Return whether packed kernels support a call. The segments of other calls are computed separately."""
    has_similarity = not isinstance(call.sparsity, Dense) and call.sparsity.similarity_threshold is not None
    if has_similarity or call.scale <= 0 or inside_autograd_function():
        return False
    return dense_rules.unsupported(call.shape, dropout_p, needs_grad_of(*tensors)) is None


def _packed_calls(group: Group, call: Call, dtype: torch.dtype, with_lse: bool) -> PackedCalls:
    """Return the packed calls that compute a group of segments."""
    reason, backend, quantization, window = group.mode
    q_len, kv_len = longest(group.segments)
    shape = replace(call.shape, batch=len(group.segments), q_len=q_len, kv_len=kv_len)
    rules: dict[str, Any] = {"sparsity": Dense(), "pv_threshold": None, "skipped": "drop"}
    if reason is None:
        rules = {"skipped": validation.resolve_skipped(call.skipped, call.is_causal, None, shape)}
    whole = replace(call, shape=shape, window=window, quantization=quantization, exact_lse=with_lse, **rules)
    label = "" if reason is None else reasons.describe(reason)
    return PackedCalls(whole, backend, dtype, group.segments, label)


def _no_key_result(query: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE of queries (tokens, H, D) that see no key."""
    sizes = (len(query), shape.heads)
    lse = query.new_full(sizes[::-1], -math.inf, dtype=torch.float32)
    return query.new_zeros(*sizes, shape.value_dim), lse
