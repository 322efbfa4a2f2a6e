"""The kernel that moves tokens along an order, against torch's own selection."""

from __future__ import annotations

import pytest
import torch

from sparge.backends import base
from sparge.ordering import order_of

pytestmark = pytest.mark.usefixtures("poisoned_memory")

GRID = (3, 5, 11)
COUNT = 165


@pytest.mark.parametrize("width", [1, 24, 64])
@pytest.mark.parametrize("before, after", [(0, 0), (70, 0), (0, 70), (3, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("heads_first", [True, False])
def test_tokens_move(width: int, before: int, after: int, dtype: torch.dtype, heads_first: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    length, order = before + COUNT + after, order_of(GRID, "hilbert")
    tokens = torch.randn(2, length, 3, width + 2, generator=generator).to(dtype)[..., :width].transpose(1, 2)
    if heads_first:
        tokens = tokens.contiguous()
    moved = torch.empty(2, length, 3, width, dtype=dtype).transpose(1, 2)
    base.get("triton").move(tokens, order.permutation, before, moved)
    assert torch.equal(moved, order.apply(tokens, 2, before))
    back = torch.empty(2, 3, length, width, dtype=dtype)
    base.get("triton").move(moved, order.inverse, before, back)
    assert torch.equal(back, tokens)


def test_channels_far_apart() -> None:
    tokens = torch.randn(1, 8, 2, COUNT, generator=torch.Generator().manual_seed(1)).permute(0, 2, 3, 1)
    moved = torch.empty(tokens.shape)
    base.get("triton").move(tokens, order_of(GRID).permutation, 0, moved)
    assert torch.equal(moved, order_of(GRID).apply(tokens))


@pytest.mark.parametrize("width", [24, 200], ids=["a piece of all heads", "two pieces"])
def test_heads_that_lie_together_move_as_one(width: int) -> None:
    tokens = torch.randn(2, 3 + COUNT, 3, width, generator=torch.Generator().manual_seed(2)).transpose(1, 2)
    moved = torch.empty(2, 3 + COUNT, 3, width).transpose(1, 2)
    base.get("triton").move(tokens, order_of(GRID).permutation, 3, moved)
    assert torch.equal(moved, order_of(GRID).apply(tokens, 2, 3))
