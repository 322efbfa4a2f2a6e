"""Quantization of Q, K, V and P in plain PyTorch, which specifies the rounding of the kernels.

    Q, K   INT8. `balance` evens out the channels between Q and K, then `mix` combines groups of eight channels. Each
           query has one scale (`query_scales`), each block of 64 keys has four (`key_scales`).
    V      FP8 E4M3 with one scale per channel (`quantize_fp8`).
    P      FP8 E4M3, rounded (`to_fp8`) or derived directly from its logarithm (`fp8_from_log2`).

Where INT8 would change scores by more than `COARSE_ERROR`, they are computed from unquantized Q and K (`is_coarse`).
docs/lab/hopper.md reports the gains. Tensors are (..., tokens, channels).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparge.masks.geometry import BLOCK_K, BLOCK_Q, ceil_div

INT8_MAX = 127.0
FP16_MAX = 65504.0
FP8_MAX = 448.0
FP8_MAX_BITS = 126
"""Bit pattern of 448 in E4M3; 127 is NaN."""
FP8_STEPS_PER_LOG2 = 8
"""E4M3 numbers per power of two."""
FP8_RANGE = 14.75
"""Log2 units below a tile's maximum that P in FP8 represents in full precision. Lower scores form a separate part."""
ROW_REF_RANGE = 64.0
"""Maximum number of log2 units that the row reference is below the row's maximum. float32 represents sums over this
range, and smaller terms do not change a sum."""
FP16_ROOM = 15.0
"""Log2 of the factor that P, which is at most 1, is multiplied by before it is rounded to FP16. The largest FP16 number
is almost 2^16."""
FP8_ACCUMULATOR_BITS = 13
"""Fraction bits that a Hopper tensor core keeps when it adds FP8 products (float32 has 23)."""
FP8_MMA_KEYS = 32
"""Keys that one FP8 matrix instruction consumes."""
BALANCE_KEYS = 4 * BLOCK_K
"""Keys per chunk in `balance`: the root mean square of a chunk is one sample of a channel's size in K."""
BALANCE_QUERIES = 8
"""Evenly spaced queries per block that `balance` samples."""
MIXED = 8
"""Number of neighboring channels that are mixed. One thread of a kernel loads them together."""
MIX_SIGNS = (1, 1, 1, -1, 1, 1, 1, -1)
"""Signs of the channels of a group before mixing. Without them, eight equal channels would become one large channel."""
COARSE_ERROR = 0.5
"""Root mean square error in nats that INT8 rounding of Q and K may cause in the scores of a tile.

The error is 0.011 for logits with a standard deviation of 1 nat, so logits of 45 nats reach the limit. So does a token
that is hundreds to thousands of times as large as the others: it determines the scale of all 16 keys of its group, and
in its own scores, the rounding error of the other operand is multiplied by its size."""
INT8_RMS = 40.0
"""Typical root mean square of INT8 values. The largest value, 127, is 2.9 times the root mean square of one token's 128
mixed channels, and 3.6 times that of the 16 tokens of a group."""
SMALLEST_SCALE = 1e-15
"""Scale of all-zero tokens."""
KEY_GROUPS = 4
"""Number of scales per key block. In a matrix product, a thread has keys of only one group, (key mod 8) div 2."""


def balance(query: Tensor, key: Tensor, keys_seen: Tensor) -> Tensor:
    """Return a factor r per channel, (B, Hkv, 1, D), so that the channels of q r and of k / r have similar sizes.

    q . k does not change. In trained models, a channel may be large in K and small in Q. It would determine K's scale
    and leave few of the 255 INT8 values to the other channels. r^2 is the channel's size in K divided by its size in Q.
    log2 r is rounded to eighths, so that it does not depend on the order of summation.

    The size in K is the geometric mean over chunks of `BALANCE_KEYS` keys of their root mean square. The size in Q is
    the geometric mean over query blocks of the maximum over `BALANCE_QUERIES` samples. Chunks and blocks are weighted
    by the number of tokens read. An outlier token thus changes the size of one chunk or block only.

    Args:
        query: (B, H, Sq, D), 0 where a query sees no key.
        key: (B, Hkv, Sk, D), smoothed.
        keys_seen: bool (B, Hkv, Sk).
    """
    eighths = balance_eighths(query, key, keys_seen).round()
    # A table, because the last bit of torch's exp2 depends on an element's position, and so heads would differ.
    power = torch.tensor([2 ** (step / 8) for step in range(8)], dtype=eighths.dtype, device=eighths.device)
    return torch.ldexp(power[(eighths % 8).long()], (eighths // 8).int())


def balance_eighths(query: Tensor, key: Tensor, keys_seen: Tensor) -> Tensor:
    """Return 8 log2 of the factors of `balance` before rounding, (B, Hkv, 1, D)."""
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
    """Return the positions of the queries that `balance` samples, (q_blocks, samples).

    A partial last block is extended backward to a full one.
    """
    starts = torch.arange(ceil_div(q_len, BLOCK_Q), device=device)[:, None] * BLOCK_Q
    starts = starts.clamp(max=max(q_len - BLOCK_Q, 0))
    sample = torch.arange(BALANCE_QUERIES, device=device)
    return starts + (2 * sample + 1) * min(q_len, BLOCK_Q) // (2 * BALANCE_QUERIES)


def _mean_log2(sizes: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean over dimension 2 of log2 of the positive, finite sizes; NaN if there are none."""
    is_size = (sizes > 0) & sizes.isfinite()
    weights = torch.where(is_size, weights, 0)
    return (weights * torch.where(is_size, sizes, 1.0).log2()).sum(2) / weights.sum(2)


def mix(tokens: Tensor) -> Tensor:
    """Multiply each group of eight channels by a Hadamard matrix and divide by 8: (..., S, D) -> (..., S, D').

    A token's largest channel determines its scale. Mixing spreads a large channel over eight channels, which lowers the
    scale by up to a factor of sqrt(8). The matrix is orthogonal: q . k = 8 mix(q) . mix(k). After division by 8, no sum
    exceeds its largest term. D' is D padded with zeros to a multiple of eight.
    """
    groups = torch.nn.functional.pad(tokens / MIXED, (0, -tokens.shape[-1] % MIXED)).unflatten(-1, (-1, MIXED))
    sums = (groups * groups.new_tensor(MIX_SIGNS)).unflatten(-1, (2, 2, 2))
    for axis in (-1, -2, -3):
        first, second = sums.unbind(axis)
        sums = torch.stack([first + second, first - second], axis)
    return sums.flatten(-4)


def query_scales(query: Tensor) -> Tensor:
    """Return the INT8 scale of each query, (..., S, 1)."""
    return _scale(query.abs().amax(-1, keepdim=True))


def key_scales(key: Tensor) -> Tensor:
    """Return the INT8 scale of each key, (..., S, 1): one number for each group of 16 keys of a block.

    Groups are interleaved, (key mod 8) div 2: in the layout of a matrix product, a thread then needs one scale of four.
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
    """Return the limit on one unit of an INT8 product, in log2 units. Scores are coarse if their unit reaches it.

    A score is the sum of D products of INT8 values with root mean square `INT8_RMS`. Each factor has a rounding error
    with standard deviation 1 / sqrt(12), which is multiplied by the other factor. The error of the sum is INT8_RMS
    sqrt(D / 6) units. At D 128, these are 185 units, and the limit is 2^-8.
    """
    return COARSE_ERROR / (INT8_RMS * math.sqrt(head_dim / 6) * math.log(2.0))


def is_coarse(query_scale: Tensor, key_scale: Tensor, scale: float, head_dim: int) -> Tensor:
    """Return which scores to compute from unquantized Q and K: (..., n, 1), (..., m, 1) -> (..., n, m) bool.

    A tile is computed from unquantized Q and K if any of its scores is coarse. Tokens that are not finite are ignored,
    because their scores are not finite either.
    """
    unit = query_scale * key_scale.mT * abs(scale) / math.log(2.0)
    return (unit >= coarse_unit(head_dim)) & unit.isfinite()


def quantize_int8(tokens: Tensor, scales: Tensor) -> Tensor:
    """Quantize tokens to INT8 with the given scales: (..., S, D), (..., S, 1) -> (..., S, D) int8."""
    return (tokens / scales).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)


def quantize_fp8(value: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to E4M3 with one scale = absmax / 448 per channel: (..., S, Dv) -> (..., S, Dv), (..., 1, Dv).

    Values that are not finite become NaN and do not affect the scale, so they affect only the queries that see them.
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
    """Return the E4M3 number whose bit pattern is nearest to 126 + 8 x and at least 0: about 448 * 2^x, without exp2.

    E4M3 has eight numbers per power of two, and the bit pattern is almost linear in the logarithm. 126 is the pattern
    of 448. Averaged over a power of two, the result is 0.9995 of the exact value. The division by the row sum of these
    results removes this factor.
    """
    bits = (FP8_MAX_BITS + FP8_STEPS_PER_LOG2 * exponent).round().clamp(0, FP8_MAX_BITS)
    numbers = bits.nan_to_num(0.0).to(torch.uint8).view(torch.float8_e4m3fn).to(exponent.dtype)
    return torch.where(exponent.isnan(), exponent, numbers)


def fp8_tensor_core(probability: Tensor, value: Tensor, accumulator: Tensor) -> Tensor:
    """Compute P V + accumulator as Hopper's FP8 tensor cores do, bit by bit: (M, K), (K, Dv), (M, Dv) -> (M, Dv).

    Each instruction takes 32 keys. It aligns their products and the accumulator to the largest exponent among them (the
    exponent of a product is the sum of its factors' exponents), truncates each term 13 bits below that exponent, adds
    the terms, and truncates the sum to 13 fraction bits. Products much smaller than the accumulator are lost. All bits
    of the result are equal to those of an H200.
    """
    for p, v in zip(probability.split(FP8_MMA_KEYS, 1), value.split(FP8_MMA_KEYS, 0), strict=True):
        largest = (_exponent(p)[:, :, None] + _exponent(v)).amax(1)
        largest = torch.maximum(largest, _exponent(accumulator))  # [M, Dv]
        quantum = _quantum(largest, accumulator.dtype)
        # Sums of multiples of one power of two are exact, so the sum is scaled once instead of each product.
        multiples = (p[:, :, None] * v).div_(quantum[:, None]).trunc_().sum(1) + (accumulator / quantum).trunc_()
        aligned = multiples * quantum
        quantum = _quantum(_exponent(aligned), aligned.dtype)
        accumulator = (aligned / quantum).trunc_() * quantum
    return accumulator


def _exponent(values: Tensor) -> Tensor:
    """Return floor(log2 |x|), or a very low number for 0."""
    exponent = torch.frexp(values)[1] - 1
    return torch.where(values == 0, -(2**9), exponent)


def _quantum(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the value of the last bit that is kept: 13 bits below the exponent."""
    return torch.ldexp(torch.ones_like(exponent, dtype=dtype), exponent - FP8_ACCUMULATOR_BITS)
