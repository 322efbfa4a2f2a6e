"""Ranks as processes, on gloo: the real exchange."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sparge.distributed import gathered_attention, ring_attention, ulysses_attention

ROOT = Path(__file__).parents[2]
PATIENCE = 150


REFUSED = {
    "a mesh": "TypeError: group: expected a ProcessGroup or None (of a DeviceMesh: mesh.get_group(name))",
    "another's": "RuntimeError: group: expected a process group that this rank belongs to",
    "twice": "ValueError: ulysses_group",
}


def on_processes(size: int, work: str, store: Path) -> tuple[list[Any], float]:
    """What each rank of a group says, None where it is gone; and how long the first took."""
    command = [sys.executable, "-m", "tests.distributed.worker"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(store), work], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    start, first, said = time.monotonic(), 0.0, []
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=PATIENCE)
            first = first or time.monotonic() - start
            said.append(json.loads(output.splitlines()[-1]) if output else None)
            if work in ("gone", "stuck"):
                break
    finally:
        for rank in ranks:
            rank.kill()
    return said, first


@pytest.mark.parametrize("size", [2, 4])
def test_every_mode_is_one_process(size: int, tmp_path: Path) -> None:
    """And the examples print what they say they do, on rank 0."""
    said, _ = on_processes(
        size, "every_case,mesh_cases,examples" if size == 4 else "every_case,refusals,examples", tmp_path / "store"
    )
    for rank, result in enumerate(said):
        for failures in (result["every_case"], result.get("mesh_cases", {})):
            assert not failures, f"rank {rank}: " + "\n".join(failures.values())
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


@pytest.mark.parametrize("work", ["gone", "stuck"])
def test_a_rank_that_is_lost_is_an_error_and_no_hang(work: str, tmp_path: Path) -> None:
    said, seconds = on_processes(2, work, tmp_path / "store")
    assert "Error" in said[0]
    assert seconds < 60


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
