"""200 000 tokens, more than 2^31 elements, more heads than the maximum of a grid axis."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sparge
from conftest import assert_within_budget, causality, relative_l1
from gpu.conftest import (
    BACKEND,
    DEVICE,
    FASTEST,
    ON_CUDA,
    assert_lse_matches,
    assert_nearly_equal,
    cuda_only,
    exact,
    make_inputs,
    modes,
    seeded,
)
from sparge import TopK

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("empty_cuda_cache")]
OPTIONS = {"enable_gqa": True, "return_lse": True, "backend": BACKEND}


def sampled_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    *,
    is_causal: bool = False,
    blocks: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return exact output and LSE of some queries of a call with equal lengths, and torch's output in the input dtype.

    ``blocks`` is (B, H, q_blocks, kv_blocks), ``attn_mask`` bool and (S_q, S_k).
    """
    keys = torch.arange(key.shape[2], device=DEVICE)
    seen = torch.ones(*query.shape[:2], len(rows), len(keys), dtype=torch.bool, device=DEVICE)
    if is_causal:
        seen &= keys <= rows[:, None]
    if blocks is not None:
        seen &= blocks[:, :, rows // 128].repeat_interleave(64, -1)[..., : len(keys)]
    if attn_mask is not None:
        seen &= attn_mask[rows]
    sampled = query[:, :, rows]
    plain = F.scaled_dot_product_attention(sampled, key, value, seen)
    scores = (sampled.double() @ key.double().mT * query.shape[-1] ** -0.5).masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ value.double(), scores.logsumexp(-1), plain


def random_qkv(*shape: int) -> list[Tensor]:
    generator = seeded(1)
    return [torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]


def assert_rows_match(
    got: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, quantization: str, **masks: Any
) -> None:
    """Compare 64 queries, including the first and the last, with exact attention."""
    length = query.shape[2]
    shuffled = torch.randperm(length, generator=torch.Generator().manual_seed(3))
    rows = torch.cat([torch.tensor([0, 127, 128, length - 1]), shuffled[:60]]).to(DEVICE)
    expected, expected_lse, plain = sampled_rows(query, key, value, rows, **masks)
    output, lse = got[0][:, :, rows], got[1][:, :, rows]
    if quantization == "none":
        assert_within_budget(output, expected, plain)
        assert_lse_matches(lse, expected_lse)
    else:
        assert relative_l1(output, expected) < 0.06
        assert (lse - expected_lse).abs().max() < 0.08


class TestLargeSizes:
    LENGTH = 200_000 if ON_CUDA else 2_000

    @modes
    @causality
    def test_200_000_tokens(self, is_causal: bool, quantization: str) -> None:
        query, key, value = random_qkv(1, 2, self.LENGTH, 64)
        options = {"sparsity": TopK(0.05, min_blocks=1), "is_causal": is_causal, "backend": BACKEND}
        mask = sparge.predict(query, key, **options)
        if not is_causal:
            assert (mask.kv_num_blocks == math.ceil(0.05 * mask.shape[3] - 1e-3)).all()
        result = {"quantization": quantization, "skipped": "drop", "return_lse": True}
        got = sparge.attention(query, key, value, **result, **options)
        masks = {"is_causal": is_causal, "blocks": mask.to_dense()}
        assert_rows_match(got, query, key, value, quantization, **masks)

    @cuda_only
    @pytest.mark.parametrize("quantization", ["none", FASTEST])
    @pytest.mark.parametrize("axis", ["batch", "head", "token"])
    def test_strides_beyond_2_31_elements(self, axis: str, quantization: str) -> None:
        """Views into one storage of slightly more than 2^31 elements give the same results as contiguous tensors."""
        tensors = make_inputs(300, batch=2, heads=2)
        size = tensors[0].numel()
        strides = {
            "batch": (2**31 + 64, 300 * 64, 64, 1),
            "head": (2 * 300 * 64, 2**31 + 64, 64, 1),
            "token": (2 * 64, 64, 2**31 // 299 // 64 * 64 + 64, 1),
        }[axis]
        last_offset = sum(stride * (extent - 1) for stride, extent in zip(strides, tensors[0].shape, strict=True))
        assert last_offset >= 2**31
        storage = torch.empty(last_offset + 1 + 3 * size, dtype=torch.bfloat16, device=DEVICE)
        views = [
            storage.as_strided(tensor.shape, strides, storage_offset=index * size).copy_(tensor)
            for index, tensor in enumerate(tensors)
        ]
        options = {"is_causal": True, "sparsity": TopK(0.4, min_blocks=1), "quantization": quantization, **OPTIONS}
        assert_nearly_equal(sparge.attention(*views, **options), sparge.attention(*tensors, **options))

    @cuda_only
    @pytest.mark.parametrize("quantization", ["none", FASTEST])
    @pytest.mark.parametrize("layout", ["HND", "NHD"])
    def test_more_than_2_31_elements(self, layout: str, quantization: str) -> None:
        """33 000 heads of 512 x 128: inputs, quantized copies and output all exceed 2^31 elements."""
        batch, heads, length = 3, 11_000, 512
        shape = (batch, heads, length, 128) if layout == "HND" else (batch, length, heads, 128)
        tensors = random_qkv(*shape)
        assert tensors[0].numel() > 2**31
        options = {"is_causal": True, "sparsity": TopK(0.4, min_blocks=1), "layout": layout, "backend": BACKEND}
        blocks = sparge.predict(*tensors[:2], **options).to_dense()
        output, lse = sparge.attention(*tensors, quantization=quantization, return_lse=True, **options)
        if layout == "NHD":
            output, *tensors = (tensor.transpose(1, 2) for tensor in (output, *tensors))
        for b, h in ((0, 0), (1, 5_000), (2, heads - 1)):
            alone = [tensor[b : b + 1, h : h + 1] for tensor in (output, lse, *tensors, blocks)]
            masks = {"is_causal": True, "blocks": alone[-1]}
            assert_rows_match((alone[0], alone[1]), *alone[2:5], quantization, **masks)

    @pytest.mark.parametrize("quantization", ["none", FASTEST])
    def test_more_heads_than_the_maximum_of_a_grid_axis(self, quantization: str) -> None:
        """70 000 heads, for example windows of an image. Only the first grid axis may exceed 65 535."""
        batch, heads = (70, 1000) if ON_CUDA else (2, 3)
        query, key, value = random_qkv(batch, heads, 129, 64)
        options = {"is_causal": True, "topk": 1.0, "quantization": quantization, **OPTIONS}
        output, lse = sparge.attention(query, key, value, **options)
        expected, expected_lse = exact(query[-1:], key[-1:], value[-1:], is_causal=True)
        assert relative_l1(output[-1:], expected) < (5e-3 if quantization == "none" else 0.06)
        assert (lse[-1:] - expected_lse).abs().max() < (1e-3 if quantization == "none" else 0.08)
        assert (lse > -math.inf).all()

    @cuda_only
    @causality
    def test_a_mask_of_more_than_2_31_elements(self, is_causal: bool) -> None:
        length = 46_400
        query, key, value = random_qkv(1, 1, length, 64)
        mask = torch.empty(length, length, dtype=torch.bool, device=DEVICE).bernoulli_(0.6, generator=seeded(2))
        mask.diagonal().fill_(True)  # every query sees a key
        assert mask.numel() > 2**31
        options = {"is_causal": is_causal, "sparsity": TopK(0.1), "backend": BACKEND}
        blocks = sparge.predict(query, key, attn_mask=mask, **options).to_dense()
        got = sparge.attention(query, key, value, mask, quantization="none", return_lse=True, **options)
        masks = {"is_causal": is_causal, "attn_mask": mask, "blocks": blocks}
        assert_rows_match(got, query, key, value, "none", **masks)
