"""95 % confidence intervals: Student's t for means, the Wilson score interval for the share of correct answers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 0.975 quantiles of Student's t for 1, 2, ... degrees of freedom."""


class Interval(NamedTuple):
    """A mean, half the width of its interval (None for a single value), and the number of values."""

    mean: float
    half: float | None
    values: int

    def text(self, digits: int = 3, percent: bool = False) -> str:
        """Return the mean and half of the interval's width, for example "0.012 ± 0.004".

        Example:
            >>> Interval(0.0123, 0.004, 5).text()
            '0.012 ± 0.004'
            >>> Interval(0.0123, None, 1).text(1, percent=True)
            '+1.2 %'
            >>> Interval(-1e-7, None, 1).text()
            '0.000'
        """
        factor, sign, unit = (100, "+", " %") if percent else (1, "", "")
        half = "" if self.half is None else f" ± {factor * self.half:.{digits}f}"
        mean = round(factor * self.mean, digits) + 0.0  # no minus before zeros
        return f"{mean:{sign}.{digits}f}{half}{unit}"


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of values and its interval. For paired measurements, pass the differences.

    Example:
        >>> mean_interval([1.0, 2.0, 3.0])
        Interval(mean=2.0, half=2.484..., values=3)
    """
    if not values:
        raise ValueError("expected one value or more, got none")
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Interval(mean, None, 1)
    degrees = count - 1
    quantile = QUANTILES[degrees - 1] if degrees <= len(QUANTILES) else 1.96 + 2.5 / degrees
    return Interval(mean, quantile * statistics.stdev(values) / math.sqrt(count), count)


def share_interval(hits: float, count: int) -> tuple[float, float]:
    """Return the Wilson score interval of a rate, given the numbers of hits and of trials.

    Example:
        >>> [round(end, 2) for end in share_interval(8, 8)]
        [0.68, 1.0]
    """
    square = 1.96**2
    middle = (hits + square / 2) / (count + square)
    half = 1.96 / (count + square) * math.sqrt(hits * (count - hits) / count + square / 4)
    return max(middle - half, 0.0), min(middle + half, 1.0)
