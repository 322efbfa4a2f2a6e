"""Scores, which predict the importance of blocks. Scores are frozen values, checked when they are created."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sparge.options.rules import Selection


@dataclass(frozen=True)
class Score:
    """Base class of the scores. The fields of a score are numbers.

    Attributes:
        name: the name of the score with its default fields.
        exponent: exponent p of the power mean over the queries of a block: 1 is the mean, 2 the root mean square.
    """

    name = ""
    exponent = 1

    @property
    def numbers(self) -> list[float]:
        """The fields of the score, as operator arguments."""
        return []

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Score:
        """Create a score from its `numbers`."""
        return cls(*numbers)


@dataclass(frozen=True)
class _Sampled(Score):
    """A score that averages sampled queries of a block by root mean square."""

    exponent = 2

    samples: int = 16

    def __post_init__(self) -> None:
        if isinstance(self.samples, bool) or not isinstance(self.samples, int):
            raise TypeError(f"samples: expected an int, got {type(self.samples).__name__}")
        if not 1 <= self.samples <= 128:
            raise ValueError(f"samples: expected a value in [1, 128], got {self.samples}")

    @property
    def numbers(self) -> list[float]:
        return [float(self.samples)]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> _Sampled:
        return cls(int(numbers[0]))


@dataclass(frozen=True)
class Moment(_Sampled):
    """Score key blocks by the mean plus a quarter of the variance of their logits, with a softmax per sampled query.

    The root mean square over the samples gives weight to blocks that only a few queries need.

    Args:
        samples: number of sampled queries per block of 128. Default: 16.
    """

    name = "moment"


@dataclass(frozen=True)
class Mean(Score):
    """The paper's score: one softmax over the logits of the mean query of a block and the mean keys of all blocks."""

    name = "mean"


@dataclass(frozen=True)
class Spread(_Sampled):
    """A score for ``skipped="mean"``: it predicts the error of replacing a block by its mean, not the attention mass.

    Each query block is divided into parts, which are represented by their mean queries. As in `Moment`, key blocks are
    scored by the mean plus a quarter of the variance of their logits, with a softmax per part. The result is multiplied
    by a quarter of the variance, because the mean of a block is accurate if its logits hardly vary. Use this score if
    spatial neighbors are in the same block (`sparge.masks.ordering`). For other tokens, "moment" is better.

    Args:
        samples: number of parts per block of 128, a power of two. Default: 16.
    """

    name = "spread"

    def __post_init__(self) -> None:
        if isinstance(self.samples, int) and self.samples not in (1, 2, 4, 8, 16, 32, 64, 128):
            raise ValueError(f"samples: expected a power of two in [1, 128], got {self.samples}")
        super().__post_init__()


SCORES: dict[str, type[Score]] = {score.name: score for score in (Moment, Mean, Spread)}
SPREAD_UNIT = 0.125
"""Factor on score "spread" after the root, which maps its range to the levels of a `Budget`."""
NEGLIGIBLE = 2.0**-60
"""Predicted probabilities below this count as 0, because a score may average their squares in float32."""
VARIANCE_SHARE = 0.25
"""Factor on the variance of the logits in a key block, which scores "moment" and "spread" add to the mean.

0.5 would be exact for normally distributed logits. Logits of real blocks are not normally distributed: with 0.5, a few
outlier queries have too much influence (docs/lab/selection.md).
"""
_Entry = TypeVar("_Entry")


def entry_of(table: Mapping[Any, _Entry], value: Score | Selection, table_name: str) -> _Entry:
    """Return the entry of a score or selection rule in a table of a backend.

    Args:
        table: entries by type.
        table_name: name of the table, for the error message.

    Raises:
        NotImplementedError: there is no entry.
    """
    entry = table.get(type(value))
    if entry is None:
        known = " or ".join(repr(kind.name) for kind in table)
        raise NotImplementedError(f"{table_name}: expected {known}, got {value.name!r}")
    return entry
