"""Variants: parsing of their text, and how they run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny_language import tiny_model

import sparge
from sparge.evaluate.report import share_computed
from sparge.evaluate.variants import family_of, parse_variant
from sparge.profile import Curve, Needs, Profile


def test_parsing(tmp_path: Path) -> None:
    assert parse_variant("topk=.25,quantization=none").policy == sparge.Policy(topk=0.25, quantization="none")
    rule = parse_variant("cdf=0.9,min_blocks=4,pv_threshold=-8,score=mean").policy
    assert rule == sparge.Policy(sparsity=sparge.TopCdf(0.9, min_blocks=4, pv_threshold=-8), score="mean")
    assert parse_variant("topk=0.5,oracle").kind == "oracle" and parse_variant("sdpa=math").kernel == "math"
    assert parse_variant("dense,quantization=int8_fp16").policy.quantization == "int8_fp16"
    (tmp_path / "mine.json").write_text('{"topk": 0.3, "dense_layers": [0, -1]}')
    from_file = parse_variant(str(tmp_path / "mine.json"))
    assert from_file.label == str(tmp_path / "mine.json") and from_file.policy.dense_layers == (0, -1)
    assert parse_variant('{"topk": 0.3}').policy.topk == 0.3
    variant = parse_variant("topk=0.5").forced(torch.device("cpu"))
    assert variant.policy == dataclasses.replace(parse_variant("topk=0.5").policy, backend="torch")
    named = parse_variant("topk=0.5,backend=reference")
    assert named.forced(torch.device("cpu")) == named
    assert family_of("topk=0.5,oracle") == "topk, oracle"
    assert parse_variant("topk=0.5,dense_layers=[0,-1],always_keep=[[0,10]]").policy == sparge.Policy(
        topk=0.5, dense_layers=(0, -1), always_keep=((0, 10),)
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "expected one of topk="),
        ("oracle", "expected an amount"),
        ("dense,topk=0.5", "expected an amount"),
        ("topk=0.5,cdf=0.5", "expected one of topk="),
        ("topk=0.5,topk=0.4", "expected topk once, got it twice"),
        ("sdpa=best", "expected sdpa= alone, one of math"),
        ("sdpa=math,topk=0.5", "expected an amount"),
        ("topk=3", "topk: expected a value in"),
        ("topk=0.5,score=best", "score: expected"),
        ("fast", "expected words among cdf, dense, oracle, profile, rows, sdpa, topk or fields of .*, got 'fast'"),
        ("missing.json", "expected a file that can be read"),
        ("topk=0.5,oracle,pv_threshold=-5", "expected no pv_threshold together with oracle"),
        ("profile=missing.json,topk=0.5", "expected a file that can be read"),
        ("cdf=0.9,profile=missing.json", "expected topk= and policy fields together with profile="),
        ("profile=missing.json,topk=0.5,oracle", "expected topk= and policy fields together with profile="),
    ],
)
def test_invalid_text_raises(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_variant(text)


def test_profiles(tmp_path: Path) -> None:
    """One of two layers needs twice the density of the other for the same share of the attention."""
    curve = Curve((0.1, 0.4), ((0.2, 0.05),))
    needs = {name: Needs((0.5, 0.9), (densities,)) for name, densities in (("a", (0.2, 0.6)), ("b", (0.1, 0.3)))}
    profile = Profile.chosen({}, sparge.Policy(), {"a": curve, "b": curve}, needs, tokens=4096, max_error=0.1)
    profile.save(tmp_path / "profile.json")
    assert parse_variant(str(tmp_path / "profile.json")).policy == profile.policy
    variant = parse_variant(f"profile={tmp_path}/profile.json,topk=0.15,quantization=none")
    assert variant.policy == dataclasses.replace(profile.at(density=0.15).policy, quantization="none")
    assert variant.policy.budgets == pytest.approx({"a": 0.2, "b": 0.1})
    for words in ("min_blocks=4", "budgets={}"):
        with pytest.raises(ValueError, match=f"policy fields together with profile=, got {words.partition('=')[0]}"):
            parse_variant(f"profile={tmp_path}/profile.json,topk=0.15,{words}")
    with pytest.raises(TypeError, match="topk: expected a number"):
        parse_variant(f"profile={tmp_path}/profile.json,topk=a")
    folder = tmp_path / "profile=a"
    folder.mkdir()
    (folder / "policy.json").write_text('{"topk": 0.3}')
    assert parse_variant(str(folder / "policy.json")).policy.topk == 0.3
    (tmp_path / "other.json").write_text('{"curves": {}, "version": 3}')
    with pytest.raises(ValueError, match=r"expected JSON from Profile\.to_json, got other JSON"):
        parse_variant(str(tmp_path / "other.json"))


@torch.no_grad()
def test_variants_run_as_labeled() -> None:
    pytest.importorskip("transformers")
    model, tokens = tiny_model(), torch.arange(700)[None] % 256
    stock = model(tokens).logits
    device = torch.device("cpu")
    found = {}
    for words in ("topk=0.6", "topk=0.6,oracle", "dense,quantization=int8_fp16", "sdpa=math"):
        with parse_variant(words).forced(device).applied(model):
            found[words] = float((model(tokens).logits - stock).abs().mean()), sparge.stats()
        assert torch.equal(model(tokens).logits, stock), "the model is restored"
    (chosen, chosen_stats), (oracle, oracle_stats), (eight, eight_stats), (math, math_stats) = found.values()
    assert chosen_stats.density == oracle_stats.density and oracle < chosen
    assert chosen_stats.reasons == {"sparse: torch": 2} and eight_stats.reasons == {"dense: sparsity=Dense()": 2}
    assert math_stats.calls == 0 and math < 1e-4 < eight < chosen


def test_missing_kernels_raise() -> None:
    with (
        pytest.raises(NotImplementedError, match="variant 'sdpa=cudnn': expected a kernel of torch"),
        parse_variant("sdpa=cudnn").applied(None),
    ):
        raise RuntimeError("No available kernel. Aborting execution.")


def test_dense_layers_count_as_fully_computed() -> None:
    ran = {"sparse": 20, "density": 0.3, "reasons": {"sparse: torch": 20, "dense: dense layer": 10, "dense: decode": 7}}
    assert share_computed([ran]) == pytest.approx((20 * 0.3 + 10) / 30)
    assert share_computed([{"sparse": 0, "density": None, "reasons": {}}]) is None
    for reason in ("dense: dense step", "dense: dense step, the schedule is unknown", "dense in 8 bits: dense layer"):
        assert share_computed([{"sparse": 0, "density": None, "reasons": {reason: 3}}]) == 1.0


@torch.no_grad()
def test_oracle_runs_masked_calls_over_all_blocks() -> None:
    pytest.importorskip("transformers")
    model, tokens = tiny_model(), torch.arange(300)[None] % 256
    mask = torch.ones(300, 300, dtype=torch.bool).tril()[None, None]
    mask[..., 0] = False
    expected = model(tokens, attention_mask=mask).logits
    with parse_variant("topk=0.1,oracle").forced(torch.device("cpu")).applied(model):
        assert torch.allclose(model(tokens, attention_mask=mask).logits, expected, atol=1e-4, equal_nan=True)


@torch.no_grad()
def test_oracle_supports_padded_batches() -> None:
    pytest.importorskip("transformers")
    model, tokens = tiny_model(), (torch.arange(1400) % 256).view(2, 700)
    padding = torch.ones(2, 700, dtype=torch.long)
    padding[0, :200] = 0
    with parse_variant("topk=1.0,oracle").forced(torch.device("cpu")).applied(model):
        output = model(tokens, attention_mask=padding).logits
        assert sparge.stats().sparse == 2, "one call per layer for both sequences"
    assert torch.allclose(output[1], model(tokens[1:]).logits[0], atol=1e-4)
