"""Synthetic inputs have the structure that their names state, and needles distinguish the two scores."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from torch import Tensor

import sparge
from sparge.evaluate.inputs import Sample, random_like, text_like, text_with_needles, video_like
from sparge.evaluate.metrics import block_mass, needle_recall


def probabilities(sample: Sample) -> Tensor:
    """Return exact attention weights (H, S, S) in float64."""
    query, key = sample.query[0].double(), sample.key[0].double()
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if sample.is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1)


@pytest.mark.parametrize("make", [text_like, text_with_needles, video_like, random_like])
def test_last_stride_is_1(make) -> None:
    """torch's fast kernels require it; its other kernels need 32 GiB at 32768 tokens."""
    sample = make(2048, heads=2)
    assert all(tensor.is_contiguous() for tensor in (sample.query, sample.key, sample.value))


@pytest.mark.parametrize("make", [text_like, text_with_needles])
def test_text_has_a_sink_and_needles(make) -> None:
    sample = make(1024, heads=2)
    attention = probabilities(sample)
    late = attention[:, 512:]
    assert late[..., 0].mean() > 20 / 1024, "the sink has far more than the average weight"
    for needle in sample.needles:
        weights = attention[:, needle.query_start : needle.query_stop]
        weight = weights[..., needle.key_start : needle.key_stop].sum(-1).mean()
        share = (needle.key_stop - needle.key_start) / needle.query_start
        assert weight > 10 * share


@pytest.mark.parametrize("tokens", [256, 300, 2048, 8192])
def test_needles_precede_their_queries_and_do_not_overlap(tokens: int) -> None:
    needles = text_with_needles(tokens, heads=1, head_dim=8).needles
    assert len(needles) == 6
    for needle in needles:
        assert 0 < needle.key_start < needle.key_stop <= needle.query_start < needle.query_stop <= tokens
    for before, after in itertools.pairwise(needles):
        assert before.key_stop <= after.key_start
        assert before.query_start < after.query_start


def top_quarter(sample: Sample) -> float:
    """Return the mass in the best quarter of each query block's blocks, averaged over query blocks."""
    mass = block_mass(sample.query, sample.key, is_causal=sample.is_causal)
    return float(mass.topk(mass.shape[-1] // 4).values.sum(-1).mean())


def test_video_like_is_concentrated_and_random_is_not() -> None:
    assert top_quarter(video_like(2048, heads=2)) > 0.95
    assert 0.25 < top_quarter(random_like(2048, heads=2)) < 0.30


def test_needles_change_only_their_own_tokens() -> None:
    plain, sample = text_like(2048, heads=1), text_with_needles(2048, heads=1)
    keys = torch.zeros(2048, dtype=torch.bool)
    queries = keys.clone()
    for needle in sample.needles:
        keys[needle.key_start : needle.key_stop] = True
        queries[needle.query_start : needle.query_stop] = True
    assert torch.equal((plain.key != sample.key).any(-1)[0, 0], keys)
    assert torch.equal((plain.query != sample.query).any(-1)[0, 0], queries)
    assert torch.equal(plain.value, sample.value)
    assert plain.needles == ()


@pytest.mark.parametrize("make", [text_like, text_with_needles, video_like, random_like])
def test_samples_are_deterministic_by_seed(make) -> None:
    first, again, other = (make(256, heads=1, seed=seed) for seed in (3, 3, 4))
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))


@pytest.mark.parametrize("tokens", [2048, 5000, 7777])
def test_needles_do_not_cross_block_boundaries(tokens: int) -> None:
    for needle in text_with_needles(tokens, heads=1, head_dim=8).needles:
        assert needle.key_start // 64 == (needle.key_stop - 1) // 64
        assert needle.query_start // 128 == (needle.query_stop - 1) // 128


@pytest.mark.parametrize("tokens", [7000, 8192])
def test_moment_keeps_needles_and_mean_does_not(tokens: int) -> None:
    """The density is 0.3; at 0.25, 1 of 8 heads loses 1 of 6 needles at 7000 tokens."""
    sample = text_with_needles(tokens, heads=8)
    kept = {}
    for score in ("moment", "mean"):
        mask = sparge.predict(sample.query, sample.key, is_causal=True, topk=0.3, score=score)
        kept[score] = [needle_recall(mask, sample.query, sample.key, needle) for needle in sample.needles]
    assert min(kept["moment"]) >= 0.95
    assert statistics.fmean(kept["mean"]) < 0.8
    assert min(kept["mean"]) < 0.6


RECORDED = {
    text_like: [(-1.8250, 1.8603), (-0.7821, 4.1327), (-0.9141, -0.0805)],
    video_like: [(-1.5319, 0.0798), (-0.9946, 0.9698), (-1.4529, 0.3481)],
}


@pytest.mark.parametrize("make", RECORDED)
def test_tensors_of_a_seed_are_stable(make) -> None:
    """Earlier benchmark results were measured on these tensors."""
    sample = make(512, heads=1)
    values = [tensor[0, 0, [0, 300], 5].tolist() for tensor in (sample.query, sample.key, sample.value)]
    assert values == [pytest.approx(pair, abs=1e-4) for pair in RECORDED[make]]
