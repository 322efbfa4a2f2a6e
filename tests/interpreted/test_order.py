"""Reordering of tokens: the kernel equals indexing in torch, and attention on reordered tokens."""

from __future__ import annotations

import pytest
import torch

from sparge.backends import base
from sparge.call import Call
from sparge.masks.geometry import Shape
from sparge.masks.ordering import TokenOrder, order_of
from sparge.options.rules import Budget

pytestmark = pytest.mark.usefixtures("poisoned_memory")

GRID = (3, 5, 11)
COUNT = 165


@pytest.mark.parametrize("width", [1, 24, 64])
@pytest.mark.parametrize("before, after", [(0, 0), (70, 0), (0, 70), (3, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("heads_first", [True, False])
def test_reordering_equals_indexing(width: int, before: int, after: int, dtype: torch.dtype, heads_first: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    length, order = before + COUNT + after, order_of(GRID, "hilbert")
    tokens = torch.randn(2, length, 3, width + 2, generator=generator).to(dtype)[..., :width].transpose(1, 2)
    if heads_first:
        tokens = tokens.contiguous()
    (moved,) = base.get("triton").move_all((tokens,), order.permutation, before, tokens_first=True)
    assert torch.equal(moved, order.apply(tokens, 2, before))
    (back,) = base.get("triton").move_all((moved,), order.inverse, before, tokens_first=False)
    assert torch.equal(back, tokens)


def test_strided_channels() -> None:
    tokens = torch.randn(1, 8, 2, COUNT, generator=torch.Generator().manual_seed(1)).permute(0, 2, 3, 1)
    (moved,) = base.get("triton").move_all((tokens,), order_of(GRID).permutation, 0)
    assert torch.equal(moved, order_of(GRID).apply(tokens))


@pytest.mark.parametrize("width", [24, 200], ids=["one piece for all heads", "two pieces"])
def test_heads_that_are_adjacent_in_memory_move_together(width: int) -> None:
    tokens = torch.randn(2, 3 + COUNT, 3, width, generator=torch.Generator().manual_seed(2)).transpose(1, 2)
    (moved,) = base.get("triton").move_all((tokens,), order_of(GRID).permutation, 3, tokens_first=True)
    assert torch.equal(moved, order_of(GRID).apply(tokens, 2, 3))


@pytest.mark.parametrize("quantization", ["none", "int8_fp8"])
@pytest.mark.parametrize("layout", ["heads first", "tokens first", "channels apart"])
def test_attention_in_order(layout: str, quantization: str) -> None:
    """The result is bitwise equal to reordering in separate steps, with text tokens before and after the grid."""
    sizes, order = (3, 1, 7 + COUNT + 70, 2, 16), TokenOrder(GRID, "hilbert", 7)
    tensors = torch.randn(sizes, generator=torch.Generator().manual_seed(3)).bfloat16().transpose(2, 3)
    if layout == "heads first":
        tensors = tensors.contiguous()
    elif layout == "channels apart":
        tensors = tensors.mT.contiguous().mT
    query, key, value = tensors
    shape = Shape(1, 2, 2, sizes[2], sizes[2], 16, 16)
    call = Call(shape, False, 0.25, Budget(0.5), quantization=quantization, skipped="mean")
    backend = base.get("triton")
    found, _ = backend.attention(query, key, value, call, order=order)
    moved = [order_of(GRID).apply(tokens, 2, 7) for tokens in tensors]
    expected, _ = backend.attention(*moved, call)
    assert torch.equal(found, order_of(GRID).undo(expected, 2, 7))
    assert found.transpose(1, 2).is_contiguous()
