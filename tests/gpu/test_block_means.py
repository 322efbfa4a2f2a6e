"""Block means in the kernels, compared with the torch backend in float32.

Every case compiles its own attention kernel, so there are few cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from conftest import relative_l1
from gpu.conftest import (
    BACKEND,
    DEVICE,
    FASTEST,
    FP8,
    LSE_TOLERANCE,
    assert_close_to_reference,
    equal,
    forget_recordings,
    make_inputs,
    random_bits,
    rms,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

Result = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A call. 9000 keys are 141 blocks, more means than a kernel processes at a time."""

    quantization: str
    head_dim: int
    lengths: tuple[int, int]
    is_causal: bool
    heads: tuple[int, int] = (4, 2)
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        causal, lengths = "causal" if self.is_causal else "full", "x".join(map(str, self.lengths))
        return f"{self.quantization}-{self.head_dim}-{lengths}-{causal}"


CASES = [
    Case("none", 128, (1300, 1300), False, dtype=torch.float16),
    Case("none", 64, (256, 9000), True, (2, 2), torch.float16),
    Case("int8_fp16", 128, (1300, 1300), True, dtype=torch.float16),
    Case("int8_fp16", 256, (130, 300), False, (2, 1), torch.float16),
    *(Case(quantization, 128, (1300, 1300), False) for quantization in FP8),
    *(Case(quantization, 64, (200, 300), True, (2, 2)) for quantization in FP8),
    Case(FASTEST, 256, (200, 1300), True),
    Case(FASTEST, 128, (256, 9000), False),
]


def random_blocks(query: Tensor, key: Tensor, share: float = 0.3) -> Tensor:
    """Return random kept blocks. The first query block of the first head keeps none, its last query block keeps all."""
    blocks = random_bits(*query.shape[:2], -(-query.shape[2] // 128), -(-key.shape[2] // 64), share=share)
    blocks[:, 0, 0], blocks[:, 0, -1] = False, True
    return blocks


def attend(query: Tensor, key: Tensor, value: Tensor, blocks: Tensor, **options: Any) -> Result:
    call = {"skipped": "mean", "backend": BACKEND, **options}
    return sparge.block_sparse_attention(query, key, value, blocks, enable_gqa=True, return_lse=True, **call)


def run_in_float32(query: Tensor, key: Tensor, value: Tensor, blocks: Tensor, **options: Any) -> Result:
    """Run the torch backend in float32 and return its result on the CPU."""
    tensors = [tensor.float() for tensor in (query, key, value)]
    output, lse = attend(*tensors, blocks, backend="torch", **options)
    return output.cpu(), lse.cpu()


def assert_means(got: Result, exact: Result, expected: Result, quantization: str) -> None:
    """Check the error of a call with means. Without quantization, means, P and the output are rounded by eps / 2 each.

    The torch backend computes P with exp2. Without exp2, P is at most 20 % less accurate.
    """
    exact = exact[0].double(), exact[1].double()
    if quantization == "none":
        assert relative_l1(got[0].cpu(), exact[0]) < 2 * torch.finfo(got[0].dtype).eps
        assert torch.equal(got[1].cpu() == -math.inf, exact[1] == -math.inf)
        assert rms(got[1].cpu() - exact[1]) < LSE_TOLERANCE
    elif quantization == "int8_fp8_fast":
        assert relative_l1(got[0].cpu(), exact[0]) <= 1.2 * relative_l1(expected[0], exact[0]) + 2e-3
        assert torch.equal(got[1].cpu() == -math.inf, exact[1] == -math.inf)
        assert rms(got[1].cpu() - exact[1]) < 1e-2
    else:
        assert_close_to_reference(got, expected, exact, quantization)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_means_match_the_torch_backend(case: Case) -> None:
    heads, kv_heads = case.heads
    query, key, value = make_inputs(
        *case.lengths, heads=heads, kv_heads=kv_heads, head_dim=case.head_dim, dtype=case.dtype
    )
    blocks = random_blocks(query, key)
    call = {"is_causal": case.is_causal}
    forget_recordings()
    got = attend(query, key, value, blocks, quantization=case.quantization, **call)
    assert got[0].dtype == case.dtype
    exact = run_in_float32(query, key, value, blocks, quantization="none", **call)
    torch_quantization = "int8_fp8" if case.quantization == "int8_fp8_fast" else case.quantization
    expected = run_in_float32(query, key, value, blocks, quantization=torch_quantization, **call)
    assert_means(got, exact, expected, case.quantization)
    dropped = run_in_float32(query, key, value, blocks, quantization="none", skipped="drop", **call)
    assert relative_l1(dropped[0], exact[0].double()) > 0.1, "the means have an effect"

    others = [tensor.flip(2).contiguous() for tensor in (query, key, value)]
    options = {"quantization": case.quantization, **call}
    replayed = attend(*others, blocks, **options)
    forget_recordings()
    assert equal(replayed, attend(*others, blocks, **options)), "a replay equals a fresh call"


def test_means_with_padded_keys_and_prediction() -> None:
    """The mask hides some blocks completely and others partly."""
    query, key, value = make_inputs(400, 1300, batch=2, heads=2, kv_heads=1, head_dim=128)
    mask = torch.arange(1300, device=DEVICE) < torch.tensor([1300, 900], device=DEVICE)[:, None, None, None]
    mask[..., 64:128] = False
    key = key + 5.0
    options = {"attn_mask": mask, "topk": 0.2, "enable_gqa": True}
    blocks = sparge.predict(query, key, backend=BACKEND, **options).to_dense()
    result = {"quantization": "int8_fp8", "skipped": "mean", "return_lse": True}
    got = sparge.attention(query, key, value, backend=BACKEND, **result, **options)
    exact = run_in_float32(query, key, value, blocks, quantization="none", attn_mask=mask)
    expected = run_in_float32(query, key, value, blocks, quantization="int8_fp8", attn_mask=mask)
    assert_means(got, exact, expected, "int8_fp8")


@pytest.mark.parametrize("which", ["key", "value"])
def test_non_finite_means_reach_the_query_blocks_that_use_them(which: str) -> None:
    """The bad token is in block 16 of the first head. Other means share its INT8 scale but are not affected."""
    query, key, value = make_inputs(1300, heads=2, head_dim=64)
    {"key": key, "value": value}[which][0, 0, 1030, 3] = math.nan
    blocks = random_bits(1, 2, 11, 21, share=0.3)
    blocks[..., 16] = False
    output, lse = attend(query, key, value, blocks, quantization=FASTEST, is_causal=True)
    assert output[:, 0, 1152:].isnan().all(), "query blocks after block 16"
    assert lse[:, 0, 1152:].isnan().all()
    assert output[:, 0, :1152].isfinite().all()
    assert not lse[:, 0, :1152].isnan().any()
    assert output[:, 1].isfinite().all()
