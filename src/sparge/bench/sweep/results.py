"""Results of a sweep: the outcome of every candidate, the recommendation, and their output as text and JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparge.bench.cases import Row
from sparge.bench.sweep.cases import Case, as_code, chosen_config, describe, differences

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
    """Relative L1 error: of attention against exact attention, of a stage against the chosen configuration."""
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
    def is_timed(self) -> bool:
        return self.status == "right" and self.ms is not None

    @property
    def is_missing(self) -> bool:
        """Whether the time limit ended before the candidate was run and timed."""
        return self.status == "not tried" or (self.status == "right" and self.ms is None)

    @property
    def speed(self) -> str:
        """TOPS of an attention kernel, or milliseconds of a stage, as text."""
        return f"{self.tops:.0f}" if self.tops is not None else "" if self.ms is None else f"{self.ms:.4f}"


@dataclass(frozen=True)
class Sweep:
    """The outcomes of one case, fastest first, and the recommendation derived from them."""

    case: Case
    key: Any
    chosen: Any
    outcomes: list[Outcome]
    problem: str | None = None

    @property
    def recommended(self) -> Outcome | None:
        """The outcome whose configuration belongs in the table."""
        return recommend(self.outcomes, self.chosen)


def by_speed(outcome: Outcome) -> tuple[bool, float]:
    """Return a sort key: fastest first, untimed outcomes last."""
    return (outcome.ms is None, outcome.ms or 0.0)


def recommend(outcomes: Iterable[Outcome], chosen: Any) -> Outcome | None:
    """Return the fastest correct outcome that has no more spills than the chosen configuration.

    If it is not faster by `MARGIN`, return the outcome of the chosen configuration.
    """
    timed = [each for each in outcomes if each.is_timed]
    timed = [each for each in timed if each.is_final] or timed
    current = next((each for each in timed if each.config == chosen), None)
    allowed = (current.spills or 0) if current else 0
    best = min((each for each in timed if (each.spills or 0) <= allowed), key=by_speed, default=None)
    if best is None or current is None:
        return best or current
    assert best.ms is not None and current.ms is not None
    return best if best.ms < current.ms * (1 - MARGIN) else current


def reason_for(sweep: Sweep) -> str:
    """Return the measured reason for the recommended row: its speed, and the speeds of the fastest alternatives.

    Alternatives are described by the fields that differ. For each set of fields, only the fastest is listed.
    """
    best = sweep.recommended
    if best is None:
        return ""
    fastest: dict[tuple[str, ...], str] = {}
    for outcome in sweep.outcomes:  # fastest first
        if outcome.is_timed and outcome is not best:
            changes = differences(outcome.config, best.config)
            spills = " and spills" if (outcome.spills or 0) > (best.spills or 0) else ""
            fastest.setdefault(tuple(changes), f"{outcome.speed} with {describe(changes)}{spills}")
    unit = "" if best.tops is not None else " ms"
    return "; ".join([best.speed + unit, *list(fastest.values())[:NAMED_ALTERNATIVES]])


def row_text(sweep: Sweep) -> str:
    """Return the source code of the row for the table of configurations, with its reason as a comment."""
    if sweep.recommended is None:
        return ""
    comment = textwrap.fill(reason_for(sweep), 120, initial_indent="    # ", subsequent_indent="    # ")
    return f"{comment}\n    {as_code(sweep.key)}: {as_code(sweep.recommended.config)},"


def one_line(outcome: Outcome) -> str:
    """Return an outcome as one line of progress."""
    if outcome.status != "right":
        return f"{as_code(outcome.config)}: {outcome.status}, {outcome.note}"
    error = "" if outcome.error is None else f", error {outcome.error:.4f}"
    return f"{as_code(outcome.config)}: right{error}, {outcome.registers} registers, {outcome.spills} spills"


def table_text(sweep: Sweep) -> str:
    """Return a table of all candidates, fastest first, followed by the source code of the recommended row."""
    unit, best = "TOPS" if sweep.case.is_attention else "ms", sweep.recommended
    line = "{:2} {:>7} {:>7} {:>9} {:>6} {:>7}  {}  {}".format
    text = [f"{sweep.case}, N {sweep.case.tokens}, H {sweep.case.heads} (* recommended, = in use)"]
    text.append(line("", unit, "error", "registers", "spills", "shared", "configuration", "result"))
    for outcome in sweep.outcomes:
        mark = "*" if best is not None and outcome.config == best.config else ""
        mark += "=" if outcome.config == sweep.chosen else ""
        error = "" if outcome.error is None else f"{outcome.error:.4f}"
        numbers = (outcome.registers, outcome.spills, outcome.shared)
        resources = ["" if number is None else str(number) for number in numbers]
        result = outcome.status if outcome.note is None else f"{outcome.status}: {outcome.note}"
        text.append(line(mark, outcome.speed, error, *resources, as_code(outcome.config), result))
    if sweep.problem is not None:
        text.append(f"Not swept: {sweep.problem}")
    elif missing := sum(outcome.is_missing for outcome in sweep.outcomes):
        text.append(f"Out of time: {missing} of {len(sweep.outcomes)} candidates were not measured")
    return "\n".join([*text, "", row_text(sweep)]).rstrip() + "\n"


def json_rows(sweep: Sweep) -> Iterator[Row]:
    """Yield a row for each candidate, without the fields of the machine."""
    for outcome in sweep.outcomes:
        is_best = sweep.recommended is not None and outcome.config == sweep.recommended.config
        yield {
            "suite": "sweep",
            **asdict(sweep.case),
            "is_chosen": outcome.config == sweep.chosen,
            "is_recommended": is_best,
            **asdict(outcome),
            **({"row": row_text(sweep)} if is_best else {}),
        }


def known_failures(path: Path, case: Case, architecture: int, machine: Row) -> list[Outcome]:
    """Return the failures of an earlier run on the same machine with the same versions and commit."""
    if not path.exists():
        return []
    kind, expected = type(chosen_config(case, architecture)), {"suite": "sweep", **asdict(case), **machine}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Outcome(kind(**row["config"]), row["status"], row["note"])
        for row in rows
        if expected.items() <= row.items() and row["status"] in ("wrong", "failed", "timed out")
    ]
