"""The future does not affect the past; NaN and Inf propagate only to the queries that see them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from conftest import causality, relative_l1
from gpu.conftest import (
    BACKEND,
    DEVICE,
    assert_matches_exact,
    equal,
    exact,
    make_inputs,
    modes,
    quantized_modes,
    random_bits,
)
from sparge import TopCdf, TopK

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
OPTIONS = {"enable_gqa": True, "return_lse": True, "backend": BACKEND}


class TestCausality:
    """Queries before BLOCK_START see no key from BLOCK_START + prefix on."""

    BLOCK_START = 768
    PREFIXES = pytest.mark.parametrize("prefix", [0, 128, 30], ids="prefix {}".format)
    RULES = pytest.mark.parametrize(
        "sparsity",
        [
            TopK(0.4, min_blocks=1, sink=False, diagonal=False),
            TopCdf(0.6, min_blocks=1),
            TopK(0.4, min_blocks=1, sink=False, diagonal=False, similarity_threshold=0.3),
        ],
        ids=["topk", "topcdf", "similarity"],
    )

    def inputs(self, prefix: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return similar queries, and keys similar in every other block: some blocks pass the similarity threshold."""
        query, key, value = make_inputs(1000, 1000 + prefix, heads=2, kv_heads=1)
        directions = torch.randn(7, 64, generator=torch.Generator().manual_seed(8)).to(key)
        for index, direction in enumerate(directions):
            key[:, :, 128 * index : 128 * index + 64] += 2 * direction
        return query + 1.0, key, value

    def changed(self, tensors: tuple[Tensor, ...], starts: tuple[int, ...], future: float) -> list[Tensor]:
        other = [tensor.clone() for tensor in tensors]
        for index, (tensor, start) in enumerate(zip(other, starts, strict=True)):
            noise = torch.randn(tensor[:, :, start:].shape, generator=torch.Generator().manual_seed(50 + index))
            tensor[:, :, start:] = future * (1 + noise.to(tensor))
        return other

    @PREFIXES
    @pytest.mark.parametrize("future", [1.0, 1e4, 1e30])
    def test_explicit_mask_does_not_leak_the_future(self, prefix: int, future: float) -> None:
        tensors = self.inputs(prefix)
        cut = 800  # inside a query block and a key block
        blocks = random_bits(1, 2, 8, -(-(1000 + prefix) // 64))
        results = [
            sparge.block_sparse_attention(*given, blocks, is_causal=True, quantization="none", **OPTIONS)
            for given in (tensors, self.changed(tensors, (cut, cut + prefix, cut + prefix), future))
        ]
        # Only numbers that overflow may affect other queries of their query block, as in SDPA.
        past = cut if future <= 1e4 else 640
        for before, after in zip(*results, strict=True):
            assert torch.equal(before[:, :, :past], after[:, :, :past])
            assert not torch.equal(before[:, :, cut:], after[:, :, cut:])

    @PREFIXES
    @RULES
    @pytest.mark.parametrize("score", ["moment", "mean"])
    @pytest.mark.parametrize("future", [1.0, 1e4, math.nan])
    def test_prediction_does_not_leak_the_future(self, prefix: int, sparsity: Any, score: str, future: float) -> None:
        tensors = self.inputs(prefix)
        start = self.BLOCK_START + prefix
        given = (tensors, self.changed(tensors, (self.BLOCK_START, start, start), future))
        options = {"is_causal": True, "sparsity": sparsity, "score": score, "enable_gqa": True, "backend": BACKEND}
        before, after = (sparge.predict(*qkv[:2], **options).to_dense()[:, :, :6] for qkv in given)
        visible = sparge.predict(*tensors[:2], **{**options, "sparsity": sparge.Dense()}).to_dense()[:, :, :6]
        assert 0 < before.sum() < visible.sum(), "some blocks were skipped"
        assert torch.equal(before, after)
        before, after = (sparge.attention(*qkv, quantization="none", return_lse=True, **options) for qkv in given)
        # NaN shares a key block with the last keys that query block 5 sees, unless that block ends there.
        past = 640 if math.isnan(future) and prefix % 64 else self.BLOCK_START
        assert equal([tensor[:, :, :past] for tensor in after], [tensor[:, :, :past] for tensor in before])

    @PREFIXES
    @quantized_modes
    def test_quantization_leaks_only_the_mean_of_the_keys(self, prefix: int, quantization: str) -> None:
        """Reordering future tokens within chunks of 256 keys keeps the mean and the balance factors, and thus the past.

        Keys are multiples of 1/16, so their sums and sums of squares are exact in any order.
        """
        query, key, value = self.inputs(prefix)
        key = (16 * key).round() / 16
        start = -(-(self.BLOCK_START + prefix) // 256) * 256
        order = torch.arange(key.shape[2], device=DEVICE)
        for chunk in order[start:].split(256):
            chunk.copy_(chunk.flip(0))
        options = {"is_causal": True, "sparsity": TopK(0.5, min_blocks=1), "quantization": quantization, **OPTIONS}
        before = sparge.attention(query, key, value, **options)
        after = sparge.attention(query, key[:, :, order], value[:, :, order], **options)
        past = slice(self.BLOCK_START)
        assert equal([tensor[:, :, past] for tensor in after], [tensor[:, :, past] for tensor in before])
        assert not torch.equal(after[0][:, :, start - prefix :], before[0][:, :, start - prefix :])

    @quantized_modes
    def test_a_different_mean_of_the_keys_changes_the_past_by_rounding(self, quantization: str) -> None:
        query, key, value = self.inputs(0)
        options = {"is_causal": True, "sparsity": TopK(0.5, min_blocks=1), "quantization": quantization, **OPTIONS}
        past = slice(self.BLOCK_START)
        given = ((query, key, value), self.changed((query, key, value), (self.BLOCK_START,) * 3, 1.0))
        before, after = (sparge.attention(*qkv, **options)[0][:, :, past] for qkv in given)
        blocks = sparge.predict(
            query, key, is_causal=True, sparsity=TopK(0.5, min_blocks=1), enable_gqa=True, backend=BACKEND
        )
        expected, _ = exact(query, key, value, is_causal=True, block_mask=blocks.to_dense())
        error = relative_l1(before, expected[:, :, past])
        assert error < 0.1
        assert relative_l1(after, before.double()) <= 2 * error

    @pytest.mark.parametrize("offset", [-129, -128, -65, -64, -63, -1, 1, 63, 65, 127])
    def test_every_offset_of_the_diagonal(self, offset: int) -> None:
        query, key, value = make_inputs(300, 300 + offset, heads=2)
        got = sparge.attention(query, key, value, is_causal=True, topk=1, quantization="none", **OPTIONS)
        assert_matches_exact(got, query, key, value, is_causal=True)


class TestNonFinite:
    """NaN and Inf propagate to the queries that see them, but not to earlier blocks or other heads."""

    TOKEN = 300

    def run(self, which: str, bad: float, **options: Any) -> tuple[Tensor, Tensor]:
        tensors = make_inputs(320, heads=2)
        tensors["qkv".index(which)][0, 0, self.TOKEN, 3] = bad
        return sparge.attention(*tensors, **OPTIONS, **options)

    @modes
    @causality
    @pytest.mark.parametrize("topk", [1.0, 0.1])
    def test_key(self, topk: float, is_causal: bool, quantization: str) -> None:
        sparsity = TopK(topk, min_blocks=1, sink=False, diagonal=False)
        output, lse = self.run("k", math.nan, is_causal=is_causal, sparsity=sparsity, quantization=quantization)
        first = self.TOKEN if is_causal else 0
        assert output[:, 0, first:].isnan().all()
        assert lse[:, 0, first:].isnan().all()
        assert output[:, 1:].isfinite().all()
        if is_causal:
            past = self.TOKEN if quantization == "none" else 256  # an INT8 scale is shared within a block
            assert output[:, :, :past].isfinite().all()

    @modes
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_query(self, bad: float, quantization: str) -> None:
        output, _ = self.run("q", bad, is_causal=True, topk=0.3, quantization=quantization)
        assert output[:, 0, self.TOKEN].isnan().all()
        assert output[:, 1:].isfinite().all()
        assert output[:, :, :256].isfinite().all()

    @modes
    @causality
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_value(self, bad: float, is_causal: bool, quantization: str) -> None:
        output, lse = self.run("v", bad, is_causal=is_causal, topk=1, quantization=quantization)
        first = self.TOKEN if is_causal else 0
        assert not output[:, 0, first:, 3].isfinite().any()
        assert output[..., torch.arange(64, device=DEVICE) != 3].isfinite().all()
        assert output[:, 1:].isfinite().all()
        assert lse.isfinite().all()
        if is_causal:
            assert output[:, :, :256].isfinite().all(), "these queries do not see the value"
