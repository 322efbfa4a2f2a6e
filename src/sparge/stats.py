"""Counts of attention calls in this process: sparse and dense calls by reason, and density, in total and by layer."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

COUNTS = 3
"""Number of block counts per layer: kept blocks, visible blocks, and halves of kept blocks whose P V was skipped
(`Backend.attend`)."""
ALIGNED = 4
"""Stride between the counts of two layers. Triton would recompile kernels for pointers not aligned to 16 bytes."""
MAX_UNCOUNTED = 1024
"""Maximum number of recorded calls that wait to be counted. Counting each call by itself takes longer, because the
counts are not in the processor's cache when a model makes a call."""
LAYERS_PER_ALLOCATION = 256
"""Layers whose block counts share an allocation, because nothing can be allocated while a CUDA graph is captured."""


@dataclass(frozen=True)
class LayerStats:
    """Counts of one layer of a model; the attributes are those of `Stats`."""

    calls: int
    sparse: int
    dense: int
    reasons: dict[str, int]
    density: float | None
    pv_skipped: float | None = None
    imbalance: float | None = None

    @property
    def sparsity(self) -> float | None:
        """The share of the products Q K^T and P V of all visible blocks that were skipped."""
        return None if self.density is None else 1.0 - self.density * (1.0 - (self.pv_skipped or 0.0) / 2)


@dataclass(frozen=True)
class Stats(LayerStats):
    """Counts since the start of the process or the last `reset_stats`; ``print`` shows them as a table.

    Attributes:
        calls: number of attention calls.
        sparse: number of calls with predicted or given block masks.
        dense: number of calls that ran dense.
        reasons: number of calls by reason, for example {"sparse: torch": 3, "dense: sparsity=Dense()": 1}.
        density: share of the visible blocks that were kept, over all sparse calls; None without sparse calls.
        pv_skipped: share of the products P V of kept blocks that ``pv_threshold`` skipped, over all sparse calls and
            counted in halves of blocks (64 queries x 64 keys); None if no call had a threshold.
        sparsity: share of the products Q K^T and P V of all visible blocks that were skipped (the paper's measure):
            1 - density (1 - pv_skipped / 2).
        imbalance: kept blocks of the rank with the most blocks, divided by the mean over ranks, for distributed calls
            with a `HeadBalance`; 1 is perfectly balanced. None without such calls.
        layers: statistics by layer, for calls of enabled models (`sparge.enable`).
    """

    layers: dict[str, LayerStats] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.calls} attention calls: {self.sparse} sparse, {self.dense} dense"]
        if self.density is not None:
            lines[0] += f"; density {self.density:.3f}"
        has_skipped = self.pv_skipped is not None
        if has_skipped:
            lines[0] += f", P V skipped {self.pv_skipped:.3f}"
        if self.imbalance is not None:
            lines[0] += f", imbalance {self.imbalance:.3f}"
        width = max((len(name) for name in (*self.reasons, *self.layers)), default=0)
        lines += [f"  {reason:<{width}} {count:>7}" for reason, count in sorted(self.reasons.items())]
        if self.layers:
            titles = f"  {'layer':<{width}} {'calls':>7} {'sparse':>7} {'dense':>7} {'density':>8}"
            lines.append(titles + (f" {'P V skipped':>12}" if has_skipped else ""))
        for name, layer in self.layers.items():
            density, skipped = ("" if share is None else f"{share:.3f}" for share in (layer.density, layer.pv_skipped))
            counts = f"  {name:<{width}} {layer.calls:>7} {layer.sparse:>7} {layer.dense:>7}"
            lines.append(f"{counts} {density:>8} {skipped:>12}".rstrip())
        return "\n".join(lines)


class _Current(threading.local):
    """The layer of this thread's calls.

    Inside `_Counters.as_one_call`, ``grouped_calls`` collects the calls as pairs (reason, has_threshold).
    """

    layer = ""
    grouped_calls: list[tuple[str, bool]] | None = None


class _LayerContext:
    """Context manager of `_Counters.for_layer`. It is a class, which is faster than a generator."""

    __slots__ = ("_before", "_current", "_layer")

    def __init__(self, current: _Current, layer: str) -> None:
        self._current, self._layer = current, layer

    def __enter__(self) -> None:
        self._before, self._current.layer = self._current.layer, self._layer

    def __exit__(self, *exception: object) -> None:
        self._current.layer = self._before


class _Counters:
    """Thread-safe totals. Block counts stay on their device until they are read, so recording does not synchronize."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current = _Current()
        self._reasons: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._uncounted: deque[tuple[str, str]] = deque()  # layer and reason of the latest calls
        self._with_threshold: set[str] = set()
        self._blocks: dict[tuple[str, torch.device], Tensor] = {}
        self._unused_blocks: dict[torch.device, list[Tensor]] = {}
        self._work: dict[str, Tensor] = {}

    def for_layer(self, layer: str) -> _LayerContext:
        """Return a context manager in which the calls of this thread count for a layer."""
        return _LayerContext(self._current, layer)

    @contextmanager
    def as_one_call(self) -> Iterator[None]:
        """Count all calls of this thread within the context as one call.

        The first sparse call is recorded, or the first call if none is sparse.
        """
        grouped_calls: list[tuple[str, bool]] = []
        before, self._current.grouped_calls = self._current.grouped_calls, grouped_calls
        try:
            yield
        finally:
            self._current.grouped_calls = before
            if grouped_calls:
                sparse = next((call for call in grouped_calls if call[0].startswith("sparse")), grouped_calls[0])
                self.record(sparse[0], has_threshold=sparse[1])

    def record(self, reason: str, layer: str | None = None, *, has_threshold: bool = False) -> None:
        """Count a call for a layer. Default: the layer of this thread, see `for_layer`."""
        if layer is None:
            current = self._current
            if current.grouped_calls is not None:
                current.grouped_calls.append((reason, has_threshold))
                return
            layer = current.layer
        if has_threshold:
            with self._lock:
                self._reasons[layer][reason] += 1
                self._with_threshold.add(layer)
            return
        uncounted = self._uncounted
        uncounted.append((layer, reason))  # atomic
        if len(uncounted) >= MAX_UNCOUNTED:
            with self._lock:
                self._count()

    def _count(self) -> None:
        """Add the latest calls to the counts. The caller holds the lock, but other threads may record calls."""
        for _ in range(len(self._uncounted)):
            layer, reason = self._uncounted.popleft()
            self._reasons[layer][reason] += 1

    def record_sparse(self, backend: str, device: torch.device, *, has_threshold: bool = False) -> Tensor | None:
        """Count a sparse call, and return the `block_totals` that its kernels update."""
        self.record(f"sparse: {backend}", has_threshold=has_threshold)
        return self.block_totals(device)

    def record_work(self, by_rank: Tensor) -> None:
        """Add the work of each rank in a call, (ranks,), to this thread's layer, without synchronization."""
        work = torch.stack([by_rank.max().double(), by_rank.double().mean()])
        with self._lock:
            before = self._work.get(self._current.layer)
            self._work[self._current.layer] = work if before is None else before.to(work.device) + work

    def block_totals(self, device: torch.device) -> Tensor | None:
        """Return the block counts of this thread's layer, int64 (`COUNTS`,) on the device, which kernels update.

        The tensor is never freed, so a captured CUDA graph can continue to count. Return None if it would have to be
        allocated during graph capture.
        """
        name = self._current.layer, device
        totals = self._blocks.get(name)
        if totals is not None:
            return totals
        with self._lock:
            unused = self._unused_blocks.setdefault(device, [])
            if not unused:
                if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    return None
                with torch.inference_mode(False):
                    page = torch.zeros(LAYERS_PER_ALLOCATION, ALIGNED, dtype=torch.int64, device=device)
                    unused += [page[index, :COUNTS] for index in range(LAYERS_PER_ALLOCATION)]
                if device.type == "cuda":  # the next call may run on another stream
                    torch.cuda.synchronize(device)
            return self._blocks.setdefault(name, unused.pop())

    def read(self) -> Stats:
        with self._lock:
            self._count()
            reasons = {layer: dict(counts) for layer, counts in self._reasons.items()}
            with_threshold = set(self._with_threshold)
            totals = dict(self._blocks)
            work = dict(self._work)
        for device in {device for _, device in totals if device.type == "cuda"}:  # calls may use other streams
            torch.cuda.synchronize(device)
        blocks: dict[str, list[int]] = {}
        for (layer, _), on_device in totals.items():
            before = blocks.get(layer, [0] * COUNTS)
            blocks[layer] = [count + added for count, added in zip(before, on_device.tolist(), strict=True)]
        total_reasons: Counter[str] = Counter()
        layers = {}
        for layer, counts in reasons.items():
            total_reasons.update(counts)
            layer_work = [work[layer]] if layer in work else []
            summary = _summary(counts, blocks.get(layer, [0] * COUNTS), layer in with_threshold, layer_work)
            layers[layer] = LayerStats(**summary)
        all_blocks = [sum(column) for column in zip([0] * COUNTS, *blocks.values(), strict=True)]
        total = _summary(dict(total_reasons), all_blocks, bool(with_threshold), work.values())
        layers.pop("", None)
        return Stats(**total, layers=layers)

    def reset(self) -> None:
        with self._lock:
            self._uncounted.clear()
            self._reasons.clear()
            self._with_threshold.clear()
            self._work.clear()
            for totals in self._blocks.values():
                totals.zero_()


def _summary(reasons: dict[str, int], blocks: list[int], has_threshold: bool, work: Iterable[Tensor]) -> dict[str, Any]:
    """Return the fields of `LayerStats` from a layer's counts; ``work`` has the maximum and the mean work of ranks."""
    calls = sum(reasons.values())
    sparse = sum(count for reason, count in reasons.items() if reason.startswith("sparse"))
    kept, visible, skipped = blocks
    pv_skipped = None
    if kept and (has_threshold or skipped):  # after a reset, replays of a CUDA graph skip but record no call
        pv_skipped = skipped / (2 * kept)
    most, mean = (sum(column) for column in zip((0.0, 0.0), *(entry.tolist() for entry in work), strict=True))
    return {
        "calls": calls,
        "sparse": sparse,
        "dense": calls - sparse,
        "reasons": reasons,
        "density": kept / visible if visible else None,
        "pv_skipped": pv_skipped,
        "imbalance": most / mean if mean else None,
    }


counters = _Counters()


def stats() -> Stats:
    """Return the counts of attention calls since the start or the last `reset_stats`.

    Example:
        >>> import torch, sparge
        >>> sparge.reset_stats()
        >>> q = torch.randn(1, 1, 64, 16)
        >>> _ = sparge.attention(q, q, q)
        >>> sparge.stats().reasons
        {'dense: below the crossover': 1}
        >>> print(sparge.stats())
        1 attention calls: 0 sparse, 1 dense
          dense: below the crossover       1
    """
    return counters.read()


def reset_stats() -> None:
    """Set all counts to zero."""
    counters.reset()
