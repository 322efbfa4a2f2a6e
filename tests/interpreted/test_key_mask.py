"""Bool key masks in kernels: visible tokens and first visible keys equal those of `visibility`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from interpreted.conftest import CPU, call_of, random_bits
from sparge.backends.gpu.stages.key_mask import hides_keys_alone, key_mask
from sparge.masks.geometry import Shape
from sparge.masks.visibility import find_visibility, first_seen_keys

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SHAPES = {
    "fewer queries": Shape(2, 4, 2, 140, 330, 8, 8),
    "more queries": Shape(1, 2, 2, 200, 129, 8, 8),
    "many keys": Shape(1, 2, 1, 63, 1100, 8, 8),
    "one key": Shape(1, 1, 1, 3, 1, 8, 8),
}
WINDOWS = {"full": (None, None), "causal": (None, 0), "right": (None, 5)}


def mask_of(kind: str, shape: Shape) -> Tensor:
    """Return a key mask that hides some blocks completely, including the first keys."""
    bits = random_bits(shape.batch, shape.heads, 1, shape.kv_len, share=0.3)
    bits[..., : shape.kv_len // 3] = bits[:, 1:, :, shape.kv_len // 2 : shape.kv_len // 2 + 130] = False
    bits[..., -1] = True
    made = {
        "shared": bits[:1, :1],
        "per batch item": bits[:, :1],
        "per head": bits,
        "broadcast": torch.ones(1, shape.heads, 1, 1, dtype=torch.bool),
        "strided": bits.repeat_interleave(3, 3)[..., ::3],
        "all hidden": torch.zeros_like(bits),
    }
    return made[kind]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", ["shared", "per batch item", "per head", "broadcast", "strided", "all hidden"])
def test_tokens_and_first_keys_equal_visibility(kind: str, name: str, window: str) -> None:
    shape = SHAPES[name]
    mask = mask_of(kind, shape)
    call = call_of(shape, attn_mask=mask, window=WINDOWS[window])
    assert hides_keys_alone(call)
    got, expected = key_mask(call), find_visibility(shape, call.window, mask, CPU)
    first_seen, first_query = first_seen_keys(shape, call.window, mask)
    assert torch.equal(got.first_seen, first_seen)
    assert torch.equal(got.first_query, first_query)
    for got_tokens, expected_tokens, heads in (
        (got.tokens.keys, expected.keys, shape.kv_heads),
        (got.tokens.queries, expected.queries, shape.heads),
    ):
        assert got_tokens is not None
        assert expected_tokens is not None
        assert got_tokens.dtype == torch.bool
        assert torch.equal(got_tokens.expand(shape.batch, heads, -1), expected_tokens.expand(shape.batch, heads, -1))
