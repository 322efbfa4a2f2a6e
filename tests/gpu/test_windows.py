"""Sliding windows on a device: blocks and results match the reference, hidden keys, narrow and wide windows.

Every attention case compiles its own kernel, so there are few cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sparge
from conftest import relative_l1
from gpu.conftest import (
    BACKEND,
    DEVICE,
    FASTEST,
    FP8,
    assert_close_to_reference,
    assert_matches_exact,
    cuda_only,
    equal,
    exact,
    forget_recordings,
    make_inputs,
    random_bits,
)
from selection import assert_same_blocks
from sparge import Budget, Dense, Moment, Spread, TopCdf, TopK

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

Window = tuple[int | None, int | None]
OPTIONS: dict[str, Any] = {"enable_gqa": True, "return_lse": True, "backend": BACKEND}


@dataclass(frozen=True)
class Case:
    """A call whose window edges are inside blocks, or whose first queries see no keys."""

    quantization: str
    window: Window
    lengths: tuple[int, int]
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.quantization}-{self.head_dim}-{'x'.join(map(str, self.lengths))}-{self.window}"


CASES = [
    Case("none", (0, 0), (300, 300)),
    Case("none", (130, 0), (300, 500)),
    Case("none", (130, 0), (500, 300), 128, torch.float16),
    Case("none", (100, 65), (300, 700), 128),
    Case("none", (70, None), (300, 400)),
    Case("none", (None, 30), (300, 200)),
    Case("int8_fp16", (130, 0), (300, 500), 128, torch.float16),
    Case("int8_fp16", (200, 7), (300, 500), 256),
    *(Case(quantization, (130, 0), (300, 500), 128) for quantization in FP8),
    *(Case(quantization, (300, 64), (700, 900), 64) for quantization in FP8),
    Case(FASTEST, (1000, 0), (1300, 1300), 256),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


@cases
@pytest.mark.parametrize("blocks", ["all", "some"])
def test_attention(case: Case, blocks: str) -> None:
    tensors = make_inputs(*case.lengths, heads=4, kv_heads=2, head_dim=case.head_dim, dtype=case.dtype)
    kept = random_bits(1, 4, -(-case.lengths[0] // 128), -(-case.lengths[1] // 64))
    kept = torch.ones_like(kept) if blocks == "all" else kept
    options = {"window": case.window, "quantization": case.quantization, **OPTIONS}

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        if blocks == "all":
            return sparge.attention(query, key, value, sparsity=Dense(), **options)
        got = sparge.block_sparse_attention(query, key, value, mask, **options)
        assert isinstance(got, tuple)
        return got

    got = attend(*tensors, kept, **options)
    if case.quantization == "none":
        assert_matches_exact(got, *tensors, block_mask=kept, window=case.window)
        return
    expected = attend(*(tensor.cpu() for tensor in (*tensors, kept)), **{**options, "backend": "reference"})
    output, lse = exact(*tensors, block_mask=kept, window=case.window)
    assert_close_to_reference(got, expected, (output.cpu(), lse.cpu()), case.quantization)


@pytest.mark.parametrize("quantization", ["none", FASTEST])
@pytest.mark.parametrize("window", [(300, 0), (500, 250)], ids=str)
def test_windows_with_means(quantization: str, window: Window) -> None:
    """Compare with the torch backend in float32 on the same blocks."""
    query, key, value = make_inputs(1000, 1500, heads=2, head_dim=128)
    mask = sparge.predict(query, key, window=window, sparsity=TopK(0.4, min_blocks=1), backend=BACKEND)
    options: dict[str, Any] = {"skipped": "mean", "return_lse": True}
    got = sparge.block_sparse_attention(query, key, value, mask, quantization=quantization, backend=BACKEND, **options)
    given = [tensor.float() for tensor in (query, key, value)]
    expected = sparge.block_sparse_attention(*given, mask, quantization="none", backend="torch", **options)
    dropped = sparge.block_sparse_attention(*given, mask, quantization="none", backend="torch", return_lse=True)
    assert relative_l1(got[0], expected[0].double()) < (0.01 if quantization == "none" else 0.08)
    assert relative_l1(dropped[0], expected[0].double()) > 0.1, "the means have an effect"
    assert (got[1] - expected[1]).abs().max() < (0.01 if quantization == "none" else 0.1)


@pytest.mark.parametrize("quantization", ["none", "int8_fp16", *FP8])
@pytest.mark.parametrize("skipped", ["drop", "mean"])
def test_keys_outside_all_windows_have_no_effect(quantization: str, skipped: str) -> None:
    """The hidden prefix ends inside a block. With int8_fp16, the kernel reads the FP16 values of the caller."""
    query, key, value = make_inputs(300, 900, heads=2, dtype=torch.float16)
    options = {"window": (200, 0), "sparsity": TopK(0.5, min_blocks=1), "quantization": quantization, **OPTIONS}
    before = sparge.attention(query, key, value, skipped=skipped, **options)
    for tensor in (key, value):
        tensor[:, :, : 900 - 300 - 200] = math.nan
    after = sparge.attention(query, key, value, skipped=skipped, **options)
    assert equal(after, before)
    assert after[0].isfinite().all()


@pytest.mark.parametrize("quantization", ["none", FASTEST])
def test_windows_with_a_pv_threshold(quantization: str) -> None:
    query, key, value = make_inputs(500, 700, heads=2, head_dim=128)
    mask = sparge.predict(query, key, window=(400, 0), topk=1.0, backend=BACKEND)
    low, none = (
        sparge.block_sparse_attention(query, key, value, mask, pv_threshold=at, quantization=quantization, **OPTIONS)
        for at in (-30.0, None)
    )
    assert relative_l1(low[0], none[0].double()) < (5e-3 if quantization == "none" else 0.05)
    assert torch.equal(low[1].isfinite(), none[1].isfinite())


class TestPredict:
    @pytest.mark.parametrize(
        "rule, score, window",
        [
            (TopK(0.4, min_blocks=1), Moment(), (130, 0)),
            (TopK(0.3, min_blocks=1, similarity_threshold=0.3), Moment(), (200, 20)),
            (TopCdf(0.7, min_blocks=2), Moment(), (64, None)),
            (Budget(0.3, min_blocks=2, sink=True), Moment(), (250, 0)),
            (Budget(0.4), Spread(4), (100, 64)),
            (Dense(), Moment(), (63, 0)),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("lengths", [(600, 600), (300, 900), (400, 200)], ids=str)
    def test_rules(
        self, monkeypatch: pytest.MonkeyPatch, rule: Any, score: Any, window: Window, lengths: tuple[int, int]
    ) -> None:
        query, key, _ = make_inputs(*lengths, heads=2, kv_heads=1)
        key[:, :, ::128] += 2.0
        assert_same_blocks(monkeypatch, query + 1.0, key, backend=BACKEND, sparsity=rule, score=score, window=window)

    def test_windows_with_a_key_mask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        query, key, _ = make_inputs(300, 450, batch=2, heads=2)
        mask = (torch.arange(450, device=DEVICE) < torch.tensor([450, 150], device=DEVICE)[:, None])[:, None, None]
        options = {"window": (130, 0), "attn_mask": mask, "sparsity": TopK(0.4, min_blocks=1)}
        assert_same_blocks(monkeypatch, query, key, backend=BACKEND, **options)


def test_windows_with_an_attn_mask() -> None:
    query, key, value = make_inputs(300, 450, heads=2)
    for attn_mask in (random_bits(1, 1, 1, 450), random_bits(1, 2, 300, 450)):
        call: dict[str, Any] = {"window": (130, 9), "attn_mask": attn_mask}
        got = sparge.attention(query, key, value, sparsity=Dense(), quantization="none", **call, **OPTIONS)
        assert_matches_exact(got, query, key, value, **call)


def test_replays_are_bitwise_equal() -> None:
    query, key, value = make_inputs(600, 600, heads=2)
    options = {"window": (300, 0), "sparsity": Budget(0.5), "quantization": FASTEST, **OPTIONS}
    results = []
    for _ in range(3):
        results.append(sparge.attention(query, key, value, **options))
    forget_recordings()
    results.append(sparge.attention(query, key, value, **options))
    assert all(equal(result, results[0]) for result in results)
    other = sparge.attention(query, key, value, **{**options, "window": (301, 0)})
    assert not torch.equal(other[0], results[0][0])


@cuda_only
class TestLongSequences:
    LENGTH = 16384

    def window_mask(self, left: int) -> Tensor:
        position = torch.arange(self.LENGTH, device=DEVICE)
        distance = position[:, None] - position
        return (distance >= 0) & (distance <= left)

    def test_narrow_window_runs_dense_inside(self) -> None:
        query, key, value = make_inputs(self.LENGTH, heads=4, kv_heads=2, head_dim=128)
        sparge.reset_stats()
        got = sparge.attention(query, key, value, window=(1023, 0), enable_gqa=True)
        assert sparge.stats().reasons == {"dense: inside the window": 1}
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        expected = F.scaled_dot_product_attention(query, key, value, self.window_mask(1023))
        assert relative_l1(got, expected.double()) < 0.01

    def test_wide_window_runs_sparse(self) -> None:
        query, key, value = make_inputs(self.LENGTH, heads=4, head_dim=128)
        sparge.reset_stats()
        got = sparge.attention(query, key, value, window=(5000, 0), topk=1.0, backend=BACKEND)
        assert sparge.stats().reasons == {f"sparse: {BACKEND}": 1}
        expected = F.scaled_dot_product_attention(query, key, value, self.window_mask(5000))
        assert relative_l1(got, expected.double()) < 0.08

    def test_peaks_of_a_wide_window_are_found(self) -> None:
        """Only nearby queries see the sink, and FP8 must not lose the keys next to it."""
        query, key, value = make_inputs(self.LENGTH, heads=1, head_dim=128)
        direction = F.normalize(torch.randn(128, generator=torch.Generator().manual_seed(3)), dim=0).to(query)
        query += 4.0 * direction
        key[:, :, 8000] = 40.0 * direction
        value[:, :, 8000] = 0.0
        options: dict[str, Any] = {"window": (5000, 0), "sparsity": TopK(1.0), "backend": BACKEND}
        got = sparge.attention(query, key, value, quantization=FASTEST, **options)[:, :, 8000:13000]
        expected = sparge.attention(query, key, value, quantization="none", **options)[:, :, 8000:13000]
        assert relative_l1(got, expected.double()) < 0.15
