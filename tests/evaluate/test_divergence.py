"""`benchmarks/divergence.py` on a tiny model: exact attention changes nothing, and the measures are what they say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")


@pytest.fixture
def divergence(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks import divergence

    return divergence


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def test_arithmetics_of_a_model(divergence: Any, model: Any) -> None:
    window = torch.randint(64, (1, 700), generator=torch.Generator().manual_seed(1))
    dense = divergence.hidden_states(model, window)
    found = {}
    for name in ("none", "int8_fp16", "int8_fp8"):
        with divergence.dense_attention(model, name, "torch"):
            found[name] = divergence.compare(model, window, dense, divergence.hidden_states(model, window))
    assert torch.equal(dense, divergence.hidden_states(model, window)), "the model is as it was"
    assert found["none"].kl < 1e-9 and found["none"].agreement > 0.999
    assert 1e-7 < found["int8_fp16"].kl < found["int8_fp8"].kl < 0.05
    assert 0.8 < found["int8_fp8"].agreement < 1


@torch.no_grad()
def test_measures_are_those_of_the_definition(divergence: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "CHUNK_TOKENS", 7)
    window = torch.randint(64, (1, 30), generator=torch.Generator().manual_seed(1))
    dense = divergence.hidden_states(model, window)
    other = dense + 0.1 * torch.randn(dense.shape, generator=torch.Generator().manual_seed(2))
    got = divergence.compare(model, window, dense, other)
    p, q = (model.lm_head(hidden)[0].double().softmax(-1) for hidden in (dense, other))
    assert got.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
    assert got.agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    rise = (p / q).log().gather(1, window[0, 1:, None]).mean()
    assert got.rise == pytest.approx(float(rise), rel=1e-4)
    summary = divergence.summary([got, divergence.Window(3 * got.kl, 0.5, got.rise)])
    assert (summary["kl"], summary["kl_error"]) == (pytest.approx(2 * got.kl), pytest.approx(got.kl))
    assert (summary["loss"], summary["loss_error"]) == (pytest.approx(math.expm1(got.rise)), 0.0)
    assert divergence.summary([got])["kl_error"] is None
