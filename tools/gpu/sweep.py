"""Derive rows of the tables of launch configurations: ``python tools/gpu/sweep.py CASE...`` (docs/configurations.md).

    1. check    each candidate runs once, in a process of its own, to check that it compiles and is correct
    2. first    correct candidates are timed in turns with the current configuration
    3. final    the fastest candidates are timed again for longer, in turns with the current configuration

A candidate with a wrong result, or with more spills than the current configuration, is listed but never recommended.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch
from sweep_cases import Case, as_code, candidates_of, current_config, differences, key_of, parse_case

from sparge.evaluate.machine import describe_gpu

WORKER = Path(__file__).with_name("sweep_worker.py")
CHECK_TIMEOUT_S = 240.0
"""Time limit of a process that checks one candidate or times several. It may also compile all stages of the call."""
CHECK_SHARE = 0.6
"""Share of a case's time that is used for checking; the rest is used for timing."""
FIRST_TURNS, FINAL_TURNS = 1, 5
FINALISTS = 5
MARGIN = 0.01
"""Smallest relative gain for which another configuration is recommended. Smaller differences are noise."""
NAMED_ALTERNATIVES = 3


@dataclass(frozen=True)
class Outcome:
    """The outcome of one candidate: "right", "wrong", "failed", "timed out" or "not tried", with the reason."""

    config: Any
    status: str
    note: str | None = None
    error: float | None = None
    """Relative L1 error: of attention against exact attention, of a stage against the current configuration."""
    registers: int | None = None
    spills: int | None = None
    """Registers per thread that are spilled to memory."""
    shared: int | None = None
    """Bytes of shared memory per program."""
    ms: float | None = None
    """Median of one launch; None if it was not timed."""
    tops: float | None = None
    is_final: bool = False
    """Whether it was timed in the final round."""

    @property
    def speed(self) -> str:
        """TOPS of an attention kernel, or milliseconds of a stage, as text."""
        return f"{self.tops:.0f}" if self.tops is not None else "" if self.ms is None else f"{self.ms:.4f}"


@dataclass(frozen=True)
class Sweep:
    """The outcomes of one case, fastest first."""

    case: Case
    key: Any
    current: Any
    outcomes: list[Outcome]


def run_worker(case: Case, configs: Sequence[Any], turns: int) -> dict[str, Any]:
    """Run a request in a new process. A crash or a hang is an answer with the status "failed" or "timed out"."""
    command = [sys.executable, str(WORKER)]
    request = pickle.dumps((case, list(configs), turns))
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"status": "timed out", "note": f"no answer within {CHECK_TIMEOUT_S:.0f} s"}
    if done.returncode or not done.stdout:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
        return {"status": "failed", "note": f"the process ended with status {done.returncode}: {last}"}
    return pickle.loads(done.stdout)


def check(case: Case, config: Any) -> Outcome:
    """Run a candidate once."""
    return Outcome(config, **{"status": "right", **run_worker(case, [config], 0)})


def time_in_turns(case: Case, outcomes: Sequence[Outcome], turns: int) -> list[Outcome]:
    """Return the outcomes with their times. If the process or its device fails, time each candidate alone."""
    answer = run_worker(case, [outcome.config for outcome in outcomes], turns)
    if len(outcomes) > 1 and answer.get("ms", [None])[0] is None:  # the first is the current configuration
        return [timed for outcome in outcomes for timed in time_in_turns(case, [outcome], turns)]
    if "ms" not in answer:
        return [replace(outcomes[0], status="failed", note=f"while it was timed: {answer['note']}")]
    timed = []
    for outcome, ms, problem in zip(outcomes, answer["ms"], answer["problems"], strict=True):
        tops = None if ms is None or answer["flop"] is None else answer["flop"] / ms / 1e9
        status = "failed" if ms is None else outcome.status
        timed.append(replace(outcome, status=status, note=problem, ms=ms, tops=tops))
    return timed


def sweep_case(case: Case, architecture: int, *, distance: int, jobs: int, deadline: float) -> Sweep:
    """Check and time all candidates of a case. No process starts after ``deadline``, a time of `time.monotonic`."""
    current = current_config(case, architecture)
    candidates = candidates_of(case, current, distance)
    now = time.monotonic()
    check_until = now + CHECK_SHARE * (deadline - now)

    def check_in_time(config: Any) -> Outcome:
        if time.monotonic() >= check_until:
            return Outcome(config, "not tried", "out of time")
        outcome = check(case, config)
        print(f"{case.name}: {as_code(config)}: {outcome.status} {outcome.note or ''}", file=sys.stderr)
        return outcome

    first = check(case, current)  # all others are compared with it
    if first.status != "right":
        return Sweep(case, key_of(case, architecture), current, [first])
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = {outcome.config: outcome for outcome in (first, *pool.map(check_in_time, candidates[1:]))}

    def time_group(group: Iterable[Outcome], turns: int, is_final: bool) -> None:
        if time.monotonic() < deadline:
            for timed in time_in_turns(case, [outcomes[current], *group], turns):
                outcomes[timed.config] = replace(timed, is_final=is_final and timed.ms is not None)

    right = [outcome for outcome in outcomes.values() if outcome.status == "right" and outcome.config != current]
    time_group(right, FIRST_TURNS, is_final=False)
    allowed = first.spills or 0
    fast = [each for each in outcomes.values() if each.ms and each.config != current and (each.spills or 0) <= allowed]
    if fast:
        time_group(sorted(fast, key=by_speed)[:FINALISTS], FINAL_TURNS, is_final=True)
    return Sweep(case, key_of(case, architecture), current, sorted(outcomes.values(), key=by_speed))


def by_speed(outcome: Outcome) -> tuple[bool, float]:
    """Return a sort key: fastest first, untimed outcomes last."""
    return (outcome.ms is None, outcome.ms or 0.0)


def recommend(outcomes: Iterable[Outcome], current: Any) -> Outcome | None:
    """Return the fastest correct outcome that has no more spills than the current configuration.

    If it is not faster by `MARGIN`, return the outcome of the current configuration.
    """
    timed = [outcome for outcome in outcomes if outcome.status == "right" and outcome.ms is not None]
    timed = [outcome for outcome in timed if outcome.is_final] or timed
    in_use = next((outcome for outcome in timed if outcome.config == current), None)
    if in_use is None:
        return None
    best = min((each for each in timed if (each.spills or 0) <= (in_use.spills or 0)), key=by_speed)
    return best if best.ms < in_use.ms * (1 - MARGIN) else in_use


def row_text(sweep: Sweep, best: Outcome) -> str:
    """Return the source code of a table row. Its comment has the speed and those of the fastest alternatives.

    Alternatives are described by the fields that differ. For each set of fields, only the fastest is listed.
    """
    fastest: dict[tuple[str, ...], str] = {}
    for outcome in sweep.outcomes:  # fastest first
        if outcome.status == "right" and outcome.ms is not None and outcome is not best:
            changes = differences(outcome.config, best.config)
            values = ", ".join(f"{name}={value}" for name, value in changes.items())
            spills = " and spills" if (outcome.spills or 0) > (best.spills or 0) else ""
            fastest.setdefault(tuple(changes), f"{outcome.speed} with {values}{spills}")
    speed = best.speed if best.tops is not None else f"{best.speed} ms"
    reason = "; ".join([speed, *list(fastest.values())[:NAMED_ALTERNATIVES]])
    comment = textwrap.fill(reason, 120, initial_indent="    # ", subsequent_indent="    # ")
    return f"{comment}\n    {as_code(sweep.key)}: {as_code(best.config)},"


def table_text(sweep: Sweep) -> str:
    """Return a table of all candidates, fastest first, followed by the source code of the recommended row."""
    case, best = sweep.case, recommend(sweep.outcomes, sweep.current)
    line = "{:2} {:>7} {:>7} {:>9} {:>6} {:>7}  {}  {}".format
    text = [f"{case.name}, N {case.tokens}, H {case.heads} (* recommended, = in use)"]
    unit = "TOPS" if case.is_attention else "ms"
    text.append(line("", unit, "error", "registers", "spills", "shared", "configuration", "result"))
    for outcome in sweep.outcomes:
        mark = "*" if outcome is best else ""
        mark += "=" if outcome.config == sweep.current else ""
        error = "" if outcome.error is None else f"{outcome.error:.4f}"
        numbers = (outcome.registers, outcome.spills, outcome.shared)
        resources = ["" if number is None else str(number) for number in numbers]
        result = outcome.status if outcome.note is None else f"{outcome.status}: {outcome.note}"
        text.append(line(mark, outcome.speed, error, *resources, as_code(outcome.config), result))
    untimed = [each for each in sweep.outcomes if each.status in ("right", "not tried") and each.ms is None]
    if untimed:
        text.append(f"Out of time: {len(untimed)} of {len(sweep.outcomes)} candidates were not measured")
    return "\n".join([*text, "", *([row_text(sweep, best)] if best else [])]).rstrip() + "\n"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="CASE", help="KERNEL[:QUANTIZATION][:HEAD_DIM][:VARIANT]")
    parser.add_argument("--distance", type=int, default=2, help="fields that may differ from the current configuration")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="total time")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)), help="processes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="append a row for each candidate")
    args = parser.parse_args(arguments)
    try:
        cases = [parse_case(text) for text in args.cases]
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error(f"expected a CUDA device, got none (torch {torch.__version__})")
    gpu = describe_gpu()
    print(gpu)
    major, minor = torch.cuda.get_device_capability()
    end = time.monotonic() + args.budget
    for index, case in enumerate(cases):
        now = time.monotonic()
        deadline = now + (end - now) / (len(cases) - index)
        sweep = sweep_case(case, 10 * major + minor, distance=args.distance, jobs=args.jobs, deadline=deadline)
        print(f"\n{table_text(sweep)}", flush=True)
        if args.json is not None:
            best = recommend(sweep.outcomes, sweep.current)
            with args.json.open("a", encoding="utf-8") as lines:
                for outcome in sweep.outcomes:
                    marks = {"is_current": outcome.config == sweep.current, "is_recommended": outcome is best}
                    row = {"suite": "sweep", **asdict(case), **marks, **asdict(outcome), **asdict(gpu)}
                    lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
