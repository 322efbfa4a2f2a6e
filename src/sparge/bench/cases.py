"""Cases of ``sparge bench``: the groups of every suite, formulas for their columns, random block masks.

A group is one attention problem (batch 1, or segments that are packed; bfloat16) whose variants are timed in turns, in
one run. It gives one or more rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparge.evaluate.captured import captured_names, recorded_of
from sparge.evaluate.families import ESSENTIAL, FAMILIES, SINK_HEADS
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape

Row = dict[str, Any]

TOPKS = (1.0, 0.5, 0.25, 0.1)
"""1.0 stands for quantized `Dense`, which computes every block and predicts nothing."""
CROSSOVER_TOPKS = (0.5, 0.25)
DENSITIES = (1.0, 0.5, 0.25, 0.1)
PACKED_TOPKS = (1.0, 0.5, 0.25)
NUMERICS_QUERIES = 512
NUMERICS_LENGTHS = (1024, 8192, 32768, 131072)
QUANTIZATIONS = ("int8_fp8_fast", "int8_fp8", "int8_fp16", "none")
"""Fastest first."""
ERROR_TARGETS = {"int8_fp8": 0.013, "int8_fp8_fast": 0.013}
"""Largest relative L1 error of quantized dense attention: the error of the published kernels on the same GPU."""

IDENTITY = (
    "suite",
    "backend",
    "tokens",
    "queries",
    "heads",
    "head_dim",
    "is_causal",
    "topk",
    "asked_density",
    "kernel",
    "family",
    "segments",
    "unequal",
    "mask",
    "call",
)
"""The fields that name a row's case; rows that agree in all of them are measurements of the same thing."""


@dataclass(frozen=True)
class Problem:
    """One attention problem: the last ``queries`` of ``tokens`` positions attend to all visible keys.

    The suite "packed" concatenates ``segments`` of this size. With ``unequal`` their lengths all differ, between half
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
        mixed = [index * 5 % self.segments for index in range(self.segments)]  # of segments that 5 does not divide
        return [half + half * index // last for index in mixed]

    @property
    def flop(self) -> float:
        """Floating-point operations of dense attention: 4 H Nq Nk D per segment, without the causal triangle."""
        pairs = self.queries * self.tokens - (self.queries**2 / 2 if self.is_causal else 0)
        squares = sum((length / self.tokens) ** 2 for length in self.lengths)
        return 4.0 * squares * self.heads * pairs * self.head_dim

    @property
    def preparation_bytes(self) -> int:
        """Return the minimum number of bytes that preparation moves.

        Query, key and value are read once (2 bytes per element) and written once (1 byte).
        """
        return 3 * self.heads * (self.queries + 2 * self.tokens) * self.head_dim

    def fields(self) -> Row:
        return asdict(self)


@dataclass(frozen=True)
class Group:
    """Variants of one problem that are timed together.

    ``density`` is the share of the visible blocks kept at random (suites "kernel" and "hopper"), else None; ``topks``
    are the budgets of whole calls; ``family`` names the inputs (suite "numerics"), ``mask`` a mask (suite "masks").
    """

    suite: str
    problem: Problem
    density: float | None = None
    with_flex: bool = False
    topks: tuple[float, ...] = TOPKS
    family: str | None = None
    mask: str | None = None


def _end_to_end() -> list[Group]:
    problems = [
        Problem(8192, 32),
        Problem(4096, 32),
        Problem(32768, 16),
        Problem(131072, 4),
        Problem(32768, 16, head_dim=64),
        Problem(32768, 16, is_causal=True),
        Problem(131072, 4, is_causal=True),
    ]
    return [Group("end_to_end", problem) for problem in problems]


def _kernel() -> list[Group]:
    """Return the groups of the suite "kernel". FlexAttention compiles slowly, so it runs at two densities and one
    length."""
    return [
        Group("kernel", Problem(tokens, heads, head_dim), density, tokens == 32768 and density in (0.5, 0.25))
        for tokens, heads in ((8192, 32), (32768, 16))
        for head_dim in (128, 64)
        for density in DENSITIES
    ]


def _crossover() -> list[Group]:
    lengths = [(tokens, tokens) for tokens in (1024, 2048, 3072, 4096, 6144, 8192, 16384)]
    lengths += [(queries, tokens) for tokens in (8192, 32768) for queries in (512, 1024, 2048)]
    return [
        Group("crossover", Problem(tokens, heads, head_dim, is_causal, queries))
        for heads in (8, 32)
        for head_dim in (128, 64)
        for is_causal in (False, True)
        for queries, tokens in lengths
    ]


def _hopper() -> list[Group]:
    """Return groups that compare the Hopper kernel with the Triton kernel."""
    kernels = [
        (Problem(32768, 16), 0.5),
        (Problem(32768, 16), 1.0),
        (Problem(32768, 16), 0.1),
        (Problem(8192, 32), 0.5),
        (Problem(32768, 16, head_dim=64), 0.5),
        (Problem(32768, 16, head_dim=64), 1.0),
        (Problem(32768, 16, is_causal=True), 0.5),
        (Problem(32768, 16, is_causal=True), 1.0),
    ]
    return [Group("hopper", problem, density) for problem, density in kernels]


def _packed() -> list[Group]:
    """Return groups with equally many tokens in short and in long segments, of equal and of different lengths."""
    problems = [
        Problem(tokens, 16, is_causal=is_causal, segments=segments, unequal=unequal)
        for segments, tokens in ((64, 2048), (8, 16384))
        for unequal in (False, True)
        for is_causal in (False, True)
    ]
    return [Group("packed", problem, topks=PACKED_TOPKS) for problem in problems]


def _masks() -> list[Group]:
    """Return the groups of the suite "masks". A bias per head does not fit in memory at the second length."""
    short, long = Problem(8192, 32), Problem(32768, 8)
    cases = [(problem, mask) for problem in (short, long) for mask in ("documents", "window", "random")]
    return [Group("masks", problem, topks=CROSSOVER_TOPKS, mask=mask) for problem, mask in [*cases, (short, "bias")]]


def _numerics() -> list[Group]:
    """Return every family at a short and a long length, sinks and the field at more, some at head_dim 64 or causal."""
    usual = Problem(8192, 2, queries=NUMERICS_QUERIES)
    groups = []
    for family in FAMILIES:
        lengths = list(NUMERICS_LENGTHS if family.kind in ("sink", "own sink", "field") else NUMERICS_LENGTHS[::2])
        if family.kind == "field":
            lengths.remove(1024)  # no long tail
        of_family = replace(usual, heads=SINK_HEADS) if family.kind in ("sink", "own sink") else usual
        problems = [replace(of_family, tokens=tokens) for tokens in lengths]
        if family in ESSENTIAL:
            problems.append(replace(of_family, head_dim=64))
        if family in ESSENTIAL and family.may_be_causal:
            problems.append(replace(of_family, is_causal=True))
        groups += [Group("numerics", problem, family=family.name) for problem in problems]
    return groups + [Group("numerics", _recorded_problem(name), family=name) for name in captured_names()]


def _recorded_problem(name: str) -> Problem:
    recorded = recorded_of(name)
    assert recorded
    sizes = recorded.sizes
    return Problem(
        sizes["kv_len"], sizes["heads"], sizes["head_dim"], is_causal=recorded.is_causal, queries=NUMERICS_QUERIES
    )


SUITES: dict[str, list[Group]] = {
    "end_to_end": _end_to_end(),
    "kernel": _kernel(),
    "error": [Group("error", Problem(32768, 16))],
    "memory": [Group("memory", Problem(tokens, heads)) for tokens, heads in ((8192, 32), (32768, 16), (131072, 4))],
    "crossover": _crossover(),
    "hopper": _hopper(),
    "numerics": _numerics(),
    "packed": _packed(),
    "masks": _masks(),
    "host": [Group("host", Problem(4096, 1))],
}
DEFAULT_SUITES = ("end_to_end", "kernel", "error", "memory")


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


def random_blocks(
    shape: Shape, density: float, device: torch.device, seed: int = 0, *, is_causal: bool = False
) -> Tensor:
    """Return a bool tensor (B, H, q_blocks, kv_blocks) that keeps this share of every query block's visible blocks,
    rounded.

    Causal masks keep the blocks on the diagonal, so that every query sees a key.
    """
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.batch, shape.heads, shape.q_blocks, shape.kv_blocks)
    rank = torch.rand(size, generator=generator, device=device)
    if not is_causal:
        return rank.argsort(-1) < round(density * shape.kv_blocks)
    first = torch.arange(shape.q_blocks, device=device)[:, None] * BLOCK_Q + shape.causal_offset
    last = (first + BLOCK_Q - 1).clamp(max=shape.kv_len - 1)
    starts = torch.arange(shape.kv_blocks, device=device) * BLOCK_K
    on_diagonal = (starts <= last) & (starts + BLOCK_K > first)
    rank = rank.masked_fill(starts > last, 2.0).masked_fill(on_diagonal, -1.0)
    kept = (density * (last // BLOCK_K + 1)).round()
    return rank.argsort(-1).argsort(-1) < torch.maximum(kept, on_diagonal.sum(-1, keepdim=True))
