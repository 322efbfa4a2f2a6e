"""Quantized values of Q, K and V, and the other results of the pass over Q, compared with the reference."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
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
from sparge.backends.gpu.launch import padded
from sparge.backends.gpu.stages.key_value_statistics import BlockStatistics
from sparge.backends.gpu.stages.quantize import QuerySummary, quantize_key_value, summarize_query
from sparge.backends.gpu.stages.reduce import Scales
from sparge.backends.gpu.stages.summary import KeyValueSummary, summarize_key_value
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape
from sparge.numerics.quantization import MIXED, key_scales, mix, quantize_fp8, quantize_int8, query_scales, to_fp16
from sparge.reference import prediction
from sparge.reference.shared import smooth_key

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FP8_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""Order of each 16 tokens in the transposed FP8 values."""
EDGE = 1e-3
"""Distance from a rounding edge within which a number may round either way."""


SMALLEST_SCALE = 1e-15
"""Scale of all-zero tokens, small but nonzero: scales are multiplied and inverted."""


def assert_int8(got: Tensor, got_scales: Tensor, tokens: Tensor, scales: Tensor) -> None:
    """Check INT8 values (S, D) and scales (S,), except for values on a rounding edge. Padding must be 0."""
    scales = torch.where(tokens.any(1, keepdim=True) | (scales != 1.0), scales, SMALLEST_SCALE)
    assert_close(got_scales[: len(tokens)], scales[:, 0], 4 * EPSILON * scales[:, 0].abs())
    known = scales[:, 0].isfinite()  # INT8 values of NaN have no meaning
    quantized = quantize_int8(tokens, scales)
    edge = ((tokens / scales) % 1 - 0.5).abs() < EDGE
    length, width = tokens.shape
    off = (got[:length, :width].int() - quantized.int()).abs()[known]
    assert not off[~edge[known]].any()
    assert not (off > 1).any()
    assert off.float().mean() < 4 * EDGE
    assert not got[length:].any()
    assert not got[:length, width:][known].any()


def spread_over_keys(scales: Tensor) -> Tensor:
    """Expand four scales per key block, (blocks, 4), to one scale per key: the group is (key mod 8) div 2."""
    positions = torch.arange(len(scales) * BLOCK_K)
    return scales[positions // BLOCK_K, positions % 8 // 2]


def summary_of(
    query: Tensor, key: Tensor, value: Tensor, shape: Shape, is_causal: bool, attn_mask: Tensor | None
) -> KeyValueSummary:
    outputs = {"means": False, "variance": False, "quantized": True, "similarity": False}
    call = call_of(shape, is_causal=is_causal, scale=1.0, attn_mask=attn_mask, quantization="int8_fp8")
    return summarize_key_value(query, key, value, call, visibility_of(shape, is_causal, attn_mask), **outputs)


def balance_of(summary: KeyValueSummary, shape: Shape) -> Tensor:
    """Return the balance factors (B, H_kv, 1, D) in float64; `test_statistics` compares them with the reference."""
    return summary.scales.balance.double().view(shape.batch, shape.kv_heads, 1, -1)[..., : shape.head_dim]


QuantizedKeyValue = tuple[Tensor, Tensor, Tensor, KeyValueSummary]


def quantized_key_value(
    key: Tensor,
    value: Tensor,
    shape: Shape,
    quantization: str,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> QuantizedKeyValue:
    """Quantize keys and values. Channel sizes of the queries vary, so balance factors differ from 1."""
    query = random_channels(key.new_ones(shape.batch, shape.heads, shape.q_len, shape.head_dim))
    summary = summary_of(query, key, value, shape, is_causal, attn_mask)
    assert shape.kv_len == 1 or (summary.scales.balance != 1).any()
    seen = visibility_of(shape, is_causal, attn_mask)
    call = call_of(shape, is_causal=is_causal, quantization=quantization, attn_mask=attn_mask)
    return *quantize_key_value(key, value, summary.scales, call, seen.keys if seen else None), summary


def random_channels(tokens: Tensor, seed: int = 11) -> Tensor:
    """Scale each channel by a random factor from 2^-3 to 2^3."""
    generator = torch.Generator().manual_seed(seed)
    return (tokens * 2 ** (6 * torch.rand(tokens.shape[-1], generator=generator) - 3)).to(tokens)


def assert_key_value(
    quantized: QuantizedKeyValue,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    quantization: str,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> None:
    got_int8, got_scales, rounded_value, summary = quantized
    assert got_scales.shape == (shape.batch, shape.kv_heads, shape.kv_blocks, 4)
    keys_seen, _ = seen_tokens(shape, is_causal, attn_mask)
    smoothed, _ = smooth_key(key.double(), keys_seen)
    mixed = mix(smoothed / balance_of(summary, shape))
    scales = key_scales(mixed)
    value = torch.where(keys_seen[..., None], value.double(), 0.0)
    rows = shape.kv_blocks * BLOCK_K
    for b in range(shape.batch):
        for h in range(shape.kv_heads):
            assert_int8(got_int8[b, h], spread_over_keys(got_scales[b, h]), mixed[b, h], scales[b, h])
            if quantization == "int8_fp16":
                expected = to_fp16(value[b, h]).half()
                width = padded(shape.value_dim)
                expected = F.pad(expected, (0, width - shape.value_dim, 0, rows - shape.kv_len))
                assert torch.equal(rounded_value[b, h].nan_to_num(7.0), expected.nan_to_num(7.0))
                continue
            numbers, _ = quantize_fp8(value[b, h])
            numbers = F.pad(numbers, (0, padded(shape.value_dim) - shape.value_dim, 0, rows - shape.kv_len))
            order = torch.arange(0, rows, 16)[:, None] + torch.tensor(FP8_ORDER)
            expected = numbers[order.flatten()].mT
            got = rounded_value[b, h].float()
            assert_close(got, expected, expected.abs() / 8)  # E4M3 has three fraction bits: at most the next value
            assert (got.nan_to_num() != expected.nan_to_num()).float().mean() < 4 * EDGE


class TestKeyValue:
    @pytest.mark.parametrize("quantization", ["int8_fp8", "int8_fp16"])
    @pytest.mark.parametrize(
        "kv_len, dtype",
        [(1, torch.float32), (63, torch.bfloat16), (64, torch.float16), (65, torch.float32), (200, torch.bfloat16)],
        ids=str,
    )
    def test_lengths_and_dtypes(self, kv_len: int, dtype: torch.dtype, quantization: str) -> None:
        if quantization == "int8_fp16" and dtype == torch.float16:
            dtype = torch.bfloat16  # FP16 values are not copied
        _, key, value, shape = make_problem(1, kv_len, batch=2, heads=1, head_dim=24, value_dim=40, dtype=dtype)
        quantized = quantized_key_value(key, value, shape, quantization)
        assert_key_value(quantized, key, value, shape, quantization)

    def test_fp16_values_are_not_copied(self) -> None:
        _, key, value, shape = make_problem(1, 100, heads=1, dtype=torch.float16)
        assert quantized_key_value(key, value, shape, "int8_fp16")[2] is value

    @pytest.mark.parametrize("quantization", ["int8_fp8", "int8_fp16"])
    @causality
    def test_hidden_tokens_are_zero(self, is_causal: bool, quantization: str) -> None:
        _, key, value, shape = make_problem(70, 130, batch=2, heads=4, kv_heads=2, head_dim=16)
        mask = random_bits(2, 4, 1, 130, share=0.4)
        hidden = ~seen_tokens(shape, is_causal, mask)[0][..., None]
        assert hidden.any()
        garbage = torch.tensor([math.nan, 1e30]).repeat(65)[:, None]
        key, value = torch.where(hidden, garbage, key), torch.where(hidden, garbage, value)
        quantized = quantized_key_value(key, value, shape, quantization, is_causal, mask)
        key = torch.where(hidden, 0.0, key)
        assert_key_value(quantized, key, value, shape, quantization, is_causal, mask)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_non_finite_keys_affect_only_their_scale_group(self, bad: float) -> None:
        _, key, value, shape = make_problem(1, 200, heads=1, head_dim=16)
        key[0, 0, 70, 3] = bad  # in block 1, group (6 mod 8) div 2
        quantized = quantized_key_value(key, value, shape, "int8_fp8")
        assert quantized[1].isnan().nonzero().tolist() == [[0, 0, 1, 3]]
        if math.isnan(bad):
            assert_key_value(quantized, key, value, shape, "int8_fp8")

    @pytest.mark.parametrize("quantization", ["int8_fp8", "int8_fp16"])
    def test_values_out_of_range(self, quantization: str) -> None:
        """FP8 turns non-finite values into NaN. FP16 keeps them, and saturates finite values at 65504."""
        _, key, value, shape = make_problem(1, 70, heads=1, head_dim=16)
        value[0, 0, 3, 0], value[0, 0, 4, 1], value[0, 0, 5, 2], value[0, 0, 6, 3] = math.nan, math.inf, -math.inf, 1e6
        quantized = quantized_key_value(key, value, shape, quantization)
        assert_key_value(quantized, key, value, shape, quantization)

    def test_constant_keys_are_quantized_to_zero(self) -> None:
        _, key, value, shape = make_problem(1, 70, heads=1, head_dim=16)
        key[:] = 3.0
        value[:] = 0.0
        seen = make_problem(1, 70, heads=1, head_dim=16)[0]
        summary = summary_of(seen, key, value, shape, False, None)
        quantized, scales, rounded_value = quantize_key_value(
            key, value, summary.scales, call_of(shape, quantization="int8_fp8"), None
        )
        assert (summary.scales.balance == 1).all()
        assert not quantized.any()
        assert (scales == SMALLEST_SCALE).all()
        assert not rounded_value.float().any()


def summary_with(key_mean: Tensor) -> KeyValueSummary:
    """Build a summary with a mean of the keys (B * H_kv, D padded) and random balance factors."""
    unused = key_mean.new_ones(1)
    eighths = torch.randint(-24, 25, key_mean.shape, generator=torch.Generator().manual_seed(6))
    statistics = BlockStatistics(unused, unused, unused)
    return KeyValueSummary(statistics, Scales(key_mean, torch.exp2(eighths / 8), unused, unused))


def query_summary_of(
    query: Tensor, summary: KeyValueSummary, shape: Shape, scale: float, is_causal: bool, attn_mask: Tensor | None
) -> QuerySummary:
    return summarize_query(
        query,
        summary.scales,
        call_of(shape, is_causal=is_causal, scale=scale, attn_mask=attn_mask),
        visibility_of(shape, is_causal, attn_mask),
        quantized=True,
        parts=1,
        similarity=True,
    )


def assert_query(
    got: QuerySummary,
    query: Tensor,
    summary: KeyValueSummary,
    shape: Shape,
    scale: float,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> None:
    assert got.scale.shape == (shape.batch * shape.heads, shape.q_blocks * BLOCK_Q)
    _, queries_seen = seen_tokens(shape, is_causal, attn_mask)
    query = torch.where(queries_seen[..., None], query.double(), 0.0)
    factors = balance_of(summary, shape).repeat_interleave(shape.group, 1)
    mixed = math.copysign(1.0, scale) * mix(query * factors)
    scales = query_scales(mixed)
    for b in range(shape.batch):
        for h in range(shape.heads):
            flat, seen, tokens = b * shape.heads + h, queries_seen[b, h], query[b, h]
            got_scales = got.scale[flat].double() / (abs(scale) * LOG2_E * MIXED)
            assert_int8(got.quantized[b, h], got_scales, mixed[b, h], scales[b, h])
            mean = summary.scales.key_mean[b * shape.kv_heads + h // shape.group, : shape.head_dim].double()
            tolerance = 16 * EPSILON * abs(scale) * (tokens.abs() @ mean.abs())
            assert_close(got.lse_shift[flat], scale * (tokens @ mean), tolerance)
            means, _ = prediction.pool(tokens, seen, BLOCK_Q)
            sizes, _ = prediction.pool(tokens.abs(), seen, BLOCK_Q)
            assert_close(got.mean[flat, :, 0, : shape.head_dim], means, 16 * EPSILON * sizes)
            assert not got.mean[flat, :, 0, shape.head_dim :].any()
            assert_close(got.similarity[flat], prediction.self_similarity(tokens, seen, BLOCK_Q), 1e-5)


class TestQuery:
    @pytest.mark.parametrize(
        "q_len, dtype",
        [(1, torch.float32), (127, torch.bfloat16), (129, torch.float16), (300, torch.float32)],
        ids=str,
    )
    def test_lengths_and_dtypes(self, q_len: int, dtype: torch.dtype) -> None:
        query, key, _, shape = make_problem(q_len, 70, batch=2, heads=2, kv_heads=1, head_dim=40, dtype=dtype)
        summary = summary_with(F.pad(key.float().mean(2).flatten(0, 1), (0, 24)))
        assert_query(query_summary_of(query, summary, shape, 0.3, False, None), query, summary, shape, 0.3)

    def test_sign_of_the_scale_is_in_the_quantized_values(self) -> None:
        query, key, _, shape = make_problem(130, 70, heads=1, head_dim=16)
        summary = summary_with(key.mean(2)[0])
        got = query_summary_of(query, summary, shape, -0.5, False, None)
        assert_query(got, query, summary, shape, -0.5)
        nothing = query_summary_of(query, summary, shape, 0.0, False, None)
        torch.testing.assert_close(nothing.scale, torch.full_like(nothing.scale, 1e-20), rtol=1e-6, atol=0)
        assert not nothing.lse_shift.any()
        assert torch.equal(nothing.quantized, -got.quantized)

    def test_every_query_has_its_own_scale(self) -> None:
        """Sizes of queries range from 1e-12 to 1e12 in one block; one query is 0."""
        query, key, _, shape = make_problem(130, 70, heads=1, head_dim=16)
        query = query * torch.logspace(-12, 12, 130)[:, None]
        query[:, :, 7] = 0.0
        summary = summary_with(key.mean(2)[0])
        got = query_summary_of(query, summary, shape, 0.3, False, None)
        assert_query(got, query, summary, shape, 0.3)
        assert (got.quantized[0, 0, :130].abs().amax(1) == 127).tolist() == [row != 7 for row in range(130)]

    @pytest.mark.parametrize("masked", [False, True], ids=["no mask", "padding"])
    def test_queries_without_visible_keys_are_quantized_to_zero(self, masked: bool) -> None:
        """Causality with more queries than keys hides all keys from the first queries; left padding adds some."""
        query, key, _, shape = make_problem(200, 60, heads=2, kv_heads=1, head_dim=16)
        mask = (torch.arange(60) >= torch.tensor([5, 11])[:, None])[None, :, None] if masked else None
        hidden = ~seen_tokens(shape, True, mask)[1]
        assert hidden.any()
        query[hidden] = math.nan
        summary = summary_with(key.mean(2)[0])
        assert_query(query_summary_of(query, summary, shape, 0.3, True, mask), query, summary, shape, 0.3, True, mask)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_non_finite_queries_affect_only_their_own_scale(self, bad: float) -> None:
        query, key, _, shape = make_problem(200, 60, heads=1, head_dim=16)
        query[0, 0, 150, 3] = bad
        summary = summary_with(key.mean(2)[0])
        got = query_summary_of(query, summary, shape, 0.3, False, None)
        assert got.scale.isnan().nonzero().tolist() == [[0, 150]]
        assert (~got.lse_shift.isfinite()).nonzero().tolist() == [[0, 150]]
        if math.isnan(bad):
            assert_query(got, query, summary, shape, 0.3)

    def test_strided_heads(self) -> None:
        query, key, _, shape = make_problem(130, 60, batch=2, heads=2, head_dim=16)
        view = query.transpose(1, 2).contiguous().transpose(1, 2)
        assert not view.is_contiguous()
        summary = summary_with(key.mean(2).flatten(0, 1))
        assert_query(query_summary_of(view, summary, shape, 0.3, False, None), query, summary, shape, 0.3)
