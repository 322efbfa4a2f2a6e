"""Masks of every kind are applied, queries without visible keys give 0 and -inf, hidden keys have no effect."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sparge
from conftest import SPARSE, causality, modes
from gpu.conftest import (
    BACKEND,
    DEVICE,
    assert_matches_exact,
    cuda_only,
    equal,
    forget_recordings,
    make_inputs,
    random_bits,
)
from sparge import Dense, Policy, TopCdf, TopK

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

KINDS = (
    "padding",
    "additive padding",
    "bool",
    "bool per head",
    "bool per head and key",
    "bool per query",
    "additive",
    "additive per head",
    "additive per key in bfloat16",
    "sliding window",
    "whole blocks",
    "additive whole blocks",
)


def mask_of(kind: str, q_len: int, kv_len: int, batch: int, heads: int) -> Tensor:
    def bias(*shape: int) -> Tensor:
        return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(DEVICE)

    lengths = torch.tensor([kv_len, kv_len // 2, 3], device=DEVICE)[:batch, None]
    padding = torch.arange(kv_len, device=DEVICE) < lengths
    lowest = torch.finfo(torch.float32).min
    per_head = random_bits(1, heads, q_len, kv_len)
    per_head[:, 1, 10:20] = False
    whole = torch.ones(q_len, kv_len, dtype=torch.bool, device=DEVICE)
    whole[: q_len // 2, 200:210] = whole[-3:, 400:] = False
    made = {
        "padding": padding[:, None, None],
        "additive padding": torch.zeros_like(padding, dtype=torch.float32).masked_fill(~padding, lowest)[:, None, None],
        "bool": random_bits(q_len, kv_len),
        "bool per head": per_head,
        "bool per head and key": random_bits(1, heads, 1, kv_len),
        "bool per query": random_bits(batch, 1, q_len, 1),
        "additive": bias(batch, 1, q_len, kv_len).masked_fill(~random_bits(q_len, kv_len), -math.inf),
        "additive per head": bias(1, heads, q_len, kv_len).masked_fill(~per_head, lowest),
        "additive per key in bfloat16": bias(batch, 1, 1, kv_len).bfloat16(),
        "whole blocks": whole,
        "additive whole blocks": torch.zeros(q_len, kv_len, device=DEVICE).masked_fill(~whole, -math.inf),
        "sliding window": torch.ones(q_len, kv_len, dtype=torch.bool, device=DEVICE).tril(40).triu(-40),
    }
    return made[kind]


@causality
@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_applied(kind: str, is_causal: bool) -> None:
    """Full calls are exact; sparse calls are exact attention over the blocks that `predict` returns."""
    query, key, value = make_inputs(140, 640, batch=2, heads=4, kv_heads=2)
    call = {"is_causal": is_causal, "attn_mask": mask_of(kind, 140, 640, 2, 4)}
    options = {"enable_gqa": True, "backend": BACKEND, **call}
    full = sparge.attention(query, key, value, topk=1, quantization="none", return_lse=True, **options)
    assert_matches_exact(full, query, key, value, **call)
    blocks = sparge.predict(query, key, **SPARSE, **options)
    assert 0 < blocks.density() < 0.5
    result = {"quantization": "none", "skipped": "drop", "return_lse": True}
    got = sparge.attention(query, key, value, **result, **SPARSE, **options)
    assert_matches_exact(got, query, key, value, block_mask=blocks.to_dense(), **call)


@pytest.mark.parametrize("kind", ["padding", "bool per head", "additive"])
def test_dense_calls_apply_masks(kind: str) -> None:
    query, key, value = make_inputs(140, 330, batch=2, heads=4, kv_heads=2)
    mask = mask_of(kind, 140, 330, 2, 4)
    got = sparge.attention(
        *(query, key, value, mask),
        is_causal=True,
        enable_gqa=True,
        sparsity=Dense(),
        quantization="none",
        return_lse=True,
        backend=BACKEND,
    )
    assert_matches_exact(got, query, key, value, is_causal=True, attn_mask=mask)


@pytest.mark.parametrize("kind", ["padding", "bool per head", "additive"])
def test_strided_masks(kind: str) -> None:
    """Transposed masks and masks with gaps between elements give the same results as contiguous masks."""
    query, key, value = make_inputs(140, 330, batch=2, heads=4, kv_heads=2)
    mask = mask_of(kind, 140, 330, 2, 4)
    apart = torch.zeros(*mask.shape[:-1], 2 * mask.shape[-1], dtype=mask.dtype, device=DEVICE)[..., ::2].copy_(mask)
    call = {"enable_gqa": True, "topk": 1.0, "quantization": "none", "return_lse": True, "backend": BACKEND}
    for given in (mask.mT.contiguous().mT, apart):
        assert not given.is_contiguous() or kind == "padding"
        assert_matches_exact(sparge.attention(query, key, value, given, **call), query, key, value, attn_mask=mask)


SPARSITIES = {
    "topk": TopK(0.3, min_blocks=1),
    "topcdf": TopCdf(0.7, min_blocks=1, similarity_threshold=0.05),
    "dense": Dense(),
}


@modes
@causality
@pytest.mark.parametrize("sparsity", SPARSITIES.values(), ids=SPARSITIES)
@pytest.mark.parametrize("form", ["bool", "additive", "element"])
def test_hidden_keys_have_no_effect(form: str, sparsity: Any, is_causal: bool, quantization: str) -> None:
    query, key, value = make_inputs(150, 400, heads=2, kv_heads=1)
    hidden = torch.arange(400, device=DEVICE) >= 270
    hidden[17] = hidden[64:128] = True
    mask = ~hidden
    if form == "additive":
        mask = torch.zeros(400, device=DEVICE).masked_fill(hidden, -math.inf)
    elif form == "element":
        mask = mask.expand(150, 400).clone()
        mask[3, :100] = False
    results = []
    for garbage in (0.0, 1e30, math.nan, math.inf):
        key[:, :, hidden] = value[:, :, hidden] = garbage
        results.append(
            sparge.attention(
                *(query, key, value, mask),
                is_causal=is_causal,
                enable_gqa=True,
                sparsity=sparsity,
                quantization=quantization,
                return_lse=True,
                backend=BACKEND,
            )
        )
    assert results[0][0].isfinite().all()
    for other in results[1:]:
        assert equal(other, results[0])


@modes
@pytest.mark.parametrize("pv_threshold", [None, -3.0])
@pytest.mark.parametrize("form", ["bool", "additive"])
def test_queries_without_visible_keys(form: str, pv_threshold: float | None, quantization: str) -> None:
    """Queries and query blocks without visible keys give 0 and -inf, and their values have no effect."""
    query, key, value = make_inputs(300, 200, heads=2)
    seen = random_bits(300, 200, share=0.9)
    seen[5] = seen[128:256] = seen[299] = False
    empty = ~seen.any(-1)
    mask = seen if form == "bool" else torch.zeros(300, 200, device=DEVICE).masked_fill(~seen, -math.inf)
    results = []
    for garbage in (0.0, 1e30, math.nan):
        query[:, :, empty] = garbage
        results.append(
            sparge.attention(
                *(query, key, value, mask),
                sparsity=TopK(1, pv_threshold=pv_threshold),
                quantization=quantization,
                return_lse=True,
                backend=BACKEND,
            )
        )
    output, lse = results[0]
    assert (output[:, :, empty] == 0).all()
    assert (lse[:, :, empty] == -math.inf).all()
    assert lse[:, :, ~empty].isfinite().all()
    for other in results[1:]:
        assert equal(other, results[0])


@modes
@pytest.mark.parametrize("name", ["all keys hidden", "one item's keys hidden", "more queries than keys"])
def test_calls_with_few_visible_keys(name: str, quantization: str) -> None:
    query, key, value = make_inputs(330, 129, batch=2, heads=4, kv_heads=2)
    seen = torch.ones(2, 1, 330, 129, dtype=torch.bool, device=DEVICE)
    mask = None
    if name == "more queries than keys":
        seen = seen.tril(129 - 330)
    else:
        mask = torch.ones(2, 1, 1, 129, dtype=torch.bool, device=DEVICE)
        mask[0 if name.startswith("one") else slice(None)] = False
        seen = seen & mask
    output, lse = sparge.attention(
        *(query, key, value, mask),
        is_causal=mask is None,
        enable_gqa=True,
        quantization=quantization,
        return_lse=True,
        backend=BACKEND,
    )
    empty = ~seen.any(-1).expand(2, 4, 330)
    assert (output[empty] == 0).all()
    assert (lse[empty] == -math.inf).all()
    assert lse[~empty].isfinite().all()
    assert (output[~empty] != 0).any(-1).all()


@modes
def test_nan_in_an_additive_mask(quantization: str) -> None:
    query, key, value = make_inputs(200, heads=2)
    mask = torch.zeros(200, 200, device=DEVICE)
    mask[7, 9] = math.nan
    output = sparge.attention(query, key, value, mask, topk=1, quantization=quantization, backend=BACKEND)
    assert output[:, :, 7].isnan().all()
    assert output[:, :, torch.arange(200, device=DEVICE) != 7].isfinite().all()


@cuda_only
@pytest.mark.parametrize(
    "heads, kind, reason",
    [
        (16, "documents", "sparse: "),
        (8, "documents", "dense: costly mask (full mask)"),
        (16, "bias", "dense: costly mask (additive mask)"),
    ],
)
def test_replace_sdpa_with_masks(heads: int, kind: str, reason: str) -> None:
    tensors, number = make_inputs(8192, heads=heads), torch.arange(8192, device=DEVICE) // 900
    mask = number[:, None] == number
    mask = mask if kind == "documents" else torch.zeros_like(mask, dtype=torch.bfloat16).masked_fill(~mask, -math.inf)
    expected = F.scaled_dot_product_attention(*tensors, mask)
    with sparge.replace_sdpa(Policy(topk=0.5, on_unsupported="dense")):
        got = F.scaled_dot_product_attention(*tensors, mask)
    (found,) = sparge.stats().reasons
    assert found.startswith(reason)
    if reason == "sparse: ":
        assert torch.equal(got, sparge.attention(*tensors, mask, topk=0.5))
        assert not torch.equal(got, expected)
    else:
        assert torch.equal(got, expected)


@modes
@pytest.mark.parametrize("kind", KINDS)
def test_replays_read_the_mask_of_the_call(kind: str, quantization: str) -> None:
    quantization = "int8_fp8" if quantization == "int8_fp8_fast" else quantization
    options = {"quantization": quantization, "topk": 0.3, "backend": BACKEND, "return_lse": True, "enable_gqa": True}
    given = {name: option for name, option in options.items() if name != "topk"}
    first, blocks = mask_of(kind, 300, 520, 2, 2), random_bits(2, 2, 3, 9)
    others = [first, first.flip(-1).contiguous(), first.clone()]
    inputs = [make_inputs(300, 520, batch=2, heads=2, kv_heads=1, seed=seed) for seed in range(3)]

    def results() -> list[tuple[Tensor, ...]]:
        found = [sparge.attention(*x, attn_mask=mask, **options) for x, mask in zip(inputs, others, strict=True)]
        over_blocks = sparge.block_sparse_attention
        return found + [
            over_blocks(*x, blocks, attn_mask=mask, **given) for x, mask in zip(inputs, others, strict=True)
        ]

    expected = []
    for index in range(2 * len(inputs)):
        forget_recordings()
        expected.append(results()[index])
    forget_recordings()
    for _ in range(3):
        for got, fresh_result in zip(results(), expected, strict=True):
            assert equal(got, fresh_result)
