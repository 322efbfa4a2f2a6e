"""Sliding windows in prediction, attention and block masks, on the torch and reference backends."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sparge
from conftest import (
    BLOCK_K,
    assert_exact,
    backends,
    exact_attention,
    make_qkv,
    modes,
    relative_l1,
    unquantized_options,
    visible_elements,
)
from sparge import BlockMask, Budget, Dense, TopCdf, TopK

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.timeout(120)]

WINDOWS = [(0, 0), (63, 0), (64, 64), (200, 0), (100, 3), (None, 70), (65, None)]
windows = pytest.mark.parametrize("window", WINDOWS, ids=str)
LENGTHS = [(300, 300), (130, 400), (300, 150)]
lengths = pytest.mark.parametrize("q_len, kv_len", LENGTHS)
EVERYTHING = TopK(1.0)
RULES = {
    "topk": TopK(0.4, min_blocks=1),
    "topcdf": TopCdf(0.6, min_blocks=1, similarity_threshold=0.1),
    "budget": Budget(0.3, sink=True, diagonal=True),
}


def mask_of(kind: str, q_len: int, kv_len: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(kv_len)
    if kind == "none":
        return None
    if kind == "keys":  # some queries see no key in their window
        mask = torch.rand(1, 1, 1, kv_len, generator=generator) < 0.5
        mask[..., : kv_len // 3] = False
        return mask
    if kind == "elements":
        return torch.rand(1, 2, q_len, kv_len, generator=generator) < 0.6
    bias = torch.randn(q_len, kv_len, generator=generator)
    return bias.masked_fill(torch.rand(q_len, kv_len, generator=generator) < 0.3, -math.inf)


@windows
@lengths
def test_full_calls_with_a_window_are_exact(window: tuple[int | None, int | None], q_len: int, kv_len: int) -> None:
    query, key, value = make_qkv(q_len, kv_len, kv_heads=1, head_dim=16)
    for rule in (EVERYTHING, Dense()):
        got = sparge.attention(query, key, value, window=window, sparsity=rule, **unquantized_options("torch"))
        assert_exact(got, query, key, value, window=window)


@pytest.mark.parametrize("window", [(63, 0), (100, 3)], ids=str)
def test_reference_with_a_window_is_exact(window: tuple[int | None, int | None]) -> None:
    query, key, value = make_qkv(130, 300, heads=1, head_dim=16)
    got = sparge.attention(query, key, value, window=window, sparsity=EVERYTHING, **unquantized_options("reference"))
    assert_exact(got, query, key, value, window=window)


@windows
@pytest.mark.parametrize("kind", ["keys", "elements", "additive"])
def test_windows_with_a_mask_are_exact(kind: str, window: tuple[int | None, int | None]) -> None:
    query, key, value = make_qkv(200, 330, head_dim=16)
    call: dict[str, Any] = {"window": window, "attn_mask": mask_of(kind, 200, 330)}
    for rule in (EVERYTHING, Dense()):
        got = sparge.attention(query, key, value, sparsity=rule, **call, **unquantized_options("torch"))
        assert_exact(got, query, key, value, **call)


@pytest.mark.parametrize("window", [(63, 0), (100, 3)], ids=str)
@lengths
@pytest.mark.parametrize("kind, rule", [("none", "budget"), ("keys", "topk"), ("elements", "topcdf")])
def test_backends_predict_the_same_blocks(
    window: tuple[int | None, int | None], q_len: int, kv_len: int, kind: str, rule: str
) -> None:
    query, key, _ = make_qkv(q_len, kv_len, kv_heads=1, head_dim=16)
    options = {"window": window, "sparsity": RULES[rule], "attn_mask": mask_of(kind, q_len, kv_len)}
    got, expected = (
        sparge.predict(query, key, enable_gqa=True, backend=backend, **options) for backend in ("torch", "reference")
    )
    assert torch.equal(got.to_dense(), expected.to_dense())
    assert torch.equal(got.visible_num_blocks, expected.visible_num_blocks)
    assert got.window == expected.window
    seen, _ = visible_elements(query, key, window=window, attn_mask=options["attn_mask"])
    for row, tile in enumerate(seen.split(128, 2)):
        blocks = F.pad(tile.any(2), (0, -kv_len % BLOCK_K)).unflatten(-1, (-1, BLOCK_K)).any(-1)
        assert torch.equal(got.visible_num_blocks[:, :, row], blocks.sum(-1).int())
        assert not (got.to_dense()[:, :, row] & ~blocks).any()


@modes
@pytest.mark.parametrize("skipped", ["drop", "mean"])
def test_quantization_and_means(quantization: str, skipped: str) -> None:
    """The backends agree, and NaN outside the window has no effect."""
    query, key, value = make_qkv(200, 600, heads=1, head_dim=16)
    options: dict[str, Any] = {"window": (200, 30), "sparsity": TopK(0.5, min_blocks=1), "skipped": skipped}
    options |= {"quantization": quantization, "return_lse": True}
    output, lse = sparge.attention(query, key, value, backend="torch", **options)
    for tensor in (key, value):
        tensor[:, :, : 600 - 200 - 200] = math.nan  # outside every window
    again, again_lse = sparge.attention(query, key, value, backend="torch", **options)
    assert torch.equal(again, output)
    assert torch.equal(again_lse, lse)
    expected, expected_lse = sparge.attention(query, key, value, backend="reference", **options)
    assert relative_l1(output, expected) < 2e-3
    assert (lse - expected_lse).abs().max() < 2e-3


@backends
@pytest.mark.parametrize("rule", [TopK(0.4, min_blocks=1), TopCdf(0.2, min_blocks=1)], ids=["topk", "topcdf"])
@pytest.mark.parametrize("left, factor", [(130, 3.0), (130, 1e6), (128, math.nan)])
def test_keys_outside_the_window_of_a_query_block_have_no_effect(
    backend: str, rule: Any, left: int, factor: float
) -> None:
    """NaN may affect query blocks that share a key block with it, as in SDPA; none does with left = 128."""
    tensors = make_qkv(448, 448, heads=1, head_dim=16)
    row, first, end = slice(256, 384), 256 - left, 384
    changed = [tensor.clone() for tensor in tensors]
    for tensor in changed[1:]:
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3))
        tensor[:, :, :first] = factor * noise[:, :, :first]
        tensor[:, :, end:] = factor * noise[:, :, end:]
    options: dict[str, Any] = {"window": (left, 0), "sparsity": rule, "backend": backend}
    before, after = (sparge.predict(*inputs[:2], **options).to_dense()[:, :, 2] for inputs in (tensors, changed))
    assert 0 < before.sum() < 5, "some blocks are skipped"
    assert torch.equal(before, after)
    options["quantization"] = "none"
    before, after = (sparge.attention(*inputs, **options)[:, :, row] for inputs in (tensors, changed))
    assert torch.equal(before, after)


@pytest.mark.parametrize("options", [{}, {"quantization": "int8_fp8"}, {"sparsity": Dense()}], ids=str)
def test_windows_larger_than_the_sequence(options: dict[str, Any]) -> None:
    """The result is bitwise equal to attention without a window, causal or not."""
    query, key, value = make_qkv(260, 400, head_dim=16)
    options = {"topk": None if "sparsity" in options else 0.5, "return_lse": True, "backend": "torch", **options}
    for window, plain in (
        ((None, 0), {"is_causal": True}),
        ((-1, 0), {"is_causal": True}),
        ((399, 0), {"is_causal": True}),
        ((None, None), {}),
        ((-1, -1), {}),
        ((399, 259), {}),
    ):
        for got, expected in zip(
            sparge.attention(query, key, value, window=window, **options),
            sparge.attention(query, key, value, **plain, **options),
            strict=True,
        ):
            assert torch.equal(got, expected)
    both = sparge.attention(query, key, value, window=(70, 9), is_causal=True, **options)
    right = sparge.attention(query, key, value, window=(70, 0), **options)
    assert torch.equal(both[0], right[0])


def test_sink_is_kept_where_it_is_visible() -> None:
    query, key, _ = make_qkv(1024, 1024, heads=1, head_dim=16)
    key[:, :, :64] = -10 * query.mean(2, keepdim=True)  # no score would select it
    rule = TopK(0.1, min_blocks=1, sink=True)
    kept = sparge.predict(query, key, window=(300, 0), sparsity=rule, backend="torch").to_dense()[0, 0]
    assert kept[:, 0].tolist() == [i * 128 - 300 <= 63 for i in range(8)]
    diagonal = torch.stack([kept[i, 2 * i : 2 * i + 2].all() for i in range(8)])
    assert diagonal.all()


def test_windows_in_the_dense_fallback() -> None:
    query, key, value = make_qkv(150, 200, head_dim=16)
    query.requires_grad_()
    call: dict[str, Any] = {"window": (40, 0)}
    for attn_mask in (None, mask_of("keys", 150, 200), mask_of("additive", 150, 200)):
        got = sparge.attention(query, key, value, attn_mask, on_unsupported="dense", **call)
        exact, lse = exact_attention(query.detach(), key, value, attn_mask=attn_mask, **call)
        seen = lse.isfinite()
        assert (got.double() - exact)[seen].abs().max() < 1e-5


class TestDecisions:
    def reasons(self, tokens: int, **options: Any) -> dict[str, int]:
        query, key, value = make_qkv(tokens, heads=2, head_dim=8)
        sparge.reset_stats()
        got = sparge.attention(query, key, value, **options)
        expected = sparge.attention(query, key, value, **{**options, "sparsity": Dense(), "topk": None})
        if options.get("topk", 1.0) == 1.0:
            assert (got - expected).abs().max() < 1e-5
        return {name: count for name, count in sparge.stats().reasons.items() if name != "dense: sparsity=Dense()"}

    def test_narrow_window_runs_dense_inside(self) -> None:
        assert self.reasons(4096, window=(500, 0)) == {"dense: inside the window": 1}
        assert self.reasons(4096, window=(500, 500), topk=0.5) == {"dense: inside the window": 1}

    def test_wide_window_runs_sparse(self) -> None:
        assert self.reasons(4096, window=(2047, 0), topk=0.5) == {"sparse: torch": 1}
        assert self.reasons(4096, window=(1100, 1100), topk=0.5) == {"sparse: torch": 1}
        assert self.reasons(4096, window=(None, 300), topk=0.5) == {"sparse: torch": 1}

    def test_short_calls_are_below_the_crossover(self) -> None:
        assert self.reasons(600, window=(100, 0)) == {"dense: below the crossover": 1}

    def test_named_backend_runs_sparse(self) -> None:
        assert self.reasons(600, window=(200, 0), topk=0.5, backend="torch") == {"sparse: torch": 1}

    def test_decoding_reads_only_the_window(self) -> None:
        query, key, value = make_qkv(1, 5000, head_dim=16)
        key[:, :, :-33] = math.nan
        value[:, :, :-33] = math.nan
        got = sparge.attention(query, key, value, window=(32, 0), return_lse=True)
        assert_exact(got, query, key[:, :, -33:], value[:, :, -33:])


class TestBlockMasks:
    def test_block_mask_stores_its_window(self) -> None:
        query, key, value = make_qkv(300, 400, head_dim=16)
        mask = sparge.predict(query, key, window=(100, 5), topk=0.5, backend="torch")
        assert mask.window == (100, 5)
        assert mask.to("cpu").window == (100, 5)
        assert "window=(100, 5)" in repr(mask)
        got = sparge.block_sparse_attention(query, key, value, mask, **unquantized_options("torch"))
        assert_exact(got, query, key, value, window=(100, 5), block_mask=mask.to_dense())
        same = sparge.block_sparse_attention(query, key, value, mask, window=(100, 5), **unquantized_options("torch"))
        assert torch.equal(same[0], got[0])

    def test_dense_block_tensor_with_a_window(self) -> None:
        query, key, value = make_qkv(300, 400, head_dim=16)
        blocks = torch.rand(1, 2, 3, 7, generator=torch.Generator().manual_seed(1)) < 0.7
        got = sparge.block_sparse_attention(query, key, value, blocks, window=(70, 0), **unquantized_options("torch"))
        assert_exact(got, query, key, value, window=(70, 0), block_mask=blocks)

    def test_contradicting_window_is_rejected(self) -> None:
        query, key, value = make_qkv(300, 400, head_dim=16)
        mask = sparge.predict(query, key, window=(100, 0), topk=0.5, backend="torch")
        assert mask.is_causal
        with pytest.raises(ValueError, match=r"window: expected \(100, 0\) as in the mask, got \(90, 0\)"):
            sparge.block_sparse_attention(query, key, value, mask, window=(90, 0))

    @pytest.mark.parametrize("window", [(100, 0), (90, 20), (None, 30), (40, None)], ids=str)
    def test_flex_attention_round_trip(self, window: tuple[int | None, int | None]) -> None:
        dense = torch.rand(1, 2, 3, 7, generator=torch.Generator().manual_seed(1)) < 0.7
        mask = BlockMask.from_dense(dense, q_len=300, kv_len=400, window=window)
        flex = mask.to_flex()
        back = BlockMask.from_flex(flex)
        assert back.window == mask.window
        assert torch.equal(back.to_dense(), mask.to_dense())
        query, key, _ = make_qkv(300, 400)
        seen, _ = visible_elements(query, key, window=window, block_mask=mask.to_dense())
        indices = (torch.arange(1)[:, None, None, None], torch.arange(2)[:, None, None])
        stated = flex.mask_mod(*indices, torch.arange(300)[:, None], torch.arange(400))
        assert torch.equal(stated, seen)
        full = BlockMask.from_dense(dense & (flex.full_kv_num_blocks[..., None] >= 0), q_len=300, kv_len=400)
        assert full.window == (None, None)
