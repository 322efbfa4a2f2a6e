"""NaN and Inf propagate to the same outputs as in SDPA in every mode, and no further."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from conftest import (
    BACKENDS,
    SPARSE,
    backends,
    causality,
    exact_attention,
    make_qkv,
    modes,
)
from sparge import TopCdf, TopK

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.timeout(120)]


class TestNonFinite:
    """NaN and Inf propagate to every query that sees them, as in SDPA, but not to earlier blocks."""

    TOKEN = 300

    def run(self, which: str, bad: float, **options: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        tensors = list(make_qkv(320, head_dim=16))
        tensors["qkv".index(which)][0, 0, self.TOKEN, 3] = bad
        output, lse = sparge.attention(*tensors, enable_gqa=True, return_lse=True, **options)
        return output, lse, tensors

    @backends
    @modes
    @causality
    @pytest.mark.parametrize("score", ["moment", "mean"])
    @pytest.mark.parametrize("topk", [1.0, 0.1])
    def test_nan_key(self, backend: str, quantization: str, is_causal: bool, score: str, topk: float) -> None:
        sparsity = TopK(
            topk, min_blocks=1, sink=False, diagonal=False
        )  # some query blocks keep nothing: their LSE is -inf
        output, lse, _ = self.run(
            "k",
            math.nan,
            is_causal=is_causal,
            backend=backend,
            quantization=quantization,
            sparsity=sparsity,
            score=score,
        )
        first = self.TOKEN if is_causal else 0
        assert output[:, 0, first:].isnan().all()
        assert lse[:, 0, first:].isnan().all()
        assert output[:, 1:].isfinite().all()
        if is_causal:
            past = self.TOKEN if quantization == "none" else 260  # the first key with the same INT8 scale
            assert output[:, :, :past].isfinite().all()
            assert not lse[:, :, :past].isnan().any()

    @backends
    @modes
    @causality
    @pytest.mark.parametrize("score", ["moment", "mean"])
    @pytest.mark.parametrize("sparsity", [TopK(1), TopK(0.1, min_blocks=1)], ids=["full", "sparse"])
    @pytest.mark.parametrize("bad", [math.inf, -math.inf])
    def test_infinite_key(
        self, backend: str, quantization: str, is_causal: bool, score: str, sparsity: Any, bad: float
    ) -> None:
        """Softmax turns a score of +inf into NaN, of -inf into 0. Queries that are NaN in SDPA are NaN here."""
        output, _, tensors = self.run(
            "k", bad, is_causal=is_causal, backend=backend, quantization=quantization, sparsity=sparsity, score=score
        )
        exact, _ = exact_attention(*tensors, is_causal=is_causal)
        assert exact[:, 0].isnan().any() and exact[:, 0].isfinite().any()
        assert output[exact.isnan()].isnan().all()
        assert output[:, 1:].isfinite().all()
        if is_causal:
            assert output[:, :, :256].isfinite().all()

    @backends
    @modes
    @causality
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_query(self, backend: str, quantization: str, is_causal: bool, bad: float) -> None:
        output, _, _ = self.run("q", bad, is_causal=is_causal, backend=backend, quantization=quantization, **SPARSE)
        assert output[:, 0, self.TOKEN].isnan().all()
        assert output[:, 1:].isfinite().all()
        assert output[:, :, torch.arange(320) != self.TOKEN].isfinite().all(), "an INT8 query has a scale of its own"

    @backends
    @modes
    @causality
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_value(self, backend: str, quantization: str, is_causal: bool, bad: float) -> None:
        output, lse, tensors = self.run(
            "v", bad, is_causal=is_causal, backend=backend, quantization=quantization, topk=1
        )
        first = self.TOKEN if is_causal else 0
        assert not output[:, 0, first:, 3].isfinite().any()
        others = [channel for channel in range(16) if channel != 3]
        assert output[..., others].isfinite().all()
        assert output[:, 1:].isfinite().all()
        assert lse.isfinite().all()
        if is_causal:
            assert output[:, :, :256].isfinite().all(), "these queries do not see the value"
        if quantization == "none":
            exact, _ = exact_attention(*tensors, is_causal=is_causal)
            assert torch.equal(output[:, :, first:].isnan(), exact[:, :, first:].isnan())

    @backends
    @modes
    @pytest.mark.parametrize("pv_threshold", [None, -2.0])
    def test_everything_is_nan(self, backend: str, quantization: str, pv_threshold: float | None) -> None:
        query, key, value = (torch.full((1, 2, 200, 16), math.nan) for _ in range(3))
        for sparsity in (TopK(0.3, min_blocks=1, pv_threshold=pv_threshold), TopCdf(0.5, similarity_threshold=0.5)):
            output = sparge.attention(
                query, key, value, sparsity=sparsity, backend=backend, quantization=quantization, is_causal=True
            )
            assert output.isnan().all()

    @backends
    @modes
    @causality
    def test_huge_key_gives_a_finite_output(self, backend: str, quantization: str, is_causal: bool) -> None:
        """The square of the key overflows, so the key is excluded from the balance of the channels."""
        query, key, value = make_qkv(512, head_dim=16)
        key[0, 0, 300, 3] = 3e19
        output = sparge.attention(
            query, key, value, enable_gqa=True, is_causal=is_causal, quantization=quantization, backend=backend, topk=1
        )
        assert output.isfinite().all()

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_nan_in_an_additive_mask(self, backend: str) -> None:
        query, key, value = make_qkv(200)
        mask = torch.zeros(200, 200)
        mask[7, 9] = math.nan
        output = sparge.attention(query, key, value, mask, topk=1, backend=backend)
        assert output[:, :, 7].isnan().all()
        assert output[:, :, torch.arange(200) != 7].isfinite().all()

    @backends
    @causality
    def test_keys_of_minus_infinity_have_weight_0(self, backend: str, is_causal: bool) -> None:
        """With positive queries, every score of the first two blocks is -inf."""
        query, key, value = make_qkv(256, head_dim=16)
        query = query.abs() + 0.1
        key[:, :, :128] = -math.inf
        options = {"return_lse": True, "quantization": "none", "backend": backend}
        output, lse = sparge.attention(query, key, value, is_causal=is_causal, topk=1, **options)
        first = 128 if is_causal else 0
        seen, logits = key.clone(), query.double() @ key.double().mT / 4
        assert not logits.isnan().any() and seen.isinf().any()
        if is_causal:
            logits = logits.masked_fill(~torch.ones(256, 256, dtype=torch.bool).tril(), -math.inf)
        exact = logits[:, :, first:].softmax(-1) @ value.double()
        torch.testing.assert_close(output[:, :, first:].double(), exact, rtol=0, atol=2e-6)
        torch.testing.assert_close(lse.double(), logits.logsumexp(-1), rtol=0, atol=1e-5)
