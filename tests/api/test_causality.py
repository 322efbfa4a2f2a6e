"""Nothing of the future reaches the past, and no item of a batch another."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from conftest import (
    assert_exact,
    backends,
    causality,
    make_qkv,
    modes,
    no_quantization,
)
from sparge import TopCdf, TopK

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.timeout(120)]


class TestCausality:
    CUT = 800  # in the middle of query block 6 and of key block 12
    BLOCK_START = 768
    FUTURES = pytest.mark.parametrize("future", [1.0, 1e6, 1e30, math.nan])

    def changed(self, tensors: tuple[Tensor, ...], future: float) -> list[Tensor]:
        other = [tensor.clone() for tensor in tensors]
        for index, tensor in enumerate(other):
            noise = torch.randn(tensor[:, :, self.CUT :].shape, generator=torch.Generator().manual_seed(50 + index))
            tensor[:, :, self.CUT :] = future * (1 + noise)
        return other

    @backends
    @FUTURES
    def test_a_fixed_mask_leaks_nothing(self, backend: str, future: float) -> None:
        tensors = make_qkv(1000, heads=2, head_dim=16)
        blocks = torch.rand(1, 2, 8, 16, generator=torch.Generator().manual_seed(1)) < 0.6
        results = [
            sparge.block_sparse_attention(
                *given, blocks, is_causal=True, return_lse=True, backend=backend, quantization="none"
            )
            for given in (tensors, self.changed(tensors, future))
        ]
        # Only numbers that overflow may reach other rows of their own block, as they do in SDPA.
        past = self.CUT if abs(future) <= 1e6 else self.BLOCK_START
        for before, after in zip(*results, strict=True):
            assert torch.equal(before[:, :, :past], after[:, :, :past])
            assert not torch.equal(before[:, :, self.CUT :], after[:, :, self.CUT :])

    def structured(self, prefix: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries that agree, and every other key block too: the threshold lets some pass."""
        query, key, value = make_qkv(1000, 1000 + prefix, heads=1, head_dim=16)
        directions = 2 * torch.randn(8, 1, 16, generator=torch.Generator().manual_seed(8))
        key[:, :, :896].view(7, 2, 64, 16)[:, 0].add_(directions[:7])
        return query + 2.0, key, value

    RULES = pytest.mark.parametrize(
        "sparsity",
        [
            TopK(0.4, min_blocks=1, sink=False, diagonal=False),
            TopCdf(0.6, min_blocks=1),
            TopK(0.4, min_blocks=1, sink=False, diagonal=False, similarity_threshold=0.3),
        ],
        ids=["topk", "topcdf", "similarity"],
    )

    @backends
    @FUTURES
    @pytest.mark.parametrize("score", ["moment", "mean"])
    @RULES
    def test_the_prediction_leaks_nothing(self, backend: str, future: float, score: str, sparsity: Any) -> None:
        tensors = self.structured()
        options = {"is_causal": True, "sparsity": sparsity, "score": score, "backend": backend}
        given = (tensors, self.changed(tensors, future))
        before, after = (sparge.predict(*qkv[:2], **options).to_dense()[:, :, :6] for qkv in given)
        assert 0 < before.sum() < 42, "a choice was made"
        assert torch.equal(before, after)
        before, after = (sparge.attention(*qkv, quantization="none", **options) for qkv in given)
        assert torch.equal(before[:, :, : self.BLOCK_START], after[:, :, : self.BLOCK_START])

    @backends
    @pytest.mark.parametrize("score", ["moment", "mean"])
    @RULES
    def test_the_prediction_leaks_nothing_behind_an_odd_prefix(self, backend: str, score: str, sparsity: Any) -> None:
        """A chunk of queries after 30 cached keys: key blocks reach past the last query of a query block.

        Whether such a block takes a place of the budget may not depend on its similarity, which knows all of its keys.
        """
        query, key, _ = self.structured(prefix=30)
        start = self.BLOCK_START + 30  # the first key that query block 5 does not see
        noise = 20 * torch.randn(key[:, :, start:].shape, generator=torch.Generator().manual_seed(50))
        options = {"is_causal": True, "sparsity": sparsity, "score": score, "backend": backend}
        before = sparge.predict(query, key, **options).to_dense()[:, :, :6]
        assert 0 < before.sum() < 48, "a choice was made"
        for future in (torch.tensor(5.0), noise):  # keys that agree, keys that do not
            changed = key.clone()
            changed[:, :, start:] = future
            assert torch.equal(sparge.predict(query, changed, **options).to_dense()[:, :, :6], before)

    @pytest.mark.parametrize("offset", [-129, -128, -65, -64, -63, -2, -1, 1, 2, 61, 62, 63, 65, 66, 127])
    def test_every_place_of_the_diagonal(self, offset: int) -> None:
        """Which blocks the diagonal cuts changes within a key or two of these offsets."""
        query, key, value = make_qkv(300, 300 + offset, head_dim=16)
        got = sparge.attention(query, key, value, is_causal=True, topk=1, **no_quantization("torch"))
        assert_exact(got, query, key, value, is_causal=True)

    @backends
    @pytest.mark.parametrize("q_len, kv_len", [(200, 400), (400, 200)])
    def test_alignment_is_bottom_right(self, backend: str, q_len: int, kv_len: int) -> None:
        """Query i sees key i + S_k - S_q and not the one after it."""
        query, key, value = make_qkv(q_len, kv_len)
        value.zero_()
        row = 150 if q_len < kv_len else 350
        edge = row + kv_len - q_len
        value[:, :, edge] = 1.0
        output = sparge.attention(query, key, value, is_causal=True, topk=1, backend=backend)
        assert (output[:, :, row:] > 0).all()
        assert (output[:, :, :row] == 0).all()


@backends
@modes
@causality
def test_batches_are_independent(backend: str, quantization: str, is_causal: bool) -> None:
    """An item's result depends neither on its neighbors nor on its place among them."""
    query, key, value = make_qkv(70, 330, batch=3, heads=2, kv_heads=1, head_dim=16)
    lengths = torch.tensor([330, 100, 222])
    mask = (torch.arange(330) < lengths[:, None])[:, None, None]
    key[1] *= 3.0

    def run(items: list[int]) -> tuple[Tensor, Tensor]:
        return sparge.attention(
            query[items],
            key[items],
            value[items],
            mask[items],
            is_causal=is_causal,
            enable_gqa=True,
            return_lse=True,
            backend=backend,
            quantization=quantization,
            sparsity=TopK(0.4, min_blocks=1, similarity_threshold=0.1),
        )

    together, together_lse = run([0, 1, 2])
    for items in ([2, 0, 1], [1], [2, 2]):
        output, lse = run(items)
        assert torch.equal(output, together[items])
        assert torch.equal(lse, together_lse[items])
