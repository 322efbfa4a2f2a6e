"""The predicted blocks equal the blocks of the reference for all masks, lengths and rules."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from conftest import causality
from gpu.conftest import BACKEND, DEVICE, make_inputs, random_bits
from selection import assert_same_blocks as assert_same_blocks_of
from sparge import Budget, Dense, Mean, Moment, Spread, TopCdf, TopK

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
assert_same_blocks = partial(assert_same_blocks_of, backend=BACKEND)

SHAPES = {
    "square": {"q_len": 600, "heads": 2, "kv_heads": 1},
    "ragged": {"q_len": 129, "kv_len": 500, "batch": 2, "heads": 4, "kv_heads": 2},
    "more queries": {"q_len": 300, "kv_len": 129, "heads": 2},
    "one query": {"q_len": 1, "kv_len": 600, "heads": 3, "kv_heads": 1},
    "prefix": {"q_len": 256, "kv_len": 576, "heads": 2, "kv_heads": 1},
}
RULES = {
    "topk": TopK(0.4, min_blocks=1),
    "floor": TopK(0.1, min_blocks=3, sink=False, diagonal=False),
    "sink": TopK(0.3, min_blocks=1, sink=True, diagonal=False),
    "diagonal": TopK(0.3, min_blocks=1, sink=False, diagonal=True),
    "no flags": TopK(0.3, min_blocks=0, sink=False, diagonal=False),
    "per head": TopK(torch.tensor([0.2, 0.7]), min_blocks=1, sink=False, diagonal=False),
    "similarity": TopK(0.3, min_blocks=1, similarity_threshold=0.3),
    "similarity per head": TopK(0.3, min_blocks=1, similarity_threshold=torch.tensor([0.0, 0.3])),
    "topcdf": TopCdf(0.7, min_blocks=2),
    "budget": Budget(0.4),
    "budget with a floor": Budget(0.3, min_blocks=2, sink=True),
    "similarity budget": Budget(0.3, similarity_threshold=0.2),
    "topcdf per head": TopCdf(torch.tensor([0.3, 0.9]), min_blocks=0),
    "similarity topcdf": TopCdf(0.5, min_blocks=0, similarity_threshold=0.3),
    "dense": Dense(),
}


def clustered_inputs(name: str, **sizes: Any) -> tuple[Tensor, Tensor]:
    """Return similar queries, and keys that form a cluster in every other block: some pass the similarity threshold."""
    query, key, _ = make_inputs(**{**SHAPES[name], **sizes})
    directions = torch.randn(key.shape[2] // 128, key.shape[3], generator=torch.Generator().manual_seed(8)).to(key)
    for index, direction in enumerate(directions):
        key[:, :, 128 * index : 128 * index + 64] += 2 * direction
    return query + 1.0, key


def mask_of(kind: str, query: Tensor, key: Tensor) -> Tensor | None:
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    if kind == "padding":
        return (
            torch.arange(kv_len, device=DEVICE)
            < torch.tensor([kv_len, kv_len // 3], device=DEVICE)[-batch:, None, None, None]
        )
    if kind == "keys per head":
        mask = random_bits(1, heads, 1, kv_len, share=0.7)
        mask[..., kv_len // 2 : kv_len // 2 + 80] = False
        return mask
    if kind == "elements":
        mask = random_bits(1, 1, q_len, kv_len, share=0.5)
        mask[..., : q_len // 2, kv_len // 3 :] = False
        return mask
    if kind == "bias per key":
        bias = torch.randn(batch, 1, 1, kv_len, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        bias[..., :70] = -torch.inf
        return bias
    if kind in ("documents", "transposed"):
        mask = (torch.arange(q_len, device=DEVICE) * 2 // q_len)[:, None] <= torch.arange(kv_len, device=DEVICE) // 256
        mask[q_len // 3] = False
        return mask if kind == "documents" else mask.mT.contiguous().mT
    if kind == "bias of batches in bfloat16":
        bias = torch.randn(batch, 1, q_len, kv_len, generator=torch.Generator().manual_seed(4)).to(DEVICE)
        bias[:, :, ::3, : kv_len // 2] = -torch.inf
        return bias.bfloat16()
    if kind == "bias":
        bias = 3 * torch.randn(1, heads, q_len, kv_len, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        bias[..., 70:140] = torch.finfo(torch.float32).min
        return bias
    return None


@pytest.mark.parametrize("score", [Moment(), Mean(), Spread()], ids=str)
@causality
@pytest.mark.parametrize("rule", RULES)
def test_rules(monkeypatch: pytest.MonkeyPatch, rule: str, is_causal: bool, score: Any) -> None:
    query, key = clustered_inputs("square")
    mask = assert_same_blocks(monkeypatch, query, key, sparsity=RULES[rule], is_causal=is_causal, score=score)
    if rule != "dense":
        assert 0 < mask.density() < 1, "some blocks were skipped"


KINDS = ("padding", "keys per head", "elements", "documents", "bias per key", "bias", "bias of batches in bfloat16")


@pytest.mark.parametrize("kind", ["none", *KINDS])
@causality
@pytest.mark.parametrize("name", ["ragged", "more queries", "one query", "prefix"])
def test_masks_and_lengths(monkeypatch: pytest.MonkeyPatch, name: str, is_causal: bool, kind: str) -> None:
    query, key = clustered_inputs(name)
    options = {"is_causal": is_causal, "attn_mask": mask_of(kind, query, key), "sparsity": TopK(0.4, min_blocks=1)}
    assert_same_blocks(monkeypatch, query, key, **options)


@pytest.mark.parametrize("kind", ["padding", "bias"])
@causality
def test_masks_with_the_mean_score(monkeypatch: pytest.MonkeyPatch, is_causal: bool, kind: str) -> None:
    query, key = clustered_inputs("ragged")
    options = {"is_causal": is_causal, "attn_mask": mask_of(kind, query, key), "sparsity": TopCdf(0.6, min_blocks=1)}
    assert_same_blocks(monkeypatch, query, key, score="mean", **options)


@pytest.mark.parametrize("rule", ["similarity", "budget", "topcdf", "dense"])
@pytest.mark.parametrize("kind", ["elements", "transposed", "bias per key", "bias"])
@pytest.mark.parametrize("window", [(None, 0), (130, 0), (200, 64)], ids=str)
def test_masks_rules_and_windows(
    monkeypatch: pytest.MonkeyPatch, window: tuple[int | None, int], kind: str, rule: str
) -> None:
    query, key = clustered_inputs("prefix")
    options = {"window": window, "attn_mask": mask_of(kind, query, key), "sparsity": RULES[rule]}
    assert_same_blocks(monkeypatch, query, key, **options)


@pytest.mark.parametrize("kind", ["elements", "bias"])
@pytest.mark.parametrize("score", [Moment(1), Moment(128), Spread(4), Mean()], ids=str)
def test_masks_and_scores(monkeypatch: pytest.MonkeyPatch, kind: str, score: Any) -> None:
    query, key = clustered_inputs("ragged")
    options = {"attn_mask": mask_of(kind, query, key), "sparsity": Budget(0.4), "score": score}
    assert_same_blocks(monkeypatch, query, key, **options)


@pytest.mark.parametrize("score", [Moment(1), Moment(5), Moment(16), Spread(4), Spread(128)], ids=str)
@pytest.mark.parametrize("kind", ["none", "padding"])
def test_sample_counts(monkeypatch: pytest.MonkeyPatch, kind: str, score: Any) -> None:
    query, key = clustered_inputs("ragged")
    options = {"attn_mask": mask_of(kind, query, key), "sparsity": TopK(0.4, min_blocks=1), "score": score}
    assert_same_blocks(monkeypatch, query, key, is_causal=True, **options)


@pytest.mark.parametrize("head_dim, dtype", [(40, torch.bfloat16), (128, torch.float16), (256, torch.float32)], ids=str)
@causality
def test_widths_and_dtypes(monkeypatch: pytest.MonkeyPatch, is_causal: bool, head_dim: int, dtype: torch.dtype) -> None:
    query, key = clustered_inputs("ragged", head_dim=head_dim, dtype=dtype)
    assert_same_blocks(monkeypatch, query, key, is_causal=is_causal, sparsity=TopK(0.4, min_blocks=1))


@pytest.mark.parametrize("rule", ["no flags", "topcdf", "budget"])
@causality
def test_exact_queries(monkeypatch: pytest.MonkeyPatch, is_causal: bool, rule: str) -> None:
    query, key = clustered_inputs("square")
    options = {"is_causal": is_causal, "sparsity": RULES[rule], "exact_queries": [(130, 140), (260, 261)]}
    kept = assert_same_blocks(monkeypatch, query, key, **options).to_dense()
    visible = sparge.predict(query, key, is_causal=is_causal, sparsity=Dense(), enable_gqa=True, backend=BACKEND)
    assert torch.equal(kept[:, :, 1:3], visible.to_dense()[:, :, 1:3])


@pytest.mark.parametrize("rule", ["no flags", "topcdf", "similarity"])
@causality
def test_always_keep(monkeypatch: pytest.MonkeyPatch, is_causal: bool, rule: str) -> None:
    query, key = clustered_inputs("square")
    ranges = [(65, 70), (300, 330)]
    options = {"is_causal": is_causal, "sparsity": RULES[rule], "always_keep": ranges}
    kept = assert_same_blocks(monkeypatch, query, key, **options).to_dense()
    visible = sparge.predict(query, key, is_causal=is_causal, sparsity=Dense(), enable_gqa=True, backend=BACKEND)
    for column in (1, 4, 5):
        assert torch.equal(kept[..., column], visible.to_dense()[..., column])


@pytest.mark.parametrize("score", ["moment", "mean"])
def test_scale(monkeypatch: pytest.MonkeyPatch, score: str) -> None:
    query, key = clustered_inputs("square")
    for scale in (0.02, 0.5, -0.1):
        assert_same_blocks(monkeypatch, query, key, scale=scale, sparsity=TopCdf(0.8, min_blocks=1), score=score)
