"""Recall and error against brute force in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparge
from sparge.evaluate.inputs import Needle, text_with_needles
from sparge.evaluate.metrics import block_mass, mass_recall, needle_recall, relative_l1

BLOCK_Q, BLOCK_K = 128, 64


def exact_probabilities(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Return float64 probabilities (B, H, S_q, S_k); the causal mask is bottom-right aligned."""
    scores = query.double() @ key.double().mT * scale
    if is_causal:
        q_len, kv_len = scores.shape[-2:]
        seen = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1)


def brute_force_mass(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    probabilities = exact_probabilities(query, key, is_causal, scale)
    rows = [
        torch.stack([part.sum(-1).mean(-1) for part in strip.split(BLOCK_K, dim=-1)], -1)
        for strip in probabilities.split(BLOCK_Q, dim=2)
    ]
    return torch.stack(rows, 2)


def random_pair(q_len: int, kv_len: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(q_len + kv_len)
    return 2 * torch.randn(2, 3, q_len, 16, generator=generator), torch.randn(2, 3, kv_len, 16, generator=generator)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("chunk", [1, 350_000])  # chunks of one query block, and of up to two
@pytest.mark.parametrize(
    ("q_len", "kv_len", "is_causal"),
    [(200, 200, True), (129, 200, True), (127, 63, False), (1, 129, False), (384, 384, True), (500, 200, False)],
)
def test_block_mass_equals_the_softmax_summed_by_block(
    q_len: int, kv_len: int, is_causal: bool, chunk: int, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparge.evaluate.metrics.CHUNK", chunk)
    query, key = random_pair(q_len, kv_len)
    got = block_mass(query, key, is_causal=is_causal, scale=scale)
    exact = brute_force_mass(query, key, is_causal, 0.25 if scale is None else scale)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(got.sum(-1), torch.ones(got.shape[:3]), rtol=1e-5, atol=0)


def test_mass_recall_sums_the_kept_blocks() -> None:
    mass = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]]).expand(1, 1, 2, 3)
    kept = torch.tensor([[True, False, True], [False, False, True]]).expand(1, 1, 2, 3)
    mask = sparge.BlockMask.from_dense(kept, q_len=256, kv_len=192)
    assert mass_recall(mask, mass) == pytest.approx((0.75 + 0.75) / 2)


def test_full_mask_has_recall_1() -> None:
    query, key = random_pair(200, 200)
    mask = sparge.predict(query, key, sparsity=sparge.Dense(), is_causal=True)
    mass = block_mass(query, key, is_causal=True)
    assert mass_recall(mask, mass) == pytest.approx(1, abs=1e-6)


def test_needle_recall_across_block_boundaries() -> None:
    """The needle spans two key blocks and two query blocks; the mask keeps one of the four blocks."""
    query, key = random_pair(256, 256)
    needle = Needle(key_start=56, key_stop=76, query_start=120, query_stop=140)
    kept = torch.zeros(2, 3, 2, 4, dtype=torch.bool)
    kept[:, :, 1, 1] = True
    mask = sparge.BlockMask.from_dense(kept, q_len=256, kv_len=256, is_causal=True)
    needle_weights = exact_probabilities(query, key, True, 0.25)[:, :, 120:140, 56:76]
    expected = needle_weights[:, :, 8:, 8:].sum() / needle_weights.sum()
    assert 0.1 < expected < 0.5
    assert needle_recall(mask, query, key, needle) == pytest.approx(float(expected), rel=1e-5)


def test_recall_falls_and_error_rises_with_fewer_blocks() -> None:
    sample = text_with_needles(2048, heads=1)
    mass = block_mass(sample.query, sample.key, is_causal=True)
    exact = sparge.attention(sample.query, sample.key, sample.value, is_causal=True, sparsity=sparge.Dense())
    recalls, errors = [], []
    for topk in (0.9, 0.5, 0.1):
        mask = sparge.predict(sample.query, sample.key, is_causal=True, sparsity=sparge.TopK(topk, min_blocks=1))
        output = sparge.block_sparse_attention(sample.query, sample.key, sample.value, mask)
        recalls.append(mass_recall(mask, mass))
        errors.append(relative_l1(output, exact))
    assert recalls == sorted(recalls, reverse=True)
    assert errors == sorted(errors)
    assert recalls[0] > 0.95
    assert recalls[-1] < 0.8


def test_relative_l1_of_known_numbers() -> None:
    exact = torch.tensor([1.0, -2.0, 4.0, -1.0])
    assert relative_l1(exact, exact) == 0
    assert relative_l1(torch.tensor([1.5, -2.0, 3.0, -1.5]), exact) == 0.25
    assert relative_l1((2 * exact).half(), exact) == 1
