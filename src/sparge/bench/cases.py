"""Cases of ``sparge bench``: the groups of every suite, and formulas for their columns.

A group is one attention problem (batch 1 or packed segments; bfloat16) whose variants are timed in turns, in one run.
It produces one or more rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sparge.evaluate.captured import captured_names, recorded_of
from sparge.evaluate.families import ESSENTIAL, FAMILIES, SINK_HEADS
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape

Row = dict[str, Any]

TOPKS = (1.0, 0.5, 0.25, 0.1)
"""1.0 means quantized `Dense`, which computes every block without a prediction."""
CROSSOVER_TOPKS = (0.5, 0.25)
NUMERICS_QUERIES = 512
NUMERICS_LENGTHS = (1024, 8192, 32768, 131072)
QUANTIZATIONS = ("int8_fp8_fast", "int8_fp8", "int8_fp16", "none")
"""Quantizations, fastest first."""


@dataclass(frozen=True)
class Problem:
    """One attention problem: the last ``queries`` of ``tokens`` positions attend to all visible keys.

    The suite "packed" concatenates ``segments`` of this size. With ``unequal``, all lengths differ and are between half
    of ``tokens`` and ``tokens``.
    """

    tokens: int
    heads: int
    head_dim: int = 128
    is_causal: bool = False
    queries: int = 0  # 0: as many as tokens
    segments: int = 1
    unequal: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "queries", self.queries or self.tokens)

    @property
    def shape(self) -> Shape:
        """Shape of one segment."""
        return Shape(1, self.heads, self.heads, self.queries, self.tokens, self.head_dim, self.head_dim)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each segment."""
        if not self.unequal:
            return [self.tokens] * self.segments
        half, last = self.tokens // 2, max(self.segments - 1, 1)
        mixed = [index * 5 % self.segments for index in range(self.segments)]  # shuffled; 5 must not divide segments
        return [half + half * index // last for index in mixed]

    @property
    def flop(self) -> float:
        """Floating-point operations of dense attention: 4 H Nq Nk D per segment, without masked pairs if causal."""
        pairs = self.queries * self.tokens - (self.queries**2 / 2 if self.is_causal else 0)
        squares = sum((length / self.tokens) ** 2 for length in self.lengths)
        return 4.0 * squares * self.heads * pairs * self.head_dim

    @property
    def preparation_bytes(self) -> int:
        """Minimum number of bytes that the stages before attention move.

        Query, key and value are read once (2 bytes per element) and written once (1 byte).
        """
        return 3 * self.heads * (self.queries + 2 * self.tokens) * self.head_dim


@dataclass(frozen=True)
class Group:
    """Variants of one problem that are timed together.

    ``density`` is the share of randomly kept blocks among the visible blocks (suites "kernel" and "hopper"); ``topks``
    are the budgets of whole calls; ``family`` is the name of the inputs (suite "numerics"), and ``mask`` the name of
    the mask (suite "masks").
    """

    suite: str
    problem: Problem
    density: float | None = None
    with_flex: bool = False
    topks: tuple[float, ...] = TOPKS
    family: str | None = None
    mask: str | None = None


def _numerics() -> Iterator[tuple[str, Problem]]:
    """Yield (family, problem) pairs of the suite "numerics".

    Every family has a short and a long length, sinks and the field have more. Some are also causal or at head_dim 64.
    """
    for family in FAMILIES:
        is_sink, is_field = family.kind in ("sink", "own sink"), family.kind == "field"
        lengths = NUMERICS_LENGTHS if is_sink else NUMERICS_LENGTHS[1:] if is_field else NUMERICS_LENGTHS[::2]
        usual = Problem(8192, SINK_HEADS if is_sink else 2, queries=NUMERICS_QUERIES)
        for tokens in lengths:
            yield family.name, replace(usual, tokens=tokens)
        if family in ESSENTIAL:
            yield family.name, replace(usual, head_dim=64)
            if family.may_be_causal:
                yield family.name, replace(usual, is_causal=True)
    for name in captured_names():
        recorded = recorded_of(name)
        assert recorded
        kv_len, heads, head_dim = (recorded.sizes[size] for size in ("kv_len", "heads", "head_dim"))
        yield name, Problem(kv_len, heads, head_dim, recorded.is_causal, NUMERICS_QUERIES)


_USUAL = Problem(32768, 16)
_SHORT = Problem(8192, 32)
SUITES: dict[str, list[Group]] = {
    "end_to_end": [
        Group("end_to_end", problem)
        for problem in (
            _SHORT,
            Problem(4096, 32),
            _USUAL,
            Problem(131072, 4),
            replace(_USUAL, head_dim=64),
            replace(_USUAL, is_causal=True),
            Problem(131072, 4, is_causal=True),
        )
    ],
    "kernel": [  # FlexAttention compiles slowly
        Group("kernel", Problem(tokens, heads, head_dim), density, tokens == 32768 and density in (0.5, 0.25))
        for tokens, heads in ((8192, 32), (32768, 16))
        for head_dim in (128, 64)
        for density in (1.0, 0.5, 0.25, 0.1)
    ],
    "memory": [Group("memory", problem) for problem in (_SHORT, _USUAL, Problem(131072, 4))],
    "crossover": [
        Group("crossover", Problem(tokens, heads, head_dim, is_causal, queries), topks=CROSSOVER_TOPKS)
        for heads in (8, 32)
        for head_dim in (128, 64)
        for is_causal in (False, True)
        for tokens, queries in (
            *((tokens, tokens) for tokens in (1024, 2048, 3072, 4096, 6144, 8192, 16384)),
            *((tokens, queries) for tokens in (8192, 32768) for queries in (512, 1024, 2048)),
        )
    ],
    "hopper": [
        Group("hopper", problem, density)
        for problem, densities in (
            (_USUAL, (0.5, 1.0, 0.1)),
            (_SHORT, (0.5,)),
            (replace(_USUAL, head_dim=64), (0.5, 1.0)),
            (replace(_USUAL, is_causal=True), (0.5, 1.0)),
        )
        for density in densities
    ],
    "numerics": [Group("numerics", problem, family=family) for family, problem in _numerics()],
    "packed": [  # the same number of tokens in short and in long segments
        Group("packed", Problem(tokens, 16, 128, is_causal, 0, segments, unequal), topks=(1.0, 0.5, 0.25))
        for segments, tokens in ((64, 2048), (8, 16384))
        for unequal in (False, True)
        for is_causal in (False, True)
    ],
    "masks": [  # a bias per head does not fit in memory at 32768 tokens
        *(
            Group("masks", problem, topks=CROSSOVER_TOPKS, mask=mask)
            for problem in (_SHORT, Problem(32768, 8))
            for mask in ("documents", "window", "random")
        ),
        Group("masks", _SHORT, topks=CROSSOVER_TOPKS, mask="bias"),
    ],
    "host": [Group("host", Problem(4096, 1))],
}
DEFAULT_SUITES = ("end_to_end", "kernel", "memory")


def groups_of(suites: tuple[str, ...], quick: bool) -> list[Group]:
    """Return all groups of the suites in order; with ``quick`` only the first group of each suite."""
    return [group for name in suites for group in SUITES[name][: 1 if quick else None]]


def tflops(flop: float, ms: float | None) -> float | None:
    """Return 10^12 operations per second; None if the time is unknown."""
    return None if ms is None else flop / ms / 1e9


def ratio(rival_ms: float | None, ms: float | None) -> float | None:
    """Return the speed-up over the rival; None if either time is unknown."""
    return None if ms is None or rival_ms is None else rival_ms / ms


def executed_flop(kept_blocks: int, head_dim: int) -> float:
    """Return the floating-point operations of Q K^T and P V over whole blocks."""
    return 4.0 * BLOCK_Q * BLOCK_K * head_dim * kept_blocks
