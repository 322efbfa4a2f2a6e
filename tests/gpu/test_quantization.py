"""Quantization and the P V threshold: results match the reference, and sums over many keys stay accurate."""

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
    assert_close_to_reference,
    assert_nearly_equal,
    equal,
    exact,
    forget_recordings,
    make_inputs,
    modes,
    quantized_modes,
    random_bits,
)
from skipping import LENGTHS, assert_skipped_share
from sparge import Dense, TopK

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

DTYPE_OF = {
    "int8_fp8": torch.bfloat16,
    "int8_fp8_fast": torch.bfloat16,
    "int8_fp16": torch.float16,
    "none": torch.float16,
}
"""Output dtypes whose rounding is small relative to the error of the mode."""


def run_backend_and_reference(
    query: Tensor, key: Tensor, value: Tensor, blocks: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return output and LSE of the backend and of the reference on the CPU. Check that replays equal fresh calls."""
    call = {"enable_gqa": True, "return_lse": True, **options}
    on_backend = {**call, "attn_mask": attn_mask, "backend": BACKEND}
    forget_recordings()
    got = sparge.block_sparse_attention(query, key, value, blocks, **on_backend)
    others = [tensor.flip(2).contiguous() for tensor in (query, key, value)]
    replayed = sparge.block_sparse_attention(*others, blocks.flip(-1), **on_backend)
    forget_recordings()
    assert equal(replayed, sparge.block_sparse_attention(*others, blocks.flip(-1), **on_backend))
    copies = [tensor if tensor is None else tensor.cpu() for tensor in (query, key, value, blocks, attn_mask)]
    call = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in call.items()}
    expected = sparge.block_sparse_attention(*copies[:4], attn_mask=copies[4], backend="reference", **call)
    return got, expected


def exact_on_cpu(query: Tensor, key: Tensor, value: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
    output, lse = exact(query, key, value, **call)
    return output.cpu(), lse.cpu()


class TestAgainstTheReference:
    @quantized_modes
    @causality
    @pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
    def test_widths(self, head_dim: int, is_causal: bool, quantization: str) -> None:
        q_len = 400 if head_dim < 256 else 200  # the reference is slow
        tensors = make_inputs(
            q_len, 400, heads=2, kv_heads=1, head_dim=head_dim, dtype=DTYPE_OF[quantization], seed=head_dim
        )
        blocks = random_bits(1, 2, -(-q_len // 128), 7)
        blocks[..., 0] = True
        got, expected = run_backend_and_reference(*tensors, blocks, is_causal=is_causal, quantization=quantization)
        exact_result = exact_on_cpu(*tensors, is_causal=is_causal, block_mask=blocks)
        assert 1e-3 < relative_l1(expected[0], exact_result[0]) < 0.1
        assert_close_to_reference(got, expected, exact_result, quantization)

    @pytest.mark.parametrize("quantization", ["int8_fp8", "int8_fp16"])
    @pytest.mark.parametrize("kind", ["padding", "bias"])
    def test_masks(self, kind: str, quantization: str) -> None:
        tensors = make_inputs(200, 330, batch=2, heads=2, kv_heads=1, dtype=DTYPE_OF[quantization])
        if kind == "padding":
            mask = (torch.arange(330, device=DEVICE) < torch.tensor([330, 100], device=DEVICE)[:, None])[:, None, None]
        else:
            mask = torch.randn(1, 2, 200, 330, generator=torch.Generator().manual_seed(4)).to(DEVICE)
            mask[..., 60:150] = -torch.inf
        blocks = torch.ones(2, 6, dtype=torch.bool, device=DEVICE)
        got, expected = run_backend_and_reference(*tensors, blocks, mask, is_causal=True, quantization=quantization)
        assert_close_to_reference(got, expected, exact_on_cpu(*tensors, is_causal=True, attn_mask=mask))

    @quantized_modes
    def test_float32_inputs_and_a_different_value_head_dim(self, quantization: str) -> None:
        tensors = make_inputs(200, 400, heads=2, kv_heads=1, value_dim=32, dtype=torch.float32)
        blocks = torch.ones(2, 7, dtype=torch.bool, device=DEVICE)
        got, expected = run_backend_and_reference(*tensors, blocks, quantization=quantization)
        assert_close_to_reference(got, expected, exact_on_cpu(*tensors), quantization)

    @quantized_modes
    def test_dense_calls_equal_calls_with_all_blocks(self, quantization: str) -> None:
        query, key, value = make_inputs(400, heads=2)
        options = {"quantization": quantization, "return_lse": True, "backend": BACKEND}
        dense = sparge.attention(query, key, value, sparsity=Dense(), **options)
        blocks = torch.ones(4, 7, dtype=torch.bool, device=DEVICE)
        assert_nearly_equal(dense, sparge.block_sparse_attention(query, key, value, blocks, **options))

    @quantized_modes
    def test_offset_of_the_keys_has_little_effect(self, quantization: str) -> None:
        """Smoothing removes the offset before keys are rounded to INT8; else the error would be 10 times as large."""
        query, key, value = make_inputs(400, heads=2, dtype=torch.float32)
        errors = []
        for offset in (0.0, 30.0):
            shifted = key + offset * torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(8)).to(DEVICE)
            output = sparge.attention(
                query, shifted, value, sparsity=Dense(), quantization=quantization, backend=BACKEND
            )
            errors.append(relative_l1(output, exact(query, shifted, value)[0]))
        assert errors[1] < 1.1 * errors[0] < 0.1


class TestLongSums:
    """Tensor cores keep 13 fraction bits of an FP8 sum: a single accumulator would lose most of a long sum."""

    @quantized_modes
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_32768_keys_of_equal_weight(self, head_dim: int, quantization: str) -> None:
        query, key, value = make_inputs(128, 32768, heads=1, head_dim=head_dim)
        query, value = 1e-4 * query, 1 + 0.25 * value
        output, lse = sparge.attention(
            query, key, value, sparsity=Dense(), quantization=quantization, return_lse=True, backend=BACKEND
        )
        expected, expected_lse = exact(query, key, value)
        assert relative_l1(output, expected) <= 0.005
        assert (lse - expected_lse).abs().max() <= 1e-3


class TestPvThreshold:
    LEVELS = (0.0, -2.0, -0.3, -2.0, 0.2, -2.0)
    """Centers of the scores of each key block, far from a threshold of -1 relative to their spread of 0.1."""

    def sample(self, quantization: str) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = make_inputs(384, heads=2, dtype=torch.float32)
        query, key = 0.1 * query, key - key.mean(2, keepdim=True)
        query[..., 0] = 4.0  # times the key's channel 0, times the scale of 1/8: the level
        key[..., 0] = 2 * torch.tensor(self.LEVELS, device=DEVICE).repeat_interleave(64)
        query, key, value = (tensor.to(DTYPE_OF[quantization]) for tensor in (query, key, value))
        return query, key, value

    @modes
    @causality
    @pytest.mark.parametrize("threshold", [-1.0, torch.tensor([-1e4, -1.0])], ids=["one", "per head"])
    def test_skips_the_same_products_as_the_reference(self, threshold: Any, is_causal: bool, quantization: str) -> None:
        tensors = self.sample(quantization)
        blocks = torch.ones(1, 2, 3, 6, dtype=torch.bool, device=DEVICE)
        options = {"is_causal": is_causal, "quantization": quantization}
        threshold = threshold.to(DEVICE) if isinstance(threshold, Tensor) else threshold
        got, expected = run_backend_and_reference(*tensors, blocks, pv_threshold=threshold, **options)
        plain = sparge.block_sparse_attention(*tensors, blocks, backend=BACKEND, **options)
        skipped = relative_l1(plain.cpu(), expected[0].double())
        assert skipped > 0.04, "products were skipped"
        intended = relative_l1(expected[0], exact_on_cpu(*tensors, is_causal=is_causal)[0])
        assert relative_l1(got[0].cpu(), expected[0].double()) <= 0.1 * min(skipped, intended) + 1e-3
        # FP8 steps are an eighth of a log2 unit: rounding the other way moves the LSE of a row with few keys.
        assert (got[1].cpu() - expected[1]).abs().max() <= (0.02 if quantization == "int8_fp8_fast" else 0.01)

    @modes
    @causality
    @pytest.mark.parametrize("name", LENGTHS)
    def test_skipped_products_are_counted(self, name: str, is_causal: bool, quantization: str) -> None:
        options = {"quantization": quantization, "device": DEVICE, "backend": BACKEND}
        assert_skipped_share(LENGTHS[name], is_causal=is_causal, dtype=DTYPE_OF[quantization], **options)

    @modes
    @pytest.mark.parametrize("head_dim", [64, 256])
    def test_products_of_means_are_not_counted(self, head_dim: int, quantization: str) -> None:
        options = {"quantization": quantization, "device": DEVICE, "backend": BACKEND}
        assert_skipped_share((300, 330), skipped="mean", head_dim=head_dim, dtype=DTYPE_OF[quantization], **options)

    @modes
    def test_threshold_of_minus_infinity_skips_no_visible_product(self, quantization: str) -> None:
        tensors = self.sample(quantization)
        results = [
            sparge.attention(
                *tensors,
                is_causal=True,
                sparsity=TopK(0.5, min_blocks=1, pv_threshold=threshold),
                quantization=quantization,
                return_lse=True,
                backend=BACKEND,
            )
            for threshold in (-math.inf, -1e4, None)
        ]
        # A threshold of -1e4 skips hidden tiles; -inf adds them as zeros, which changes the row reference.
        assert relative_l1(results[0][0], results[1][0].double()) < 1e-4
        torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-5)
        blocks = sparge.predict(
            *tensors[:2], is_causal=True, sparsity=TopK(0.5, min_blocks=1), enable_gqa=True, backend=BACKEND
        ).to_dense()
        exact_result = exact_on_cpu(*tensors, is_causal=True, block_mask=blocks)
        plain = tuple(tensor.cpu() for tensor in results[2])
        assert_close_to_reference(
            results[0], plain, exact_result, quantization
        )  # another kernel, which rounds differently
