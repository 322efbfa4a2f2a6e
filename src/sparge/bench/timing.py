"""Time calls on a CUDA device: medians over turns, where each turn runs all calls that are compared.

`Timing.ms` is measured by CUDA events around back-to-back calls. If the host is slower than the device, this is launch
overhead. `Timing.graph_ms` is measured by replaying a CUDA graph of the same call, so it is device time only.

A GPU runs slower after heavy work than after light work: on an H200, a cuDNN call took 9 % longer after cuDNN calls
than after a memory-bound kernel. Each call is therefore timed after untimed repetitions of itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparge.evaluate.timing import device_seconds, take_turns

UNTIMED_MS, TIMED_MS = 60.0, 15.0
"""Duration of the untimed and timed repetitions of a call in one turn. After 20 ms of untimed repetitions, cuDNN was
still 10 % faster than after 50 ms."""
MIN_TIMED, MAX_CALLS = 2, 1000
WARM_UPS = 2

Result = TypeVar("Result")


@dataclass(frozen=True)
class TimedCall:
    """A call to time. ``context`` is entered once around all calls of a turn, so its cost is not measured."""

    run: Callable[[], Any]
    context: Callable[[], AbstractContextManager[object]] = nullcontext

    def once(self) -> Any:
        with self.context():
            return self.run()


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of one call by CUDA events and by graph replay.

    If one of them is None, ``problem`` is the reason.
    """

    ms: float | None = None
    graph_ms: float | None = None
    problem: str | None = None


def time_on_cuda(calls: dict[str, TimedCall], turns: int) -> dict[str, Timing]:
    """Time every call. If a call fails, its result contains the reason, and the others continue.

    Each turn times all calls by events and by graph replay. The first turn is discarded.
    """
    clocks: dict[tuple[str, str], Callable[[], float | None]] = {}
    problems: dict[str, str] = {}
    for name, call in calls.items():
        try:
            clocks[name, "ms"] = partial(attempt, problems, name, partial(_time_calls, call, *_warm_up(call)))
            graph = TimedCall(_capture(call).replay)
            clocks[name, "graph_ms"] = partial(attempt, problems, name, partial(_time_calls, graph, *_warm_up(graph)))
        except Exception as error:
            # Kernels, compilers and other libraries raise many types of errors.
            problems[name] = reason(error)
    times = take_turns(clocks, turns)
    medians = {key: statistics.median(values) for key, values in times.items() if values}
    return {
        name: Timing(medians.get((name, "ms")), medians.get((name, "graph_ms")), problems.get(name)) for name in calls
    }


def peak_extra_bytes(run: Callable[[], Tensor]) -> int:
    """Return the peak device memory that one call allocates, without its output."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - output.nbytes


def repeats_for(ms: float) -> tuple[int, int]:
    """Return the numbers of untimed and timed calls in one turn."""
    untimed, timed = (math.ceil(share / max(ms, 1e-6)) for share in (UNTIMED_MS, TIMED_MS))
    return min(untimed, MAX_CALLS), min(max(timed, MIN_TIMED), MAX_CALLS)


def reason(error: Exception) -> str:
    """Return the type and first line of an error, short enough for a note under a table."""
    lines = str(error).strip().splitlines() or ["no message"]
    text = " ".join(lines[0].split())
    return f"{type(error).__name__}: {text if len(text) <= 160 else text[:157] + '...'}"


def attempt(problems: dict[str, str], name: str, function: Callable[[], Result]) -> Result | None:
    """Return the function's result. If it raises, return None and store the reason under ``name``."""
    try:
        return function()
    except Exception as error:
        problems.setdefault(name, reason(error))
        return None


def _warm_up(call: TimedCall) -> tuple[int, int]:
    """Compile and tune, then return the numbers of untimed and timed calls in one turn."""
    for _ in range(WARM_UPS):
        call.once()
    torch.cuda.synchronize()
    return repeats_for(_time_calls(call, 1, 1))


def _time_calls(call: TimedCall, untimed: int, timed: int) -> float:
    """Return milliseconds per call of ``timed`` back-to-back calls that follow ``untimed`` calls."""
    with call.context():
        return 1e3 * device_seconds(call.run, untimed=untimed, timed=timed)


def _capture(call: TimedCall) -> torch.cuda.CUDAGraph:
    """Capture one call in a CUDA graph. Raise RuntimeError if the call synchronizes with the device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with call.context():
        with torch.cuda.stream(stream):
            call.run()  # the first call on a stream allocates memory
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                call.run()
        except Exception as error:
            # The end of a failed capture raises another error, which hides the first one.
            raise RuntimeError(f"no CUDA graph: {error.__context__ or error}") from error
    torch.cuda.synchronize()
    return graph
