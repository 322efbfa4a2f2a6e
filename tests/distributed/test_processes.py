"""Ranks as processes, on gloo: the real exchange."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparge.distributed import gathered_attention, ring_attention, ulysses_attention

ROOT = Path(__file__).parents[2]
REFUSED = {
    "a mesh": "TypeError: group: expected a ProcessGroup or None (of a DeviceMesh: mesh.get_group(name))",
    "another's": "RuntimeError: group: expected a process group that this rank belongs to",
    "twice": "ValueError: ulysses_group",
    "uneven": "ValueError: lengths: expected the tokens of every rank where they differ",
}


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
    groups = ("2", "every_case,refusals,examples", "4", "every_case,mesh_cases,examples")
    found = on_processes(tmp_path, *groups, patience=240)
    for size, works in ((2, groups[1]), (4, groups[3])):
        said = found[f"{size}-{works}"]
        assert len(said) == size, "a rank is gone"
        for rank, result in enumerate(said):
            for failures in (result["every_case"], result.get("mesh_cases", {})):
                assert not failures, f"rank {rank} of {size}: " + "\n".join(failures.values())
            refused = result.get("refusals", REFUSED)
            assert {name: words.split(",")[0] for name, words in refused.items()} == REFUSED
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


def test_compiled_programs_go_on_behind_it() -> None:
    query = torch.randn(1, 2, 512, 32)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for function in (ulysses_attention, gathered_attention, ring_attention):

            def program(x: torch.Tensor, function: Any = function) -> Any:
                return function(x * 2, x, x, backend="torch", topk=0.5).sin()

            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("error")
                compiled = torch.compile(program, backend="eager")(query)
            torch.testing.assert_close(compiled, program(query))
    finally:
        dist.destroy_process_group()
