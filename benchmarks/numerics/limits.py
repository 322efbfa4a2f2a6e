"""The accuracy contract of dense quantized attention: errors on an input, and their limits.

The limit of the output is `Family.limit`. If P is computed without exp2, the error may be about `WITHOUT_EXP2_FACTOR`
times the error with exp2. The limits of the LSE are `LSE_MEAN` on average and `LSE_WORST` in any row, plus the
unavoidable error of quantizing Q and K to INT8, which `lse_rounding` derives from the input.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.numerics.families import Family
from sparge.backends.gpu.peak_handling import EVERY_TILE_KEYS
from sparge.evaluate.oracle import ExactRows, sampled_error, score_chunks
from sparge.masks.geometry import BLOCK_K
from sparge.numerics import quantization as quant

LSE_MEAN, LSE_WORST = 0.002, 0.02
WITHOUT_EXP2_FACTOR, WITHOUT_EXP2_SLACK = 1.15, 2e-3
MEAN_DEVIATIONS, WORST_DEVIATIONS = 3.0, 6.0
"""Allowed standard deviations of the mean and of the worst row. Rows that attend to the same key share its rounding
error, so the mean over these rows varies as much as one row."""
LOST_KEYS = 127
"""Largest number of other keys in the tile of a peak."""
ROUNDED_P_NOISE = 0.0265
"""Relative standard deviation of values rounded to E4M3. The LSE sums rounded values of P, so it has this error."""


class Errors(NamedTuple):
    """Relative L1 error of the output, and |LSE - exact| in nats: the mean and the worst of all rows."""

    relative_l1: float
    lse_mean: float
    lse_worst: float


def errors_of(output: Tensor, lse: Tensor, rows: Tensor, exact: ExactRows) -> Errors:
    """Return the errors of output (B, H, S_q, D_v) and LSE (B, H, S_q) at the rows of ``exact``.

    Raises:
        ValueError: the output or the LSE contains NaN or Inf.
    """
    lse_error = (lse[:, :, rows].double() - exact.lse).abs()
    worst = float(lse_error.max())
    if not math.isfinite(worst):
        raise ValueError(f"expected a finite LSE, got an error of {worst}")
    return Errors(sampled_error(output, rows, exact.output), float(lse_error.mean()), worst)


def limit_without_exp2(fp8_error: float, family: Family, kv_len: int) -> float:
    """Return the limit of the relative L1 error of "int8_fp8_fast", given the error of "int8_fp8".

    "int8_fp8" rounds weights 15 to 19 powers of two below a peak to the smallest FP8 numbers; "int8_fp8_fast" rounds
    them to 0.
    """
    return WITHOUT_EXP2_FACTOR * fp8_error + WITHOUT_EXP2_SLACK + error_of_lost_keys(family, kv_len)


def error_of_lost_keys(family: Family, kv_len: int) -> float:
    """Return the output error if keys in the tile of a peak are lost, which can happen if few queries share the peak.

    It is 0 if every tile is checked for peaks.
    """
    return LOST_KEYS / kv_len if family.kind == "own sink" and kv_len > EVERY_TILE_KEYS else 0.0


def output_limit(family: Family, head_dim: int, kv_len: int) -> float:
    """Return the maximum relative L1 error of a family's output.

    This is the family's limit, which is for 128 channels, plus `error_of_lost_keys`. Limits of sinks are larger for
    fewer channels: the rounding error of a sink's logit has the standard deviation
    m / 311 sqrt(gap^2 / D + gap / sqrt(D)), where m is the largest channel divided by the standard deviation of the
    channels (see `families.SINK_ROUNDING`). For gaps above sqrt(D), this is proportional to 1 / sqrt(D).
    """
    limit = family.limit * (max(1.0, math.sqrt(128 / head_dim)) if family.kind in ("sink", "own sink") else 1.0)
    return limit + error_of_lost_keys(family, kv_len)


def lse_limits(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    exact: ExactRows,
    *,
    is_causal: bool = False,
    without_exp2: bool = False,
    is_lattice: bool = False,
) -> tuple[float, float]:
    """Return the limits of the LSE errors of these rows, for the arguments of `lse_rounding`.

    Entries with few distinct values (``is_lattice``) have equal rounding errors: the sum of D errors of up to half a
    step grows with D, not with sqrt(D). Half a step is sqrt(3) standard deviations.
    """
    deviation = lse_rounding(query, key, rows, exact, is_causal=is_causal, without_exp2=without_exp2)
    of_mean, of_worst = MEAN_DEVIATIONS, WORST_DEVIATIONS
    if is_lattice:
        of_mean = of_worst = math.sqrt(3 * query.shape[-1])
    mean = LSE_MEAN + of_mean * float(deviation.square().mean().sqrt())
    return mean, LSE_WORST + of_worst * float(deviation.max())


def lse_rounding(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    exact: ExactRows,
    *,
    is_causal: bool = False,
    without_exp2: bool = False,
) -> Tensor:
    """Return the standard deviation of the LSE error, (B, H, rows), if Q and K are quantized to INT8.

    The mean of the keys is subtracted, channels are balanced between Q and K and mixed (`quant.balance`, `quant.mix`),
    and a step is 1/127 of the largest entry of a query or a key block. Rounding with step s adds the variance s^2 / 12
    to an entry. An error e of a query changes the LSE by e . sum_j p_j k_j; errors of keys are independent. Logits
    whose steps would be too coarse (`quant.is_coarse`) are not quantized. With ``without_exp2``, the LSE is
    computed from the rounded P.
    """
    group = query.shape[1] // key.shape[1]
    last_visible = rows + key.shape[2] - query.shape[2] if is_causal else None
    scale, deviation = query.shape[-1] ** -0.5, torch.empty_like(exact.lse)
    centered = key.double() - key.double().mean(2, keepdim=True)
    factors = quant.balance(query.double(), centered, torch.ones_like(centered[..., 0], dtype=torch.bool))
    for batch, head in torch.cartesian_prod(*map(torch.arange, exact.lse.shape[:2])).view(-1, 2).tolist():
        queries, keys = query[batch, head].double(), key[batch, head // group].double()
        balance = factors[batch, head // group]
        queries, smooth = queries[rows], quant.mix(centered[batch, head // group] / balance)
        balanced = quant.mix(queries * balance) * quant.MIXED
        key_step = _block_step(smooth)
        query_step = balanced.abs().amax(1) / quant.INT8_MAX
        pooled, (key_part, squares) = torch.zeros_like(balanced), queries.new_zeros(2, len(queries))
        for chunk, scores in score_chunks(queries, keys, last_visible):
            weights = (scores - exact.lse[batch, head, :, None]).exp()
            squares += weights.square().sum(1)
            steps = query_step[:, None], key_step[chunk][:, None]
            rounded = weights.masked_fill(quant.is_coarse(*steps, scale, query.shape[-1]), 0.0)
            pooled += rounded @ smooth[chunk]
            key_part += rounded.square() @ key_step[chunk].square()
        variance = (query_step.square() * pooled.square().sum(1) + key_part * balanced.square().sum(1)) / 12
        variance = variance / query.shape[-1] + (ROUNDED_P_NOISE**2 * squares if without_exp2 else 0.0)
        deviation[batch, head] = variance.sqrt()
    return deviation


def _block_step(key: Tensor) -> Tensor:
    """Return the quantization step of each key, 1/127 of the largest entry of its block: (S_k, D) -> (S_k,)."""
    largest = torch.nn.functional.pad(key.abs().amax(1), (0, -len(key) % BLOCK_K)).unflatten(0, (-1, BLOCK_K)).amax(1)
    return (largest / quant.INT8_MAX).repeat_interleave(BLOCK_K)[: len(key)]
