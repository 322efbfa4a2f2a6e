"""Errors against float64 for all lengths, dtypes, head dims, layouts and scales."""

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
    assert_exact,
    backends,
    causality,
    exact_attention,
    make_qkv,
    unquantized_options,
)
from sparge import Dense, TopCdf
from sparge.evaluate.inputs import video_like

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.timeout(120)]


SHAPES = {
    "one token": {"q_len": 1},
    "63": {"q_len": 63},
    "127": {"q_len": 127, "head_dim": 40},
    "129": {"q_len": 129, "head_dim": 8},
    "200": {"q_len": 200, "head_dim": 72, "batch": 3},
    "one query": {"q_len": 1, "kv_len": 200, "heads": 6, "kv_heads": 2},
    "one key": {"q_len": 129, "kv_len": 1},
    "more keys": {"q_len": 127, "kv_len": 321, "heads": 6, "kv_heads": 2, "head_dim": 64},
    "more queries": {"q_len": 330, "kv_len": 129, "heads": 3, "kv_heads": 1},
    "wide": {"q_len": 130, "kv_len": 200, "head_dim": 256},
    "narrow value": {"q_len": 200, "head_dim": 72, "value_dim": 8, "heads": 6, "kv_heads": 2},
    "wide value": {"q_len": 63, "kv_len": 129, "head_dim": 8, "value_dim": 256},
    "whole blocks": {"q_len": 256, "kv_len": 256, "head_dim": 64},
}


@causality
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "backend, dtype",
    [
        ("torch", torch.float32),
        ("torch", torch.bfloat16),
        ("torch", torch.float16),
        ("reference", torch.float32),
        ("reference", torch.bfloat16),
    ],
)
def test_topk_1_is_exact(backend: str, is_causal: bool, dtype: torch.dtype, name: str) -> None:
    query, key, value = make_qkv(**SHAPES[name], dtype=dtype)
    got = sparge.attention(query, key, value, is_causal=is_causal, topk=1, **unquantized_options(backend))
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32
    assert_exact(got, query, key, value, is_causal=is_causal)
    assert sparge.stats().reasons == {f"sparse: {backend}": 1}
    assert sparge.stats().density == 1.0


@causality
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "dtype, options, reason",
    [
        (torch.float32, {}, "below the crossover"),
        (torch.float16, {"sparsity": Dense()}, "sparsity=Dense()"),
        (torch.bfloat16, {"sparsity": Dense()}, "sparsity=Dense()"),
    ],
    ids=["crossover", "float16", "bfloat16"],
)
def test_dense_is_exact(is_causal: bool, name: str, dtype: torch.dtype, options: dict[str, Any], reason: str) -> None:
    query, key, value = make_qkv(**SHAPES[name], dtype=dtype)
    got = sparge.attention(query, key, value, is_causal=is_causal, enable_gqa=True, return_lse=True, **options)
    assert_exact(got, query, key, value, is_causal=is_causal)
    assert sparge.stats().reasons == {f"dense: {reason}": 1}


@backends
def test_dense_call_of_a_named_backend_is_exact(backend: str) -> None:
    query, key, value = make_qkv(200, 129, heads=6, kv_heads=2)
    got = sparge.attention(query, key, value, sparsity=Dense(), **unquantized_options(backend))
    assert_exact(got, query, key, value)


def as_views(kind: str, tensor: Tensor) -> Tensor:
    """Return the same values with different strides."""
    if kind == "heads last":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "slice of a packed tensor":
        packed = torch.full((*tensor.shape[:3], 3 * tensor.shape[3]), math.nan, dtype=tensor.dtype)
        packed[..., 3 : 3 + tensor.shape[3]] = tensor
        return packed[..., 3 : 3 + tensor.shape[3]]
    if kind == "every second channel":
        wide = torch.full((*tensor.shape[:3], 2 * tensor.shape[3]), math.nan, dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if kind == "channels first":
        return tensor.mT.contiguous().mT
    if kind == "every second token":
        return tensor.repeat_interleave(2, 2)[:, :, ::2]
    return tensor


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@causality
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    "view",
    ["plain", "heads last", "slice of a packed tensor", "every second channel", "channels first", "every second token"],
)
def test_layouts_and_strides(backend: str, is_causal: bool, layout: str, view: str) -> None:
    tensors = make_qkv(129, 200, batch=2, heads=6, kv_heads=2, value_dim=24)
    views = [as_views(view, tensor) for tensor in tensors]
    copies = [tensor.clone() for tensor in views]
    inputs = [tensor.transpose(1, 2) for tensor in views] if layout == "NHD" else views
    options = {"sparsity": Dense()} if backend == "auto" else {"topk": 1.0}
    output, lse = sparge.attention(
        *inputs, is_causal=is_causal, layout=layout, **options, enable_gqa=True, return_lse=True, backend=backend
    )
    output = output.transpose(1, 2) if layout == "NHD" else output
    assert_exact((output, lse), *tensors, is_causal=is_causal)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(views, copies, strict=True)), (
        "the inputs do not change"
    )


@backends
def test_predict_and_block_sparse_in_both_layouts(backend: str) -> None:
    query, key, value = make_qkv(300, 520, heads=6, kv_heads=2)
    swapped = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    options = {"enable_gqa": True, "backend": backend}
    mask = sparge.predict(query, key, is_causal=True, **SPARSE, **options)
    other = sparge.predict(*swapped[:2], is_causal=True, layout="NHD", **SPARSE, **options)
    assert torch.equal(mask.to_dense(), other.to_dense())
    got = sparge.block_sparse_attention(query, key, value, mask, return_lse=True, **options)
    assert_exact(got, query, key, value, is_causal=True, block_mask=mask.to_dense())
    output, lse = sparge.block_sparse_attention(*swapped, mask, return_lse=True, layout="NHD", **options)
    assert_exact((output.transpose(1, 2), lse), query, key, value, is_causal=True, block_mask=mask.to_dense())


@backends
@pytest.mark.parametrize("scale", [0.0, 0.03, 2.0, -0.5])
def test_attention_uses_the_scale(backend: str, scale: float) -> None:
    query, key, value = make_qkv(129, 200)
    got = sparge.attention(query, key, value, scale=scale, topk=1, **unquantized_options(backend))
    assert_exact(got, query, key, value, scale=scale)
    got = sparge.attention(query, key, value, scale=scale, sparsity=Dense(), return_lse=True)
    assert_exact(got, query, key, value, scale=scale)


@backends
@pytest.mark.parametrize("score", ["moment", "mean"])
def test_prediction_uses_the_scale(backend: str, score: str) -> None:
    sample = video_like(1024, heads=2, head_dim=16)
    query, key = sample.query, sample.key
    options = {"sparsity": TopCdf(0.8, min_blocks=1), "score": score, "backend": backend}
    masks = {scale: sparge.predict(query, key, scale=scale, **options) for scale in (0.0, 0.25, 1.0)}
    assert torch.equal(masks[1.0].to_dense(), sparge.predict(4 * query, key, scale=0.25, **options).to_dense())
    assert torch.equal(masks[0.25].to_dense(), sparge.predict(query, key, **options).to_dense()), (
        "the default is 1 / sqrt(16)"
    )
    assert (masks[0.0].kv_num_blocks == 13).all(), "13 of 16 equal blocks cover 0.8"
    assert masks[1.0].density() < masks[0.25].density() < masks[0.0].density()


class TestNonPositiveScales:
    """Kernels mask with -inf before they scale, and -inf times a number <= 0 does not mask."""

    @pytest.mark.parametrize("scale", [0, -0.3, -1e-3])
    @causality
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"sparsity": Dense()},
            {"sparsity": Dense(), "backend": "reference"},
            {"topk": 1.0, "backend": "torch"},
            {"topk": 1.0, "backend": "reference"},
        ],
        ids=["crossover", "dense", "dense reference", "torch", "reference"],
    )
    @pytest.mark.parametrize("lengths", [(200, 200), (130, 200)])
    def test_output_and_lse_are_exact(
        self, scale: float, is_causal: bool, options: dict[str, Any], lengths: tuple[int, int]
    ) -> None:
        query, key, value = make_qkv(*lengths, heads=4, kv_heads=2)
        call: dict[str, Any] = {"scale": scale, "is_causal": is_causal}
        got = sparge.attention(query, key, value, enable_gqa=True, return_lse=True, **call, **options)
        assert_exact(got, query, key, value, **call)

    @causality
    def test_sizes_above_the_element_mask_limit(self, is_causal: bool) -> None:
        query, key, value = make_qkv(1500, 1600, head_dim=8)
        call: dict[str, Any] = {"scale": -0.3, "is_causal": is_causal}
        assert_exact(
            sparge.attention(query, key, value, sparsity=Dense(), return_lse=True, **call), query, key, value, **call
        )

    @pytest.mark.parametrize("scale", [0, -0.3])
    def test_gradients(self, scale: float) -> None:
        query, key, value = make_qkv(130)
        query.requires_grad_()
        got = sparge.attention(query, key, value, scale=scale, is_causal=True, on_unsupported="dense")
        exact, _ = exact_attention(query, key, value, scale=scale, is_causal=True)
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)
        (expected,) = torch.autograd.grad(exact.square().sum(), query)
        got.square().sum().backward()
        torch.testing.assert_close(query.grad, expected, rtol=1e-4, atol=1e-5)

    def test_negative_scale_equals_a_negated_query_in_prediction(self) -> None:
        query, key, _ = make_qkv(600)
        expected = sparge.predict(-query, key, topk=0.3, scale=0.3)
        assert torch.equal(sparge.predict(query, key, topk=0.3, scale=-0.3).to_dense(), expected.to_dense())
