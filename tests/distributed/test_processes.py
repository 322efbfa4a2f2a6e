"""Ranks are processes with gloo: real collectives, and the comparison of options between ranks."""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.cases import MODES
from tests.distributed.worker import DIFFERENT

from sparge.distributed import context_parallel_attention

ROOT = Path(__file__).parents[2]
INVALID_GROUPS = {
    "not a group": "TypeError: group: expected a ProcessGroup",
    "group without this rank": "RuntimeError: group: expected a process group that this rank belongs to",
    "not a mesh": "ValueError: group: expected a column and a row of a mesh with only this rank in common",
    "different lengths": "ValueError: lengths: expected the number of tokens on every rank",
}


@pytest.fixture(scope="module")
def results_by_group(tmp_path_factory: pytest.TempPathFactory) -> dict[int | str, list[Any]]:
    """Return the results of each rank, keyed by the number of ranks or the task that loses a rank.

    This takes 10 s: a group of 2 ranks and then a group of 4 ranks run every mode.
    """
    folder = tmp_path_factory.mktemp("ranks")
    groups: dict[int | str, tuple[str, str]] = {
        2: ("2", "every_case,invalid_groups,different_options,collectives,examples"),
        4: ("4", "every_case,mesh_cases,examples"),
        "gone": ("2", "gone"),
        "stuck": ("2", "stuck"),
    }
    command = [sys.executable, "-m", "tests.distributed.worker", str(folder), *itertools.chain(*groups.values())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    results: dict[int | str, list[Any]] = {}
    for key, (size, tasks) in groups.items():
        paths = sorted(folder.glob(f"{size}-{tasks}-*.json"))
        assert paths, done.stderr[-4000:]
        results[key] = [json.loads(path.read_text()) for path in paths]
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_every_mode_equals_one_process(results_by_group: dict[int | str, list[Any]], size: int) -> None:
    assert len(results_by_group[size]) == size, "a rank failed"
    for rank, result in enumerate(results_by_group[size]):
        for failures in (result["every_case"], result.get("mesh_cases", {})):
            assert not failures, f"rank {rank} of {size}: " + "\n".join(failures.values())


@pytest.mark.parametrize("name", INVALID_GROUPS)
def test_invalid_groups_and_lengths_raise(results_by_group: dict[int | str, list[Any]], name: str) -> None:
    for result in results_by_group[2]:
        assert result["invalid_groups"][name].split(",")[0] == INVALID_GROUPS[name]


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_options_raise_on_every_rank(results_by_group: dict[int | str, list[Any]], name: str) -> None:
    errors = [result["different_options"][name] for result in results_by_group[2]]
    if name == "resolved to":  # only rank 1 has another number of tokens
        assert errors[1].startswith("ValueError: lengths: expected 256 for rank 1"), errors
        errors[1:] = []
    for error in errors:
        assert error.startswith("ValueError: expected the same options on all 2 ranks of the group, got"), error
        assert f"{name}: " in error and "on rank 0" in error and "on rank 1" in error, error


def test_error_names_the_options_and_ranks(results_by_group: dict[int | str, list[Any]]) -> None:
    for result in results_by_group[2]:
        assert result["different_options"]["topk"] == (
            "ValueError: expected the same options on all 2 ranks of the group, got topk: 0.5 on rank 0, 0.25 on rank 1"
        )


def test_later_calls_with_other_options_are_compared(results_by_group: dict[int | str, list[Any]]) -> None:
    for result in results_by_group[2]:
        results = result["different_options"]
        assert results["equal"] == results["equal again"] == "none"
        assert results["another kind"].endswith("got scale: 0.1 on rank 0, 0.2 on rank 1")


@pytest.mark.parametrize("kind", ["ulysses", "gather", "ring", "mask", "per head"])
def test_repeated_calls_are_not_compared(results_by_group: dict[int | str, list[Any]], kind: str) -> None:
    for result in results_by_group[2]:
        first, second, third = result["collectives"][kind]
        assert first == second + 1 and second == third


def test_example_prints_the_output_in_its_docstring(results_by_group: dict[int | str, list[Any]]) -> None:
    source = (ROOT / "examples" / "parallel_attention.py").read_text()
    printed = (ast.get_docstring(ast.parse(source)) or "").split("prints\n\n")[1].replace("    ", "").split("\n\n")
    for size, count in ((2, 3), (4, 2)):
        first, *others = (result["examples"] for result in results_by_group[size])
        assert len(first) == count
        for name, lines in first.items():
            (expected,) = (part for part in printed if part.startswith(f"{name}:"))
            assert lines.strip() == expected.strip()
        assert all(not any(other.values()) for other in others)


@pytest.mark.parametrize("task", ["gone", "stuck"])
def test_lost_ranks_raise_on_the_other_ranks(results_by_group: dict[int | str, list[Any]], task: str) -> None:
    (error,) = results_by_group[task]
    assert "Error" in error


def test_compiled_functions_continue_after_a_graph_break() -> None:
    query = torch.randn(1, 2, 512, 32)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for mode in MODES:

            def program(x: torch.Tensor, mode: Any = mode) -> Any:
                return context_parallel_attention(x * 2, x, x, mode=mode, backend="torch", topk=0.5).sin()

            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("error")
                compiled = torch.compile(program, backend="eager")(query)
            torch.testing.assert_close(compiled, program(query))
    finally:
        dist.destroy_process_group()
