"""Key blocks that are marked as having a shared peak, compared with the definition in PyTorch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from benchmarks.numerics.families import by_name
from torch import Tensor

from conftest import causality
from interpreted.conftest import call_of, shape_of
from sparge.backends.gpu import peak_handling as handling
from sparge.backends.gpu import pipeline
from sparge.backends.gpu.primitives import FAR
from sparge.backends.gpu.stages import peaks
from sparge.backends.triton import peaks as lost_peaks
from sparge.masks.geometry import Shape

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FAR_NATS = FAR.value * math.log(2.0)


def marked_blocks(query: Tensor, key: Tensor, *, is_causal: bool = False) -> Tensor:
    """Return the blocks that the kernel marks, (B, H_kv, kv_blocks)."""
    shape = shape_of(query, key, key)
    call = call_of(shape, is_causal=is_causal, quantization="int8_fp8")
    operands, _ = pipeline.prepare(query, key, key, call, with_mask=False, with_operands=True)
    assert operands is not None
    peaks.mark_peaks(operands.query, operands.query_scale, operands.key, operands.key_scale, call)
    signs = operands.key_scale < 0
    assert torch.equal(signs.any(-1), signs.all(-1))
    return signs[..., 0]


def count_peaks(query: Tensor, key: Tensor, *, is_causal: bool = False) -> Tensor:
    """Count the sampled queries with a peak in each block, (B, H_kv, kv_blocks). Lengths are multiples of a block."""
    batch, kv_heads, kv_len, head_dim = key.shape
    group, q_len = query.shape[1] // kv_heads, query.shape[2]
    per_head = max(peaks.SAMPLES.value // group, 1)
    positions = (2 * torch.arange(per_head) + 1) * q_len // (2 * per_head)
    sampled = query.view(batch, kv_heads, group, q_len, head_dim)[..., positions, :]
    scores = sampled.float() @ key.float()[:, :, None].mT * head_dim**-0.5
    if is_causal:
        scores = scores.masked_fill(torch.arange(kv_len) > (positions + kv_len - q_len)[:, None], -math.inf)
    groups = scores.view(batch, kv_heads, group, per_head, kv_len // 64, 8, 4, 2).amax((-1, -3))
    is_far = (groups.amax(-1, keepdim=True) - groups > FAR_NATS) & (groups > -math.inf)
    return is_far.any(-1).sum((2, 3))


@causality
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (6, 2), (8, 1)])
def test_blocks_with_a_peak_for_enough_samples_are_marked(heads: int, kv_heads: int, is_causal: bool) -> None:
    """Four sinks are marked. A fifth block has a peak only for the last eighth of one head's queries and is not."""
    query, key, _ = by_name("sink-13-several").make(256, 512, heads, kv_heads=kv_heads, dtype=torch.float32)
    own = 100.0 * torch.nn.functional.normalize(torch.randn(128, generator=torch.Generator().manual_seed(1)), dim=0)
    key[:, :, 330] += own / 8
    query[:, 0, 224:] += own / 8
    got = marked_blocks(query, key, is_causal=is_causal)
    counts = count_peaks(query, key - key.mean(2, keepdim=True), is_causal=is_causal)
    per_head = peaks.SAMPLES.value // (heads // kv_heads)
    needed = min(max(per_head // 2, 2), peaks.NEEDED.value)
    assert torch.equal(got, counts >= needed)
    assert got.sum() == 4 * kv_heads
    assert counts[0, 0, 330 // 64] > 0


def test_marking_twice_changes_nothing() -> None:
    query, key, value = by_name("sink-16").make(64, 192, dtype=torch.float32)
    shape = shape_of(query, key, value)
    call = call_of(shape, quantization="int8_fp8")
    operands, _ = pipeline.prepare(query, key, value, call, with_mask=False, with_operands=True)
    assert operands is not None
    arguments = operands.query, operands.query_scale, operands.key, operands.key_scale, call
    before = operands.key_scale.clone()
    peaks.mark_peaks(*arguments)
    once = operands.key_scale.clone()
    peaks.mark_peaks(*arguments)
    assert torch.equal(operands.key_scale, once) and torch.equal(once.abs(), before)
    assert (once[..., 0] < 0).flatten().tolist() == [True, False, False]


def test_single_query() -> None:
    query, key, _ = by_name("sink-16").make(1, 192, dtype=torch.float32)
    assert marked_blocks(query, key).flatten().tolist() == [True, False, False]


def test_nan_keys_are_not_peaks() -> None:
    query, key, _ = by_name("sink-0").make(64, 192, dtype=torch.float32)
    key[:, :, 70] = math.nan
    assert not marked_blocks(query, key).any()


@pytest.mark.parametrize(
    "quantization, kv_len, has_threshold, way",
    [
        ("int8_fp8", 4032, False, "every_tile"),
        ("int8_fp8_fast", 4033, False, "marked"),
        ("int8_fp8", 4097, True, "ignored"),
        ("int8_fp16", 128, False, "ignored"),
        ("none", 128, False, "ignored"),
    ],
)
def test_peak_handling(quantization: str, kv_len: int, has_threshold: bool, way: str) -> None:
    call = call_of(Shape(1, 1, 1, 64, kv_len, 64, 64), quantization=quantization)
    assert handling.peak_handling(replace(call, pv_threshold=-8.0 if has_threshold else None)) == way


def test_every_searched_step_has_a_bit() -> None:
    assert lost_peaks.STEPS.value * 64 >= handling.EVERY_TILE_KEYS
