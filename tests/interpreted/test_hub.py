"""The Triton kernels in the package for the Hugging Face Hub are bitwise equal to those of the library."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

import sparge
from conftest import make_qkv

BUILDER = Path(__file__).parents[2] / "tools" / "hub" / "build.py"


def load(name: str, path: Path) -> ModuleType:
    """Load a module as the client of the Hub does."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def test_hub_package_is_bitwise_equal_to_the_library(tmp_path: Path) -> None:
    kernel = load("_sparge_interpreted", load("hub_build", BUILDER).build(tmp_path) / "__init__.py")
    inputs = make_qkv(140, 200, heads=2, kv_heads=1)
    options = {"is_causal": True, "topk": 0.4, "enable_gqa": True, "return_lse": True, "quantization": "int8_fp8"}
    kernel.reset_stats()
    got = kernel.attention(*inputs, **options, backend="triton")
    assert kernel.stats().reasons == {"sparse: triton": 1}
    assert kernel.attention.__module__ == "_sparge_interpreted.api"
    calls = sys.modules["_sparge_interpreted.call"]._calls.values()
    assert {type(call).__module__ for call in calls} == {"_sparge_interpreted.call"}, "the package uses its own modules"
    expected = sparge.attention(*inputs, **options, backend="triton")
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
