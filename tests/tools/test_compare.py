"""tools/gpu/compare.py without a GPU: cases, processes, tables and failures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import compare
import pytest
import torch
from compare import ComparedCall, parse_case, table_text

from sparge.bench.cases import Problem

ROOT = Path(__file__).parents[2]


def test_cases() -> None:
    assert parse_case("4096x32@0.25") == ComparedCall("4096x32@0.25", Problem(4096, 32), 0.25, "auto")
    text = "32768x16x64c@0.1:int8_fp8"
    assert parse_case(text) == ComparedCall(text, Problem(32768, 16, 64, is_causal=True), 0.1, "int8_fp8")
    assert parse_case("8192x32:none") == ComparedCall("8192x32:none", Problem(8192, 32), 1.0, "none")


@pytest.mark.parametrize("text", ["4096", "4096x", "4096x32@", "4096x32@0.5:", "x4096x32", "4096x32cc", "512x1@0.5.1"])
def test_invalid_cases_raise(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["a=.", "--cases", text])
    assert f"expected TOKENSxHEADS[xHEAD_DIM][c][@TOPK][:QUANTIZATION], got '{text}'" in capsys.readouterr().err


def test_invalid_options_raise() -> None:
    with pytest.raises(ValueError, match=r"expected a value in \(0, 1\], got 2.0"):
        parse_case("512x1@2")
    with pytest.raises(ValueError, match=r"quantization: expected .*'int8_fp8', .*got 'int9'"):
        parse_case("512x1:int9")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["src"], "expected NAME=FOLDER"),
        ([f"a={Path(__file__).parent}"], "expected NAME=FOLDER"),
        ([f"={ROOT}"], "expected NAME=FOLDER"),
        ([], "expected checkouts with different names, got []"),
        ([f"a={ROOT}", f"a={ROOT}"], "expected checkouts with different names"),
        ([f"a={ROOT}", "--rounds", "0"], "rounds: expected at least 1, got 0"),
    ],
)
def test_invalid_arguments_raise(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main([*arguments, "--cases", "256x1"])
    assert message in capsys.readouterr().err


def test_a_process_imports_its_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkout is a copy whose output has another sign."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    api = tmp_path / "src/sparge/api.py"
    source, result = api.read_text(), "if return_lse else output\n"
    assert result in source
    api.write_text(source.replace(result, "if return_lse else -output\n"))
    cases = ["256x2x32c@0.5:none", "512x1x16:none"]
    compare.main([f"copy={tmp_path}", "--rounds", "1", "--cases", *cases])
    captured = capsys.readouterr()
    assert captured.err.startswith("round 1 of 1: copy\n")
    *lines, machine = captured.out.splitlines()
    assert machine.startswith("copy: ") and f"torch {torch.__version__}" in machine
    for case, line, echoed in zip(cases, lines, captured.err.splitlines()[1:], strict=True):
        words = line.split()
        assert (words[:2], words[-1]) == ([case, "copy"], "equal")
        assert json.loads(echoed)["case"] == case
        here = compare.measure_call(parse_case(case))
        assert float(words[-3]) == pytest.approx(2.0, abs=here["error"] + 1e-4)


def test_failures_name_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "src/sparge").mkdir(parents=True)
    (tmp_path / "src/torch.py").write_text("raise RuntimeError('broken')")
    with pytest.raises(RuntimeError, match=rf"(?s){tmp_path}: .*RuntimeError: broken"):
        compare.main([f"a={tmp_path}", "--cases", "256x1"])


def row(us: float, *digests: str, error: float = 0.5) -> dict[str, Any]:
    return {"us": us, "error": error, "digests": list(digests)}


def test_bits_are_compared_with_the_first_checkout() -> None:
    rows = {"1x1": {"a": [row(1.0, "x")], "b": [row(1.0, "x"), row(1.0, "x")], "c": [row(1.0, "x"), row(1.0, "y")]}}
    assert [line.split()[-1] for line in table_text(rows).splitlines()] == ["equal", "equal", "differ"]


def test_outputs_that_vary_are_not_equal() -> None:
    rows = {"1x1": {"a": [row(100.0, "x", "y")], "b": [row(90.0, "x", "y"), row(120.0, "x", "y")]}}
    first, second = table_text(rows).splitlines()
    assert first.split()[-1] == second.split()[-1] == "differ"
    assert "105.0 us (90.0 to 120.0)   +5.0%" in second


def test_the_table_has_the_largest_error_of_all_rounds() -> None:
    for errors, text in (((0.5, 0.75, 0.25), "0.7500"), ((0.5, float("nan"), 0.25), "nan")):
        rows = {"1x1": {"a": [row(1.0, "x", error=error) for error in errors]}}
        assert f"error {text} " in table_text(rows)


def test_unfinished_cases_are_omitted() -> None:
    rows = {"1x1": {"a": [row(1.0, "x")], "b": [row(1.0, "x")]}, "2x1": {"a": [row(1.0, "x")], "b": []}}
    assert [line.split()[:2] for line in table_text(rows).splitlines()] == [["1x1", "a"], ["1x1", "b"]]
