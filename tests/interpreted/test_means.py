"""Means of skipped blocks in the kernels: their computation, their bias, and attention with them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from conftest import causality, make_qkv, modes, relative_l1
from gpu.conftest import rms
from interpreted.conftest import LOG2_E, assert_close, call_of, make_problem, random_bits, seen_tokens, visibility_of
from sparge import BlockMask
from sparge.backends import base
from sparge.backends.gpu.operands import BIAS_COLUMNS
from sparge.backends.gpu.stages.replacement import replaced_bias
from sparge.backends.gpu.stages.summary import summarize_key_value
from sparge.call import Call
from sparge.masks.geometry import BLOCK_K, Shape
from sparge.numerics.block_means import block_means
from sparge.numerics.block_means import mean_bias as specified_bias

pytestmark = pytest.mark.usefixtures("poisoned_memory")

WIDTHS = {"head_dim": 24, "value_dim": 40}


def random_blocks(query: Tensor, key: Tensor, share: float = 0.4) -> Tensor:
    """Return random kept blocks (B, H, q_blocks, kv_blocks). The last query block of the first head keeps all."""
    blocks = random_bits(*query.shape[:2], -(-query.shape[2] // 128), -(-key.shape[2] // BLOCK_K), share=share)
    blocks[:, 0, -1] = True
    return blocks


def attend(query: Tensor, key: Tensor, value: Tensor, blocks: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    call = {"skipped": "mean", "backend": "triton", **options}
    return sparge.block_sparse_attention(query, key, value, blocks, enable_gqa=True, return_lse=True, **call)


def assert_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: Tensor, *, quantization: str = "none", **call: Any
) -> tuple[Tensor, Tensor]:
    """Compare with the torch backend.

    The interpreter does not round float32 products to TF32, and means are float32, so 1e-5 covers the order of sums.
    Steps of two blocks round P to FP8 relative to their common maximum. The error of P is then another sample of the
    same size, sqrt(1/2) of the total.
    """
    got = attend(query, key, value, blocks, quantization=quantization, **call)
    exact = attend(query, key, value, blocks, quantization="none", backend="torch", **call)
    assert torch.equal(got[1] == -math.inf, exact[1] == -math.inf)
    assert not got[0][got[1] == -math.inf].any()
    if quantization == "none":
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-5)
        return got
    expected = attend(query, key, value, blocks, quantization=quantization, backend="torch", **call)
    intended = relative_l1(expected[0], exact[0].double())
    assert relative_l1(got[0], exact[0].double()) <= 1.2 * intended + 1e-3
    share = 0.75 if quantization == "int8_fp8" else 0.05
    assert relative_l1(got[0], expected[0].double()) <= share * intended + 1e-3
    assert rms(got[1] - expected[1]) <= 0.05 * rms(expected[1] - exact[1]) + 1e-4
    return got


class TestAttention:
    @modes
    @causality
    def test_attention_with_a_prefix(self, is_causal: bool, quantization: str) -> None:
        query, key, value = make_qkv(140, 330, heads=2, kv_heads=1, **WIDTHS)
        assert_attention(query, key, value, random_blocks(query, key), quantization=quantization, is_causal=is_causal)

    def test_dense_calls_ignore_skipped(self) -> None:
        """Dense calls over several ranks have the ``skipped`` of sparse calls."""
        query, key, value = make_qkv(140, 330, heads=2, kv_heads=1, **WIDTHS)
        call = call_of(Shape(1, 2, 1, 140, 330, 24, 40), sparsity=sparge.Dense(), skipped="mean")
        triton = base.get("triton")
        got = triton.attend(query, key, value, None, call)
        expected = triton.attend(query, key, value, None, replace(call, skipped="drop"))
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])

    @pytest.mark.parametrize("is_causal, quantization", [(True, "none"), (False, "int8_fp8")])
    def test_more_queries_than_keys(self, is_causal: bool, quantization: str) -> None:
        query, key, value = make_qkv(300, 129, heads=2, kv_heads=1, **WIDTHS)
        blocks = random_blocks(query, key)
        got = assert_attention(query, key, value, blocks, quantization=quantization, is_causal=is_causal)
        dropped = attend(query, key, value, blocks, quantization=quantization, is_causal=is_causal, skipped="drop")
        assert relative_l1(dropped[0], got[0].double()) > 0.1, "the means change something"

    @modes
    def test_two_tiles_of_means(self, quantization: str) -> None:
        """There are 66 blocks. The second query block skips all of them."""
        query, key, value = make_qkv(130, 65 * BLOCK_K + 9, heads=1, head_dim=8)
        blocks = random_blocks(query, key, 0.1)
        blocks[:, :, 1] = False
        assert_attention(query, key, value, blocks, quantization=quantization)

    def test_causal_query_block_that_sees_one_of_two_tiles(self) -> None:
        query, key, value = make_qkv(150, 65 * BLOCK_K + 9, heads=1, head_dim=8)
        assert_attention(query, key, value, random_blocks(query, key, 0.1), is_causal=True)

    @pytest.mark.parametrize(
        "is_causal, quantization", [(False, "none"), (True, "none"), (False, "int8_fp8"), (True, "int8_fp16")]
    )
    def test_padded_keys(self, is_causal: bool, quantization: str) -> None:
        """Hidden keys are NaN, and one block is hidden completely."""
        query, key, value = make_qkv(140, 300, batch=2, heads=2, kv_heads=1, **WIDTHS)
        mask = torch.arange(300) < torch.tensor([300, 170])[:, None, None, None]
        mask[..., 64:128] = False
        hidden = ~mask[:, 0, 0, :, None]
        key, value = (tensor.masked_fill(hidden[:, None], math.nan) for tensor in (key, value))
        blocks = random_blocks(query, key)
        assert_attention(query, key, value, blocks, quantization=quantization, is_causal=is_causal, attn_mask=mask)

    @pytest.mark.parametrize("quantization", ["int8_fp8", "int8_fp16"])
    def test_hidden_blocks_do_not_affect_the_int8_scale_of_means(self, quantization: str) -> None:
        """The mean of a hidden block must not determine the INT8 scale that it shares with other means."""
        query, key, value = make_qkv(128, 320, heads=1, head_dim=16)
        mask = torch.ones(1, 1, 1, 320, dtype=torch.bool)
        mask[..., 64:128] = False
        nothing = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
        assert_attention(query, key + 30.0, value, nothing, quantization=quantization, attn_mask=mask)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_16_bit_inputs(self, dtype: torch.dtype) -> None:
        """Means are rounded to the dtype of the keys and values."""
        query, key, value = make_qkv(140, 300, heads=1, **WIDTHS, dtype=dtype)
        blocks = random_blocks(query, key, 0.2)
        got = attend(query, key, value, blocks, quantization="none")
        expected = attend(query.float(), key.float(), value.float(), blocks, quantization="none", backend="torch")
        rounding = torch.finfo(dtype).eps
        assert relative_l1(got[0], expected[0].double()) < rounding
        assert (got[1] - expected[1]).abs().max() < 4 * rounding, "scores are below 4"

    @pytest.mark.parametrize("quantization, rounding", [("none", 1e-5), ("int8_fp8", 0.02)])
    def test_means_with_a_pv_threshold(self, quantization: str, rounding: float) -> None:
        """Both backends skip the same tiles. The first head keeps a block whose scores are far above the means."""
        query, key, value = make_qkv(140, 330, heads=2, **WIDTHS)
        query[..., 0], key[:, 0, :64, 0] = 8.0, 12.0
        blocks = random_blocks(query, key)
        blocks[..., 0] = True
        call = {"quantization": quantization, "pv_threshold": -9.0}
        got, expected = (attend(query, key, value, blocks, backend=backend, **call) for backend in ("triton", "torch"))
        assert relative_l1(got[0], expected[0].double()) < rounding
        if quantization == "int8_fp8":
            return  # with fewer values, the scales of V would differ
        alone = attend(query, key[:, :, :64], value[:, :, :64], blocks[..., :1], **call)
        assert relative_l1(got[0][:, 0], alone[0][:, 0].double()) < rounding, "all means are skipped"

    @pytest.mark.parametrize(
        "which, quantization", [("key", "none"), ("value", "none"), ("key", "int8_fp8"), ("value", "int8_fp16")]
    )
    def test_non_finite_means(self, which: str, quantization: str) -> None:
        """Causal query blocks after the block use its mean; the first head keeps no blocks."""
        query, key, value = make_qkv(384, heads=2, head_dim=16)
        {"key": key, "value": value}[which][0, 0, 200, 3] = math.inf
        blocks = random_blocks(query, key, 0.5)
        blocks[:, 0] = False
        output, lse = attend(query, key, value, blocks, quantization=quantization, is_causal=True)
        assert output[:, 0, 256:].isnan().all()
        assert lse[:, 0, 256:].isnan().all()
        assert output[:, 0, :256].isfinite().all()
        assert output[:, 1].isfinite().all()

    def test_prediction_and_attention_in_one_call(self) -> None:
        query, key, value = make_qkv(256, 600, heads=1, head_dim=16)
        rule = sparge.TopK(0.3, min_blocks=1)
        mask = sparge.predict(query, key, sparsity=rule, backend="triton")
        assert mask.density() < 0.5
        options = {"quantization": "none", "backend": "triton"}
        got = sparge.attention(query, key, value, sparsity=rule, return_lse=True, **options)
        torch.testing.assert_close(got, attend(query, key, value, mask, **options), rtol=0, atol=0)


class TestBias:
    def assert_bias(self, mask: BlockMask, key: Tensor, value: Tensor, shape: Shape, **options: Any) -> Tensor:
        """Check the bias in log2 units against the reference in nats, within rounding; NaN must be equal."""
        call = call_of(shape, is_causal=mask.is_causal, skipped="mean", **options)
        keys_seen, _ = seen_tokens(shape, mask.is_causal, call.attn_mask)
        means = block_means(key.double(), value.double(), keys_seen)
        expected = specified_bias(means, mask.to_dense(), call.shape, call.window)
        got = replaced_bias(mask, (means.bias * LOG2_E).float(), call)
        assert got.shape[1] % BIAS_COLUMNS == 0
        assert (got[:, shape.kv_blocks :] == -math.inf).all(), "padding columns"
        listed, expected = got[:, : shape.kv_blocks], expected.flatten(0, 2) * LOG2_E
        hidden = expected == -math.inf
        assert hidden.any() and not hidden.all()
        assert torch.equal(listed == -math.inf, hidden)
        assert_close(listed[~hidden], expected[~hidden], 1e-6)
        return got

    @causality
    @pytest.mark.parametrize("lengths", [(300, 300), (130, 450), (400, 190), (1, 130), (140, 8300)], ids=str)
    def test_lengths(self, lengths: tuple[int, int], is_causal: bool) -> None:
        """8300 keys are 130 blocks: more than `BIAS_COLUMNS`."""
        _, key, value, shape = make_problem(*lengths, heads=4, kv_heads=2, head_dim=8)
        blocks = random_bits(1, 4, shape.q_blocks, shape.kv_blocks, share=0.5)
        mask = BlockMask.from_dense(blocks, q_len=shape.q_len, kv_len=shape.kv_len, is_causal=is_causal)
        self.assert_bias(mask, key, value, shape)

    @causality
    def test_entries_after_the_kept_blocks_are_not_read(self, is_causal: bool) -> None:
        _, key, value, shape = make_problem(300, 450, heads=2, head_dim=8)
        blocks = random_bits(1, 2, shape.q_blocks, shape.kv_blocks, share=0.5)
        mask = BlockMask.from_dense(blocks, q_len=300, kv_len=450, is_causal=is_causal)
        expected = self.assert_bias(mask, key, value, shape)
        listed = torch.arange(shape.kv_blocks) < mask.kv_num_blocks[..., None]
        for garbage in (0, 2**31 - 1, -1):
            mask.kv_indices[~listed] = garbage
            assert torch.equal(self.assert_bias(mask, key, value, shape), expected)

    @causality
    def test_hidden_keys_are_not_counted(self, is_causal: bool) -> None:
        _, key, value, shape = make_problem(140, 300, batch=2, heads=4, kv_heads=2, head_dim=8)
        attn_mask = random_bits(2, 1, 1, 300)
        attn_mask[..., 64:128] = False
        mask = BlockMask.from_dense(random_bits(2, 4, 2, 5, share=0.3), q_len=140, kv_len=300, is_causal=is_causal)
        self.assert_bias(mask, key, value, shape, attn_mask=attn_mask)

    def test_key_masks_per_head(self) -> None:
        _, key, value, shape = make_problem(140, 300, heads=2, head_dim=8)
        mask = BlockMask.from_dense(random_bits(1, 2, 2, 5, share=0.3), q_len=140, kv_len=300)
        self.assert_bias(mask, key, value, shape, attn_mask=random_bits(1, 2, 1, 300))

    @causality
    def test_non_finite_blocks(self, is_causal: bool) -> None:
        _, key, value, shape = make_problem(300, 450, heads=2, kv_heads=1, head_dim=8)
        key[0, 0, 70, 3], value[0, 0, 200, 5] = math.nan, math.inf
        mask = BlockMask.from_dense(random_bits(1, 2, 3, 8, share=0.3), q_len=300, kv_len=450, is_causal=is_causal)
        assert self.assert_bias(mask, key, value, shape).isnan().any()


def means_of(key: Tensor, value: Tensor, call: Call, *, quantized: bool) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the mean keys and values of a summary, and the bias of every block."""
    shape = call.shape
    query = torch.zeros(shape.batch, shape.heads, shape.q_len, shape.head_dim, dtype=key.dtype)
    seen = visibility_of(shape, call.is_causal, call.attn_mask)
    outputs = {"means": False, "variance": False, "blocks": True, "quantized": quantized, "similarity": False}
    summary = summarize_key_value(query, key, value, call, seen, **outputs)
    assert summary.means is not None
    return (summary.means.key, summary.means.value), summary.means.bias


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
class TestSummary:
    def assert_means(self, key: Tensor, value: Tensor, shape: Shape, quantized: bool, **options: Any) -> None:
        """Compare means with the reference: float32 if they will be quantized, else in the dtype of the keys."""
        call = call_of(shape, quantization="int8_fp8" if quantized else "none", skipped="mean", **options)
        blocks, bias = means_of(key, value, call, quantized=quantized)
        keys_seen, _ = seen_tokens(shape, call.is_causal, call.attn_mask)
        expected = block_means(key.double(), value.double(), keys_seen)
        for ours, theirs in zip(blocks, (expected.key, expected.value), strict=True):
            assert ours.dtype == (torch.float32 if quantized else key.dtype)
            rounding = torch.finfo(ours.dtype).eps * theirs.abs() + 2e-6  # sums of float32 have 64 roundings
            assert_close(ours[..., : theirs.shape[-1]], theirs, rounding)
        assert torch.equal(bias == -math.inf, expected.bias == -math.inf)
        seen = bias != -math.inf
        assert_close(bias[seen], expected.bias[seen] * LOG2_E, 1e-6)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    def test_dtypes(self, quantized: bool, dtype: torch.dtype) -> None:
        _, key, value, shape = make_problem(1, 330, heads=2, **WIDTHS, dtype=dtype)
        self.assert_means(key, value, shape, quantized)

    def test_hidden_keys_do_not_affect_means(self, quantized: bool) -> None:
        _, key, value, shape = make_problem(70, 200, batch=2, heads=2, kv_heads=1, head_dim=16)
        mask = random_bits(2, 1, 1, 200, share=0.5)
        mask[..., 64:128] = False  # a block without visible keys
        hidden = ~mask[:, 0, 0, :, None]
        key, value = (tensor.masked_fill(hidden[:, None], math.nan) for tensor in (key, value))
        self.assert_means(key, value, shape, quantized, attn_mask=mask)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_non_finite_keys_and_values_give_nan_means(self, bad: float, quantized: bool) -> None:
        _, key, value, shape = make_problem(1, 330, heads=2, **WIDTHS)
        key[0, 0, 70, 3], value[0, 0, 200, 30], value[0, 1, 329, 0] = bad, -bad, bad
        self.assert_means(key, value, shape, quantized)
