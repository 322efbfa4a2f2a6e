"""Block and token visibility, compared with reductions of the full element mask."""

from __future__ import annotations

import pytest
import torch

from sparge.call import Call
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape
from sparge.masks.visibility import find_visibility
from sparge.masks.window import Window
from sparge.reference import shared

SHAPES = [(1, 1), (128, 64), (200, 200), (130, 330), (330, 130), (129, 64)]


def masks(kind: str, shape: Shape) -> torch.Tensor | None:
    generator = torch.Generator().manual_seed(shape.q_len * 7 + shape.kv_len)
    if kind == "none":
        return None
    if kind == "keys":
        mask = torch.rand(shape.batch, 1, 1, shape.kv_len, generator=generator) > 0.5
        mask[..., : shape.kv_len // 2] = False
        return mask
    if kind == "elements":
        mask = torch.rand(1, shape.heads, shape.q_len, shape.kv_len, generator=generator) > 0.05
        mask[..., : shape.q_len // 2, shape.kv_len // 3 :] = False
        return mask
    if kind == "queries":
        return torch.rand(shape.batch, 1, shape.q_len, 1, generator=generator) > 0.5
    bias = torch.randn(shape.batch, 1, 1, shape.kv_len, generator=generator)
    bias[..., shape.kv_len // 2 :] = 0.0
    bias[..., : shape.kv_len // 4] = -torch.inf
    bias[..., shape.kv_len // 4 : shape.kv_len // 3] = torch.finfo(torch.float32).min
    return bias


@pytest.mark.parametrize("kind", ["none", "keys", "elements", "queries", "additive"])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (63, 0), (100, 5), (30, None)])
@pytest.mark.parametrize(("q_len", "kv_len"), SHAPES)
def test_visibility_equals_the_reduced_element_mask(kind, window, q_len, kv_len):
    shape = Shape(2, 4, 2, q_len, kv_len, 8, 8)
    mask = masks(kind, shape)
    visibility = find_visibility(shape, Window(*window), mask, torch.device("cpu"))
    allowed, bias = shared.element_mask(Call(shape, False, 1.0, attn_mask=mask, window=window), torch.device("cpu"))
    visible = shared.visible_blocks(allowed)
    assert torch.equal(visibility.blocks.expand_as(visible), visible)

    plain = allowed & (bias == 0)
    for i in range(shape.q_blocks):
        for j in range(shape.kv_blocks):
            tile = plain[:, :, i * BLOCK_Q : (i + 1) * BLOCK_Q, j * BLOCK_K : (j + 1) * BLOCK_K]
            whole = tile.flatten(2).all(-1) & (tile.shape[-1] == BLOCK_K)
            assert torch.equal(visibility.full[..., i, j].expand(2, 4), whole)

    queries = allowed.any(3)
    assert torch.equal(
        torch.ones_like(queries) if visibility.queries is None else visibility.queries.expand_as(queries), queries
    )
    keys = allowed.any(2).view(2, 2, 2, kv_len).any(2)
    assert torch.equal(torch.ones_like(keys) if visibility.keys is None else visibility.keys.expand_as(keys), keys)
