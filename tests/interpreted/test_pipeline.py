"""The Triton backend through the public functions: blocks, fused and separate calls, counters, operators."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.library import opcheck

import sparge
from conftest import assert_exact, causality, exact_attention, make_qkv, modes, relative_l1, tokens_first
from interpreted.conftest import call_of, shape_of
from selection import assert_same_blocks
from skipping import LENGTHS, assert_skipped_share
from sparge import Budget, Dense, Mean, Moment, TopCdf, TopK
from sparge.dispatch.ops import pack

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TRITON: dict[str, Any] = {"backend": "triton", "enable_gqa": True}
RULES = {
    "topk": TopK(0.4, min_blocks=1),
    "floor": TopK(0.1, min_blocks=3, sink=False, diagonal=False),
    "per head": TopK(torch.tensor([0.2, 0.7]), min_blocks=1, sink=False, diagonal=False),
    "similarity": TopK(0.3, min_blocks=1, similarity_threshold=0.3),
    "similarity per head": TopK(0.3, min_blocks=1, similarity_threshold=torch.tensor([0.0, 0.3])),
    "topcdf": TopCdf(0.7, min_blocks=2),
    "budget": Budget(0.4),
    "budget with a floor": Budget(0.3, min_blocks=2, sink=True),
    "similarity budget": Budget(0.4, similarity_threshold=0.3),
    "similarity topcdf": TopCdf(torch.tensor([0.3, 0.6]), min_blocks=0, similarity_threshold=0.3),
    "dense": Dense(),
}


def clustered_inputs(q_len: int = 300, kv_len: int = 450, **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return similar queries, and keys that form a cluster in every other block: some pass the similarity threshold."""
    query, key, value = make_qkv(q_len, kv_len, **{"heads": 2, "kv_heads": 1, "head_dim": 24, **sizes})
    generator = torch.Generator().manual_seed(8)
    for block in key.split(64, 2)[::2]:
        block += 2 * torch.randn(key.shape[3], generator=generator).to(key)
    return query + 1.0, key, value


class TestPredict:
    @pytest.mark.parametrize("rule, is_causal", [(rule, index % 2 == 0) for index, rule in enumerate(RULES)])
    def test_rules(self, monkeypatch: pytest.MonkeyPatch, rule: str, is_causal: bool) -> None:
        query, key, _ = clustered_inputs()
        mask = assert_same_blocks(
            monkeypatch,
            query,
            key,
            backend="triton",
            sparsity=RULES[rule],
            is_causal=is_causal,
            score=Mean() if "per head" in rule else Moment(),
            always_keep=[(70, 71)] if rule != "floor" else None,
            exact_queries=[(130, 131)] if rule in ("topk", "budget") else None,
        )
        assert rule == "dense" or 0 < mask.density() < 1, "some blocks are skipped"

    @pytest.mark.parametrize("kind", ["padding", "elements", "bias"])
    def test_masks(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        query, key, _ = clustered_inputs(batch=2)
        generator = torch.Generator().manual_seed(3)
        mask = {
            "padding": (torch.arange(450) < torch.tensor([450, 150])[:, None])[:, None, None],
            "elements": torch.rand(1, 1, 300, 450, generator=generator) > 0.5,
            "bias": 3 * torch.randn(1, 2, 300, 450, generator=generator),
        }[kind]
        options = {"is_causal": True, "attn_mask": mask, "sparsity": TopK(0.4, min_blocks=1)}
        assert_same_blocks(monkeypatch, query, key, backend="triton", **options)

    @pytest.mark.parametrize("prefix", [0, 30])
    @pytest.mark.parametrize("rule", ["topk", "similarity", "topcdf"])
    def test_prediction_does_not_leak_the_future(self, rule: str, prefix: int) -> None:
        """Query block 1 sees keys up to 255 + prefix. The keys after them are similar, dissimilar, or NaN."""
        query, key, _ = clustered_inputs(300, 300 + prefix, heads=1)
        options = {"is_causal": True, "sparsity": RULES[rule], **TRITON}
        before = sparge.predict(query, key, **options).to_dense()[:, :, :2]
        noise = 20 * torch.randn(44, 24, generator=torch.Generator().manual_seed(50))
        for future in (torch.tensor(1e3), noise, torch.tensor(math.nan)):
            changed = key.clone()
            changed[:, :, 256 + prefix :] = future
            assert torch.equal(sparge.predict(query, changed, **options).to_dense()[:, :, :2], before)


class TestAttention:
    @modes
    @causality
    def test_attention_equals_predict_and_block_sparse_attention(self, is_causal: bool, quantization: str) -> None:
        """`attention` shares its passes over K between the stages; results are bitwise equal to separate calls."""
        query, key, value = clustered_inputs(200, 300)
        rules = {"sparsity": RULES["similarity"], "is_causal": is_causal}
        mask = sparge.predict(query, key, **rules, **TRITON)
        for skipped in ("mean", "drop"):
            given = {"quantization": quantization, "return_lse": True, "skipped": skipped, **TRITON}
            got = sparge.attention(query, key, value, **rules, **given)
            for ours, theirs in zip(got, sparge.block_sparse_attention(query, key, value, mask, **given), strict=True):
                assert torch.equal(ours, theirs)
        blocks = mask.to_dense()
        if quantization == "none":
            assert_exact(got, query, key, value, is_causal=is_causal, block_mask=blocks)
        exact, _ = exact_attention(query, key, value, is_causal=is_causal, block_mask=blocks)
        assert relative_l1(got[0], exact) < 0.08

    @modes
    @pytest.mark.parametrize("with_lse", [False, True], ids=["output", "output and LSE"])
    def test_dense(self, with_lse: bool, quantization: str) -> None:
        query, key, value = clustered_inputs(130, 150)
        options = {"is_causal": True, "sparsity": Dense(), "quantization": quantization, "return_lse": with_lse}
        got = sparge.attention(query, key, value, **options, **TRITON)
        output, lse = got if with_lse else (got, None)
        exact, exact_lse = exact_attention(query, key, value, is_causal=True)
        assert relative_l1(output, exact) < (1e-5 if quantization == "none" else 0.08)
        if lse is not None:
            assert (lse - exact_lse).abs().max() < (1e-4 if quantization == "none" else 0.1)
        assert sparge.stats().reasons == {"dense: sparsity=Dense()": 1}
        assert sparge.stats().density is None

    def test_int8_fp8_is_the_default(self) -> None:
        query, key, value = clustered_inputs(70, 150)
        options = {"topk": 0.5, **TRITON}
        expected = sparge.attention(query, key, value, quantization="int8_fp8", **options)
        assert torch.equal(sparge.attention(query, key, value, **options), expected)

    def test_nhd_layout(self) -> None:
        tensors = clustered_inputs(70, 150, batch=2)
        transposed = [tensor.transpose(1, 2).contiguous() for tensor in tensors]
        options = {"topk": 0.5, "quantization": "none", **TRITON}
        got = sparge.attention(*transposed, layout="NHD", **options)
        assert torch.equal(got.transpose(1, 2), sparge.attention(*tensors, **options))

    def test_calls_and_blocks_are_counted(self) -> None:
        query, key, value = clustered_inputs(200, 300, heads=1)
        mask = sparge.predict(query, key, sparsity=RULES["topk"], is_causal=True, **TRITON)
        for _ in range(2):
            sparge.block_sparse_attention(query, key, value, mask, quantization="none", **TRITON)
        sparge.attention(query, key, value, sparsity=RULES["topk"], is_causal=True, quantization="none", **TRITON)
        assert sparge.stats().reasons == {"sparse: triton": 3}
        assert sparge.stats().density == pytest.approx(mask.density())

    @modes
    @pytest.mark.parametrize("name", LENGTHS)
    def test_skipped_products_are_counted(self, name: str, quantization: str) -> None:
        """Causality alternates over lengths and modes; tests/api covers all combinations."""
        index = list(LENGTHS).index(name) + ["none", "int8_fp8", "int8_fp16"].index(quantization)
        assert_skipped_share(LENGTHS[name], is_causal=index % 2 == 1, quantization=quantization, backend="triton")

    @modes
    def test_products_of_means_are_not_counted(self, quantization: str) -> None:
        assert_skipped_share((300, 330), skipped="mean", quantization=quantization, backend="triton")

    def test_hidden_products_are_counted(self) -> None:
        hidden = torch.arange(384) >= 200
        assert_skipped_share((256, 384), attn_mask=~hidden[None, None, None], quantization="none", backend="triton")

    def test_named_backends_do_not_fall_back(self) -> None:
        query, key, value = clustered_inputs(70, 150)
        with pytest.raises(NotImplementedError):
            sparge.attention(query, key, value, dropout_p=0.5, on_unsupported="dense", **TRITON)


class TestOperators:
    @pytest.mark.parametrize("transposed", [False, True])
    def test_opcheck(self, transposed: bool) -> None:
        query, key, value = make_qkv(70, heads=2, head_dim=16)
        if transposed:
            query = tokens_first(query)
        mask = sparge.predict(query, key, topk=0.5, is_causal=True, **TRITON)
        lists = (mask.kv_num_blocks, mask.kv_indices, mask.visible_num_blocks)
        rule = TopK(torch.tensor([0.3, 0.6]), min_blocks=1, similarity_threshold=0.1)
        sizes = call_of(shape_of(query, key, value), is_causal=True, scale=0.2)
        call = replace(sizes, sparsity=rule, always_keep=((0, 5),), quantization="int8_fp8", pv_threshold=-8.0)
        packed = pack(call, "triton")
        cases = {
            torch.ops.sparge.predict.default: (query, key, *packed),
            torch.ops.sparge.attend.default: (query, key, value, *lists, *pack(call, "triton")),
            torch.ops.sparge.attention.default: (query, key, value, *packed),
            torch.ops.sparge.dense.default: (query, key, value, *pack(sizes, "triton"), True, "a check"),
        }
        for operator, arguments in cases.items():
            assert set(opcheck(operator, arguments).values()) == {"SUCCESS"}

    @pytest.mark.parametrize(
        "options", [{"topk": 0.5}, {"sparsity": Dense(), "quantization": "none"}], ids=["sparse", "dense"]
    )
    def test_full_graph_with_dynamic_lengths(self, options: dict[str, Any]) -> None:
        torch._dynamo.reset()
        counter = CompileCounter()

        def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            return sparge.attention(*tensors, is_causal=True, return_lse=True, backend="triton", **options)

        compiled = torch.compile(run, backend=counter, fullgraph=True, dynamic=True)
        for length in (130, 200):
            tensors = make_qkv(length, heads=1, head_dim=16)
            for got, expected in zip(compiled(*tensors), run(*tensors), strict=True):
                assert torch.equal(got, expected)
        assert counter.frame_count == 1
