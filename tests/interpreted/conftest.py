"""Helpers for the kernel tests: the interpreter, inputs, and the tokens that masks leave visible.

A process either interprets kernels or compiles them, and Triton decides at import. These tests therefore run in a
separate process: TRITON_INTERPRET=1 pytest tests/interpreted (`make test` runs it).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import make_qkv
from sparge.call import Call
from sparge.masks.geometry import Shape
from sparge.masks.visibility import Visibility, find_visibility
from sparge.masks.window import window_of
from sparge.reference.shared import element_mask, visible_keys

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
elif INTERPRETED:
    import interpreter

    interpreter.repair()

CPU = torch.device("cpu")
LOG2_E = 1.4426950408889634
EPSILON = torch.finfo(torch.float32).eps


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not INTERPRETED:
        skip = pytest.mark.skip(reason="needs a separate process: TRITON_INTERPRET=1 pytest tests/interpreted")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def quiet_infinities() -> Iterator[None]:
    """Silence warnings for log2(0) and inf - inf, which are intended and which a GPU does not report."""
    with np.errstate(all="ignore"):
        yield


def shape_of(query: Tensor, key: Tensor, value: Tensor) -> Shape:
    batch, heads, q_len, head_dim = query.shape
    return Shape(batch, heads, key.shape[1], q_len, key.shape[2], head_dim, value.shape[3])


def make_problem(*lengths: int, **sizes: Any) -> tuple[Tensor, Tensor, Tensor, Shape]:
    """Return the tensors of `make_qkv` and their `Shape`."""
    tensors = make_qkv(*lengths, **sizes)
    return *tensors, shape_of(*tensors)


def call_of(shape: Shape, *, is_causal: bool = False, scale: float | None = None, **options: Any) -> Call:
    """Return a call for a shape, by default full attention with scale 1 / sqrt(D)."""
    return Call(shape, is_causal, shape.head_dim**-0.5 if scale is None else scale, **options)


def seen_tokens(
    shape: Shape, is_causal: bool, attn_mask: Tensor | None, window: tuple[int | None, int | None] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the visible keys (B, H_kv, S_k) and the queries with visible keys (B, H, S_q), from the reference."""
    allowed = element_mask(call_of(shape, is_causal=is_causal, attn_mask=attn_mask, window=window), CPU).allowed
    return visible_keys(allowed, shape.kv_heads), allowed.any(3)


def visibility_of(shape: Shape, is_causal: bool, attn_mask: Tensor | None) -> Visibility | None:
    """Return the visibility that the kernels receive: None without a mask."""
    return None if attn_mask is None else find_visibility(shape, window_of(is_causal), attn_mask, CPU)


def random_bits(*shape: int, share: float = 0.6, seed: int = 5) -> Tensor:
    """Return a bool tensor that is True for about ``share`` of its entries."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def assert_close(got: Tensor, expected: Tensor, tolerance: Tensor | float) -> None:
    """Check that every entry is within the tolerance, and NaN exactly where NaN is expected."""
    assert got.shape == expected.shape
    assert torch.equal(got.isnan(), expected.isnan())
    excess = ((got.double() - expected).abs() - tolerance)[~expected.isnan()]
    assert excess.numel() == 0 or excess.max() <= 0, f"over the tolerance by {excess.max():.3g}"
