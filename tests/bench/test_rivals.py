"""Dense rivals: the fastest one, and detection of FlashAttention-4."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from benchmarks import models
from torch import Tensor

from sparge.bench import rivals


@pytest.mark.skipif(rivals.fa4_version() is not None, reason="this machine has FlashAttention-4")
def test_missing_flash_attention_4() -> None:
    assert rivals.describe_fa4().endswith("pip install flash-attn-4")
    with pytest.raises(ImportError, match="flash_attn"):
        rivals.import_fa4()
    assert models._other_kernels() == {}


def test_installed_flash_attention_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals.metadata, "version", lambda name: {"flash-attn-4": "4.0"}[name])
    assert rivals.describe_fa4() == "4.0"
    assert list(models._other_kernels()) == ["fa4"]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"fa4_ms": 1.0, "cudnn_ms": 2.0, "flash_ms": 3.0}, "fa4"),
        ({"fa4_ms": 3.0, "cudnn_ms": 2.0, "flash_ms": 3.0}, "cudnn"),
        ({"fa4_ms": None, "cudnn_ms": 2.0, "flash_ms": 3.0}, "cudnn"),
        ({"cudnn_ms": 4.0, "flash_ms": 3.0, "sparge_ms": 1.0}, "flash"),
        ({"cudnn_graph_ms": 4.0}, None),
    ],
)
def test_fastest_kernel_that_ran(times: dict[str, float | None], expected: str | None) -> None:
    assert rivals.fastest(times) == expected


def test_flash_attention_4_runs_only_calls_with_equal_results(monkeypatch: pytest.MonkeyPatch) -> None:
    fa4_calls = []

    def flash_attn_func(q: Tensor, _: Tensor, v: Tensor, *, causal: bool, softmax_scale: float | None) -> Tensor:
        fa4_calls.append((tuple(q.shape), causal, softmax_scale))
        return q.new_full((*q.shape[:3], v.shape[3]), 7.0)

    monkeypatch.setattr(models, "import_fa4", lambda: SimpleNamespace(flash_attn_func=flash_attn_func))
    query, short = torch.randn(1, 4, 6, 8).bfloat16(), torch.randn(1, 4, 3, 8).bfloat16()
    mask = torch.ones(6, 6, dtype=torch.bool)
    calls = {
        "supported": lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True, scale=0.5),
        "fewer queries": lambda: F.scaled_dot_product_attention(short, query, query),
        "top-left": lambda: F.scaled_dot_product_attention(short, query, query, is_causal=True),
        "mask": lambda: F.scaled_dot_product_attention(query, query, query, mask),
        "float32": lambda: F.scaled_dot_product_attention(*[query.float()] * 3),
    }
    with models.Fa4Sdpa():
        outputs = {name: call() for name, call in calls.items()}
    assert fa4_calls == [((1, 6, 4, 8), True, 0.5), ((1, 3, 4, 8), False, None)]
    assert {name for name, output in outputs.items() if (output == 7.0).all()} == {"supported", "fewer queries"}
    assert outputs["supported"].shape == (1, 4, 6, 8)
