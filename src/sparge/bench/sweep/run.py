"""``sparge sweep``: derive rows of the tables of launch configurations, each with its measured reason.

    1. check    every candidate runs once, in one of several processes: does it compile, is its result right
    2. first    correct candidates are timed in turns, 12 at a time, each with the chosen configuration
    3. final    the fastest are timed again for longer, in turns with the chosen one

A candidate whose result is wrong, or that spills where the chosen one does not, is listed and never recommended. A
crash or hang ends only the candidate's own process.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib import util
from pathlib import Path
from typing import Any, Protocol

import torch

from sparge.bench.cases import Row, tflops
from sparge.bench.sweep.cases import Case, as_code, candidates_of, chosen_config, key_of
from sparge.bench.sweep.processes import AnsweringProcess, ProcessFailure, ProcessTimeout
from sparge.bench.sweep.results import Outcome, Sweep, by_speed, known_failures, one_line

DISTANCE = 2
CANDIDATE_TIMEOUT_S, PREPARE_TIMEOUT_S = 60.0, 240.0
CHECK_SHARE = 0.6
"""Share of a case's time for checking; the rest is for timing."""
FIRST_GROUP, FIRST_TURNS = 12, 1
FINALISTS, FINAL_TURNS = 5, 5

Progress = Callable[[str], None]


class Runner(Protocol):
    """Runs candidates and returns the answers of `worker`."""

    places: int
    """Number of candidates that run at a time."""

    def ask(self, place: int, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer of one process; raise `ProcessFailure` if it does not answer."""
        ...


class ProcessRunner:
    """Runs several candidates at a time in separate processes on the current CUDA device."""

    def __init__(self, places: int) -> None:
        self.places = places
        command = (sys.executable, "-m", "sparge.bench.sweep.worker")
        self._processes = [AnsweringProcess(command) for _ in range(places)]

    def ask(self, place: int, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        return self._processes[place].ask(request, timeout_s)

    def close(self) -> None:
        for process in self._processes:
            process.end()


def sweep_case(
    case: Case,
    runner: Runner,
    architecture: int,
    *,
    distance: int = DISTANCE,
    deadline: float = float("inf"),
    timeout_s: float = CANDIDATE_TIMEOUT_S,
    known: Iterable[Outcome] = (),
    say: Progress = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Sweep:
    """Check and time all candidates of a case.

    Args:
        deadline: time of ``clock`` after which no candidate is started.
        timeout_s: time limit of one candidate.
        known: outcomes of an earlier run, which are not repeated.
    """
    chosen = chosen_config(case, architecture)
    settled = {outcome.config: outcome for outcome in known if outcome.config != chosen}
    waiting = [config for config in candidates_of(case, chosen, distance) if config not in settled]
    key, started = key_of(case, architecture), clock()
    say(f"{case}: {len(waiting)} candidates, chosen {as_code(chosen)}")
    until = started + CHECK_SHARE * (deadline - started)
    problem, checked = _check_all(case, waiting, runner, until, timeout_s, say, clock)
    outcomes = {outcome.config: outcome for outcome in (*checked, *settled.values())}
    if problem is None and outcomes[chosen].status != "right":
        problem = f"the chosen configuration: {outcomes[chosen].status}, {outcomes[chosen].note}"
    right = [config for config in waiting if outcomes[config].status == "right" and config != chosen]
    for first in range(0, max(1, len(right)), FIRST_GROUP - 1):
        group = [chosen, *right[first : first + FIRST_GROUP - 1]]
        if problem is None and clock() < deadline:
            outcomes |= _timed(case, [outcomes[each] for each in group], runner, FIRST_TURNS, timeout_s, say)
    allowed = outcomes[chosen].spills or 0
    others = [each for each in outcomes.values() if each.ms and each.config != chosen and (each.spills or 0) <= allowed]
    if others and clock() < deadline:
        finalists = [outcomes[chosen], *sorted(others, key=by_speed)[:FINALISTS]]
        last = _timed(case, finalists, runner, FINAL_TURNS, timeout_s, say)
        outcomes |= {config: replace(each, is_final=each.ms is not None) for config, each in last.items()}
    return Sweep(case, key, chosen, sorted(outcomes.values(), key=by_speed), problem)


def _check_all(
    case: Case,
    configs: Sequence[Any],
    runner: Runner,
    until: float,
    timeout_s: float,
    say: Progress,
    clock: Callable[[], float],
) -> tuple[str | None, list[Outcome]]:
    """Return the outcome of every configuration, and the reason if the case cannot run at all."""
    waiting, done, problems = deque(configs), [], []

    def serve(place: int) -> None:
        try:
            _prepare(case, runner, place)
        except ProcessFailure as failure:
            problems.append(str(failure))
            return
        while waiting and (clock() < until or len(waiting) == len(configs)):
            try:
                config = waiting.popleft()
            except IndexError:  # another place took it
                return
            done.append(_checked(case, config, runner, place, timeout_s))
            say(f"{case} {len(done)}/{len(configs)} {one_line(done[-1])}")

    with ThreadPoolExecutor(runner.places) as pool:
        list(pool.map(serve, range(runner.places)))
    problem = problems[0] if problems and not done else None
    note = "the time was over" if problem is None else problem
    return problem, done + [Outcome(config, "not tried", note) for config in waiting]


def _prepare(case: Case, runner: Runner, place: int) -> None:
    """Create the workload in a process, unless it already exists there. Raise `ProcessFailure` on errors."""
    answer = runner.ask(place, {"do": "prepare", "case": asdict(case)}, PREPARE_TIMEOUT_S)
    if "failed" in answer:
        raise ProcessFailure(answer["failed"])


def _checked(case: Case, config: Any, runner: Runner, place: int, timeout_s: float) -> Outcome:
    try:
        _prepare(case, runner, place)  # a process that was started anew does it outside the candidate's time
        answer = runner.ask(place, {"do": "check", "case": asdict(case), "config": asdict(config)}, timeout_s)
    except ProcessTimeout as failure:
        return Outcome(config, "timed out", str(failure))
    except ProcessFailure as failure:
        return Outcome(config, "failed", str(failure))
    for status in ("wrong", "failed"):
        if status in answer:
            return Outcome(config, status, answer[status])
    return Outcome(config, "right", **answer)


def _timed(
    case: Case, outcomes: Sequence[Outcome], runner: Runner, turns: int, timeout_s: float, say: Progress
) -> dict[Any, Outcome]:
    """Return the outcomes with times measured in turns; one by one if that fails."""
    say(f"{case}: timing {len(outcomes)} candidates")
    try:
        return _timed_together(case, outcomes, runner, turns, timeout_s * (1 + len(outcomes) / FIRST_GROUP))
    except ProcessFailure:
        found: dict[Any, Outcome] = {}
        for outcome in outcomes:
            try:
                found |= _timed_together(case, [outcome], runner, turns, timeout_s)
            except ProcessFailure as failure:
                found[outcome.config] = replace(outcome, status="failed", note=f"while it was timed: {failure}")
        return found


def _timed_together(
    case: Case, outcomes: Sequence[Outcome], runner: Runner, turns: int, timeout_s: float
) -> dict[Any, Outcome]:
    """Time all outcomes in turns. Raise `ProcessFailure` if the process or the request fails."""
    configs = [asdict(outcome.config) for outcome in outcomes]
    request = {"do": "time", "case": asdict(case), "configs": configs, "turns": turns}
    _prepare(case, runner, 0)
    answer = runner.ask(0, request, timeout_s)
    if "failed" in answer:
        raise ProcessFailure(answer["failed"])
    found = {}
    for outcome, ms, problem in zip(outcomes, answer["ms"], answer["problems"], strict=True):
        tops = None if answer["flop"] is None else tflops(answer["flop"], ms)
        status = "failed" if ms is None else outcome.status
        found[outcome.config] = replace(outcome, status=status, note=problem, ms=ms, tops=tops)
    return found


def run_sweep(
    cases: Sequence[Case],
    runner: Runner,
    architecture: int,
    *,
    machine: Row,
    budget_s: float | None = None,
    timeout_s: float = CANDIDATE_TIMEOUT_S,
    distance: int = DISTANCE,
    resume: Path | None = None,
    say: Progress = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Sweep]:
    """Sweep cases one after the other; each gets an equal share of the time that is left.

    Args:
        machine: GPU, versions and commit, as in every row.
        resume: JSON lines of an earlier run, whose failures are not repeated.
    """
    end = float("inf") if budget_s is None else clock() + budget_s
    for place, case in enumerate(cases):
        now = clock()
        known = [] if resume is None else known_failures(resume, case, architecture, machine)
        yield sweep_case(
            case,
            runner,
            architecture,
            distance=distance,
            deadline=now + (end - now) / (len(cases) - place),
            timeout_s=timeout_s,
            known=known,
            say=say,
            clock=clock,
        )


def missing_device(cases: Sequence[Case]) -> str | None:
    """Return the reason if the cases cannot run on this machine, as "expected X, got Y"."""
    if not torch.cuda.is_available():
        return f"expected a CUDA device to measure on, got none (torch {torch.__version__}); see sparge doctor"
    if util.find_spec("triton") is None:
        return "expected Triton to be installed, got none; see sparge doctor"
    capability = torch.cuda.get_device_capability()
    if any(case.kernel == "hopper" for case in cases) and capability != (9, 0):
        return f"kernel 'hopper': expected compute capability 9.0, got {capability[0]}.{capability[1]}"
    return None


def sweep_here(cases: Sequence[Case], *, machine: Row, places: int | None = None, **options: Any) -> Iterator[Sweep]:
    """Run `run_sweep` on the current CUDA device in separate processes."""
    major, minor = torch.cuda.get_device_capability()
    runner = ProcessRunner(places or default_places())
    try:
        yield from run_sweep(cases, runner, 10 * major + minor, machine=machine, **options)
    finally:
        runner.close()


def default_places() -> int:
    """Return the default number of processes: half of the cores, at most 8, because each holds its inputs on the
    device."""
    return max(1, min(8, (os.cpu_count() or 1) // 2))
