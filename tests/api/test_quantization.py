"""Quantization and the P V threshold: errors within derived bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from benchmarks.numerics.families import by_name
from benchmarks.numerics.problem import call, problem_of
from torch import Tensor

import sparge
from conftest import (
    backends,
    causality,
    exact_attention,
    modes,
    relative_l1,
)
from skipping import LENGTHS, assert_skipped_share
from sparge import Dense, TopK, reference
from sparge.call import Call
from sparge.evaluate.inputs import text_like, text_with_needles, video_like
from sparge.masks.geometry import Shape
from sparge.reference import softmax

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.timeout(120)]


def smooth(offset: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return a smooth field whose keys have a channel offset."""
    sample = video_like(1024, heads=2, seed=3)
    direction = torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(8))
    return sample.query, sample.key + offset * direction, sample.value


def score_deviation(query: Tensor, key: Tensor) -> float:
    """Return the largest standard deviation of a score if smoothed Q and K are rounded to INT8 with a scale per block.

    Rounding with step s has variance s^2 / 12; the step of a block is absmax / 127. Finer scales and balanced
    channels reduce it.
    """
    key = key - key.mean(2, keepdim=True)
    query_step, key_step = (
        tensor.unflatten(2, (-1, block)).abs().amax((-2, -1)).repeat_interleave(block, -1) / 127
        for tensor, block in ((query, 128), (key, 64))
    )
    from_query = query_step.square()[..., None] * key.square().sum(-1)[..., None, :]
    from_key = query.square().sum(-1)[..., None] * key_step.square()[..., None, :]
    return float((from_query + from_key).amax() / 12) ** 0.5 * query.shape[-1] ** -0.5


class TestQuantized:
    @backends
    @causality
    @pytest.mark.parametrize("quantization, low, high", [("int8_fp8", 0.01, 0.02), ("int8_fp16", 0.001, 0.004)])
    def test_dense_error_and_lse(
        self, backend: str, is_causal: bool, quantization: str, low: float, high: float
    ) -> None:
        """E4M3 rounds by up to 1/16, about 0.015 on average; INT8 Q and K alone cost about 0.003.

        The LSE changes as the scores do: by 0.015 on average, by six deviations at worst. An offset of K has no effect.
        """
        errors = []
        for offset in (0.0, 30.0):
            query, key, value = smooth(offset)
            query = query[:, :, -128:]
            output, lse = sparge.attention(
                query,
                key,
                value,
                is_causal=is_causal,
                sparsity=Dense(),
                quantization=quantization,
                return_lse=True,
                backend=backend,
            )
            exact, exact_lse = exact_attention(query, key, value, is_causal=is_causal)
            errors.append(relative_l1(output, exact))
            moved = (lse - exact_lse).abs()
            assert moved.square().mean().sqrt() < 2e-2
            assert moved.max() < 6 * score_deviation(query, key)
        assert low < errors[0] < high
        assert errors[1] == pytest.approx(errors[0], rel=0.01)

    @backends
    @pytest.mark.parametrize("quantization, bound", [("int8_fp8", 0.02), ("int8_fp16", 0.006)])
    def test_sparse_error_is_within_the_quantization_bound(self, backend: str, quantization: str, bound: float) -> None:
        """Compare with exact attention over the same blocks, with grouped heads, partial blocks and padding."""
        query, key, value = smooth(5.0)
        query, key, value = query[:, :, 500:900], key[:, :1, :1000], value[:, :1, :1000]
        padding = (torch.arange(1000) < 950)[None, None, None]
        call = {"attn_mask": padding, "is_causal": True, "enable_gqa": True, "backend": backend}
        sparsity = TopK(0.4, min_blocks=1)
        output = sparge.attention(query, key, value, quantization=quantization, sparsity=sparsity, **call)
        blocks = sparge.predict(query, key, sparsity=sparsity, **call)
        assert blocks.density() < 0.6
        exact, _ = exact_attention(query, key, value, attn_mask=padding, is_causal=True, block_mask=blocks.to_dense())
        assert relative_l1(output, exact) < bound

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_16_bit_inputs(self, dtype: torch.dtype) -> None:
        query, key, value = (tensor.to(dtype) for tensor in smooth(2.0))
        output = sparge.attention(query, key, value, sparsity=Dense(), quantization="int8_fp8")
        assert output.dtype == dtype
        assert relative_l1(output, exact_attention(query, key, value)[0]) < 0.02


class TestTwoPartProbabilities:
    """P is split in two if a sink is 13 or 16 nats (19 or 23 log2 units) above its tile; FP8 covers 15 log2 units."""

    def error(self, name: str, quantization: str, backend: str, kv_len: int = 128) -> float:
        problem = problem_of(by_name(name), 64, kv_len)
        return problem.errors(*call(problem, quantization, backend)).relative_l1

    @pytest.mark.parametrize("name", ["sink-13", "sink-16"])
    @pytest.mark.parametrize("kv_len", [64, 128])
    @pytest.mark.parametrize(
        "quantization, backend",
        [("int8_fp8", "torch"), ("int8_fp8", "reference"), ("int8_fp8_fast", "reference"), ("int8_fp16", "torch")],
    )
    def test_neighbors_of_a_sink_keep_their_share(
        self, name: str, quantization: str, backend: str, kv_len: int
    ) -> None:
        assert self.error(name, quantization, backend, kv_len) < by_name(name).limit

    @backends
    def test_one_part_loses_the_neighbors_of_a_sink(self, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The other 63 keys of the tile have half of the remaining weight. For sink-13 they are rounded coarsely."""
        monkeypatch.setattr(softmax, "FP8_RANGE", 1e3)
        assert 0.4 < self.error("sink-16", "int8_fp8", backend) < 0.6
        assert self.error("sink-13", "int8_fp8", backend) > 2 * by_name("sink-13").limit

    @backends
    def test_queries_without_a_peak_do_not_change(self, backend: str) -> None:
        """Every other query is orthogonal to the sink, so splitting P in two changes its output only by rounding."""
        query, key, value = (tensor.clone() for tensor in by_name("sink-13").make(64, 128, dtype=torch.float32))
        direction = key[0, 0, 0] / key[0, 0, 0].norm()
        query[0, 0, ::2] -= (query[0, 0, ::2] @ direction)[:, None] * direction
        options = {"sparsity": Dense(), "quantization": "int8_fp8", "return_lse": True, "backend": backend}
        output, lse = sparge.attention(query, key, value, **options)
        exact, exact_lse = exact_attention(query, key, value)
        assert relative_l1(output[:, :, ::2], exact[:, :, ::2]) < 0.03
        assert relative_l1(output[:, :, 1::2], exact[:, :, 1::2]) < by_name("sink-13").limit
        assert (lse - exact_lse).abs().max() < 0.1


class TestPvThreshold:
    def call(
        self, sample: Any, pv_threshold: Any, *, quantization: str = "none", scale: float = 0.125
    ) -> reference.AttentionResult:
        shape = Shape(1, 2, 2, 512, 512, 64, 64)
        mask = sparge.predict(sample.query, sample.key, is_causal=True, sparsity=Dense())
        call = Call(shape, True, scale, quantization=quantization, pv_threshold=pv_threshold)
        return reference.attention(sample.query, sample.key, sample.value, mask, call)

    @backends
    @modes
    def test_very_low_threshold_changes_only_rounding(self, backend: str, quantization: str) -> None:
        """With FP8, a tile that is hidden from 64 queries is skipped, except with a threshold of -inf or None.

        If it is not skipped, it moves the row reference by `ROW_REF_RANGE`, 44 nats. The LSE sums three such numbers,
        each rounded to float32 by up to 1.9e-6.
        """
        sample = text_like(512, heads=2)
        results = [
            sparge.attention(
                sample.query,
                sample.key,
                sample.value,
                is_causal=True,
                sparsity=TopK(0.5, min_blocks=1, pv_threshold=threshold),
                return_lse=True,
                backend=backend,
                quantization=quantization,
            )
            for threshold in (-math.inf, -1e4, None)
        ]
        for ours, other, plain in zip(*results, strict=True):
            torch.testing.assert_close(ours, other, rtol=0, atol=6e-6 if quantization == "int8_fp8" else 0.0)
            torch.testing.assert_close(ours, plain, rtol=0, atol=6e-6 if quantization == "int8_fp8" else 5e-6)

    @backends
    def test_moderate_threshold_skips_products_with_a_small_error(self, backend: str) -> None:
        """Every skipped probability is below exp(threshold) times the row's largest, and at most 512 are skipped."""
        sample = text_like(512, heads=2)
        threshold, scale = -12.0, 0.5
        hidden = self.call(sample, -1e4, scale=scale).pv_skipped  # 64 queries that see no key of a diagonal block
        assert (hidden == 1).all()
        assert (self.call(sample, threshold, scale=scale).pv_skipped > hidden).any()
        output, lse = sparge.attention(
            sample.query,
            sample.key,
            sample.value,
            is_causal=True,
            scale=scale,
            sparsity=TopK(1, pv_threshold=threshold),
            return_lse=True,
            backend=backend,
        )
        call = {"is_causal": True, "scale": scale}
        exact, exact_lse = exact_attention(sample.query, sample.key, sample.value, **call)
        lost = 512 * math.exp(threshold)
        assert (output - exact).abs().max() < 2 * lost * sample.value.abs().max()
        assert (lse - exact_lse).abs().max() < lost

    @backends
    def test_thresholds_per_head(self, backend: str) -> None:
        sample = text_with_needles(512, heads=2)
        call = {"is_causal": True, "backend": backend, "return_lse": True}
        tensors = (sample.query, sample.key, sample.value)
        mask = sparge.predict(*tensors[:2], is_causal=True, sparsity=Dense())
        results = [
            sparge.block_sparse_attention(*tensors, mask, pv_threshold=threshold, **call)
            for threshold in (torch.tensor([-1e4, -3.0]), -1e4, -3.0)
        ]
        for mixed, never, often in zip(*results, strict=True):
            assert torch.equal(mixed[:, 0], never[:, 0])
            assert torch.equal(mixed[:, 1], often[:, 1])
            assert not torch.equal(never[:, 1], often[:, 1])

    @backends
    @modes
    def test_backends_skip_the_same_products(self, backend: str, quantization: str) -> None:
        sample = text_like(512, heads=2)
        expected = self.call(sample, -4.0, quantization=quantization)
        assert int(expected.pv_skipped.sum()) > 0
        output, lse = sparge.attention(
            sample.query,
            sample.key,
            sample.value,
            is_causal=True,
            sparsity=TopK(1, pv_threshold=-4.0),
            return_lse=True,
            backend=backend,
            quantization=quantization,
        )
        # A quantized value that rounds the other way in float32 changes an output by one FP8 step of one probability.
        assert relative_l1(output, expected.output) < (1e-6 if quantization == "none" else 1e-3)
        assert (lse - expected.lse).abs().max() < (1e-5 if quantization == "none" else 1e-3)

    @backends
    @modes
    @causality
    @pytest.mark.parametrize("name", LENGTHS)
    def test_skipped_products_are_counted(self, name: str, is_causal: bool, quantization: str, backend: str) -> None:
        assert_skipped_share(LENGTHS[name], is_causal=is_causal, quantization=quantization, backend=backend)

    @backends
    @modes
    def test_products_of_means_are_not_counted(self, quantization: str, backend: str) -> None:
        assert_skipped_share((300, 330), skipped="mean", quantization=quantization, backend=backend)

    @backends
    def test_hidden_products_are_counted(self, backend: str) -> None:
        hidden = torch.arange(384) >= 200
        assert_skipped_share((256, 384), attn_mask=~hidden[None, None, None], quantization="none", backend=backend)
