"""Masks of every kind are applied, queries without visible keys give 0 and -inf, hidden keys have no effect."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import sparge
from conftest import (
    BACKENDS,
    SPARSE,
    assert_exact,
    backends,
    causality,
    make_qkv,
    modes,
    unquantized_options,
    visible_elements,
)
from sparge import Dense, TopCdf, TopK

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.timeout(120)]


class TestEmptyRows:
    @backends
    @modes
    def test_causal_with_more_queries_than_keys(self, backend: str, quantization: str) -> None:
        query, key, value = make_qkv(330, 129, heads=6, kv_heads=2)
        output, lse = sparge.attention(
            query,
            key,
            value,
            is_causal=True,
            enable_gqa=True,
            return_lse=True,
            backend=backend,
            quantization=quantization,
        )
        assert (output[:, :, :201] == 0).all()
        assert (lse[:, :, :201] == -math.inf).all()
        assert lse[:, :, 201:].isfinite().all()
        assert (output[:, :, 201:] != 0).any(-1).all()

    @backends
    @modes
    @pytest.mark.parametrize("pv_threshold", [None, -3.0])
    def test_queries_and_query_blocks_without_visible_keys(
        self, backend: str, quantization: str, pv_threshold: float | None
    ) -> None:
        query, key, value = make_qkv(300, 200)
        seen = torch.ones(300, 200, dtype=torch.bool)
        seen[5] = seen[128:256] = seen[299] = False
        output, lse = sparge.attention(
            query,
            key,
            value,
            seen,
            sparsity=TopK(1, pv_threshold=pv_threshold),
            return_lse=True,
            backend=backend,
            quantization=quantization,
        )
        empty = ~seen.any(-1)
        assert (output[:, :, empty] == 0).all()
        assert (lse[:, :, empty] == -math.inf).all()
        assert lse[:, :, ~empty].isfinite().all()

    @backends
    @modes
    @causality
    def test_block_masks_with_empty_query_blocks(self, backend: str, quantization: str, is_causal: bool) -> None:
        query, key, value = make_qkv(300, 200)
        blocks = torch.zeros(3, 4, dtype=torch.bool)
        blocks[0, 1] = blocks[2, 3] = True
        call = {"is_causal": is_causal, "block_mask": blocks}
        output, lse = sparge.block_sparse_attention(
            query,
            key,
            value,
            blocks,
            is_causal=is_causal,
            return_lse=True,
            backend=backend,
            quantization=quantization,
        )
        seen, _ = visible_elements(query, key, **call)
        empty = ~seen.any(-1)
        assert empty.any() and not empty.all()
        assert (output[empty] == 0).all()
        assert (lse[empty] == -math.inf).all()
        if quantization == "none":
            assert_exact((output, lse), query, key, value, **call)

    @backends
    def test_no_visible_keys(self, backend: str) -> None:
        query, key, value = make_qkv(130)
        hidden = torch.zeros(1, 1, 1, 130, dtype=torch.bool)
        for sparsity in (TopK(0.5), TopCdf(0.9, similarity_threshold=0.5), Dense()):
            output, lse = sparge.attention(
                query, key, value, hidden, sparsity=sparsity, return_lse=True, backend=backend
            )
            assert (output == 0).all()
            assert (lse == -math.inf).all()
        assert sparge.predict(query, key, attn_mask=hidden, backend=backend).density() == 0.0

    @backends
    @pytest.mark.parametrize("head_dims", [(32, 32), (32, 16)], ids=["equal", "different"])
    def test_values_of_queries_without_visible_keys_have_no_effect(
        self, backend: str, head_dims: tuple[int, int]
    ) -> None:
        """With left padding, the memory of such queries is arbitrary."""
        query, key, value = make_qkv(130, head_dim=head_dims[0], value_dim=head_dims[1])
        seen = torch.ones(130, 130, dtype=torch.bool)
        seen[3] = False
        query[:, :, 3] = math.nan
        output, lse = sparge.attention(query, key, value, seen, topk=1, **unquantized_options(backend))
        assert (output[:, :, 3] == 0).all()
        assert (lse[:, :, 3] == -math.inf).all()


def masks(q_len: int, kv_len: int, batch: int, heads: int) -> dict[str, Tensor]:
    """Return masks of every kind and shape that attention accepts."""
    generator = torch.Generator().manual_seed(7)

    def bits(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < 0.6

    def bias(*shape: int) -> Tensor:
        return 2 * torch.randn(shape, generator=generator)

    padding = torch.arange(kv_len) < torch.tensor([kv_len, kv_len // 2, 3])[:batch, None]
    lowest = torch.finfo(torch.float32).min
    per_head = bits(batch, heads, q_len, kv_len)
    per_head[:, 1, 10:20] = False
    return {
        "bool": bits(q_len, kv_len),
        "bool per head": per_head,
        "bool per key": bits(kv_len),
        "bool per head and key": bits(1, heads, 1, kv_len),
        "bool per query": bits(batch, 1, q_len, 1),
        "key padding": padding[:, None, None],
        "additive key padding": torch.zeros(padding.shape).masked_fill(~padding, lowest)[:, None, None],
        "additive": bias(batch, 1, q_len, kv_len),
        "additive per key": bias(1, heads, 1, kv_len),
        "additive with -inf": bias(q_len, kv_len).masked_fill(~bits(q_len, kv_len), -math.inf),
        "additive with the lowest number": bias(heads, q_len, kv_len).masked_fill(~bits(q_len, kv_len), lowest),
        "additive in float16": bias(q_len, kv_len).half().masked_fill(~bits(q_len, kv_len), -65504.0),
        "sliding window": torch.ones(q_len, kv_len, dtype=torch.bool).tril(40).triu(-40),
    }


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@causality
@pytest.mark.parametrize("kind", masks(1, 1, 1, 2))
@pytest.mark.parametrize("value_dim", [16, 8])
def test_masks_are_applied(backend: str, is_causal: bool, kind: str, value_dim: int) -> None:
    query, key, value = make_qkv(140, 200, batch=3, heads=2, kv_heads=1, head_dim=16, value_dim=value_dim)
    mask = masks(140, 200, 3, 2)[kind]
    topk = {} if backend == "auto" else {"topk": 1.0}
    got = sparge.attention(
        query, key, value, mask, is_causal=is_causal, **topk, enable_gqa=True, return_lse=True, backend=backend
    )
    assert_exact(got, query, key, value, is_causal=is_causal, attn_mask=mask)


@backends
@causality
@pytest.mark.parametrize("kind", ["bool per head", "key padding", "additive with -inf", "sliding window"])
def test_masks_and_sparsity_together(backend: str, is_causal: bool, kind: str) -> None:
    """The sparse result is exact attention over the blocks that `predict` returns for the same call."""
    query, key, value = make_qkv(140, 640, batch=2, heads=4, kv_heads=2, head_dim=16)
    mask = masks(140, 640, 2, 4)[kind]
    call = {"is_causal": is_causal, "attn_mask": mask, "enable_gqa": True, "backend": backend}
    options = {"quantization": "none", "skipped": "drop", **SPARSE, **call}
    got = sparge.attention(query, key, value, return_lse=True, **options)
    blocks = sparge.predict(query, key, **SPARSE, **call)
    assert 0 < blocks.density() < 0.5
    assert_exact(got, query, key, value, is_causal=is_causal, attn_mask=mask, block_mask=blocks.to_dense())
    assert sparge.stats().density == pytest.approx(blocks.density(), abs=1e-12)


SPARSITIES = {
    "TopK": TopK(0.3, min_blocks=1),
    "TopCdf": TopCdf(0.7, min_blocks=1, similarity_threshold=0.05),
    "Dense": Dense(),
}


@backends
@modes
@causality
@pytest.mark.parametrize("sparsity", SPARSITIES.values(), ids=SPARSITIES)
@pytest.mark.parametrize("form", ["bool", "additive", "element"])
def test_hidden_keys_have_no_effect(backend: str, quantization: str, is_causal: bool, sparsity: Any, form: str) -> None:
    query, key, value = make_qkv(50, 400, heads=2, kv_heads=1, head_dim=16)
    hidden = torch.arange(400) >= 270
    hidden[17] = hidden[64:128] = True
    mask = ~hidden
    if form == "additive":
        mask = torch.zeros(400).masked_fill(hidden, -math.inf)
    elif form == "element":
        mask = mask.expand(50, 400).clone()
        mask[3, :100] = False
    results = []
    for padding in (0.0, 1e30, math.nan):
        key[:, :, hidden] = value[:, :, hidden] = padding
        options = {"is_causal": is_causal, "sparsity": sparsity, "score": "moment"}
        results.append(
            sparge.attention(
                query,
                key,
                value,
                mask,
                enable_gqa=True,
                return_lse=True,
                backend=backend,
                quantization=quantization,
                **options,
            )
        )
    assert results[0][0].isfinite().all()
    for output, lse in results[1:]:
        assert torch.equal(output, results[0][0])
        assert torch.equal(lse, results[0][1])


class TestCausalBias:
    """The causal biases of torch.nn.attention.bias, whose memory is never initialized."""

    def bias_and_elements(self, variant: str, q_len: int, kv_len: int) -> tuple[Tensor, Tensor]:
        if variant == "lower_right" and q_len > kv_len:
            with pytest.warns(UserWarning, match="Lower right"):
                bias = causal_lower_right(q_len, kv_len)
        else:
            bias = {"lower_right": causal_lower_right, "upper_left": causal_upper_left}[variant](q_len, kv_len)
        offset = kv_len - q_len if variant == "lower_right" else 0
        return bias, torch.ones(q_len, kv_len, dtype=torch.bool).tril(offset)

    @pytest.mark.parametrize("variant", ["lower_right", "upper_left"])
    @pytest.mark.parametrize("lengths", [(200, 200), (130, 300), (300, 130)])
    @pytest.mark.parametrize("options", [{"topk": 1.0, "backend": "torch"}, {"sparsity": Dense()}, {}])
    def test_attention(self, variant: str, lengths: tuple[int, int], options: dict[str, Any]) -> None:
        query, key, value = make_qkv(*lengths)
        bias, seen = self.bias_and_elements(variant, *lengths)
        got = sparge.attention(query, key, value, bias, return_lse=True, **options)
        assert_exact(got, query, key, value, attn_mask=seen)

    @pytest.mark.parametrize("variant", ["lower_right", "upper_left"])
    @pytest.mark.parametrize("lengths", [(200, 200), (130, 300)])
    def test_predict_and_block_sparse_attention(self, variant: str, lengths: tuple[int, int]) -> None:
        query, key, value = make_qkv(*lengths)
        bias, seen = self.bias_and_elements(variant, *lengths)
        mask = sparge.predict(query, key, topk=1.0, attn_mask=bias)
        assert torch.equal(mask.to_dense(), sparge.predict(query, key, topk=1.0, attn_mask=seen).to_dense())
        everything = torch.ones(mask.shape, dtype=torch.bool)
        for blocks in (mask, everything):
            got = sparge.block_sparse_attention(query, key, value, blocks, attn_mask=bias, return_lse=True)
            assert isinstance(got, tuple)
            assert_exact(got, query, key, value, attn_mask=seen)

    @pytest.mark.parametrize("variant", ["lower_right", "upper_left"])
    def test_gradients_run_dense(self, variant: str) -> None:
        query, key, value = make_qkv(130, 300)
        bias, seen = self.bias_and_elements(variant, 130, 300)
        got = sparge.attention(query.requires_grad_(), key, value, bias, on_unsupported="dense")
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)

    def test_invalid_causal_biases_are_rejected(self) -> None:
        query, key, value = make_qkv(130)
        bias = causal_upper_left(130, 130)
        blocks = torch.ones(1, 1, 2, 3, dtype=torch.bool)
        for call in (
            lambda **options: sparge.attention(query, key, value, **options),
            lambda **options: sparge.predict(query, key, **options),
            lambda **options: sparge.block_sparse_attention(query, key, value, blocks, **options),
        ):
            with pytest.raises(ValueError, match="expected no CausalBias together with is_causal=True, got both"):
                call(attn_mask=bias, is_causal=True)
            with pytest.raises(ValueError, match=r"expected a CausalBias of size \(130, 130\), got \(130, 131\)"):
                call(attn_mask=causal_lower_right(130, 131))


class TestMeansUnderAMask:
    """A mask that block means do not support raises, or runs dense with ``on_unsupported``."""

    MASK = torch.rand(1, 1, 300, 300, generator=torch.Generator().manual_seed(0)) < 0.9

    def test_attention(self) -> None:
        query, key, value = make_qkv(300)
        call = {"attn_mask": self.MASK, "skipped": "mean", "quantization": "int8_fp16"}
        message = r"skipped='mean': expected no attn_mask, or a bool one over keys, got a full \(S_q x S_k\) one"
        with pytest.raises(NotImplementedError, match=message):
            sparge.attention(query, key, value, **call)
        output = sparge.attention(query, key, value, on_unsupported="dense", **call)
        exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, self.MASK)
        torch.testing.assert_close(output, exact)
        assert sparge.stats().reasons == {"dense: unsupported (means with this mask)": 1}

    def test_dense_calls_need_no_means(self) -> None:
        query, key, value = make_qkv(300)
        for options in ({"sparsity": Dense()}, {"topk": 0.5}):  # below the crossover
            sparge.attention(query, key, value, attn_mask=self.MASK, skipped="mean", **options)

    def test_replace_sdpa_runs_dense(self) -> None:
        query, key, value = make_qkv(300)
        policy = sparge.Policy(backend="torch", skipped="mean", on_unsupported="dense")
        with sparge.replace_sdpa(policy):
            torch.nn.functional.scaled_dot_product_attention(query, key, value, self.MASK)
        assert sparge.stats().reasons == {"dense: unsupported (means with this mask)": 1}
