"""Uninitialized memory, strides, repetition and batch order do not affect the result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import sparge
from conftest import causality, relative_l1
from gpu.conftest import (
    BACKEND,
    DEVICE,
    FASTEST,
    ON_CUDA,
    assert_matches_exact,
    assert_nearly_equal,
    equal,
    exact,
    make_inputs,
    modes,
    random_bits,
)
from sparge import TopCdf, TopK

pytestmark = pytest.mark.gpu
OPTIONS = {"enable_gqa": True, "return_lse": True, "backend": BACKEND}
poisoned = pytest.mark.usefixtures("poisoned_memory")


@poisoned
class TestUninitializedMemory:
    @modes
    @causality
    def test_query_blocks_without_key_blocks(self, is_causal: bool, quantization: str) -> None:
        """A query block that keeps no blocks gives 0 and -inf, even if its neighbors keep some."""
        query, key, value = make_inputs(300, 200, batch=2, heads=4, kv_heads=2)
        blocks = random_bits(2, 4, 3, 4, share=0.4)
        blocks[0, :, 1] = blocks[:, 2] = False
        call = {"is_causal": is_causal, "block_mask": blocks}
        got = sparge.block_sparse_attention(
            query, key, value, blocks, is_causal=is_causal, quantization=quantization, **OPTIONS
        )
        expected, expected_lse = exact(query, key, value, **call)
        empty = expected_lse == -math.inf
        assert empty[0, :, 128:256].all()
        assert torch.equal(got[1] == -math.inf, empty)
        assert (got[0][empty] == 0).all()
        if quantization == "none":
            assert_matches_exact(got, query, key, value, **call)
        else:
            assert relative_l1(got[0], expected) < 0.1

    def test_entries_after_a_list_have_no_effect(self) -> None:
        """Entries of kv_indices after kv_num_blocks are not kept."""
        query, key, value = make_inputs(300, 520, heads=2)
        mask = sparge.predict(query, key, topk=0.3, backend=BACKEND)
        expected = sparge.block_sparse_attention(query, key, value, mask, quantization="none", **OPTIONS)
        unlisted = torch.arange(9, device=DEVICE) >= mask.kv_num_blocks[..., None]
        mask.kv_indices.masked_fill_(unlisted, 8)
        assert equal(sparge.block_sparse_attention(query, key, value, mask, quantization="none", **OPTIONS), expected)

    @pytest.mark.parametrize("view", ["packed", "odd offset", "every second token", "every second channel"])
    def test_memory_between_the_elements_is_not_read(self, view: str) -> None:
        """Strided views, surrounded by NaN, give the same results as contiguous tensors."""
        tensors = make_inputs(129, 330, batch=2, heads=4, kv_heads=2, head_dim=72)
        views = []
        for tensor in tensors:
            start, step, axis = {
                "packed": (72, 1, 3),
                "odd offset": (3, 1, 3),
                "every second token": (0, 2, 2),
                "every second channel": (0, 2, 3),
            }[view]
            wide = list(tensor.shape)
            wide[axis] *= 3
            holder = torch.full(wide, math.nan, dtype=tensor.dtype, device=DEVICE)
            views.append(holder.narrow(axis, start, step * tensor.shape[axis]))
            views[-1] = views[-1][..., ::step] if axis == 3 else views[-1][:, :, ::step]
            views[-1].copy_(tensor)
        got = sparge.attention(*views, is_causal=True, topk=1, quantization="none", **OPTIONS)
        assert_matches_exact(got, *tensors, is_causal=True)
        sparse = {"is_causal": True, "topk": 0.3, "quantization": FASTEST, **OPTIONS}
        assert_nearly_equal(sparge.attention(*views, **sparse), sparge.attention(*tensors, **sparse))

    @pytest.mark.parametrize("head_dim, value_dim", [(8, 8), (33, 33), (100, 24), (64, 128), (8, 256), (256, 8)])
    def test_other_widths(self, head_dim: int, value_dim: int) -> None:
        query, key, value = make_inputs(200, 330, heads=2, kv_heads=1, head_dim=head_dim, value_dim=value_dim)
        got = sparge.attention(query, key, value, is_causal=True, topk=1, quantization="none", **OPTIONS)
        assert_matches_exact(got, query, key, value, is_causal=True)


class TestRepetition:
    @modes
    @pytest.mark.parametrize("sparsity", [TopK(0.4, min_blocks=1), TopCdf(0.7, min_blocks=1)], ids=["topk", "topcdf"])
    def test_1000_launches_are_bitwise_equal(self, sparsity: Any, quantization: str) -> None:
        query, key, value = make_inputs(700, heads=8, kv_heads=2)
        options = {"is_causal": True, "sparsity": sparsity, "quantization": quantization, **OPTIONS}
        first = sparge.attention(query, key, value, **options)
        differs = torch.zeros((), dtype=torch.bool, device=DEVICE)
        for _ in range(1000 if ON_CUDA else 3):
            again = sparge.attention(query, key, value, **options)
            for a, b in zip(again, first, strict=True):
                differs |= (a != b).any()
        assert not differs

    @poisoned
    @modes
    @causality
    def test_batch_items_are_independent(self, is_causal: bool, quantization: str) -> None:
        """The result of an item depends neither on the other items nor on its index."""
        query, key, value = make_inputs(170, 330, batch=3, heads=4, kv_heads=2)
        lengths = torch.tensor([330, 100, 222], device=DEVICE)
        seen = (torch.arange(330, device=DEVICE) < lengths[:, None])[:, None, None]
        has_mask = quantization != "int8_fp8_fast"  # does not support masks
        key[1] *= 3.0
        options = {"is_causal": is_causal, "quantization": quantization, **OPTIONS}
        options["sparsity"] = TopK(0.4, min_blocks=1, similarity_threshold=0.1)
        together = sparge.attention(query, key, value, seen if has_mask else None, **options)
        for items in ([2, 0, 1], [1], [2, 2]):
            mask = seen[items] if has_mask else None
            got = sparge.attention(query[items], key[items], value[items], mask, **options)
            assert equal(got, [tensor[items] for tensor in together])
