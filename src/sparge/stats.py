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

    def record(self, reason: str) -> None:
        """Count a call."""
        with self._lock:
            self._reasons[reason] += 1

    def block_totals(self, device: torch.device) -> Tensor | None:
        """Kept and visible blocks of the device, int64 (2,), for kernels to add to.

        They live as long as the process, so a CUDA graph that was captured with them goes on counting. A graph that is
        captured before the first call cannot make them: None.
        """
        with self._lock:
            if device not in self._blocks:
                if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    return None
                with torch.inference_mode(False):
                    self._blocks[device] = torch.zeros(2, dtype=torch.int64, device=device)
                if device.type == "cuda":  # the next call may come from another stream
                    torch.cuda.synchronize(device)
            return self._blocks[device]

    def add_blocks(self, kept: Tensor, visible: Tensor) -> None:
        """Add the blocks of one call."""
        totals = self.block_totals(kept.device)
        if totals is not None:
            totals.add_(torch.stack([kept.sum(), visible.sum()]))

    def read(self) -> Stats:
        with self._lock:
            reasons = dict(self._reasons)
            blocks = list(self._blocks.values())
        for totals in blocks:
            if totals.is_cuda:  # calls may have run on other streams
                torch.cuda.synchronize(totals.device)
        pairs = [totals.tolist() for totals in blocks]
        sparse = sum(count for reason, count in reasons.items() if reason.startswith("sparse"))
        calls = sum(reasons.values())
        visible = sum(pair[1] for pair in pairs)
        density = sum(pair[0] for pair in pairs) / visible if visible else None
        return Stats(calls, sparse, calls - sparse, reasons, density)

    def reset(self) -> None:
        with self._lock:
            self._reasons.clear()
            for totals in self._blocks.values():
                totals.zero_()


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
