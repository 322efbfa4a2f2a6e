"""`sparge lm-eval`: the harness gets its arguments with sparse attention added to the model's; errors are one line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import sparge
from sparge.cli.app import main
from sparge.evaluate.lm_harness import with_sparse_attention


@pytest.mark.parametrize("option", ["--model_args", "-a"])
def test_model_arguments(option: str) -> None:
    assert with_sparse_attention([option, "pretrained=x"]) == [option, "pretrained=x,attn_implementation=sparge"]
    assert with_sparse_attention([f"{option}=pretrained=x"]) == [f"{option}=pretrained=x,attn_implementation=sparge"]
    chosen = [option, "pretrained=x,attn_implementation=sparge"]
    assert with_sparse_attention(chosen) == chosen
    for other in ("eager", "sparge2"):
        with pytest.raises(ValueError, match="expected no attn_implementation other than sparge"):
            with_sparse_attention([option, f"pretrained=x,attn_implementation={other}"])
    with pytest.raises(ValueError, match="expected name=value pairs, got JSON"):
        with_sparse_attention([option, '{"pretrained": "x"}'])
    for missing in ([], ["--tasks", "wikitext"], [option]):
        with pytest.raises(ValueError, match="expected --model_args"):
            with_sparse_attention(missing)


def test_harness_runs_with_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for lm_eval parses the command line and loads a model by name, as the harness does."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "policy.json").write_text('{"topk": 0.25, "dense_layers": [0], "backend": "torch"}')

    def cli_evaluate() -> None:
        assert sys.argv[:3] == ["lm_eval", "--tasks", "essay"]
        options = dict(pair.split("=", 1) for pair in sys.argv[4].split(","))
        model = AutoModelForCausalLM.from_pretrained(
            options["pretrained"], attn_implementation=options["attn_implementation"]
        )
        with torch.no_grad():
            model(torch.arange(300)[None] % 99)

    harness = ModuleType("lm_eval.__main__")
    harness.cli_evaluate = cli_evaluate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", harness)
    before = sys.argv
    arguments = ["lm-eval", "--policy", str(tmp_path / "policy.json"), "--", "--tasks", "essay"]
    with pytest.raises(SystemExit) as done:
        main([*arguments, "--model_args", f"pretrained={tmp_path / 'model'}"])
    assert not done.value.code
    assert sys.argv is before
    assert {name: layer.reasons for name, layer in sparge.stats().layers.items()} == {
        "layers.0": {"dense: dense layer": 1},
        "layers.1": {"sparse: torch": 1},
    }
    assert str(sparge.stats()) in capsys.readouterr().out


@pytest.mark.parametrize("share", ["0.5", "0.25"])
def test_topk_and_policy_raise(share: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of them would have no effect, even if --topk is its default."""
    (tmp_path / "policy.json").write_text('{"topk": 0.25}')
    with pytest.raises(SystemExit) as done:
        main(["lm-eval", "--topk", share, "--policy", str(tmp_path / "policy.json"), "--", "-a", "pretrained=x"])
    assert done.value.code == 2
    assert capsys.readouterr().err.startswith(
        f"sparge: error: lm-eval: expected --topk or --policy, got both: {share} and {{"
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--", "--tasks", "wikitext"], "expected --model_args pretrained=... among the arguments of lm_eval"),
        (
            ["--policy", "nowhere.json", "--", "-a", "pretrained=x"],
            "expected a file that Policy.to_json wrote, got",
        ),
        (["--topk", "2", "--", "-a", "pretrained=x"], "expected"),
        (["--", "-a", "pretrained=x"], "expected lm_eval to be installed (pip install 'lm_eval[hf]')"),
    ],
)
def test_errors(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit) as done:
        main(["lm-eval", *arguments])
    assert done.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("sparge: error: ")
    assert error.count("\n") == 1
