"""Scores at the ends of their range, and memory that nobody may look at."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import sparge
from conftest import relative_l1
from gpu.conftest import BACKEND, DEVICE, exact, make_inputs, modes
from sparge.block_mask import BlockMask

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
OPTIONS = {"return_lse": True, "backend": BACKEND}


def large(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of thousands: an integer of Q K^T is worth octaves."""
    query, key, value = make_inputs(400, 500, heads=2, seed=3, dtype=torch.float16)
    if kind == "all channels":
        return 40 * query, 40 * key, value
    query[..., 0] *= 100
    key[..., 0] *= 100
    return query, key, value


@modes
@pytest.mark.parametrize("kind", ["all channels", "one channel"])
def test_large_scores(kind: str, quantization: str) -> None:
    """P stays a number up to 1: where it is rounded to FP8, a larger one would be NaN or of the wrong sign."""
    tensors = large(kind)
    blocks = torch.ones(4, 8, dtype=torch.bool, device=DEVICE)
    output, lse = sparge.block_sparse_attention(*tensors, blocks, quantization=quantization, **OPTIONS)
    copies = [tensor.cpu() for tensor in tensors]
    spec, _ = sparge.block_sparse_attention(
        *copies, blocks.cpu(), quantization=quantization, return_lse=True, backend="reference"
    )
    assert output.isfinite().all()
    assert lse.isfinite().all()
    assert output.abs().max() <= 1.1 * tensors[2].abs().max()
    expected = exact(*tensors)[0].cpu()
    intended = relative_l1(spec.double(), expected)
    assert relative_l1(output.cpu(), expected) <= 1.1 * intended + 0.02


@modes
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, -0.1, 2.0])
def test_scales(scale: float, is_causal: bool, quantization: str) -> None:
    query, key, value = make_inputs(200, 330, heads=2, dtype=torch.float16)
    value = value + 1
    call = {"is_causal": is_causal, "scale": scale}
    output, lse = sparge.attention(query, key, value, topk=1.0, quantization=quantization, **call, **OPTIONS)
    expected, expected_lse = exact(query, key, value, **call)
    assert relative_l1(output, expected) < (0.01 if quantization == "none" else 0.15 if scale == 2.0 else 0.03)
    assert (lse - expected_lse).abs().max() < (0.01 if quantization == "none" else 2.0 if scale == 2.0 else 0.1)


@modes
def test_blocks_of_queries_that_see_nothing_are_not_reached_by_nan(quantization: str) -> None:
    """The first 200 of 300 causal queries come before all 100 keys."""
    query, key, value = make_inputs(300, 100, heads=2, dtype=torch.float16)
    key[0, 0, 5, 0] = math.nan
    value[0, 1, 7, 3] = math.inf
    output, lse = sparge.attention(query, key, value, is_causal=True, topk=1.0, quantization=quantization, **OPTIONS)
    assert (output[:, :, :128] == 0).all()
    assert (lse[:, :, :128] == -math.inf).all()


@modes
@pytest.mark.parametrize("garbage", [-1, 2**31 - 1])
def test_what_follows_a_list_is_never_read(garbage: int, quantization: str) -> None:
    query, key, value = make_inputs(384, 520, heads=2, dtype=torch.float16)
    indices = torch.arange(9, device=DEVICE, dtype=torch.int32).expand(1, 2, 3, 9).clone()
    counts = torch.tensor([[[3, 0, 9]] * 2], device=DEVICE, dtype=torch.int32)
    indices[torch.arange(9, device=DEVICE) >= counts[..., None]] = garbage
    mask = BlockMask(counts, indices, torch.full_like(counts, 9), 384, 520, False)
    output, lse = sparge.block_sparse_attention(query, key, value, mask, quantization=quantization, **OPTIONS)
    blocks = torch.arange(9, device=DEVICE) < counts[..., None]
    expected, expected_lse = exact(query, key, value, block_mask=blocks)
    assert relative_l1(output, expected) < (0.01 if quantization == "none" else 0.1)
    assert torch.equal(lse == -math.inf, expected_lse == -math.inf)
    assert (output[:, :, 128:256] == 0).all()
