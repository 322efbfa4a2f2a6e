"""What a caller may choose: frozen values, range-checked once, when they are made.

Selection rules and scores are data: `SELECTIONS` and `SCORES` list them by name. The name and the numbers of one are
all that operators and kernels get (`ops`); what it means stands in `reference`, in the table of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

PerHead: TypeAlias = float | Tensor
"""One number for all heads, or a one-dimensional tensor with one number per query head."""

Layout = Literal["HND", "NHD"]
Quantization = Literal["auto", "none", "int8_fp8", "int8_fp8_fast", "int8_fp16"]
QUANTIZATIONS: tuple[str, ...] = ("auto", "none", "int8_fp8", "int8_fp8_fast", "int8_fp16")
RENAMED_QUANTIZATIONS = {"int8_fp8_codes": "int8_fp8_fast"}
"""Names of earlier versions, which are still accepted."""
OnUnsupported = Literal["raise", "warn", "dense"]
Skipped = Literal["auto", "mean", "drop"]
ScoreName = Literal["moment", "mean", "spread"]

DEFAULT_TOPK = 0.5
DEFAULT_MIN_BLOCKS = 16
GUARANTEED = 0.5
"""What a row keeps of an equal share of a `Budget` whatever the other rows need."""
BUDGET_BITS, BUDGET_LEVELS = 20, 128
"""A `Budget` compares probabilities of different rows by levels, of an eighth of an octave each: by what is left of a
float32 without so many bits, and of that the highest levels below `budget_top`. Far finer than any score is."""
ROUNDING_GUARD = 1 - 2.0**-22
"""Lowers a share of blocks before it is rounded up: rounding (.1 in float32 times 1280) must not add a block."""


def check_range(name: str, value: PerHead, low: float, high: float, interval: str) -> None:
    """Raise unless every number lies in the interval, written for people as ``interval``."""
    if isinstance(value, Tensor):
        if value.ndim != 1 or not value.is_floating_point() or value.numel() == 0:
            raise TypeError(
                f"{name}: expected a number or a one-dimensional floating-point tensor with one entry per query "
                f"head, got a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
            )
        if torch.compiler.is_compiling() or value.device.type != "cpu":
            return  # reading values back would break the graph, or wait for the device
        numbers = value.detach().double().tolist()
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number or a per-head tensor, got {type(value).__name__}")
    else:
        numbers = [float(value)]
    open_low, open_high = interval.startswith("("), interval.endswith(")")
    for number in numbers:
        above = number > low if open_low else number >= low
        below = number < high if open_high else number <= high
        if not (above and below):  # NaN fails both comparisons
            raise ValueError(f"{name}: expected a value in {interval}, got {number}")


def _check_flag(name: str, value: bool | None) -> None:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name}: expected True, False or None (only when causal), got {value!r}")


@dataclass(frozen=True)
class Selection:
    """What all selection rules share: the floor, and the blocks that are kept whatever their score.

    Attributes:
        name: of the rule, in operators and kernels.
        amount_field: the field that says how much is kept, one number or one per head.
        is_call_wide: all rows of a batch element share one amount; else each row is chosen from by itself.
    """

    name = ""
    amount_field = ""
    is_call_wide = False

    min_blocks: int = field(default=DEFAULT_MIN_BLOCKS, kw_only=True)
    similarity_threshold: PerHead | None = field(default=None, kw_only=True)
    pv_threshold: PerHead | None = field(default=None, kw_only=True)
    sink: bool | None = field(default=None, kw_only=True)
    diagonal: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.min_blocks, bool) or not isinstance(self.min_blocks, int):
            raise TypeError(f"min_blocks: expected an int, got {type(self.min_blocks).__name__}")
        if self.min_blocks < 0:
            raise ValueError(f"min_blocks: expected 0 or more, got {self.min_blocks}")
        if self.similarity_threshold is not None:
            check_range("similarity_threshold", self.similarity_threshold, 0.0, 1.0, "[0, 1]")
        if self.pv_threshold is not None:
            check_pv_threshold(self.pv_threshold)
        _check_flag("sink", self.sink)
        _check_flag("diagonal", self.diagonal)

    @property
    def amount(self) -> PerHead:
        """How much is kept."""
        value: PerHead = getattr(self, self.amount_field)
        return value

    def with_amount(self, amount: float) -> Selection:
        """The same rule with another amount.

        Example:
            >>> TopK(0.5, min_blocks=4).with_amount(0.25)
            TopK(min_blocks=4, similarity_threshold=None, pv_threshold=None, sink=None, diagonal=None, topk=0.25)
        """
        fields: dict[str, Any] = {self.amount_field: amount}
        return replace(self, **fields)

    @property
    def is_per_head(self) -> bool:
        """Whether any of its numbers is a tensor with an entry per head."""
        return any(isinstance(value, Tensor) for value in vars(self).values())

    def keeps_sink(self, is_causal: bool) -> bool:
        return is_causal if self.sink is None else self.sink

    def keeps_diagonal(self, is_causal: bool) -> bool:
        return is_causal if self.diagonal is None else self.diagonal


def check_pv_threshold(value: PerHead) -> None:
    """Raise unless every threshold is below 0 (natural-log units)."""
    check_range("pv_threshold", value, -math.inf, 0.0, "[-inf, 0)")


@dataclass(frozen=True)
class TopK(Selection):
    """Keep the best-scored share of the *visible* blocks of every row.

    Args:
        topk: share to keep, in (0, 1]; rounded up to whole blocks. A tensor of shape (H,) sets it per head. (Keep such
            tensors on the query's device: others are copied at every call. Their values are checked on a CPU only.)
        min_blocks: a row keeps at least this many blocks when it sees that many.
        similarity_threshold: blocks whose tokens agree less than this (mean pairwise cosine, in [0, 1]) have no
            summary that speaks for them and are kept: such a query block keeps its whole row, such a key block its
            column. ``None`` asks no block.
        pv_threshold: inside a kept block, skip the P V product of 64 rows when all their scores lie below the
            running maximum by more than this (negative, natural log). ``None`` skips nothing.
        sink: keep the first key block (behind padding, if any) in every row; ``None`` means "when causal".
        diagonal: keep the blocks that hold a query's own position; ``None`` means "when causal".

    Example:
        >>> TopK(0.3).topk
        0.3
        >>> TopK(1.5)
        Traceback (most recent call last):
        ...
        ValueError: topk: expected a value in (0, 1], got 1.5
    """

    name = "topk"
    amount_field = "topk"

    topk: PerHead = DEFAULT_TOPK

    def __post_init__(self) -> None:
        check_range("topk", self.topk, 0.0, 1.0, "(0, 1]")
        super().__post_init__()

    @classmethod
    def of(cls, topk: PerHead) -> TopK:
        """The default rules with another share. torch.compile up to torch 2.11 cannot trace the constructor."""
        check_range("topk", topk, 0.0, 1.0, "(0, 1]")
        return trusted(cls, topk=topk)


@dataclass(frozen=True)
class TopCdf(Selection):
    """Keep the best-scored blocks of every row until their probabilities sum to ``cdf``, the crossing one included.

    Args:
        cdf: mass to cover, in (0, 1]; a tensor of shape (H,) sets it per head.

    The other arguments are those of `TopK`.

    Example:
        >>> TopCdf(0.97, min_blocks=4).min_blocks
        4
    """

    name = "topcdf"
    amount_field = "cdf"

    cdf: PerHead = 0.97

    def __post_init__(self) -> None:
        check_range("cdf", self.cdf, 0.0, 1.0, "(0, 1]")
        super().__post_init__()


@dataclass(frozen=True)
class Budget(Selection):
    """Keep the blocks with the largest predicted mass over all heads and rows of a call together.

    Heads and rows whose attention is spread get many blocks, those that look at little get few; the density of the call
    is what was asked for. A row is sure of half of what an equal share would give it. Blocks of different rows whose
    probabilities differ by less than an eighth of an octave count alike, and are shared out evenly. Each element of a
    batch has a budget of its own.

    Args:
        density: share of the visible blocks to keep, in (0, 1], rounded up to whole blocks; one number. Blocks that are
            kept whatever their score (sink, diagonal, ``always_keep``) are part of it.
        min_blocks: a row keeps at least this many blocks, 1 by default.

    The other arguments are those of `TopK`. Under causality, how much an early row keeps depends on later tokens too,
    since they share the budget; `TopK` and `TopCdf` never look ahead.

    Example:
        >>> Budget(0.25).min_blocks
        1
        >>> Budget(0.0)
        Traceback (most recent call last):
        ...
        ValueError: density: expected a value in (0, 1], got 0.0
    """

    name = "budget"
    amount_field = "density"
    is_call_wide = True

    density: float = DEFAULT_TOPK
    min_blocks: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.density, Tensor):
            raise TypeError(
                "density: expected a number, got a tensor (heads share a budget; for a share of each take TopK(...))"
            )
        check_range("density", self.density, 0.0, 1.0, "(0, 1]")
        super().__post_init__()


def budget_top(kv_blocks: int) -> int:
    """The highest level of a `Budget` for so many key blocks, as the float32 without `BUDGET_BITS` that it begins with.

    The lowest level ends five octaves below an equal share of a row, what lies below is one with it. The highest lies
    16 octaves above, or at 1.
    """
    one = 127 << (23 - BUDGET_BITS)
    lowest = one - ((max(kv_blocks - 1, 1).bit_length() + 5) << (23 - BUDGET_BITS))
    return min(lowest + BUDGET_LEVELS - 1, one)


@dataclass(frozen=True)
class Dense:
    """Keep every visible block: dense attention, in 8 bits where ``quantization`` asks for it.

    Example:
        >>> Dense()
        Dense()
    """


Sparsity: TypeAlias = Selection | Dense
SELECTIONS: dict[str, type[Selection]] = {rule.name: rule for rule in (TopK, TopCdf, Budget)}


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
    in the same block (`sparge.ordering`); where blocks are mixed, "moment" is better.

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


_SelectionType = TypeVar("_SelectionType", bound=Selection)


def trusted(kind: type[_SelectionType], **fields: Any) -> _SelectionType:
    """A selection from parts that were checked before, without reading per-head tensors back from a device."""
    made = object.__new__(kind)
    for name, spec in kind.__dataclass_fields__.items():
        object.__setattr__(made, name, fields.get(name, spec.default))
    return made


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


def per_head(value: PerHead, heads: int, device: torch.device) -> Tensor:
    """The value as a tensor of shape (heads, 1, 1), ready to broadcast over (B, H, q_blocks, kv_blocks)."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype).reshape(heads, 1, 1)
    return torch.full((heads, 1, 1), float(value), dtype=dtype, device=device)
