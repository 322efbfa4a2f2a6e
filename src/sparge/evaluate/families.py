"""Families of attention inputs on which 8 bits are judged: each is one shape that trained models show, as data.

A family is made from a seed, on any device, for few queries (the last positions) against many keys. Its logits are
constructed, not hoped for: "sink-13" means that one key lies 13 nats above an even tail for *every* query. What nothing
should add to (a sink) has the value 0, so that a tail which is lost, or a 0 which is not 0, shows in full.

`FAMILIES` holds them all, `by_name` finds one, `of_kind` a group. `Family.limit` is the relative L1 error that dense
8-bit attention may have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from sparge.evaluate import family_inputs
from sparge.evaluate.family_inputs import LOGIT_SPREAD, Draw, Inputs
from sparge.evaluate.inputs import text_tensors, video_tensors

EVEN_LIMIT, ORDINARY_LIMIT, FIELD_LIMIT = 0.02, 0.03, 0.016
SINK_ROUNDING = 1.5e-3
"""Of a sink's logit: how far rounding Q and K to 8 bits may move it, and with it all that is not the sink.

A query and a sink share a part a u, with a unit vector u of D channels and a^2 = gap sqrt(D); the query has noise of
deviation 1 besides. The largest of 128 channels is 2.9 times their deviation, so that a step is 2.9 / 127 of it, and an
entry moves by a step / sqrt(12). Summed up, the logit has the deviation 2.9 / 311 sqrt(gap^2 / D + gap / sqrt(D)): at
D 128 1.1e-3 of 13 nats and of 16, 1e-3 of 20. A sink is one key, whose rounding all queries share: one draw for each
head, .8 deviations on average. 1.4 of them are allowed, as the mean of `SINK_HEADS` heads."""
SINK_HEADS = 8
FP8_NOISE = 0.0375
"""P and V rounded to E4M3 (deviation 1/38 of a number each), relative to an output that is itself a sum of noise."""
INT8_NOISE = 0.0134
"""Nats by which a logit of one nat moves, Q and K rounded to 1/127 of about four deviations."""


@dataclass(frozen=True)
class Family:
    """One shape of inputs.

    ``limit``: relative L1 error that dense 8-bit attention over it may have. ``may_be_causal``: whether causal
    attention over it means the same. ``is_lattice``: its entries are a few numbers, which are all rounded alike.
    """

    name: str
    kind: str
    draw: Callable[[Draw], Inputs]
    limit: float
    may_be_causal: bool = False
    is_lattice: bool = False

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
        """Query (1, heads, q_len, head_dim), key and value (1, kv_heads, kv_len, head_dim), contiguous.

        Args:
            kv_heads: a divisor of heads; as many by default.

        Example:
            >>> query, key, value = by_name("sink-9").make(2, 256, head_dim=64, dtype=torch.float32)
            >>> logits = query[0, 0] @ key[0, 0].T / 8
            >>> [round(float(gap), 1) for gap in logits[:, 0] - logits[:, 1:].mean(1)]
            [9.0, 9.0]
        """
        generator = torch.Generator(device).manual_seed(seed)
        kv_heads = heads if kv_heads is None else kv_heads
        query, key, value = self.draw(Draw(q_len, kv_len, heads, kv_heads, head_dim, generator))
        query, key, value = (tensor.to(dtype).contiguous() for tensor in (query, key, value))
        return query, key, value


def _noise_limit(spread: float) -> float:
    """Of Gaussian logits and values without a mean: output and error are both sums of noise."""
    return 1.15 * math.hypot(FP8_NOISE, INT8_NOISE * spread)


SINK_GAPS = (0, 6, 9, 11, 13, 16, 20)
SINK_PLACES: dict[str, Callable[[int], list[int]]] = {
    "": lambda _: [0],
    "-middle": lambda kv_len: [family_inputs.middle(kv_len)],
    "-several": lambda kv_len: [kv_len * quarter // 4 + 13 * quarter for quarter in range(4)],
}
PEAK_TILES = (64, 128, 256)
SILENT_PEAKS, VOICED_PEAKS = (4, 6, 8, 9), (10, 12)
"""FP8 holds 10 nats below a tile's maximum in full precision: a tail further down counts only beside voiced peaks."""
OUTLIERS = ((1, 100), (3, 30), (4, 10))
OUTLIER_PLACES = ("k-matched", "k-alone", "q-matched", "q-alone", "both")


def _families() -> list[Family]:
    sinks = [
        Family(
            f"sink-{gap}{place}",
            "sink",
            partial(family_inputs.sinks, gap=gap, places=places),
            max(EVEN_LIMIT, SINK_ROUNDING * gap),
            may_be_causal=True,
        )
        for place, places in SINK_PLACES.items()
        for gap in SINK_GAPS
    ]
    own_sinks = [
        Family(
            f"own-sink-{gap}",
            "own sink",
            partial(family_inputs.own_sinks, gap=gap),
            max(EVEN_LIMIT, SINK_ROUNDING * gap),
        )
        for gap in (9, 13, 16)
    ]
    peaks = [
        Family(
            f"peaks-{tile}-{gap}",
            "peaks",
            partial(family_inputs.peak_in_every_tile, gap=gap, tile=tile, silent=gap in SILENT_PEAKS),
            EVEN_LIMIT,
            may_be_causal=True,
        )
        for tile in PEAK_TILES
        for gap in SILENT_PEAKS + VOICED_PEAKS
    ]
    slopes = [
        Family(name, "slope", draw, EVEN_LIMIT)
        for name, draw in {
            "rising-10": partial(family_inputs.slope, rise=10.0),
            "rising-40": partial(family_inputs.slope, rise=40.0),
            "falling-10": partial(family_inputs.slope, rise=-10.0),
            "falling-40": partial(family_inputs.slope, rise=-40.0),
            "step-up-12": partial(family_inputs.step, rise=12.0),
            "step-down-12": partial(family_inputs.step, rise=-12.0),
        }.items()
    ]
    outliers = [
        Family(
            f"outliers-{where}-{count}x{factor}",
            "outlier channels",
            partial(family_inputs.outlier_channels, where=where, count=count, factor=float(factor)),
            ORDINARY_LIMIT,
            may_be_causal=True,
        )
        for where in OUTLIER_PLACES
        for count, factor in OUTLIERS
    ]
    ordinary: dict[str, dict[str, Callable[[Draw], Inputs]]] = {
        "outlier token": {
            "token-k-irrelevant-1e2": partial(family_inputs.irrelevant_key, factor=1e2),
            "token-k-irrelevant-1e3": partial(family_inputs.irrelevant_key, factor=1e3),
            "token-k-orthogonal-1e2": partial(family_inputs.orthogonal_key, factor=1e2),
            "token-k-decisive-1e2": partial(family_inputs.decisive_key, factor=1e2),
            "token-q-irrelevant-1e2": partial(family_inputs.irrelevant_query, factor=1e2),
            "token-q-irrelevant-1e4": partial(family_inputs.irrelevant_query, factor=1e4),
            "token-v-irrelevant-1e2": partial(family_inputs.large_value, factor=1e2, is_decisive=False),
            "token-v-irrelevant-1e4": partial(family_inputs.large_value, factor=1e4, is_decisive=False),
            "token-v-decisive-1e2": partial(family_inputs.large_value, factor=1e2, is_decisive=True),
            "token-v-decisive-1e4": partial(family_inputs.large_value, factor=1e4, is_decisive=True),
        },
        "value": {
            "value-mean-10": partial(family_inputs.gaussian, value_mean=10.0),
            "value-channels": family_inputs.value_channels,
        },
        "magnitude": {
            "tiny-queries": partial(family_inputs.scaled, query=1e-6),
            "tiny-values": partial(family_inputs.scaled, value=1e-6),
            "huge-queries": partial(family_inputs.scaled, query=1e3, key=1e-3),
            "huge-keys": partial(family_inputs.scaled, query=1e-3, key=1e3),
            "huge-values": partial(family_inputs.scaled, value=1e4),
            "one-hot": family_inputs.one_hot,
        },
        "constant": {
            "same-queries": partial(family_inputs.same, which=0),
            "same-keys": partial(family_inputs.same, which=1),
            "same-values": partial(family_inputs.same, which=2),
        },
        "offset": {"offset-k": family_inputs.offset_keys, "offset-q": family_inputs.offset_queries},
    }
    others = [
        Family(name, kind, draw, ORDINARY_LIMIT, is_lattice=name == "one-hot")
        for kind, draws in ordinary.items()
        for name, draw in draws.items()
    ]
    gaussians = [
        Family(
            f"random-{spread}",
            "random",
            partial(family_inputs.gaussian, spread=float(spread), value_mean=0.0),
            _noise_limit(spread),
            may_be_causal=True,
        )
        for spread in (1, 2, 3, 4)
    ]
    return [
        *sinks,
        *own_sinks,
        *peaks,
        Family("one-row-14", "one row", partial(family_inputs.one_row, gap=14.0), EVEN_LIMIT),
        *slopes,
        Family("field", "field", partial(family_inputs.of_bench, make=video_tensors), FIELD_LIMIT),
        *outliers,
        *others,
        *gaussians,
        Family(
            "text",
            "text",
            partial(family_inputs.of_bench, make=text_tensors),
            _noise_limit(LOGIT_SPREAD),
            may_be_causal=True,
        ),
    ]


FAMILIES: tuple[Family, ...] = tuple(_families())
KINDS: tuple[str, ...] = tuple(dict.fromkeys(family.kind for family in FAMILIES))
_BY_NAME = {family.name: family for family in FAMILIES}


def by_name(name: str) -> Family:
    """The family of that name.

    Example:
        >>> by_name("field").kind
        'field'
    """
    if name not in _BY_NAME:
        raise ValueError(f"name: expected a family such as {', '.join(list(_BY_NAME)[:3])}, got {name!r}")
    return _BY_NAME[name]


def of_kind(*kinds: str) -> tuple[Family, ...]:
    """All families of these kinds, see `KINDS`."""
    return tuple(family for family in FAMILIES if family.kind in kinds)


ESSENTIAL: tuple[Family, ...] = tuple(
    map(
        by_name,
        (
            *("sink-0", "sink-9", "sink-11", "sink-13", "sink-16", "sink-13-middle", "sink-13-several"),
            *("own-sink-13", "peaks-64-8", "peaks-128-8", "peaks-256-8", "peaks-128-12", "one-row-14"),
            *("rising-40", "falling-40", "step-up-12", "step-down-12", "field"),
            *("outliers-k-matched-1x100", "outliers-k-matched-3x30", "outliers-k-alone-3x30", "outliers-both-3x30"),
            *("outliers-q-matched-3x30", "outliers-q-alone-1x100"),
            *("token-k-irrelevant-1e3", "token-k-orthogonal-1e2", "token-k-decisive-1e2", "token-q-irrelevant-1e4"),
            *("token-v-irrelevant-1e4", "token-v-decisive-1e4"),
            *("value-mean-10", "tiny-queries", "tiny-values", "huge-keys", "one-hot", "same-keys", "offset-k"),
            *("random-2", "random-4", "text"),
        ),
    )
)
"""Each construction at least once, for where all of them take too long."""
