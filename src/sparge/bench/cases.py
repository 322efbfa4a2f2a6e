"""Cases of ``sparge bench``, and formulas for the columns of its rows.

A case is one attention problem (batch 1, bfloat16) whose variants are timed in turns. It yields one or more rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape

Row = dict[str, Any]

TOPKS = (1.0, 0.5, 0.25, 0.1)
"""1.0 means quantized `Dense`, which computes every block without a prediction."""
CROSSOVER_TOPKS = (0.5, 0.25)


@dataclass(frozen=True)
class Problem:
    """One attention problem: the last ``queries`` of ``tokens`` positions attend to all visible keys."""

    tokens: int
    heads: int
    head_dim: int = 128
    is_causal: bool = False
    queries: int = 0  # 0: as many as tokens

    def __post_init__(self) -> None:
        object.__setattr__(self, "queries", self.queries or self.tokens)

    @property
    def shape(self) -> Shape:
        return Shape(1, self.heads, self.heads, self.queries, self.tokens, self.head_dim, self.head_dim)

    @property
    def flop(self) -> float:
        """Floating-point operations of dense attention: 4 H Nq Nk D, without masked pairs if causal."""
        pairs = self.queries * self.tokens - (self.queries**2 / 2 if self.is_causal else 0)
        return 4.0 * self.heads * pairs * self.head_dim


@dataclass(frozen=True)
class Case:
    """A problem, and the variants of it that a suite measures."""

    suite: str
    problem: Problem
    topks: tuple[float, ...] = TOPKS
    """Budgets of whole calls."""
    density: float | None = None
    """Share of the visible blocks that the suite "kernel" keeps at random."""
    with_flex: bool = False
    """Whether to measure FlexAttention, which compiles slowly."""


CROSSOVER_SIZES = (
    *((3072, 3072, 8), (4096, 4096, 8), (6144, 6144, 8), (1024, 32768, 8), (512, 32768, 8), (3072, 3072, 32)),
    *((16384, 16384, 2), (4096, 32768, 4), (8192, 8192, 8), (2048, 32768, 8), (4096, 8192, 16)),
    *((4608, 4608, 24), (4096, 4096, 32), (2048, 8192, 32), (2048, 4096, 64)),
)
"""Queries, keys and heads of calls below and just above the crossover on a GPU."""
_USUAL = Problem(32768, 16)
_SHORT = Problem(8192, 32)
_LONG = Problem(131072, 4)
SUITES: dict[str, list[Case]] = {
    "end_to_end": [
        Case("end_to_end", problem)
        for problem in (
            _SHORT,
            Problem(4096, 32),
            _USUAL,
            _LONG,
            replace(_USUAL, head_dim=64),
            replace(_USUAL, is_causal=True),
            replace(_LONG, is_causal=True),
        )
    ],
    "kernel": [
        Case(
            "kernel",
            replace(problem, head_dim=head_dim),
            density=density,
            with_flex=problem == _USUAL and density in (0.5, 0.25),
        )
        for problem in (_SHORT, _USUAL)
        for head_dim in (128, 64)
        for density in (1.0, 0.5, 0.25, 0.1)
    ],
    "memory": [Case("memory", problem) for problem in (_SHORT, _USUAL, _LONG)],
    "crossover": [
        Case("crossover", Problem(tokens, heads, head_dim, is_causal, queries), CROSSOVER_TOPKS)
        for head_dim in (128, 64)
        for is_causal in (False, True)
        for queries, tokens, heads in CROSSOVER_SIZES
    ],
}
"""Cases of the suites that need a CUDA device, the most informative case first."""
SUITE_NAMES = (*SUITES, "host")
DEFAULT_SUITES = ("end_to_end", "kernel", "memory")


def tflops(flop: float, ms: float | None) -> float | None:
    """Return 10^12 operations per second; None if the time is unknown."""
    return None if ms is None else flop / ms / 1e9


def ratio(dense_ms: float | None, ms: float | None) -> float | None:
    """Return the speed-up over a dense kernel; None if either time is unknown."""
    return None if ms is None or dense_ms is None else dense_ms / ms


def executed_flop(kept_blocks: int, head_dim: int) -> float:
    """Return the floating-point operations of Q K^T and P V over whole blocks."""
    return 4.0 * BLOCK_Q * BLOCK_K * head_dim * kept_blocks
