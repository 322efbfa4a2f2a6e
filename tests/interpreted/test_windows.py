"""Sliding windows in the Triton stages and the attention kernel: blocks and results match the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from benchmarks.numerics.families import by_name
from torch import Tensor

import sparge
from conftest import make_qkv, relative_l1
from interpreted.conftest import call_of, make_problem
from interpreted.test_attention import DTYPE_OF, assert_attention, forced_peak_handling, forced_tiles, random_blocks
from interpreted.test_pipeline import RULES, clustered_inputs
from selection import assert_same_blocks
from sparge import Dense, Mean, Moment, Spread, TopK
from sparge.backends.gpu.peak_handling import peak_handling
from sparge.masks.geometry import Shape

pytestmark = pytest.mark.usefixtures("poisoned_memory")

Window = tuple[int | None, int | None]
TRITON: dict[str, Any] = {"backend": "triton", "enable_gqa": True}


class TestPredict:
    @pytest.mark.parametrize(
        "rule, score, window",
        [
            ("topk", Moment(), (130, 0)),
            ("similarity", Mean(), (200, 20)),
            ("budget with a floor", Moment(), (150, 0)),
            ("similarity budget", Spread(4), (100, 64)),
            ("budget", Mean(), (None, 65)),
        ],
    )
    def test_rules(self, monkeypatch: pytest.MonkeyPatch, rule: str, score: Any, window: Window) -> None:
        query, key, _ = clustered_inputs(300, 450) if window[1] == 0 else clustered_inputs(450, 300)
        mask = assert_same_blocks(
            monkeypatch, query, key, backend="triton", sparsity=RULES[rule], window=window, score=score
        )
        assert mask.window == window

    @pytest.mark.parametrize("window", [(130, 0), (None, 70)], ids=str)
    def test_masks(self, monkeypatch: pytest.MonkeyPatch, window: Window) -> None:
        query, key, _ = clustered_inputs(batch=2)
        mask = (torch.arange(450) < torch.tensor([450, 150])[:, None])[:, None, None]
        options = {"window": window, "attn_mask": mask, "sparsity": TopK(0.4, min_blocks=1)}
        assert_same_blocks(monkeypatch, query, key, backend="triton", **options)

    def test_keys_outside_the_window_have_no_effect(self) -> None:
        """Query block 2 sees keys from 256 - 130 to 383."""
        query, key, _ = clustered_inputs(512, 512, heads=1)
        options = {"window": (130, 0), "sparsity": TopK(0.4, min_blocks=1), **TRITON}
        before = sparge.predict(query, key, **options).to_dense()[:, :, 2]
        for outside in (1e3, math.nan):
            changed = key.clone()
            changed[:, :, :126] = outside
            changed[:, :, 384:] = outside
            assert torch.equal(sparge.predict(query, changed, **options).to_dense()[:, :, 2], before)


class TestAttention:
    @pytest.mark.parametrize(
        "quantization, window, q_len, kv_len",
        [
            ("none", (0, 0), 129, 200),
            ("none", (64, 65), 300, 129),
            ("none", (70, None), 129, 129),
            ("int8_fp8", (100, 0), 129, 300),
            ("int8_fp16", (63, 3), 129, 200),
        ],
    )
    def test_all_blocks(self, quantization: str, window: Window, q_len: int, kv_len: int) -> None:
        query, key, value, _ = make_problem(q_len, kv_len, head_dim=32, dtype=DTYPE_OF[quantization])
        assert_attention(query, key, value, None, quantization=quantization, window=window)

    @pytest.mark.parametrize("quantization, tile", [("none", (128, 1)), ("int8_fp8", (64, 2)), ("int8_fp16", (128, 2))])
    def test_lists(self, quantization: str, tile: tuple[int, int]) -> None:
        query, key, value, shape = make_problem(130, 400, head_dim=32, dtype=DTYPE_OF[quantization])
        with forced_tiles(*tile):
            assert_attention(query, key, value, random_blocks(shape), quantization=quantization, window=(150, 7))

    @pytest.mark.parametrize("quantization, kind", [("none", "keys"), ("int8_fp8", "elements"), ("none", "additive")])
    def test_masks(self, quantization: str, kind: str) -> None:
        query, key, value, shape = make_problem(65, 330, head_dim=32, dtype=DTYPE_OF[quantization])
        generator = torch.Generator().manual_seed(3)
        mask = {
            "keys": torch.rand(1, 1, 1, 330, generator=generator) > 0.4,
            "elements": torch.rand(1, 2, 65, 330, generator=generator) > 0.4,
            "additive": torch.randn(1, 1, 65, 330, generator=generator).to(query.dtype),
        }[kind]
        mask[..., :40] = False if mask.dtype == torch.bool else -math.inf
        blocks = None if kind == "keys" else random_blocks(shape)
        assert_attention(query, key, value, blocks, quantization=quantization, window=(90, 5), attn_mask=mask)

    @pytest.mark.parametrize(
        "quantization, skipped, window",
        [("none", "drop", (200, 0)), ("none", "mean", (300, 190)), ("int8_fp8", "mean", (250, 0))],
    )
    def test_means_and_keys_outside_all_windows(self, quantization: str, skipped: str, window: Window) -> None:
        """The prefix before all windows may have any contents."""
        query, key, value = make_qkv(65, 600, heads=1, head_dim=32)
        options: dict[str, Any] = {"window": window, "sparsity": TopK(0.4, min_blocks=1, sink=False), "score": "mean"}
        options |= {"quantization": quantization, "skipped": skipped, "return_lse": True}
        output, lse = sparge.attention(query, key, value, **options, **TRITON)
        expected, expected_lse = sparge.attention(query, key, value, **options, backend="reference")
        assert relative_l1(output, expected) < (1e-5 if quantization == "none" else 0.03)
        assert (lse - expected_lse).abs().max() < (1e-4 if quantization == "none" else 0.02)
        for tensor in (key, value):
            tensor[:, :, : 600 - 65 - (window[0] or 0)] = math.nan
        for got, before in zip(sparge.attention(query, key, value, **options, **TRITON), (output, lse), strict=True):
            assert torch.equal(got, before)

    @pytest.mark.parametrize("way, rule", [("every_tile", Dense()), ("marked", Dense()), ("marked", TopK(1.0))])
    def test_peaks(self, way: str, rule: Any) -> None:
        """Peak handling keeps the keys next to a sink inside the window, over all blocks and over lists."""
        query, key, value = by_name("sink-16").make(64, 320, dtype=torch.float32)
        key[:, :, 200], key[:, :, 0] = key[:, :, 0].clone(), key[:, :, 1].clone()
        value[:, :, 200] = 0.0  # the output is the tail
        options: dict[str, Any] = {"window": (130, 0), "sparsity": rule, "return_lse": True}
        with forced_peak_handling(way):
            got, _ = sparge.attention(query, key, value, quantization="int8_fp8", **options, **TRITON)
        with forced_peak_handling("ignored"):
            lost, _ = sparge.attention(query, key, value, quantization="int8_fp8", **options, **TRITON)
        exact, _ = sparge.attention(query, key, value, quantization="none", **options, backend="reference")
        assert relative_l1(lost, exact) > 0.3
        assert relative_l1(got, exact) < 0.06


@pytest.mark.parametrize("window, way", [((3840, 0), "every_tile"), ((3842, 0), "marked"), ((None, 0), "marked")])
def test_peak_handling_depends_on_the_window(window: Window, way: str) -> None:
    call = call_of(Shape(1, 1, 1, 2**16, 2**16, 64, 64), quantization="int8_fp8", window=window)
    assert peak_handling(call) == way


def test_windows_are_recorded_separately() -> None:
    query, key, value = make_qkv(130, 200, head_dim=16, dtype=torch.float16)
    mask = torch.ones(2, 4, dtype=torch.bool)
    results: list[Tensor] = []
    for window in ((40, 0), (50, 0), (50, 1), (None, 0), None):
        given = {"window": window, "quantization": "none", **TRITON}
        output = sparge.block_sparse_attention(query, key, value, mask, **given)
        assert isinstance(output, Tensor)
        assert not any(torch.equal(output, before) for before in results)
        results.append(output)
