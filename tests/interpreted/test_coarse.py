"""Tokens thousands of times as large as the others: the Triton kernel computes their tiles from unquantized Q, K."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import sparge
from conftest import causality, enlarge_token, exact_attention, relative_l1
from gpu.conftest import rms
from interpreted.conftest import call_of, make_problem, random_bits, shape_of
from interpreted.test_attention import TritonWith, attend, forced_tiles, run_reference
from sparge.backends import base
from sparge.backends.triton import attention
from sparge.numerics import quantization as quant

pytestmark = pytest.mark.usefixtures("poisoned_memory")
quantizations = pytest.mark.parametrize("quantization", ["int8_fp8", "int8_fp16"])
tokens = pytest.mark.parametrize("token", ["query-1e4", "key-1e3", "key-1e4"])


def large_token(token: str, **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs with one large token, partial blocks and grouped heads. 16 of 150 keys share the scale of a key."""
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 64, **sizes}
    query, key, value, _ = make_problem(141, 150, **sizes)
    enlarge_token(query, key, token)
    return query, key, value


def errors(
    tensors: tuple[Tensor, ...], blocks: Tensor | None, *, quantization: str, **options: Any
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the relative L1 error of the output and the RMS error of the LSE, of the kernel and of the reference."""
    got = attend(*tensors, blocks, quantization=quantization, **options)
    spec = run_reference(*tensors, blocks, quantization=quantization, **options)
    skipped = options.pop("pv_threshold", None)
    assert skipped is None or skipped < -20, "exact attention skips nothing"
    exact = exact_attention(*tensors, block_mask=blocks, **options)
    seen = exact[1] > -math.inf
    assert torch.equal(got[1] > -math.inf, seen)
    return tuple((relative_l1(output, exact[0]), rms((lse - exact[1])[seen])) for output, lse in (got, spec[:2]))


def assert_as_accurate_as_reference(tensors: tuple[Tensor, ...], blocks: Tensor | None = None, **options: Any) -> None:
    (output, lse), (spec_output, spec_lse) = errors(tensors, blocks, **options)
    assert spec_output < 0.07 and spec_lse < 0.03  # also if a key of 1e4 shifts the mean of 150 keys
    assert output <= 1.1 * spec_output + 1e-3
    assert lse <= 1.1 * spec_lse + 1e-4


@quantizations
@tokens
@causality
def test_one_large_token(token: str, is_causal: bool, quantization: str) -> None:
    assert_as_accurate_as_reference(large_token(token), quantization=quantization, is_causal=is_causal)


@tokens
@pytest.mark.parametrize("head_dim", [40, 128])
def test_widths(token: str, head_dim: int) -> None:
    assert_as_accurate_as_reference(large_token(token, head_dim=head_dim), quantization="int8_fp8")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    assert_as_accurate_as_reference(large_token("query-1e4", dtype=dtype), quantization="int8_fp8")


@quantizations
@pytest.mark.parametrize(
    "options",
    [
        {"window": (70, 10)},
        {"attn_mask": random_bits(1, 1, 141, 150, share=0.7)},
        {"attn_mask": torch.where(random_bits(1, 1, 1, 150), 0.5, -math.inf)},
        {"scale": -0.1},
        {"pv_threshold": -30.0},
    ],
    ids=["window", "mask per query", "additive mask of keys", "negative scale", "threshold"],
)
def test_options(options: dict[str, Any], quantization: str) -> None:
    blocks = random_bits(1, 2, 2, 3)
    blocks[..., 1] = True
    assert_as_accurate_as_reference(large_token("key-1e4"), blocks, quantization=quantization, **options)


@quantizations
@pytest.mark.parametrize("queries, blocks", [(64, 2), (128, 1)])
def test_tiles(queries: int, blocks: int, quantization: str) -> None:
    with forced_tiles(queries, blocks):
        assert_as_accurate_as_reference(large_token("query-1e4"), quantization=quantization)


@quantizations
def test_means_of_skipped_blocks(quantization: str) -> None:
    """INT8 scores of means are as inaccurate as INT8 scores of keys."""
    query, key, value = large_token("query-1e4")
    blocks = torch.zeros(1, 2, 2, 3, dtype=torch.bool)
    blocks[..., 1] = True
    options = {"quantization": quantization, "skipped": "mean"}
    got, spec = attend(query, key, value, blocks, **options), run_reference(query, key, value, blocks, **options)
    exact = run_reference(query, key, value, blocks, quantization="none", skipped="mean")
    assert relative_l1(got[0][:, :, 140], exact.output[:, :, 140]) < 0.05
    assert rms(got[1] - exact.lse) <= 1.1 * rms(spec.lse - exact.lse) + 1e-4


@pytest.mark.parametrize("skipped", ["drop", "mean"])
def test_packed_segments(skipped: str) -> None:
    """The token is in one segment; each segment is bitwise equal to its own call."""
    query, key, value = large_token("query-1e4")
    query, key, value = (
        torch.cat([tensor[:, :, :100], tensor, tensor[:, :, :30]], 2)[0].transpose(0, 1).contiguous()
        for tensor in (query, key, value)
    )
    bounds_q, bounds_k = [0, 100, 241, 271], [0, 100, 250, 280]
    options = {"sparsity": sparge.Budget(0.6), "quantization": "int8_fp8", "skipped": skipped}
    options |= {"return_lse": True, "backend": "triton"}
    output, lse = sparge.varlen_attention(query, key, value, bounds_q, bounds_k, **options)
    for (q_start, q_stop), (k_start, k_stop) in zip(pairwise(bounds_q), pairwise(bounds_k), strict=True):
        segment = query[None, q_start:q_stop], key[None, k_start:k_stop], value[None, k_start:k_stop]
        alone, alone_lse = sparge.attention(*segment, enable_gqa=True, layout="NHD", **options)
        assert torch.equal(output[q_start:q_stop], alone[0])
        assert torch.equal(lse[:, q_start:q_stop], alone_lse[0])


@tokens
def test_int8_scores_of_a_large_token_are_useless(token: str) -> None:
    """Without the limit on INT8 units, the tests above would fail."""
    tensors = large_token(token)
    call = call_of(shape_of(*tensors), quantization="int8_fp8")
    with patch.object(quant, "coarse_unit", lambda _: math.inf):
        output, lse = base.get("triton").attend(*tensors, None, call)
    exact = exact_attention(*tensors)
    row = slice(140, 141) if token.startswith("query") else slice(None)
    assert relative_l1(output[:, :, row], exact[0][:, :, row]) > 0.08
    assert rms((lse - exact[1])[:, :, row]) > 0.01


def test_ordinary_tiles_use_int8_scores() -> None:
    """Logits of 20 nats are below the limit. The kernel receives the largest key scale of each head."""
    query, key, value, shape = make_problem(141, 150, heads=2, kv_heads=1, head_dim=64)
    call = call_of(shape, quantization="int8_fp8", scale=20 / 8)
    found = []

    def launch(operands: Any, mask: Any, call: Any, **totals: Any) -> tuple[Tensor, Tensor]:
        found.append(operands)
        return attention.attend(operands, mask, call, **totals)

    TritonWith(launch).attend(query, key, value, None, call)
    (operands,) = found
    largest = operands.largest_key_scale.view(torch.float32)
    assert torch.equal(largest, operands.key_scale.abs().flatten(2).amax(2).flatten())
    assert float(operands.query_scale.max() * largest.max()) < quant.coarse_unit(64)
