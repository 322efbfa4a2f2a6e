"""Summarize the rows of an evaluation: one line per length and variant, with differences from the dense model."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparge.dispatch.reasons import Reason
from sparge.evaluate.intervals import Interval, mean_interval, share_interval
from sparge.evaluate.language.run import FIDELITY, NOISE, is_stock
from sparge.evaluate.rows import Row
from sparge.evaluate.timing import time_text
from sparge.evaluate.variants import is_oracle, kept_everything, share_computed


@dataclass(frozen=True)
class Score:
    """Scores of one kind of question.

    Attributes:
        values, dense_values: the score of each question, of the variant and of the dense model.
        nll, dense_nll: mean negative log-likelihood of the references.
    """

    values: tuple[float, ...]
    dense_values: tuple[float, ...]
    nll: float
    dense_nll: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def dense(self) -> float:
        return statistics.fmean(self.dense_values)

    @property
    def difference(self) -> Interval:
        return mean_interval([value - dense for value, dense in zip(self.values, self.dense_values, strict=True)])

    def text(self) -> str:
        """Return the number of right answers with its 95 % interval, or the mean of scores between 0 and 1.

        Example:
            >>> Score((1.0,) * 7 + (0.0,), (1.0,) * 8, 0.0, 0.0).text()
            '7 of 8 (53-98 %), dense 8'
        """
        if not {*self.values, *self.dense_values} <= {0.0, 1.0}:
            return f"{mean_interval(self.values).text(2)} (dense {self.dense:.2f})"
        right, count = round(sum(self.values)), len(self.values)
        low, high = (100 * end for end in share_interval(right, count))
        return f"{right} of {count} ({low:.0f}-{high:.0f} %), dense {sum(self.dense_values):.0f}"


@dataclass(frozen=True)
class Line:
    """A variant at one length.

    Attributes:
        density: share of the visible blocks that was computed (`share_computed`); None where nothing ran sparse.
        ran: "sparse", "partly sparse" or "dense", with the reason; "all blocks" and "as it is" for dense variants.
        kl, agreement: measures of the next-token distribution; None where they were not measured.
        rise: increase of the log-perplexity over the dense one.
        perplexity, dense_perplexity: over all windows.
        seconds: median time of the prefill of a window; None where it was not measured.
        speed_up: median of dense time over the variant's time, by window; None for oracles.
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
    seconds: float | None = None
    speed_up: float | None = None
    scores: dict[str, Score] = field(default_factory=dict)

    @property
    def is_sparse(self) -> bool:
        return "sparse" in self.ran


def lines_of(rows: Iterable[Row]) -> list[Line]:
    """Return a line for each length and variant, in the order they were measured."""
    rows = [row for row in rows if row["part"] != NOISE]
    dense = {_question(row): row for row in rows if is_stock(row)}
    rows = [row for row in rows if not is_stock(row)]
    places = dict.fromkeys((row["tokens"], row["variant"]) for row in rows)
    order = list(dict.fromkeys(variant for _, variant in places))
    return [
        _line(tokens, variant, [row for row in rows if (row["tokens"], row["variant"]) == (tokens, variant)], dense)
        for tokens, variant in sorted(places, key=lambda place: (place[0], order.index(place[1])))
    ]


def noise_of(rows: Iterable[Row]) -> Row | None:
    """Return the row that compares the dense model with itself on another kernel of torch."""
    return next((row for row in rows if row["part"] == NOISE), None)


def _question(row: Row) -> tuple[Any, ...]:
    """Return the fields that a variant's row and the dense one share."""
    return row["part"], row["tokens"], row["item"], row["content"]


def _line(tokens: int, variant: str, rows: Sequence[Row], dense: dict[Any, Row]) -> Line:
    measured = [row for row in rows if row["part"] == FIDELITY]
    tasks = dict.fromkeys(row["part"] for row in rows if row["part"] != FIDELITY)
    scores = {task: _score([row for row in rows if row["part"] == task], dense) for task in tasks}
    line = Line(tokens, variant, share_computed(measured or rows), how_it_ran(rows), scores=scores)
    if not measured:
        return line
    timed = [(row["seconds"], row["dense_seconds"]) for row in measured if "seconds" in row and not is_oracle(variant)]
    return replace(
        line,
        kl=mean_interval([row["kl"] for row in measured]),
        agreement=mean_interval([row["agreement"] for row in measured]),
        rise=mean_interval([row["nll"] - row["dense_nll"] for row in measured]),
        perplexity=_perplexity(measured, "nll"),
        dense_perplexity=_perplexity(measured, "dense_nll"),
        seconds=statistics.median(seconds for seconds, _ in timed) if timed else None,
        speed_up=statistics.median(dense / seconds for seconds, dense in timed) if timed else None,
    )


def _perplexity(rows: Sequence[Row], name: str) -> float:
    return math.exp(sum(row[name] for row in rows) / len(rows))


def how_it_ran(rows: Sequence[Row]) -> str:
    """Return whether calls went sparse, and the most frequent reason for those that did not."""
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
    stock = [dense[_question(row)] for row in rows]
    return Score(
        values=tuple(row["score"] for row in rows),
        dense_values=tuple(row["score"] for row in stock),
        nll=statistics.fmean(row["nll"] for row in rows),
        dense_nll=statistics.fmean(row["nll"] for row in stock),
    )


def risen(rise: Interval) -> Interval:
    """Return the relative increase of the perplexity, given the increase of its log.

    Example:
        >>> risen(Interval(0.6931472, None, 1)).text(0, percent=True)
        '+100 %'
    """
    half = None if rise.half is None else math.exp(rise.mean) * math.sinh(rise.half)
    return rise._replace(mean=math.expm1(rise.mean), half=half)


def cells(line: Line, *, tasks: Sequence[str]) -> list[tuple[str, str]]:
    """Return columns and texts of a line, for a terminal or a page."""
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
    shown += [(task, line.scores[task].text() if task in line.scores else "-") for task in tasks]
    shown.append(("prefill", "-" if line.seconds is None else time_text(line.seconds)))
    shown.append(("speed-up", "-" if line.speed_up is None else f"{line.speed_up:.2f}x"))
    return [*shown, ("ran", line.ran)]


def remarks(lines: Sequence[Line]) -> Iterator[str]:
    """Yield a remark for each variant whose figures do not show the effect of sparsity."""
    for line in lines:
        place = f"{line.variant}, {line.tokens} tokens"
        if line.ran.startswith("dense"):
            advice = " Longer texts go sparse; --force goes sparse at any length." if "crossover" in line.ran else ""
            yield f"{place}: nothing ran sparse ({line.ran}), so its figures do not show effects of sparsity.{advice}"
        elif line.is_sparse and (remark := kept_everything(line.density)):
            yield f"{place}: {remark}."


def explanations(rows: Sequence[Row]) -> Iterator[str]:
    """Yield notes that explain KL values and the size of rounding noise."""
    if not any(row["part"] == FIDELITY for row in rows):
        return
    yield (
        "A KL of 0.02 means that text written by the dense model has a 2 % higher perplexity under the variant. 0 is "
        "equal."
    )
    noise = noise_of(rows)
    if noise is None:
        return
    tokens, dtype = noise["tokens"], noise["run"].get("dtype", "")
    if noise["kl"] == 0:
        yield "Noise: not measured, because two kernels of torch gave equal outputs."
    else:
        size = f"{noise['kl']:.1g}" if noise["kl"] >= 1e-6 else "less than 0.000001"
        yield (
            f"Noise: the dense model on two kernels of torch differs by a KL of {size} ({dtype}, {tokens} tokens). "
            "Differences of this size are rounding."
        )
