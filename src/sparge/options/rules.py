"""Selection rules, which determine the blocks that are kept. Rules are frozen values, checked when they are created.

Operators and kernels receive only the name and the numbers of a rule. `reference` defines their meaning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from sparge.options.common import PerHead, check_range

DEFAULT_TOPK = 0.5
DEFAULT_MIN_BLOCKS = 16
GUARANTEED = 0.5
"""Share of an equal allocation of a `Budget` that every query block is guaranteed."""
BUDGET_BITS, BUDGET_LEVELS = 20, 128
"""A `Budget` compares probabilities of different query blocks after rounding them to 128 levels. A level is the bits of
a float32 without the lowest 20 (steps of an eighth of a power of two), clamped at `budget_top`. This is much finer than
the accuracy of any score."""
ROUNDING_GUARD = 1 - 2.0**-22
"""Factor on a share of blocks before it is rounded up, so that float errors (0.1 in float32 x 1280) add no block."""


def _check_flag(name: str, value: bool | None) -> None:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name}: expected True, False or None (only when causal), got {value!r}")


@dataclass(frozen=True, eq=False)
class Selection:
    """Base class of the selection rules, with the options that all rules share.

    Attributes:
        name: name of the rule in operators and kernels.
        amount_field: name of the field with the amount to keep, one number or one per head.
        is_call_wide: whether all query blocks of a batch element share the amount. Otherwise blocks are selected
            separately for each query block.
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

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(vars(self).get("_plain_values") or self._values())

    def _values(self) -> tuple[Any, ...]:
        """Return the values for equality and hash, cached unless some are tensors, which could change in place."""
        values = (self.name, *[getattr(self, name) for name in self.__dataclass_fields__])
        if self.is_per_head:
            return tuple(map(_hashable, values))
        object.__setattr__(self, "_plain_values", values)
        return values

    @property
    def amount(self) -> PerHead:
        """The amount to keep: the value of ``amount_field``."""
        value: PerHead = getattr(self, self.amount_field)
        return value

    def with_amount(self, amount: float) -> Selection:
        """Return the same rule with another amount.

        Example:
            >>> TopK(0.5, min_blocks=4).with_amount(0.25)
            TopK(min_blocks=4, similarity_threshold=None, pv_threshold=None, sink=None, diagonal=None, topk=0.25)
        """
        fields: dict[str, Any] = {self.amount_field: amount}
        return replace(self, **fields)

    @property
    def is_per_head(self) -> bool:
        """Whether any value is a per-head tensor."""
        return any(isinstance(value, Tensor) for value in vars(self).values())

    def keeps_sink(self, is_causal: bool) -> bool:
        return is_causal if self.sink is None else self.sink

    def keeps_diagonal(self, is_causal: bool) -> bool:
        return is_causal if self.diagonal is None else self.diagonal


def _hashable(value: Any) -> Any:
    """Return a hashable value: the entries of a CPU tensor, the id of any other tensor, or the value itself.

    Reading a tensor on another device would synchronize with the device.
    """
    if type(value) is Tensor and value.is_cpu and not torch.compiler.is_compiling():
        return tuple(value.tolist())
    return id(value) if isinstance(value, Tensor) else value


def check_pv_threshold(value: PerHead) -> None:
    """Raise unless every threshold is below 0 (natural-log units)."""
    check_range("pv_threshold", value, -math.inf, 0.0, "[-inf, 0)")


@dataclass(frozen=True, eq=False)
class TopK(Selection):
    """Keep the best-scored share of the *visible* blocks of every query block.

    Args:
        topk: share to keep, in (0, 1], rounded up to whole blocks. A tensor of shape (H,) sets a share per head. Keep
            it on the query's device; otherwise it is copied in every call. Its values are checked only on the CPU.
        min_blocks: minimum number of blocks per query block, if that many are visible.
        similarity_threshold: threshold in [0, 1] on the mean pairwise cosine similarity of the tokens of a block. A key
            block below the threshold is kept for all query blocks, and a query block below the threshold keeps all key
            blocks, because its mean does not represent it. ``None`` disables the test.
        pv_threshold: in a kept block, skip the product P V of 64 queries if all of their scores are further than this
            below the running maximum (negative, natural log). ``None`` skips nothing.
        sink: keep the first key block (after left padding, if any) for every query block; ``None`` means "when causal".
        diagonal: keep the blocks that contain a query's own position; ``None`` means "when causal".

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


@dataclass(frozen=True, eq=False)
class TopCdf(Selection):
    """Keep the best-scored blocks of every query block until their probabilities sum to at least ``cdf``.

    Args:
        cdf: probability mass to cover, in (0, 1]; a tensor of shape (H,) sets a value per head.

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


@dataclass(frozen=True, eq=False)
class Budget(Selection):
    """Keep the blocks with the largest predicted mass among all heads and query blocks of a call.

    The call keeps the requested density. Heads and query blocks with spread-out attention get many blocks, and those
    with concentrated attention get few. Every query block is guaranteed half of an equal share. Blocks of different
    query blocks whose probabilities differ by less than an eighth of a power of two count as equal and are kept
    evenly. Each batch element has its own budget.

    Args:
        density: share of the visible blocks to keep, in (0, 1], rounded up to whole blocks; a number, not a tensor.
            Blocks that are kept regardless of their score (sink, diagonal, ``always_keep``) count toward the density.
        min_blocks: minimum number of blocks per query block. Default: 1.

    The other arguments are those of `TopK`. In causal attention, the number of blocks of an early query block also
    depends on later tokens, because they share the budget; `TopK` and `TopCdf` never use later tokens.

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
                "density: expected a number, got a tensor (heads share a budget; use TopK(...) for a share per head)"
            )
        check_range("density", self.density, 0.0, 1.0, "(0, 1]")
        super().__post_init__()


def budget_top(kv_blocks: int) -> int:
    """Return the highest level of a `Budget` for ``kv_blocks`` key blocks, as float32 bits without `BUDGET_BITS`.

    The lowest level is 5 log2 units below an equal share and includes all lower probabilities. The highest level is 16
    log2 units above the lowest, but at most at probability 1.
    """
    one = 127 << (23 - BUDGET_BITS)
    lowest = one - ((max(kv_blocks - 1, 1).bit_length() + 5) << (23 - BUDGET_BITS))
    return min(lowest + BUDGET_LEVELS - 1, one)


@dataclass(frozen=True)
class Dense:
    """Keep every visible block: dense attention, quantized if ``quantization`` requests it."""


Sparsity: TypeAlias = Selection | Dense
SELECTIONS: dict[str, type[Selection]] = {rule.name: rule for rule in (TopK, TopCdf, Budget)}
_SelectionType = TypeVar("_SelectionType", bound=Selection)


def make_unchecked(kind: type[_SelectionType], **fields: Any) -> _SelectionType:
    """Create a rule from checked fields, without the constructor.

    The constructor may synchronize with a device, and torch.compile up to torch 2.11 cannot trace it.
    """
    rule = object.__new__(kind)
    for name, spec in kind.__dataclass_fields__.items():
        object.__setattr__(rule, name, fields.get(name, spec.default))
    return rule
