"""Inputs that once gave wrong results."""

from __future__ import annotations

import math

import pytest
import torch

import sparge
from conftest import make_qkv, modes, relative_l1
from sparge import BlockMask, TopCdf, TopK


@pytest.mark.parametrize("form", ["a column of a table", "one value expanded"])
@pytest.mark.parametrize("kind", ["topk", "cdf", "similarity"])
def test_per_head_tensors_may_have_any_stride(kind: str, form: str) -> None:
    query, key, _ = make_qkv(130, 700, heads=4, head_dim=16)
    low, high = {"topk": (0.1, 0.9), "cdf": (0.1, 0.9), "similarity": (0.0, 0.2)}[kind]
    table = torch.full((4, 3), math.nan)
    table[:, 0] = torch.linspace(low, high, 4)
    values = table[:, 0] if form == "a column of a table" else torch.tensor([high / 2]).expand(4)
    rules: TopK | TopCdf = TopK(0.3, min_blocks=1, similarity_threshold=values if kind == "similarity" else None)
    if kind != "similarity":
        rules = (TopK if kind == "topk" else TopCdf)(values, min_blocks=1)
    masks = [sparge.predict(query, key, sparsity=rules, backend=name) for name in ("triton", "reference")]
    assert torch.equal(masks[0].kv_num_blocks, masks[1].kv_num_blocks)


def test_per_head_pv_thresholds_may_have_any_stride() -> None:
    query, key, value = make_qkv(130, 400, heads=2, head_dim=16)
    table = torch.tensor([[-1.0, math.nan], [-50.0, math.nan]])
    blocks = torch.ones(2, 7, dtype=torch.bool)
    results = [
        sparge.block_sparse_attention(
            4 * query, key, value, blocks, pv_threshold=values, quantization="none", backend="triton"
        )
        for values in (table[:, 0], table[:, 0].clone())
    ]
    assert torch.equal(*results)


def test_tiny_values_do_not_give_nan() -> None:
    query, key, value = make_qkv(130, 130, head_dim=16, dtype=torch.bfloat16)
    value[..., 3] = 0
    value[..., 70, 3] = 1e-37
    output = sparge.attention(query, key, value, topk=1, quantization="int8_fp8", backend="triton")
    assert output.isfinite().all()
    assert (output[..., 3].abs() <= 1e-36).all()


@pytest.mark.parametrize("scale, size", [(None, 1e-36), (0.0, 1.0)], ids=["tiny queries", "scale 0"])
def test_tiny_scores_do_not_underflow_the_product_of_scales(scale: float | None, size: float) -> None:
    query, key, value = make_qkv(130, 130, head_dim=16)
    key = 1e-10 * (1 + 1e-6 * key)
    call = {"is_causal": True, "topk": 1, "scale": scale, "quantization": "int8_fp16"}
    ours, theirs = (
        sparge.attention(size * query, key, value, **call, backend=name) for name in ("triton", "reference")
    )
    assert relative_l1(ours, theirs.double()) < 1e-3


@modes
def test_unsorted_lists_do_not_leak_the_future(quantization: str) -> None:
    query, key, value = make_qkv(256, 256, heads=1, head_dim=16)
    ascending = BlockMask.from_dense(torch.ones(1, 1, 2, 4, dtype=torch.bool), q_len=256, kv_len=256, is_causal=True)
    indices = torch.tensor([[[[1, 0, 2, 3], [3, 1, 2, 0]]]], dtype=torch.int32)
    shuffled = BlockMask(ascending.kv_num_blocks, indices, ascending.visible_num_blocks, 256, 256, True)
    results = [
        sparge.block_sparse_attention(query, key, value, mask, quantization=quantization, backend="triton")
        for mask in (ascending, shuffled)
    ]
    assert relative_l1(results[1], results[0].double()) < 0.05


def test_min_blocks_may_exceed_int32() -> None:
    query, key, _ = make_qkv(130, 400, head_dim=16)
    mask = sparge.predict(query, key, sparsity=TopK(0.1, min_blocks=2**40), backend="triton")
    assert mask.density() == 1.0


def test_density_of_expanded_block_masks() -> None:
    query, key, value = make_qkv(300, 300, heads=4, head_dim=16)
    dense = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    dense[..., 1:3] = False
    sparge.block_sparse_attention(query, key, value, dense, backend="triton")
    assert sparge.stats().density == pytest.approx(0.6)
