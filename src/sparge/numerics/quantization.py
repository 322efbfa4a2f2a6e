"""8-bit codes of Q, K, V and P in plain PyTorch: the specification of what the kernels round, and how.

    Q, K   INT8. Channels are balanced between them (`balance`), then mixed in groups of eight (`mix`); a query has a
           scale of its own (`query_scales`), a block of 64 keys has four (`key_scales`).
    V      FP8 E4M3, a scale per channel (`quantize_fp8`).
    P      FP8 E4M3, rounded (`to_fp8`) or as codes straight from the logarithm (`fp8_from_log2`).

Where rounding would move scores by more than `COARSE_ERROR`, they are computed from Q and K themselves (`is_coarse`).
docs/numerics.md has what each is worth. Tensors are (..., tokens, channels).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparge.masks.geometry import BLOCK_K, BLOCK_Q, ceil_div

INT8_MAX = 127.0
FP16_MAX = 65504.0
FP8_MAX = 448.0
FP8_TOP_CODE = 126
"""Of 448; 127 is NaN."""
FP8_CODES_PER_OCTAVE = 8
FP8_RANGE = 14.75
"""Octaves below a tile's maximum that P holds in full precision; what lies below is a part of its own."""
REACH = 64.0
"""Octaves that a tile's maximum may lie below the row's before its P counts from there instead: what float32 can hold,
and more than any sum can notice."""
FP16_ROOM = 15.0
"""Octaves that P is raised by before it is rounded to FP16, which has few below 1 and sixteen above."""
FP8_ACCUMULATOR_BITS = 13
"""Fraction bits a Hopper tensor core keeps when it adds FP8 products (not the 23 of fp32)."""
FP8_MMA_KEYS = 32
"""Keys one FP8 matrix instruction consumes."""
BALANCE_KEYS = 4 * BLOCK_K
"""Keys whose root mean square in a channel is one vote about that channel's size."""
BALANCE_QUERIES = 8
"""Evenly spaced queries of a block that are looked at for the same purpose."""
MIXED = 8
"""Neighbouring channels that are mixed: what one thread of a kernel loads at once."""
MIX_SIGNS = (1, 1, 1, -1, 1, 1, 1, -1)
"""Of the channels of a group, before they are mixed. Without, eight equal channels would become one large one."""
COARSE_ERROR = 0.5
"""Nats, root mean square, that rounding Q and K to INT8 may move the scores of a tile by.

Logits with a standard deviation of 1 nat move by 0.011, so this takes 45 nats, or a token that is hundreds to thousands
of times as large as the others: its scale is that of all 16 keys of its group, and its own scores carry the rounding of
the other operand times its size."""
CODE_SIZE = 40.0
"""Root mean square of INT8 values: the largest, 127, is 2.9 times that of one token's 128 mixed channels, and 3.6 times
that of the 16 tokens of a group."""
SMALLEST_SCALE = 1e-15
"""Scale of tokens that are 0."""
KEY_GROUPS = 4
"""Scales of a key block. Group (key mod 8) div 2 is what one thread of a matrix product holds."""


def balance(query: Tensor, key: Tensor, keys_seen: Tensor) -> Tensor:
    """Factors r of each channel, (B, Hkv, 1, D): q r and k / r have channels of like size, and the same q . k.

    A channel that is large in K and small in Q, as trained models have them, would decide K's scale and leave the other
    channels few of the 255 codes. r^2 is the channel's size in K by its size in Q; log2 r is rounded to eighths, so
    that the order in which sums are taken does not show. Sizes are geometric means: over chunks of `BALANCE_KEYS` keys,
    of the root mean square; over blocks of queries, of the largest of `BALANCE_QUERIES`. Each chunk and block has as
    many votes as tokens were looked at; an outlying token moves only the size of its own.

    Args:
        query: (B, H, Sq, D), 0 where a query sees nothing.
        key: (B, Hkv, Sk, D), smoothed.
        keys_seen: bool (B, Hkv, Sk).
    """
    eighths = balance_eighths(query, key, keys_seen).round()
    # A table: torch's exp2 may differ in the last bit from place to place, and heads must not depend on their place.
    octave = torch.tensor([2 ** (step / 8) for step in range(8)], dtype=eighths.dtype, device=eighths.device)
    return torch.ldexp(octave[(eighths % 8).long()], (eighths // 8).int())


def balance_eighths(query: Tensor, key: Tensor, keys_seen: Tensor) -> Tensor:
    """8 log2 of what `balance` returns, before it is rounded, (B, Hkv, 1, D)."""
    usable = keys_seen[..., None] & key.isfinite().all(-1, keepdim=True)
    squares = torch.where(usable, key, 0.0).square().split(BALANCE_KEYS, 2)
    counts = torch.stack([part.sum(2) for part in usable.split(BALANCE_KEYS, 2)], 2)  # [B, Hkv, chunks, 1]
    means = torch.stack([part.sum(2) for part in squares], 2) / counts.clamp(min=1)
    samples = query[:, :, balance_samples(query.shape[2], query.device)]  # [B, H, blocks, samples, D]
    usable = samples.isfinite().all(-1, keepdim=True) & (samples != 0).any(-1, keepdim=True)
    largest = torch.where(usable, samples, 0.0).abs().amax(3)
    # Blocks of all heads of a group: [B, Hkv, group * blocks, D].
    largest, used = (part.unflatten(1, (key.shape[1], -1)).flatten(2, 3) for part in (largest, usable.sum(3)))
    eighths = (_mean_log2(means.sqrt(), counts) - _mean_log2(largest, used)) * 4
    return eighths.nan_to_num(0.0)[:, :, None]


def balance_samples(q_len: int, device: torch.device) -> Tensor:
    """Positions of the queries that `balance` looks at, (q_blocks, samples). The last block reaches back, if short."""
    starts = torch.arange(ceil_div(q_len, BLOCK_Q), device=device)[:, None] * BLOCK_Q
    starts = starts.clamp(max=max(q_len - BLOCK_Q, 0))
    sample = torch.arange(BALANCE_QUERIES, device=device)
    return starts + (2 * sample + 1) * min(q_len, BLOCK_Q) // (2 * BALANCE_QUERIES)


def _mean_log2(sizes: Tensor, votes: Tensor) -> Tensor:
    """Mean of log2 over dimension 2, each as often as it has votes, if above 0 and finite; NaN where none is."""
    is_size = (sizes > 0) & sizes.isfinite()
    votes = torch.where(is_size, votes, 0)
    return (votes * torch.where(is_size, sizes, 1.0).log2()).sum(2) / votes.sum(2)


def mix(tokens: Tensor) -> Tensor:
    """Each group of eight channels as the eight sums of a Hadamard matrix, by 8: (..., S, D) -> (..., S, D').

    A token's largest channel decides what its codes are worth. Mixed, a large channel becomes eight of middling size,
    and the scale falls by up to 8 / sqrt(8). The matrix is orthogonal: q . k = 8 mix(q) . mix(k). Divided by 8, no sum
    exceeds the largest of its terms. D' is D, filled with zeros to a multiple of eight.
    """
    groups = torch.nn.functional.pad(tokens / MIXED, (0, -tokens.shape[-1] % MIXED)).unflatten(-1, (-1, MIXED))
    sums = (groups * groups.new_tensor(MIX_SIGNS)).unflatten(-1, (2, 2, 2))
    for axis in (-1, -2, -3):
        first, second = sums.unbind(axis)
        sums = torch.stack([first + second, first - second], axis)
    return sums.flatten(-4)


def query_scales(query: Tensor) -> Tensor:
    """What a code of each query is worth, (..., S, 1)."""
    return _scale(query.abs().amax(-1, keepdim=True))


def key_scales(key: Tensor) -> Tensor:
    """What a code of each key is worth, (..., S, 1): one number for each group of 16 keys of a block.

    Groups are interleaved, (key mod 8) div 2: in the layout of a matrix product a thread then needs one of the four.
    """
    length = key.shape[-2]
    largest = key.abs().amax(-1)
    padded = torch.nn.functional.pad(largest, (0, -length % BLOCK_K))
    grouped = padded.unflatten(-1, (-1, BLOCK_K // 8, KEY_GROUPS, 2))  # [..., blocks, 8, groups, 2]
    scales = _scale(grouped.amax((-3, -1), keepdim=True)).expand_as(grouped)
    return scales.flatten(-4)[..., :length, None]


def _scale(largest: Tensor) -> Tensor:
    scale = largest / INT8_MAX
    return torch.where(scale == 0, SMALLEST_SCALE, scale)


def coarse_unit(head_dim: int) -> float:
    """Return the worth of one unit of an INT8 product, in log2 units, from which on its scores are coarse.

    Each of D products of two INT8 values of `CODE_SIZE` is off by two rounding errors of deviation 1 / sqrt(12) times
    the other value. The sum is off by CODE_SIZE sqrt(D / 6) units, 185 at D 128: a unit may be worth 2^-8 there.
    """
    return COARSE_ERROR / (CODE_SIZE * math.sqrt(head_dim / 6) * math.log(2.0))


def is_coarse(query_scale: Tensor, key_scale: Tensor, scale: float, head_dim: int) -> Tensor:
    """Return whether scores must be computed from Q and K themselves, (..., n, 1), (..., m, 1) -> (..., n, m) bool.

    A kernel decides for whole tiles: a tile is computed from Q and K if one of its scores must be. Where a token is not
    finite, its scores are not either, and nothing is decided by them.
    """
    unit = query_scale * key_scale.mT * abs(scale) / math.log(2.0)
    return (unit >= coarse_unit(head_dim)) & unit.isfinite()


def quantize_int8(tokens: Tensor, scales: Tensor) -> Tensor:
    """INT8 codes of numbers whose unit is given, (..., S, D), (..., S, 1) -> (..., S, D) int8."""
    return (tokens / scales).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)


def quantize_fp8(value: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 numbers and one scale = absmax / 448 per channel: (..., S, Dv) -> (..., S, Dv), (..., 1, Dv).

    Values that are not finite become NaN and leave the scale alone: they reach the rows that see them, no others.
    """
    finite = value.isfinite()
    scale = torch.where(finite, value, 0.0).abs().amax(-2, keepdim=True) / FP8_MAX
    scale = torch.where(scale == 0, 1.0, scale)
    return to_fp8(torch.where(finite, value / scale, math.nan)), scale


def to_fp8(values: Tensor) -> Tensor:
    """Round to E4M3 (saturating at 448), returned as numbers of the input's dtype."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float32).to(torch.float8_e4m3fn).to(values.dtype)


def to_fp16(values: Tensor) -> Tensor:
    """Round to FP16, finite values saturating at 65504, returned as numbers of the input's dtype."""
    return torch.where(values.isfinite(), values.clamp(-FP16_MAX, FP16_MAX), values).half().to(values.dtype)


def fp8_from_log2(exponent: Tensor) -> Tensor:
    """The E4M3 number whose code is nearest to 126 + 8 x, from code 0 up: about 448 * 2^x, without computing it.

    E4M3 has eight codes per octave, and its code is almost linear in the logarithm. 126 is the code of 448; seen over
    an octave the numbers are right on average (.9995), and a row sum of the same numbers takes out the rest.
    """
    codes = (FP8_TOP_CODE + FP8_CODES_PER_OCTAVE * exponent).round().clamp(0, FP8_TOP_CODE)
    numbers = codes.nan_to_num(0.0).to(torch.uint8).view(torch.float8_e4m3fn).to(exponent.dtype)
    return torch.where(exponent.isnan(), exponent, numbers)


def fp8_tensor_core(probability: Tensor, value: Tensor, accumulator: Tensor) -> Tensor:
    """P V + accumulator as Hopper's FP8 tensor cores add, bit by bit: (M, K), (K, Dv), (M, Dv) -> (M, Dv).

    Each instruction takes 32 keys. It aligns their products and the accumulator to the largest exponent among them (of
    a product: the sum of its factors' exponents), cuts each off 13 bits below that, adds, and cuts the sum to 13
    fraction bits. Small products vanish beside a large accumulator. Equal in every bit to results of an H200.
    """
    for p, v in zip(probability.split(FP8_MMA_KEYS, 1), value.split(FP8_MMA_KEYS, 0), strict=True):
        largest = (_exponent(p)[:, :, None] + _exponent(v)).amax(1)
        largest = torch.maximum(largest, _exponent(accumulator))  # [M, Dv]
        aligned = _cut(p[:, :, None] * v, largest[:, None]).sum(1) + _cut(accumulator, largest)
        accumulator = _cut(aligned, _exponent(aligned))
    return accumulator


def _exponent(values: Tensor) -> Tensor:
    """floor(log2 |x|), very low for 0."""
    exponent = torch.frexp(values)[1] - 1
    return torch.where(values == 0, -(2**9), exponent)


def _cut(values: Tensor, exponent: Tensor) -> Tensor:
    """Truncate towards zero what lies more than 13 bits below the exponent."""
    quantum = torch.ldexp(torch.ones_like(exponent, dtype=values.dtype), exponent - FP8_ACCUMULATOR_BITS)
    return (values / quantum).trunc_() * quantum
