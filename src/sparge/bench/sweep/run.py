"""``sparge sweep``: derive rows of the tables of launch configurations, each with its measured reason.

    1. check    each candidate runs once, in one of several processes, to check that it compiles and is correct
    2. first    correct candidates are timed in turns, in groups of 12 that include the chosen configuration
    3. final    the fastest candidates are timed again for longer, in turns with the chosen configuration

A candidate with a wrong result, or with more spills than the chosen configuration, is listed but never recommended. A
crash or hang only ends the process of that candidate.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from sparge.bench.cases import Row, tflops
from sparge.bench.sweep import worker
from sparge.bench.sweep.cases import Case, as_code, candidates_of, chosen_config, key_of
from sparge.bench.sweep.results import Outcome, Sweep, by_speed, known_failures, one_line
from sparge.bench.sweep.worker import CandidateFailure, WrongResult

DISTANCE = 2
CANDIDATE_TIMEOUT_S, PREPARE_TIMEOUT_S = 60.0, 240.0
CHECK_SHARE = 0.6
"""Share of a case's time that is used for checking; the rest is used for timing."""
FIRST_GROUP, FIRST_TURNS = 12, 1
FINALISTS, FINAL_TURNS = 5, 5


class CandidateTimeout(CandidateFailure):
    """Raised if the process exceeded its time limit."""


class Process:
    """Runs one function at a time in a process, which is replaced if it dies, hangs or loses its device."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._id: int | None = None

    def run(self, timeout_s: float, function: Callable[..., Any], *args: Any) -> Any:
        """Return the function's result.

        Raises:
            CandidateFailure: the process died, or was killed after the time limit.
        """
        try:
            if self._pool is None:
                # Redirect standard output, where kernels may print, to standard error.
                self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), os.dup2, (2, 1))
                self._id = self._pool.submit(os.getpid).result(PREPARE_TIMEOUT_S)
            return self._pool.submit(function, *args).result(timeout_s)
        except concurrent.futures.TimeoutError:
            self.close()
            raise CandidateTimeout(f"no answer within {timeout_s:.0f} s") from None
        except BrokenProcessPool:
            self._pool = self._id = None
            raise CandidateFailure("the process died") from None
        except worker.DeviceLost:
            self.close()
            raise

    def close(self) -> None:
        """Kill the process if there is one."""
        pool, process_id = self._pool, self._id
        self._pool = self._id = None
        if process_id is not None:
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        if pool is not None:
            pool.shutdown(wait=process_id is not None, cancel_futures=True)  # a process that hangs at start has no id


class Workers:
    """A pool of processes that run the functions of `worker` on the load of a case.

    Args:
        count: number of processes; by default half of the cores, at most 8, because each has its own inputs on the
            device.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count or max(1, min(8, (os.cpu_count() or 1) // 2))
        self._processes = [Process() for _ in range(self.count)]
        self._free: SimpleQueue[Process] = SimpleQueue()
        for process in self._processes:
            self._free.put(process)

    def run(self, timeout_s: float, function: Callable[..., Any], case: Case, *args: Any) -> Any:
        """Run a function in a free process. The time limit does not include the preparation of the load.

        Raises:
            WrongResult: the candidate's result is wrong.
            CandidateFailure: the candidate failed, or its process did.
        """
        process = self._free.get()
        try:
            process.run(PREPARE_TIMEOUT_S, worker.perform, worker.prepare, case)
            return process.run(timeout_s, worker.perform, function, case, *args)
        finally:
            self._free.put(process)

    def close(self) -> None:
        """Kill all processes. A later call of `run` starts new ones."""
        for process in self._processes:
            process.close()


@dataclass(frozen=True)
class Candidates:
    """Runs the candidates of a case, each with a time limit."""

    case: Case
    workers: Workers
    timeout_s: float = CANDIDATE_TIMEOUT_S
    log: Callable[[str], None] = lambda _: None

    def check(self, config: Any) -> Outcome:
        """Run a candidate once."""
        try:
            return Outcome(config, "right", **self.workers.run(self.timeout_s, worker.check, self.case, config))
        except WrongResult as error:
            return Outcome(config, "wrong", str(error))
        except CandidateFailure as failure:
            return Outcome(config, "timed out" if isinstance(failure, CandidateTimeout) else "failed", str(failure))

    def time(self, outcomes: Sequence[Outcome], turns: int) -> dict[Any, Outcome]:
        """Return the outcomes with their times, measured in turns. If that fails, time each candidate alone."""
        self.log(f"{self.case}: timing {len(outcomes)} candidates")
        configs, limit_s = [each.config for each in outcomes], self.timeout_s * (1 + len(outcomes) / FIRST_GROUP)
        try:
            answer = self.workers.run(limit_s, worker.time_all, self.case, configs, turns)
        except CandidateFailure as failure:
            if len(outcomes) > 1:
                separate = [self.time([outcome], turns) for outcome in outcomes]
                return {config: outcome for found in separate for config, outcome in found.items()}
            note = f"while it was timed: {failure}"
            return {outcome.config: replace(outcome, status="failed", note=note) for outcome in outcomes}
        found = {}
        for outcome, ms, problem in zip(outcomes, answer["ms"], answer["problems"], strict=True):
            tops = None if answer["flop"] is None else tflops(answer["flop"], ms)
            status = "failed" if ms is None else outcome.status
            found[outcome.config] = replace(outcome, status=status, note=problem, ms=ms, tops=tops)
        return found


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
        known: outcomes of an earlier run; these candidates are not run again.
        options: fields of `Candidates`.
    """
    candidates = Candidates(case, workers, **options)
    chosen = chosen_config(case, architecture)
    outcomes = {outcome.config: outcome for outcome in known if outcome.config != chosen}
    waiting = [config for config in candidates_of(case, chosen, distance) if config not in outcomes]
    number, started = itertools.count(1), clock()
    until = started + CHECK_SHARE * (deadline - started)
    candidates.log(f"{case}: {len(waiting)} candidates, chosen {as_code(chosen)}")
    problem: str | None = None

    def check(config: Any) -> Outcome:
        if config != chosen and (problem or clock() >= until):
            return Outcome(config, "not tried", problem or "out of time")
        outcome = candidates.check(config)
        candidates.log(f"{case} {next(number)}/{len(waiting)} {one_line(outcome)}")
        return outcome

    first = check(waiting[0])  # the chosen configuration, with which all others are compared
    if first.status != "right":
        problem = f"the chosen configuration: {first.status}, {first.note}"
    with ThreadPoolExecutor(workers.count) as pool:
        outcomes |= {outcome.config: outcome for outcome in (first, *pool.map(check, waiting[1:]))}
    right = [config for config in waiting[1:] if outcomes[config].status == "right"]
    for start in range(0, max(1, len(right)), FIRST_GROUP - 1):
        if problem is None and clock() < deadline:
            group = [chosen, *right[start : start + FIRST_GROUP - 1]]
            outcomes |= candidates.time([outcomes[config] for config in group], FIRST_TURNS)
    allowed = outcomes[chosen].spills or 0
    others = [each for each in outcomes.values() if each.ms and each.config != chosen and (each.spills or 0) <= allowed]
    if others and clock() < deadline:
        last = candidates.time([outcomes[chosen], *sorted(others, key=by_speed)[:FINALISTS]], FINAL_TURNS)
        outcomes |= {config: replace(each, is_final=each.ms is not None) for config, each in last.items()}
    return Sweep(case, key_of(case, architecture), chosen, sorted(outcomes.values(), key=by_speed), problem)


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
    """Sweep cases one after the other. Each case gets an equal share of the remaining time.

    Args:
        machine: GPU, versions and commit, as in every row.
        resume: JSON lines of an earlier run. Candidates that failed there are skipped.
        options: ``distance`` of `sweep_case`, and fields of `Candidates`.
    """
    end = float("inf") if budget_s is None else clock() + budget_s
    try:
        for index, case in enumerate(cases):
            now = clock()
            known = [] if resume is None else known_failures(resume, case, architecture, machine)
            deadline = now + (end - now) / (len(cases) - index)
            yield sweep_case(case, workers, architecture, deadline=deadline, known=known, clock=clock, **options)
    finally:
        workers.close()


def missing_device(cases: Sequence[Case]) -> str | None:
    """Return why the cases cannot run on this machine, as "expected X, got Y", or None."""
    if not torch.cuda.is_available():
        return f"expected a CUDA device to measure on, got none (torch {torch.__version__}); see sparge doctor"
    if util.find_spec("triton") is None:
        return "expected Triton to be installed, got none; see sparge doctor"
    capability = torch.cuda.get_device_capability()
    if any(case.kernel == "hopper" for case in cases) and capability != (9, 0):
        return f"kernel 'hopper': expected compute capability 9.0, got {capability[0]}.{capability[1]}"
    return None
