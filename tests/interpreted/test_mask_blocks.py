"""Full and additive masks in kernels: visible blocks and tokens, and the same selected blocks as the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from interpreted.conftest import CPU, call_of, make_problem, random_bits
from interpreted.test_attention import DTYPE_OF, assert_attention, forced_tiles
from interpreted.test_pipeline import RULES, TRITON, clustered_inputs
from selection import assert_same_blocks
from sparge import Mean, Moment, Spread, TopK
from sparge.backends.gpu.stages.mask_blocks import FULL, HIDDEN, PARTIAL, mask_blocks
from sparge.backends.torch import predict as torch_predict
from sparge.masks.geometry import Shape
from sparge.masks.visibility import find_visibility
from sparge.masks.window import Window

pytestmark = pytest.mark.usefixtures("poisoned_memory")

KINDS = (
    "elements",
    "per head",
    "blocks",
    "queries",
    "keys",
    "bias",
    "bias in bfloat16",
    "bias per head in float16",
    "bias of keys",
    "transposed",
    "nothing",
)


def mask_of(kind: str, shape: Shape) -> Tensor:
    """Return a mask. Most masks hide some queries and keys, and leave some blocks completely visible."""
    q_len, kv_len = shape.q_len, shape.kv_len
    generator = torch.Generator().manual_seed(3)
    bits = random_bits(shape.batch, shape.heads, q_len, kv_len)
    bits[..., : q_len // 4, :] = bits[..., kv_len // 3 : kv_len // 2] = False
    bits[..., q_len // 2 :, -100:] = False
    bits[:, 1:, :, :70] = True
    bias = 3 * torch.randn(bits.shape, generator=generator)
    bias[..., 64:200] = 0.0
    bias[~bits] = -math.inf
    bias[..., -70:] = torch.finfo(torch.float32).min
    documents = (torch.arange(q_len) * 3 // q_len)[:, None] == torch.arange(kv_len) * 3 // kv_len
    made = {
        "elements": bits[:, :1],
        "per head": bits[:1],
        "blocks": documents[None, None],
        "queries": bits[:, :1, :, :1],
        "keys": bits[:, 1:2, -1:],
        "bias": bias[:, :1],
        "bias in bfloat16": bias[:1, 1:2].clamp(min=torch.finfo(torch.bfloat16).min).bfloat16(),
        "bias per head in float16": bias[:1].clamp(min=torch.finfo(torch.float16).min).half(),
        "bias of keys": bias[:, :1, -1:],
        "transposed": bits[:1, :1].mT.contiguous().mT,
        "nothing": torch.zeros(1, 1, q_len, kv_len, dtype=torch.bool),
    }
    return made[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_and_tokens_equal_visibility(kind: str) -> None:
    fewer, more = Shape(2, 2, 1, 140, 330, 8, 8), Shape(1, 2, 2, 200, 129, 8, 8)
    for shape, window in ((fewer, (None, None)), (fewer, (100, 5)), (more, (None, 0))):
        mask = mask_of(kind, shape)
        call = call_of(shape, attn_mask=mask, window=window, sparsity=TopK(0.5, sink=True))
        got = mask_blocks(call, scored=1)
        expected = find_visibility(shape, call.window, mask, CPU)
        assert expected.keys is not None
        assert expected.queries is not None
        kinds = torch.where(expected.blocks, PARTIAL.value, HIDDEN.value)
        kinds = torch.where(expected.full, FULL.value, kinds)
        assert torch.equal(got.kind, kinds.to(torch.int8).expand_as(got.kind))
        assert got.tokens.keys is not None
        assert got.tokens.queries is not None
        batch, heads = shape.batch, shape.kv_heads
        assert torch.equal(got.tokens.keys.expand(batch, heads, -1), expected.keys.expand(batch, heads, -1))
        assert torch.equal(got.tokens.queries.expand(batch, 2, -1), expected.queries.expand(batch, 2, -1))
        reached = find_visibility(shape, Window(None, window[1]), mask, CPU).blocks.any(2)
        assert got.column is not None
        assert torch.equal(got.column.bool(), reached.expand_as(got.column))


@pytest.mark.parametrize(
    "kind, rule, score, options",
    [
        ("elements", "topk", Moment(), {"is_causal": True, "always_keep": [(70, 71)]}),
        ("per head", "similarity budget", Spread(4), {}),
        ("per head", "floor", Moment(5), {"window": (150, 0)}),
        ("blocks", "budget", Moment(), {}),
        ("queries", "topcdf", Mean(), {"is_causal": True}),
        ("keys", "budget with a floor", Moment(), {"window": (130, 0)}),
        ("bias", "budget", Moment(), {"is_causal": True, "exact_queries": [(130, 131)]}),
        ("bias in bfloat16", "topcdf", Mean(), {}),
        ("bias per head in float16", "per head", Moment(), {"window": (None, 65)}),
        ("bias of keys", "topk", Moment(), {}),
        ("bias of keys", "budget with a floor", Moment(16), {"window": (100, 0)}),
        ("transposed", "similarity", Spread(), {"is_causal": True}),
        ("bias", "dense", Moment(), {"is_causal": True}),
        ("keys", "dense", Moment(), {}),
        ("nothing", "budget", Moment(), {}),
    ],
    ids=str,
)
def test_selected_blocks_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, kind: str, rule: str, score: Any, options: dict[str, Any]
) -> None:
    """The torch backend is not used."""
    shape = Shape(2, 2, 1, 140, 330, 16, 16)
    query, key, _ = clustered_inputs(140, 330, batch=2, head_dim=16)
    monkeypatch.setattr(torch_predict, "predict", None)
    given = {"sparsity": RULES[rule], "score": score, "attn_mask": mask_of(kind, shape), **options}
    got = assert_same_blocks(monkeypatch, query, key, backend="triton", **given)
    assert kind == "nothing" or got.density() > 0


def test_sink_outside_the_window_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink is the first block that the mask leaves visible. The window of the query block starts at block 1."""
    query, key, _ = clustered_inputs(256, 600, heads=1, head_dim=16)
    rule = TopK(0.01, min_blocks=0, sink=True, diagonal=False)
    mask = torch.ones(1, 1, 256, 600, dtype=torch.bool)
    mask[..., :10] = False
    given = {"sparsity": rule, "window": (280, 0), "attn_mask": mask}
    kept = assert_same_blocks(monkeypatch, query, key, backend="triton", **given).to_dense()
    assert not kept[0, 0, 0, :2].any()
    mask[..., :64] = False
    kept = assert_same_blocks(monkeypatch, query, key, backend="triton", **given).to_dense()
    assert kept[0, 0, 0, 1]


@pytest.mark.parametrize(
    "kind, quantization, tile",
    [("bool", "none", (128, 1)), ("additive", "none", (64, 2)), ("bool", "int8_fp8", (64, 1))],
)
def test_attention_over_completely_visible_blocks(kind: str, quantization: str, tile: tuple[int, int]) -> None:
    """The mask is read only for partly visible blocks and for the last, partial block."""
    query, key, value, shape = make_problem(200, 330, head_dim=32, dtype=DTYPE_OF[quantization])
    seen = torch.ones(1, 1, 200, 330, dtype=torch.bool)
    seen[..., 5, 70:300] = seen[..., 128:, 200:] = False
    mask = seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, -math.inf)
    mask = mask.to(mask.dtype if kind == "bool" else query.dtype)
    blocks = torch.ones(1, shape.heads, 2, 6, dtype=torch.bool)
    blocks[..., 0, 2] = blocks[..., 1, 3:] = False  # an odd number of blocks, all completely visible
    kinds = mask_blocks(call_of(shape, attn_mask=mask), scored=0).kind[0, 0]
    assert sorted(set(kinds.flatten().tolist())) == [HIDDEN.value, PARTIAL.value, FULL.value]
    with forced_tiles(*tile):
        assert_attention(query, key, value, blocks, quantization=quantization, attn_mask=mask)


def test_queries_without_visible_keys_are_not_sampled() -> None:
    query, key, _ = clustered_inputs(300, 450, heads=1, head_dim=16)
    mask = random_bits(300, 450, share=0.9)
    empty = torch.arange(300) % 3 != 1
    mask[empty] = False
    options = {"attn_mask": mask, "topk": 0.4, "score": Moment(8), **TRITON}
    expected = sparge.predict(query, key, **options).to_dense()
    query[:, :, empty] = math.nan
    assert torch.equal(sparge.predict(query, key, **options).to_dense(), expected)
