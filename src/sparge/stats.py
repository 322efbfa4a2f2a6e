"""What happened to the attention calls of this process: how many, sparse or dense and why, and how dense."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stats:
    """Counts since the start or the last `reset_stats`.

    Attributes:
        calls: attention calls.
        sparse: calls that went through predicted or given block masks.
        dense: calls that ran dense.
        reasons: calls by what was decided, e.g. {"sparse: torch": 3, "dense: sparsity=Dense()": 1}.
        density: kept blocks as a share of the visible ones over all sparse calls; None without any.
    """

    calls: int
    sparse: int
    dense: int
    reasons: dict[str, int]
    density: float | None


class _Counters:
    """Thread-safe totals. Block counts stay on their device until somebody asks, so recording never waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: Counter[str] = Counter()
        self._blocks: dict[torch.device, Tensor] = {}

    def record(self, reason: str, kept: Tensor | None = None, visible: Tensor | None = None) -> None:
        counts = None
        if kept is not None and visible is not None:
            counts = torch.stack([kept.sum(), visible.sum()])
        with self._lock:
            self._reasons[reason] += 1
            if counts is not None:
                before = self._blocks.get(counts.device)
                self._blocks[counts.device] = counts if before is None else before + counts

    def read(self) -> Stats:
        with self._lock:
            reasons = dict(self._reasons)
            totals = [counts.tolist() for counts in self._blocks.values()]
        sparse = sum(count for reason, count in reasons.items() if reason.startswith("sparse"))
        calls = sum(reasons.values())
        visible = sum(pair[1] for pair in totals)
        density = sum(pair[0] for pair in totals) / visible if visible else None
        return Stats(calls, sparse, calls - sparse, reasons, density)

    def reset(self) -> None:
        with self._lock:
            self._reasons.clear()
            self._blocks.clear()


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
    """
    return counters.read()


def reset_stats() -> None:
    """Set all counts to zero."""
    counters.reset()
