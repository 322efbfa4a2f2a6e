"""Ranks as processes, on gloo: the real exchange."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def on_processes(folder: Path, *groups: str, patience: float) -> dict[str, list[Any]]:
    """What the ranks of each group have found, by its size and works."""
    command = [sys.executable, "-m", "tests.distributed.worker", str(folder), *groups]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience)
    found: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.json")):
        found.setdefault(path.stem.rpartition("-")[0], []).append(json.loads(path.read_text()))
    assert len(found) == len(groups) // 2, done.stderr[-4000:]
    return found


def test_every_mode_is_one_process(tmp_path: Path) -> None:
    """And the examples print what they say they do, on rank 0."""
    groups = ("2", "every_case,examples", "4", "every_case,mesh_cases,examples")
    found = on_processes(tmp_path, *groups, patience=240)
    for size, works in ((2, groups[1]), (4, groups[3])):
        said = found[f"{size}-{works}"]
        assert len(said) == size, "a rank is gone"
        for rank, result in enumerate(said):
            for failures in (result["every_case"], result.get("mesh_cases", {})):
                assert not failures, f"rank {rank} of {size}: " + "\n".join(failures.values())
        printed = said[0]["examples"]
        assert len(printed) == {2: 3, 4: 1}[size]
        for name, lines in printed.items():
            document = ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text()))
            assert document is not None
            expected = document.split("prints\n\n")[1].strip().splitlines()
            assert lines.strip().splitlines() == [line.strip() for line in expected], name
        assert all(not any(result["examples"].values()) for result in said[1:])


def test_a_rank_that_is_lost_is_an_error_and_no_hang(tmp_path: Path) -> None:
    found = on_processes(tmp_path, "2", "gone", "2", "stuck", patience=120)
    for work in ("gone", "stuck"):
        (said,) = found[f"2-{work}"]
        assert "Error" in said, work
