"""Scores: how the worth of a block is predicted. Frozen values, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sparge.options.rules import Selection


@dataclass(frozen=True)
class Score:
    """How the worth of a block is predicted. A score's fields are numbers.

    Attributes:
        name: what a caller may pass instead of the value, for its defaults.
        exponent: of the mean over a block's queries: their probabilities to this power are averaged, and the root is
            taken. 1 is the mean, 2 the root mean square.
    """

    name = ""
    exponent = 1

    @property
    def numbers(self) -> list[float]:
        """Its fields, as operators carry them."""
        return []

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Score:
        """The score with these `numbers`."""
        return cls(*numbers)


@dataclass(frozen=True)
class _Sampled(Score):
    """A score that looks at some queries of a block, and takes the root of their mean square."""

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
    """Score: sampled queries against mean plus a quarter of the variance of every key block, a softmax each.

    Then the root of their mean square: a block that a few queries need stands out.

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
    """Score for blocks whose means stand for them: how wrong the mean would be, not how much attention they get.

    Mean queries of parts of a block against mean plus a quarter of the variance of every key block, a softmax each,
    times that quarter: where the logits of a block hardly differ its mean says all. For neighbours in space that lie
    in the same block (`sparge.masks.ordering`); where blocks are mixed, "moment" is better.

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
"""Score "spread" is this times the root of what it averages, which brings its range into the levels of a `Budget`."""


NEGLIGIBLE = 2.0**-60
"""A predicted probability below this counts as 0: its square, which a score may average, is hardly a float32."""
VARIANCE_SHARE = 0.25
"""What score "moment" adds of the variance of the logits in a key block to their mean.

Half of it would be right for normally distributed logits. Those of a block are not: with half, a few queries far from
the rest decide too much (docs/lab/selection.md).
"""


_Entry = TypeVar("_Entry")


def entry_of(table: Mapping[Any, _Entry], value: Score | Selection, what: str) -> _Entry:
    """What a backend's table has for a score or a selection rule; ``what`` is that, and where.

    Raises:
        NotImplementedError: it has nothing.
    """
    found = table.get(type(value))
    if found is None:
        known = " or ".join(repr(kind.name) for kind in table)
        raise NotImplementedError(f"{what}: expected {known}, got {value.name!r}")
    return found
