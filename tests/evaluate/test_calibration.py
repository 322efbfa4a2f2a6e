"""Calibration: error curves of layers, budgets that meet the error, and profiles in JSON and in models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_language import tiny_model, tiny_tokenizer
from torch import Tensor

import sparge
from sparge import Budget, Policy, Profile
from sparge.calibration import calibrate, check
from sparge.cli.app import main
from sparge.evaluate.metrics import relative_l1
from sparge.integrations.calls import substituted
from sparge.profile import Curve, share_within

DENSITIES = (0.3, 0.5, 0.8)
POLICY = Policy(backend="torch", quantization="none")
LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def windows(count: int, length: int = 1024) -> list[Tensor]:
    return list(torch.randint(256, (count, 1, length), generator=torch.Generator().manual_seed(1)))


@pytest.fixture(scope="module")
def profile(model: Any) -> Profile:
    return calibrate(model, windows(2), max_error=0.3, policy=POLICY, densities=DENSITIES)


def test_curves_are_errors_on_inputs_of_the_exact_model(model: Any, profile: Profile) -> None:
    calls: dict[str, Any] = {}

    def note(layer: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **call: Any) -> Tensor:
        exact = sparge.attention(query, key, value, mask, **{**call, "sparsity": sparge.Dense()})
        output = sparge.attention(query, key, value, mask, **{**call, "sparsity": Budget(0.5)})
        calls[layer] = relative_l1(output, exact)
        return exact

    sparge.enable(model, POLICY)
    with substituted(note), torch.no_grad():
        model(windows(2)[1])
    sparge.disable(model)
    assert list(profile.curves) == LAYERS == list(calls)
    for layer, curve in profile.curves.items():
        assert curve.densities == DENSITIES
        assert curve.errors[1][1] == pytest.approx(calls[layer], rel=1e-6)
    assert profile.tokens == 1024


def test_budgets_meet_their_max_error(model: Any, profile: Profile) -> None:
    assert profile.policy.budgets is not None
    assert all(0.3 <= budget <= 0.8 for budget in profile.policy.budgets.values()), "within the measured densities"
    found = check(model, windows(2), profile)
    assert list(found) == LAYERS and all(len(errors) == 2 for errors in found.values())
    assert share_within(found, 1.05 * profile.max_error) == 1.0, "interpolation between densities is not exact"
    assert share_within(found, 0.5 * profile.max_error) < 1.0, "budgets are not larger than needed"


def test_profile_sets_the_budget_of_each_layer(model: Any, profile: Profile) -> None:
    kept: dict[str, float] = {}

    def note(layer: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **call: Any) -> Tensor:
        kept[layer] = call["sparsity"].density
        return sparge.attention(query, key, value, mask, **call)

    again = Profile.from_json(profile.to_json())
    assert again == profile
    assert profile.policy.budgets is not None
    assert again.by_layer() == [profile.policy.budgets[layer] for layer in LAYERS]
    sparge.enable(model, again)
    with substituted(note), torch.no_grad():
        model(windows(1)[0])
    sparge.disable(model)
    assert kept == profile.policy.budgets


def test_budget_of_1_runs_dense(model: Any) -> None:
    sparge.reset_stats()
    sparge.enable(model, Policy(backend="torch", budgets={LAYERS[0]: 1.0, LAYERS[1]: 0.5}))
    with torch.no_grad():
        model(windows(1)[0])
    sparge.disable(model)
    layers = sparge.stats().layers
    assert (layers[LAYERS[0]].dense, layers[LAYERS[0]].sparse) == (1, 0)
    assert layers[LAYERS[1]].density == pytest.approx(0.5, abs=0.02)


def test_at_derives_other_budgets_from_the_same_measurements(profile: Profile) -> None:
    half = profile.at(density=0.75)
    assert half.density == pytest.approx(0.75, abs=1e-3)
    assert half.max_error is None and half.share is not None and 0.5 < half.share < 1
    for wrong in (0.001, 1.5):
        with pytest.raises(ValueError, match=rf"density: expected a value in \[0.01, 1\], got {wrong}"):
            profile.at(density=wrong)
    assert (half.curves, half.needs) == (profile.curves, profile.needs)
    budgets = half.policy.budgets
    assert budgets is not None
    for layer, needs in half.needs.items():
        assert needs.density_for(half.share) == pytest.approx(budgets[layer])
    assert half.at(max_error=profile.max_error) == profile
    assert profile.at(max_error=1e-9).density == 1.0, "layers that cannot meet the error run dense"


@pytest.mark.parametrize(
    "tokens, density, min_blocks", [(8192, 0.25, 8), (4096, 0.2, 6), (1024, 0.5, 4), (1024, 0.05, 1), (8192, 1.0, 8)]
)
def test_small_budgets_keep_a_minimum_of_blocks(profile: Profile, tokens: int, density: float, min_blocks: int) -> None:
    """The minimum shrinks if it alone exceeds the density: causal query blocks see half of the blocks on average."""
    long = dataclasses.replace(profile, tokens=tokens).at(density=density)
    assert long.policy.selection == Budget(density, min_blocks=min_blocks)
    custom = dataclasses.replace(long, measured=Policy(sparsity=Budget(0.5, min_blocks=10)))
    assert custom.at(density=density).policy.selection == Budget(density, min_blocks=10)


def test_needs_are_densities_that_keep_a_share_of_the_attention(model: Any, profile: Profile) -> None:
    kept: dict[str, float] = {}

    def note(layer: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **call: Any) -> Tensor:
        exact = sparge.attention(query, key, value, mask, **{**call, "sparsity": sparge.Dense()})
        rule = sparge.TopCdf(0.9, min_blocks=1)
        found = sparge.predict(query, key, is_causal=True, sparsity=rule, scale=call["scale"], enable_gqa=True)
        kept[layer] = found.density()
        return exact

    sparge.enable(model, POLICY)
    with substituted(note), torch.no_grad():
        model(windows(2)[1])
    sparge.disable(model)
    for layer, needs in profile.needs.items():
        assert needs.densities[1][needs.shares.index(0.9)] == pytest.approx(kept[layer], rel=1e-6)
        assert list(needs.densities[1]) == sorted(needs.densities[1])


def test_worst_errors_do_not_rise_with_density() -> None:
    curve = Curve((0.1, 0.2, 0.4), ((0.3, 0.1, 0.12), (0.2, 0.15, 0.05)))
    assert curve.worst() == (0.3, 0.15, 0.12)
    assert Curve((0.1, 0.2, 0.4), ((0.3, 0.1, 0.2),)).worst() == (0.3, 0.2, 0.2), "a later rise raises earlier errors"
    broken = Curve((0.1, 0.2), ((float("nan"), 0.1), (0.1, 0.1)))
    assert broken.density_for(0.15) == 0.2, "NaN is not a small error"
    assert curve.density_for(0.15) == pytest.approx(0.2)
    assert curve.density_for(0.12) == pytest.approx(0.4)
    assert curve.density_for(0.5) == 0.1 and curve.density_for(0.1) == 1.0
    flat = Curve((0.1, 0.2), ((0.2, 0.2),))
    assert flat.density_for(0.2) == 0.1
    assert Curve((0.1, 0.2), ((0.2, 0.0),)).density_for(0.1) <= 0.2, "an error of 0 has no logarithm"


def test_interrupted_calibration_resumes(model: Any, profile: Profile, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options: dict[str, Any] = {"max_error": 0.3, "policy": POLICY, "densities": DENSITIES, "rows": rows}

    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(model, [windows(2)[0], stop], **options)
    assert not hasattr(model, "_sparge_enabled"), "the model is restored"
    (done,) = rows.read_text().splitlines()
    assert calibrate(model, windows(2), **options).curves == profile.curves
    assert rows.read_text().splitlines()[0] == done and len(rows.read_text().splitlines()) == 2


def test_rows_of_other_inputs_are_not_reused(model: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_error": 0.3, "policy": POLICY, "densities": (0.5,), "rows": str(tmp_path / "rows")}
    first = calibrate(model, windows(1), **options)
    shorter = calibrate(model, windows(1, 768), **options)
    assert (first.tokens, shorter.tokens) == (1024, 768) and first.curves != shorter.curves


def test_budgets_include_the_quantization_error(model: Any) -> None:
    policy = Policy(backend="torch", quantization="int8_fp8")
    found = calibrate(model, windows(1, 768), max_error=1e-3, policy=policy, densities=(0.5, 0.95))
    assert set((found.policy.budgets or {}).values()) == {1.0}
    assert check(model, windows(1, 768), found) == {}, "dense layers are not measured"


def test_progress_is_reported(model: Any) -> None:
    reported: list[tuple[str, int, int]] = []
    options: dict[str, Any] = {"policy": POLICY, "densities": (0.5,)}
    calibrate(model, windows(2), max_error=0.3, progress=lambda *news: reported.append(news), **options)
    assert reported == [("input 0", 0, 2), ("input 1", 1, 2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected max_error or density, got max_error=None and density=None"),
        ({"max_error": 0.1, "density": 0.1}, "expected max_error or density, got"),
        ({"max_error": 0.0}, "max_error: expected a value above 0, got 0.0"),
        ({"density": 1.5}, r"density: expected a value in \[0.01, 1\], got 1.5"),
        (
            {"max_error": 0.1, "densities": (0.8, 0.3)},
            r"densities: expected increasing values in \(0, 1\], got \(0.8, 0.3",
        ),
        ({"max_error": 0.1, "policy": Policy(budgets={"a": 0.5})}, "policy: expected a Budget .* got budgets"),
        ({"max_error": 0.1, "policy": Policy(sparsity=sparge.TopCdf(0.9))}, "expected a Budget or a TopK .*a TopCdf"),
        ({"max_error": 0.1, "policy": Policy()}, "inputs: expected sparse calls, got none"),
    ],
)
def test_errors(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(model, windows(1, 256), **options)
    with pytest.raises(ValueError, match="inputs: expected one or more, got none"):
        calibrate(model, [], max_error=0.1)
    with pytest.raises(TypeError, match="inputs: expected a list, got Tensor"):
        calibrate(model, windows(1)[0], max_error=0.1)  # type: ignore[arg-type]


def test_profile_of_another_model_raises(model: Any, profile: Profile) -> None:
    with pytest.raises(ValueError, match=r"budgets: expected layers of the model \(model\.layers\.0.*got 'x'"):
        sparge.enable(model, Policy(budgets={"x": 0.5}))
    plain = json.loads(profile.to_json())
    with pytest.raises(ValueError, match="profile: expected version 3, got 7; calibrate again"):
        Profile.from_json(json.dumps({**plain, "version": 7}))
    with pytest.raises(ValueError, match=r"profile: expected JSON from Profile\.to_json"):
        Profile.from_json("{}")


def test_profile_checks_class_and_number_of_layers(profile: Profile) -> None:
    """Models of other classes and depths may have layers of the same names."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    same = type(tiny_model())
    assert profile.model["kind"] == same.__name__
    other = Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=2))
    if same is Qwen2ForCausalLM:
        other = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))
    with pytest.raises(ValueError, match=f"with the class {same.__name__}, got {type(other).__name__}"):
        sparge.enable(other, profile)
    deeper = same(type(tiny_model().config)(**{**tiny_model().config.to_dict(), "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match="with the number of layers 2, got 3"):
        sparge.enable(deeper, profile)
    retrained = tiny_model()
    with torch.no_grad():
        next(retrained.parameters()).mul_(2)
    with pytest.warns(UserWarning, match="other weights"):
        sparge.enable(retrained, profile)
    assert sparge.Profile.from_json(profile.to_json()).model == profile.model


@pytest.mark.parametrize(
    ("budgets", "kind", "message"),
    [
        ([0.5], TypeError, "budgets: expected densities by names of layers"),
        ({"a": 0.0}, ValueError, r"budgets: expected values in \(0, 1\], got 0.0 for 'a'"),
        ({"a": "half"}, ValueError, r"budgets: expected values in \(0, 1\], got 'half' for 'a'"),
    ],
)
def test_invalid_budgets_raise(budgets: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Policy(budgets=budgets)
    with pytest.raises(ValueError, match="budgets: expected a Budget or a TopK with them"):
        Policy(sparsity=sparge.TopCdf(0.9), budgets={"a": 0.5})


def test_pipeline() -> None:
    from small_pipelines import small_pipeline

    pipeline = small_pipeline()
    policy = Policy(backend="torch", quantization="none")
    found = calibrate(
        pipeline, [{"prompt": "a", "num_inference_steps": 2}], density=0.6, policy=policy, densities=DENSITIES
    )
    assert all(name.startswith("transformer.blocks.") for name in found.curves)
    assert found.density == pytest.approx(0.6, abs=1e-3)
    sparge.enable(pipeline, found)
    sparge.disable(pipeline)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (("--max-error", "0.3"), "for an error of 0.300"),
        (("--density", "0.5"), "of the predicted attention of every query block"),
    ],
)
def test_command(
    target: tuple[str, str], message: str, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output, plot = tmp_path / "model", tmp_path / "profile.json", tmp_path / "profile.png"
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (tmp_path / "policy.json").write_text(POLICY.to_json())
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy. " * 60)
    arguments = ["calibrate", str(folder), *target, "--tokens", "512", "--inputs", "2", "--held-out", "2"]
    arguments += ["--policy", str(tmp_path / "policy.json"), "--text", str(tmp_path / "text.txt")]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--output", str(output), "--plot", str(plot), "--rows", str(tmp_path / "rows.jsonl")])
    assert not end.value.code
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 layers, 512 tokens: mean budget" in shown and "2 further inputs:" in shown and message in shown
    assert sorted(Profile.load(output).curves) == LAYERS
    assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-error", "much"], "expected a number above 0, or one of llm, image, video, got much"),
        (["--density", "0"], r"expected a number in (0, 1], got 0"),
        (["--max-error", "0.1", "--density", "0.5"], "expected --max-error or --density, got both"),
        (["--policy", "nowhere.json"], "expected a file that Policy.to_json wrote, got 'nowhere.json'"),
    ],
)
def test_invalid_command_lines(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["calibrate", "nowhere", *arguments])
    assert end.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
