"""``sparge sweep``: derive rows of the tables of launch configurations, each with its measured reason.

    1. check    every candidate runs once, in one of several processes: does it compile, is its result right
    2. first    correct candidates are timed in turns, 12 at a time, each with the chosen configuration
    3. final    the fastest are timed again for longer, in turns with the chosen one

A candidate whose result is wrong, or that spills where the chosen one does not, is listed and never recommended. A
crash or hang ends only the candidate's own process.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from sparge.bench.cases import Row, tflops
from sparge.bench.sweep import worker
from sparge.bench.sweep.cases import Case, as_code, candidates_of, chosen_config, key_of
from sparge.bench.sweep.results import Outcome, Sweep, by_speed, known_failures, one_line

DISTANCE = 2
CANDIDATE_TIMEOUT_S, PREPARE_TIMEOUT_S = 60.0, 240.0
CHECK_SHARE = 0.6
"""Share of a case's time for checking; the rest is for timing."""
FIRST_GROUP, FIRST_TURNS = 12, 1
FINALISTS, FINAL_TURNS = 5, 5


class ProcessFailure(RuntimeError):
    """A process did not answer: it died, or was killed after a time-out."""


class ProcessTimeout(ProcessFailure):
    """The process exceeded its time-out."""


class Workers:
    """Processes that answer one request at a time (`worker.serve`). A new one replaces a process that died."""

    def __init__(self, count: int, serve: Callable[[Connection], None] = worker.serve) -> None:
        self.count = count
        self._serve = serve
        self._running: dict[int, tuple[SpawnProcess, Connection]] = {}

    def request(self, index: int, timeout_s: float, *args: Any) -> dict[str, Any]:
        """Send a request to a process and return its answer.

        Raises:
            ProcessFailure: the process did not answer, and was killed.
        """
        if index not in self._running:
            context = multiprocessing.get_context("spawn")
            pipe, other_end = context.Pipe()
            process = context.Process(target=self._serve, args=(other_end,), daemon=True)
            process.start()
            other_end.close()
            self._running[index] = process, pipe
        process, pipe = self._running[index]
        try:
            pipe.send(args)
            if not pipe.poll(timeout_s):
                self.end(index)
                raise ProcessTimeout(f"no answer within {timeout_s:.0f} s")
            answer: dict[str, Any] = pipe.recv()
        except (EOFError, OSError):
            process.join()
            self.end(index)
            raise ProcessFailure(f"the process ended with status {process.exitcode}") from None
        if answer.pop(worker.LAST_ANSWER, False):
            self.end(index)
        return answer

    def end(self, index: int) -> None:
        """Kill a process, if it runs."""
        if index in self._running:
            process, pipe = self._running.pop(index)
            process.kill()
            process.join()
            pipe.close()

    def close(self) -> None:
        """Kill all processes."""
        for index in range(self.count):
            self.end(index)


def sweep_case(
    case: Case,
    workers: Workers,
    architecture: int,
    *,
    distance: int = DISTANCE,
    deadline: float = float("inf"),
    known: Iterable[Outcome] = (),
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Sweep:
    """Check and time all candidates of a case.

    Args:
        deadline: time of ``clock`` after which no candidate is started.
        known: outcomes of an earlier run, which are not repeated.
        options: fields of `Candidates`.
    """
    candidates = Candidates(case, workers, **options)
    chosen = chosen_config(case, architecture)
    settled = {outcome.config: outcome for outcome in known if outcome.config != chosen}
    waiting = [config for config in candidates_of(case, chosen, distance) if config not in settled]
    started = clock()
    candidates.log(f"{case}: {len(waiting)} candidates, chosen {as_code(chosen)}")
    until = started + CHECK_SHARE * (deadline - started)
    problem, checked = candidates.check_all(waiting, lambda: clock() < until)
    outcomes = {outcome.config: outcome for outcome in (*checked, *settled.values())}
    if problem is None and outcomes[chosen].status != "right":
        problem = f"the chosen configuration: {outcomes[chosen].status}, {outcomes[chosen].note}"
    right = [config for config in waiting if outcomes[config].status == "right" and config != chosen]
    for first in range(0, max(1, len(right)), FIRST_GROUP - 1):
        group = [chosen, *right[first : first + FIRST_GROUP - 1]]
        if problem is None and clock() < deadline:
            outcomes |= candidates.time([outcomes[each] for each in group], FIRST_TURNS)
    allowed = outcomes[chosen].spills or 0
    others = [each for each in outcomes.values() if each.ms and each.config != chosen and (each.spills or 0) <= allowed]
    if others and clock() < deadline:
        last = candidates.time([outcomes[chosen], *sorted(others, key=by_speed)[:FINALISTS]], FINAL_TURNS)
        outcomes |= {config: replace(each, is_final=each.ms is not None) for config, each in last.items()}
    return Sweep(case, key_of(case, architecture), chosen, sorted(outcomes.values(), key=by_speed), problem)


@dataclass(frozen=True)
class Candidates:
    """Runs the candidates of a case, each with a time limit."""

    case: Case
    workers: Workers
    timeout_s: float = CANDIDATE_TIMEOUT_S
    log: Callable[[str], None] = lambda _: None

    def check_all(self, configs: Sequence[Any], has_time: Callable[[], bool]) -> tuple[str | None, list[Outcome]]:
        """Return the outcome of every configuration, and the reason if the case cannot run at all."""
        waiting, done, problems = deque(configs), [], []

        def serve(index: int) -> None:
            try:
                self._prepare(index)
            except ProcessFailure as failure:
                problems.append(str(failure))
                return
            while waiting and (has_time() or len(waiting) == len(configs)):
                try:
                    config = waiting.popleft()
                except IndexError:  # another worker took it
                    return
                done.append(self._check(index, config))
                self.log(f"{self.case} {len(done)}/{len(configs)} {one_line(done[-1])}")

        with ThreadPoolExecutor(self.workers.count) as pool:
            list(pool.map(serve, range(self.workers.count)))
        problem = problems[0] if problems and not done else None
        return problem, done + [Outcome(config, "not tried", problem or "out of time") for config in waiting]

    def _prepare(self, index: int) -> None:
        """Create the workload in a process, unless it already exists there. Raise `ProcessFailure` on errors."""
        answer = self.workers.request(index, PREPARE_TIMEOUT_S, "prepare", self.case)
        if "failed" in answer:
            raise ProcessFailure(answer["failed"])

    def _check(self, index: int, config: Any) -> Outcome:
        try:
            self._prepare(index)  # in a new process, this is not part of the candidate's time
            answer = self.workers.request(index, self.timeout_s, "check", self.case, config)
        except ProcessTimeout as failure:
            return Outcome(config, "timed out", str(failure))
        except ProcessFailure as failure:
            return Outcome(config, "failed", str(failure))
        for status in ("wrong", "failed"):
            if status in answer:
                return Outcome(config, status, answer[status])
        return Outcome(config, "right", **answer)

    def time(self, outcomes: Sequence[Outcome], turns: int) -> dict[Any, Outcome]:
        """Return the outcomes with times measured in turns; one by one if that fails."""
        self.log(f"{self.case}: timing {len(outcomes)} candidates")
        try:
            self._prepare(0)
            configs, limit = [each.config for each in outcomes], self.timeout_s * (1 + len(outcomes) / FIRST_GROUP)
            answer = self.workers.request(0, limit, "time", self.case, configs, turns)
            if "failed" in answer:
                raise ProcessFailure(answer["failed"])
        except ProcessFailure as failure:
            if len(outcomes) > 1:
                alone = [self.time([outcome], turns) for outcome in outcomes]
                return {config: outcome for found in alone for config, outcome in found.items()}
            note = f"while it was timed: {failure}"
            return {outcome.config: replace(outcome, status="failed", note=note) for outcome in outcomes}
        found = {}
        for outcome, ms, problem in zip(outcomes, answer["ms"], answer["problems"], strict=True):
            tops = None if answer["flop"] is None else tflops(answer["flop"], ms)
            status = "failed" if ms is None else outcome.status
            found[outcome.config] = replace(outcome, status=status, note=problem, ms=ms, tops=tops)
        return found


def run_sweep(
    cases: Sequence[Case],
    workers: Workers,
    architecture: int,
    *,
    machine: Row,
    budget_s: float | None = None,
    resume: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Iterator[Sweep]:
    """Sweep cases one after the other; each gets an equal share of the time that is left.

    Args:
        machine: GPU, versions and commit, as in every row.
        resume: JSON lines of an earlier run, whose failures are not repeated.
        options: ``distance`` of `sweep_case`, and fields of `Candidates`.
    """
    end = float("inf") if budget_s is None else clock() + budget_s
    for index, case in enumerate(cases):
        now = clock()
        known = [] if resume is None else known_failures(resume, case, architecture, machine)
        deadline = now + (end - now) / (len(cases) - index)
        yield sweep_case(case, workers, architecture, deadline=deadline, known=known, clock=clock, **options)


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


def sweep_here(cases: Sequence[Case], *, machine: Row, count: int | None = None, **options: Any) -> Iterator[Sweep]:
    """Run `run_sweep` on the current CUDA device in ``count`` processes.

    The default is half of the cores, at most 8, because each process holds its inputs on the device.
    """
    major, minor = torch.cuda.get_device_capability()
    workers = Workers(count or max(1, min(8, (os.cpu_count() or 1) // 2)))
    try:
        yield from run_sweep(cases, workers, 10 * major + minor, machine=machine, **options)
    finally:
        workers.close()
