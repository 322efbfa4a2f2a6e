"""Timing: the order of turns, discarded turns, and the time per call."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from sparge.bench import timing
from sparge.bench.timing import MAX_CALLS, TimedCall, Timing, repeats_for, time_on_cuda
from sparge.evaluate.timing import host_seconds, take_turns


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Replace the clock, and return a function that advances it by a number of seconds."""
    now = 100.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("time.perf_counter", lambda: now)
    return advance


def test_turns_interleave_calls_and_the_first_turn_is_discarded() -> None:
    order: list[str] = []

    def clock(name: str, times: list[float | None]) -> Callable[[], float | None]:
        values = iter(times)
        return lambda: (order.append(name), next(values))[1]

    clocks = {"a": clock("a", [9.0, 1.0, 2.0]), "b": clock("b", [8.0, None, 4.0])}
    assert take_turns(clocks, 2) == {"a": [1.0, 2.0], "b": [4.0]}
    assert order == ["a", "b"] * 3


@pytest.mark.parametrize(("budget", "kept"), [(0.0, 1), (3.0, 2), (100.0, 5)])
def test_budget_ends_all_turns_except_the_first(pass_time: Callable[[float], None], budget: float, kept: int) -> None:
    def clock() -> float:
        pass_time(2.0)
        return 2.0

    assert take_turns({"a": clock}, 5, discarded=0, budget_s=budget) == {"a": [2.0] * kept}


def test_time_per_call_excludes_untimed_calls(pass_time: Callable[[float], None]) -> None:
    lengths = iter([50.0, 50.0, 1.0, 2.0, 6.0])
    assert host_seconds(lambda: pass_time(next(lengths)), untimed=2, timed=3) == 3.0


def test_repeats_fill_a_turn() -> None:
    repeats = [repeats_for(ms) for ms in (60.0, 10.0, 2.4, 0.1, 0.001, 0.0)]
    assert repeats == [(1, 2), (6, 2), (25, 7), (600, 150), (MAX_CALLS, MAX_CALLS), (1000, 1000)]


def test_reason_is_one_short_line() -> None:
    assert timing.reason(RuntimeError("CUDA  out of memory.\nTried")) == "RuntimeError: CUDA out of memory."
    assert timing.reason(ValueError()) == "ValueError: no message"
    assert len(timing.reason(ValueError("x" * 500))) == len("ValueError: ") + 160


def test_medians_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first turn is discarded; a failing call does not affect the other calls."""
    order: list[str] = []
    times = {"fast": iter([99.0, 1.0, 3.0, 2.0]), "fast graph": iter([99.0, 0.5, 0.7, 0.6])}

    def fail() -> None:
        raise RuntimeError("No available kernel.\nMore words")

    def capture(call: TimedCall) -> SimpleNamespace:
        if call is calls["eager"]:
            raise RuntimeError("it synchronizes")
        return SimpleNamespace(replay=lambda: "fast graph")

    def time_calls(call: TimedCall, untimed: int, timed: int) -> float:
        assert (untimed, timed) == (9, 4)
        order.append(call.once())
        return next(times[order[-1]]) if order[-1] in times else 7.0

    calls = {"fast": TimedCall(lambda: "fast"), "broken": TimedCall(fail), "eager": TimedCall(lambda: "eager")}
    monkeypatch.setattr(timing, "_warm_up", lambda call: call.once() and (9, 4))
    monkeypatch.setattr(timing, "_capture", capture)
    monkeypatch.setattr(timing, "_time_calls", time_calls)
    assert time_on_cuda(calls, turns=3) == {
        "fast": Timing(2.0, 0.6),
        "broken": Timing(problem="RuntimeError: No available kernel."),
        "eager": Timing(7.0, None, "RuntimeError: it synchronizes"),
    }
    assert order == ["fast", "fast graph", "eager"] * 4
