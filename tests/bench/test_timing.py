"""Timing: the order of turns, what is thrown away, what a clock divides by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from sparge.bench import timing
from sparge.bench.timing import Variant, host_seconds, take_turns, time_on_host


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that stands still unless it is told that seconds pass."""
    now = 100.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    return advance


def test_turns_go_through_all_and_the_first_is_discarded() -> None:
    order: list[str] = []

    def clock(name: str, times: list[float | None]) -> Callable[[], float | None]:
        values = iter(times)
        return lambda: (order.append(name), next(values))[1]

    clocks = {"a": clock("a", [9.0, 1.0, 2.0]), "b": clock("b", [8.0, None, 4.0])}
    assert take_turns(clocks, 2) == {"a": [1.0, 2.0], "b": [4.0]}
    assert order == ["a", "b"] * 3


@pytest.mark.parametrize(("budget", "kept"), [(0.0, 1), (3.0, 2), (100.0, 5)])
def test_a_budget_ends_the_turns_but_not_the_first(
    pass_time: Callable[[float], None], budget: float, kept: int
) -> None:
    def clock() -> float:
        pass_time(2.0)
        return 2.0

    assert take_turns({"a": clock}, 5, discarded=0, budget_s=budget) == {"a": [2.0] * kept}


def test_a_clock_divides_by_the_timed_calls_alone(pass_time: Callable[[float], None]) -> None:
    lengths = iter([50.0, 50.0, 1.0, 2.0, 6.0])
    assert host_seconds(lambda: pass_time(next(lengths)), untimed=2, timed=3) == 3.0


def test_medians_on_the_host_without_what_a_context_costs(pass_time: Callable[[float], None]) -> None:
    lengths = {"fast": iter([99.0, 99.0, 1.0, 1.0, 5.0, 5.0, 2.0, 2.0]), "slow": iter([7.0] * 8)}

    @contextmanager
    def costly() -> Iterator[None]:
        pass_time(1000.0)
        yield
        pass_time(1000.0)

    variants = {
        "fast": Variant(lambda: pass_time(next(lengths["fast"]))),
        "slow": Variant(lambda: pass_time(next(lengths["slow"])), context=costly),
    }
    assert time_on_host(variants, 3, timed=2) == {"fast": 2.0, "slow": 7.0}
