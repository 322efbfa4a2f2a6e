"""What the tests of the kernels share: the interpreter, inputs, what a call's masks leave to be seen.

A process either interprets kernels or compiles them, and Triton decides when it is imported. These tests therefore run
in processes of their own: TRITON_INTERPRET=1 pytest tests/interpreted (`make test` does both).
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
        skip = pytest.mark.skip(reason="needs a process of its own: TRITON_INTERPRET=1 pytest tests/interpreted")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def quiet_infinities() -> Iterator[None]:
    """log2(0) and inf - inf are meant; a GPU does not warn of them either."""
    with np.errstate(all="ignore"):
        yield


def shape_of(query: Tensor, key: Tensor, value: Tensor) -> Shape:
    batch, heads, q_len, head_dim = query.shape
    return Shape(batch, heads, key.shape[1], q_len, key.shape[2], head_dim, value.shape[3])


def make_problem(*lengths: int, **sizes: Any) -> tuple[Tensor, Tensor, Tensor, Shape]:
    """`make_qkv` and its sizes."""
    tensors = make_qkv(*lengths, **sizes)
    return *tensors, shape_of(*tensors)


def call_of(shape: Shape, *, is_causal: bool = False, scale: float | None = None, **options: Any) -> Call:
    """A call of that shape, by default full attention with the usual scale."""
    return Call(shape, is_causal, shape.head_dim**-0.5 if scale is None else scale, **options)


def seen_tokens(
    shape: Shape, is_causal: bool, attn_mask: Tensor | None, window: tuple[int | None, int | None] | None = None
) -> tuple[Tensor, Tensor]:
    """Keys (B, Hkv, Sk) and queries (B, H, Sq) that take part, by the specification."""
    allowed = element_mask(call_of(shape, is_causal=is_causal, attn_mask=attn_mask, window=window), CPU).allowed
    return visible_keys(allowed, shape.kv_heads), allowed.any(3)


def visibility_of(shape: Shape, is_causal: bool, attn_mask: Tensor | None) -> Visibility | None:
    """What the kernels are told of it: nothing without a mask."""
    return None if attn_mask is None else find_visibility(shape, window_of(is_causal), attn_mask, CPU)


def random_bits(*shape: int, share: float = 0.6, seed: int = 5) -> Tensor:
    """A bool tensor, True for about ``share`` of its entries."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def assert_close(got: Tensor, expected: Tensor, tolerance: Tensor | float) -> None:
    """Entry by entry within the tolerance; NaN where NaN is expected."""
    assert got.shape == expected.shape
    assert torch.equal(got.isnan(), expected.isnan())
    excess = ((got.double() - expected).abs() - tolerance)[~expected.isnan()]
    assert excess.numel() == 0 or excess.max() <= 0, f"over the tolerance by {excess.max():.3g}"
