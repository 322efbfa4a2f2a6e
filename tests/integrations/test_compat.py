"""Functions under the published names: signatures, results, and an effect or an error for every argument."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

import sparge
from conftest import assert_within_budget, causality, exact_attention, make_qkv, plain_attention
from sparge import TopCdf, TopK, compat
from sparge.backends.torch import blocks as torch_blocks

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.timeout(60)]

REPOSITORY = Path(__file__).parents[2]
topk_attention = compat.spas_sage2_attn_meansim_topk_cuda
cdf_attention = compat.spas_sage2_attn_meansim_cuda
masked_attention = compat.block_sparse_sage2_attn_cuda
every_function = pytest.mark.parametrize("call", [topk_attention, cdf_attention, masked_attention])
predicting_functions = pytest.mark.parametrize("call", [topk_attention, cdf_attention])
Call = Callable[..., Any]


def structured(q_len: int, kv_len: int | None = None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors whose blocks of similar tokens have different directions, so that predictions differ by block."""
    query, key, value = make_qkv(q_len, kv_len, **options)
    generator = torch.Generator().manual_seed(77)
    for tensor, block, strength in ((query, 128, 1.0), (key, 64, 2.0)):
        count = -(-tensor.shape[2] // block)
        directions = torch.randn(1, tensor.shape[1], count, tensor.shape[3], generator=generator)
        tensor += strength * directions.repeat_interleave(block, 2)[:, :, : tensor.shape[2]].to(tensor.dtype)
    return query, key, value


def assert_over_blocks(output: Tensor, tensors: tuple[Tensor, ...], blocks: Tensor | None, **call: Any) -> None:
    """Check that the output is exact attention over these blocks, within the budget of the plain path."""
    exact, _ = exact_attention(*tensors, block_mask=blocks, **call)
    assert_within_budget(output, exact, plain_attention(*tensors, block_mask=blocks, **call))


def results_equal(*results: tuple[Tensor, float]) -> bool:
    (first, first_sparsity), *others = results
    return all(torch.equal(first, output) and first_sparsity == sparsity for output, sparsity in others)


class TestSignatures:
    SHARED = "q k v attn_mask dropout_p is_causal scale smooth_k simthreshd1 {} pvthreshd attention_sink "
    ENDING = "tensor_layout output_dtype return_sparsity"
    MASKED = "q k v mask_id dropout_p scale smooth_k pvthreshd attention_sink "

    @pytest.mark.parametrize(
        "name, parameters, thresholds",
        [
            ("spas_sage2_attn_meansim_topk_cuda", SHARED.format("topk"), {"simthreshd1": -0.1, "topk": 0.5}),
            ("spas_sage_attn_meansim_topk_cuda", SHARED.format("topk"), {"simthreshd1": -0.1, "topk": 0.5}),
            ("spas_sage2_attn_meansim_cuda", SHARED.format("cdfthreshd"), {"simthreshd1": 0.6, "cdfthreshd": 0.98}),
            ("spas_sage_attn_meansim_cuda", SHARED.format("cdfthreshd"), {"simthreshd1": 0.6, "cdfthreshd": 0.98}),
            ("block_sparse_sage2_attn_cuda", MASKED, {}),
        ],
    )
    def test_order_and_defaults(self, name: str, parameters: str, thresholds: dict[str, float]) -> None:
        signature = inspect.signature(getattr(compat, name)).parameters
        assert list(signature) == (parameters + self.ENDING).split()
        assert all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in signature.values())
        defaults = {key: parameter.default for key, parameter in signature.items()}
        common = {"dropout_p": 0.0, "smooth_k": True, "pvthreshd": 50, "tensor_layout": "HND", "return_sparsity": False}
        assert defaults | common | thresholds == defaults
        assert name in compat.__all__

    def test_positional_call(self) -> None:
        tensors = structured(300)
        mask = torch.rand(300, 300, generator=torch.Generator().manual_seed(3)) < 0.7
        shared: tuple[Any, ...] = (0.0, True, 0.3, True, 0.05)
        ending: tuple[Any, ...] = (3.0, False, "HND", torch.float64, True)
        options = {"attn_mask": mask, "is_causal": True, "scale": 0.3, "enable_gqa": True}
        for call, rules in ((topk_attention, TopK), (cdf_attention, TopCdf)):
            got, sparsity = call(*tensors, mask, *shared, 0.4, *ending)
            chosen = rules(0.4, similarity_threshold=0.05, sink=False)
            blocks = sparge.predict(*tensors[:2], sparsity=chosen, score="mean", **options)
            options_of_blocks = {key: value for key, value in options.items() if key != "is_causal"}
            expected = sparge.block_sparse_attention(
                *tensors, blocks, pv_threshold=-3.0 * math.log(2), **options_of_blocks
            )
            assert got.dtype == torch.float64 and torch.equal(got.float(), expected)
            assert sparsity == 1 - blocks.density()


class TestSelection:
    """Number of kept blocks, and exact attention over them."""

    @causality
    @pytest.mark.parametrize(
        "q_len, kv_len, heads, kv_heads, head_dim",
        [(700, 700, 2, 2, 32), (129, 2200, 4, 2, 72), (1, 2200, 3, 1, 8), (300, 63, 2, 1, 256)],
    )
    def test_attention_is_exact_over_the_kept_blocks(
        self, is_causal: bool, q_len: int, kv_len: int, heads: int, kv_heads: int, head_dim: int
    ) -> None:
        tensors = structured(q_len, kv_len, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        options = {"is_causal": is_causal, "scale": 0.2}
        for call, rules in ((topk_attention, TopK), (cdf_attention, TopCdf)):
            output, sparsity = call(
                *tensors,
                **options,
                **{"topk" if rules is TopK else "cdfthreshd": 0.3},
                simthreshd1=0.0,
                return_sparsity=True,
            )
            floor = 16 if is_causal else 0
            mask = sparge.predict(
                *tensors[:2], sparsity=rules(0.3, min_blocks=floor), score="mean", enable_gqa=True, **options
            )
            assert sparsity == 1 - mask.density()
            assert_over_blocks(output, tensors, mask.to_dense(), **options)
            if kv_len > 16 * 64:
                assert sparsity > 0.2, "some blocks are skipped"

    @pytest.mark.parametrize("topk, kept", [(0.5, 4), (0.3, 3), (0.001, 1), (1.0, 8)])
    def test_full_attention_keeps_at_least_one_block(self, topk: float, kept: int) -> None:
        assert topk_attention(*make_qkv(512), topk=topk, return_sparsity=True)[1] == 1 - kept / 8

    def test_causal_attention_keeps_at_least_16_blocks(self) -> None:
        """Above the minimum, topk is a fraction of the visible blocks (64 here), not of all columns."""
        assert topk_attention(*make_qkv(512), is_causal=True, topk=0.01, return_sparsity=True)[1] == 0.0
        long = make_qkv(128, 4096, heads=1, head_dim=16)
        assert topk_attention(*long, is_causal=True, topk=0.5, return_sparsity=True)[1] == 0.5
        assert topk_attention(*long, is_causal=True, topk=0.01, return_sparsity=True)[1] == 1 - 16 / 64

    def test_topk_counts_visible_blocks(self) -> None:
        """In the published code, a causal topk of 0.5 skips a quarter: a query block may keep half of all columns."""
        tensors = make_qkv(8192, heads=1, head_dim=8)
        skipped = topk_attention(*tensors, is_causal=True, topk=0.5, return_sparsity=True)[1]
        rows = [2 * row + 2 for row in range(64)]
        kept = [min(max(16, math.ceil(seen / 2)), seen) for seen in rows]
        assert skipped == 1 - sum(kept) / sum(rows) > 0.45

    def test_block_that_crosses_the_cdf_threshold_is_kept(self) -> None:
        query, _, value = make_qkv(128, 256)
        uniform = torch.zeros(1, 2, 256, 32)  # four blocks, a quarter of the mass each
        for mass, kept in ((0.2, 1), (0.6, 3), (0.9, 4)):
            options = {"simthreshd1": 0, "cdfthreshd": mass, "return_sparsity": True}
            assert cdf_attention(query, uniform, value, **options)[1] == 1 - kept / 4

    @pytest.mark.parametrize("rules", [TopK, TopCdf])
    def test_causal_bias(self, rules: Any) -> None:
        tensors, bias = structured(200, 1024), causal_lower_right(200, 1024)
        call = topk_attention if rules is TopK else cdf_attention
        output, sparsity = call(*tensors, bias, 0.0, False, simthreshd1=0.0, return_sparsity=True)
        mask = sparge.predict(
            *tensors[:2], sparsity=rules(0.5 if rules is TopK else 0.98, min_blocks=0), score="mean", attn_mask=bias
        )
        assert sparsity == 1 - mask.density()
        assert_over_blocks(output, tensors, mask.to_dense(), is_causal=True)

    def test_scale_affects_the_prediction(self) -> None:
        tensors = structured(512)
        sharp, flat = (
            cdf_attention(*tensors, scale=scale, simthreshd1=0.0, return_sparsity=True)[1] for scale in (1.0, 0.001)
        )
        assert sharp > 0.5 > 0.0 == flat

    def test_attn_mask_is_applied(self) -> None:
        tensors = make_qkv(300)
        mask = torch.rand(1, 2, 300, 300, generator=torch.Generator().manual_seed(5)) < 0.5
        for form in (mask, torch.where(mask, 0.5, -math.inf)):
            assert_over_blocks(topk_attention(*tensors, form, topk=1.0), tensors, None, attn_mask=form)
        hidden = torch.arange(300) < 64  # of five key blocks, the three query blocks can keep only the first
        output, sparsity = topk_attention(*tensors, hidden[None], topk=1.0, return_sparsity=True)
        assert sparsity == 0.0
        assert_over_blocks(output, tensors, None, attn_mask=hidden[None])

    @pytest.mark.parametrize("is_causal, sink, kept", [(True, None, 1), (False, None, 0), (True, False, 0)])
    def test_causal_calls_keep_the_sink_by_default(self, is_causal: bool, sink: bool | None, kept: int) -> None:
        """The first block has the lowest score and the only nonzero values."""
        query, key, value = make_qkv(128, 2048, heads=1)
        query += 1.0
        key[:, :, :64] -= 4.0
        value.zero_()
        value[:, :, :64] = 1.0
        options = {"is_causal": is_causal, "topk": 0.6, "attention_sink": sink, "return_sparsity": True}
        assert bool((topk_attention(query, key, value, **options)[0] > 0).all()) == kept
        options["attention_sink"] = True
        assert (topk_attention(query, key, value, **options)[0] > 0).all()


class TestCausality:
    @pytest.mark.parametrize("future", [3.0, 1e6])
    def test_future_keys_and_values_do_not_change_past_outputs(self, future: float) -> None:
        """The cut is in the middle of a diagonal block, where the published functions apply no mask."""
        query, key, value = structured(3000, heads=1, head_dim=16)
        cut, checked = 2860, 2816  # query block 22 and key block 44 start at 2816
        changed = [tensor.clone() for tensor in (key, value)]
        for tensor in changed:
            tensor[:, :, cut:] += future
        for call in (topk_attention, cdf_attention):
            options = {"is_causal": True, "simthreshd1": 0.0, "return_sparsity": True}
            before, sparsity = call(query, key, value, **options)
            after, _ = call(query, *changed, **options)
            assert sparsity > 0.1, "some blocks are skipped"
            assert torch.equal(before[:, :, :checked], after[:, :, :checked])
            assert not torch.equal(before[:, :, cut:], after[:, :, cut:])
        dense = [topk_attention(query, *key_value, is_causal=True, topk=1.0) for key_value in ((key, value), changed)]
        assert torch.equal(dense[0][:, :, checked:cut], dense[1][:, :, checked:cut])

    def test_bottom_right(self) -> None:
        tensors = make_qkv(70, 200)
        assert_over_blocks(topk_attention(*tensors, is_causal=True), tensors, None, is_causal=True)


class TestThresholds:
    def test_similarity_threshold(self) -> None:
        """Random tokens are dissimilar: a threshold keeps all blocks, as the CDF function does by default."""
        tensors = make_qkv(512)
        assert cdf_attention(*tensors, cdfthreshd=0.3, return_sparsity=True)[1] == 0.0
        assert topk_attention(*tensors, simthreshd1=0.6, return_sparsity=True)[1] == 0.0
        for off in (-0.1, 0, -math.inf, torch.tensor([-0.1, 0.0])):
            assert topk_attention(*tensors, simthreshd1=off, return_sparsity=True)[1] == 0.5

    def test_pvthreshd_is_in_log2_units(self) -> None:
        """Scores of block 1 are 3 (4.33 log2 units) below those of block 0: 4 skips block 1, 5 keeps it."""
        _, _, value = make_qkv(64, 128, head_dim=8)
        query = torch.ones(1, 2, 64, 8)
        key = torch.zeros(1, 2, 128, 8)
        key[:, :, 64:] = -3.0 / 8
        skipped, whole = value[:, :, :64].mean(2), exact_attention(query, key, value, scale=1.0)[0][:, :, 0].float()
        assert (skipped - whole).abs().amax(-1).gt(1e-3).all()
        calls: tuple[Call, ...] = (
            masked_attention,
            lambda *tensors, **options: topk_attention(*tensors, topk=1, return_sparsity=True, **options)[0],
            lambda *tensors, **options: cdf_attention(*tensors, cdfthreshd=1, return_sparsity=True, **options)[0],
        )
        for call in calls:
            for units, skips in (
                (4, [True, True]),
                (5.0, [False, False]),
                (torch.tensor([4.0, 5.0]), [True, False]),
            ):
                expected = torch.where(torch.tensor(skips)[:, None], skipped, whole)
                output = call(query, key, value, scale=1.0, pvthreshd=units)
                torch.testing.assert_close(output, expected[:, :, None].expand_as(output), rtol=1e-5, atol=1e-6)

    def test_threshold_of_50_in_one_head_skips_nothing(self) -> None:
        """A block 60 log2 units below the maximum is kept; its large values make that visible."""
        query = torch.ones(1, 2, 64, 8)
        key = torch.zeros(1, 2, 128, 8)
        key[:, :, 64:] = -60 * math.log(2) / 8
        value = torch.where(torch.arange(128) < 64, 0.0, 2.0**60)[:, None].expand(1, 2, 128, 8)
        tuned = torch.nn.Parameter(torch.tensor([50.0, 49.0]))
        output = masked_attention(query, key, value, scale=1.0, pvthreshd=tuned)
        assert not output.requires_grad
        torch.testing.assert_close(output[:, 0], torch.ones(1, 64, 8), rtol=1e-4, atol=0.0)
        assert (output[:, 1] == 0).all()

    @every_function
    @pytest.mark.parametrize("off", [50, 64.0, math.inf, torch.tensor([50.0, 99.0])], ids=str)
    def test_threshold_of_50_skips_the_simulation(
        self, call: Call, off: float | Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch_blocks, "_attend_online", lambda *_: pytest.fail("the simulation ran"))
        tensors = make_qkv(200)
        assert results_equal(*(call(*tensors, **options, return_sparsity=True) for options in ({}, {"pvthreshd": off})))

    def test_per_head(self) -> None:
        """Each head equals a call with only that head and its thresholds."""
        tensors = structured(512, heads=4, kv_heads=2)
        similarity, log2_units = torch.tensor([-0.1, 0.0, 0.9, 0.3]), torch.tensor([1.0, 50.0, 3.0, 80.0])
        for call, name in ((topk_attention, "topk"), (cdf_attention, "cdfthreshd")):
            shares = torch.tensor([0.2, 0.5, 0.4, 0.9])
            options: dict[str, Any] = {"simthreshd1": similarity, name: shares, "pvthreshd": log2_units}
            all_heads, sparsity = call(*tensors, **options, return_sparsity=True)
            sparsities = []
            for head in range(4):
                one = {key: float(value[head]) for key, value in options.items()}
                part = (
                    tensors[0][:, head : head + 1],
                    *(tensor[:, head // 2 : head // 2 + 1] for tensor in tensors[1:]),
                )
                output, skipped = call(*part, **one, return_sparsity=True)
                torch.testing.assert_close(all_heads[:, head : head + 1], output, rtol=1e-5, atol=1e-5)
                sparsities.append(skipped)
            assert sparsity == pytest.approx(sum(sparsities) / 4)
            assert len(set(sparsities)) > 1, "the heads differ"

    @pytest.mark.parametrize("call, name", [(topk_attention, "topk"), (cdf_attention, "cdfthreshd")])
    def test_tuned_parameters(self, call: Call, name: str) -> None:
        """Tuners pass thresholds as ``nn.Parameter``; no gradient is needed."""
        tensors = structured(2048, head_dim=8)
        values = {name: [0.3, 0.6], "simthreshd1": [0.1, 0.2], "pvthreshd": [2.0, 60.0]}
        thresholds = {key: torch.tensor(value) for key, value in values.items()}
        tuned = {key: torch.nn.Parameter(value) for key, value in thresholds.items()}
        for extra in ({}, {"return_sparsity": True}):
            first, second = call(*tensors, **thresholds, **extra), call(*tensors, **tuned, **extra)
            if extra:
                assert first[1] == second[1] > 0
                first, second = first[0], second[0]
            assert torch.equal(first, second) and not second.requires_grad


class TestTensors:
    @every_function
    @pytest.mark.parametrize("extra", [{}, {"return_sparsity": True}], ids=["plain", "sparsity"])
    def test_layouts_give_equal_results(self, call: Call, extra: dict[str, Any]) -> None:
        tensors = structured(300, heads=4, kv_heads=2, value_dim=40)
        tokens_first = [tensor.transpose(1, 2).contiguous() for tensor in tensors]
        first, second = call(*tensors, **extra), call(*tokens_first, tensor_layout="NHD", **extra)
        if extra:
            assert first[1] == second[1]
            first, second = first[0], second[0]
        assert torch.equal(first, second.transpose(1, 2))
        assert first.is_contiguous() and second.is_contiguous(), "callers use view"

    @every_function
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_dtypes(self, call: Call, dtype: torch.dtype) -> None:
        tensors = make_qkv(200, dtype=dtype)
        output = call(*tensors)
        assert_over_blocks(output, tensors, None)
        for output_dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert torch.equal(call(*tensors, output_dtype=output_dtype), output.to(output_dtype))

    def test_float32_values_beyond_the_float16_range(self) -> None:
        query, key, value = make_qkv(200)
        tensors = (query, key, value * 1e6)
        assert_over_blocks(topk_attention(*tensors), tensors, None)


class TestDecisions:
    def test_short_calls_are_dense_unless_they_return_the_sparsity(self) -> None:
        tensors = structured(512)
        output = topk_attention(*tensors, topk=0.25)
        assert sparge.stats().reasons == {"dense: below the crossover": 1}
        assert_over_blocks(output, tensors, None)
        sparge.reset_stats()
        output, sparsity = topk_attention(*tensors, topk=0.25, return_sparsity=True)
        stats = sparge.stats()
        assert stats.reasons == {"sparse: torch": 1} and sparsity == 0.75 == 1 - stats.density
        mask = sparge.predict(*tensors[:2], sparsity=TopK(0.25, min_blocks=0), score="mean").to_dense()
        assert_over_blocks(output, tensors, mask)

    def test_return_sparsity_does_not_change_long_calls(self) -> None:
        tensors = structured(2048, head_dim=16)
        output = topk_attention(*tensors, topk=0.25)
        stats = sparge.stats()
        assert stats.reasons == {"sparse: torch": 1}
        assert results_equal((output, 1 - stats.density), topk_attention(*tensors, topk=0.25, return_sparsity=True))
        expected = sparge.attention(*tensors, sparsity=TopK(0.25, min_blocks=0), score="mean", skipped="drop")
        assert torch.equal(output, expected)
        assert not torch.equal(output, sparge.attention(*tensors, topk=0.25)), "the score matters"


class TestMaskId:
    def test_integer_dtypes(self) -> None:
        tensors = make_qkv(300, 500, batch=2, heads=4, kv_heads=2)
        mask = torch.rand(2, 4, 3, 8, generator=torch.Generator().manual_seed(1)) < 0.5
        mask[0, 0, 1] = False  # the output of a query block without keys is 0
        expected = masked_attention(*tensors, mask, return_sparsity=True)
        assert expected[1] == pytest.approx(1 - float(mask.float().mean()))
        assert_over_blocks(expected[0], tensors, mask)
        assert (expected[0][0, 0, 128:256] == 0).all()
        for other in (mask.int(), 7 * mask.long(), -mask.to(torch.int8), mask.byte()):
            assert results_equal(expected, masked_attention(*tensors, other, return_sparsity=True))

    def test_none_keeps_all_blocks(self) -> None:
        tensors = make_qkv(129, 65)
        output, sparsity = masked_attention(*tensors, return_sparsity=True)
        assert sparsity == 0.0
        assert_over_blocks(output, tensors, None)

    def test_sink(self) -> None:
        tensors = make_qkv(256)
        mask = torch.zeros(1, 2, 2, 4, dtype=torch.int32)
        mask[..., 2] = 1
        output, sparsity = masked_attention(*tensors, mask, attention_sink=True, return_sparsity=True)
        assert sparsity == 0.5
        assert_over_blocks(output, tensors, mask.bool() | (torch.arange(4) == 0))
        assert mask.sum() == 4, "the caller's mask is unchanged"

    @pytest.mark.parametrize("q_len, kv_len", [(256, 256), (100, 100), (129, 700), (64, 128)])
    def test_blocks_of_64_x_128_raise(self, q_len: int, kv_len: int) -> None:
        mask = torch.ones(1, 2, -(-q_len // 64), -(-kv_len // 128), dtype=torch.int32)
        with pytest.raises(ValueError, match=r"expected .* got .* blocks of 64 x 128, .* Hopper; here it is 128 x 64"):
            masked_attention(*make_qkv(q_len, kv_len), mask)

    @pytest.mark.parametrize("sizes", [(1, 2, 2, 5), (2, 4), (1, 1, 2, 4), (1, 2, 1, 1), ()])
    def test_other_shapes_raise(self, sizes: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"mask_id: expected .* = \(1, 2, 2, 4\) .*, got \([0-9, ]*\)$"):
            masked_attention(*make_qkv(256), torch.ones(sizes, dtype=torch.bool))

    @pytest.mark.parametrize("mask", [torch.ones(1, 2, 2, 4), [[1]]], ids=["float", "list"])
    def test_other_types_raise(self, mask: Any) -> None:
        with pytest.raises(TypeError, match="mask_id: expected a tensor of integers or bools, or None, got"):
            masked_attention(*make_qkv(256), mask)


class TestErrors:
    @pytest.fixture(autouse=True)
    def nothing_runs(self) -> Iterator[None]:
        yield
        assert sparge.stats().calls == 0

    @every_function
    @pytest.mark.parametrize("extra", [{}, {"return_sparsity": True}], ids=["plain", "sparsity"])
    @pytest.mark.parametrize(
        "error, message, options",
        [
            (NotImplementedError, "dropout_p: expected 0.0 .* got 0.1", {"dropout_p": 0.1}),
            (ValueError, "dropout_p: expected .* got -1", {"dropout_p": -1}),
            (NotImplementedError, "smooth_k: expected True .* got False", {"smooth_k": False}),
            (ValueError, "pvthreshd: expected a value in .0, inf., got 0", {"pvthreshd": 0}),
            (ValueError, "pvthreshd: expected .* got -5", {"pvthreshd": torch.tensor([3.0, -5.0])}),
            (ValueError, "pvthreshd: expected .* got nan", {"pvthreshd": math.nan}),
            (TypeError, "pvthreshd: expected .* got str", {"pvthreshd": "50"}),
            (ValueError, "pv_threshold: expected one entry per query head .2., got 3", {"pvthreshd": torch.ones(3)}),
            (TypeError, "sink: expected .* got 'yes'", {"attention_sink": "yes"}),
            (TypeError, "return_sparsity: expected a bool, got 'false'", {"return_sparsity": "false"}),
            (ValueError, "tensor_layout: expected one of 'HND', 'NHD', got 'BSHD'", {"tensor_layout": "BSHD"}),
            (TypeError, "output_dtype: expected a floating-point .* got torch.int8", {"output_dtype": torch.int8}),
            (TypeError, "output_dtype: expected .* got 'float16'", {"output_dtype": "float16"}),
            (TypeError, "scale: expected .* got str", {"scale": "1"}),
        ],
    )
    def test_errors_of_all_functions(
        self, call: Call, extra: dict[str, Any], error: type[Exception], message: str, options: dict[str, Any]
    ) -> None:
        with pytest.raises(error, match=message):
            call(*make_qkv(100), **extra | options)

    @predicting_functions
    @pytest.mark.parametrize(
        "error, message, options",
        [
            (ValueError, r"simthreshd1: expected a value in \[-inf, 1\], got 1.5", {"simthreshd1": 1.5}),
            (TypeError, "simthreshd1: expected .* got NoneType", {"simthreshd1": None}),
            (TypeError, "is_causal: expected a bool, got 'no'", {"is_causal": "no"}),
            (ValueError, "attn_mask: expected .* got", {"attn_mask": torch.ones(3, 3, dtype=torch.bool)}),
        ],
    )
    def test_errors_of_predicting_functions(
        self, call: Call, error: type[Exception], message: str, options: dict[str, Any]
    ) -> None:
        with pytest.raises(error, match=message):
            call(*make_qkv(100), **options)

    def test_topk_and_cdf_outside_their_range(self) -> None:
        with pytest.raises(ValueError, match=r"topk: expected a value in \(0, 1\], got 0.0"):
            topk_attention(*make_qkv(100), topk=0)
        with pytest.raises(ValueError, match=r"cdf: expected a value in \(0, 1\], got 1.1"):
            cdf_attention(*make_qkv(100), cdfthreshd=1.1)

    @every_function
    @pytest.mark.parametrize("extra", [{}, {"return_sparsity": True}], ids=["plain", "sparsity"])
    def test_tensors(self, call: Call, extra: dict[str, Any]) -> None:
        with pytest.raises(NotImplementedError, match=r"head_dim: expected .* got 264"):
            call(*make_qkv(100, head_dim=264), **extra)
        with pytest.raises(ValueError, match="query: expected a multiple of the key's 2 heads, got 3"):
            call(*make_qkv(100, heads=3, kv_heads=2), **extra)
        query, key, value = make_qkv(100)
        with pytest.raises(NotImplementedError, match="expected inputs without gradients"):
            call(query, key, value.requires_grad_(), **extra)


@pytest.fixture
def spas_sage_attn(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import the package of the distribution in ``compat/``, as its wheel provides it."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "compat" / "src"))
    assert "spas_sage_attn" not in sys.modules
    yield importlib.import_module("spas_sage_attn")
    for name in [name for name in sys.modules if name.partition(".")[0] == "spas_sage_attn"]:
        del sys.modules[name]


class TestDistribution:
    def test_has_every_published_name(self, spas_sage_attn: ModuleType) -> None:
        assert Path(str(spas_sage_attn.__file__)).is_relative_to(REPOSITORY / "compat")
        names = [name for name in compat.__all__ if not name.startswith("flash_attn")]
        assert sorted(spas_sage_attn.__all__) == sorted(names)
        assert all(getattr(spas_sage_attn, name) is getattr(compat, name) for name in names)

    @pytest.mark.usefixtures("spas_sage_attn")
    def test_published_modules(self) -> None:
        """The functions are importable from their published modules; other names raise and name the replacement."""
        core = importlib.import_module("spas_sage_attn.core")
        assert all(getattr(core, name) is getattr(compat, name) for name in core.__all__)
        for module, instead in (
            ("core", r"sparge\.attention"),
            ("autotune", r"sparge\.calibrate\(model, inputs\)"),
            ("utils", r"sparge\.predict"),
        ):
            message = rf"spas_sage_attn\.{module}\.anything: expected a name that sparge provides.*use .*{instead}"
            with pytest.raises(ImportError, match=message):
                exec(f"from spas_sage_attn.{module} import anything")
            assert not hasattr(importlib.import_module(f"spas_sage_attn.{module}"), "__wrapped__")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @causality
    def test_sglang(self, spas_sage_attn: ModuleType, dtype: torch.dtype, is_causal: bool) -> None:
        """Run the call of SGLang's diffusion backend, which concatenates the heads afterward."""
        length = 4096 if is_causal else 2048  # the crossover
        tensors = structured(length, head_dim=64, dtype=dtype)
        query, key, value = (tensor.transpose(1, 2).contiguous() for tensor in tensors)
        output = spas_sage_attn.spas_sage2_attn_meansim_topk_cuda(
            query, key, value, is_causal=is_causal, scale=0.125, tensor_layout="NHD", topk=0.5
        )
        assert sparge.stats().reasons == {"sparse: torch": 1}
        heads_first = output.view(1, length, 128).unflatten(2, (2, 64)).transpose(1, 2)
        rules = TopK(0.5, min_blocks=16 if is_causal else 0)
        options: dict[str, Any] = {"is_causal": is_causal, "scale": 0.125}
        expected = sparge.attention(*tensors, sparsity=rules, score="mean", skipped="drop", **options)
        assert torch.equal(heads_first, expected)
        mask = sparge.predict(*tensors[:2], sparsity=rules, score="mean", **options).to_dense()
        last = (tensors[0][:, :, -16:], *tensors[1:])  # few queries: the oracle is slow in 16 bits
        assert_over_blocks(heads_first[:, :, -16:], last, mask[:, :, -1:], **options)


class TestFlashAttention:
    """Functions with the signatures of FlashAttention 2, followed by the sinks of FlashAttention 3."""

    SHARED = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
    BOUNDS = "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "

    def test_order_and_defaults(self) -> None:
        defaults = [0.0, None, False, (-1, -1), 0.0, None, False, False, None]
        for name, parameters, values in (
            ("flash_attn_func", "q k v " + self.SHARED + " s_aux", defaults),
            ("flash_attn_varlen_func", self.BOUNDS + self.SHARED + " block_table s_aux", [*defaults, None]),
        ):
            signature = inspect.signature(getattr(compat, name)).parameters
            assert list(signature) == parameters.split()
            assert [parameter.default for parameter in signature.values()][-len(values) :] == values

    def test_varlen_matches_sparge(self) -> None:
        tensors = [tensor[0].transpose(0, 1).contiguous() for tensor in structured(700, heads=4, kv_heads=2)]
        bounds = torch.tensor([0, 200, 700], dtype=torch.int32)
        call = (*tensors, bounds, bounds, 500, 500)
        got = compat.flash_attn_varlen_func(*call, 0.0, 0.3, True, return_attn_probs=True)
        options: dict[str, Any] = {"softmax_scale": 0.3, "causal": True, "return_lse": True}
        expected = sparge.varlen_attention(*tensors, bounds, bounds, **options)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1]) and got[2] is None
        same = compat.flash_attn_varlen_func(
            *tensors, bounds, bounds, 500, 500, 0.0, 0.3, False, (-1, 0), 0.0, None, True
        )
        assert torch.equal(same, expected[0])

    def test_batched_matches_sparge(self) -> None:
        tensors = [tensor.transpose(1, 2).contiguous() for tensor in structured(300, heads=4, kv_heads=2)]
        got = compat.flash_attn_func(*tensors, 0.0, 0.3, True, (-1, -1), 0.0, None, False, True)
        options: dict[str, Any] = {"scale": 0.3, "is_causal": True, "enable_gqa": True, "layout": "NHD"}
        expected = sparge.attention(*tensors, return_lse=True, **options)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1]) and got[2] is None
        assert torch.equal(compat.flash_attn_func(*tensors, 0.0, 0.3, window_size=(-1, 0)), expected[0])

    def test_max_seqlen_may_be_a_tensor(self) -> None:
        """transformers passes tensors if it derives the segments from position_ids."""
        tokens = torch.randn(50, 2, 16)
        bounds = torch.tensor([0, 20, 50], dtype=torch.int32)
        longest = bounds.diff().max()
        got = compat.flash_attn_varlen_func(tokens, tokens, tokens, bounds, bounds, longest, longest, causal=True)
        expected = compat.flash_attn_varlen_func(tokens, tokens, tokens, bounds, bounds, 30, 30, causal=True)
        assert torch.equal(got, expected)

    def test_sinks_match_softmax_with_an_extra_column(self) -> None:
        """These sizes run dense: exact up to the float32 rounding of sums over at most 150 products near 1."""
        query, key, value = (torch.randn(150, heads, 16) for heads in (4, 2, 2))
        sinks = torch.tensor([-3.0, 0.0, 2.0, 30.0])
        bounds = [0, 60, 150]
        got = compat.flash_attn_varlen_func(query, key, value, bounds, bounds, 90, 90, causal=True, s_aux=sinks)
        for start, stop in pairwise(bounds):
            tensors = [tensor[start:stop] for tensor in (query, key, value)]
            batched = compat.flash_attn_func(*(tensor[None] for tensor in tensors), causal=True, s_aux=sinks)
            q, k, v = (tensor.double().transpose(0, 1) for tensor in tensors)
            scores = q @ k.repeat_interleave(2, 0).mT / 4
            hidden = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(hidden, -math.inf)
            column = sinks.double()[:, None, None].expand(-1, stop - start, 1)
            shares = torch.cat([weights, column], 2).softmax(2)[:, :, :-1]
            exact = (shares @ v.repeat_interleave(2, 0)).transpose(0, 1)
            assert (got[start:stop] - exact).abs().max() < 2e-6
            assert (batched[0] - exact).abs().max() < 2e-6

    @pytest.mark.parametrize(
        "change, error, message",
        [
            ({"alibi_slopes": torch.ones(2)}, NotImplementedError, "alibi_slopes: expected None, got Tensor"),
            ({"block_table": torch.ones(2)}, NotImplementedError, "block_table: expected None, got Tensor"),
            ({"return_attn_probs": 1}, TypeError, "return_attn_probs: expected a bool, got 1"),
            ({"softcap": 5.0}, NotImplementedError, "softcap: expected 0.0"),
            ({"s_aux": torch.ones(3)}, ValueError, r"s_aux: expected a number for each head, \(2,\), got \(3,\)"),
            ({"s_aux": 1.0}, ValueError, r"s_aux: expected a number for each head, \(2,\), got float"),
            (
                {"s_aux": torch.ones(2), "return_attn_probs": True},
                NotImplementedError,
                "return_attn_probs: expected False with s_aux, got True",
            ),
        ],
    )
    def test_unsupported_arguments_raise(self, change: dict[str, Any], error: type[Exception], message: str) -> None:
        tokens = torch.zeros(8, 2, 16)
        with pytest.raises(error, match=message):
            compat.flash_attn_varlen_func(tokens, tokens, tokens, [0, 8], [0, 8], 8, 8, **change)
        if "block_table" not in change:
            with pytest.raises(error, match=message):
                compat.flash_attn_func(tokens[None], tokens[None], tokens[None], **change)


class TestMigrationPage:
    SMALLER = (("8, 2048, 64", "8, 256, 16"), ("8, 16, 32", "8, 2, 4"), ("8, 32, 16", "8, 4, 2"))

    def test_examples_run(self) -> None:
        text = (REPOSITORY / "docs" / "migration.md").read_text(encoding="utf-8")
        namespace: dict[str, Any] = {}
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            for full, small in self.SMALLER:
                block = block.replace(full, small)
            exec(block.replace("print(mask.density())", "density = mask.density()"), namespace)
        assert namespace["q"].shape == (1, 8, 256, 16) and namespace["density"] == 1.0
        kept = [
            mask.repeat_interleave(rows, 2).repeat_interleave(columns, 3)
            for mask, rows, columns in ((namespace["old"], 64, 128), (namespace["new"], 128, 64))
        ]
        assert (kept[1] | ~kept[0]).all() and not kept[1].all()

    def test_every_argument_and_name_is_documented(self) -> None:
        text = (REPOSITORY / "docs" / "migration.md").read_text(encoding="utf-8")
        for name in compat.__all__:
            assert name in text
            for argument in inspect.signature(getattr(compat, name)).parameters:
                assert f"`{argument}`" in text, argument
