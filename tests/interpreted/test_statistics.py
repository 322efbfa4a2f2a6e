"""Statistics of K and V, compared with the reference: means, variances, smoothing, balance, scales, similarity."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import causality
from interpreted.conftest import (
    EPSILON,
    LOG2_E,
    assert_close,
    call_of,
    make_problem,
    random_bits,
    seen_tokens,
    visibility_of,
)
from sparge.backends.gpu.stages.summary import KeyValueSummary, summarize_key_value
from sparge.masks.geometry import BLOCK_K, Shape
from sparge.numerics import quantization as quant
from sparge.reference import prediction
from sparge.reference.shared import smooth_key

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SCALE = 0.3
EDGE = 0.01
"""Distance from a rounding edge of a balance factor, in 1/8 log2 units, within which float32 may round either way."""
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def summary_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    is_causal: bool,
    attn_mask: Tensor | None,
    *,
    similarity: bool,
) -> KeyValueSummary:
    return summarize_key_value(
        query,
        key,
        value,
        call_of(shape, is_causal=is_causal, scale=SCALE, attn_mask=attn_mask, quantization="int8_fp8"),
        visibility_of(shape, is_causal, attn_mask),
        means=True,
        variance=True,
        quantized=True,
        similarity=similarity,
    )


def assert_balance(
    summary: KeyValueSummary,
    query: Tensor,
    key: Tensor,
    shape: Shape,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> None:
    """Compare balance factors with the reference. A factor near a rounding edge may differ by 1/8 log2 unit."""
    keys_seen, queries_seen = seen_tokens(shape, is_causal, attn_mask)
    query = torch.where(queries_seen[..., None], query.double(), 0.0)
    smoothed, _ = smooth_key(torch.where(keys_seen[..., None], key.double(), 0.0), keys_seen)
    exact = quant.balance_eighths(query, smoothed, keys_seen).flatten(0, 2)  # [B * Hkv, D]
    got = summary.scales.balance[:, : shape.head_dim].double().log2() * 8
    torch.testing.assert_close(got, got.round(), rtol=0, atol=1e-4)
    assert ((got - exact).abs() <= 0.5 + EDGE).all()
    assert (summary.scales.balance[:, shape.head_dim :] == 1).all()


def assert_summary(
    summary: KeyValueSummary,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> None:
    """Compare every field with the reference. Padding channels are 0 (scales: 1)."""
    assert_balance(summary, query, key, shape, is_causal, attn_mask)
    key, value = key.double(), value.double()
    keys_seen, _ = seen_tokens(shape, is_causal, attn_mask)
    _, smoothing_mean = smooth_key(key, keys_seen)
    centered = prediction.smooth_key_for_similarity(key, keys_seen, is_causal)
    heads = [(b, h) for b in range(shape.batch) for h in range(shape.kv_heads)]
    for flat, (b, h) in enumerate(heads):
        seen = keys_seen[b, h]
        means, variances = prediction.pool(key[b, h], seen, BLOCK_K)
        sizes, _ = prediction.pool(key[b, h].abs(), seen, BLOCK_K)
        squares, _ = prediction.pool(key[b, h].square(), seen, BLOCK_K)
        unit = SCALE * LOG2_E
        got = summary.statistics.mean_high[flat].double() + summary.statistics.mean_low[flat].double()
        means = torch.where(means.isfinite(), means * unit, math.nan)
        assert_close(got[:, : shape.head_dim], means, 2**-15 * means.abs() + 8 * EPSILON * sizes * unit)
        unit = SCALE**2 / 4 * LOG2_E
        got = summary.statistics.variance[flat].double()[:, : shape.head_dim]
        known = means.isfinite()
        tolerance = 2**-8 * variances * unit + 64 * EPSILON * squares * unit
        assert_close(got[known], (variances * unit)[known], tolerance[known])

        usable = seen & key[b, h].isfinite().all(-1)
        size = torch.where(usable[:, None], key[b, h].abs(), 0.0).sum(0) / usable.sum().clamp(min=1)
        assert_close(summary.scales.key_mean[flat, : shape.head_dim], smoothing_mean[b, h, 0], 8 * EPSILON * size)
        _, scales = quant.quantize_fp8(torch.where(seen[:, None], value[b, h], 0.0))
        assert_close(summary.scales.value[flat, : shape.value_dim], scales[0], EPSILON * scales[0])
        for tensor, width, padding in (
            (summary.statistics.mean_high[flat], shape.head_dim, 0),
            (summary.statistics.mean_low[flat], shape.head_dim, 0),
            (summary.statistics.variance[flat], shape.head_dim, 0),
            (summary.scales.key_mean[flat], shape.head_dim, 0),
            (summary.scales.value[flat], shape.value_dim, 1),
        ):
            assert (tensor[..., width:] == padding).all()
        if summary.key_similarity is not None:
            similarity = prediction.self_similarity(centered[b, h], seen, BLOCK_K)
            assert_close(summary.key_similarity[flat], similarity, 1e-4)


class TestSummarize:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("kv_len", [1, 63, 64, 65])
    def test_lengths_and_dtypes(self, kv_len: int, dtype: torch.dtype) -> None:
        query, key, value, shape = make_problem(1, kv_len, batch=2, heads=1, head_dim=24, value_dim=40, dtype=dtype)
        assert_summary(summary_of(query, key, value, shape, False, None, similarity=True), query, key, value, shape)

    @pytest.mark.parametrize("kv_len, dtype", [(255, torch.float16), (257, torch.bfloat16), (300, torch.float32)])
    def test_programs_of_256_keys_without_similarity(self, kv_len: int, dtype: torch.dtype) -> None:
        query, key, value, shape = make_problem(1, kv_len, heads=2, head_dim=40, value_dim=8, dtype=dtype)
        summary = summary_of(query, key, value, shape, False, None, similarity=False)
        assert summary.key_similarity is None
        assert_summary(summary, query, key, value, shape)

    @pytest.mark.parametrize("kv_len", [65, 257])
    def test_causal_similarity_smooths_blocks_with_past_keys(self, kv_len: int) -> None:
        query, key, value, shape = make_problem(kv_len, heads=1, head_dim=16)
        key[:, :, 128:] += 3.0
        assert_summary(
            summary_of(query, key, value, shape, True, None, similarity=True), query, key, value, shape, True
        )

    @pytest.mark.parametrize("similarity", [False, True])
    @causality
    def test_hidden_keys_have_no_effect(self, is_causal: bool, similarity: bool) -> None:
        kv_len = 200
        query, key, value, shape = make_problem(70, kv_len, batch=2, heads=2, kv_heads=1, head_dim=16)
        mask = random_bits(2, 2, 1, kv_len, share=0.5)
        mask[:, :, :, 64:128] = False  # a block without visible keys
        keys_seen, _ = seen_tokens(shape, is_causal, mask)
        garbage = torch.tensor([math.nan, 1e30, math.inf]).repeat(kv_len)[:kv_len, None]
        hidden = ~keys_seen[..., None]
        key, value = torch.where(hidden, garbage, key), torch.where(hidden, garbage, value)
        summary = summary_of(query, key, value, shape, is_causal, mask, similarity=similarity)
        clean = torch.where(hidden, 0.0, key), torch.where(hidden, 0.0, value)
        assert_summary(summary, query, *clean, shape, is_causal, mask)

    @pytest.mark.parametrize("similarity", [False, True])
    def test_non_finite_tokens_do_not_affect_the_mean_and_the_scales(self, similarity: bool) -> None:
        query, key, value, shape = make_problem(1, 200, heads=2, head_dim=16, value_dim=24)
        key[0, 0, 70, 3], key[0, 0, 199, 0], key[0, 1, 5, 7] = math.nan, math.inf, -math.inf
        value[0, 0, 10, 4], value[0, 1, 190, 0] = math.nan, math.inf
        assert_summary(
            summary_of(query, key, value, shape, False, None, similarity=similarity), query, key, value, shape
        )

    def test_strided_heads(self) -> None:
        """Tokens before heads in memory, with K and V in one tensor."""
        query, key, value, shape = make_problem(1, 130, batch=2, heads=2, head_dim=16)
        packed = torch.stack([key.transpose(1, 2), value.transpose(1, 2)], 3)
        views = packed[:, :, :, 0].transpose(1, 2), packed[:, :, :, 1].transpose(1, 2)
        assert not views[0].is_contiguous()
        assert_summary(summary_of(query, *views, shape, False, None, similarity=True), query, key, value, shape)

    def test_variance_is_accurate_with_a_large_offset(self) -> None:
        """Only float32 keys can lose accuracy: float32 sums hold the squares of 16-bit numbers."""
        query, key, value, shape = make_problem(1, 100, heads=1, head_dim=16)
        key = key + 300.0
        summary = summary_of(query, key, value, shape, False, None, similarity=False)
        _, variances = prediction.pool(key[0, 0].double(), torch.ones(100, dtype=torch.bool), BLOCK_K)
        expected = variances * (SCALE**2 / 4 * LOG2_E)
        assert_close(summary.statistics.variance[0], expected, 2**-8 * expected)

    def test_unneeded_outputs_are_not_allocated(self) -> None:
        query, key, value, shape = make_problem(1, 100, heads=1)
        outputs = dict.fromkeys(("means", "variance", "quantized", "similarity"), False)
        summary = summarize_key_value(query, key, value, call_of(shape), None, **outputs)
        assert (
            summary.statistics.mean_high
            is summary.scales.key_mean
            is summary.scales.balance
            is summary.scales.value
            is key
        )


class TestBalance:
    def sample(self, q_len: int, kv_len: int, **sizes: Any) -> tuple[Tensor, Tensor, Tensor, Shape]:
        """Return K with channel sizes from 2^-5 to 2^5 and an offset, and Q with the opposite channel sizes."""
        query, key, value, shape = make_problem(q_len, kv_len, **{"head_dim": 24, "value_dim": 8, **sizes})
        factors = 2 ** torch.linspace(-5, 5, 24)
        return query / factors, (key + 3.0) * factors, value, shape

    @pytest.mark.parametrize("similarity", [False, True])
    @pytest.mark.parametrize("lengths", [(1, 1), (129, 255), (300, 257), (700, 1100)])
    def test_lengths(self, lengths: tuple[int, int], similarity: bool) -> None:
        query, key, value, shape = self.sample(*lengths, heads=1)
        summary = summary_of(query, key, value, shape, False, None, similarity=similarity)
        assert_balance(summary, query, key, shape)
        assert lengths == (1, 1) or summary.scales.balance.log2().abs().max() > 3

    def test_grouped_heads_share_the_factors(self) -> None:
        query, key, value, shape = self.sample(300, 200, batch=2, heads=6, kv_heads=2)
        query = query * torch.tensor([1.0, 4.0, 0.5, 1.0, 1.0, 30.0])[:, None, None]
        assert_balance(summary_of(query, key, value, shape, False, None, similarity=False), query, key, shape)

    def test_more_query_blocks_than_chunks_of_keys(self) -> None:
        query, key, value, shape = self.sample(1100, 70, heads=4, kv_heads=2)
        assert_balance(summary_of(query, key, value, shape, False, None, similarity=False), query, key, shape)

    @causality
    def test_hidden_tokens_do_not_affect_the_balance(self, is_causal: bool) -> None:
        """Hidden tokens are masked keys, and queries without visible keys: the first ones if causal with fewer keys."""
        query, key, value, shape = self.sample(500, 300, batch=2, heads=2, kv_heads=1)
        mask = random_bits(2, 2, 1, 300, share=0.5)
        mask[1, :, :, 100:] = False
        keys_seen, queries_seen = seen_tokens(shape, is_causal, mask)
        assert is_causal == (not queries_seen.all())
        query[~queries_seen], key[~keys_seen] = 1e20, math.nan
        assert_balance(
            summary_of(query, key, value, shape, is_causal, mask, similarity=False), query, key, shape, is_causal, mask
        )

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_non_finite_tokens_do_not_affect_the_balance(self, bad: float) -> None:
        query, key, value, shape = self.sample(300, 600, heads=1)
        query[0, 0, 40] *= 100.0
        key[0, 0, 300] *= 100.0
        query[0, 0, 40, 3], key[0, 0, 300, 5] = bad, bad
        assert_balance(summary_of(query, key, value, shape, False, None, similarity=False), query, key, shape)

    def test_zero_and_constant_channels_have_factor_1(self) -> None:
        """Smoothing a constant channel leaves a rounding error, which must not count as the size of the channel."""
        query, key, value, shape = self.sample(300, 600, heads=1)
        query[..., :2], key[..., 1:3], key[..., 3] = 0.0, 0.0, 0.1
        summary = summary_of(query, key, value, shape, False, None, similarity=False)
        assert (summary.scales.balance[0, :4] == 1).all()
        assert (summary.scales.balance[0, 4:24] != 1).any()

    def test_outliers_in_one_chunk_count_once(self) -> None:
        """Two opposite outliers keep the mean unchanged."""
        query, key, value, shape = self.sample(130, 8 * 256, heads=1)
        before = summary_of(query, key, value, shape, False, None, similarity=False).scales.balance.log2()
        key[0, 0, 1000] *= 1e3
        key[0, 0, 1001] = -key[0, 0, 1000]
        summary = summary_of(query, key, value, shape, False, None, similarity=False)
        assert_balance(summary, query, key, shape)
        assert 0 < (summary.scales.balance.log2() - before).abs().max() <= math.log2(1e3) / 16 + 1 / 8


def test_huge_keys_do_not_affect_the_balance() -> None:
    """The square of 3e19 overflows float32."""
    query, key, value, shape = make_problem(128, 600, heads=1, head_dim=16)
    key[0, 0, 7, 3] = 3e19
    outputs = {"means": False, "variance": False, "quantized": True, "similarity": False}
    summary = summarize_key_value(query, key, value, call_of(shape, scale=SCALE), None, **outputs)
    assert summary.scales.balance.isfinite().all()
