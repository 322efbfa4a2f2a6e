"""Parity with SDPA: empty queries, exported programs of any length, masks that cost more than sparsity saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sparge


@pytest.mark.parametrize("sizes", [(0, 2, 300, 32), (1, 2, 0, 32)], ids=["batch", "queries"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_calls_without_queries_return_empty_outputs(sizes: tuple[int, ...], layout: Any) -> None:
    query, key = torch.randn(sizes), torch.randn(sizes[0], 2, 300, 32)
    expected = F.scaled_dot_product_attention(query, key, key)
    if layout == "NHD":
        query, key, expected = (tensor.transpose(1, 2) for tensor in (query, key, expected))
    output, lse = sparge.attention(query, key, key, layout=layout, return_lse=True)
    assert output.shape == expected.shape
    assert lse.shape == sizes[:3]


def test_calls_without_keys_raise() -> None:
    query, key = torch.randn(1, 2, 300, 32), torch.randn(1, 2, 0, 32)
    with pytest.raises(ValueError, match="key: expected no empty dimension"):
        sparge.attention(query, key, key)


class Model(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sparge.attention(query, key, value, is_causal=True, topk=0.25)


def test_exported_programs_accept_any_length() -> None:
    """The choice between dense and sparse is made at run time, not while tracing."""
    if not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("torch 2.6 has no torch.compiler.is_exporting")
    inputs = tuple(torch.randn(1, 2, 1000, 16) for _ in range(3))
    length = torch.export.Dim("length", min=2, max=100_000)
    exported = torch.export.export(Model(), inputs, dynamic_shapes=[{2: length}] * 3).module()
    for tokens, reason in ((300, "dense: below the crossover"), (9000, "sparse: torch")):
        tensors = [torch.randn(1, 2, tokens, 16) for _ in range(3)]
        sparge.reset_stats()
        got = exported(*tensors)
        assert sparge.stats().reasons == {reason: 1}
        torch.testing.assert_close(got, Model()(*tensors))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bool", "dense: costly mask"),
        ("bool of heads", "dense: costly mask"),
        ("additive", "dense: costly mask"),
        ("additive of heads", "dense: costly mask"),
        ("keys", "sparse: torch"),
        ("additive keys", "sparse: torch"),
    ],
)
def test_masks_that_cost_more_than_sparsity_saves_run_dense_on_a_cpu(kind: str, reason: str) -> None:
    tokens, heads = 4096, 2
    query, key, value = (torch.randn(1, heads, tokens, 16) for _ in range(3))
    if "keys" in kind:
        visible = torch.arange(tokens)[None, None, None] < tokens - 100
    else:
        visible = torch.rand(1, heads if "heads" in kind else 1, tokens, tokens) > 0.3
    mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf) if "additive" in kind else visible
    sparge.reset_stats()
    got = sparge.attention(query, key, value, mask, topk=1.0)
    assert sparge.stats().reasons == {reason: 1}
    torch.testing.assert_close(got, F.scaled_dot_product_attention(query, key, value, mask), atol=1e-5, rtol=1e-4)
