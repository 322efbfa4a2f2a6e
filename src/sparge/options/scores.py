"""Scores: predictions of a block's importance. Scores are frozen values, checked when they are created."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sparge.options.rules import Selection


@dataclass(frozen=True)
class Score:
    """Prediction of a block's importance. A score's fields are numbers.

    Attributes:
        name: the string that selects the score with its defaults.
        exponent: exponent of the mean over a block's queries: their probabilities to this power are averaged, then
            the root is taken. 1 is the mean, 2 the root mean square.
    """

    name = ""
    exponent = 1

    @property
    def numbers(self) -> list[float]:
        """Its fields, as operators pass them."""
        return []

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Score:
        """Create the score with these `numbers`."""
        return cls(*numbers)


@dataclass(frozen=True)
class _Sampled(Score):
    """A score of some queries of a block, averaged by root mean square."""

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
    """Score sampled queries against the mean plus a quarter of the variance of every key block, with a softmax each.

    With the root mean square over the samples, blocks that only a few queries need stand out.

    Args:
        samples: queries sampled per block of 128.

    Example:
        >>> Moment().samples
        16
    """

    name = "moment"


@dataclass(frozen=True)
class Mean(Score):
    """The paper's score: the mean query of a block against the mean key of every block, one softmax.

    Example:
        >>> Mean()
        Mean()
    """

    name = "mean"


@dataclass(frozen=True)
class Spread(_Sampled):
    """Score for skipped blocks that are replaced by their mean: the error of the mean rather than the attention mass.

    Mean queries of parts of a block are scored against the mean plus a quarter of the variance of every key block, with
    a softmax each. The result is multiplied by that quarter: where the logits of a block hardly vary, its mean is
    accurate. Use it where spatial neighbors are in the same block (`sparge.masks.ordering`). For other tokens, "moment"
    is better.

    Args:
        samples: parts of a block of 128, a power of two.

    Example:
        >>> Spread().samples
        16
    """

    name = "spread"

    def __post_init__(self) -> None:
        if isinstance(self.samples, int) and self.samples not in (1, 2, 4, 8, 16, 32, 64, 128):
            raise ValueError(f"samples: expected a power of two in [1, 128], got {self.samples}")
        super().__post_init__()


SCORES: dict[str, type[Score]] = {score.name: score for score in (Moment, Mean, Spread)}


SPREAD_UNIT = 0.125
"""Factor of score "spread" after the root, which maps its range into the levels of a `Budget`."""


NEGLIGIBLE = 2.0**-60
"""Predicted probabilities below this count as 0: a score may average their squares, which float32 hardly represents."""
VARIANCE_SHARE = 0.25
"""Share of the variance of the logits in a key block that score "moment" adds to their mean.

One half would be correct for normally distributed logits. Real blocks are not normal: with one half, a few outlying
queries have too much influence (docs/lab/selection.md).
"""


_Entry = TypeVar("_Entry")


def entry_of(table: Mapping[Any, _Entry], value: Score | Selection, what: str) -> _Entry:
    """Return a backend's table entry for a score or a selection rule; ``what`` names the table in the error message.

    Raises:
        NotImplementedError: there is no entry.
    """
    found = table.get(type(value))
    if found is None:
        known = " or ".join(repr(kind.name) for kind in table)
        raise NotImplementedError(f"{what}: expected {known}, got {value.name!r}")
    return found
