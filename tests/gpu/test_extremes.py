"""Extreme scores, and memory that must not be read."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from conftest import enlarge_token, relative_l1
from gpu.conftest import (
    BACKEND,
    DEVICE,
    FP8,
    LSE_TOLERANCE,
    assert_matches_exact,
    equal,
    exact,
    make_inputs,
    modes,
    quantized_modes,
    random_bits,
    rms,
)
from sparge.masks.block_mask import BlockMask

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
OPTIONS = {"return_lse": True, "backend": BACKEND}
FACTOR = 1.1
FP8_ROUNDING = 0.0225
"""Mean relative error of rounding to E4M3: 1/8 / 4 times the mean of 1/m over a power of two, 0.72."""
LSE_SHARE = 2.0**-20
"""Allowed error of an LSE from float32 and quantized scores, as a share of the largest logit."""
widths = pytest.mark.parametrize("head_dim", [64, 128])
"""The Hopper kernel has different pipeline stages for 64 and 128 channels."""


def assert_as_accurate_as_reference(
    tensors: tuple[Tensor, Tensor, Tensor], blocks: Tensor, quantization: str, *, rounding: float = 0.0, **call: Any
) -> None:
    """Check that the errors of output and LSE exceed those of the reference by little.

    ``rounding``: relative L1 error of the output that the reference does not have.
    """
    given = {"quantization": quantization, "enable_gqa": True, **call}
    got = sparge.block_sparse_attention(*tensors, blocks, **given, **OPTIONS)
    copies = [tensor.cpu() for tensor in (*tensors, blocks)]
    spec = sparge.block_sparse_attention(*copies, return_lse=True, backend="reference", **given)
    expected = tuple(tensor.cpu() for tensor in exact(*tensors, block_mask=blocks, **call))
    assert got[0].isfinite().all()
    intended = relative_l1(spec[0].double(), expected[0])
    assert relative_l1(got[0].cpu(), expected[0]) <= FACTOR * intended + rounding + 1e-3
    assert torch.equal(got[1].cpu() == -math.inf, expected[1] == -math.inf)
    intended = rms(spec[1].double() - expected[1])
    largest = expected[1][expected[1] > -math.inf].abs().max()
    assert rms(got[1].cpu().double() - expected[1]) <= FACTOR * intended + LSE_TOLERANCE + LSE_SHARE * largest


def large(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs with scores in the thousands: one INT8 unit of Q K^T is several log2 units."""
    query, key, value = make_inputs(400, 500, heads=2, seed=3, dtype=torch.float16)
    if kind == "all channels":
        return 40 * query, 40 * key, value
    query[..., 0] *= 100
    key[..., 0] *= 100
    return query, key, value


@modes
@pytest.mark.parametrize("kind", ["all channels", "one channel"])
def test_large_scores(kind: str, quantization: str) -> None:
    """P stays within [0, 1]: rounding a larger P to FP8 would saturate, give NaN or the wrong sign.

    INT8 would change these scores by nats, so they are computed from unquantized Q and K. One key dominates each row.
    The reference stores its P as 448, which is exact; the kernels store a number that is rounded to FP8.
    """
    blocks = torch.ones(4, 8, dtype=torch.bool, device=DEVICE)
    rounding = FP8_ROUNDING if quantization in FP8 else 0.0
    assert_as_accurate_as_reference(large(kind), blocks, quantization, rounding=rounding)


@quantized_modes
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("logits", [1e2, 1e4, 1e5, 1e6])
def test_huge_logits(logits: float, is_causal: bool, head_dim: int, quantization: str) -> None:
    """One key dominates, and most scores are far below the range of P. All are computed from unquantized Q and K."""
    query, key, value = make_inputs(400, 500, heads=2, seed=3, head_dim=head_dim, dtype=torch.float16)
    tensors = math.sqrt(logits) * query, math.sqrt(logits) * key, value
    blocks = torch.ones(4, 8, dtype=torch.bool, device=DEVICE)
    rounding = FP8_ROUNDING if quantization in FP8 else 0.0
    assert_as_accurate_as_reference(tensors, blocks, quantization, rounding=rounding, is_causal=is_causal)


@quantized_modes
def test_one_huge_query_among_others(quantization: str) -> None:
    """The tile of the query is computed from unquantized Q and K; the errors of the other queries must not grow."""
    query, key, value = make_inputs(400, 500, heads=2, seed=3, head_dim=128, dtype=torch.float16)
    blocks = torch.ones(4, 8, dtype=torch.bool, device=DEVICE)
    query[:, :, 130] *= 3000
    assert_as_accurate_as_reference((query, key, value), blocks, quantization)


@quantized_modes
@widths
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("token", ["query-1e4", "key-1e3", "key-1e4"])
def test_one_large_token(token: str, is_causal: bool, head_dim: int, quantization: str) -> None:
    """The token has no effect on other scores, but INT8 would change the scores that share its scale by nats."""
    query, key, value = make_inputs(300, 350, heads=4, kv_heads=2, head_dim=head_dim, seed=3)
    enlarge_token(query, key, token)
    blocks = random_bits(4, 3, 6)
    blocks[..., 1] = True  # contains the large key
    call = {"is_causal": is_causal}
    assert_as_accurate_as_reference((query, key, value), blocks, quantization, **call)
    # Tokens before heads in memory, and float32, which is multiplied in parts.
    tokens_first = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value)]
    assert_as_accurate_as_reference(tuple(tokens_first), blocks, quantization, **call)
    assert_as_accurate_as_reference((query.float(), key.float(), value.float()), blocks, quantization, **call)


@quantized_modes
def test_means_with_one_large_query(quantization: str) -> None:
    """INT8 would round the scores of means as coarsely, so they are computed from float32 means."""
    query, key, value = make_inputs(300, 4500, heads=4, kv_heads=2, head_dim=128, seed=3)
    enlarge_token(query, key, "query-1e4")
    blocks = random_bits(4, 3, 71, share=0.1)
    blocks[..., 0] = True
    call = {"enable_gqa": True, "skipped": "mean", "return_lse": True}
    got, spec = (
        sparge.block_sparse_attention(query, key, value, blocks, quantization=name, backend=backend, **call)
        for name, backend in ((quantization, BACKEND), ("none", "torch"))
    )
    row = slice(140, 141)
    assert relative_l1(got[0][:, :, row].cpu(), spec[0][:, :, row].cpu().double()) < 0.08
    assert rms((got[1] - spec[1])[:, :, row]) < 0.02


@quantized_modes
@pytest.mark.parametrize("skipped", ["drop", "mean"])
def test_packed_segments_with_a_large_token(skipped: str, quantization: str) -> None:
    """Each segment is bitwise equal to its own call."""
    query, key, value = make_inputs(300, 350, heads=4, kv_heads=2, head_dim=128, seed=3)
    enlarge_token(query, key, "query-1e4")
    bounds = [0, 100, 400, 430], [0, 150, 500, 560]
    packed = [
        torch.cat([tensor[:, :, :first], tensor, tensor[:, :, :last]], 2)[0].transpose(0, 1).contiguous()
        for tensor, first, last in ((query, 100, 30), (key, 150, 60), (value, 150, 60))
    ]
    call = {"sparsity": sparge.Budget(0.6), "quantization": quantization, "skipped": skipped, **OPTIONS}
    output, lse = sparge.varlen_attention(*packed, *bounds, **call)
    for (q_start, q_stop), (k_start, k_stop) in zip(*map(pairwise, bounds), strict=True):
        segment = [packed[0][None, q_start:q_stop], *(tensor[None, k_start:k_stop] for tensor in packed[1:])]
        alone, alone_lse = sparge.attention(*segment, enable_gqa=True, layout="NHD", **call)
        assert equal((output[q_start:q_stop], lse[:, q_start:q_stop]), (alone[0], alone_lse[0]))


@quantized_modes
@pytest.mark.parametrize("deviation", [3.0, 6.0, 12.0, 30.0])
def test_scores_beyond_the_range_of_float32(deviation: float, quantization: str) -> None:
    """The deviation is in nats. With the attention sink, P of the lowest scores would be at most 2^-135."""
    query, key, value = make_inputs(400, 500, heads=2, seed=3, head_dim=128, dtype=torch.float16)
    query = deviation * query
    key[:, :, 100] *= 4
    blocks = torch.ones(4, 8, dtype=torch.bool, device=DEVICE)
    rounding = FP8_ROUNDING if quantization in FP8 else 0.0
    assert_as_accurate_as_reference((query, key, value), blocks, quantization, rounding=rounding)


@modes
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, -0.1, 2.0])
def test_scales(scale: float, is_causal: bool, quantization: str) -> None:
    query, key, value = make_inputs(200, 330, heads=2, dtype=torch.float16)
    blocks = torch.ones(2, 6, dtype=torch.bool, device=DEVICE)
    assert_as_accurate_as_reference((query, key, value + 1), blocks, quantization, is_causal=is_causal, scale=scale)


def make_inputs_with_scores(scores: Tensor, seed: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return 128 queries and a key for each score. The scores are added to those of random queries and keys."""
    query, key, value = make_inputs(128, len(scores), heads=2, seed=seed, head_dim=head_dim, dtype=torch.float16)
    query[..., 0] = math.sqrt(head_dim)
    key[..., 0] = scores.to(key)
    return query, key, value + 1


@modes
@widths
@pytest.mark.parametrize("rise", [20.0, 100.0, 400.0])
def test_rising_scores(rise: float, head_dim: int, quantization: str) -> None:
    """The maximum rises in every step, in total by up to a factor of e^400."""
    tensors = make_inputs_with_scores(torch.linspace(0, rise, 8192), seed=4, head_dim=head_dim)
    blocks = torch.ones(1, 128, dtype=torch.bool, device=DEVICE)
    assert_as_accurate_as_reference(tensors, blocks, quantization, is_causal=True)


@modes
@widths
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("position", [0, 150, 1000, 2047])
def test_keys_below_a_peak_keep_their_share(position: int, is_causal: bool, head_dim: int, quantization: str) -> None:
    """One key is 11 log2 units above all others and has as much weight as all of them together."""
    scores = torch.zeros(2048)
    scores[position] = math.log(2048)
    blocks = torch.ones(1, 32, dtype=torch.bool, device=DEVICE)
    tensors = make_inputs_with_scores(scores, seed=5, head_dim=head_dim)
    assert_as_accurate_as_reference(tensors, blocks, quantization, is_causal=is_causal)


@modes
@widths
@pytest.mark.parametrize("has_peak", [False, True])
@pytest.mark.parametrize("keys", [448, 1472, 2752])
def test_odd_numbers_of_blocks(keys: int, has_peak: bool, head_dim: int, quantization: str) -> None:
    """With 7, 23 or 43 blocks, the last stage has one block instead of two, and the peak is in the block before it."""
    query, key, value = make_inputs(keys, keys, heads=2, seed=6, head_dim=head_dim, dtype=torch.float16)
    if has_peak:
        query[..., 0] = math.sqrt(query.shape[-1])
        key[..., 0] = 0
        key[:, :, -100, 0] = 12
    blocks = torch.ones(-(-keys // 128), keys // 64, dtype=torch.bool, device=DEVICE)
    assert_as_accurate_as_reference((query, key, value + 1), blocks, quantization)


@modes
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 128), (128, 64)])
def test_different_head_dim_of_values(head_dim: int, value_dim: int, quantization: str) -> None:
    query, key, _ = make_inputs(1500, 1500, heads=2, seed=7, head_dim=head_dim, dtype=torch.float16)
    _, _, value = make_inputs(1500, 1500, heads=2, seed=8, head_dim=value_dim, dtype=torch.float16)
    blocks = torch.ones(12, 24, dtype=torch.bool, device=DEVICE)
    assert_as_accurate_as_reference((query, key, value + 1), blocks, quantization)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rise", [5.4, 5.7, 11.0, 300.0])
def test_rising_scores_of_one_query_of_a_warp(rise: float, head_dim: int) -> None:
    """Scores rise by 7.8, 8.2, 16 or 433 log2 units; P is rescaled only after a rise of more than 8 log2 units."""
    query, key, value = make_inputs(128, 2048, heads=2, seed=7, head_dim=head_dim, dtype=torch.float16)
    query[..., 0] = math.sqrt(head_dim) * (torch.arange(128, device=DEVICE) % 17 == 5).to(query)
    key[..., 0] = 0
    key[:, :, 1000:, 0] = rise
    got = sparge.attention(query, key, value + 1, topk=1, quantization="none", **OPTIONS)
    assert_matches_exact(got, query, key, value + 1)


def test_p_exceeds_1_for_most_keys() -> None:
    """Scores of later tiles are 7.8 log2 units above the first tile. With large values, sums exceed float16's range."""
    query, key, value = make_inputs(128, 2048, heads=2, seed=7, head_dim=128, dtype=torch.float16)
    query[..., 0], key[..., 0] = math.sqrt(128), 5.4
    key[:, :, :128, 0] = 0
    got = sparge.attention(query, key, 1000 * (value + 1), topk=1, quantization="none", **OPTIONS)
    assert_matches_exact(got, query, key, 1000 * (value + 1))


@modes
def test_nan_does_not_reach_query_blocks_without_visible_keys(quantization: str) -> None:
    """The first 200 of 300 causal queries come before all 100 keys."""
    query, key, value = make_inputs(300, 100, heads=2, dtype=torch.float16)
    key[0, 0, 5, 0] = math.nan
    value[0, 1, 7, 3] = math.inf
    output, lse = sparge.attention(query, key, value, is_causal=True, topk=1.0, quantization=quantization, **OPTIONS)
    assert (output[:, :, :128] == 0).all()
    assert (lse[:, :, :128] == -math.inf).all()


@modes
@pytest.mark.parametrize("garbage", [-1, 2**31 - 1])
def test_entries_after_a_list_are_not_read(garbage: int, quantization: str) -> None:
    query, key, value = make_inputs(384, 520, heads=2, dtype=torch.float16)
    indices = torch.arange(9, device=DEVICE, dtype=torch.int32).expand(1, 2, 3, 9).clone()
    counts = torch.tensor([[[3, 0, 9]] * 2], device=DEVICE, dtype=torch.int32)
    indices[torch.arange(9, device=DEVICE) >= counts[..., None]] = garbage
    mask = BlockMask(counts, indices, torch.full_like(counts, 9), 384, 520, False)
    got = sparge.block_sparse_attention(query, key, value, mask, quantization=quantization, **OPTIONS)
    indices.clamp_(0, 8)
    assert equal(got, sparge.block_sparse_attention(query, key, value, mask, quantization=quantization, **OPTIONS))
    assert (got[0][:, :, 128:256] == 0).all()
    assert (got[1][:, :, 128:256] == -math.inf).all()
    assert got[1][:, :, 256:].isfinite().all()
