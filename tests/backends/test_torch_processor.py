"""The torch backend on different CPUs: 16-bit units, threads, crossover."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sparge
from conftest import assert_within_budget, causality, exact_attention, make_qkv, plain_attention
from sparge import Budget, TopK, stats
from sparge.backends import base
from sparge.backends.torch import TorchBackend, processor
from sparge.backends.torch import blocks as torch_blocks
from sparge.backends.torch.processor import CROSSOVERS, SCORES_PER_THREAD, Units
from sparge.masks.geometry import Shape

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES = pytest.mark.parametrize("dtype", [BF16, FP16])


@pytest.fixture
def simulate_units(monkeypatch: pytest.MonkeyPatch) -> Callable[[Units], None]:
    """Simulate a CPU with the given 16-bit units. torch's kernels return the same results, perhaps more slowly."""

    def patch(units: Units) -> None:
        monkeypatch.setattr(processor, "units", lambda dtype: Units.NATIVE if dtype == FP32 else units)

    return patch


@pytest.fixture
def simulate_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that simulates a number of threads."""
    return lambda number: monkeypatch.setattr(torch, "get_num_threads", lambda: number)


def random_blocks(query: Tensor, key: Tensor, density: float) -> Tensor:
    """Return random blocks (B, H, q_blocks, kv_blocks); consecutive query blocks share most of them."""
    generator = torch.Generator().manual_seed(3)
    sizes = (*query.shape[:2], -(-query.shape[2] // 128), -(-key.shape[2] // 64))
    kept = torch.rand(sizes, generator=generator) < density
    odd = kept[:, :, : kept.shape[2] // 2 * 2 : 2]
    kept[:, :, 1::2] = odd ^ (torch.rand(odd.shape, generator=generator) < 0.1)
    return kept


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, int]]:
    """Return a list that records the dtype and the query length of every call of torch's CPU attention."""
    calls = []
    kernel = torch_blocks._attend_cpu

    def recorded(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        calls.append((query.dtype, query.shape[1]))
        return kernel(query, *others)

    monkeypatch.setattr(torch_blocks, "_attend_cpu", recorded)
    return calls


class TestSixteenBits:
    @causality
    @HALVES
    def test_products_on_matrix_units_are_within_the_budget(
        self, dtype, is_causal, simulate_units, kernel_calls
    ) -> None:
        simulate_units(Units.MATRIX)
        query, key, value = make_qkv(300, 1000, heads=2, kv_heads=1, head_dim=16, dtype=dtype)
        mask = random_blocks(query, key, 0.95)
        output = sparge.block_sparse_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=True)
        assert set(kernel_calls) == {(dtype, 128), (dtype, 256)}
        exact, _ = exact_attention(query, key, value, is_causal=is_causal, block_mask=mask)
        plain = plain_attention(query, key, value, is_causal=is_causal, block_mask=mask)
        assert_within_budget(output, exact, plain)

    @pytest.mark.parametrize("units", [Units.VECTOR, Units.NONE])
    def test_products_are_float32_without_matrix_units(self, units, simulate_units, kernel_calls) -> None:
        simulate_units(units)
        query, key, value = make_qkv(300, head_dim=16, dtype=BF16)
        sparge.attention(query, key, value, topk=0.5, backend="torch")
        assert {dtype for dtype, _ in kernel_calls} == {FP32}

    def test_calls_with_an_lse_are_exact(self, simulate_units) -> None:
        """The LSE of torch's 16-bit kernel is off by 5e-5, because its exponentials are inexact."""
        query, key, value = make_qkv(300, head_dim=16, dtype=BF16)
        results = []
        for units in (Units.NONE, Units.MATRIX):
            simulate_units(units)
            for sparsity in (Budget(0.5), sparge.Dense()):
                got = sparge.attention(query, key, value, sparsity=sparsity, backend="torch", return_lse=True)
                results.append(got)
        for before, after in zip(results[:2], results[2:], strict=True):
            assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])

    @causality
    @pytest.mark.parametrize("units", [Units.MATRIX, Units.VECTOR])
    def test_dense_attention_is_sdpa(self, units, is_causal, simulate_units) -> None:
        simulate_units(units)
        query, key, value = make_qkv(200, head_dim=16, dtype=BF16)
        output = sparge.attention(query, key, value, topk=0.5, is_causal=is_causal)
        assert stats().reasons == {"dense: below the crossover": 1}
        assert torch.equal(output, F.scaled_dot_product_attention(query, key, value, is_causal=is_causal))

    @causality
    def test_dense_attention_with_a_mask_is_within_the_budget(self, is_causal, simulate_units, kernel_calls) -> None:
        simulate_units(Units.MATRIX)
        query, key, value = make_qkv(150, 200, head_dim=16, dtype=BF16)
        call = {"is_causal": is_causal, "attn_mask": torch.arange(200) > 60}
        output = sparge.attention(query, key, value, topk=0.5, **call)
        assert kernel_calls == [(BF16, 150)]
        assert_within_budget(
            output, exact_attention(query, key, value, **call)[0], plain_attention(query, key, value, **call)
        )

    def test_hidden_non_finite_keys_have_no_effect(self, simulate_units) -> None:
        simulate_units(Units.MATRIX)
        query, key, value = make_qkv(200, head_dim=16, dtype=BF16)
        key[:, :, 130:] = torch.nan
        full = sparge.attention(query, key, value, is_causal=True, topk=1.0, backend="torch")
        past = sparge.attention(*(x[:, :, :130] for x in (query, key, value)), is_causal=True, topk=1, backend="torch")
        assert torch.equal(full[:, :, :128], past[:, :, :128])
        torch.testing.assert_close(full[:, :, 128:130], past[:, :, 128:])

    def test_unequal_widths_use_float32(self, simulate_units) -> None:
        simulate_units(Units.MATRIX)
        query, key, value = make_qkv(300, head_dim=16, value_dim=24, dtype=BF16)
        output = sparge.attention(query, key, value, topk=1.0, backend="torch")
        exact, _ = exact_attention(query, key, value)
        assert_within_budget(output, exact, plain_attention(query, key, value))


class TestBatches:
    @causality
    @pytest.mark.parametrize("whole", [1, 3, 8])
    def test_every_kept_block_counts_once(self, whole, is_causal, monkeypatch: pytest.MonkeyPatch) -> None:
        """The batches of query blocks and the overlap of their kept blocks make no difference."""
        monkeypatch.setattr(torch_blocks, "STEP_BLOCKS", whole)
        query, key, value = make_qkv(650, 1500, heads=2, head_dim=16)
        mask = random_blocks(query, key, 0.7)
        got = sparge.block_sparse_attention(query, key, value, mask, is_causal=is_causal, backend="torch")
        exact, _ = exact_attention(query, key, value, is_causal=is_causal, block_mask=mask)
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)

    def test_query_blocks_with_many_block_counts_run_in_few_batches(self, kernel_calls) -> None:
        """Small batches are slow: each batch runs a dozen operators, and one query block leaves threads idle."""
        query, key, value = make_qkv(4096, heads=2, head_dim=16)
        kept = (
            torch.rand(1, 2, 32, 64, generator=torch.Generator().manual_seed(0)) < torch.linspace(0.1, 0.9, 32)[:, None]
        )
        sparge.block_sparse_attention(query, key, value, kept, backend="torch")
        assert len(kept.sum(-1).unique()) > 35
        assert len(kernel_calls) < 22

    def test_batching_of_past_queries_does_not_depend_on_the_future(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The batch of a causal query block does not depend on the blocks that the next query block keeps."""
        monkeypatch.setattr(torch_blocks, "STEP_BLOCKS", 1)
        query, key, value = make_qkv(1024, heads=2, head_dim=16)
        changed = query.clone()
        changed[:, :, 896:] = make_qkv(128, heads=2, head_dim=16, seed=7)[0]  # the second of the last pair
        options = {"is_causal": True, "sparsity": TopK(0.6, min_blocks=1), "backend": "torch"}
        before, after = (sparge.attention(q, key, value, **options) for q in (query, changed))
        assert torch.equal(before[:, :, :896], after[:, :, :896])
        assert not torch.equal(before[:, :, 896:], after[:, :, 896:])

    def test_batch_items_do_not_affect_each_other(self) -> None:
        query, key, value = make_qkv(1024, batch=3, heads=2, head_dim=16)
        key[1] *= 3
        options = {"topk": 0.6, "backend": "torch"}
        together = sparge.attention(query, key, value, **options)
        for item in range(3):
            alone = sparge.attention(*(x[item : item + 1] for x in (query, key, value)), **options)
            assert torch.equal(alone[0], together[item])


class TestUnits:
    @pytest.fixture(autouse=True)
    def clear_caches(self) -> Iterator[None]:
        yield
        processor.units.cache_clear()
        processor.architecture.cache_clear()

    @pytest.mark.parametrize(
        "machine, features, expected",
        [
            ("x86_64", {"amx_tile", "avx512_bf16", "mkldnn_bf16"}, {BF16: Units.MATRIX, FP16: Units.NONE}),
            ("AMD64", {"amx_tile", "amx_fp16", "mkldnn_fp16"}, {BF16: Units.MATRIX, FP16: Units.MATRIX}),
            ("x86_64", {"avx512_bf16", "mkldnn_bf16"}, {BF16: Units.VECTOR, FP16: Units.NONE}),
            ("x86_64", {"mkldnn_bf16", "mkldnn_fp16"}, {BF16: Units.NONE, FP16: Units.VECTOR}),
            ("aarch64", {"mkldnn_fp16"}, {BF16: Units.NONE, FP16: Units.NONE}),
            ("arm64", {"mkldnn_bf16", "mkldnn_fp16"}, {BF16: Units.VECTOR, FP16: Units.NONE}),
            ("riscv64", set(), {BF16: Units.NONE, FP16: Units.NONE}),
        ],
    )
    def test_units_follow_the_features_that_torch_reports(
        self, machine, features, expected, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(processor.platform, "machine", lambda: machine)
        monkeypatch.setattr(processor, "_cpu_has", lambda name: name in features)
        monkeypatch.setattr(processor, "_onednn_has", lambda name: f"mkldnn_{name}" in features)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        self.clear()
        assert {dtype: processor.units(dtype) for dtype in expected} == expected
        assert processor.units(FP32) is Units.NATIVE

    def test_torch_without_feature_queries_has_no_units(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
        for name in ("amx_tile", "amx_fp16", "avx512_bf16"):
            monkeypatch.delattr(torch.cpu, f"_is_{name}_supported", raising=False)
        monkeypatch.setattr(torch.ops, "mkldnn", object())
        self.clear()
        assert {processor.units(dtype) for dtype in (BF16, FP16)} == {Units.NONE}

    @staticmethod
    def clear() -> None:
        processor.units.cache_clear()
        processor.architecture.cache_clear()

    def test_crossovers_depend_on_the_processor(
        self, monkeypatch: pytest.MonkeyPatch, simulate_threads, simulate_units
    ) -> None:
        simulate_threads(2)
        monkeypatch.setattr(processor, "architecture", lambda: "x86")
        for units in (Units.MATRIX, Units.VECTOR, Units.NONE):
            simulate_units(units)
            expected = CROSSOVERS.get(("x86", units), base.NEVER)
            got = processor.crossover("cpu", BF16)
            assert (got.keys, got.causal_keys) == (expected.keys, expected.causal_keys)
            assert processor.crossover("cpu", FP32) == CROSSOVERS["x86", Units.NATIVE]
        assert processor.crossover("mps", BF16) == CROSSOVERS["arm", Units.NATIVE]
        simulate_threads(16)
        many = processor.crossover("cpu", FP32)
        assert (many.keys, many.causal_keys, many.scores) == (8192, 8192, 16 * SCORES_PER_THREAD) == (8192, 8192, 2**29)

    def test_units_without_a_measured_crossover_never_run_sparse(
        self, monkeypatch: pytest.MonkeyPatch, simulate_units
    ) -> None:
        monkeypatch.setattr(TorchBackend, "crossover", lambda _, *arguments: processor.crossover(*arguments))
        simulate_units(Units.VECTOR)
        shape, device = Shape(8, 32, 32, 2**20, 2**20, 128, 128), torch.device("cpu")
        sizes = (shape.batch * shape.heads, shape.q_len, shape.kv_len, True)
        prefers_dense = {
            dtype: base.is_below(base.crossover_of("torch", device.type, dtype), *sizes) for dtype in (BF16, FP16, FP32)
        }
        assert prefers_dense == {BF16: True, FP16: True, FP32: False}

    def test_replace_sdpa_uses_the_crossover_of_the_dtype(self, monkeypatch: pytest.MonkeyPatch) -> None:
        by_dtype = {BF16: base.NEVER, FP32: base.ALWAYS}
        monkeypatch.setattr(TorchBackend, "crossover", lambda _, __, dtype: by_dtype[dtype])
        tensors = make_qkv(200, head_dim=16)
        with sparge.replace_sdpa(sparge.Policy(min_tokens=0)):
            for dtype in (BF16, FP32):
                F.scaled_dot_product_attention(*(x.to(dtype) for x in tensors))
            assert stats().reasons == {"dense: below the crossover": 1, "sparse: torch": 1}
            with torch.autocast("cpu", dtype=BF16):
                F.scaled_dot_product_attention(*tensors)
        assert stats().reasons == {"dense: below the crossover": 2, "sparse: torch": 1}
