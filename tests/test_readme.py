"""The examples of README run on fewer tokens; the tables of all pages match the committed results."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sparge

REPOSITORY = Path(__file__).parent.parent
WORDS = 4500
"""Length of a prompt above the crossover of a CPU, in words."""
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the Python of a page from top to bottom, with small models in place of published ones.

    ``tokens`` is the sequence length on the page, to be replaced by 4096. Return the variables that the code defines.
    """
    monkeypatch.syspath_prepend(REPOSITORY / "tests" / "integrations")
    import diffusers
    import transformers
    from tiny_pipelines import CALLS, PIPELINES, STEPS, seeded, word_tokenizer

    tokenizer = word_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=1, eos_token_id=None, max_position_embeddings=8192, **sizes
    )

    def load_model(_name: str, attn_implementation: str | None = None, **_: Any) -> Any:
        model = seeded(transformers.LlamaForCausalLM, config).eval()
        if attn_implementation is not None:
            model.set_attn_implementation(attn_implementation)
        return model

    call = diffusers.WanPipeline.__call__

    def call_small(pipe: Any, prompt: str, **_: Any) -> Any:
        pipe.set_progress_bar_config(disable=True)
        return call(pipe, prompt, num_inference_steps=STEPS, output_type="latent", **CALLS["wan"])

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load_model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _name: tokenizer)
    monkeypatch.setattr(diffusers.WanPipeline, "from_pretrained", lambda _name, **_: PIPELINES["wan"]())
    monkeypatch.setattr(diffusers.WanPipeline, "__call__", call_small)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.txt").write_text("the cat walks in the rain " * (WORDS // 6))

    def run(page: Path, tokens: str | None = None, **namespace: Any) -> dict[str, Any]:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        assert blocks, f"{page.name}: expected Python, got none"
        for block in blocks:
            code = block.replace('"cuda"', '"cpu"')
            exec(code if tokens is None else code.replace(tokens, "4096"), namespace)
        return namespace

    return run


def test_examples_run(run: Run) -> None:
    class Other(torch.nn.Module):
        """Model with trainable weights that calls SDPA."""

        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(*[self.project(x)] * 3)

    inputs = {"input_ids": torch.ones(1, 4096, dtype=torch.long)}
    variables = run(REPOSITORY / "README.md", "8192", other=Other(), x=torch.randn(1, 1, 4096, 16), inputs=inputs)
    assert variables["model"].config._attn_implementation == "sparge"
    assert variables["mask"].density() < 0.8
    assert variables["out"].shape == (1, 8, 4096, 64)
    reasons = sparge.stats().reasons
    assert reasons["sparse: torch"] == 2 + 2 + 1, "expected two layers, two functions and the other model to run sparse"
    assert not any("unsupported" in reason for reason in reasons)
    assert {"dense: below the crossover", "dense: cross-attention"} <= set(reasons), "expected calls of the pipeline"


def test_readme_has_at_most_two_screens() -> None:
    """Details belong on other pages."""
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_tables_equal_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check as `python -m benchmarks.tables --check`."""
    monkeypatch.syspath_prepend(REPOSITORY)
    from benchmarks import tables

    shown = []
    for page in tables.pages():
        text = page.read_text(encoding="utf-8")
        assert tables.fill(text) == text, f"{page.name}: expected the tables of benchmarks/results; run make tables"
        shown += [found[2] for found in tables.MARKER.finditer(text)]
    assert sorted(shown) == sorted(tables.TABLES), "every table is on exactly one page"
