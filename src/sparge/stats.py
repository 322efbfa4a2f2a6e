"""What happened to the attention calls of this process: how many, sparse or dense and why, how dense, and where."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

SLOTS = 256
"""Layers whose blocks are counted apart in one allocation."""


@dataclass(frozen=True)
class LayerStats:
    """Counts of one layer of a model; the attributes are those of `Stats`."""

    calls: int
    sparse: int
    dense: int
    reasons: dict[str, int]
    density: float | None


@dataclass(frozen=True)
class Stats:
    """Counts since the start or the last `reset_stats`. ``print`` shows them as a table.

    Attributes:
        calls: attention calls.
        sparse: calls that went through predicted or given block masks.
        dense: calls that ran dense.
        reasons: calls by what was decided, e.g. {"sparse: torch": 3, "dense: sparsity=Dense()": 1}.
        density: kept blocks as a share of the visible ones over all sparse calls; None without any.
        layers: the same by layer, for calls that came from a model with names for them (`sparge.enable`).
    """

    calls: int
    sparse: int
    dense: int
    reasons: dict[str, int]
    density: float | None
    layers: dict[str, LayerStats] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.calls} attention calls: {self.sparse} sparse, {self.dense} dense"]
        if self.density is not None:
            lines[0] += f"; density {self.density:.3f}"
        width = max((len(name) for name in (*self.reasons, *self.layers)), default=0)
        lines += [f"  {reason:<{width}} {count:>7}" for reason, count in sorted(self.reasons.items())]
        if self.layers:
            lines.append(f"  {'layer':<{width}} {'calls':>7} {'sparse':>7} {'dense':>7} {'density':>8}")
        for name, layer in self.layers.items():
            density = "" if layer.density is None else f"{layer.density:.3f}"
            lines.append(f"  {name:<{width}} {layer.calls:>7} {layer.sparse:>7} {layer.dense:>7} {density:>8}".rstrip())
        return "\n".join(lines)


class _Current(threading.local):
    layer = ""


class _Counters:
    """Thread-safe totals. Block counts stay on their device until somebody asks, so recording never waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current = _Current()
        self._reasons: dict[str, Counter[str]] = {}
        self._blocks: dict[torch.device, list[list[Tensor]]] = {}
        self._slots: dict[str, int] = {}

    @contextmanager
    def within(self, layer: str) -> Iterator[None]:
        """Calls of this thread belong to the layer, as long as the block lasts."""
        before, self._current.layer = self._current.layer, layer
        try:
            yield
        finally:
            self._current.layer = before

    def record(self, reason: str, layer: str | None = None) -> None:
        """Count a call of the layer, by default of the one this thread is within."""
        layer = self._current.layer if layer is None else layer
        with self._lock:
            counts = self._reasons.get(layer)
            if counts is None:
                counts = self._reasons[layer] = Counter()
            counts[reason] += 1

    def block_totals(self, device: torch.device) -> Tensor | None:
        """Kept and visible blocks of this thread's layer on a device, int64 (2,), for kernels to add to.

        They live as long as the process, so a CUDA graph that was captured with them goes on counting. A graph that is
        captured before the first call cannot make them: None.
        """
        layer = self._current.layer
        with self._lock:
            slot = self._slots.setdefault(layer, len(self._slots))
            pages = self._blocks.setdefault(device, [])
            while len(pages) * SLOTS <= slot:
                if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    return None
                with torch.inference_mode(False):
                    page = torch.zeros(SLOTS, 2, dtype=torch.int64, device=device)
                    pages.append([page[index] for index in range(SLOTS)])
                if device.type == "cuda":  # the next call may come from another stream
                    torch.cuda.synchronize(device)
            return pages[slot // SLOTS][slot % SLOTS]

    def read(self) -> Stats:
        with self._lock:
            reasons = {layer: dict(counts) for layer, counts in self._reasons.items()}
            slots = dict(self._slots)
            pages = [list(pages) for pages in self._blocks.values()]
        blocks = torch.zeros(max(map(len, pages), default=0) * SLOTS, 2, dtype=torch.int64)
        for device_pages in pages:
            if device_pages and device_pages[0][0].is_cuda:  # calls may have run on other streams
                torch.cuda.synchronize(device_pages[0][0].device)
            for index, page in enumerate(device_pages):
                blocks[index * SLOTS : (index + 1) * SLOTS] += torch.stack(page).cpu()
        pairs = blocks.tolist()
        layers = {}
        for layer, counts in reasons.items():
            slot = slots.get(layer, len(pairs))
            layers[layer] = LayerStats(*_summary(counts, pairs[slot] if slot < len(pairs) else [0, 0]))
        everything: Counter[str] = Counter()
        for counts in reasons.values():
            everything.update(counts)
        total = _summary(dict(everything), blocks.sum(0).tolist())
        layers.pop("", None)
        return Stats(*total, layers=layers)

    def reset(self) -> None:
        with self._lock:
            self._reasons.clear()
            for pages in self._blocks.values():
                for page in pages:
                    torch._foreach_zero_(page)


def _summary(reasons: dict[str, int], blocks: list[int]) -> tuple[int, int, int, dict[str, int], float | None]:
    calls = sum(reasons.values())
    sparse = sum(count for reason, count in reasons.items() if reason.startswith("sparse"))
    kept, visible = blocks
    return calls, sparse, calls - sparse, reasons, kept / visible if visible else None


counters = _Counters()


def stats() -> Stats:
    """Counts of attention calls since the start or the last `reset_stats`.

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
