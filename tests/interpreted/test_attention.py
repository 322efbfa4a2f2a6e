"""The attention kernel over given blocks: exact without quantization, close to the reference with quantization."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benchmarks.numerics.families import by_name
from torch import Tensor

from conftest import assert_exact, causality, exact_attention, modes, relative_l1
from gpu.conftest import rms
from interpreted.conftest import call_of, make_problem, random_bits, seen_tokens, shape_of
from sparge import BlockMask, reference
from sparge.backends.gpu import pipeline
from sparge.backends.gpu.operands import AttentionLauncher, Operands
from sparge.backends.triton import TritonBackend, attention, configs
from sparge.call import Call
from sparge.masks.geometry import Shape

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPE_OF = {"none": torch.float16, "int8_fp8": torch.float32, "int8_fp16": torch.float32}
LENGTHS = {"square": (256, 256), "ragged": (129, 300), "more queries": (300, 129), "one query": (1, 330)}


def forced_tiles(queries: int, blocks: int) -> Any:
    """Run the kernel with a number of queries per program and of key blocks per step."""
    config = configs.AttentionConfig(queries, blocks, 4, 2)
    return patch.object(configs, "attention_config", lambda *_, **__: config)


@contextmanager
def forced_peak_handling(way: str) -> Iterator[None]:
    """Handle peaks in one way, whatever the number of keys."""
    chosen = {"peak_handling": lambda _: way}
    with patch.multiple(attention, **chosen), patch.multiple(pipeline, **chosen):
        yield


def random_blocks(shape: Shape, share: float = 0.6, seed: int = 5) -> Tensor:
    """Return random kept blocks (B, H, q_blocks, kv_blocks)."""
    return random_bits(shape.batch, shape.heads, shape.q_blocks, shape.kv_blocks, share=share, seed=seed)


class TritonWith(TritonBackend):
    """The Triton backend with another launcher of the attention kernel."""

    launcher: Any = None

    def __init__(self, launcher: AttentionLauncher) -> None:
        self.launcher = launcher


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor | None,
    *,
    is_causal: bool = False,
    launch: AttentionLauncher = attention.attend,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Run the kernel over the given blocks, or over all visible blocks."""
    shape = shape_of(query, key, value)
    mask = None
    if blocks is not None:
        lengths = {"q_len": shape.q_len, "kv_len": shape.kv_len}
        mask = BlockMask.from_dense(blocks, **lengths, is_causal=is_causal, window=options.get("window"))
    totals = options.pop("totals", None)
    call = call_of(shape, is_causal=is_causal, **options)
    return TritonWith(launch).attend(query, key, value, mask, call, totals=totals)


def run_reference(
    query: Tensor, key: Tensor, value: Tensor, blocks: Tensor | None, *, is_causal: bool = False, **options: Any
) -> reference.AttentionResult:
    shape = shape_of(query, key, value)
    if blocks is None:
        blocks = torch.ones(shape.batch, shape.heads, shape.q_blocks, shape.kv_blocks, dtype=torch.bool)
    lengths = {"q_len": shape.q_len, "kv_len": shape.kv_len}
    mask = BlockMask.from_dense(blocks, **lengths, is_causal=is_causal, window=options.get("window"))
    return reference.attention(query, key, value, mask, call_of(shape, is_causal=is_causal, **options))


def assert_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor | None,
    *,
    quantization: str = "none",
    is_causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Check the error: unquantized against the budget of plain attention, quantized against the error of the reference.

    The reference rounds P to FP8 relative to the maximum of each key block; a step of two blocks rounds relative to the
    maximum of both. Their rounding errors have the same size but differ, so such steps are compared with exact
    attention. Steps of one block are compared with the reference.

    In steps of one block, the kernel's P is relative to the maximum plus one INT8 unit of Q K^T. The unit is u log2
    units: about 3 * 3 / 127^2 / sqrt(D) * 1.44, or 1e-4 to 3e-4 here. A share 8 u of the FP8 values therefore rounds to
    the next value, which changes them by 12 times the variance of their rounding. The difference is sqrt(96 u), or 0.1
    to 0.16, times P's part of the error, which is sqrt(1/2) of the total.
    """
    options = {"is_causal": is_causal, "window": window, "attn_mask": attn_mask}
    if scale is not None:
        options["scale"] = scale
    with_single_block_steps: list[tuple[Tensor, Tensor]] = []

    def launch(operands: Operands, mask: BlockMask | None, call: Call, **totals: Any) -> tuple[Tensor, Tensor]:
        if quantization == "int8_fp8":
            with forced_tiles(64, 1):
                with_single_block_steps.append(attention.attend(operands, mask, call))
        return attention.attend(operands, mask, call, **totals)

    got = attend(query, key, value, blocks, quantization=quantization, launch=launch, **options)
    keys_seen, _ = seen_tokens(shape_of(query, key, value), is_causal, attn_mask, window)
    key, value = (torch.where(keys_seen[..., None], tensor, 0.0) for tensor in (key, value))
    if quantization == "none":
        assert_exact(got, query, key, value, block_mask=blocks, **options)
        return got
    assert got[0].dtype == query.dtype
    expected = run_reference(query, key, value, blocks, quantization=quantization, **options)
    exact = exact_attention(query, key, value, block_mask=blocks, **options)
    intended, intended_lse = relative_l1(expected.output, exact[0]), rms(expected.lse - exact[1])
    empty = expected.lse == -math.inf
    assert torch.equal(got[1] == -math.inf, empty)
    assert not got[0][empty].any()
    assert rms(got[1] - expected.lse) <= 0.05 * intended_lse + 1e-4
    if quantization == "int8_fp8":
        assert relative_l1(got[0], exact[0]) <= 1.5 * intended + 1e-3
        (got,) = with_single_block_steps
    share = 0.1 if quantization == "int8_fp8" else 0.05
    assert relative_l1(got[0], expected.output) <= share * intended + 1e-3
    return got


@modes
@causality
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths(name: str, is_causal: bool, quantization: str) -> None:
    # With few queries, one FP8 value of P that rounds differently has a large effect.
    heads = 8 if name == "one query" and quantization == "int8_fp8" else 2
    query, key, value, shape = make_problem(
        *LENGTHS[name], heads=heads, kv_heads=heads // 2, head_dim=40, value_dim=24, dtype=DTYPE_OF[quantization]
    )
    blocks = random_blocks(shape)
    blocks[:, 0] = True
    assert_attention(query, key, value, blocks, quantization=quantization, is_causal=is_causal)


@modes
@pytest.mark.parametrize(
    "head_dim, value_dim, dtype",
    [
        (8, 8, torch.float32),
        (64, 64, torch.bfloat16),
        (72, 72, torch.float32),
        (128, 40, torch.float16),
        (40, 200, torch.float32),
        (256, 256, torch.bfloat16),
    ],
    ids=str,
)
def test_widths_and_dtypes(head_dim: int, value_dim: int, dtype: torch.dtype, quantization: str) -> None:
    """Head dims up to 64, up to 128 and above have different configurations, and so have float32 inputs."""
    query, key, value, _ = make_problem(130, 200, heads=1, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
    assert_attention(query, key, value, None, quantization=quantization, is_causal=True)


@modes
@pytest.mark.parametrize("queries, blocks", [(16, 1), (32, 2), (128, 1), (128, 2)])
def test_tiles(queries: int, blocks: int, quantization: str) -> None:
    """The tile depends on the device, but the result must not, except for the rounding of P to FP8."""
    query, key, value, _ = make_problem(130, 200, heads=1, head_dim=16)
    options = {"is_causal": True, "quantization": quantization}
    with forced_tiles(queries, blocks):
        output, lse = attend(query, key, value, None, **options)
    expected = run_reference(query, key, value, None, **options)
    rounding = 0.02 if quantization == "int8_fp8" and blocks == 2 else 2e-3
    assert relative_l1(output, expected.output) <= rounding
    torch.testing.assert_close(lse.double(), expected.lse, rtol=0, atol=1e-3)


@modes
@pytest.mark.parametrize("head_dim", [16, 72])
def test_any_number_of_kept_blocks(head_dim: int, quantization: str) -> None:
    """A step has two blocks; an odd last block is alone, and query blocks without kept blocks give 0 and -inf."""
    query, key, value, _ = make_problem(700, 330, heads=1, head_dim=head_dim, dtype=DTYPE_OF[quantization])
    rows = ["000000", "100000", "000001", "101001", "111110", "111111"]
    blocks = torch.tensor([[entry == "1" for entry in row] for row in rows])[None, None]
    output, lse = assert_attention(query, key, value, blocks, quantization=quantization)
    assert not output[:, :, :128].any()
    assert (lse[:, :, :128] == -math.inf).all()


@modes
@pytest.mark.parametrize("offset", [-129, -1, 63, 65])
def test_every_offset_of_the_diagonal(offset: int, quantization: str) -> None:
    query, key, value, shape = make_problem(200, 200 + offset, heads=1, head_dim=16, dtype=DTYPE_OF[quantization])
    blocks = random_blocks(shape)
    blocks[..., 0] = True
    assert_attention(query, key, value, blocks, quantization=quantization, is_causal=True)


def mask_of(kind: str, shape: Shape) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if kind == "padding":
        return (torch.arange(shape.kv_len) < torch.tensor([shape.kv_len, 70])[:, None])[:, None, None]
    if kind == "elements":
        mask = torch.rand(1, shape.heads, shape.q_len, shape.kv_len, generator=generator) > 0.5
        mask[..., 100:] = False
        mask[..., 50, :] = False  # a query without visible keys
        return mask
    if kind == "queries":
        return torch.rand(shape.batch, 1, shape.q_len, 1, generator=generator) > 0.5
    shapes = {"bias": (1, shape.heads, shape.q_len, shape.kv_len), "key bias": (shape.batch, 1, 1, shape.kv_len)}
    bias = torch.randn(shapes[kind], generator=generator).half()
    bias[..., :70] = -torch.inf
    bias[..., 100:120] = torch.finfo(torch.float16).min
    if kind == "bias":
        bias[..., 50, :] = torch.finfo(torch.float16).min  # a query without visible keys, not a query with equal scores
    return bias


@modes
@pytest.mark.parametrize(
    "kind, is_causal",
    [
        ("padding", False),
        ("padding", True),
        ("elements", False),
        ("elements", True),
        ("queries", True),
        ("bias", False),
        ("key bias", True),
    ],
)
def test_masks(kind: str, is_causal: bool, quantization: str) -> None:
    """Hidden keys and values are NaN or Inf."""
    query, key, value, shape = make_problem(
        70, 150, batch=2, heads=2, kv_heads=1, head_dim=16, value_dim=24, dtype=DTYPE_OF[quantization]
    )
    mask = mask_of(kind, shape)
    hidden = ~seen_tokens(shape, is_causal, mask)[0][..., None]
    assert kind == "queries" or hidden.any()
    key = torch.where(hidden, torch.tensor([math.nan, math.inf]).repeat(75)[:, None], key).to(key)
    value = torch.where(hidden, torch.tensor([math.inf, math.nan]).repeat(75)[:, None], value).to(value)
    if quantization == "none":  # a score of NaN is hidden with its key
        key = torch.where(hidden, 1e3, key).to(key)
    blocks = random_blocks(shape, share=0.7)
    assert_attention(query, key, value, blocks, quantization=quantization, is_causal=is_causal, attn_mask=mask)


@modes
def test_masks_over_all_blocks(quantization: str) -> None:
    query, key, value, shape = make_problem(130, 150, heads=2, head_dim=72, dtype=DTYPE_OF[quantization])
    mask = mask_of("bias", shape)
    assert_attention(query, key, value, None, quantization=quantization, is_causal=True, attn_mask=mask)


@modes
@pytest.mark.parametrize("scale", [-0.4, 0.0, 2.0])
def test_scales(scale: float, quantization: str) -> None:
    """A negative scale is applied to the query, or to its quantized values."""
    query, key, value, _ = make_problem(130, 193, heads=1, head_dim=16, dtype=DTYPE_OF[quantization])
    query = query * (0.2 if scale > 1 else 1.0)
    assert_attention(query, key, value, None, quantization=quantization, is_causal=True, scale=scale)


@modes
def test_strided_inputs(quantization: str) -> None:
    """Tokens before heads in memory, with query, key and value in one tensor."""
    query, key, value, shape = make_problem(100, batch=2, heads=2, head_dim=16, dtype=DTYPE_OF[quantization])
    packed = torch.stack([tensor.transpose(1, 2) for tensor in (query, key, value)], 2)  # [B, S, 3, H, D]
    views = [tensor.transpose(1, 2) for tensor in packed.unbind(2)]
    assert not views[0].is_contiguous()
    blocks = random_blocks(shape)
    got = attend(*views, blocks, quantization=quantization)
    assert got[0].transpose(1, 2).is_contiguous(), "the memory layout of the query"
    for ours, plain in zip(got, attend(query, key, value, blocks, quantization=quantization), strict=True):
        assert torch.equal(ours, plain)


class TestPeaks:
    """A sink is 16 nats (23 log2 units) above the keys of its step. FP8 covers 15, so P needs a second part."""

    LIMIT = by_name("sink-16").limit

    def error(self, kv_len: int = 128, *, position: int = 0, mask: str = "none", **options: Any) -> float:
        query, key, value = by_name("sink-16").make(64, kv_len, dtype=torch.float32)
        key, value = (tensor.roll(position, 2) for tensor in (key, value))
        masks = {"none": None, "keys": torch.ones(1, 1, 1, kv_len, dtype=torch.bool), "bias": torch.zeros(64, kv_len)}
        bias = masks[mask] if mask != "bias" else masks[mask][None, None]
        got = attend(query, key, value, None, quantization="int8_fp8", attn_mask=bias, **options)
        exact = exact_attention(query, key, value)
        assert (got[1] - exact[1]).abs().max() < 0.1
        return relative_l1(got[0], exact[0])

    @pytest.mark.parametrize("queries, blocks", [(16, 1), (64, 1), (128, 1), (64, 2)])
    @pytest.mark.parametrize("way", ["every_tile", "marked"])
    def test_tiles(self, way: str, queries: int, blocks: int) -> None:
        with forced_peak_handling(way), forced_tiles(queries, blocks):
            assert self.error() < self.LIMIT

    @pytest.mark.parametrize("way", ["every_tile", "marked"])
    @pytest.mark.parametrize("mask", ["keys", "bias"])
    def test_masks(self, mask: str, way: str) -> None:
        with forced_peak_handling(way):
            assert self.error(mask=mask) < self.LIMIT

    @pytest.mark.parametrize("way", ["every_tile", "marked"])
    @pytest.mark.parametrize("position", [70, 127, 149])
    def test_sinks_in_any_step(self, position: int, way: str) -> None:
        """The last block is partial, and with two blocks per step it is alone in its step."""
        with forced_peak_handling(way), forced_tiles(64, 2):
            assert self.error(150, position=position) < self.LIMIT

    @pytest.mark.parametrize("way", ["every_tile", "marked"])
    def test_sinks_in_listed_blocks(self, way: str) -> None:
        """The sinks are in the first, third and last listed block. The blocks of a step are not adjacent."""
        query, key, value = by_name("sink-16").make(128, 448, dtype=torch.float32)
        for position in (130, 400):
            key[:, :, position], value[:, :, position] = key[:, :, 0], 0.0
        blocks = torch.tensor([1, 0, 1, 1, 0, 0, 1], dtype=torch.bool).view(1, 1, 1, 7)
        with forced_peak_handling(way), forced_tiles(64, 2):
            got = attend(query, key, value, blocks, quantization="int8_fp8")
        mask = BlockMask.from_dense(blocks, q_len=128, kv_len=448, is_causal=False)
        exact = reference.attention(query, key, value, mask, call_of(shape_of(query, key, value)))
        assert relative_l1(got[0], exact.output) < self.LIMIT

    @pytest.mark.parametrize("blocks", [1, 2])
    def test_ignoring_peaks_loses_the_tail(self, blocks: int) -> None:
        """The other keys of the step have half, or all, of the weight besides the sink."""
        with forced_peak_handling("ignored"), forced_tiles(64, blocks):
            assert (0.4 < self.error() < 0.6) if blocks == 1 else (self.error() > 0.9)


class TestPvThreshold:
    LEVELS = (0.0, -2.0, -0.3, -2.0, 0.2, -2.0)
    """Centers of the scores of each key block, far from a threshold of -1 relative to their spread of 0.1."""

    def sample(self, quantization: str) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _ = make_problem(130, 384, heads=2, head_dim=64)
        query, key = 0.1 * query, key - key.mean(2, keepdim=True)
        query[..., 0] = 4.0  # times the key's channel 0, times the scale of 1/8: the level
        key[..., 0] = 2 * torch.tensor(self.LEVELS).repeat_interleave(64)
        query, key, value = (tensor.to(DTYPE_OF[quantization]) for tensor in (query, key, value))
        return query, key, value

    @modes
    @pytest.mark.parametrize(
        "threshold, is_causal",
        [(-1.0, False), (-1.0, True), (torch.tensor([-math.inf, -1.0]), True)],
        ids=["full", "causal", "per head"],
    )
    def test_skips_the_same_products_as_the_reference(self, threshold: Any, is_causal: bool, quantization: str) -> None:
        tensors = self.sample(quantization)
        options = {"is_causal": is_causal, "quantization": quantization}
        got = attend(*tensors, torch.ones(1, 2, 2, 6, dtype=torch.bool), pv_threshold=threshold, **options)
        expected = run_reference(*tensors, None, pv_threshold=threshold, **options)
        unskipped = run_reference(*tensors, None, **options)
        assert expected.pv_skipped[:, 1].all()
        assert expected.pv_skipped[:, 0].any() == (not isinstance(threshold, Tensor))
        assert relative_l1(expected.output, unskipped.output) > 0.02
        assert relative_l1(got[0], expected.output) <= 2e-3
        assert (got[1] - expected.lse).abs().max() <= 2e-3

    @modes
    def test_threshold_of_minus_infinity_skips_nothing(self, quantization: str) -> None:
        tensors = [tensor[:, :1] for tensor in self.sample(quantization)]
        output, lse = attend(*tensors, None, pv_threshold=-math.inf, quantization=quantization)
        with forced_tiles(64, 1):  # P is rounded relative to the maximum of each block
            plain, plain_lse = attend(*tensors, None, quantization=quantization)
        torch.testing.assert_close(output, plain, rtol=2 * torch.finfo(plain.dtype).eps, atol=1e-3)
        torch.testing.assert_close(lse, plain_lse, rtol=0, atol=1e-5)

    @pytest.mark.parametrize(
        "quantization, head_dim, dtype",
        [
            ("none", 16, torch.float32),
            ("none", 72, torch.float32),
            ("none", 256, torch.float32),
            ("none", 256, torch.float16),
            ("int8_fp8", 72, torch.float32),
            ("int8_fp8", 256, torch.float32),
            ("int8_fp16", 256, torch.float32),
        ],
        ids=str,
    )
    def test_products_are_skipped_for_64_queries_together(
        self, quantization: str, head_dim: int, dtype: torch.dtype
    ) -> None:
        """Half of the queries would skip every other block, the other half the rest, so no product is skipped."""
        query, key, value, _ = make_problem(64, 192, heads=1, head_dim=head_dim, dtype=dtype)
        query, key = 0.1 * query, key - key.mean(2, keepdim=True)
        query[..., 0] = 4.0
        query[:, :, :32, 0] = -4.0
        key[..., 0] = torch.tensor([2.0, -2.0, 2.0]).repeat_interleave(64)
        options = {"pv_threshold": -1.0, "quantization": quantization, "scale": 0.25}
        expected = run_reference(query, key, value, None, **options)
        assert expected.pv_skipped.sum() == 0
        output, _ = attend(query, key, value, None, **options)
        assert relative_l1(output, expected.output) <= 2e-3

    @modes
    def test_padding_queries_do_not_prevent_skipping(self, quantization: str) -> None:
        """The scores of padding queries are 0, far above the scores of the five queries of the tile."""
        query, key, value = self.sample(quantization)
        key[..., 0] -= 40.0
        query = query[:, :, :5]
        options = {"pv_threshold": -1.0, "quantization": quantization}
        got = attend(query, key, value, None, **options)
        expected = run_reference(query, key, value, None, **options)
        assert expected.pv_skipped.all()
        assert relative_l1(got[0], expected.output) <= 2e-3


@pytest.mark.filterwarnings("ignore:All-NaN slice")
class TestNonFinite:
    @modes
    @pytest.mark.parametrize("which, is_causal", [("query", False), ("key", False), ("key", True), ("value", True)])
    def test_non_finite_inputs_propagate_to_the_queries_that_see_them(
        self, which: str, is_causal: bool, quantization: str
    ) -> None:
        query, key, value, _ = make_problem(200, heads=2, head_dim=16, dtype=DTYPE_OF[quantization])
        {"query": query, "key": key, "value": value}[which][0, 0, 140, 3] = math.nan
        output, lse = attend(query, key, value, None, is_causal=is_causal, quantization=quantization)
        expected = run_reference(query, key, value, None, is_causal=is_causal, quantization=quantization)
        assert output[:, 1].isfinite().all()
        broken = output.isnan()
        if which != "query" and is_causal:  # the quantized values of a whole block and P V of a tile are NaN
            assert not broken[:, :, :128].any()
            assert broken[:, 0, 140:].any(-1).all()
        elif which == "query":
            assert broken[:, 0, 140].all()
            assert not broken[:, 0, :128].any()
        else:
            assert torch.equal(broken, expected.output.isnan())
        assert lse[:, 1].isfinite().all()
        if which == "value":
            assert lse.isfinite().all()
