"""Construct the inputs of `families`, with prescribed logits, from components in orthogonal directions.

Every function takes a `Draw` and returns query (1, H, S_q, D), key and value (1, H_kv, S_k, D) in float32. The mean of
the values is as large as their standard deviation, so the output is larger than its noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparge.evaluate.inputs import Inputs, TensorShape

TAIL_SPREAD = 0.3
"""Standard deviation of the logits of an even tail, in nats."""
LOGIT_SPREAD = 2.0
"""Standard deviation of ordinary logits, in nats."""
SMALL_MEAN = 0.3
"""Mean of V in families where wrong logits must affect the output. A large mean would hide them."""
DECISIVE_SHARE = 0.95
PEAK_STRIDE, FIRST_PEAK = 64, 37
"""In `one_row`, every 64th query has a peak, starting with query 37."""
OWNERS = 32
"""Number of groups of queries with their own sink, in `own_sinks`."""


@dataclass(frozen=True)
class Draw:
    """The sizes and the random generator of one problem."""

    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    generator: torch.Generator

    @property
    def device(self) -> torch.device:
        return self.generator.device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def queries(self) -> Tensor:
        """Return unit Gaussians (1, H, S_q, D)."""
        return self.normal(1, self.heads, self.q_len, self.head_dim)

    def keys(self) -> Tensor:
        """Return unit Gaussians (1, H_kv, S_k, D)."""
        return self.normal(1, self.kv_heads, self.kv_len, self.head_dim)

    def values(self, mean: float = 1.0) -> Tensor:
        """Return Gaussians (1, H_kv, S_k, D). The mean of each channel is a Gaussian of standard deviation ``mean``."""
        return self.keys() + mean * self.normal(1, self.kv_heads, 1, self.head_dim)

    def direction(self) -> Tensor:
        """Return a random unit vector per key head: (1, H_kv, 1, D)."""
        return torch.nn.functional.normalize(self.normal(1, self.kv_heads, 1, self.head_dim), dim=-1)

    def of_queries(self, per_kv_head: Tensor) -> Tensor:
        """Repeat values per key head for every query head that uses it."""
        return per_kv_head.repeat_interleave(self.heads // self.kv_heads, 1)

    def channels(self, count: int) -> Tensor:
        """Return ``count`` channels spread over the head dimension."""
        return torch.arange(count, device=self.device) * self.head_dim // count + self.head_dim // (2 * count)


def _without(vectors: Tensor, direction: Tensor) -> Tensor:
    """Return the part of vectors that is orthogonal to a unit vector."""
    return vectors - (vectors * direction).sum(-1, keepdim=True) * direction


def _levels(draw: Draw, levels: Tensor, spread: float = TAIL_SPREAD, noiseless: Tensor | None = None) -> Inputs:
    """Return inputs where key j has the logit ``levels[j]`` for every query, plus noise of std ``spread``.

    The noise is in orthogonal directions. Keys at the positions ``noiseless`` have no noise.
    """
    direction, root = draw.direction(), math.sqrt(draw.head_dim)
    span = max(float(levels.max() - levels.min()), 1.0)
    along = math.sqrt(span * root)  # split evenly between query and key
    query = draw.of_queries(direction)
    query = along * query + _without(draw.queries(), query)
    noise = spread * _without(draw.keys(), direction)
    if noiseless is not None:
        noise[:, :, noiseless] = 0.0
    return query, (levels * root / along)[:, None] * direction + noise, draw.values()


def peaks(draw: Draw, gap: float, positions: Callable[[int], Sequence[int]], zero_value: bool = True) -> Inputs:
    """Return inputs with peaks: keys exactly ``gap`` nats above an even tail.

    Args:
        positions: returns the positions of the peaks, given the number of keys.
        zero_value: whether the value of the peaks is 0.
    """
    peak_keys = torch.tensor(positions(draw.kv_len), device=draw.device)
    levels = torch.zeros(draw.kv_len, device=draw.device)
    levels[peak_keys] = gap
    query, key, value = _levels(draw, levels, noiseless=peak_keys)
    if zero_value:
        value[:, :, peak_keys] = 0.0
    return query, key, value


def one_in_every_tile(kv_len: int, tile: int) -> range:
    return range(tile // 3, kv_len, tile)


def own_sinks(draw: Draw, gap: float) -> Inputs:
    """Return inputs where each group of 1/32 of the queries has its own sink. Sampling misses such small groups."""
    count, root = min(OWNERS, draw.head_dim // 2), math.sqrt(draw.head_dim)
    directions = torch.linalg.qr(draw.normal(1, draw.kv_heads, draw.head_dim, count)).Q.mT  # (1, H_kv, owners, D)
    along = math.sqrt(gap * root)
    of_queries = draw.of_queries(directions)
    owner = torch.arange(draw.q_len, device=draw.device) * count // draw.q_len
    query, key = draw.queries(), TAIL_SPREAD * draw.keys()
    query = query - query @ of_queries.mT @ of_queries + along * of_queries[:, :, owner]
    key = key - key @ directions.mT @ directions
    positions = torch.arange(count, device=draw.device) * draw.kv_len // count + 5
    key[:, :, positions] = gap * root / along * directions
    value = draw.values()
    value[:, :, positions] = 0.0
    return query, key, value


def one_row(draw: Draw, gap: float) -> Inputs:
    """Return inputs where 1 of 64 queries attends to a key in the last tile, which the other queries ignore."""
    direction, root = draw.direction(), math.sqrt(draw.head_dim)
    along = math.sqrt(gap * root)
    query = _without(draw.queries(), draw.of_queries(direction))
    query[:, :, min(FIRST_PEAK, draw.q_len - 1) :: PEAK_STRIDE] += along * draw.of_queries(direction)
    key = TAIL_SPREAD * _without(draw.keys(), direction)
    key[:, :, draw.kv_len - 41] = gap * root / along * direction[:, :, 0]
    value = draw.values()
    value[:, :, draw.kv_len - 41] *= 4.0
    return query, key, value


def slope(draw: Draw, rise: float) -> Inputs:
    return _levels(draw, torch.linspace(0.0, rise, draw.kv_len, device=draw.device))


def step(draw: Draw, rise: float) -> Inputs:
    """Return inputs where the last third of the keys is ``rise`` nats above the rest. The higher part has the value 0.

    The step is at a tile border, so logits are even within each tile.
    """
    is_late = torch.arange(draw.kv_len, device=draw.device) >= draw.kv_len * 2 // 3 // 256 * 256
    query, key, value = _levels(draw, torch.where(is_late, rise, 0.0))
    value[:, :, is_late if rise > 0 else ~is_late] = 0.0
    return query, key, value


def last_queries_of(draw: Draw, make: Callable[[TensorShape, torch.Generator], Inputs]) -> Inputs:
    """Return inputs from ``make``, which have as many queries as keys, with only the last queries."""
    query, key, value = make((1, draw.heads, draw.kv_len, draw.head_dim), draw.generator)
    group = draw.heads // draw.kv_heads
    return query[:, :, -draw.q_len :], key[:, ::group], value[:, ::group]


def gaussian(draw: Draw, spread: float = LOGIT_SPREAD, value_mean: float = 1.0) -> Inputs:
    """Return Gaussian inputs whose logits have the standard deviation ``spread``."""
    return spread * draw.queries(), draw.keys(), draw.values(value_mean)


def outlier_channels(draw: Draw, where: str, count: int, factor: float) -> Inputs:
    """Return inputs with ordinary logits and ``count`` channels that are ``factor`` times as large in K, Q or both.

    In "matched" families, these channels are smaller by the same factor in the other tensor, so they contribute no more
    to a logit than other channels.
    """
    side, _, other = where.partition("-")
    of_query, of_key = torch.ones(2, draw.head_dim, device=draw.device)
    channels = draw.channels(count)
    if side in ("q", "both"):
        of_query[channels] = factor
    if side in ("k", "both"):
        of_key[channels] = factor
    if other == "matched":
        (of_query if side == "k" else of_key)[channels] = 1 / factor
    query, key, value = gaussian(draw, value_mean=SMALL_MEAN)
    spread = float((of_query * of_key).square().mean().sqrt())
    return query * of_query / spread, key * of_key, value


def offset_keys(draw: Draw) -> Inputs:
    """Return inputs with 3 channels of K shifted by 50 standard deviations, which does not change the softmax."""
    query, key, value = gaussian(draw, value_mean=SMALL_MEAN)
    key[..., draw.channels(3)] += 50.0
    return query, key, value


def offset_queries(draw: Draw) -> Inputs:
    """Return inputs whose queries share a component 4 times as large as their differences."""
    query, key, value = gaussian(draw, value_mean=SMALL_MEAN)
    offset = 4 * LOGIT_SPREAD * draw.normal(1, draw.heads, 1, draw.head_dim)
    return (query + offset) / math.sqrt(17.0), key, value


def irrelevant_key(draw: Draw, factor: float) -> Inputs:
    """Return inputs with one key ``factor`` times as large in two channels that cancel exactly in every logit."""
    query, key, value = gaussian(draw, value_mean=SMALL_MEAN)
    first, second = draw.channels(2).tolist()
    query[..., second] = query[..., first]
    key[:, :, middle(draw.kv_len), first] = factor
    key[:, :, middle(draw.kv_len), second] = -factor
    return query, key, value


def orthogonal_key(draw: Draw, factor: float) -> Inputs:
    """Return inputs with one key ``factor`` times as large, in a direction orthogonal to all queries."""
    query, key, value = gaussian(draw, value_mean=SMALL_MEAN)
    direction = draw.direction()
    key[:, :, middle(draw.kv_len)] = factor * math.sqrt(draw.head_dim) * direction[:, :, 0]
    return _without(query, draw.of_queries(direction)), key, value


def decisive_key(draw: Draw, factor: float) -> Inputs:
    """Return inputs with one key that is large in a channel where queries are small. It gets most of the weight."""
    query, key, value = gaussian(draw, value_mean=SMALL_MEAN)
    channel = int(draw.channels(1))
    query[..., channel] = _decisive_level(draw) * math.sqrt(draw.head_dim) / factor
    key[:, :, middle(draw.kv_len)] = 0.0
    key[:, :, middle(draw.kv_len), channel] = factor
    return query, key, value


def irrelevant_query(draw: Draw, factor: float) -> Inputs:
    """Return inputs with one query ``factor`` times as large in two channels that cancel exactly in every logit."""
    query, key, value = gaussian(draw, value_mean=SMALL_MEAN)
    first, second = draw.channels(2).tolist()
    key[..., second] = -key[..., first]
    query[:, :, draw.q_len // 2, first] = factor
    query[:, :, draw.q_len // 2, second] = factor
    return query, key, value


def large_value(draw: Draw, factor: float, is_decisive: bool) -> Inputs:
    """Return inputs with one value ``factor`` times as large, whose key gets most of the weight or none."""
    position = torch.tensor([middle(draw.kv_len)], device=draw.device)
    levels = torch.zeros(draw.kv_len, device=draw.device)
    levels[position] = _decisive_level(draw) if is_decisive else -20.0
    query, key, value = _levels(draw, levels, LOGIT_SPREAD, noiseless=position)
    value[:, :, position] *= factor
    return query, key, value


def value_channels(draw: Draw) -> Inputs:
    """Return inputs whose channels of V are multiplied by factors from 2^-8 to 2^8."""
    query, key, value = gaussian(draw)
    return query, key, value * 2 ** torch.linspace(-8, 8, draw.head_dim, device=draw.device)


def scaled(draw: Draw, query: float = 1.0, key: float = 1.0, value: float = 1.0) -> Inputs:
    """Return ordinary inputs, multiplied by factors."""
    tensors = gaussian(draw)
    return tensors[0] * query, tensors[1] * key, tensors[2] * value


def one_hot(draw: Draw) -> Inputs:
    """Return inputs with keys of +-10 in every channel. Each query equals a key, hundreds of nats above the others."""
    key = 10.0 * draw.keys().sign()
    chosen = torch.randint(draw.kv_len, (draw.q_len,), generator=draw.generator, device=draw.device)
    return draw.of_queries(key[:, :, chosen]), key, draw.values()


def same(draw: Draw, which: int) -> Inputs:
    """Return inputs where all queries, all keys or all values are equal."""
    tensors = list(gaussian(draw))
    tensors[which] = tensors[which][:, :, :1].expand_as(tensors[which])
    return tensors[0], tensors[1], tensors[2]


def middle(kv_len: int) -> int:
    """Return a position in the middle of the keys that is not at a tile border."""
    return kv_len // 2 + 5


def _decisive_level(draw: Draw) -> float:
    """Return the logit of a key that gets `DECISIVE_SHARE` of the weight among any number of ordinary keys."""
    others = math.log(draw.kv_len) + LOGIT_SPREAD**2 / 2
    return others + math.log(DECISIVE_SHARE / (1 - DECISIVE_SHARE))
