"""README's examples run as printed (on fewer tokens), and its tables are those of the committed results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parent.parent


def test_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "tests" / "integrations")
    from test_transformers import llama
    from tiny_pipelines import PIPELINES

    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    model = llama()
    namespace: dict[str, Any] = {"pipe": PIPELINES["wan"](), "model": model, "other": lambda: None}
    for block in blocks:
        assert "8192" in block or "mask" in namespace
        exec(block.replace("8192", "2048"), namespace)
    assert namespace["mask"].density() < 0.8
    assert model.config._attn_implementation == "sdpa"


def test_tables_are_those_of_the_results() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tables", "--check"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
