"""Results of a sweep: the outcome of every candidate, the recommendation, and its text and JSON forms."""

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
"""Least relative gain for which another configuration is recommended; smaller differences are noise."""
NAMED_ALTERNATIVES = 3


@dataclass(frozen=True)
class Outcome:
    """The outcome of one candidate.

    Attributes:
        status: "right", "wrong", "failed", "timed out" or "not tried"; ``note`` holds the reason.
        error: relative L1, for attention against exact attention, for a stage against the chosen configuration.
        spills: registers per thread that are spilled to memory.
        shared: bytes of shared memory per program.
        ms: median of one launch; None where it was not timed.
        is_final: whether it was timed in the last round.
    """

    config: Any
    status: str
    note: str | None = None
    error: float | None = None
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    ms: float | None = None
    tops: float | None = None
    is_final: bool = False

    @property
    def is_untimed(self) -> bool:
        """Whether the result is right but was not timed."""
        return self.status == "right" and self.ms is None


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
        """The outcome to write into the table."""
        return recommend(self.outcomes, self.chosen)

    @property
    def missing(self) -> list[Outcome]:
        """The candidates that were not measured for lack of time."""
        return [each for each in self.outcomes if each.status == "not tried" or each.is_untimed]


def by_speed(outcome: Outcome) -> tuple[bool, float]:
    """Return a sort key: fastest first, untimed outcomes last."""
    return (outcome.ms is None, outcome.ms or 0.0)


def recommend(outcomes: Iterable[Outcome], chosen: Any) -> Outcome | None:
    """Return the fastest right outcome without more spills than the chosen one, if it is faster by `MARGIN`."""
    timed = [each for each in outcomes if each.status == "right" and each.ms is not None]
    timed = [each for each in timed if each.is_final] or timed
    current = next((each for each in timed if each.config == chosen), None)
    allowed = (current.spills or 0) if current else 0
    best = min((each for each in timed if (each.spills or 0) <= allowed), key=by_speed, default=None)
    if best is None or current is None or current.ms is None or best.ms is None:
        return best or current
    return best if best.ms < current.ms * (1 - MARGIN) else current


def speed(outcome: Outcome) -> str:
    """Return the speed as text: TOPS of attention, milliseconds of a stage."""
    if outcome.tops is not None:
        return f"{outcome.tops:.0f}"
    return "" if outcome.ms is None else f"{outcome.ms:.4f}"


def reason_for(sweep: Sweep) -> str:
    """Return the measured reason of the recommended row: its speed, and the speeds of the fastest alternatives.

    Alternatives are described by the fields they change; only the fastest of each set of fields is listed.
    """
    best = sweep.recommended
    if best is None:
        return ""
    fastest: dict[tuple[str, ...], Outcome] = {}
    for outcome in sweep.outcomes:  # the fastest first
        if outcome.status == "right" and outcome.ms is not None and outcome is not best:
            fastest.setdefault(tuple(differences(outcome.config, best.config)), outcome)
    unit = "" if best.tops is not None else " ms"
    named = []
    for outcome in list(fastest.values())[:NAMED_ALTERNATIVES]:
        spills = ", with spills" if (outcome.spills or 0) > (best.spills or 0) else ""
        named.append(f"{describe(differences(outcome.config, best.config))} {speed(outcome)}{spills}")
    return f"{speed(best)}{unit}" + (f"; {', '.join(named)}" if named else "")


def row_text(sweep: Sweep) -> str:
    """Return the row to paste into the table of configurations, with its reason as a comment."""
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
    """Return all candidates, fastest first, and the row to paste below them."""
    unit = "TOPS" if sweep.case.is_attention else "ms"
    lines = [["", unit, "error", "registers", "spills", "shared", "configuration", "result"]]
    for outcome in sweep.outcomes:
        is_best = sweep.recommended is not None and outcome.config == sweep.recommended.config
        mark = ("*" if is_best else "") + ("=" if outcome.config == sweep.chosen else "")
        numbers = (
            "" if number is None else str(number) for number in (outcome.registers, outcome.spills, outcome.shared)
        )
        error = "" if outcome.error is None else f"{outcome.error:.4f}"
        result = outcome.status if outcome.note is None else f"{outcome.status}: {outcome.note}"
        cells = ["" if number is None else str(number) for number in numbers]
        lines.append([mark, speed(outcome), error, *cells, as_code(outcome.config), result])
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    text = [f"{sweep.case}, N {sweep.case.tokens}, H {sweep.case.heads} (* recommended, = chosen now)"]
    for line in lines:
        cells = [
            cell.ljust(width) if place in (0, 6, 7) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    if sweep.problem is not None:
        text.append(f"Not swept: {sweep.problem}")
    if sweep.missing and sweep.problem is None:
        text.append(f"Missing, for want of time: {len(sweep.missing)} of {len(sweep.outcomes)} candidates")
    return "\n".join([*text, "", row_text(sweep)]).rstrip() + "\n"


def json_rows(sweep: Sweep) -> Iterator[Row]:
    """Return a row for each candidate, without the fields of the machine."""
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
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        is_same = all(row.get(name) == value for name, value in expected.items())
        if is_same and row["status"] in ("wrong", "failed", "timed out"):
            found.append(Outcome(kind(**row["config"]), row["status"], row["note"]))
    return found
