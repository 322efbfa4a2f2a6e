"""Global settings of torch, chunk sizes and calling conventions do not change results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from conftest import (
    BACKENDS,
    assert_within_budget,
    backends,
    exact_attention,
    make_qkv,
    plain_attention,
    tokens_first,
)
from sparge import Dense, TopCdf, TopK
from sparge.backends.torch import blocks as torch_blocks
from sparge.backends.torch import predict as torch_predict
from sparge.reference import softmax
from sparge.stats import counters

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.timeout(120)]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class TestSurroundings:
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
        self,
        value_dim: int,
        options: dict[str, Any],
        backend: str,
        under: AbstractContextManager[Any] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, ...]:
        tensors = make_qkv(200, 400, heads=2, kv_heads=1, value_dim=value_dim)
        mask = torch.randn(1, 2, 1, 400, generator=torch.Generator().manual_seed(4)).to(dtype)
        query, key, value = (tensor.to(dtype) for tensor in tensors)
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
        """Autocast casts the inputs, as for SDPA, but must not change the arithmetic of the stages."""
        expected = self.results(value_dim, options, backend, dtype=torch.bfloat16)
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
        monkeypatch.setattr(softmax, "MAX_Q_BLOCKS", 3)
        got = self.results(32, options, "torch")
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    def test_positional_arguments_match_sdpa(self) -> None:
        query, key, value = make_qkv(70, 100, heads=4, kv_heads=2)
        mask = torch.randn(70, 100, generator=torch.Generator().manual_seed(4))
        arguments = (query, key, value, mask, 0.0, False, 0.3, True)
        exact, _ = exact_attention(query, key, value, attn_mask=mask, scale=0.3)
        plain = plain_attention(query, key, value, attn_mask=mask, scale=0.3)
        assert_within_budget(sparge.attention(*arguments), exact, plain)


class TestMemoryLayout:
    """The output has the memory layout of the query, so the next layer of a model does not copy it."""

    @backends
    @TestSurroundings.OPTIONS
    @pytest.mark.parametrize("return_lse", [False, True], ids=["output", "lse"])
    def test_output_has_the_memory_layout_of_the_query(
        self, backend: str, options: dict[str, Any], return_lse: bool
    ) -> None:
        query, key, value = make_qkv(200, 400, heads=2, kv_heads=1, value_dim=24)
        call = {**options, "backend": backend, "enable_gqa": True, "return_lse": return_lse}
        plain, transposed = (sparge.attention(each, key, value, **call) for each in (query, tokens_first(query)))
        if return_lse:
            assert plain[1].is_contiguous() and transposed[1].is_contiguous()
            assert torch.equal(plain[1], transposed[1])
            plain, transposed = plain[0], transposed[0]
        assert plain.is_contiguous() and transposed.transpose(1, 2).is_contiguous()
        assert torch.equal(plain, transposed)

    def test_nhd_inputs_give_a_contiguous_output(self) -> None:
        tensors = [tensor.transpose(1, 2).contiguous() for tensor in make_qkv(300, heads=2)]
        assert sparge.attention(*tensors, topk=0.5, layout="NHD", backend="torch").is_contiguous()


@backends
def test_counting_that_starts_in_inference_mode_continues_outside(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "_blocks", {})
    monkeypatch.setattr(counters, "_unused_blocks", {})
    query, key, value = make_qkv(200)
    with torch.inference_mode():
        sparge.attention(query, key, value, topk=1, backend=backend)
    sparge.attention(query, key, value, topk=1, backend=backend)
    assert sparge.stats().density == 1.0
    sparge.reset_stats()
    assert sparge.stats().density is None
