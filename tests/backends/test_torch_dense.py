"""Dense attention of the torch backend: calls with masks are computed in parts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import sparge
from conftest import assert_exact, make_qkv
from sparge.backends.torch import blocks, dense

Q_LEN, KV_LEN, HEADS = 129, 200, 4
LOWEST = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "MAX_MASK_ELEMENTS", 3000)
    monkeypatch.setattr(dense, "MIN_QUERIES", 10)


def make_mask(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    sizes = {
        "bool": (1, 1, Q_LEN, KV_LEN),
        "bool per head": (2, HEADS, Q_LEN, KV_LEN),
        "keys": (2, 1, 1, KV_LEN),
        "additive": (1, 1, Q_LEN, KV_LEN),
        "additive per head": (1, HEADS, Q_LEN, KV_LEN),
        "additive keys per head": (1, HEADS, 1, KV_LEN),
    }[kind]
    hidden = torch.rand(sizes, generator=generator) < 0.3
    hidden[..., :5, :] |= sizes[2] > 1  # the first queries see no key
    if not kind.startswith("additive"):
        return ~hidden
    bias = torch.randn(sizes, generator=generator).masked_fill(hidden, -math.inf)
    return bias.masked_fill(hidden & (torch.rand(sizes, generator=generator) < 0.5), LOWEST)


@pytest.mark.parametrize("window", [None, (None, 0), (40, None), (30, 7)], ids=str)
@pytest.mark.parametrize(
    "kind", ["bool", "bool per head", "keys", "additive", "additive per head", "additive keys per head"]
)
@pytest.mark.parametrize("value_dim", [32, 48])
def test_parts_equal_one_call(
    kind: str, window: tuple[int | None, int | None] | None, value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "attention", None)  # gathering blocks under a mask is many times slower
    query, key, value = make_qkv(Q_LEN, KV_LEN, batch=2, heads=HEADS, kv_heads=2, value_dim=value_dim)
    options = {"attn_mask": make_mask(kind), "window": window or (None, None)}
    result = sparge.attention(
        query, key, value, sparsity=sparge.Dense(), backend="torch", enable_gqa=True, return_lse=True, **options
    )
    assert_exact(result, query, key, value, **options)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_hidden_tokens_may_be_nan(kind: str) -> None:
    query, key, value = make_qkv(Q_LEN, KV_LEN)
    mask = make_mask(kind)
    mask[..., 7] = -math.inf if kind == "additive" else False
    options = {"sparsity": sparge.Dense(), "backend": "torch", "return_lse": True}
    expected = sparge.attention(query, key, value, mask, **options)
    for tensor in (key, value):
        tensor[:, :, 7] = math.nan
    query[:, :, :5] = math.nan
    for got, wanted in zip(sparge.attention(query, key, value, mask, **options), expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("kind", ["bool", "bool per head", "keys", "keys per head"])
def test_no_part_has_more_elements(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elements = []
    attend_part = blocks.attend

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        elements.append(bias.untyped_storage().nbytes() // bias.element_size())
        return attend_part(query, key, value, bias, scale)

    monkeypatch.setattr(blocks, "attend", attend)
    monkeypatch.setattr(dense, "MAX_MASK_ELEMENTS", HEADS * 64 * 64)
    batch = 8
    query, key, value = make_qkv(64, 64, batch=batch, heads=HEADS)
    sizes = {
        "bool": (batch, 1, 64, 64),
        "bool per head": (1, HEADS, 64, 64),
        "keys": (batch, 1, 1, 64),
        "keys per head": (1, HEADS, 1, 64),
    }
    mask = torch.ones(sizes[kind], dtype=torch.bool)
    sparge.attention(query, key, value, mask, sparsity=sparge.Dense(), backend="torch")
    assert max(elements) <= dense.MAX_MASK_ELEMENTS


def test_hidden_tokens_may_overflow() -> None:
    query, key, value = make_qkv(Q_LEN, KV_LEN)
    query[..., 0] = 20.0
    mask = make_mask("bool")
    mask[..., 7] = False
    options = {"sparsity": sparge.Dense(), "backend": "torch", "return_lse": True}
    expected = sparge.attention(query, key, value, mask, **options)
    key[0, 0, 7] = 0.0
    key[0, 0, 7, 0] = 3e38  # 20 * 3e38 is inf, but the sum of the keys is finite
    for got, wanted in zip(sparge.attention(query, key, value, mask, **options), expected, strict=True):
        torch.testing.assert_close(got, wanted)
