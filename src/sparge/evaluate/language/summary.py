"""Rows of an evaluation as figures: one line for each length and variant, differences paired with the dense model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparge.dispatch.reasons import Reason
from sparge.evaluate.intervals import Interval, mean_interval
from sparge.evaluate.language.run import FIDELITY, is_stock
from sparge.evaluate.rows import Row
from sparge.evaluate.variants import kept_everything, share_computed


@dataclass(frozen=True)
class Score:
    """Of one kind of question: the variant's mean, the dense one's, and the mean of the differences."""

    mean: float
    dense: float
    difference: Interval
    nll: float
    dense_nll: float


@dataclass(frozen=True)
class Line:
    """A variant at one length.

    Attributes:
        density: share of the visible blocks that was computed (`share_computed`); None where nothing ran sparse.
        ran: "sparse", "partly sparse" or "dense", and why; "all blocks" and "as it is" for dense variants.
        kl, agreement: of the next-token distribution; None where it was not measured.
        rise: of the log-perplexity above the dense one.
        perplexity, dense_perplexity: over all windows.
        scores: by kind of question.
    """

    tokens: int
    variant: str
    density: float | None
    ran: str
    kl: Interval | None = None
    agreement: Interval | None = None
    rise: Interval | None = None
    perplexity: float | None = None
    dense_perplexity: float | None = None
    scores: dict[str, Score] = field(default_factory=dict)


def lines_of(rows: Iterable[Row]) -> list[Line]:
    """A line for each length and variant, in the order they were measured."""
    rows = list(rows)
    places = dict.fromkeys((row["tokens"], row["variant"]) for row in rows if not is_stock(row))
    dense = {_question(row): row for row in rows if is_stock(row)}
    rows = [row for row in rows if not is_stock(row)]
    order = list(dict.fromkeys(variant for _, variant in places))
    return [
        _line(tokens, variant, [row for row in rows if (row["tokens"], row["variant"]) == (tokens, variant)], dense)
        for tokens, variant in sorted(places, key=lambda place: (place[0], order.index(place[1])))
    ]


def _question(row: Row) -> tuple[Any, ...]:
    """What a variant's row and the dense one have in common."""
    return row["part"], row["tokens"], row["item"], row["content"]


def _line(tokens: int, variant: str, rows: Sequence[Row], dense: dict[Any, Row]) -> Line:
    measured = [row for row in rows if row["part"] == FIDELITY]
    tasks = dict.fromkeys(row["part"] for row in rows if row["part"] != FIDELITY)
    scores = {task: _score([row for row in rows if row["part"] == task], dense) for task in tasks}
    line = Line(tokens, variant, share_computed(measured or rows), how_it_ran(rows), scores=scores)
    if not measured:
        return line
    rises = [row["nll"] - row["dense_nll"] for row in measured]
    return Line(
        tokens,
        variant,
        line.density,
        line.ran,
        kl=mean_interval([row["kl"] for row in measured]),
        agreement=mean_interval([row["agreement"] for row in measured]),
        rise=mean_interval(rises),
        perplexity=_perplexity(measured, "nll"),
        dense_perplexity=_perplexity(measured, "dense_nll"),
        scores=scores,
    )


def _perplexity(rows: Sequence[Row], name: str) -> float:
    return math.exp(sum(row[name] for row in rows) / len(rows))


def how_it_ran(rows: Sequence[Row]) -> str:
    """Whether calls went sparse, and the most frequent reason for those that did not."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["reasons"])
    sparse = any(reason.startswith("sparse") for reason in counts)
    asked = 0 if sparse else counts.pop(f"dense: {Reason.ASKED.value}", 0)
    dense = [reason for reason, _ in counts.most_common() if reason.startswith("dense")]
    reasons = [reason.removeprefix("dense").lstrip(": ") for reason in dense]
    if not reasons:
        return "sparse" if sparse else "all blocks" if asked else "as it is"
    return f"partly sparse ({reasons[0]})" if sparse or asked else f"dense ({reasons[0]})"


def _score(rows: Sequence[Row], dense: dict[Any, Row]) -> Score:
    pairs = [(row, dense[_question(row)]) for row in rows]
    count = len(pairs)
    return Score(
        mean=sum(row["score"] for row, _ in pairs) / count,
        dense=sum(stock["score"] for _, stock in pairs) / count,
        difference=mean_interval([row["score"] - stock["score"] for row, stock in pairs]),
        nll=sum(row["nll"] for row, _ in pairs) / count,
        dense_nll=sum(stock["nll"] for _, stock in pairs) / count,
    )


def risen(rise: Interval) -> Interval:
    """A rise of the log-perplexity as a share of the perplexity.

    Example:
        >>> risen(Interval(0.6931472, None, 1)).text(0, percent=True)
        '+100 %'
    """
    half = None if rise.half is None else math.exp(rise.mean) * math.sinh(rise.half)
    return rise._replace(mean=math.expm1(rise.mean), half=half)


def cells(line: Line, *, tasks: Sequence[str]) -> list[tuple[str, str]]:
    """Columns and texts of a line, for a terminal or a page."""
    shown = [("variant", line.variant), ("density", "-" if line.density is None else f"{line.density:.3f}")]
    if line.kl is not None and line.agreement is not None and line.rise is not None:
        shown += [
            ("KL", line.kl.text(4)),
            ("same token", f"{100 * line.agreement.mean:.1f} %"),
            ("perplexity", f"{line.perplexity:.3f}"),
            ("against dense", risen(line.rise).text(2, percent=True)),
        ]
    else:
        shown += [(name, "-") for name in ("KL", "same token", "perplexity", "against dense")]
    for task in tasks:
        score = line.scores.get(task)
        shown.append((task, "-" if score is None else f"{score.mean:.2f} (dense {score.dense:.2f})"))
    return [*shown, ("ran", line.ran)]


def remarks(lines: Sequence[Line]) -> Iterator[str]:
    """What a reader of the table must know."""
    for line in lines:
        place = f"{line.variant}, {line.tokens} tokens"
        if line.ran.startswith("dense"):
            told = " Longer texts go sparse; --force does it anyway." if "crossover" in line.ran else ""
            yield f"{place}: nothing ran sparse ({line.ran}), so its figures say nothing about sparsity.{told}"
        elif "sparse" in line.ran and (told := kept_everything(line.density)):
            yield f"{place}: {told}."
