"""Clocks, and interleaved measurements, for the demo, the evaluations and the benchmarks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

Key = TypeVar("Key")


def take_turns(
    clocks: Mapping[Key, Callable[[], float | None]],
    turns: int,
    *,
    discarded: int = 1,
    budget_s: float = math.inf,
) -> dict[Key, list[float]]:
    """Return the times of every clock, measured in turns: each turn runs all clocks, so drift affects all of them.

    Args:
        clocks: functions that run a call and return its time, or None if it failed.
        turns: number of turns whose times are kept.
        discarded: number of earlier turns, whose times are discarded.
        budget_s: no further turn starts after this many seconds.
    """
    times: dict[Key, list[float]] = {name: [] for name in clocks}
    begin = time.perf_counter()
    for turn in range(discarded + turns):
        if turn > discarded and time.perf_counter() - begin > budget_s:
            break
        for name, clock in clocks.items():
            elapsed = clock()
            if turn >= discarded and elapsed is not None:
                times[name].append(elapsed)
    return times


def host_seconds(run: Callable[[], object], *, untimed: int = 0, timed: int = 1) -> float:
    """Return the host seconds per call of ``timed`` back-to-back calls, measured after ``untimed`` calls."""
    for _ in range(untimed):
        run()
    start = time.perf_counter()
    for _ in range(timed):
        run()
    return (time.perf_counter() - start) / timed


def device_seconds(run: Callable[[], object], *, untimed: int = 0, timed: int = 1) -> float:
    """Return the seconds per call as in `host_seconds`, measured by CUDA events.

    This is device time, or launch overhead if the host is slower than the device.
    """
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    for _ in range(untimed):
        run()
    start.record()
    for _ in range(timed):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / timed / 1e3


def synchronized_time(device: torch.device) -> float:
    """Wait until the device has finished its queue, and return the time in seconds."""
    if device.type in ("cuda", "mps", "xpu"):
        getattr(torch, device.type).synchronize()
    return time.perf_counter()


def time_text(seconds: float) -> str:
    """Format a time with three digits.

    Example:
        >>> time_text(0.01234), time_text(75.04)
        ('12.3 ms', '75.0 s')
    """
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
