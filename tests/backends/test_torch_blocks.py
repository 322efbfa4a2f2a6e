"""The torch backend: equality with the reference, the device-neutral path, batching and memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparge import BlockMask, reference
from sparge.backends.torch import blocks as torch_blocks
from sparge.call import Call
from sparge.evaluate.metrics import relative_l1
from sparge.masks.geometry import Shape
from sparge.reference import softmax

SHAPES = {
    "square": Shape(1, 2, 1, 384, 384, 32, 32),
    "ragged": Shape(2, 4, 2, 129, 300, 40, 24),
    "more queries": Shape(1, 2, 2, 300, 129, 16, 16),
    "one query": Shape(1, 2, 1, 1, 500, 8, 8),
}
EPSILON = torch.finfo(torch.float32).eps


def problem(shape: Shape, is_causal: bool, kind: str = "none", density: float = 0.5):
    generator = torch.Generator().manual_seed(shape.q_len)
    query = torch.randn(shape.batch, shape.heads, shape.q_len, shape.head_dim, generator=generator)
    key = torch.randn(shape.batch, shape.kv_heads, shape.kv_len, shape.head_dim, generator=generator) + 1
    value = torch.randn(shape.batch, shape.kv_heads, shape.kv_len, shape.value_dim, generator=generator) + 0.5
    query[..., 0] = 3
    key[:, :, :64, 0] += 8  # the first block has the largest scores, so others can be skipped
    kept = torch.rand(shape.batch, shape.heads, shape.q_blocks, shape.kv_blocks, generator=generator) < density
    kept[:, :1, :, 0] = True
    mask = BlockMask.from_dense(kept, q_len=shape.q_len, kv_len=shape.kv_len, is_causal=is_causal)
    attn_mask = None
    if kind == "keys":
        attn_mask = torch.rand(shape.batch, 1, 1, shape.kv_len, generator=generator) > 0.3
    elif kind == "elements":
        attn_mask = torch.rand(1, shape.heads, shape.q_len, shape.kv_len, generator=generator) > 0.5
    elif kind == "bias":
        attn_mask = torch.randn(1, 1, shape.q_len, shape.kv_len, generator=generator)
        attn_mask[..., :70] = -torch.inf
    return query, key, value, mask, Call(shape, is_causal, 0.3, attn_mask=attn_mask)


def run_torch_and_reference(case, **options):
    *tensors, call = case
    call = replace(call, **options)
    return torch_blocks.attention(*tensors, call), reference.attention(*tensors, call)


@pytest.mark.parametrize("kind", ["none", "keys", "elements", "bias"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("threshold", [None, -2.0])
def test_unquantized_output_and_lse_equal_the_reference(name, is_causal, kind, threshold):
    """Scores reach about 15, so rounding them to fp32 moves a probability by 15 eps."""
    (output, lse), expected = run_torch_and_reference(problem(SHAPES[name], is_causal, kind), pv_threshold=threshold)
    if threshold is not None and name == "square" and kind == "none":
        assert expected.pv_skipped.sum() > 0
    assert relative_l1(output, expected.output) < 20 * EPSILON
    assert torch.equal(lse == -math.inf, expected.lse == -math.inf)
    seen = lse > -math.inf
    torch.testing.assert_close(lse[seen].double(), expected.lse[seen], rtol=20 * EPSILON, atol=40 * EPSILON)
    assert output[~seen].eq(0).all()


@pytest.mark.parametrize("quantization", ["int8_fp8", "int8_fp16"])
@pytest.mark.parametrize("kind", ["none", "keys", "bias"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_quantized_output_equals_the_reference(name, is_causal, kind, quantization):
    """Only the 13-bit FP8 sum and quantized values at a rounding edge differ."""
    case = problem(SHAPES[name], is_causal, kind)
    (output, lse), expected = run_torch_and_reference(case, quantization=quantization)
    exact = reference.attention(*case)
    quantization_error = relative_l1(expected.output, exact.output)
    assert relative_l1(output, expected.output) < 0.1 * quantization_error + 64 * 2**-13 / 10
    seen = expected.lse > -math.inf
    assert torch.equal(lse > -math.inf, seen)
    # One quantized key off by one moves a score by q_scale * k_scale * 127 * scale; LSE cannot move further.
    edge = case[0].abs().max() * (case[1] - case[1].mean(2, keepdim=True)).abs().max() / 127 * 0.3
    assert (lse[seen] - expected.lse[seen]).abs().max() < edge


def test_per_head_thresholds_skip_only_in_their_heads():
    case = problem(SHAPES["square"], False, density=1.1)
    (got, _), expected = run_torch_and_reference(case, pv_threshold=torch.tensor([-1e9, -1.0]))
    unskipped, _ = torch_blocks.attention(*case)
    torch.testing.assert_close(got[:, 0], unskipped[:, 0], rtol=1e-4, atol=1e-5)
    assert relative_l1(got[:, 1], unskipped[:, 1]) > 1e-3
    assert relative_l1(got, expected.output) < 20 * EPSILON
    assert expected.pv_skipped[:, 0].sum() == 0
    assert expected.pv_skipped[:, 1].sum() > 0


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_device_neutral_path_equals_the_cpu_kernel(with_bias):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, n, 16, generator=generator) for n in (128, 192, 192))
    bias = None
    if with_bias:
        bias = torch.randn(3, 128, 192, generator=generator)
        bias[1, 5] = -math.inf
        bias[:, :, 100:] = -math.inf
    output, lse = torch_blocks.attend(query, key, value, bias, 0.25)
    wide = torch.nn.functional.pad(value, (0, 8))  # unequal widths use the path of other devices
    neutral, neutral_lse = torch_blocks.attend(query, key, wide, bias, 0.25)
    torch.testing.assert_close(neutral[..., :16], output)
    if bias is not None:
        assert neutral_lse[1, 5] == lse[1, 5] == -math.inf
    torch.testing.assert_close(neutral_lse, lse)


@pytest.mark.parametrize("quantization", ["none", "int8_fp8"])
def test_batching_does_not_change_the_result(monkeypatch, quantization):
    *tensors, call = problem(Shape(2, 4, 2, 700, 700, 16, 16), True)
    call = replace(call, quantization=quantization)
    whole = torch_blocks.attention(*tensors, call)
    monkeypatch.setattr(torch_blocks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(softmax, "MAX_Q_BLOCKS", 1)
    single = torch_blocks.attention(*tensors, call)
    for a, b in zip(whole, single, strict=True):
        torch.testing.assert_close(a, b)


class LargestTensor(TorchDispatchMode):
    """Record the size of the largest tensor that any operator returns, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_tensor_grows_with_the_square_of_the_length(is_causal):
    length = 8192
    shape = Shape(1, 1, 1, length, length, 16, 16)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, length, 16, generator=generator) for _ in range(3))
    kept = torch.rand(1, 1, shape.q_blocks, shape.kv_blocks, generator=generator) < 0.1
    mask = BlockMask.from_dense(kept, q_len=length, kv_len=length, is_causal=is_causal)
    with LargestTensor() as largest:
        torch_blocks.attention(query, key, value, mask, Call(shape, is_causal, 0.25))
    # One byte per element of the attention map would be 64 MiB.
    assert largest.bytes <= torch_blocks.CHUNK_BYTES


def test_fp16_values_saturate_instead_of_becoming_infinite():
    case = problem(SHAPES["square"], False, density=1.1)
    case[2][:, :, 5] = 1e6
    (output, _), expected = run_torch_and_reference(case, quantization="int8_fp16")
    assert output.isfinite().all()
    assert relative_l1(output, expected.output) < 1e-3
