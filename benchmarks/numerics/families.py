"""Families of attention inputs that test the accuracy of quantized attention. Each has one pattern found in models.

Inputs are generated from a seed, on any device, for a few queries (the last positions) and many keys. Their logits are
constructed: in "sink-13", one key is 13 nats above an even tail for *every* query. Keys that should not contribute to
the output (sinks) have the value 0, so a lost tail or a wrong sink weight fully affects the output.

`FAMILIES` contains all families, `by_name` returns one, and `of_kind` returns a group. `Family.limit` is the largest
relative L1 error that dense quantized attention may have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.numerics import family_inputs as inputs
from benchmarks.numerics.family_inputs import LOGIT_SPREAD, Draw
from sparge.evaluate.inputs import Inputs, text_tensors, video_tensors

EVEN_LIMIT, ORDINARY_LIMIT, FIELD_LIMIT = 0.02, 0.03, 0.016
SINK_ROUNDING = 1.5e-3
"""Allowed relative rounding error of a sink's logit if Q and K are quantized to INT8. It changes the tail's weight.

A query and a sink share a component a u, where u is a unit vector of D channels and a^2 = gap sqrt(D); the query also
has noise of standard deviation 1. The largest of 128 channels is 2.9 standard deviations, so a step is 2.9 / 127
standard deviations, and the rounding error of an entry is a step / sqrt(12). In total, the logit has the standard
deviation 2.9 / 311 sqrt(gap^2 / D + gap / sqrt(D)). At D 128, this is 1.1e-3 of a gap of 13 or 16 nats and 1e-3 of a
gap of 20 nats. A sink is one key, whose rounding error all queries share: one draw per head, on average 0.8 standard
deviations. 1.4 standard deviations are allowed for the mean of `SINK_HEADS` heads."""
SINK_HEADS = 8
FP8_NOISE = 0.0375
"""Error of rounding P and V to E4M3 (1/38 of each value), relative to an output that is a sum of noise."""
INT8_NOISE = 0.0134
"""Error, in nats, of a logit of 1 nat if Q and K are rounded to 1/127 of about 4 standard deviations."""


@dataclass(frozen=True)
class Family:
    """One pattern of inputs."""

    name: str
    kind: str
    construct: Callable[[Draw], Inputs]
    limit: float  # largest relative L1 error that dense quantized attention may have
    may_be_causal: bool = False  # causal attention has the same pattern
    is_lattice: bool = False  # the entries have few distinct values, so their rounding errors are equal
    recorded_sizes: dict[str, int] | None = None  # sizes of recorded inputs, as arguments of `make`

    def make(
        self,
        q_len: int,
        kv_len: int,
        heads: int = 1,
        head_dim: int = 128,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        *,
        kv_heads: int | None = None,
    ) -> Inputs:
        """Return query (1, heads, q_len, head_dim), key and value (1, kv_heads, kv_len, head_dim), contiguous.

        Args:
            kv_heads: a divisor of heads; equal to heads by default.
        """
        generator = torch.Generator(device).manual_seed(seed)
        query, key, value = self.construct(Draw(q_len, kv_len, heads, kv_heads or heads, head_dim, generator))
        query, key, value = (tensor.to(dtype).contiguous() for tensor in (query, key, value))
        return query, key, value


def _sink_limit(gap: int) -> float:
    return max(EVEN_LIMIT, SINK_ROUNDING * gap)


def _noise_limit(spread: float) -> float:
    """Return the limit for Gaussian logits and values with mean 0, where output and error are both sums of noise."""
    return 1.15 * math.hypot(FP8_NOISE, INT8_NOISE * spread)


SINK_POSITIONS: dict[str, Callable[[int], list[int]]] = {
    "": lambda _: [0],
    "-middle": lambda kv_len: [inputs.middle(kv_len)],
    "-several": lambda kv_len: [kv_len * quarter // 4 + 13 * quarter for quarter in range(4)],
}
ZERO_VALUE_GAPS, NONZERO_VALUE_GAPS = (4, 6, 8, 9), (10, 12)
"""Gaps of peaks whose value is 0, and of other peaks. FP8 has full precision down to 10 nats below a tile's maximum; a
lower tail is accurate enough only if the peak itself contributes to the output."""

ORDINARY: dict[str, dict[str, Callable[[Draw], Inputs]]] = {
    "outlier token": {
        "token-k-irrelevant-1e2": partial(inputs.irrelevant_key, factor=1e2),
        "token-k-irrelevant-1e3": partial(inputs.irrelevant_key, factor=1e3),
        "token-k-orthogonal-1e2": partial(inputs.orthogonal_key, factor=1e2),
        "token-k-decisive-1e2": partial(inputs.decisive_key, factor=1e2),
        "token-q-irrelevant-1e2": partial(inputs.irrelevant_query, factor=1e2),
        "token-q-irrelevant-1e4": partial(inputs.irrelevant_query, factor=1e4),
        "token-v-irrelevant-1e2": partial(inputs.large_value, factor=1e2, is_decisive=False),
        "token-v-irrelevant-1e4": partial(inputs.large_value, factor=1e4, is_decisive=False),
        "token-v-decisive-1e2": partial(inputs.large_value, factor=1e2, is_decisive=True),
        "token-v-decisive-1e4": partial(inputs.large_value, factor=1e4, is_decisive=True),
    },
    "value": {"value-mean-10": partial(inputs.gaussian, value_mean=10.0), "value-channels": inputs.value_channels},
    "magnitude": {
        "tiny-queries": partial(inputs.scaled, query=1e-6),
        "tiny-values": partial(inputs.scaled, value=1e-6),
        "huge-queries": partial(inputs.scaled, query=1e3, key=1e-3),
        "huge-keys": partial(inputs.scaled, query=1e-3, key=1e3),
        "huge-values": partial(inputs.scaled, value=1e4),
        "one-hot": inputs.one_hot,
    },
    "constant": {
        "same-queries": partial(inputs.same, which=0),
        "same-keys": partial(inputs.same, which=1),
        "same-values": partial(inputs.same, which=2),
    },
    "offset": {"offset-k": inputs.offset_keys, "offset-q": inputs.offset_queries},
}
"""Inputs with ordinary logits, by kind and name."""


def _families() -> Iterator[Family]:
    for suffix, positions in SINK_POSITIONS.items():
        for gap in (0, 6, 9, 11, 13, 16, 20):
            construct = partial(inputs.peaks, gap=gap, positions=positions)
            yield Family(f"sink-{gap}{suffix}", "sink", construct, _sink_limit(gap), may_be_causal=True)
    for gap in (9, 13, 16):
        yield Family(f"own-sink-{gap}", "own sink", partial(inputs.own_sinks, gap=gap), _sink_limit(gap))
    for tile in (64, 128, 256):
        for gap in ZERO_VALUE_GAPS + NONZERO_VALUE_GAPS:
            every_tile = partial(inputs.one_in_every_tile, tile=tile)
            construct = partial(inputs.peaks, gap=gap, positions=every_tile, zero_value=gap in ZERO_VALUE_GAPS)
            yield Family(f"peaks-{tile}-{gap}", "peaks", construct, EVEN_LIMIT, may_be_causal=True)
    yield Family("one-row-14", "one row", partial(inputs.one_row, gap=14.0), EVEN_LIMIT)
    for name, sign in (("rising", 1.0), ("falling", -1.0)):
        for rise in (10, 40):
            yield Family(f"{name}-{rise}", "slope", partial(inputs.slope, rise=sign * rise), EVEN_LIMIT)
    for name, rise in (("step-up-12", 12), ("step-down-12", -12)):
        yield Family(name, "slope", partial(inputs.step, rise=float(rise)), EVEN_LIMIT)
    yield Family("field", "field", partial(inputs.last_queries_of, make=video_tensors), FIELD_LIMIT)
    for where in ("k-matched", "k-alone", "q-matched", "q-alone", "both"):
        for count, factor in ((1, 100), (3, 30), (4, 10)):
            construct = partial(inputs.outlier_channels, where=where, count=count, factor=float(factor))
            name = f"outliers-{where}-{count}x{factor}"
            yield Family(name, "outlier channels", construct, ORDINARY_LIMIT, may_be_causal=True)
    for kind, named in ORDINARY.items():
        for name, construct in named.items():
            yield Family(name, kind, construct, ORDINARY_LIMIT, is_lattice=name == "one-hot")
    for spread in (1, 2, 3, 4):
        construct = partial(inputs.gaussian, spread=float(spread), value_mean=0.0)
        yield Family(f"random-{spread}", "random", construct, _noise_limit(spread), may_be_causal=True)
    construct = partial(inputs.last_queries_of, make=text_tensors)
    yield Family("text", "text", construct, _noise_limit(LOGIT_SPREAD), may_be_causal=True)


FAMILIES: tuple[Family, ...] = tuple(_families())
KINDS: tuple[str, ...] = tuple(dict.fromkeys(family.kind for family in FAMILIES))
_BY_NAME = {family.name: family for family in FAMILIES}


def by_name(name: str) -> Family:
    """Return a constructed family by its name."""
    if name not in _BY_NAME:
        raise ValueError(f"name: expected a family such as {', '.join(list(_BY_NAME)[:3])}, got {name!r}")
    return _BY_NAME[name]


def of_kind(*kinds: str) -> tuple[Family, ...]:
    """Return all families of the given `KINDS`."""
    return tuple(family for family in FAMILIES if family.kind in kinds)


_ESSENTIAL_NAMES = (
    *("sink-0", "sink-9", "sink-11", "sink-13", "sink-16", "sink-13-middle", "sink-13-several"),
    *("own-sink-13", "peaks-64-8", "peaks-128-8", "peaks-256-8", "peaks-128-12", "one-row-14"),
    *("rising-40", "falling-40", "step-up-12", "step-down-12", "field"),
    *("outliers-k-matched-1x100", "outliers-k-matched-3x30", "outliers-k-alone-3x30", "outliers-both-3x30"),
    *("outliers-q-matched-3x30", "outliers-q-alone-1x100"),
    *("token-k-irrelevant-1e3", "token-k-orthogonal-1e2", "token-k-decisive-1e2", "token-q-irrelevant-1e4"),
    *("token-v-irrelevant-1e4", "token-v-decisive-1e4"),
    *("value-mean-10", "tiny-queries", "tiny-values", "huge-keys", "one-hot", "same-keys", "offset-k"),
    *("random-2", "random-4", "text"),
)
ESSENTIAL: tuple[Family, ...] = tuple(map(by_name, _ESSENTIAL_NAMES))
"""Families that cover each construction at least once, for tests that would take too long with all families."""
