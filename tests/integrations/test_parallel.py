"""diffusers' context parallelism with gloo: several ranks give the same result as one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

pytestmark = pytest.mark.timeout(300)

HERE = Path(__file__).parent
TIMEOUT = 240
ROUNDING = 4 * 2**-23
"""Tolerance relative to the largest value: the summation order of matrix products depends on their size."""


@pytest.fixture(scope="session")
def all_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return the results of each rank by case. The ranks run once for all workers of a test run.

    This takes 30 s: each of ten models runs on one rank and on two, with two kinds of parallelism.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "parallel_cases"
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            folder.mkdir()
            run(folder)
    return results_in(folder)


def run(folder: Path, *only: str) -> None:
    program = [sys.executable, str(HERE / "parallel_cases.py"), str(folder), *only]
    done = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-4000:]


def results_in(folder: Path) -> dict[str, list[Any]]:
    results: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.pt")):
        for name, result in torch.load(path, weights_only=False).items():
            results.setdefault(name, []).append(result)
    return results


def results_of(all_results: dict[str, list[Any]], case: str) -> list[Any]:
    """Return the results of each rank for a case."""
    assert case in all_results, "\n".join(all_results.get("failed", ["no rank reached this case"]))
    return all_results[case]


def check(result: dict[str, Any], *, same_reasons: bool = True) -> None:
    largest = float(result["expected"].abs().max())
    torch.testing.assert_close(result["got"], result["expected"], rtol=0, atol=ROUNDING * largest)
    if same_reasons:
        assert result["reasons"] == result["expected_reasons"]


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
@pytest.mark.parametrize(
    "name", ["wan", "flux", "ltx", "qwen_image", "flux2", "chronoedit", "minimax_h3", "helios", "ltx2", "wan per head"]
)
def test_models(name: str, kind: str, all_results: dict[str, list[Any]]) -> None:
    """One budget holds for all ranks, or each head has its own; text stays in place, other tokens are reordered."""
    for result in results_of(all_results, f"{name}, {kind}"):
        check(result, same_reasons=name != "ltx2")  # its audio is one query block, fewer than the ranks of a ring
        assert not torch.equal(result["expected"], result["stock"]), "blocks are skipped"
        assert any("sparse: torch" in reasons for reasons in result["reasons"].values())


@pytest.mark.parametrize("name", ["wan", "flux", "ltx"])
def test_dense_calls_of_a_ring_equal_the_stock_model(name: str, all_results: dict[str, list[Any]]) -> None:
    """Without sparge they raise: diffusers' SDPA backend returns no LSE."""
    for result in results_of(all_results, f"{name}, dense ring"):
        check(result)
        check({**result, "expected": result["stock"]})
        assert all(reason.startswith("dense") for layer in result["reasons"].values() for reason in layer)


def test_heads_are_load_balanced(all_results: dict[str, list[Any]]) -> None:
    for result in results_of(all_results, "balance"):
        for output in result["got"]:
            largest = float(result["expected"].abs().max())
            torch.testing.assert_close(output, result["expected"], rtol=0, atol=ROUNDING * largest)
        first, second, third = result["imbalances"]
        assert first > 1.1 and second == third < 1.05


@pytest.mark.parametrize("case", ["wan, ulysses", "flux, ulysses", "ltx, ring"])
def test_pipelines(case: str, all_results: dict[str, list[Any]]) -> None:
    for result in results_of(all_results, f"pipeline {case}"):
        check(result)
        assert not torch.equal(result["expected"], result["stock"])
        reasons = {reason for layer in result["reasons"].values() for reason in layer}
        assert {"sparse: torch", "dense: dense step"} <= reasons


def test_parallelism_before_or_after_enable(all_results: dict[str, list[Any]]) -> None:
    """`enable` and ``set_attention_backend`` also work after ``enable_parallelism``, and are undone."""
    enabled = {name: results_of(all_results, f"{name}, ulysses") for name in ("wan", "flux")}
    for rank, result in enumerate(results_of(all_results, "orders")):
        for name in ("wan", "flux"):
            expected = enabled[name][rank]["expected"]
            check({"expected": expected, "got": result[f"{name} parallel, enable"]}, same_reasons=False)
            assert torch.equal(result[f"{name} enabled again"], result[f"{name} parallel, enable"])
            check({"expected": result[f"{name} stock"], "got": result[f"{name} native"]}, same_reasons=False)
            assert torch.equal(result[f"{name} disabled"], result[f"{name} native"])
        for order in ("wan by name, parallel", "wan parallel, by name"):
            check({"expected": result["wan by name"], "got": result[order]}, same_reasons=False)
        assert not torch.equal(result["wan by name"], result["wan stock"])


@pytest.mark.slow
def test_compiled_blocks(tmp_path: Path) -> None:
    run(tmp_path, "compiled")
    for result in results_of(results_in(tmp_path), "compiled"):
        check(result)


@pytest.mark.parametrize("case", ["uneven", "masks", "kinds of calls", "mesh of two by two"])
def test_calls(case: str, all_results: dict[str, list[Any]]) -> None:
    for results in results_of(all_results, case):
        for name, result in results.items():
            (reason,) = result["reasons"]
            try:
                check(result, same_reasons=name not in DENSE_ON_SEVERAL_RANKS)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
            expected = DENSE_ON_SEVERAL_RANKS.get(
                name, "dense: fewer than min_tokens" if name == "dense" else "sparse: torch"
            )
            assert reason == expected, name


DENSE_ON_SEVERAL_RANKS = {
    "few query blocks, ring": "dense: below the crossover (fewer query blocks than ranks)",
    "similarity, ulysses": "dense: unsupported (a similarity threshold of a budget over several ranks)",
    "ring, own rows": "dense: unsupported (full mask)",
    "ring, all rows": "dense: unsupported (full mask)",
}
"""Calls that are sparse on one rank and dense on several."""


BUDGET = "Budget(min_blocks=1, similarity_threshold=None, pv_threshold=None, sink=None, diagonal=None, density={})"


def test_gradients_equal_those_of_one_rank(all_results: dict[str, list[Any]]) -> None:
    for result in results_of(all_results, "gradients"):
        torch.testing.assert_close(result["got"], result["expected"])
        assert result["reasons"] == {"dense: unsupported (gradients)": 1}


def test_error_messages(all_results: dict[str, list[Any]]) -> None:
    for result in results_of(all_results, "errors"):
        assert result["mask"].startswith("ValueError: attn_mask: expected one over keys, or one over the keys of all")
        assert result["mask"].endswith("got (196, 196) for 196 of 392 queries and 196 of 392 keys")
        assert result["causal"] == (
            "NotImplementedError: context parallelism: expected ulysses_degree alone for causal attention, got "
            "ring_degree 2"
        )
        assert result["policy"] == (
            "ValueError: expected the same options on all 2 ranks of the group, got Policy.sparsity: "
            f"{BUDGET.format('0.4')} on rank 0, {BUDGET.format('0.2')} on rank 1"
        )
        assert result["heads"] == "ValueError: ulysses_degree: expected at least one of 1 heads per rank, got 2"


def test_example_prints_its_documented_output(all_results: dict[str, list[Any]]) -> None:
    first, *others = results_of(all_results, "example")
    source = (HERE.parents[1] / "examples" / "parallel_diffusers.py").read_text()
    document = ast.get_docstring(ast.parse(source))
    assert document is not None
    expected = document.split("prints\n\n")[1].split("\n\n")[0]
    assert first.strip().splitlines() == [line.strip() for line in expected.splitlines()]
    assert others == [""]
