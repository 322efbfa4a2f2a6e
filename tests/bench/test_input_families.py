"""Input families have the constructed logits for every query, at all sizes."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.numerics.families import FAMILIES, KINDS, Family, by_name, of_kind
from torch import Tensor

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def logits_of(name: str, head_dim: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return float64 logits (H, S_q, S_k) of 100 queries, 2 query heads and 1 key head."""
    query, key, _ = by_name(name).make(100, 1024, 2, head_dim, dtype=dtype, kv_heads=1)
    return (query.double() @ key.double().mT)[0] / math.sqrt(head_dim)


@every_family
def test_shape_seed_and_dtype(family: Family) -> None:
    sizes = {"q_len": 70, "kv_len": 512, "heads": 4, "head_dim": 40, "kv_heads": 2}
    first, again, other = (family.make(**sizes, seed=seed) for seed in (3, 3, 4))
    assert [tuple(tensor.shape) for tensor in first] == [(1, 4, 70, 40), (1, 2, 512, 40), (1, 2, 512, 40)]
    assert {tensor.dtype for tensor in first} == {torch.bfloat16}
    assert all(tensor.isfinite().all() and tensor.is_contiguous() for tensor in first)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    half = family.make(**sizes, dtype=torch.float16)
    assert all(tensor.isfinite().all() for tensor in half), "every family fits into float16"


@pytest.mark.parametrize("gap", [6, 9, 13, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sink_logits_exceed_the_tail_by_the_gap(gap: int, dtype: torch.dtype) -> None:
    """The mean of the tail (1000 logits of deviation 0.3) and bfloat16 each shift the gap by about 0.01."""
    for suffix, places in (("", [0]), ("-middle", [517]), ("-several", [0, 269, 538, 807])):
        logits = logits_of(f"sink-{gap}{suffix}", dtype=dtype)
        tail = torch.ones(1024, dtype=torch.bool)
        tail[places] = False
        assert logits[..., tail].std(-1).mean() == pytest.approx(0.3, abs=0.01)
        gaps = logits[..., places] - logits[..., tail].mean(-1, keepdim=True)
        assert (gaps - gap).abs().max() < (0.05 if dtype == torch.float32 else 0.12)
        assert not by_name(f"sink-{gap}{suffix}").make(1, 1024)[2][:, :, places].any(), "the values of sinks are 0"


def test_own_sinks_have_no_weight_for_other_queries() -> None:
    logits = logits_of("own-sink-13", head_dim=128)
    places, owner = torch.arange(32) * 32 + 5, torch.arange(100) * 32 // 100
    expected = 13.0 * torch.nn.functional.one_hot(owner, 32)
    assert (logits[..., places] - expected).abs().max() < 0.05
    tail = torch.ones(1024, dtype=torch.bool)
    tail[places] = False
    assert logits[..., tail].std() == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("tile", [64, 128, 256])
def test_every_tile_has_one_peak(tile: int) -> None:
    logits = logits_of(f"peaks-{tile}-8").unflatten(-1, (-1, tile))
    top = logits.topk(2).values
    assert (top[..., 0] - logits.mean(-1) - 8 * (tile - 1) / tile).abs().max() < 0.3
    assert top[..., 1].max() < 2


def test_one_query_of_64_attends_to_a_late_key() -> None:
    late = logits_of("one-row-14")[..., 1024 - 41]
    has_peak = torch.zeros(100, dtype=torch.bool)
    has_peak[37::64] = True
    torch.testing.assert_close(late[:, has_peak], torch.full_like(late[:, has_peak], 14.0), rtol=0, atol=1e-4)
    assert late[:, ~has_peak].abs().max() < 1e-4


@pytest.mark.parametrize("name, rise", [("rising-40", 40.0), ("falling-10", -10.0)])
def test_slope_of_logits(name: str, rise: float) -> None:
    logits = logits_of(name)
    assert (logits[..., -64:].mean(-1) - logits[..., :64].mean(-1) - rise * 960 / 1023).abs().max() < 0.3


@pytest.mark.parametrize("name", [family.name for family in of_kind("outlier channels")])
def test_outlier_channels_do_not_change_the_spread_of_logits(name: str) -> None:
    query, key, _ = by_name(name).make(100, 1024, 2, 64, dtype=torch.float32, kv_heads=1)
    assert logits_of(name).square().mean().sqrt() == pytest.approx(2.0, rel=0.2)  # a single channel varies by query
    side, factor = name.split("-")[1], float(name.rpartition("x")[2])
    for tensor, is_meant in ((query, side in ("q", "both")), (key, side in ("k", "both"))):
        sizes = tensor.square().mean((0, 1, 2)).sqrt()
        assert (sizes.max() / sizes.median() > factor / 1.5) == is_meant


@pytest.mark.parametrize("which, name, size", [(0, "token-q-irrelevant-1e4", 1e4), (1, "token-k-irrelevant-1e3", 1e3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_irrelevant_token_is_large_and_does_not_change_logits(
    which: int, name: str, size: float, dtype: torch.dtype
) -> None:
    tokens = by_name(name).make(100, 1024, dtype=dtype)[which].double().abs().amax((0, 1, 3))
    assert tokens.max() == pytest.approx(size, rel=1e-2)
    assert (tokens > 100).sum() == 1
    assert logits_of(name, dtype=dtype).abs().max() < 20


def test_orthogonal_key_is_large_and_does_not_change_logits() -> None:
    sizes = by_name("token-k-orthogonal-1e2").make(100, 1024, dtype=torch.float32)[1].norm(dim=-1).flatten()
    assert sizes.max() == pytest.approx(100 * 128**0.5, rel=1e-3)
    assert (sizes > 20).sum() == 1
    assert logits_of("token-k-orthogonal-1e2", dtype=torch.float32)[..., 517].abs().max() < 1e-3


def test_decisive_tokens_have_most_of_the_weight() -> None:
    for name in ("token-k-decisive-1e2", "token-v-decisive-1e4"):
        assert logits_of(name).softmax(-1)[..., 517].mean() == pytest.approx(0.95, abs=0.02)
    assert logits_of("token-v-irrelevant-1e4").softmax(-1)[..., 517].max() < 1e-8
    one_hot = logits_of("one-hot").topk(2).values
    assert (one_hot[..., 0] - one_hot[..., 1]).min() > 100


@pytest.mark.parametrize("spread", [1, 2, 3, 4])
def test_random_logits_have_the_named_deviation(spread: int) -> None:
    assert logits_of(f"random-{spread}").std() == pytest.approx(spread, rel=0.03)


def test_selection_of_families() -> None:
    assert len(of_kind(*KINDS)) == len(FAMILIES) == len({family.name for family in FAMILIES})
    assert {family.kind for family in of_kind("sink", "field")} == {"sink", "field"}
    with pytest.raises(ValueError, match="expected a family such as sink-0, sink-6, sink-9, got 'sink-5'"):
        by_name("sink-5")
