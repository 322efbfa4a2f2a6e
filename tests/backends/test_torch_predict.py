"""Batched prediction selects the same blocks as the reference for all masks, lengths and rules."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparge import Budget, Mean, Moment, Spread, TopCdf, TopK, reference
from sparge.backends.torch import predict as torch_predict
from sparge.call import Call
from sparge.masks.geometry import Shape

SHAPES = {
    "square": Shape(1, 2, 1, 640, 640, 32, 32),
    "ragged": Shape(2, 4, 2, 129, 500, 40, 24),
    "more queries": Shape(1, 2, 2, 300, 129, 16, 16),
    "one query": Shape(1, 3, 1, 1, 700, 8, 8),
}
RULES = {
    "topk": TopK(0.4, min_blocks=1),
    "floor": TopK(0.1, min_blocks=3, sink=True, diagonal=False),
    "topcdf": TopCdf(0.7, min_blocks=2),
    "budget": Budget(0.3),
    "budget with a floor": Budget(0.25, min_blocks=2, sink=True),
    "similarity": TopK(0.3, min_blocks=1, similarity_threshold=0.02),
    "similarity budget": Budget(0.4, similarity_threshold=0.03),
    "similarity topcdf": TopCdf(0.5, min_blocks=0, similarity_threshold=0.03),
}


def inputs(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(shape.q_len + shape.kv_len)
    query = torch.randn(shape.batch, shape.heads, shape.q_len, shape.head_dim, generator=generator)
    key = torch.randn(shape.batch, shape.kv_heads, shape.kv_len, shape.head_dim, generator=generator)
    return query, key + 2 * torch.randn(shape.head_dim, generator=generator)


def mask_of(kind: str, shape: Shape) -> torch.Tensor | None:
    generator = torch.Generator().manual_seed(3)
    if kind == "keys":
        mask = torch.rand(shape.batch, 1, 1, shape.kv_len, generator=generator) > 0.3
        mask[..., shape.kv_len // 2 : shape.kv_len // 2 + 80] = False
        return mask
    if kind == "elements":
        mask = torch.rand(1, 1, shape.q_len, shape.kv_len, generator=generator) > 0.5
        mask[..., : shape.q_len // 2, shape.kv_len // 3 :] = False
        return mask
    if kind == "key bias":
        bias = torch.randn(shape.batch, 1, 1, shape.kv_len, generator=generator)
        bias[..., :70] = -torch.inf
        return bias
    if kind == "head bias":
        bias = 3 * torch.randn(1, shape.heads, shape.q_len, shape.kv_len, generator=generator)
        bias[..., 70:140] = torch.finfo(torch.float32).min
        return bias
    return None


MASKS = ["none", "keys", "elements", "key bias", "head bias"]
RULES_AND_SCORES = [
    *itertools.product(RULES, [Moment()]),  # a rule reads only the probabilities, so one score suffices
    *itertools.product(["topk", "budget", "similarity"], [Mean(), Spread()]),
    ("topk", Moment(3)),
    ("topk", Spread(4)),
]


def cases() -> list[tuple[str, str, str, Moment | Mean | Spread]]:
    """Combine every rule and every score with every mask. Every shape occurs with all of these."""
    names = list(SHAPES)
    return [
        (names[(first + second) % len(names)], kind, rule, score)
        for first, (rule, score) in enumerate(RULES_AND_SCORES)
        for second, kind in enumerate(MASKS)
    ]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("name", "kind", "rule", "score"), cases(), ids=str)
def test_blocks_equal_the_reference(name, is_causal, kind, rule, score):
    shape = SHAPES[name]
    query, key = inputs(shape)
    options = {
        "sparsity": RULES[rule],
        "score": score,
        "is_causal": is_causal,
        "scale": 0.2,
        "attn_mask": mask_of(kind, shape),
        "always_keep": ((65, 70),),
        "exact_queries": ((150, 151),) if rule == "budget" and shape.q_len > 150 else (),
    }
    got = torch_predict.predict(query, key, Call(shape, **options))
    expected = reference.predict(query, key, Call(shape, **options))
    assert torch.equal(got.to_dense(), expected.to_dense())
    assert torch.equal(got.visible_num_blocks, expected.visible_num_blocks)


def test_small_chunks_do_not_change_the_blocks(monkeypatch):
    shape = SHAPES["square"]
    query, key = inputs(shape)
    options = {"sparsity": TopK(0.4, min_blocks=1), "score": Moment(), "is_causal": True, "scale": 0.2}
    whole = torch_predict.predict(query, key, Call(shape, **options))
    monkeypatch.setattr(torch_predict, "CHUNK_BYTES", 1)
    assert torch.equal(torch_predict.predict(query, key, Call(shape, **options)).kv_indices, whole.kv_indices)


@pytest.mark.parametrize("score", [Moment(), Mean(), Spread()], ids=str)
def test_a_channel_offset_and_16_bit_inputs_do_not_change_the_selection(score):
    """An offset of 128 on K makes q.k a hundred times as large, but scores are float32, so no block changes."""
    shape = SHAPES["square"]
    query, key = inputs(shape)
    query, key = query.bfloat16().float(), key.bfloat16().float()
    options = {"sparsity": TopK(0.4, min_blocks=1), "score": score, "is_causal": False, "scale": 0.2}
    plain = torch_predict.predict(query, key, Call(shape, **options)).to_dense()
    offset = torch_predict.predict(query, key + 128.0, Call(shape, **options)).to_dense()
    assert (plain == offset).float().mean() > 0.99  # fp32 rounding of key + 128 may swap a near tie
    half = torch_predict.predict(query.bfloat16(), key.bfloat16(), Call(shape, **options)).to_dense()
    assert torch.equal(half, plain)
