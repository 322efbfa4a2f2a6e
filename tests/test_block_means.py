"""Block means: attention that replaces skipped blocks by the means of their keys and values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sparge
from conftest import (
    BLOCK_K,
    BLOCK_Q,
    backends,
    causality,
    exact_attention,
    make_qkv,
    modes,
    relative_l1,
    visible_elements,
)
from sparge import Dense, TopK, reference
from sparge.call import Call
from sparge.evaluate.inputs import video_like
from sparge.masks.geometry import Shape
from sparge.masks.ordering import order_of
from sparge.masks.window import window_of
from sparge.numerics.block_means import block_means, replaceable_blocks

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.timeout(120)]

EPSILON = torch.finfo(torch.float32).eps
SHAPES: dict[str, dict[str, int]] = {
    "square": {"q_len": 384, "heads": 2},
    "grouped": {"q_len": 300, "batch": 2, "heads": 4, "kv_heads": 2},
    "prefix": {"q_len": 200, "kv_len": 450, "head_dim": 24, "value_dim": 40},
    "more queries": {"q_len": 300, "kv_len": 190, "head_dim": 16, "value_dim": 8},
    "one query": {"q_len": 1, "kv_len": 500, "heads": 3, "kv_heads": 1},
}
"""Arguments of `make_qkv`. Most lengths are not multiples of a block."""
SKIPPED_MODES = ("mean", "drop")


def replaced_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    *,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute output and LSE of attention with block means in float64, from the definition.

    For each query block, the keys and values of a skipped block are set to their means over the visible keys. In causal
    attention, a skipped block that does not end before the query block begins is hidden instead.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.double().repeat_interleave(group, 1) for tensor in (key, value))
    seen, _ = visible_elements(query, key, is_causal=is_causal, attn_mask=attn_mask)
    outputs, sums = [], []
    for i, rows in enumerate(torch.arange(query.shape[2]).split(BLOCK_Q)):
        row_key, row_value, row_seen = key.clone(), value.clone(), seen[:, :, rows]
        for j, keys in enumerate(torch.arange(key.shape[2]).split(BLOCK_K)):
            is_before = not is_causal or int(keys[-1]) <= int(rows[0]) + key.shape[2] - query.shape[2]
            for b, h in (~blocks[:, :, i, j]).nonzero().tolist():
                visible = keys[row_seen[b, h, 0, keys]]
                if not is_before:
                    row_seen[b, h, :, keys] = False
                elif len(visible):
                    row_key[b, h, visible] = key[b, h, visible].mean(0)
                    row_value[b, h, visible] = value[b, h, visible].mean(0)
        output, lse = exact_attention(query[:, :, rows], row_key, row_value, attn_mask=row_seen, scale=scale)
        outputs.append(output)
        sums.append(lse)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def random_blocks(query: Tensor, key: Tensor, share: float = 0.4, seed: int = 5) -> Tensor:
    """Return random kept blocks (B, H, q_blocks, kv_blocks). The last query block of the first head keeps all."""
    sizes = (*query.shape[:2], -(-query.shape[2] // BLOCK_Q), -(-key.shape[2] // BLOCK_K))
    blocks = torch.rand(sizes, generator=torch.Generator().manual_seed(seed)) < share
    blocks[:, 0, -1] = True
    return blocks


def key_padding(key: Tensor) -> Tensor:
    """Return a key mask (B, 1, 1, S_k) with a different length for each batch item and block 1 hidden."""
    kv_len = key.shape[2]
    mask = torch.arange(kv_len) < torch.tensor([kv_len - 70, kv_len - 5])[: key.shape[0], None, None, None]
    mask[..., 64:128] = False
    return mask


def attend(query: Tensor, key: Tensor, value: Tensor, blocks: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    call = {"skipped": "mean", "quantization": "none", "backend": "torch", **options}
    return sparge.block_sparse_attention(query, key, value, blocks, enable_gqa=True, return_lse=True, **call)


def assert_close(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Compare within float32 rounding: scores of up to 15 change probabilities by 15 eps; means are rounded twice."""
    assert relative_l1(got[0], expected[0]) < 20 * EPSILON
    empty = expected[1] == -math.inf
    assert torch.equal(got[1] == -math.inf, empty)
    assert not got[0][empty].any()
    torch.testing.assert_close(got[1][~empty].double(), expected[1][~empty], rtol=20 * EPSILON, atol=40 * EPSILON)


class TestDefinition:
    @backends
    @causality
    @pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
    @pytest.mark.parametrize("name", SHAPES)
    def test_skipped_blocks_are_replaced_by_their_means(
        self, name: str, padded: bool, is_causal: bool, backend: str
    ) -> None:
        query, key, value = make_qkv(**SHAPES[name])
        call = {"is_causal": is_causal, "attn_mask": key_padding(key) if padded else None}
        blocks = random_blocks(query, key)
        got = attend(query, key, value, blocks, backend=backend, **call)
        expected = replaced_attention(query, key, value, blocks, **call)
        assert_close(got, expected)
        if name != "one query":
            dropped = attend(query, key, value, blocks, backend=backend, skipped="drop", **call)
            assert relative_l1(dropped[0], expected[0]) > 0.01, "the means change something"

    @causality
    def test_reference_equals_the_definition(self, is_causal: bool) -> None:
        query, key, value = make_qkv(300, 450, heads=2, kv_heads=1, head_dim=16)
        blocks = random_blocks(query, key)
        shape = Shape(1, 2, 1, 300, 450, 16, 16)
        mask = sparge.BlockMask.from_dense(blocks, q_len=300, kv_len=450, is_causal=is_causal)
        got = reference.attention(query, key, value, mask, Call(shape, is_causal, 0.3, skipped="mean"))
        expected = replaced_attention(query, key, value, blocks, is_causal=is_causal, scale=0.3)
        torch.testing.assert_close((got.output, got.lse), expected, rtol=1e-12, atol=1e-12)

    @backends
    def test_no_kept_blocks_is_attention_over_means(self, backend: str) -> None:
        """The mean of the last block has the weight of its 22 keys."""
        query, key, value = make_qkv(130, 150, heads=1, head_dim=16)
        means = [torch.stack([part.mean(2) for part in tensor.split(BLOCK_K, 2)], 2) for tensor in (key, value)]
        weights = torch.tensor([64.0, 64.0, 22.0]).log()
        got = attend(query, key, value, torch.zeros(1, 1, dtype=torch.bool), backend=backend)
        assert_close(got, exact_attention(query, *means, attn_mask=weights.expand(130, 3)))

    @backends
    @causality
    def test_all_kept_blocks_is_dense(self, backend: str, is_causal: bool) -> None:
        query, key, value = make_qkv(300, 450)
        everything = torch.ones(1, 1, dtype=torch.bool)
        results = [
            attend(query, key, value, everything, backend=backend, is_causal=is_causal, skipped=skipped)
            for skipped in SKIPPED_MODES
        ]
        for with_means, without in zip(*results, strict=True):
            assert torch.equal(with_means, without)

    @backends
    @causality
    def test_blocks_of_equal_tokens_are_exact(self, backend: str, is_causal: bool) -> None:
        """The mean of equal tokens equals every token. Causal query blocks keep their partly visible blocks."""
        query, key, value = make_qkv(384, 450, heads=2, kv_heads=1)
        key, value = (
            torch.cat([part[:, :, :1].expand_as(part) for part in tensor.split(BLOCK_K, 2)], 2)
            for tensor in (key, value)
        )
        shape = Shape(1, 2, 1, 384, 450, 32, 32)
        blocks = random_blocks(query, key) | ~replaceable_blocks(shape, window_of(is_causal), key.device)
        got = attend(query, key, value, blocks, backend=backend, is_causal=is_causal)
        assert_close(got, exact_attention(query, key, value, is_causal=is_causal))

    @backends
    def test_means_with_a_different_key_mask_per_head(self, backend: str) -> None:
        query, key, value = make_qkv(200, 300, heads=2)
        mask = torch.rand(1, 2, 1, 300, generator=torch.Generator().manual_seed(3)) < 0.6
        mask[:, 0, :, 192:256] = False
        blocks = random_blocks(query, key, 0.3)
        garbage = torch.where(mask[:, :, 0, :, None], 0.0, math.nan)
        got = attend(query, key + garbage, value + garbage, blocks, backend=backend, attn_mask=mask)
        assert_close(got, replaced_attention(query, key, value, blocks, attn_mask=mask))

    @backends
    def test_causal_means_do_not_depend_on_the_future(self, backend: str) -> None:
        query, key, value = make_qkv(512, heads=1)
        blocks = random_blocks(query, key, 0.3)
        before = attend(query, key, value, blocks, backend=backend, is_causal=True)
        for tensor in (query, key, value):
            tensor[:, :, 300:] += 7.0
        after = attend(query, key, value, blocks, backend=backend, is_causal=True)
        for ours, theirs in zip(before, after, strict=True):
            assert torch.equal(ours[:, :, :300], theirs[:, :, :300])
            assert not torch.equal(ours[:, :, 300:], theirs[:, :, 300:])


def smooth(q_len: int = 400, kv_len: int = 1000) -> tuple[Tensor, Tensor, Tensor]:
    """Return a smooth field whose keys have a channel offset, with grouped heads and partial blocks."""
    sample = video_like(1024, heads=2, seed=3)
    return sample.query[:, :, kv_len - q_len : kv_len], sample.key[:, :1, :kv_len], sample.value[:, :1, :kv_len]


class TestQuantization:
    @causality
    @pytest.mark.parametrize(
        "backend, quantization, bound",
        [
            ("torch", "int8_fp8", 0.03),
            ("reference", "int8_fp8", 0.03),
            ("reference", "int8_fp8_fast", 0.036),
            ("torch", "int8_fp16", 0.006),
            ("reference", "int8_fp16", 0.006),
        ],
    )
    def test_error_is_within_the_quantization_bound(
        self, backend: str, quantization: str, bound: float, is_causal: bool
    ) -> None:
        """The RMS rounding error of E4M3 is 0.026; P and V together have 0.037, and 0.03 on average.

        Summing many keys of one sign halves the error. A mean represents 64 keys, so fewer errors average out.
        Computing P without exp2 adds 20 %, with or without means. INT8 scores add 0.003, for keys and for means.
        """
        query, key, value = smooth()
        call = {"is_causal": is_causal, "attn_mask": (torch.arange(1000) < 950)[None, None, None]}
        blocks = random_blocks(query, key, 0.3)
        output, lse = attend(query, key, value, blocks, quantization=quantization, backend=backend, **call)
        exact, exact_lse = replaced_attention(query, key, value, blocks, **call)
        assert relative_l1(output, exact) < bound
        assert (lse - exact_lse).square().mean().sqrt() < 0.02

    @causality
    @pytest.mark.parametrize("quantization", ["int8_fp8", "int8_fp16"])
    @pytest.mark.parametrize("name", SHAPES)
    def test_torch_equals_the_reference(self, name: str, is_causal: bool, quantization: str) -> None:
        """Only the 13-bit FP8 sum and quantized values at a rounding edge differ."""
        query, key, value = make_qkv(**SHAPES[name])
        call = {"is_causal": is_causal, "attn_mask": key_padding(key)}
        blocks = random_blocks(query, key)
        got, expected = (
            attend(query, key, value, blocks, quantization=quantization, backend=backend, **call)
            for backend in ("torch", "reference")
        )
        exact = replaced_attention(query, key, value, blocks, **call)
        error = relative_l1(expected[0], exact[0])
        assert relative_l1(got[0], expected[0].double()) < 0.1 * error + 64 * 2**-13 / 10
        seen = expected[1] > -math.inf
        assert torch.equal(got[1] > -math.inf, seen)
        # One quantized key off by one moves a score by q_scale * k_scale * 127 * scale; LSE cannot move further.
        spread = (key - key.mean(2, keepdim=True)).abs().max()
        assert (got[1] - expected[1])[seen].abs().max() < query.abs().max() * spread / 127 * query.shape[-1] ** -0.5

    @modes
    def test_means_of_two_tiles(self, quantization: str) -> None:
        """A tile holds 64 means; 67 blocks need two tiles."""
        query, key, value = make_qkv(130, 66 * BLOCK_K + 9, heads=1, head_dim=8)
        blocks = random_blocks(query, key, 0.1)
        blocks[:, :, -1] = False
        got, expected = (
            attend(query, key, value, blocks, quantization=quantization, backend=backend)
            for backend in ("torch", "reference")
        )
        if quantization == "none":
            assert_close(expected, replaced_attention(query, key, value, blocks))
            assert_close(got, (expected[0].double(), expected[1].double()))
        else:
            assert relative_l1(got[0], expected[0].double()) < 5e-3
            torch.testing.assert_close(got[1], expected[1], rtol=0, atol=1e-3)


class TestNonFinite:
    """A non-finite mean makes those queries NaN that use it, and no others."""

    def run(self, which: str, bad: float, token: int = 300, **options: Any) -> tuple[Tensor, Tensor]:
        """Run attention where one of two heads has a non-finite number, in a block that every query block skips."""
        query, key, value = make_qkv(640, heads=2, head_dim=16)
        {"key": key, "value": value}[which][0, 0, token, 3] = bad
        blocks = torch.rand(1, 2, 5, 10, generator=torch.Generator().manual_seed(1)) < 0.5
        blocks[..., token // BLOCK_K] = False
        return attend(query, key, value, blocks, **options)

    @backends
    @modes
    @causality
    @pytest.mark.parametrize("which", ["key", "value"])
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_queries_that_use_a_non_finite_mean_are_nan(
        self, backend: str, quantization: str, is_causal: bool, which: str, bad: float
    ) -> None:
        output, lse = self.run(which, bad, backend=backend, quantization=quantization, is_causal=is_causal)
        first = 384 if is_causal else 0  # the first query block after it
        assert output[:, 0, first:].isnan().all()
        assert lse[:, 0, first:].isnan().all()
        assert output[:, 0, :first].isfinite().all()
        assert not lse[:, 0, :first].isnan().any()
        assert output[:, 1].isfinite().all()
        assert not lse[:, 1].isnan().any()

    @backends
    @modes
    def test_query_block_with_a_single_mean_that_is_nan(self, backend: str, quantization: str) -> None:
        query, key, value = make_qkv(300, 640, heads=1, head_dim=16)
        key[0, 0, 130, 3] = math.nan
        blocks = torch.ones(1, 1, 3, 10, dtype=torch.bool)
        blocks[..., 1:, 2] = False
        blocks[..., 0, :] = False
        blocks[..., 0, 2] = True
        output, _ = attend(query, key, value, blocks, backend=backend, quantization=quantization)
        assert output.isnan().all()

    @backends
    @modes
    @pytest.mark.parametrize("which", ["key", "value"])
    def test_nan_means_do_not_affect_means_with_the_same_int8_scale(
        self, backend: str, quantization: str, which: str
    ) -> None:
        """Block 8 shares a scale with blocks 0, 1 and 9, whose means every causal query block but the first uses."""
        output, lse = self.run(which, math.nan, 520, backend=backend, quantization=quantization, is_causal=True)
        assert output.isfinite().all(), "the last query block cannot use the mean of its own block"
        assert lse[:, :, 128:].isfinite().all()

    @backends
    def test_kept_or_hidden_non_finite_tokens_do_not_affect_means(self, backend: str) -> None:
        query, key, value = make_qkv(256, 320, heads=1, head_dim=16)
        value[0, 0, 70, 3] = math.nan
        key[0, 0, 200] = math.nan
        blocks = torch.zeros(1, 1, 2, 5, dtype=torch.bool)
        blocks[..., 1, 1] = True
        mask = torch.ones(1, 1, 1, 320, dtype=torch.bool)
        mask[..., 200] = False
        output, lse = attend(query, key, value, blocks, backend=backend, attn_mask=mask)
        assert output[:, :, :128].isnan().all(), "a non-finite mean affects all channels"
        others = [channel for channel in range(16) if channel != 3]
        assert output[:, :, 128:, 3].isnan().all()
        assert output[:, :, 128:, others].isfinite().all()
        assert lse[:, :, 128:].isfinite().all()

    def test_block_means_mark_non_finite_means_in_the_bias(self) -> None:
        _, key, value = make_qkv(1, 200, heads=1, head_dim=8, value_dim=4)
        key[0, 0, 70, 3], value[0, 0, 130, 1] = math.inf, math.nan
        seen = torch.ones(1, 1, 200, dtype=torch.bool)
        seen[..., 192:] = False
        means = block_means(key, value, seen)
        assert means.bias.isnan().tolist() == [[[False, True, True, False]]]
        assert means.bias[0, 0, 0] == pytest.approx(math.log(64))
        assert means.bias[0, 0, 3] == -math.inf
        for mean, tokens in ((means.key, key), (means.value, value)):
            torch.testing.assert_close(mean[0, 0, 0], tokens[0, 0, :64].mean(0))
            assert not mean[0, 0, 1:].any(), "only the bias is not finite"
        assert means.key.dtype == torch.float32
        assert block_means(key.double(), value.double(), None).key.dtype == torch.float64
        assert block_means(key.half(), value.half(), None).value.dtype == torch.float32


class TestChoice:
    def test_default_is_mean_unless_causal(self) -> None:
        query, key, value = make_qkv(640, heads=1)
        for is_causal, expected in ((False, "mean"), (True, "drop")):
            call = {"is_causal": is_causal, "sparsity": TopK(0.3, min_blocks=1), "backend": "torch"}
            default = sparge.attention(query, key, value, **call)
            named = {name: sparge.attention(query, key, value, skipped=name, **call) for name in SKIPPED_MODES}
            assert torch.equal(default, sparge.attention(query, key, value, skipped="auto", **call))
            assert torch.equal(default, named[expected])
            assert not torch.equal(named["mean"], named["drop"])

    def test_explicit_block_masks_drop_by_default(self) -> None:
        query, key, value = make_qkv(300, heads=1)
        blocks = random_blocks(query, key)
        default = sparge.block_sparse_attention(query, key, value, blocks, backend="torch")
        assert torch.equal(default, attend(query, key, value, blocks, skipped="drop")[0])
        assert torch.equal(attend(query, key, value, blocks, skipped="auto")[0], attend(query, key, value, blocks)[0])

    @pytest.mark.parametrize(
        "mask, obstacle",
        [
            (torch.zeros(1, 1, 1, 300), "an additive one"),
            (torch.ones(1, 1, 300, 300, dtype=torch.bool), r"a full \(S_q x S_k\) one"),
            (torch.ones(1, 2, 1, 300, dtype=torch.bool), "one that differs among heads that share keys"),
        ],
        ids=["additive", "per query", "per head"],
    )
    def test_masks_that_do_not_support_means(self, mask: Tensor, obstacle: str) -> None:
        query, key, value = make_qkv(300, heads=2, kv_heads=1)
        blocks = random_blocks(query, key, 0.4)
        message = rf"^skipped='mean': expected no attn_mask, or a bool one over keys, got {obstacle}$"
        with pytest.raises(NotImplementedError, match=message):
            attend(query, key, value, blocks, attn_mask=mask)
        options = {"topk": 0.5, "enable_gqa": True, "backend": "torch"}
        with pytest.raises(NotImplementedError, match=message):
            sparge.attention(query, key, value, mask, skipped="mean", **options)
        results = [attend(query, key, value, blocks, attn_mask=mask, skipped=name)[0] for name in ("auto", "drop")]
        assert torch.equal(*results)
        results = [sparge.attention(query, key, value, mask, skipped=name, **options) for name in ("auto", "drop")]
        assert torch.equal(*results)

    @pytest.mark.parametrize("wrong", ["zero", None, True])
    def test_invalid_values_of_skipped_are_rejected(self, wrong: Any) -> None:
        query, key, value = make_qkv(100)
        message = f"^skipped: expected one of 'auto', 'mean', 'drop', got {wrong!r}$"
        with pytest.raises(ValueError, match=message):
            sparge.attention(query, key, value, skipped=wrong)
        with pytest.raises(ValueError, match=message):
            sparge.block_sparse_attention(query, key, value, torch.ones(1, 1, dtype=torch.bool), skipped=wrong)

    def test_skipped_does_not_affect_dense_rules(self) -> None:
        query, key, value = make_qkv(300, heads=1)
        results = [
            sparge.attention(query, key, value, sparsity=Dense(), skipped=name, backend="torch")
            for name in SKIPPED_MODES
        ]
        assert torch.equal(*results)


class TestAccuracy:
    def test_means_reduce_the_error_of_a_smooth_field(self) -> None:
        """In Hilbert order, blocks of a smooth field resemble their means, and attention is spread out."""
        sample = video_like(4096, heads=1, seed=1)
        order = order_of((4, 32, 32))
        tensors = [order.apply(tensor) for tensor in (sample.query, sample.key, sample.value)]
        exact, _ = exact_attention(*tensors, scale=0.03)
        options = {"topk": 0.1, "scale": 0.03, "backend": "torch"}
        errors = {
            name: relative_l1(sparge.attention(*tensors, skipped=name, **options), exact) for name in SKIPPED_MODES
        }
        assert errors["mean"] < errors["drop"] / 3

    @backends
    def test_error_falls_as_topk_rises(self, backend: str) -> None:
        query, key, value = smooth(256, 1024)
        exact, _ = exact_attention(query, key, value)
        options = {"enable_gqa": True, "skipped": "mean", "backend": backend}
        errors = [
            relative_l1(sparge.attention(query, key, value, topk=share, **options), exact) for share in (0.1, 0.4, 0.8)
        ]
        assert errors[0] > errors[1] > errors[2]


class TestThreshold:
    @backends
    @modes
    @causality
    def test_pv_threshold_that_skips_nothing(self, backend: str, quantization: str, is_causal: bool) -> None:
        """The FP8 LSE sums three numbers of about 44 nats, each rounded by up to 1.9e-6."""
        query, key, value = make_qkv(300, 450, head_dim=16)
        blocks = random_blocks(query, key)
        results = [
            attend(
                query,
                key,
                value,
                blocks,
                is_causal=is_causal,
                pv_threshold=threshold,
                backend=backend,
                quantization=quantization,
            )
            for threshold in (-1e4, None)
        ]
        for ours, plain in zip(*results, strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=6e-6)

    @backends
    def test_means_below_the_pv_threshold_are_skipped(self, backend: str) -> None:
        """Each skipped probability is below exp(threshold) of the row's largest, and represents at most 64 keys."""
        query, key, value = make_qkv(256, 640, heads=1, head_dim=16)
        query[..., 0], key[..., 0] = 8.0, 0.0
        key[:, :, :64, 0] = 12.0  # 24 above the others
        blocks = torch.zeros(1, 1, 2, 10, dtype=torch.bool)
        blocks[..., :2] = True
        threshold = -9.0
        mask = sparge.BlockMask.from_dense(blocks, q_len=256, kv_len=640)
        call = Call(Shape(1, 1, 1, 256, 640, 16, 16), False, 0.25, pv_threshold=threshold, skipped="mean")
        found = reference.attention(query, key, value, mask, call)
        assert found.pv_skipped.tolist() == found.means_skipped.tolist() == [[[2, 2]]], "one for each 64 queries"
        never = reference.attention(query, key, value, mask, replace(call, pv_threshold=None))
        assert not never.pv_skipped.any() and not never.means_skipped.any()
        output, lse = attend(query, key, value, blocks, pv_threshold=threshold, backend=backend)
        expected = replaced_attention(query, key, value, blocks)
        lost = 640 * math.exp(threshold)
        assert (output - expected[0]).abs().max() < 2 * lost * value.abs().max()
        assert (lse - expected[1]).abs().max() < lost
        only_first = exact_attention(query, key[:, :, :64], value[:, :, :64])
        assert relative_l1(output, only_first[0]) < 20 * EPSILON


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sizes=st.fixed_dictionaries(
        {
            "q_len": st.integers(1, 270),
            "kv_len": st.integers(1, 500),
            "batch": st.integers(1, 2),
            "kv_heads": st.integers(1, 2),
            "head_dim": st.sampled_from([8, 24]),
            "value_dim": st.sampled_from([8, 16]),
            "seed": st.integers(0, 10**6),
        }
    ),
    group=st.integers(1, 2),
    share=st.floats(0.0, 1.0),
    is_causal=st.booleans(),
    padded=st.booleans(),
)
def test_backends_agree_with_the_definition(
    sizes: dict[str, int], group: int, share: float, is_causal: bool, padded: bool
) -> None:
    query, key, value = make_qkv(**sizes, heads=group * sizes["kv_heads"])
    generator = torch.Generator().manual_seed(sizes["seed"])
    blocks = random_blocks(query, key, share, sizes["seed"])
    mask = None
    if padded:
        mask = torch.rand(sizes["batch"], 1, 1, sizes["kv_len"], generator=generator) < share
    call = {"is_causal": is_causal, "attn_mask": mask}
    expected = replaced_attention(query, key, value, blocks, **call)
    for backend in ("torch", "reference"):
        got = attend(query, key, value, blocks, backend=backend, **call)
        torch.testing.assert_close(got[0].double(), expected[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(got[1].double(), expected[1], rtol=0, atol=1e-5)
