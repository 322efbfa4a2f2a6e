"""Every invalid input raises the right error, "expected X, got Y", before anything is computed."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import sparge
from conftest import assert_within_budget, exact_attention, make_qkv, plain_attention
from sparge import BlockMask, TopCdf, TopK
from sparge.dispatch import ops

Call = Callable[..., Any]


def attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return sparge.attention(query, key, value, **options)


def predict(query: Any, key: Any, value: Any, **options: Any) -> Any:  # noqa: ARG001
    return sparge.predict(query, key, **options)


def block_sparse(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return sparge.block_sparse_attention(query, key, value, torch.ones(1, 1, dtype=torch.bool), **options)


ALL_CALLS = pytest.mark.parametrize("call", [attention, predict, block_sparse])
PREDICTING = pytest.mark.parametrize("call", [attention, predict])
ATTENDING = pytest.mark.parametrize("call", [attention, block_sparse])


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail when a stage runs, and check that nothing was counted."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("computed something before the input was checked")

    for name in ("predict", "attend", "dense"):
        monkeypatch.setattr(ops, name, refuse)
    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)
    yield
    assert sparge.stats().calls == 0


def assert_rejects(error: type[Exception], message: str, call: Call, *tensors: Any, **options: Any) -> None:
    with pytest.raises(error, match=message) as caught:
        call(*tensors, **options)
    assert type(caught.value) is error
    assert "expected" in str(caught.value) and "got" in str(caught.value)


QKV = make_qkv(100)  # (1, 2, 100, 32)


@pytest.mark.usefixtures("nothing_runs")
class TestTensors:
    @ALL_CALLS
    @pytest.mark.parametrize("position, name", [(0, "query"), (1, "key")])
    @pytest.mark.parametrize("shape", [(100, 32), (2, 100, 32), (1, 1, 2, 100, 32)])
    def test_wrong_rank(self, call: Call, position: int, name: str, shape: tuple[int, ...]) -> None:
        tensors = list(QKV)
        tensors[position] = torch.zeros(shape)
        assert_rejects(
            ValueError,
            rf"{name}: expected 4 dimensions \(B, H, S, D\), got shape \({', '.join(map(str, shape))}\)",
            call,
            *tensors,
        )

    @ATTENDING
    def test_wrong_rank_of_the_value_in_nhd(self, call: Call) -> None:
        assert_rejects(
            ValueError,
            r"value: expected 4 dimensions \(B, S, H, D\), got shape \(100, 32\)",
            call,
            *QKV[:2],
            torch.zeros(100, 32),
            layout="NHD",
        )

    @ALL_CALLS
    @pytest.mark.parametrize("wrong", [None, [[1.0]], 3.0])
    def test_not_a_tensor(self, call: Call, wrong: Any) -> None:
        expected = rf"query: expected a torch.Tensor, got {type(wrong).__name__}"
        assert_rejects(TypeError, expected, call, wrong, *QKV[1:])

    @ALL_CALLS
    def test_not_a_plain_tensor(self, call: Call) -> None:
        nested = torch.nested.nested_tensor([torch.zeros(2, 100, 32)], layout=torch.strided)
        assert_rejects(TypeError, "query: expected a plain tensor .*, got a nested tensor", call, nested, *QKV[1:])
        assert_rejects(TypeError, "query: expected .*, got layout torch.sparse_coo", call, QKV[0].to_sparse(), *QKV[1:])

    @ALL_CALLS
    @pytest.mark.parametrize(
        "key_shape, message",
        [
            ((3, 2, 100, 32), "expected batch 1 and head_dim 32 as in the query, got batch 3 and head_dim 32"),
            ((1, 2, 100, 16), "expected batch 1 and head_dim 32 as in the query, got batch 1 and head_dim 16"),
        ],
    )
    def test_key_shape_does_not_match_the_query(self, call: Call, key_shape: tuple[int, ...], message: str) -> None:
        assert_rejects(ValueError, "key: " + message, call, QKV[0], torch.zeros(key_shape), torch.zeros(key_shape))

    @ATTENDING
    @pytest.mark.parametrize("value_shape", [(2, 2, 100, 32), (1, 1, 100, 32), (1, 2, 99, 32)])
    def test_value_shape_does_not_match_the_key(self, call: Call, value_shape: tuple[int, ...]) -> None:
        got = rf"\({', '.join(map(str, value_shape[:3]))}\)"
        message = rf"value: expected the key's batch, heads and length \(1, 2, 100\), got {got}"
        assert_rejects(ValueError, message, call, *QKV[:2], torch.zeros(value_shape))

    @ALL_CALLS
    @pytest.mark.parametrize("heads, kv_heads", [(6, 2), (6, 4), (2, 4)])
    def test_grouped_heads_need_enable_gqa(self, call: Call, heads: int, kv_heads: int) -> None:
        tensors = make_qkv(100, heads=heads, kv_heads=kv_heads)
        message = rf"key: expected {heads} heads as in the query, got {kv_heads} \(pass enable_gqa=True"
        assert_rejects(ValueError, message, call, *tensors)

    @ALL_CALLS
    @pytest.mark.parametrize("heads, kv_heads", [(6, 4), (2, 4), (1, 2)])
    def test_heads_that_do_not_divide_the_query_heads(self, call: Call, heads: int, kv_heads: int) -> None:
        tensors = make_qkv(100, heads=heads, kv_heads=kv_heads)
        message = rf"query: expected a multiple of the key's {kv_heads} heads, got {heads}"
        assert_rejects(ValueError, message, call, *tensors, enable_gqa=True)

    @ALL_CALLS
    @pytest.mark.parametrize(
        "dtype", [torch.int8, torch.int64, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fn]
    )
    def test_unsupported_dtype(self, call: Call, dtype: torch.dtype) -> None:
        tensors = [torch.zeros(1, 2, 100, 32).to(dtype) for _ in range(3)]
        assert_rejects(TypeError, f"query: expected float16, bfloat16 or float32, got {dtype}", call, *tensors)

    @ALL_CALLS
    def test_mixed_dtypes(self, call: Call) -> None:
        query, key, value = QKV
        message = "key: expected the query's dtype torch.float32, got torch.bfloat16"
        assert_rejects(TypeError, message, call, query, key.bfloat16(), value)

    @ATTENDING
    def test_mixed_dtype_of_the_value(self, call: Call) -> None:
        query, key, value = (tensor.half() for tensor in QKV)
        message = "value: expected the query's dtype torch.float16, got torch.float32"
        assert_rejects(TypeError, message, call, query, key, value.float())

    @ALL_CALLS
    def test_mixed_devices(self, call: Call) -> None:
        query, key, value = QKV
        message = "key: expected the query's device cpu, got meta"
        assert_rejects(ValueError, message, call, query, key.to("meta"), value)

    @ATTENDING
    def test_mixed_device_of_the_value(self, call: Call) -> None:
        query, key, value = QKV
        message = "value: expected the query's device cpu, got meta"
        assert_rejects(ValueError, message, call, query, key, value.to("meta"))

    @ALL_CALLS
    @pytest.mark.parametrize("dimension", range(4))
    def test_empty_dimension(self, call: Call, dimension: int) -> None:
        shape = [1, 2, 100, 32]
        shape[dimension] = 0
        tensors = [torch.zeros(shape) for _ in range(3)]
        if call is attention and dimension == 0:
            return  # returns an empty output, as SDPA does: tests/api/test_sdpa_parity.py
        name = "key" if call is attention and dimension == 2 else "query"
        message = rf"{name}: expected no empty dimension, got shape \({', '.join(map(str, shape))}\)"
        assert_rejects(ValueError, message, call, *tensors)

    @ALL_CALLS
    def test_no_keys(self, call: Call) -> None:
        empty = torch.zeros(1, 2, 0, 32)
        message = r"key: expected no empty dimension, got shape \(1, 2, 0, 32\)"
        assert_rejects(ValueError, message, call, QKV[0], empty, empty)

    @pytest.mark.parametrize("call", [attention, predict])
    @pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
    def test_device_without_data(self, call: Call, backend: str) -> None:
        tensors = [tensor.to("meta") for tensor in QKV]
        message = f"backend '{backend}': expected a device that holds data, got 'meta'"
        assert_rejects(NotImplementedError, message, call, *tensors, backend=backend)

    def test_device_without_data_for_block_sparse(self) -> None:
        tensors = [tensor.to("meta") for tensor in QKV]
        mask = torch.ones(1, 1, dtype=torch.bool, device="meta")
        message = "backend 'auto': expected a device that holds data, got 'meta'"
        assert_rejects(NotImplementedError, message, lambda: sparge.block_sparse_attention(*tensors, mask))


@pytest.mark.usefixtures("nothing_runs")
class TestChoices:
    @ALL_CALLS
    @pytest.mark.parametrize("wrong", ["cuda", "TORCH", "", None, 3])
    def test_backend(self, call: Call, wrong: Any) -> None:
        message = f"backend: expected one of 'auto', 'hopper', 'triton', 'torch', 'reference', got {wrong!r}"
        assert_rejects(ValueError, message, call, *QKV, backend=wrong)

    @ALL_CALLS
    @pytest.mark.parametrize("wrong", ["hnd", "BHSD", None])
    def test_layout(self, call: Call, wrong: Any) -> None:
        assert_rejects(ValueError, f"layout: expected one of 'HND', 'NHD', got {wrong!r}", call, *QKV, layout=wrong)

    @ATTENDING
    @pytest.mark.parametrize("wrong", ["int4", "fp8", None, True])
    def test_quantization(self, call: Call, wrong: Any) -> None:
        message = (
            f"quantization: expected one of 'auto', 'none', 'int8_fp8', 'int8_fp8_fast', 'int8_fp16', got {wrong!r}"
        )
        assert_rejects(ValueError, message, call, *QKV, quantization=wrong)

    @pytest.mark.parametrize("wrong", ["ignore", None])
    def test_on_unsupported(self, wrong: Any) -> None:
        message = f"on_unsupported: expected one of 'raise', 'warn', 'dense', got {wrong!r}"
        assert_rejects(ValueError, message, attention, *QKV, on_unsupported=wrong)

    @PREDICTING
    def test_unknown_score(self, call: Call) -> None:
        assert_rejects(
            ValueError, "score: expected one of 'moment', 'mean', 'spread', got 'max'", call, *QKV, score="max"
        )

    @PREDICTING
    @pytest.mark.parametrize("wrong", [3, None, sparge.Moment])
    def test_score_of_wrong_type(self, call: Call, wrong: Any) -> None:
        names = "'moment' or 'mean' or 'spread'"
        message = rf"score: expected {names}, or a value such as Moment\(...\), got {type(wrong).__name__}"
        assert_rejects(TypeError, message, call, *QKV, score=wrong)

    @pytest.mark.parametrize(
        "samples, error", [(0, ValueError), (129, ValueError), (True, TypeError), (8.0, TypeError)]
    )
    def test_moment_samples(self, samples: Any, error: type[Exception]) -> None:
        assert_rejects(error, "samples: expected .* got", lambda: sparge.Moment(samples))

    @pytest.mark.parametrize("samples", [0, 3, 12, 127, 256, -4])
    def test_spread_samples(self, samples: int) -> None:
        message = rf"^samples: expected a power of two in \[1, 128\], got {samples}$"
        assert_rejects(ValueError, message, lambda: sparge.Spread(samples))

    @pytest.mark.parametrize("samples", [True, 8.0, "16", None])
    def test_spread_samples_of_wrong_type(self, samples: Any) -> None:
        message = f"^samples: expected an int, got {type(samples).__name__}$"
        assert_rejects(TypeError, message, lambda: sparge.Spread(samples))

    @ATTENDING
    @pytest.mark.parametrize("wrong", ["zero", "Mean", None, True])
    def test_skipped(self, call: Call, wrong: Any) -> None:
        message = f"^skipped: expected one of 'auto', 'mean', 'drop', got {wrong!r}$"
        assert_rejects(ValueError, message, call, *QKV, skipped=wrong)

    @ALL_CALLS
    @pytest.mark.parametrize("wrong", ["yes", 1.0, torch.tensor(True)])
    def test_is_causal(self, call: Call, wrong: Any) -> None:
        assert_rejects(TypeError, r"is_causal: expected .*bool.*, got", call, *QKV, is_causal=wrong)

    @ALL_CALLS
    def test_enable_gqa(self, call: Call) -> None:
        assert_rejects(TypeError, "enable_gqa: expected a bool, got 'false'", call, *QKV, enable_gqa="false")

    @ATTENDING
    def test_return_lse(self, call: Call) -> None:
        assert_rejects(TypeError, "return_lse: expected a bool, got 'false'", call, *QKV, return_lse="false")


@pytest.mark.usefixtures("nothing_runs")
class TestSparsity:
    @PREDICTING
    @pytest.mark.parametrize("wrong", [0, 0.0, -0.5, 1.0001, 2, math.nan, math.inf, -math.inf])
    def test_topk_outside_its_range(self, call: Call, wrong: float) -> None:
        message = rf"topk: expected a value in \(0, 1\], got {float(wrong)}"
        assert_rejects(ValueError, message, call, *QKV, topk=wrong)

    @PREDICTING
    @pytest.mark.parametrize("wrong", [True, "0.5", [0.5, 0.5], 1 + 0j])
    def test_topk_of_wrong_type(self, call: Call, wrong: Any) -> None:
        message = f"topk: expected a number or a per-head tensor, got {type(wrong).__name__}"
        assert_rejects(TypeError, message, call, *QKV, topk=wrong)

    @PREDICTING
    @pytest.mark.parametrize("length", [1, 3])
    def test_per_head_tensor_of_the_wrong_length(self, call: Call, length: int) -> None:
        message = rf"topk: expected one entry per query head \(2\), got {length}"
        assert_rejects(ValueError, message, call, *QKV, topk=torch.full((length,), 0.5))

    @PREDICTING
    def test_per_head_tensor_counts_query_heads(self, call: Call) -> None:
        tensors = make_qkv(100, heads=6, kv_heads=2)
        message = r"topk: expected one entry per query head \(6\), got 2"
        assert_rejects(ValueError, message, call, *tensors, enable_gqa=True, topk=torch.tensor([0.5, 0.5]))

    @PREDICTING
    @pytest.mark.parametrize(
        "wrong",
        [torch.tensor(0.5), torch.full((1, 2), 0.5), torch.full((2, 1, 1), 0.5), torch.tensor([1, 1]), torch.ones(0)],
        ids=["0-D", "2-D", "3-D", "integers", "empty"],
    )
    def test_per_head_tensor_of_wrong_form(self, call: Call, wrong: torch.Tensor) -> None:
        message = r"topk: expected a number or a one-dimensional floating-point tensor .* got a tensor of shape"
        assert_rejects(TypeError, message, call, *QKV, topk=wrong)

    @PREDICTING
    @pytest.mark.parametrize("bad", [math.nan, 0.0, -0.1, 1.5, math.inf])
    def test_per_head_tensor_with_a_bad_entry(self, call: Call, bad: float) -> None:
        message = rf"topk: expected a value in \(0, 1\], got {bad}"
        assert_rejects(ValueError, message, call, *QKV, topk=torch.tensor([0.5, bad]))

    @PREDICTING
    @pytest.mark.parametrize("sparsity", [TopK(0.3), TopCdf(0.9), sparge.Dense()])
    def test_topk_and_sparsity(self, call: Call, sparsity: Any) -> None:
        message = rf"expected topk or sparsity, got both: topk=0.5 and sparsity={type(sparsity).__name__}\("
        assert_rejects(ValueError, message, call, *QKV, topk=0.5, sparsity=sparsity)

    @PREDICTING
    @pytest.mark.parametrize("wrong", [0.5, "topk", TopK, {"topk": 0.5}])
    def test_sparsity_of_wrong_type(self, call: Call, wrong: Any) -> None:
        message = rf"sparsity: expected Budget\(...\), TopK\(.*\) or Dense\(\), got {type(wrong).__name__}"
        assert_rejects(TypeError, message, call, *QKV, sparsity=wrong)

    @pytest.mark.parametrize("name", ["cdf", "similarity_threshold", "pv_threshold"])
    def test_other_per_head_tensors_of_the_wrong_length(self, name: str) -> None:
        value = torch.full((3,), -5.0 if name == "pv_threshold" else 0.5)
        message = rf"{name}: expected one entry per query head \(2\), got 3"
        assert_rejects(ValueError, message, attention, *QKV, sparsity=TopCdf(**{name: value}))

    def test_pv_threshold_of_block_sparse(self) -> None:
        three = torch.full((3,), -5.0)
        message = r"pv_threshold: expected one entry per query head \(2\), got 3"
        assert_rejects(ValueError, message, block_sparse, *QKV, pv_threshold=three)
        for wrong in (0.0, 1.0, math.nan):
            message = rf"pv_threshold: expected a value in \[-inf, 0\), got {wrong}"
            assert_rejects(ValueError, message, block_sparse, *QKV, pv_threshold=wrong)

    @pytest.mark.parametrize("kind", [TopK, TopCdf])
    @pytest.mark.parametrize(
        "options, error, message",
        [
            ({"min_blocks": -1}, ValueError, "min_blocks: expected 0 or more, got -1"),
            ({"min_blocks": 2.0}, TypeError, "min_blocks: expected an int, got float"),
            ({"min_blocks": True}, TypeError, "min_blocks: expected an int, got bool"),
            ({"similarity_threshold": 1.5}, ValueError, r"similarity_threshold: expected a value in \[0, 1\], got 1.5"),
            ({"similarity_threshold": math.nan}, ValueError, r"similarity_threshold: expected .* got nan"),
            ({"pv_threshold": 0.0}, ValueError, r"pv_threshold: expected a value in \[-inf, 0\), got 0.0"),
            ({"pv_threshold": "low"}, TypeError, "pv_threshold: expected a number or a per-head tensor, got str"),
            ({"sink": 1}, TypeError, "sink: expected True, False or None .* got 1"),
            ({"diagonal": "yes"}, TypeError, "diagonal: expected True, False or None .* got 'yes'"),
        ],
    )
    def test_thresholds(self, kind: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
        assert_rejects(error, message, lambda: kind(**options))

    @pytest.mark.parametrize("wrong", [0.0, -1.0, 1.01, math.nan])
    def test_cdf_outside_its_range(self, wrong: float) -> None:
        assert_rejects(ValueError, rf"cdf: expected a value in \(0, 1\], got {wrong}", lambda: TopCdf(wrong))


@pytest.mark.usefixtures("nothing_runs")
class TestScaleAndMasks:
    @ALL_CALLS
    @pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
    def test_non_finite_scale(self, call: Call, wrong: float) -> None:
        assert_rejects(ValueError, f"scale: expected a finite number, got {wrong}", call, *QKV, scale=wrong)

    @ALL_CALLS
    @pytest.mark.parametrize("wrong", ["1", True, torch.tensor(1.0)])
    def test_scale_of_wrong_type(self, call: Call, wrong: Any) -> None:
        message = f"scale: expected a number or None, got {type(wrong).__name__}"
        assert_rejects(TypeError, message, call, *QKV, scale=wrong)

    @ALL_CALLS
    @pytest.mark.parametrize("wrong", [128, (128,), (1, 2, 3), "ab", {1, 2}])
    def test_window_that_is_not_a_pair(self, call: Call, wrong: Any) -> None:
        message = re.escape(f"window: expected None or a pair (left, right), got {wrong!r}")
        assert_rejects(TypeError, message, call, *QKV, window=wrong)

    @ALL_CALLS
    @pytest.mark.parametrize("wrong", [(1.0, 0), (True, 0), (None, "0")])
    def test_window_of_wrong_types(self, call: Call, wrong: Any) -> None:
        message = re.escape(f"window: expected two ints (or None, no bound), got {wrong!r}")
        assert_rejects(TypeError, message, call, *QKV, window=wrong)

    @ALL_CALLS
    def test_window_below_zero(self, call: Call) -> None:
        message = r"window: expected numbers from 0 up \(or -1 or None, no bound\), got \(5, -2\)"
        assert_rejects(ValueError, message, call, *QKV, window=(5, -2))

    @ALL_CALLS
    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.complex64, torch.float64, torch.float8_e4m3fn])
    def test_unsupported_dtype_of_attn_mask(self, call: Call, dtype: torch.dtype) -> None:
        mask = torch.ones(100, 100).to(dtype)
        message = f"attn_mask: expected bool, float16, bfloat16 or float32, got {dtype}"
        assert_rejects(TypeError, message, call, *QKV, attn_mask=mask)

    @ALL_CALLS
    def test_attn_mask_that_is_not_a_tensor(self, call: Call) -> None:
        message = "attn_mask: expected a torch.Tensor or None, got str"
        assert_rejects(TypeError, message, call, *QKV, attn_mask="causal")

    @ALL_CALLS
    @pytest.mark.parametrize("shape", [(99, 100), (100, 64), (3, 1, 100, 100), (1, 3, 100, 100), (1, 1, 1, 100, 100)])
    def test_attn_mask_of_the_wrong_shape(self, call: Call, shape: tuple[int, ...]) -> None:
        got = rf"\({', '.join(map(str, shape))}\)$"
        message = r"attn_mask: expected a shape that broadcasts to \(B, H, S_q, S_k\) = \(1, 2, 100, 100\), got " + got
        assert_rejects(ValueError, message, call, *QKV, attn_mask=torch.ones(shape, dtype=torch.bool))

    @ALL_CALLS
    def test_key_padding_mask_without_its_dimensions(self, call: Call) -> None:
        tensors = make_qkv(100, batch=3)
        mask = torch.ones(3, 100, dtype=torch.bool)
        message = r"got \(3, 100\); a key-padding mask \(B, S_k\) is passed as mask\[:, None, None, :\]"
        assert_rejects(ValueError, message, call, *tensors, attn_mask=mask)

    @ALL_CALLS
    def test_attn_mask_on_another_device(self, call: Call) -> None:
        mask = torch.ones(100, 100, dtype=torch.bool, device="meta")
        assert_rejects(ValueError, "attn_mask: expected the query's device cpu, got meta", call, *QKV, attn_mask=mask)

    @PREDICTING
    @pytest.mark.parametrize("wrong", [[(0, 101)], [(-1, 5)], [(5, 5)], [(0, 10), (9, 3)]], ids=repr)
    def test_always_keep_outside_the_keys(self, call: Call, wrong: Any) -> None:
        message = r"always_keep: expected 0 <= start < stop <= 100 \(the number of keys\), got"
        assert_rejects(ValueError, message, call, *QKV, always_keep=wrong)

    @PREDICTING
    @pytest.mark.parametrize(
        "wrong", [[(0.0, 5.0)], [(0, 5, 9)], [(True, 5)], [5], (0, 5), 5, "ab", torch.tensor([[0, 5]])], ids=repr
    )
    def test_always_keep_of_wrong_form(self, call: Call, wrong: Any) -> None:
        message = r"always_keep: expected .*\(start, stop\).*, got"
        assert_rejects(TypeError, message, call, *QKV, always_keep=wrong)

    def test_budget_density_is_one_number(self) -> None:
        for wrong, error, message in (
            (torch.tensor([0.2, 0.3]), TypeError, "density: expected a number, got a tensor"),
            (1.5, ValueError, r"density: expected a value in \(0, 1\], got 1.5"),
        ):
            with pytest.raises(error, match=message):
                sparge.Budget(wrong)  # type: ignore[arg-type]

    @PREDICTING
    def test_exact_queries(self, call: Call) -> None:
        message = r"exact_queries: expected 0 <= start < stop <= 100 \(the number of queries\), got \(7, 101\)"
        assert_rejects(ValueError, message, call, *QKV, exact_queries=[(7, 101)])
        assert_rejects(TypeError, r"exact_queries: expected .*\(start, stop\).*, got", call, *QKV, exact_queries=7)


class TestBlockMasks:
    """`nothing_runs` is not used: building the masks runs operators."""

    QKV = make_qkv(300, 200, batch=2)  # 3 x 4 blocks

    def reject(self, error: type[Exception], message: str, mask: Any, **options: Any) -> None:
        assert_rejects(error, message, lambda: sparge.block_sparse_attention(*self.QKV, mask, **options))
        assert sparge.stats().calls == 0

    @pytest.mark.parametrize(
        "shape", [(4, 3), (2, 4), (3, 5), (2, 2, 4, 3), (3, 1, 3, 4), (1, 3, 3, 4), (1, 2, 2, 3, 4)]
    )
    def test_wrong_shape_names_both_geometries(self, shape: tuple[int, ...]) -> None:
        message = (
            r"mask: expected a shape that broadcasts to \(B, H, ceil\(S_q / 128\), ceil\(S_k / 64\)\) = \(2, 2, 3, 4\) "
            r"for 300 queries and 200 keys in blocks of 128 x 64, got " + rf"\({', '.join(map(str, shape))}\)$"
        )
        self.reject(ValueError, message, torch.ones(shape, dtype=torch.bool))

    @pytest.mark.parametrize("q_len, kv_len", [(299, 200), (300, 193), (200, 300)])
    def test_block_mask_with_different_lengths(self, q_len: int, kv_len: int) -> None:
        blocks = (-(-q_len // 128), -(-kv_len // 64))
        mask = BlockMask.from_dense(torch.ones(2, 2, *blocks, dtype=torch.bool), q_len=q_len, kv_len=kv_len)
        message = (
            r"mask: expected .* = \(2, 2, 3, 4\) for 300 queries and 200 keys in blocks of 128 x 64, "
            rf"got \(2, 2, {blocks[0]}, {blocks[1]}\) for {q_len} queries and {kv_len} keys"
        )
        self.reject(ValueError, message, mask)

    def test_block_mask_with_a_different_number_of_heads(self) -> None:
        mask = BlockMask.from_dense(torch.ones(2, 3, 3, 4, dtype=torch.bool), q_len=300, kv_len=200)
        self.reject(ValueError, r"mask: expected .* \(2, 2, 3, 4\) .* got \(2, 3, 3, 4\)", mask)

    @pytest.mark.parametrize("causal", [True, False])
    def test_is_causal_that_contradicts_the_mask(self, causal: bool) -> None:
        dense = torch.ones(2, 2, 3, 4, dtype=torch.bool)
        mask = BlockMask.from_dense(dense, q_len=300, kv_len=200, is_causal=causal)
        message = f"is_causal: expected {causal} as in the mask, got {not causal}"
        self.reject(ValueError, message, mask, is_causal=not causal)

    def test_wrong_type_or_dtype(self) -> None:
        self.reject(TypeError, "mask: expected a BlockMask or a bool tensor, got NoneType", None)
        self.reject(TypeError, "mask: expected a BlockMask or a bool tensor, got list", [[True]])
        self.reject(TypeError, "mask: expected .* got dtype torch.float32", torch.ones(3, 4))

    def test_mask_on_another_device(self) -> None:
        dense = torch.ones(2, 2, 3, 4, dtype=torch.bool)
        message = "mask: expected the query's device cpu, got meta"
        self.reject(ValueError, message, dense.to("meta"))
        self.reject(ValueError, message, BlockMask.from_dense(dense, q_len=300, kv_len=200).to("meta"))


@pytest.mark.usefixtures("nothing_runs")
class TestUnsupported:
    @pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
    @pytest.mark.parametrize("dropout_p", [0.1, 1, 1.0])
    def test_dropout(self, backend: str, dropout_p: float) -> None:
        message = rf"dropout_p: expected 0.0 \(sparse attention has no dropout\), got {dropout_p}"
        assert_rejects(NotImplementedError, message, attention, *QKV, dropout_p=dropout_p, backend=backend)

    @pytest.mark.parametrize("mode", ["raise", "dense"])
    @pytest.mark.parametrize("dropout_p", [-0.1, 1.1, math.nan])
    def test_dropout_outside_its_range(self, mode: str, dropout_p: float) -> None:
        message = rf"dropout_p: expected a value in \[0, 1\], got {dropout_p}"
        assert_rejects(ValueError, message, attention, *QKV, dropout_p=dropout_p, on_unsupported=mode)

    @pytest.mark.parametrize("wrong", ["0", None, True])
    def test_dropout_of_wrong_type(self, wrong: Any) -> None:
        message = f"dropout_p: expected a number, got {type(wrong).__name__}"
        assert_rejects(TypeError, message, attention, *QKV, dropout_p=wrong)

    @ATTENDING
    @pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
    @pytest.mark.parametrize("position", range(3))
    def test_gradients(self, call: Call, backend: str, position: int) -> None:
        tensors = [tensor.clone().requires_grad_(index == position) for index, tensor in enumerate(QKV)]
        message = r"expected inputs without gradients .* torch.no_grad\(\) .* got requires_grad=True under autograd"
        assert_rejects(NotImplementedError, message, call, *tensors, backend=backend)

    @ATTENDING
    @pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
    def test_gradients_of_an_additive_mask(self, call: Call, backend: str) -> None:
        bias = torch.zeros(100, 100, requires_grad=True)
        message = r"expected .*without gradients.* got requires_grad=True under autograd"
        assert_rejects(NotImplementedError, message, call, *QKV, attn_mask=bias, backend=backend)

    @ATTENDING
    @pytest.mark.parametrize("head_dim", [4, 7, 257, 512])
    def test_head_dim(self, call: Call, head_dim: int) -> None:
        tensors = make_qkv(100, head_dim=head_dim, value_dim=32)
        message = rf"^head_dim: expected a value in \[8, 256\], got {head_dim}"
        assert_rejects(NotImplementedError, message, call, *tensors)

    @ATTENDING
    @pytest.mark.parametrize("value_dim", [4, 512])
    def test_value_head_dim(self, call: Call, value_dim: int) -> None:
        message = rf"value head_dim: expected a value in \[8, 256\], got {value_dim}"
        assert_rejects(NotImplementedError, message, call, *make_qkv(100, value_dim=value_dim))

    @pytest.mark.parametrize("mode", ["warn", "dense"])
    @pytest.mark.parametrize("backend", ["torch", "reference"])
    @pytest.mark.parametrize("why", ["dropout", "gradients", "head_dim"])
    def test_explicit_backend_never_falls_back(self, mode: str, backend: str, why: str) -> None:
        query, key, value = make_qkv(100, head_dim=4 if why == "head_dim" else 32)
        query.requires_grad_(why == "gradients")
        options = {"dropout_p": 0.5} if why == "dropout" else {}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_rejects(
                NotImplementedError,
                "expected",
                attention,
                query,
                key,
                value,
                backend=backend,
                on_unsupported=mode,
                **options,
            )


class TestFallback:
    @pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
    def test_no_grad_accepts_tensors_that_require_gradients(self, backend: str) -> None:
        tensors = [tensor.clone().requires_grad_() for tensor in QKV]
        with torch.no_grad():
            output = sparge.attention(*tensors, backend=backend, topk=1)
        torch.testing.assert_close(output.double(), exact_attention(*QKV)[0], rtol=0, atol=2e-6)
        assert not output.requires_grad

    def test_inference_mode(self) -> None:
        with torch.inference_mode():
            output = sparge.attention(*QKV, backend="torch", topk=1)
        assert torch.equal(output, sparge.attention(*QKV, backend="torch", topk=1))

    @pytest.mark.parametrize("mode", ["warn", "dense"])
    @pytest.mark.parametrize("q_len, kv_len, causal", [(100, 100, False), (100, 100, True), (70, 100, True)])
    @pytest.mark.parametrize("layout", ["HND", "NHD"])
    def test_gradients_flow_through_the_dense_fallback(
        self, mode: str, q_len: int, kv_len: int, causal: bool, layout: str
    ) -> None:
        tensors = make_qkv(q_len, kv_len, heads=4, kv_heads=2, value_dim=16)
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        inputs = [tensor.transpose(1, 2) for tensor in leaves] if layout == "NHD" else leaves
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            output = sparge.attention(
                *inputs, is_causal=causal, scale=0.3, enable_gqa=True, layout=layout, on_unsupported=mode
            )
        assert len(caught) == (mode == "warn")
        output = output.transpose(1, 2) if layout == "NHD" else output
        exact = [tensor.double().requires_grad_() for tensor in tensors]
        expected, _ = exact_attention(*exact, is_causal=causal, scale=0.3)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-6)
        weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (output.double() * weight).sum().backward()
        (expected * weight).sum().backward()
        for tensor, oracle in zip(leaves, exact, strict=True):
            torch.testing.assert_close(tensor.grad.double(), oracle.grad, rtol=0, atol=1e-5)
        assert sparge.stats().reasons == {"dense: unsupported (gradients)": 1}

    def test_fallback_warns_once_with_the_reason_and_the_caller(self) -> None:
        with pytest.warns(UserWarning) as caught:
            sparge.attention(*QKV, dropout_p=0.5, on_unsupported="warn")
        assert [str(warning.message) for warning in caught] == [
            "sparge runs dense: dropout_p: expected 0.0 (sparse attention has no dropout), got 0.5"
        ]
        assert caught[0].filename == __file__

    def test_fallback_uses_the_dropout_of_torch(self) -> None:
        torch.manual_seed(3)
        output = sparge.attention(*QKV, dropout_p=0.5, on_unsupported="dense")
        torch.manual_seed(3)
        assert torch.equal(output, F.scaled_dot_product_attention(*QKV, dropout_p=0.5, scale=32**-0.5))

    @pytest.mark.parametrize("head_dim", [4, 512])
    def test_fallback_supports_any_head_dim(self, head_dim: int) -> None:
        query, key, value = make_qkv(70, 50, head_dim=head_dim)
        output = sparge.attention(query, key, value, is_causal=True, on_unsupported="dense")
        expected, _ = exact_attention(query, key, value, is_causal=True)
        assert (output[:, :, :20] == 0).all()  # no visible keys
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=5e-6)

    @pytest.mark.parametrize("kind", ["bool", "-inf", "lowest"])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_fallback_interprets_masks_as_sparse_calls_do(self, kind: str, causal: bool, dtype: torch.dtype) -> None:
        query, key, value = make_qkv(60, 60, head_dim=4, dtype=dtype)
        seen = torch.rand(60, 60, generator=torch.Generator().manual_seed(2)) < 0.5
        seen[7] = False
        mask = seen
        if kind != "bool":
            hidden = -math.inf if kind == "-inf" else torch.finfo(torch.float32).min
            mask = torch.randn(60, 60, generator=torch.Generator().manual_seed(4)).masked_fill(~seen, hidden)
        output = sparge.attention(query, key, value, mask, is_causal=causal, on_unsupported="dense")
        assert (output[:, :, 7] == 0).all()
        call = {"is_causal": causal, "attn_mask": mask}
        exact, _ = exact_attention(query, key, value, **call)
        assert_within_budget(output, exact, plain_attention(query, key, value, **call))

    def test_fallback_has_no_lse(self) -> None:
        with pytest.raises(NotImplementedError, match=r"dropout_p: expected 0\.0"):
            sparge.attention(*QKV, dropout_p=0.5, on_unsupported="dense", return_lse=True)
        assert sparge.stats().calls == 0
