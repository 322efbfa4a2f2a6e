"""Exact attention of sampled queries, computed in chunks of keys."""

from __future__ import annotations

import math

import pytest
import torch

from conftest import exact_attention
from sparge.evaluate import oracle
from sparge.evaluate.metrics import relative_l1
from sparge.evaluate.oracle import exact_rows, sampled_error, sampled_queries

CPU = torch.device("cpu")


def test_samples_are_evenly_spaced_and_complete_for_short_sequences() -> None:
    rows = sampled_queries(32768, CPU)
    assert (len(rows), int(rows[0]), int(rows[-1])) == (256, 0, 32767)
    assert set(rows.diff().tolist()) == {128, 129}
    assert sampled_queries(100, CPU).tolist() == list(range(100))
    assert sampled_queries(1, CPU).tolist() == [0]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_equals_the_full_computation(
    is_causal: bool, has_mask: bool, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of keys give the same result, also for scores of thousands of nats."""
    monkeypatch.setattr(oracle, "KEYS_AT_ONCE", 128)
    torch.manual_seed(0)
    query = torch.randn(2, 2, 200, 32) * torch.tensor([1.0, 500.0]).view(2, 1, 1, 1)
    key, value = torch.randn(2, kv_heads, 300, 32), torch.randn(2, kv_heads, 300, 16)
    kept = None
    if has_mask:
        kept = torch.rand(2, 2, 2, 5) < 0.5
        kept[0, 0, 1] = False  # queries without visible keys
    rows = sampled_queries(200, CPU, count=37)
    exact, lse = exact_attention(query, key, value, is_causal=is_causal, block_mask=kept)
    got = exact_rows(query, key, value, rows, is_causal=is_causal, kept=kept)
    torch.testing.assert_close(got.output, exact[:, :, rows], rtol=0, atol=1e-10)
    torch.testing.assert_close(got.lse, lse[:, :, rows], rtol=1e-12, atol=1e-12)


def test_error_of_the_sampled_queries() -> None:
    torch.manual_seed(0)
    exact, output = torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8)
    everything = sampled_queries(64, CPU)
    assert sampled_error(output, everything, exact) == relative_l1(output, exact)
    rows = sampled_queries(64, CPU, count=5)
    assert sampled_error(output, rows, exact[:, :, rows]) == relative_l1(output[:, :, rows], exact[:, :, rows])
    with pytest.raises(ValueError, match="expected a finite output, got a relative L1 error of nan"):
        sampled_error(torch.full_like(output, math.nan), everything, exact)
