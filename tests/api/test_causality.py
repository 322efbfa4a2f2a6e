"""Results do not depend on future tokens or on other batch items."""

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
    unquantized_options,
)
from sparge import TopCdf, TopK

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.timeout(120)]


class TestCausality:
    FUTURE_START = 800  # inside query block 6 and key block 12
    BLOCK_START = 768
    FUTURES = pytest.mark.parametrize("future", [1.0, 1e6, 1e30, math.nan])

    def changed(self, tensors: tuple[Tensor, ...], future: float) -> list[Tensor]:
        other = [tensor.clone() for tensor in tensors]
        for index, tensor in enumerate(other):
            noise = torch.randn(
                tensor[:, :, self.FUTURE_START :].shape, generator=torch.Generator().manual_seed(50 + index)
            )
            tensor[:, :, self.FUTURE_START :] = future * (1 + noise)
        return other

    @backends
    @FUTURES
    def test_explicit_mask_does_not_leak_the_future(self, backend: str, future: float) -> None:
        tensors = make_qkv(1000, heads=2, head_dim=16)
        blocks = torch.rand(1, 2, 8, 16, generator=torch.Generator().manual_seed(1)) < 0.6
        results = [
            sparge.block_sparse_attention(
                *inputs, blocks, is_causal=True, return_lse=True, backend=backend, quantization="none"
            )
            for inputs in (tensors, self.changed(tensors, future))
        ]
        # Only numbers that overflow may affect other queries of their query block, as in SDPA.
        past = self.FUTURE_START if abs(future) <= 1e6 else self.BLOCK_START
        for before, after in zip(*results, strict=True):
            assert torch.equal(before[:, :, :past], after[:, :, :past])
            assert not torch.equal(before[:, :, self.FUTURE_START :], after[:, :, self.FUTURE_START :])

    def structured(self, prefix: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return similar queries, and similar keys in every other block: these blocks pass the similarity threshold."""
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
    def test_prediction_does_not_leak_the_future(self, backend: str, future: float, score: str, sparsity: Any) -> None:
        tensors = self.structured()
        options = {"is_causal": True, "sparsity": sparsity, "score": score, "backend": backend}
        inputs = (tensors, self.changed(tensors, future))
        before, after = (sparge.predict(*qkv[:2], **options).to_dense()[:, :, :6] for qkv in inputs)
        assert 0 < before.sum() < 42, "some blocks are skipped"
        assert torch.equal(before, after)
        before, after = (sparge.attention(*qkv, quantization="none", **options) for qkv in inputs)
        assert torch.equal(before[:, :, : self.BLOCK_START], after[:, :, : self.BLOCK_START])

    @backends
    @pytest.mark.parametrize("score", ["moment", "mean"])
    @RULES
    def test_prediction_after_an_odd_prefix_does_not_leak_the_future(
        self, backend: str, score: str, sparsity: Any
    ) -> None:
        """After 30 cached keys, key blocks extend past the last visible key of a query block.

        Whether such a block counts toward the budget must not depend on its similarity, which depends on all its keys.
        """
        query, key, _ = self.structured(prefix=30)
        start = self.BLOCK_START + 30  # the first key that query block 5 does not see
        noise = 20 * torch.randn(key[:, :, start:].shape, generator=torch.Generator().manual_seed(50))
        options = {"is_causal": True, "sparsity": sparsity, "score": score, "backend": backend}
        before = sparge.predict(query, key, **options).to_dense()[:, :, :6]
        assert 0 < before.sum() < 48, "some blocks are skipped"
        for future in (torch.tensor(5.0), noise):  # similar keys, dissimilar keys
            changed = key.clone()
            changed[:, :, start:] = future
            assert torch.equal(sparge.predict(query, changed, **options).to_dense()[:, :, :6], before)

    @pytest.mark.parametrize("offset", [-129, -128, -65, -64, -63, -2, -1, 1, 2, 61, 62, 63, 65, 66, 127])
    def test_every_offset_of_the_diagonal(self, offset: int) -> None:
        """The set of blocks on the diagonal changes within one or two keys of these offsets."""
        query, key, value = make_qkv(300, 300 + offset, head_dim=16)
        got = sparge.attention(query, key, value, is_causal=True, topk=1, **unquantized_options("torch"))
        assert_exact(got, query, key, value, is_causal=True)

    @backends
    @pytest.mark.parametrize("q_len, kv_len", [(200, 400), (400, 200)])
    def test_alignment_is_bottom_right(self, backend: str, q_len: int, kv_len: int) -> None:
        """Query i sees key i + S_k - S_q but not the next key."""
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
def test_batch_items_are_independent(backend: str, quantization: str, is_causal: bool) -> None:
    """The result of an item depends neither on the other items nor on its index."""
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
