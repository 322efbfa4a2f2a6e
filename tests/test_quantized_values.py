"""Balance, scales, rounding and FP8 sums, compared with independent float64 formulas."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sparge.evaluate.metrics import relative_l1
from sparge.numerics import quantization as quant

DATA = Path(__file__).parent / "data"


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def all_seen(key: Tensor) -> Tensor:
    return torch.ones(key.shape[:3], dtype=torch.bool)


class TestBalance:
    def sample(
        self, q_len: int = 300, kv_len: int = 600, *, heads: int = 1, kv_heads: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Return Q with channel sizes rising from 1/100 to 100, and K with sizes falling from 1000 to 1/1000."""
        query, key = gaussian(1, heads, q_len, 16), gaussian(1, kv_heads, kv_len, 16, seed=1)
        return query * torch.logspace(-2, 2, 16).double(), key * torch.logspace(3, -3, 16).double()

    def test_preserves_scores_and_equalizes_channels(self) -> None:
        query, key = self.sample()
        factors = quant.balance(query, key, all_seen(key))
        assert factors.shape == (1, 1, 1, 16)
        eighths = 8 * factors.log2()
        torch.testing.assert_close(eighths, eighths.round(), rtol=0, atol=1e-12)
        assert eighths.abs().max() > 40, "more than 5 log2 units"
        before, after = (
            (q.square().mean((0, 1, 2)) / k.square().mean((0, 1, 2))).log2() / 2
            for q, k in ((query, key), (query * factors, key / factors))
        )
        assert before.max() - before.min() > 30
        assert after.max() - after.min() < 2, "the sampling error of the largest of 8 queries in 3 blocks"
        products = query.abs() @ key.abs().mT
        assert (((query * factors) @ (key / factors).mT - query @ key.mT).abs() <= 1e-13 * products).all()

    @pytest.mark.parametrize("q_len, kv_len", [(1, 1), (128, 256), (130, 257), (300, 600)])
    def test_factors_are_the_root_of_the_ratio_of_geometric_means(self, q_len: int, kv_len: int) -> None:
        query, key = self.sample(q_len, kv_len)
        factors = quant.balance(query, key, all_seen(key))[0, 0, 0]
        starts = [
            max(0, min(start, q_len - 128)) for start in range(0, q_len, 128)
        ]  # the last block is shifted to have 128 queries
        picks = [[start + int((s + 0.5) / 8 * min(q_len, 128)) for s in range(8)] for start in starts]
        for channel in range(16):
            of_key = [part.square().mean().sqrt() for part in key[0, 0, :, channel].split(256)]
            key_votes = [len(part) for part in key[0, 0].split(256)]
            of_query = [query[0, 0, block, channel].abs().max() for block in picks]
            of_key, of_query = (torch.stack(sizes).log2().tolist() for sizes in (of_key, of_query))
            mean = sum(size * votes for size, votes in zip(of_key, key_votes, strict=True)) / kv_len
            expected = round(4 * (mean - sum(of_query) / len(of_query)))
            assert 8 * math.log2(factors[channel]) == pytest.approx(expected, abs=1e-9)

    def test_samples_are_evenly_spaced(self) -> None:
        picks = [quant.balance_samples(length, torch.device("cpu")).tolist() for length in (130, 5)]
        assert picks[0] == [[8, 24, 40, 56, 72, 88, 104, 120], [10, 26, 42, 58, 74, 90, 106, 122]]
        assert picks[1] == [[0, 0, 1, 2, 2, 3, 4, 4]]

    @pytest.mark.parametrize("side", ["key", "query"])
    def test_one_outlier_token_counts_once(self, side: str) -> None:
        """An outlier affects 1 of 16 chunks or blocks. A factor is half of a mean in log2, so it changes by 1/32."""
        query, key = gaussian(1, 1, 16 * 128, 16), gaussian(1, 1, 16 * 256, 16, seed=1)
        before = quant.balance(query, key, all_seen(key)).log2()
        (key if side == "key" else query)[0, 0, 1000 if side == "key" else 8 * 128 + 40] *= 1e4
        moved = (quant.balance(query, key, all_seen(key)).log2() - before).abs()
        assert 0 < moved.max() <= math.log2(1e4) / 32 + 1 / 8

    def test_grouped_heads_share_the_factors(self) -> None:
        """The factors are the same as if the queries of a group were one long sequence."""
        query, key = self.sample(256, 300, heads=6, kv_heads=2)
        query[:, 1] *= 3.0
        factors = quant.balance(query, key, all_seen(key))
        joined = query.unflatten(1, (2, 3)).flatten(2, 3)
        for head in range(2):
            alone = key[:, head : head + 1]
            expected = quant.balance(joined[:, head : head + 1], alone, all_seen(alone))
            assert torch.equal(factors[:, head : head + 1], expected)
        assert not torch.equal(factors[:, 0], factors[:, 1])

    @pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
    def test_hidden_keys_are_ignored(self, garbage: float) -> None:
        query, key = self.sample()
        seen = all_seen(key)
        seen[..., 70:90], seen[..., 256:512] = False, False
        clean = torch.where(seen[..., None], key, 0.0)
        assert not torch.equal(*(quant.balance(query, key, mask) for mask in (seen, all_seen(key))))
        expected = quant.balance(query, clean, seen)
        assert torch.equal(quant.balance(query, torch.where(seen[..., None], key, garbage), seen), expected)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_non_finite_tokens_are_ignored(self, bad: float) -> None:
        """One non-finite entry excludes the whole token, as in the mean of the keys."""
        query, key = self.sample()
        seen = all_seen(key)
        seen[..., 300] = False
        query[0, 0, 40] *= 100.0
        key[0, 0, 300] *= 100.0
        cleared = query.clone()
        cleared[0, 0, 40] = 0.0
        expected = quant.balance(cleared, key, seen)
        query[0, 0, 40, 3], key[0, 0, 300, 5] = bad, bad
        assert torch.equal(quant.balance(query, key, all_seen(key)), expected)

    def test_zero_queries_are_ignored(self) -> None:
        """Queries without visible keys are 0; a block is weighted by its number of nonzero sampled queries."""
        query, key = gaussian(1, 1, 256, 16), gaussian(1, 1, 64, 16, seed=1)
        query[:, :, 128:] *= 1024.0
        sizes = []
        for hidden in ([], [0], range(8)):
            cleared = query.clone()
            cleared[:, :, [8 + 16 * i for i in hidden]] = 0.0
            sizes.append(-2 * quant.balance(cleared, key, all_seen(key)).log2().mean())
        assert sizes[1] - sizes[0] == pytest.approx(10 * (8 / 15 - 1 / 2), abs=0.15)
        assert sizes[2] - sizes[0] == pytest.approx(10 / 2, abs=0.5)

    def test_zero_channels_have_factor_1(self) -> None:
        query, key = self.sample()
        query[..., :2], key[..., 1:3] = 0.0, 0.0
        factors = quant.balance(query, key, all_seen(key))[0, 0, 0]
        assert factors[:3].tolist() == [1.0, 1.0, 1.0]
        assert (factors[3:] != 1.0).any()
        nothing = quant.balance(torch.zeros_like(query), key, torch.zeros_like(all_seen(key)))
        assert (nothing == 1.0).all()


class TestMix:
    def test_mix_is_a_hadamard_matrix_with_signs(self) -> None:
        signs = [1, 1, 1, -1, 1, 1, 1, -1]
        expected = [[signs[i] * (-1) ** (i & j).bit_count() / 8 for j in range(8)] for i in range(8)]
        assert quant.mix(torch.eye(8)).tolist() == expected

    @pytest.mark.parametrize("width", [1, 8, 13, 64, 100])
    def test_preserves_scores(self, width: int) -> None:
        query, key = torch.randn(2, 5, width, dtype=torch.float64), torch.randn(2, 7, width, dtype=torch.float64)
        mixed = quant.mix(query), quant.mix(key)
        assert all(tokens.shape[-1] % 8 == 0 and tokens.shape[-1] - width < 8 for tokens in mixed)
        torch.testing.assert_close(8 * mixed[0] @ mixed[1].mT, query @ key.mT)

    def test_groups_are_independent(self) -> None:
        tokens = torch.randn(3, 24)
        torch.testing.assert_close(quant.mix(tokens)[:, 8:16], quant.mix(tokens[:, 8:16]), rtol=0, atol=0)

    def test_mixing_reduces_the_error_of_a_large_channel(self) -> None:
        """For a channel of 30 and seven of about 1, mixing reduces the scale from 30 / 127 to about 30 / 8 / 127."""
        tokens = torch.randn(64, 8, dtype=torch.float64)
        tokens[:, 5] = 30.0
        errors = []
        for rounded in (tokens, quant.mix(tokens)):
            scales = quant.query_scales(rounded)
            error = quant.quantize_int8(rounded, scales) * scales - rounded
            errors.append(float(error.square().sum()) * (8 if rounded is not tokens else 1))  # orthogonal up to 8
        assert errors[1] < errors[0] / 2

    def test_mixing_equal_channels_does_not_add_them_up(self) -> None:
        assert quant.mix(torch.ones(1, 8)).abs().max() == 0.5

    def test_mixing_does_not_overflow(self) -> None:
        largest = torch.finfo(torch.float32).max
        tokens = largest * (2.0 * torch.randint(2, (256, 8)) - 1)
        assert quant.mix(tokens).abs().max() <= largest


class TestInt8:
    @pytest.mark.parametrize("length", [1, 64, 100])
    def test_every_query_has_a_scale(self, length: int) -> None:
        query = gaussian(2, length, 8) * torch.logspace(-3, 3, length)[:, None].double()
        scales = quant.query_scales(query)
        assert scales.shape == (2, length, 1)
        torch.testing.assert_close(scales.squeeze(-1), query.abs().amax(-1) / 127)
        quantized = quant.quantize_int8(query, scales)
        assert quantized.dtype == torch.int8
        assert (quantized.abs().amax(-1) == 127).all()
        assert ((quantized * scales - query).abs() <= scales * (0.5 + 1e-12)).all()

    @pytest.mark.parametrize("length", [1, 63, 64, 100, 130])
    def test_a_key_block_has_four_scales(self, length: int) -> None:
        """Keys of a block with equal (key mod 8) div 2 share a scale: 0 1 8 9 16 17 ..., 2 3 10 11 ..."""
        key = gaussian(2, length, 8) * torch.logspace(-3, 3, length)[:, None].double()
        scales = quant.key_scales(key)
        assert scales.shape == (2, length, 1)
        for head in range(2):
            for token in range(length):
                block, group = token // 64, token % 8 // 2
                group_keys = [i for i in range(length) if i // 64 == block and i % 8 // 2 == group]
                assert float(scales[head, token]) == pytest.approx(float(key[head, group_keys].abs().max()) / 127)
        quantized = quant.quantize_int8(key, scales)
        assert ((quantized * scales - key).abs() <= scales * (0.5 + 1e-12)).all()

    @pytest.mark.parametrize("factor", [1e4, math.nan, math.inf])
    def test_a_token_changes_only_the_scale_of_its_group(self, factor: float) -> None:
        tokens = gaussian(200, 8)
        before = quant.query_scales(tokens), quant.key_scales(tokens)
        tokens[70] *= factor
        after = quant.query_scales(tokens), quant.key_scales(tokens)
        changed = [(a != b).flatten().nonzero().flatten().tolist() for a, b in zip(after, before, strict=True)]
        assert changed == [[70], [64 + 8 * octet + 6 + i for octet in range(8) for i in (0, 1)]]

    def test_zeros_are_quantized_to_zero(self) -> None:
        for scales in (quant.query_scales(torch.zeros(70, 8)), quant.key_scales(torch.zeros(70, 8))):
            assert ((scales > 0) & scales.isfinite()).all()
            assert not quant.quantize_int8(torch.zeros(70, 8), scales).any()


def test_fp8_rounds_to_the_nearest_e4m3_number_and_saturates():
    e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = e4m3[e4m3.isfinite()].unique()
    values = gaussian(1000) * 100
    nearest = (values[:, None] - numbers).abs().amin(1)
    assert torch.equal((quant.to_fp8(values) - values).abs(), nearest)
    assert quant.to_fp8(torch.tensor([1e9, -1e9])).tolist() == [448, -448]
    value = gaussian(50, 6) * torch.logspace(-3, 3, 6, dtype=torch.float64)
    quantized, scale = quant.quantize_fp8(value)
    torch.testing.assert_close(quantized.abs().amax(0), torch.full((6,), 448.0, dtype=torch.float64))
    assert ((quantized * scale - value).abs() <= value.abs() / 16 + scale * 2**-10).all()


def test_fp16_saturates_and_keeps_infinity():
    assert quant.to_fp16(torch.tensor([1e9, -1e9, math.inf, 1.0])).tolist() == [65504, -65504, math.inf, 1.0]


@pytest.mark.parametrize("case", ["k128", "k4096"])
def test_fp8_accumulation_is_bitwise_equal_to_an_h200(case):
    """The data was recorded on an H200 by torch._scaled_mm(use_fast_accum=True), with one accumulator for all keys."""
    recorded = np.load(DATA / "fp8_accumulation_h200.npz")
    probability, value = (
        torch.from_numpy(recorded[f"{case}_{name}"]).view(torch.float8_e4m3fn).double()
        for name in ("probability", "value")
    )
    product = torch.from_numpy(recorded[f"{case}_product"]).double()
    got = quant.fp8_tensor_core(probability, value.mT, torch.zeros_like(product))
    assert torch.equal(got, product)
    assert relative_l1(got, probability @ value.mT) > 1e-4  # differs from an fp32 sum


class TestWithoutExp2:
    def test_values_are_unbiased_e4m3_numbers(self):
        exponent = -torch.linspace(0, 14, 100_001, dtype=torch.float64)
        numbers = quant.fp8_from_log2(exponent)
        assert torch.equal(numbers, quant.to_fp8(numbers))
        ratio = numbers / (448 * 2**exponent)
        assert ratio.min() > 0.9
        assert ratio.max() < 1.1
        assert abs(float(ratio.mean()) - 1) < 1e-3

    def test_ends_of_the_range(self):
        exponent = torch.tensor([0.0, 0.2, -15.75, -15.9, -100.0, -torch.inf, torch.nan], dtype=torch.float64)
        numbers = quant.fp8_from_log2(exponent)
        assert numbers[:6].tolist() == [448, 448, 0, 0, 0, 0]
        assert numbers[6].isnan()
