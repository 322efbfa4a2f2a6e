"""``Policy(dense="8bit")``: dense calls are quantized, or run the framework's attention if they cannot be."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from test_transformers import llama, padding, tokens
from tiny_transformers import build
from torch import Tensor

import sparge
from sparge import Dense, Policy
from sparge.backends import base
from sparge.dispatch import dense_rules, reasons
from sparge.dispatch.reasons import Reason
from sparge.evaluate.report import share_computed
from sparge.evaluate.variants import parse_variant
from sparge.integrations.calls import attend
from sparge.integrations.layers import Layer, Steps
from sparge.integrations.model_call import ModelCall

pytestmark = pytest.mark.usefixtures("no_gradients")

QUANTIZED_DENSE = {"dense": "8bit", "quantization": "int8_fp8"}
QUANTIZED_TORCH = Policy(**QUANTIZED_DENSE, backend="torch", on_unsupported="raise")


def qkv(length: int = 300, heads: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, count, length, 16) for count in (heads, 2, 2)]


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().mean() / expected.abs().mean())


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("cause", ["layer", "step", "unknown schedule"])
def test_matches_quantized_dense_attention(backend: str, cause: str) -> None:
    query, key, value = qkv(200)
    policy = Policy(**QUANTIZED_DENSE, backend=backend)
    steps = Steps(policy)
    if cause != "unknown schedule":
        steps.dense = Reason.STEP if cause == "step" else None
    got = attend(
        Layer("a", policy, cause == "layer", steps), ModelCall(query, key, value, is_causal=True, enable_gqa=True)
    )
    reasons = sparge.stats().layers["a"].reasons
    expected = sparge.attention(
        query, key, value, is_causal=True, enable_gqa=True, sparsity=Dense(), quantization="int8_fp8", backend=backend
    )
    assert got is not None and torch.equal(got, expected)
    rules = {"layer": "dense layer", "step": "dense step", "unknown schedule": "dense step, the schedule is unknown"}
    assert reasons == {f"dense in 8 bits: {rules[cause]}": 1}
    assert sparge.stats().layers["a"].dense == 1 and sparge.stats().sparse == 0


def test_windows_apply_to_quantized_calls() -> None:
    query, key, value = qkv(300)
    call = {"is_causal": True, "enable_gqa": True, "window": (90, 0)}
    got = attend(Layer("a", QUANTIZED_TORCH, True), ModelCall(query, key, value, **call))
    expected = sparge.attention(query, key, value, sparsity=Dense(), quantization="int8_fp8", backend="torch", **call)
    assert got is not None and torch.equal(got, expected)


@pytest.mark.parametrize(
    "policy, is_faster, runs",
    [
        (Policy(dense="8bit"), True, True),
        (Policy(dense="8bit", quantization="int8_fp16"), True, True),
        (Policy(dense="8bit", quantization="int8_fp8"), False, False),
        (Policy(dense="8bit"), False, False),
        (Policy(dense="8bit", backend="torch"), False, False),
        (Policy(), True, False),
    ],
    ids=str,
)
def test_runs_quantized_only_if_faster(
    policy: Policy, is_faster: bool, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, quantization is simulated: it runs only if the policy names both a backend and a quantization."""
    monkeypatch.setattr(base, "_fastest_quantization", lambda *_: "int8_fp8" if is_faster else "none")
    cpu = torch.device("cpu")
    assert dense_rules.runs_quantized(policy, Reason.STEP, cpu) is runs
    for reason in set(Reason) - set(reasons.POLICY_RULES):
        assert not dense_rules.runs_quantized(policy, reason, cpu)


def test_calls_that_no_policy_rule_made_dense_are_not_quantized() -> None:
    query, key, value = qkv()
    layer = Layer("", Policy(**QUANTIZED_DENSE, backend="torch", min_tokens=250), dense=True)
    assert attend(layer, ModelCall(query[:, :, :1], key, value, enable_gqa=True, is_language=True)) is None
    assert attend(layer, ModelCall(query[:, :, :9], key, value, enable_gqa=True)) is None
    assert attend(layer, ModelCall(*(tensor[:, :, :200] for tensor in (query, key, value)), enable_gqa=True)) is None
    assert sparge.stats().reasons == {
        "dense: decode": 1, "dense: cross-attention": 1, "dense: fewer than min_tokens": 1
    }  # fmt: skip


@pytest.mark.parametrize("reason", ["dropout", "gradients", "rows of the dtype's minimum", "marked by the caller"])
def test_unsupported_calls_run_in_16_bits(reason: str) -> None:
    query, key, value = qkv()
    call: dict[str, Any] = {"enable_gqa": True}
    if reason == "dropout":
        call["dropout_p"] = 0.1
    elif reason == "rows of the dtype's minimum":
        call["attn_mask"] = torch.full((300, 300), torch.finfo(torch.float32).min)
    elif reason == "marked by the caller":
        call["unsupported"] = "anything"
    with torch.set_grad_enabled(reason == "gradients"), warnings.catch_warnings():
        warnings.simplefilter("error")
        query.requires_grad_(reason == "gradients")
        assert attend(Layer("", QUANTIZED_TORCH, dense=True), ModelCall(query, key, value, **call)) is None
    assert sparge.stats().reasons == {"dense: dense layer": 1}


def test_masks() -> None:
    query, key, value = qkv()
    bias = torch.randn(300, 300)
    visible = padding("left").bool()[:, None, None, :300]
    for mask in (bias, visible):
        options = {"enable_gqa": True, "quantization": "int8_fp8", "backend": "torch"}
        got = attend(Layer("", QUANTIZED_TORCH, dense=True), ModelCall(query, key, value, mask, enable_gqa=True))
        expected = sparge.attention(query, key, value, mask, sparsity=Dense(), **options)
        assert got is not None and relative_error(got, expected) < (1e-6 if mask is bias else 0.02), (
            "padding is cut off"
        )
    assert set(sparge.stats().reasons) == {"dense in 8 bits: dense layer", "dense: sparsity=Dense()"}


def test_language_model() -> None:
    model, ids, mask = llama(), tokens(), padding("left")
    expected = model(ids, attention_mask=mask).logits
    sparge.enable(model, Policy(topk=1.0, **QUANTIZED_DENSE, backend="torch", dense_layers=(0, -1)))
    got = model(ids, attention_mask=mask).logits
    layers = sparge.stats().layers
    for index, reason in enumerate(("dense in 8 bits: dense layer", "sparse: torch", "dense in 8 bits: dense layer")):
        assert set(layers[f"model.layers.{index}.self_attn"].reasons) == {reason}
    assert 1e-5 < relative_error(got[mask.bool()], expected[mask.bool()]) < 0.05
    sparge.enable(
        model, Policy(topk=1.0, backend="torch", budgets={"model.layers.1.self_attn": 1.0}, **QUANTIZED_DENSE)
    )
    sparge.reset_stats()
    model(ids)
    assert sparge.stats().layers["model.layers.1.self_attn"].reasons == {"dense in 8 bits: dense layer": 1}


def test_compiled_programs_count_quantized_calls() -> None:
    query, key, value = qkv()
    layer = Layer("", QUANTIZED_TORCH, dense=True)
    compiled = torch.compile(
        lambda *qkv: attend(layer, ModelCall(*qkv, enable_gqa=True)), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(query, key, value), attend(layer, ModelCall(query, key, value, enable_gqa=True)))
    assert sparge.stats().reasons == {"dense in 8 bits: dense layer": 2}


@pytest.mark.parametrize("name", ["wan", "sd3"], ids=["dispatcher", "sdpa"])
def test_diffusion_models(name: str) -> None:
    model, inputs = build(name)
    expected = model(**inputs).sample
    sparge.enable(model, Policy(**QUANTIZED_DENSE, backend="torch", dense_layers=(0, 1)))
    got = model(**inputs).sample
    assert sparge.stats().sparse == 0
    assert sparge.stats().reasons["dense in 8 bits: dense layer"] >= 2
    assert 1e-6 < relative_error(got, expected) < 0.05


def test_evaluation_variants() -> None:
    variant = parse_variant("topk=0.25,dense_first_steps=2,dense=8bit")
    assert variant.kind == "policy" and variant.policy == Policy(topk=0.25, dense_first_steps=2, dense="8bit")
    assert parse_variant("dense,quantization=int8_fp8").kind == "dense"
    with pytest.raises(ValueError, match="dense: expected one of '16bit', '8bit', got True"):
        parse_variant("topk=0.25,dense=true")
    row = {"sparse": 2, "density": 0.5, "reasons": {"sparse: torch": 2, "dense in 8 bits: dense step": 2}}
    assert share_computed([row]) == 0.75
