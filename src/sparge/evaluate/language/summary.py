"""Summarize the rows of an evaluation: one line per length and variant, with differences from the dense model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparge.evaluate import report
from sparge.evaluate.intervals import Interval, mean_interval, share_interval
from sparge.evaluate.language.run import FIDELITY, NOISE, is_dense_model
from sparge.evaluate.rows import Row
from sparge.evaluate.timing import time_text
from sparge.evaluate.variants import is_oracle


@dataclass(frozen=True)
class Score:
    """Scores, from 0 to 1, of a variant and of the dense model on the questions of one task."""

    values: tuple[float, ...]
    dense_values: tuple[float, ...]
    nll: float  # mean negative log-likelihood of the reference answers
    dense_nll: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def dense(self) -> float:
        return statistics.fmean(self.dense_values)

    def text(self) -> str:
        """Return the number of correct answers with its 95 % interval, or the mean of scores between 0 and 1.

        Example:
            >>> Score((1.0,) * 7 + (0.0,), (1.0,) * 8, 0.0, 0.0).text()
            '7 of 8 (53-98 %), dense 8'
        """
        if not {*self.values, *self.dense_values} <= {0.0, 1.0}:
            return f"{mean_interval(self.values).text(2)} (dense {self.dense:.2f})"
        correct, count = round(sum(self.values)), len(self.values)
        low, high = (100 * end for end in share_interval(correct, count))
        return f"{correct} of {count} ({low:.0f}-{high:.0f} %), dense {sum(self.dense_values):.0f}"


@dataclass(frozen=True, kw_only=True)
class Line(report.Line):
    """A variant at one length. Values that were not measured are None."""

    tokens: int
    kl: Interval | None = None
    agreement: Interval | None = None
    rise: Interval | None = None  # increase of the log-perplexity over the dense model's
    perplexity: float | None = None  # over all windows
    dense_perplexity: float | None = None
    seconds: float | None = None  # median prefill time of a window
    speed_up: float | None = None  # median of dense time divided by the variant's time; None for oracles
    scores: dict[str, Score] = field(default_factory=dict)  # by task


def lines_of(rows: Iterable[Row]) -> list[Line]:
    """Return a line for each length and variant, in the order they were measured."""
    rows = [row for row in rows if row["part"] != NOISE]
    dense = {_question(row): row for row in rows if is_dense_model(row)}
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        if not is_dense_model(row):
            groups.setdefault((row["tokens"], row["variant"]), []).append(row)
    order = list(dict.fromkeys(variant for _, variant in groups))
    keys = sorted(groups, key=lambda key: (key[0], order.index(key[1])))
    return [_line(*key, groups[key], dense) for key in keys]


def noise_of(rows: Iterable[Row]) -> Row | None:
    """Return the row that compares the dense model with itself on another kernel of torch, or None."""
    return next((row for row in rows if row["part"] == NOISE), None)


def _question(row: Row) -> tuple[Any, ...]:
    """Return the fields that a variant's row has in common with the dense row of the same question."""
    return row["part"], row["tokens"], row["item"], row["content"]


def _line(tokens: int, variant: str, rows: Sequence[Row], dense: dict[Any, Row]) -> Line:
    windows = [row for row in rows if row["part"] == FIDELITY]
    tasks = dict.fromkeys(row["part"] for row in rows if row["part"] != FIDELITY)
    values: dict[str, Any] = {"tokens": tokens}
    values["scores"] = {task: _score([row for row in rows if row["part"] == task], dense) for task in tasks}
    if windows:
        values["kl"] = mean_interval([row["kl"] for row in windows])
        values["agreement"] = mean_interval([row["agreement"] for row in windows])
        values["rise"] = mean_interval([row["nll"] - row["dense_nll"] for row in windows])
        values["perplexity"] = math.exp(statistics.fmean(row["nll"] for row in windows))
        values["dense_perplexity"] = math.exp(statistics.fmean(row["dense_nll"] for row in windows))
        if not is_oracle(variant):
            values["seconds"] = statistics.median(row["seconds"] for row in windows)
            values["speed_up"] = statistics.median(row["dense_seconds"] / row["seconds"] for row in windows)
    return Line(variant, report.how_it_ran(rows), report.share_computed(windows or rows), **values)


def _score(rows: Sequence[Row], dense: dict[Any, Row]) -> Score:
    dense_rows = [dense[_question(row)] for row in rows]
    return Score(
        values=tuple(row["score"] for row in rows),
        dense_values=tuple(row["score"] for row in dense_rows),
        nll=statistics.fmean(row["nll"] for row in rows),
        dense_nll=statistics.fmean(row["nll"] for row in dense_rows),
    )


def perplexity_increase(rise: Interval) -> Interval:
    """Return the relative increase of the perplexity, given the increase of the log-perplexity.

    Example:
        >>> perplexity_increase(Interval(0.6931472, None, 1)).text(0, percent=True)
        '+100 %'
    """
    half = None if rise.half is None else math.exp(rise.mean) * math.sinh(rise.half)
    return rise._replace(mean=math.expm1(rise.mean), half=half)


def table_of(lines: Sequence[Line]) -> list[report.Cells]:
    """Return the table of one length, for the terminal and the page."""
    columns: dict[str, Any] = {
        "variant": lambda line: line.variant,
        "density": lambda line: line.density is not None and f"{line.density:.3f}",
        "KL": lambda line: line.kl and line.kl.text(4),
        "same token": lambda line: line.agreement and f"{100 * line.agreement.mean:.1f} %",
        "perplexity": lambda line: line.perplexity and f"{line.perplexity:.3f}",
        "against dense": lambda line: line.rise and perplexity_increase(line.rise).text(2, percent=True),
    }
    for task in dict.fromkeys(task for line in lines for task in line.scores):
        columns[task] = lambda line, task=task: task in line.scores and line.scores[task].text()
    columns |= {
        "prefill": lambda line: line.seconds and time_text(line.seconds),
        "speed-up": lambda line: line.speed_up and f"{line.speed_up:.2f}x",
        "ran": lambda line: line.ran,
    }
    return report.cells_of(lines, columns)


def by_length(lines: Sequence[Line], source: str) -> Iterator[tuple[str, list[Line]]]:
    """Yield a title and the lines of each length; ``source`` describes the text."""
    for tokens in sorted({line.tokens for line in lines}):
        group = [line for line in lines if line.tokens == tokens]
        title, first = f"{tokens} tokens", group[0]
        if first.kl is not None:
            windows = f"{first.kl.values} window{'s' * (first.kl.values != 1)}"
            title += f", {windows} of {source}, dense perplexity {first.dense_perplexity:.3f}"
        yield title, group


def remarks(lines: Sequence[Line]) -> Iterator[str]:
    """Yield a remark for each variant whose results do not show the effect of sparsity."""
    for line in lines:
        remark = report.sparsity_remark(line, "Longer texts")
        if remark and line.ran != "dense":
            yield f"{line.variant}, {line.tokens} tokens: {remark}"


def explanations(rows: Sequence[Row]) -> Iterator[str]:
    """Yield notes that explain KL values and the size of rounding noise."""
    if not any(row["part"] == FIDELITY for row in rows):
        return
    yield (
        "A KL of 0.02 means that text written by the dense model has a 2 % higher perplexity under the variant. A KL "
        "of 0 means equal distributions."
    )
    noise = noise_of(rows)
    if noise is None:
        return
    tokens, dtype = noise["tokens"], noise["run"].get("dtype", "")
    if noise["kl"] == 0:
        yield "Noise: none, because two kernels of torch gave equal outputs."
    else:
        size = f"{noise['kl']:.1g}" if noise["kl"] >= 1e-6 else "less than 0.000001"
        yield (
            f"Noise: the dense model on two kernels of torch differs by a KL of {size} ({dtype}, {tokens} tokens). "
            "Differences of this size are rounding noise."
        )
