"""Time calls on a CUDA device: medians over turns, where each turn runs all calls that are compared.

`Timing.ms` is measured by CUDA events around back-to-back calls. If the host is slower than the device, this is launch
overhead. `Timing.graph_ms` replays a CUDA graph of the same call, so it is device time only.

A GPU runs slower after heavy work than after light work: on an H200, a cuDNN call took 9 % longer after the same call
than after a memory-bound kernel. Each call is therefore timed after calls of the same variant.
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
"""Duration of one variant's turn, in which short calls are repeated. After 20 ms of its own calls, cuDNN was still 10 %
faster than after 50 ms."""
MIN_TIMED, MAX_CALLS = 2, 1000
WARM_UPS = 2
COPY_BYTES = 2**30

Result = TypeVar("Result")


@dataclass(frozen=True)
class Variant:
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


def time_on_cuda(variants: dict[str, Variant], turns: int) -> dict[str, Timing]:
    """Time every variant. If a variant fails, its result contains the reason, and the others continue.

    Each turn times all variants by events and by graph replay. The first turn is discarded.
    """
    runners: dict[tuple[str, str], Variant] = {}
    repeats: dict[tuple[str, str], tuple[int, int]] = {}
    problems: dict[str, str] = {}
    for name, variant in variants.items():
        try:
            repeats[name, "ms"] = _warm_up(variant)
            runners[name, "ms"] = variant
            graph = Variant(_capture(variant).replay)
            repeats[name, "graph_ms"] = _warm_up(graph)
            runners[name, "graph_ms"] = graph
        except Exception as error:
            # Kernels, compilers and other libraries raise many types of errors.
            problems[name] = reason(error)

    def clock(name: str, kind: str) -> float | None:
        return attempt(problems, name, lambda: _time_calls(runners[name, kind], *repeats[name, kind]))

    times = take_turns({runner: partial(clock, *runner) for runner in runners}, turns)
    medians = {runner: statistics.median(values) for runner, values in times.items() if values}
    return {
        name: Timing(medians.get((name, "ms")), medians.get((name, "graph_ms")), problems.get(name))
        for name in variants
    }


def copy_bandwidth(turns: int = 7) -> float:
    """Return bytes per second of a device-to-device copy, counting reads and writes."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    timing = time_on_cuda({"copy": Variant(lambda: target.copy_(source))}, turns)["copy"]
    if timing.ms is None:
        raise RuntimeError(f"expected a device copy to run, got: {timing.problem}")
    return 2 * COPY_BYTES / (timing.ms / 1e3)


def peak_extra_bytes(run: Callable[[], Tensor]) -> int:
    """Return the peak device memory of one call, without earlier allocations and without its output."""
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
    """Return the function's result. If it fails, return None and store the reason under ``name``."""
    try:
        return function()
    except Exception as error:
        problems.setdefault(name, reason(error))
        return None


def _warm_up(variant: Variant) -> tuple[int, int]:
    """Compile and tune, then return the numbers of untimed and timed calls in one turn."""
    for _ in range(WARM_UPS):
        variant.once()
    torch.cuda.synchronize()
    return repeats_for(_time_calls(variant, 1, 1))


def _time_calls(variant: Variant, untimed: int, timed: int) -> float:
    """Return milliseconds per call of ``timed`` back-to-back calls that follow ``untimed`` calls."""
    with variant.context():
        return 1e3 * device_seconds(variant.run, untimed=untimed, timed=timed)


def _capture(variant: Variant) -> torch.cuda.CUDAGraph:
    """Capture one call in a CUDA graph. Raise RuntimeError if the call synchronizes with the device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with variant.context():
        with torch.cuda.stream(stream):
            variant.run()  # the first call on a stream allocates memory
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                variant.run()
        except Exception as error:
            # The end of a failed capture raises another error, which hides the first one.
            raise RuntimeError(f"no CUDA graph: {error.__context__ or error}") from error
    torch.cuda.synchronize()
    return graph
