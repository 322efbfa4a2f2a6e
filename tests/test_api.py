"""The contract of the public functions, in numbers: against float64, under changes that must not matter, in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from conftest import (
    assert_exact,
    assert_within_budget,
    exact_attention,
    make_qkv,
    plain_attention,
    relative_l1,
    visible_elements,
)
from sparge import Dense, TopCdf, TopK, reference
from sparge.backends import torch_blocks, torch_online, torch_predict
from sparge.evaluate.inputs import text_like, video_like
from sparge.geometry import Shape

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.timeout(120)]

BACKENDS = ("torch", "reference")
backends = pytest.mark.parametrize("backend", BACKENDS)
causality = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
modes = pytest.mark.parametrize("quantization", ["none", "int8_fp8", "int8_fp16"])
SPARSE = {"sparsity": TopK(0.25, min_blocks=1, sink=False, diagonal=False)}

SHAPES = {
    "one token": {"q_len": 1},
    "63": {"q_len": 63},
    "127": {"q_len": 127, "head_dim": 40},
    "129": {"q_len": 129, "head_dim": 8},
    "200": {"q_len": 200, "head_dim": 72, "batch": 3},
    "one query": {"q_len": 1, "kv_len": 200, "heads": 6, "kv_heads": 2},
    "one key": {"q_len": 129, "kv_len": 1},
    "more keys": {"q_len": 127, "kv_len": 321, "heads": 6, "kv_heads": 2, "head_dim": 64},
    "more queries": {"q_len": 330, "kv_len": 129, "heads": 3, "kv_heads": 1},
    "wide": {"q_len": 130, "kv_len": 200, "head_dim": 256},
    "narrow value": {"q_len": 200, "head_dim": 72, "value_dim": 8, "heads": 6, "kv_heads": 2},
    "wide value": {"q_len": 63, "kv_len": 129, "head_dim": 8, "value_dim": 256},
    "whole blocks": {"q_len": 256, "kv_len": 256, "head_dim": 64},
}


def no_quantization(backend: str, **options: Any) -> dict[str, Any]:
    return {"backend": backend, "quantization": "none", "return_lse": True, "enable_gqa": True, **options}


@causality
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "backend, dtype",
    [
        ("torch", torch.float32),
        ("torch", torch.bfloat16),
        ("torch", torch.float16),
        ("reference", torch.float32),
        ("reference", torch.bfloat16),
    ],
)
def test_topk_1_is_exact(backend: str, is_causal: bool, dtype: torch.dtype, name: str) -> None:
    query, key, value = make_qkv(**SHAPES[name], dtype=dtype)
    got = sparge.attention(query, key, value, is_causal=is_causal, topk=1, **no_quantization(backend))
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32
    assert_exact(got, query, key, value, is_causal=is_causal)
    assert sparge.stats().reasons == {f"sparse: {backend}": 1}
    assert sparge.stats().density == 1.0


@causality
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "dtype, options, reason",
    [
        (torch.float32, {}, "below the crossover"),
        (torch.float16, {"sparsity": Dense()}, "sparsity=Dense()"),
        (torch.bfloat16, {"sparsity": Dense()}, "sparsity=Dense()"),
    ],
    ids=["crossover", "float16", "bfloat16"],
)
def test_dense_is_exact(is_causal: bool, name: str, dtype: torch.dtype, options: dict[str, Any], reason: str) -> None:
    query, key, value = make_qkv(**SHAPES[name], dtype=dtype)
    got = sparge.attention(query, key, value, is_causal=is_causal, enable_gqa=True, return_lse=True, **options)
    assert_exact(got, query, key, value, is_causal=is_causal)
    assert sparge.stats().reasons == {f"dense: {reason}": 1}


@backends
def test_dense_of_a_named_backend_is_exact(backend: str) -> None:
    query, key, value = make_qkv(200, 129, heads=6, kv_heads=2)
    got = sparge.attention(query, key, value, sparsity=Dense(), **no_quantization(backend))
    assert_exact(got, query, key, value)


def as_views(kind: str, tensor: Tensor) -> Tensor:
    """The same numbers in other strides."""
    if kind == "heads last":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "slice of a packed tensor":
        packed = torch.full((*tensor.shape[:3], 3 * tensor.shape[3]), math.nan, dtype=tensor.dtype)
        packed[..., 3 : 3 + tensor.shape[3]] = tensor
        return packed[..., 3 : 3 + tensor.shape[3]]
    if kind == "every second channel":
        wide = torch.full((*tensor.shape[:3], 2 * tensor.shape[3]), math.nan, dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if kind == "channels first":
        return tensor.mT.contiguous().mT
    if kind == "every second token":
        return tensor.repeat_interleave(2, 2)[:, :, ::2]
    return tensor


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@causality
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    "view",
    ["plain", "heads last", "slice of a packed tensor", "every second channel", "channels first", "every second token"],
)
def test_layouts_and_strides(backend: str, is_causal: bool, layout: str, view: str) -> None:
    tensors = make_qkv(129, 200, batch=2, heads=6, kv_heads=2, value_dim=24)
    views = [as_views(view, tensor) for tensor in tensors]
    copies = [tensor.clone() for tensor in views]
    given = [tensor.transpose(1, 2) for tensor in views] if layout == "NHD" else views
    options = {"sparsity": Dense()} if backend == "auto" else {"topk": 1.0}
    output, lse = sparge.attention(
        *given, is_causal=is_causal, layout=layout, **options, enable_gqa=True, return_lse=True, backend=backend
    )
    output = output.transpose(1, 2) if layout == "NHD" else output
    assert_exact((output, lse), *tensors, is_causal=is_causal)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(views, copies, strict=True)), "an input was written to"


@backends
def test_predict_and_block_sparse_in_both_layouts(backend: str) -> None:
    query, key, value = make_qkv(300, 520, heads=6, kv_heads=2)
    swapped = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    options = {"enable_gqa": True, "backend": backend}
    mask = sparge.predict(query, key, is_causal=True, **SPARSE, **options)
    other = sparge.predict(*swapped[:2], is_causal=True, layout="NHD", **SPARSE, **options)
    assert torch.equal(mask.to_dense(), other.to_dense())
    got = sparge.block_sparse_attention(query, key, value, mask, return_lse=True, **options)
    assert_exact(got, query, key, value, is_causal=True, block_mask=mask.to_dense())
    output, lse = sparge.block_sparse_attention(*swapped, mask, return_lse=True, layout="NHD", **options)
    assert_exact((output.transpose(1, 2), lse), query, key, value, is_causal=True, block_mask=mask.to_dense())


@backends
@pytest.mark.parametrize("scale", [0.0, 0.03, 2.0, -0.5])
def test_scale_of_attention(backend: str, scale: float) -> None:
    query, key, value = make_qkv(129, 200)
    got = sparge.attention(query, key, value, scale=scale, topk=1, **no_quantization(backend))
    assert_exact(got, query, key, value, scale=scale)
    got = sparge.attention(query, key, value, scale=scale, sparsity=Dense(), return_lse=True)
    assert_exact(got, query, key, value, scale=scale)


@backends
@pytest.mark.parametrize("score", ["moment", "mean"])
def test_scale_of_the_prediction(backend: str, score: str) -> None:
    sample = video_like((4, 16, 16), heads=2, head_dim=16)
    query, key = sample.query, sample.key
    options = {"sparsity": TopCdf(0.8, min_blocks=1), "score": score, "backend": backend}
    masks = {scale: sparge.predict(query, key, scale=scale, **options) for scale in (0.0, 0.25, 1.0)}
    assert torch.equal(masks[1.0].to_dense(), sparge.predict(4 * query, key, scale=0.25, **options).to_dense())
    assert torch.equal(masks[0.25].to_dense(), sparge.predict(query, key, **options).to_dense()), "1 / sqrt(16)"
    assert (masks[0.0].kv_num_blocks == 13).all(), "uniform: 13 of 16 blocks cover .8"
    assert masks[1.0].density() < masks[0.25].density() < masks[0.0].density()


class TestEmptyRows:
    @backends
    @modes
    def test_causal_with_more_queries_than_keys(self, backend: str, quantization: str) -> None:
        query, key, value = make_qkv(330, 129, heads=6, kv_heads=2)
        output, lse = sparge.attention(
            query,
            key,
            value,
            is_causal=True,
            enable_gqa=True,
            return_lse=True,
            backend=backend,
            quantization=quantization,
        )
        assert (output[:, :, :201] == 0).all()
        assert (lse[:, :, :201] == -math.inf).all()
        assert lse[:, :, 201:].isfinite().all()
        assert (output[:, :, 201:] != 0).any(-1).all()

    @backends
    @modes
    @pytest.mark.parametrize("pv_threshold", [None, -3.0])
    def test_rows_and_blocks_that_a_mask_empties(
        self, backend: str, quantization: str, pv_threshold: float | None
    ) -> None:
        query, key, value = make_qkv(300, 200)
        seen = torch.ones(300, 200, dtype=torch.bool)
        seen[5] = seen[128:256] = seen[299] = False
        output, lse = sparge.attention(
            query,
            key,
            value,
            seen,
            sparsity=TopK(1, pv_threshold=pv_threshold),
            return_lse=True,
            backend=backend,
            quantization=quantization,
        )
        empty = ~seen.any(-1)
        assert (output[:, :, empty] == 0).all()
        assert (lse[:, :, empty] == -math.inf).all()
        assert lse[:, :, ~empty].isfinite().all()

    @backends
    @modes
    @causality
    def test_block_masks_with_empty_rows(self, backend: str, quantization: str, is_causal: bool) -> None:
        query, key, value = make_qkv(300, 200)
        blocks = torch.zeros(3, 4, dtype=torch.bool)
        blocks[0, 1] = blocks[2, 3] = True
        call = {"is_causal": is_causal, "block_mask": blocks}
        output, lse = sparge.block_sparse_attention(
            query,
            key,
            value,
            blocks,
            is_causal=is_causal,
            return_lse=True,
            backend=backend,
            quantization=quantization,
        )
        seen, _ = visible_elements(query, key, **call)
        empty = ~seen.any(-1)
        assert empty.any() and not empty.all()
        assert (output[empty] == 0).all()
        assert (lse[empty] == -math.inf).all()
        if quantization == "none":
            assert_exact((output, lse), query, key, value, **call)

    @backends
    def test_nothing_is_visible_at_all(self, backend: str) -> None:
        query, key, value = make_qkv(130)
        hidden = torch.zeros(1, 1, 1, 130, dtype=torch.bool)
        for sparsity in (TopK(0.5), TopCdf(0.9, similarity_threshold=0.5), Dense()):
            output, lse = sparge.attention(
                query, key, value, hidden, sparsity=sparsity, return_lse=True, backend=backend
            )
            assert (output == 0).all()
            assert (lse == -math.inf).all()
        assert sparge.predict(query, key, attn_mask=hidden, backend=backend).density() == 0.0

    @backends
    @pytest.mark.parametrize("head_dims", [(32, 32), (32, 16)], ids=["equal", "different"])
    def test_the_query_of_an_empty_row_does_not_matter(self, backend: str, head_dims: tuple[int, int]) -> None:
        """Left padding: nobody reads such a query, so what lies in its memory must not show."""
        query, key, value = make_qkv(130, head_dim=head_dims[0], value_dim=head_dims[1])
        seen = torch.ones(130, 130, dtype=torch.bool)
        seen[3] = False
        query[:, :, 3] = math.nan
        output, lse = sparge.attention(query, key, value, seen, topk=1, **no_quantization(backend))
        assert (output[:, :, 3] == 0).all()
        assert (lse[:, :, 3] == -math.inf).all()


def masks(q_len: int, kv_len: int, batch: int, heads: int) -> dict[str, Tensor]:
    """Masks of every kind and shape that attention takes."""
    generator = torch.Generator().manual_seed(7)

    def bits(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < 0.6

    def bias(*shape: int) -> Tensor:
        return 2 * torch.randn(shape, generator=generator)

    padding = torch.arange(kv_len) < torch.tensor([kv_len, kv_len // 2, 3])[:batch, None]
    lowest = torch.finfo(torch.float32).min
    per_head = bits(batch, heads, q_len, kv_len)
    per_head[:, 1, 10:20] = False
    return {
        "bool": bits(q_len, kv_len),
        "bool per head": per_head,
        "bool per key": bits(kv_len),
        "bool per head and key": bits(1, heads, 1, kv_len),
        "bool per query": bits(batch, 1, q_len, 1),
        "key padding": padding[:, None, None],
        "additive key padding": torch.zeros(padding.shape).masked_fill(~padding, lowest)[:, None, None],
        "additive": bias(batch, 1, q_len, kv_len),
        "additive per key": bias(1, heads, 1, kv_len),
        "additive with -inf": bias(q_len, kv_len).masked_fill(~bits(q_len, kv_len), -math.inf),
        "additive with the lowest number": bias(heads, q_len, kv_len).masked_fill(~bits(q_len, kv_len), lowest),
        "additive in float16": bias(q_len, kv_len).half().masked_fill(~bits(q_len, kv_len), -65504.0),
        "sliding window": torch.ones(q_len, kv_len, dtype=torch.bool).tril(40).triu(-40),
    }


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@causality
@pytest.mark.parametrize("kind", masks(1, 1, 1, 2))
@pytest.mark.parametrize("value_dim", [16, 8])
def test_masks_are_honoured(backend: str, is_causal: bool, kind: str, value_dim: int) -> None:
    query, key, value = make_qkv(140, 200, batch=3, heads=2, kv_heads=1, head_dim=16, value_dim=value_dim)
    mask = masks(140, 200, 3, 2)[kind]
    topk = {} if backend == "auto" else {"topk": 1.0}
    got = sparge.attention(
        query, key, value, mask, is_causal=is_causal, **topk, enable_gqa=True, return_lse=True, backend=backend
    )
    assert_exact(got, query, key, value, is_causal=is_causal, attn_mask=mask)


@backends
@causality
@pytest.mark.parametrize("kind", ["bool per head", "key padding", "additive with -inf", "sliding window"])
def test_masks_and_sparsity_together(backend: str, is_causal: bool, kind: str) -> None:
    """The sparse result is exact attention over the blocks that `predict` names for the same call."""
    query, key, value = make_qkv(140, 640, batch=2, heads=4, kv_heads=2, head_dim=16)
    mask = masks(140, 640, 2, 4)[kind]
    call = {"is_causal": is_causal, "attn_mask": mask, "enable_gqa": True, "backend": backend}
    got = sparge.attention(query, key, value, return_lse=True, quantization="none", **SPARSE, **call)
    blocks = sparge.predict(query, key, **SPARSE, **call)
    assert 0 < blocks.density() < 0.5
    assert_exact(got, query, key, value, is_causal=is_causal, attn_mask=mask, block_mask=blocks.to_dense())
    assert sparge.stats().density == pytest.approx(blocks.density(), abs=1e-12)


SPARSITIES = {
    "TopK": TopK(0.3, min_blocks=1),
    "TopCdf": TopCdf(0.7, min_blocks=1, similarity_threshold=0.05),
    "Dense": Dense(),
}


@backends
@modes
@causality
@pytest.mark.parametrize("sparsity", SPARSITIES.values(), ids=SPARSITIES)
@pytest.mark.parametrize("form", ["bool", "additive", "element"])
def test_hidden_keys_do_not_matter(backend: str, quantization: str, is_causal: bool, sparsity: Any, form: str) -> None:
    query, key, value = make_qkv(50, 400, heads=2, kv_heads=1, head_dim=16)
    hidden = torch.arange(400) >= 270
    hidden[17] = hidden[64:128] = True
    mask = ~hidden
    if form == "additive":
        mask = torch.zeros(400).masked_fill(hidden, -math.inf)
    elif form == "element":
        mask = mask.expand(50, 400).clone()
        mask[3, :100] = False
    results = []
    for padding in (0.0, 1e30, math.nan):
        key[:, :, hidden] = value[:, :, hidden] = padding
        options = {"is_causal": is_causal, "sparsity": sparsity, "score": "moment"}
        results.append(
            sparge.attention(
                query,
                key,
                value,
                mask,
                enable_gqa=True,
                return_lse=True,
                backend=backend,
                quantization=quantization,
                **options,
            )
        )
    assert results[0][0].isfinite().all()
    for output, lse in results[1:]:
        assert torch.equal(output, results[0][0])
        assert torch.equal(lse, results[0][1])


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

    RULES = pytest.mark.parametrize(
        "sparsity",
        [
            TopK(0.4, min_blocks=1, sink=False, diagonal=False),
            TopCdf(0.6, min_blocks=1),
            TopK(0.4, min_blocks=1, sink=False, diagonal=False, similarity_threshold=0.3),
        ],
        ids=["topk", "topcdf", "judge"],
    )

    @backends
    @FUTURES
    @pytest.mark.parametrize("score", ["moment", "mean"])
    @RULES
    def test_the_prediction_leaks_nothing(self, backend: str, future: float, score: str, sparsity: Any) -> None:
        tensors = make_qkv(1000, heads=1, head_dim=16)
        tensors[0].add_(2.0)  # queries that agree, and every other key block too: the judge lets some pass
        directions = 2 * torch.randn(8, 1, 16, generator=torch.Generator().manual_seed(8))
        tensors[1][:, :, :896].view(7, 2, 64, 16)[:, 0].add_(directions[:7])
        options = {"is_causal": True, "sparsity": sparsity, "score": score, "backend": backend}
        given = (tensors, self.changed(tensors, future))
        before, after = (sparge.predict(*qkv[:2], **options).to_dense()[:, :, :6] for qkv in given)
        assert 0 < before.sum() < 42, "a choice was made"
        assert torch.equal(before, after)
        before, after = (sparge.attention(*qkv, quantization="none", **options) for qkv in given)
        assert torch.equal(before[:, :, : self.BLOCK_START], after[:, :, : self.BLOCK_START])

    @backends
    @pytest.mark.parametrize("score", ["moment", "mean"])
    @pytest.mark.parametrize("sparsity", [TopK(0.4, min_blocks=1), TopCdf(0.6, min_blocks=1)], ids=["topk", "topcdf"])
    def test_the_prediction_leaks_nothing_behind_an_odd_prefix(self, backend: str, score: str, sparsity: Any) -> None:
        """A chunk of queries after 30 cached keys: key blocks reach past the last query of a query block."""
        query, key, _ = make_qkv(1000, 1030, heads=1, head_dim=16)
        changed = key.clone()
        changed[:, :, self.BLOCK_START + 30 :] = 5.0  # the first key that query block 5 does not see
        options = {"is_causal": True, "sparsity": sparsity, "score": score, "backend": backend}
        before, after = (sparge.predict(query, keys, **options).to_dense()[:, :, :6] for keys in (key, changed))
        assert torch.equal(before, after)

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
    """An item's result depends neither on its neighbours nor on its place among them."""
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


class TestNonFinite:
    """NaN and Inf reach every row that may see them, as in SDPA, and no earlier block."""

    PLACE = 300

    def run(self, which: str, bad: float, **options: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        tensors = list(make_qkv(320, head_dim=16))
        tensors["qkv".index(which)][0, 0, self.PLACE, 3] = bad
        output, lse = sparge.attention(*tensors, enable_gqa=True, return_lse=True, **options)
        return output, lse, tensors

    @backends
    @modes
    @causality
    @pytest.mark.parametrize("score", ["moment", "mean"])
    @pytest.mark.parametrize("topk", [1.0, 0.1])
    def test_nan_key(self, backend: str, quantization: str, is_causal: bool, score: str, topk: float) -> None:
        sparsity = TopK(topk, min_blocks=1, sink=False, diagonal=False)  # some rows keep nothing: their LSE is -inf
        output, lse, _ = self.run(
            "k",
            math.nan,
            is_causal=is_causal,
            backend=backend,
            quantization=quantization,
            sparsity=sparsity,
            score=score,
        )
        first = self.PLACE if is_causal else 0
        assert output[:, 0, first:].isnan().all()
        assert lse[:, 0, first:].isnan().all()
        assert output[:, 1:].isfinite().all()
        if is_causal:
            assert output[:, :, :256].isfinite().all()
            assert not lse[:, :, :256].isnan().any()

    @backends
    @modes
    @causality
    @pytest.mark.parametrize("score", ["moment", "mean"])
    @pytest.mark.parametrize("sparsity", [TopK(1), TopK(0.1, min_blocks=1)], ids=["full", "sparse"])
    @pytest.mark.parametrize("bad", [math.inf, -math.inf])
    def test_infinite_key(
        self, backend: str, quantization: str, is_causal: bool, score: str, sparsity: Any, bad: float
    ) -> None:
        """A score of +inf is NaN after softmax, one of -inf is weight 0: rows that are NaN in SDPA are NaN here."""
        output, _, tensors = self.run(
            "k", bad, is_causal=is_causal, backend=backend, quantization=quantization, sparsity=sparsity, score=score
        )
        exact, _ = exact_attention(*tensors, is_causal=is_causal)
        assert exact[:, 0].isnan().any() and exact[:, 0].isfinite().any()
        assert output[exact.isnan()].isnan().all()
        assert output[:, 1:].isfinite().all()
        if is_causal:
            assert output[:, :, :256].isfinite().all()

    @backends
    @modes
    @causality
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_query(self, backend: str, quantization: str, is_causal: bool, bad: float) -> None:
        output, _, _ = self.run("q", bad, is_causal=is_causal, backend=backend, quantization=quantization, **SPARSE)
        assert output[:, 0, self.PLACE].isnan().all()
        assert output[:, 1:].isfinite().all()
        assert output[:, :, :256].isfinite().all()

    @backends
    @modes
    @causality
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_value(self, backend: str, quantization: str, is_causal: bool, bad: float) -> None:
        output, lse, tensors = self.run(
            "v", bad, is_causal=is_causal, backend=backend, quantization=quantization, topk=1
        )
        first = self.PLACE if is_causal else 0
        assert not output[:, 0, first:, 3].isfinite().any()
        others = [channel for channel in range(16) if channel != 3]
        assert output[..., others].isfinite().all()
        assert output[:, 1:].isfinite().all()
        assert lse.isfinite().all()
        if is_causal:
            assert output[:, :, :256].isfinite().all(), "these rows cannot see the value"
        if quantization == "none":
            exact, _ = exact_attention(*tensors, is_causal=is_causal)
            assert torch.equal(output[:, :, first:].isnan(), exact[:, :, first:].isnan())

    @backends
    @modes
    @pytest.mark.parametrize("pv_threshold", [None, -2.0])
    def test_everything_is_nan(self, backend: str, quantization: str, pv_threshold: float | None) -> None:
        query, key, value = (torch.full((1, 2, 200, 16), math.nan) for _ in range(3))
        for sparsity in (TopK(0.3, min_blocks=1, pv_threshold=pv_threshold), TopCdf(0.5, similarity_threshold=0.5)):
            output = sparge.attention(
                query, key, value, sparsity=sparsity, backend=backend, quantization=quantization, is_causal=True
            )
            assert output.isnan().all()

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_nan_in_an_additive_mask(self, backend: str) -> None:
        query, key, value = make_qkv(200)
        mask = torch.zeros(200, 200)
        mask[7, 9] = math.nan
        output = sparge.attention(query, key, value, mask, topk=1, backend=backend)
        assert output[:, :, 7].isnan().all()
        assert output[:, :, torch.arange(200) != 7].isfinite().all()


class TestSelection:
    @backends
    @causality
    def test_always_keep_keeps(self, backend: str, is_causal: bool) -> None:
        query, key, value = make_qkv(512, 1024, head_dim=16)
        value.zero_()
        value[:, :, 700] = 1.0
        options = {
            "is_causal": is_causal,
            "sparsity": TopK(0.3, min_blocks=1, sink=False, diagonal=False),
            "backend": backend,
        }
        plain = sparge.predict(query, key, **options)
        kept = sparge.predict(query, key, always_keep=[(100, 130), (700, 701)], **options)
        dense, visible = kept.to_dense(), sparge.predict(query, key, is_causal=is_causal, sparsity=Dense()).to_dense()
        for column in (1, 2, 10):
            assert torch.equal(dense[..., column], visible[..., column])
            assert not torch.equal(plain.to_dense()[..., column], visible[..., column])
        assert torch.equal(kept.kv_num_blocks, plain.kv_num_blocks), "forced blocks count towards the budget"
        output = sparge.attention(query, key, value, always_keep=[(700, 701)], quantization="none", **options)
        sees = torch.arange(512) + 512 >= 700 if is_causal else torch.ones(512, dtype=torch.bool)
        assert (output[:, :, sees] > 0).all()
        assert (output[:, :, ~sees] == 0).all()

    @backends
    def test_sink_and_diagonal_by_default_when_causal(self, backend: str) -> None:
        query, key, _ = make_qkv(512, 1024, head_dim=16)
        thin = TopK(0.01, min_blocks=1)
        causal = sparge.predict(query, key, is_causal=True, sparsity=thin, backend=backend).to_dense()
        for row in range(4):
            expected = torch.zeros(16, dtype=torch.bool)
            expected[[0, 8 + 2 * row, 9 + 2 * row]] = True
            assert torch.equal(causal[:, :, row], expected.expand(1, 2, 16))
        free = sparge.predict(query, key, sparsity=thin, backend=backend)
        assert (free.kv_num_blocks == 1).all()

    @backends
    @pytest.mark.parametrize("score", ["moment", "mean"])
    @pytest.mark.parametrize("bias", [-math.inf, -65504.0, -1e4])
    def test_a_finite_bias_that_hides_does_not_condemn_its_block(self, backend: str, score: str, bias: float) -> None:
        """Padding as (1 - mask) * -10000, or float16's lowest number in a float32 mask, hides keys, not their block."""
        query, key, _ = make_qkv(128, 1024, head_dim=16)
        direction = torch.randn(16, generator=torch.Generator().manual_seed(9))
        query += direction
        key[:, :, 960:1000] += 3 * direction  # the last block, 40 keys and 24 of padding, holds nearly all the mass
        mask = torch.zeros(1024)
        mask[1000:] = bias
        mass = (query @ key.mT * 0.25 + mask).softmax(-1)[..., 960:].sum(-1)
        assert mass.mean() > 0.9
        sparsity = TopK(0.25, min_blocks=1)
        blocks = sparge.predict(query, key, attn_mask=mask, sparsity=sparsity, score=score, backend=backend)
        assert blocks.to_dense()[..., 15].all()

    @backends
    def test_per_head_budgets(self, backend: str) -> None:
        query, key, _ = make_qkv(256, 1280, heads=4, kv_heads=2, head_dim=16)
        shares = torch.tensor([0.1, 0.25, 0.5, 1.0])
        mask = sparge.predict(query, key, sparsity=TopK(shares, min_blocks=0), enable_gqa=True, backend=backend)
        assert mask.kv_num_blocks[0].tolist() == [[2, 2], [5, 5], [10, 10], [20, 20]]

    @pytest.mark.parametrize("score", ["moment", "mean"])
    def test_error_falls_as_density_rises(self, score: str) -> None:
        sample = text_like(2048, heads=2)
        exact, _ = exact_attention(sample.query, sample.key, sample.value, is_causal=True)
        errors, densities = [], []
        for topk in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0):
            sparge.reset_stats()
            output = sparge.attention(
                sample.query,
                sample.key,
                sample.value,
                is_causal=True,
                sparsity=TopK(topk, min_blocks=1),
                score=score,
                backend="torch",
            )
            errors.append(relative_l1(output, exact))
            densities.append(sparge.stats().density)
        assert densities == sorted(densities) and densities[-1] == 1.0
        assert all(after < 1.02 * before for before, after in pairwise(errors)), errors
        assert errors[-1] < 1e-6 < 0.05 < errors[0]


class TestDenseDecision:
    @pytest.mark.parametrize(
        "heads, q_len, kv_len, reason",
        [
            (32, 128, 2048, "sparse: torch"),
            (33, 128, 2047, "dense: below the crossover"),
            (33, 127, 2048, "dense: below the crossover"),
            (31, 128, 2048, "dense: below the crossover"),
            (1, 1, 4096, "dense: below the crossover"),
        ],
    )
    def test_crossover(self, heads: int, q_len: int, kv_len: int, reason: str) -> None:
        query, key, value = make_qkv(q_len, kv_len, heads=heads, head_dim=16)
        output = sparge.attention(query, key, value, topk=0.5)
        stats = sparge.stats()
        assert stats.reasons == {reason: 1}
        dense = reason.startswith("dense")
        assert (stats.calls, stats.sparse, stats.dense) == (1, int(not dense), int(dense))
        assert stats.density == (None if dense else 0.5)
        error = relative_l1(output, exact_attention(query, key, value)[0])
        assert error < 1e-5 if dense else error > 1e-3

    @backends
    def test_a_named_backend_does_not_go_dense(self, backend: str) -> None:
        query, key, value = make_qkv(200)
        output = sparge.attention(query, key, value, backend=backend, **SPARSE)
        assert sparge.stats().reasons == {f"sparse: {backend}": 1}
        mask = sparge.predict(query, key, backend=backend, **SPARSE)
        assert (mask.kv_num_blocks == 1).all()
        exact, _ = exact_attention(query, key, value, block_mask=mask.to_dense())
        assert_within_budget(output, exact, plain_attention(query, key, value, block_mask=mask.to_dense()))

    def test_counts_add_up(self) -> None:
        query, key, value = make_qkv(200)
        for _ in range(2):
            sparge.attention(query, key, value)
        sparge.attention(query, key, value, sparsity=Dense())
        half = torch.zeros(2, 4, dtype=torch.bool)
        half[:, :2] = True
        sparge.block_sparse_attention(query, key, value, half)
        sparge.predict(query, key)
        stats = sparge.stats()
        assert stats.reasons == {
            "dense: below the crossover": 2,
            "dense: sparsity=Dense()": 1,
            "sparse: torch": 1,
        }
        assert (stats.calls, stats.sparse, stats.dense, stats.density) == (4, 1, 3, 0.5)
        sparge.reset_stats()
        assert sparge.stats() == sparge.Stats(0, 0, 0, {}, None)

    def test_threads(self) -> None:
        """Concurrent calls count exactly and give what they give alone."""
        jobs = []
        for index in range(24):
            query, key, value = make_qkv(200 + index, 300, seed=index)
            call = {"is_causal": index % 2 == 0, "backend": "torch", **SPARSE}
            jobs.append(lambda qkv=(query, key, value), call=call: sparge.attention(*qkv, **call))
        alone = [job() for job in jobs]
        serial = sparge.stats()
        sparge.reset_stats()
        with ThreadPoolExecutor(8) as pool:
            together = [future.result() for future in [pool.submit(job) for job in jobs]]
        assert sparge.stats() == serial
        assert serial.reasons == {"sparse: torch": 24}
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def smooth(offset: float) -> tuple[Tensor, Tensor, Tensor]:
    """A smooth field whose keys carry a channel offset."""
    sample = video_like((4, 16, 16), heads=2, seed=3)
    direction = torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(8))
    return sample.query, sample.key + offset * direction, sample.value


def score_deviation(query: Tensor, key: Tensor) -> float:
    """Largest standard deviation of a score whose factors were rounded to INT8, per block and after smoothing.

    Rounding to a grid of step s has variance s^2 / 12; a step is absmax / 127 of the block.
    """
    key = key - key.mean(2, keepdim=True)
    query_step, key_step = (
        tensor.unflatten(2, (-1, block)).abs().amax((-2, -1)).repeat_interleave(block, -1) / 127
        for tensor, block in ((query, 128), (key, 64))
    )
    from_query = query_step.square()[..., None] * key.square().sum(-1)[..., None, :]
    from_key = query.square().sum(-1)[..., None] * key_step.square()[..., None, :]
    return float((from_query + from_key).amax() / 12) ** 0.5 * query.shape[-1] ** -0.5


class TestQuantised:
    @backends
    @causality
    @pytest.mark.parametrize("quantization, low, high", [("int8_fp8", 0.01, 0.02), ("int8_fp16", 0.001, 0.004)])
    def test_dense_error_and_lse(
        self, backend: str, is_causal: bool, quantization: str, low: float, high: float
    ) -> None:
        """E4M3 rounds by up to 1/16, about .015 on average; 8 bits of Q and K alone cost about .003.

        The LSE moves as the scores do: .015 on average, six deviations at worst. An offset of the keys changes neither.
        """
        errors = []
        for offset in (0.0, 30.0):
            query, key, value = smooth(offset)
            query = query[:, :, -128:]
            output, lse = sparge.attention(
                query,
                key,
                value,
                is_causal=is_causal,
                sparsity=Dense(),
                quantization=quantization,
                return_lse=True,
                backend=backend,
            )
            exact, exact_lse = exact_attention(query, key, value, is_causal=is_causal)
            errors.append(relative_l1(output, exact))
            moved = (lse - exact_lse).abs()
            assert moved.square().mean().sqrt() < 2e-2
            assert moved.max() < 6 * score_deviation(query, key)
        assert low < errors[0] < high
        assert errors[1] == pytest.approx(errors[0], rel=0.01)

    @backends
    @pytest.mark.parametrize("quantization, bound", [("int8_fp8", 0.02), ("int8_fp16", 0.006)])
    def test_sparse_error_is_that_of_8_bits(self, backend: str, quantization: str, bound: float) -> None:
        """Against exact attention over the same blocks; grouped heads, ragged lengths, padding."""
        query, key, value = smooth(5.0)
        query, key, value = query[:, :, 500:900], key[:, :1, :1000], value[:, :1, :1000]
        padding = (torch.arange(1000) < 950)[None, None, None]
        call = {"attn_mask": padding, "is_causal": True, "enable_gqa": True, "backend": backend}
        sparsity = TopK(0.4, min_blocks=1)
        output = sparge.attention(query, key, value, quantization=quantization, sparsity=sparsity, **call)
        blocks = sparge.predict(query, key, sparsity=sparsity, **call)
        assert blocks.density() < 0.6
        exact, _ = exact_attention(query, key, value, attn_mask=padding, is_causal=True, block_mask=blocks.to_dense())
        assert relative_l1(output, exact) < bound

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_16_bit_inputs(self, dtype: torch.dtype) -> None:
        query, key, value = (tensor.to(dtype) for tensor in smooth(2.0))
        output = sparge.attention(query, key, value, sparsity=Dense(), quantization="int8_fp8")
        assert output.dtype == dtype
        assert relative_l1(output, exact_attention(query, key, value)[0]) < 0.02


class TestPvThreshold:
    def call(
        self, sample: Any, pv_threshold: Any, *, quantization: str = "none", scale: float = 0.125
    ) -> reference.AttentionResult:
        shape = Shape(1, 2, 2, 512, 512, 64, 64)
        mask = sparge.predict(sample.query, sample.key, is_causal=True, sparsity=Dense())
        return reference.attention(
            sample.query,
            sample.key,
            sample.value,
            mask,
            shape,
            scale=scale,
            quantization=quantization,
            pv_threshold=pv_threshold,
        )

    @backends
    @modes
    def test_a_very_low_one_changes_nothing(self, backend: str, quantization: str) -> None:
        sample = text_like(512, heads=2)
        results = [
            sparge.attention(
                sample.query,
                sample.key,
                sample.value,
                is_causal=True,
                sparsity=TopK(0.5, min_blocks=1, pv_threshold=threshold),
                return_lse=True,
                backend=backend,
                quantization=quantization,
            )
            for threshold in (-math.inf, -1e4, None)
        ]
        for ours, other, plain in zip(*results, strict=True):
            assert torch.equal(ours, other)
            torch.testing.assert_close(ours, plain, rtol=0, atol=5e-6)

    @backends
    def test_a_moderate_one_skips_and_changes_little(self, backend: str) -> None:
        """Every skipped probability is below exp(threshold) of the row's largest, and at most 512 are skipped."""
        sample = text_like(512, heads=2)
        threshold, scale = -12.0, 0.5
        hidden = self.call(sample, -1e4, scale=scale).pv_skipped  # 64 rows that see nothing of a diagonal block
        assert (hidden == 1).all()
        assert (self.call(sample, threshold, scale=scale).pv_skipped > hidden).any()
        output, lse = sparge.attention(
            sample.query,
            sample.key,
            sample.value,
            is_causal=True,
            scale=scale,
            sparsity=TopK(1, pv_threshold=threshold),
            return_lse=True,
            backend=backend,
        )
        call = {"is_causal": True, "scale": scale}
        exact, exact_lse = exact_attention(sample.query, sample.key, sample.value, **call)
        lost = 512 * math.exp(threshold)
        assert (output - exact).abs().max() < 2 * lost * sample.value.abs().max()
        assert (lse - exact_lse).abs().max() < lost

    @backends
    def test_per_head(self, backend: str) -> None:
        sample = text_like(512, heads=2)
        call = {"is_causal": True, "backend": backend, "return_lse": True}
        tensors = (sample.query, sample.key, sample.value)
        mask = sparge.predict(*tensors[:2], is_causal=True, sparsity=Dense())
        results = [
            sparge.block_sparse_attention(*tensors, mask, pv_threshold=threshold, **call)
            for threshold in (torch.tensor([-1e4, -3.0]), -1e4, -3.0)
        ]
        for mixed, never, often in zip(*results, strict=True):
            assert torch.equal(mixed[:, 0], never[:, 0])
            assert torch.equal(mixed[:, 1], often[:, 1])
            assert not torch.equal(never[:, 1], often[:, 1])

    @backends
    @modes
    def test_backends_skip_alike(self, backend: str, quantization: str) -> None:
        sample = text_like(512, heads=2)
        expected = self.call(sample, -4.0, quantization=quantization)
        assert int(expected.pv_skipped.sum()) > 0
        output, lse = sparge.attention(
            sample.query,
            sample.key,
            sample.value,
            is_causal=True,
            sparsity=TopK(1, pv_threshold=-4.0),
            return_lse=True,
            backend=backend,
            quantization=quantization,
        )
        # Codes that round the other way in float32 move an output by an FP8 step of one probability.
        assert relative_l1(output, expected.output) < (1e-6 if quantization == "none" else 1e-3)
        assert (lse - expected.lse).abs().max() < (1e-5 if quantization == "none" else 1e-3)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class TestSurroundings:
    """Global settings of torch, chunk sizes and calling conventions change nothing."""

    OPTIONS = pytest.mark.parametrize(
        "options",
        [
            {"quantization": "none"},
            {"quantization": "int8_fp8"},
            {"quantization": "int8_fp16"},
            {"sparsity": TopK(0.4, min_blocks=1, similarity_threshold=0.1, pv_threshold=-3.0)},
            {"sparsity": TopCdf(0.6, min_blocks=1), "score": "mean"},
            {"sparsity": Dense()},
        ],
        ids=["none", "fp8", "fp16", "topk", "topcdf", "dense"],
    )

    def results(
        self, value_dim: int, options: dict[str, Any], backend: str, under: AbstractContextManager[Any] | None = None
    ) -> tuple[Tensor, ...]:
        query, key, value = make_qkv(200, 400, heads=2, kv_heads=1, value_dim=value_dim)
        mask = torch.randn(1, 2, 1, 400, generator=torch.Generator().manual_seed(4))
        call = {"is_causal": True, "enable_gqa": True, "return_lse": True, "backend": backend, **options}
        with under or nullcontext():
            return (
                *sparge.attention(query, key, value, **call),
                *sparge.attention(query, key, value, mask, **call),
            )

    @pytest.mark.parametrize("backend", ["auto", *BACKENDS])
    @OPTIONS
    @pytest.mark.parametrize("value_dim", [32, 16])
    def test_autocast(self, backend: str, options: dict[str, Any], value_dim: int) -> None:
        """The arithmetic is ours: autocast must neither lower it nor break it."""
        expected = self.results(value_dim, options, backend)
        got = self.results(value_dim, options, backend, under=torch.autocast("cpu", torch.bfloat16))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    @pytest.mark.parametrize("backend", ["auto", *BACKENDS])
    @OPTIONS
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
    def test_default_dtype(self, backend: str, options: dict[str, Any], dtype: torch.dtype) -> None:
        expected = self.results(16, options, backend)
        got = self.results(16, options, backend, under=default_dtype(dtype))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    @OPTIONS
    def test_chunk_sizes(self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        expected = self.results(32, options, "torch")
        monkeypatch.setattr(torch_blocks, "CHUNK_BYTES", 1)
        monkeypatch.setattr(torch_predict, "CHUNK_BYTES", 1)
        monkeypatch.setattr(torch_online, "ROWS_AT_A_TIME", 3)
        got = self.results(32, options, "torch")
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    def test_positional_arguments_are_those_of_sdpa(self) -> None:
        query, key, value = make_qkv(70, 100, heads=4, kv_heads=2)
        mask = torch.randn(70, 100, generator=torch.Generator().manual_seed(4))
        arguments = (query, key, value, mask, 0.0, False, 0.3, True)
        exact, _ = exact_attention(query, key, value, attn_mask=mask, scale=0.3)
        plain = plain_attention(query, key, value, attn_mask=mask, scale=0.3)
        assert_within_budget(sparge.attention(*arguments), exact, plain)
