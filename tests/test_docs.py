"""The documentation: its code runs, its links exist, and the site builds without warnings or external files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import sparge
from test_readme import REPOSITORY, Run, run

__all__ = ["run"]  # a fixture

DOCS = REPOSITORY / "docs"
PAGES = sorted([*REPOSITORY.glob("*.md"), *DOCS.rglob("*.md"), *REPOSITORY.glob("*/README.md")])
WORKFLOW = re.compile(r"\.\./\.\./actions/workflows/([\w.-]+\.yml)(?:/badge\.svg)?$")
"""Link to a page of the code host, outside the repository."""
TARGET = re.compile(r'\]\(([^()\s:]+)\)|\b(?:src|srcset)="([^":]+)"')
FROM_OUTSIDE = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*"')


@pytest.mark.parametrize(
    "name, tokens",
    [("llm", None), ("diffusers", None), ("pytorch", None), ("serving", None), ("masks", None), ("parallel", None)],
)
def test_quick_starts_run(name: str, tokens: str | None, run: Run) -> None:
    run(DOCS / "quickstart" / f"{name}.md", tokens)
    stats = sparge.stats()
    assert stats.calls
    if name != "diffusers":  # a tiny video is below the crossover
        assert stats.sparse


def test_migration_runs(run: Run) -> None:
    left = run(DOCS / "migration.md")
    assert left["sparsity"] == pytest.approx(0.5)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_exist(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for found in TARGET.finditer(text):
        path = (found[1] or found[2]).partition("#")[0]
        workflow = WORKFLOW.match(path)
        target = REPOSITORY / ".github" / "workflows" / workflow[1] if workflow else page.parent / path
        assert target.exists(), f"expected a file, got {path}"


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="expected mkdocs (requirements-docs.txt)")
@pytest.mark.timeout(180)
def test_site_builds_and_loads_no_external_files(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],  # --quiet would hide warnings
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not FROM_OUTSIDE.search(text), f"{page.name}: {FROM_OUTSIDE.search(text)}"
        assert "arithmatex" not in text, f"{page.name}: a formula that was not drawn"
    assert "<math" in (site / "algorithm.html").read_text(encoding="utf-8")
    assert "share of the visible blocks to keep" in (site / "api.html").read_text(encoding="utf-8")
