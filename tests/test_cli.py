"""The ``sparge`` command end to end: what it prints, what it writes, how it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import sparge
from sparge import cli
from sparge.dispatch import choose_backend
from sparge.evaluate import demo as demo_module
from sparge.evaluate.demo import Demo, Row, Settings, run_demo, table_cells, video_grid
from sparge.evaluate.inputs import Sample, random_like, text_like, video_like
from sparge.evaluate.metrics import block_mass, mass_recall, needle_recall, relative_l1

TOKENS = 2048


def run_command(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": str(columns)}
    return subprocess.run(
        [sys.executable, "-m", "sparge.cli", *arguments], capture_output=True, text=True, env=environment, timeout=120
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, dict[str, Any]]:
    """What one small demo printed, its page and its JSON."""
    folder = tmp_path_factory.mktemp("demo")
    page, numbers = folder / "page.html", folder / "numbers.json"
    done = run_command(
        "demo", "--tokens", str(TOKENS), "--heads", "1", "--topk", "0.4", "--output", str(page), "--json", str(numbers)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, page.read_text(encoding="utf-8"), json.loads(numbers.read_text())


@pytest.fixture(scope="module")
def samples() -> dict[str, Sample]:
    made = (text_like(TOKENS, heads=1), video_like((8, 16, 16), heads=1), random_like(TOKENS, heads=1))
    return {sample.name: sample for sample in made}


def test_demo_numbers_are_those_of_the_public_functions(
    ran: tuple[str, str, dict[str, Any]], samples: dict[str, Sample]
) -> None:
    rows = ran[2]["rows"]
    assert [(row["input"], row["score"]) for row in rows] == [
        (name, score) for name in ("text-like", "video-like", "random") for score in ("moment", "mean")
    ]
    for row in rows:
        sample = samples[row["input"]]
        call = {"is_causal": sample.is_causal, "topk": 0.4, "score": row["score"]}
        mask = sparge.predict(sample.query, sample.key, **call)
        output = sparge.attention(sample.query, sample.key, sample.value, backend="torch", **call)
        dense = F.scaled_dot_product_attention(sample.query, sample.key, sample.value, is_causal=sample.is_causal)
        mass = block_mass(sample.query, sample.key, is_causal=sample.is_causal)
        assert row["density"] == mask.density()
        assert row["recall"] == pytest.approx(mass_recall(mask, mass), abs=1e-6)
        assert row["error"] == pytest.approx(relative_l1(output, dense), rel=1e-3)
        assert row["speedup"] == row["dense_s"] / row["sparse_s"]
        needles = [needle_recall(mask, sample.query, sample.key, needle) for needle in sample.needles]
        assert row["needles"] == pytest.approx(needles, abs=1e-6)
        assert row["needle_min"] == min(row["needles"], default=None)


def test_demo_prints_every_number_in_80_columns(ran: tuple[str, str, dict[str, Any]]) -> None:
    printed, _, numbers = ran
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    lines = [line for line in printed.splitlines() if re.search(r"\b(moment|mean) .*x .*%", line)]
    assert len(lines) == len(numbers["rows"]) == 6
    for line, row in zip(lines, as_rows(numbers), strict=True):
        assert all(text in line for column, text in table_cells(row) if column != "input")
    assert "page.html" in printed
    assert "numbers.json" in printed


def test_page_shows_the_same_numbers(ran: tuple[str, str, dict[str, Any]]) -> None:
    _, page, numbers = ran
    shown = re.findall(r"<tr class='(?:first|same)'>(.*?)</tr>", page)
    assert len(shown) == 6
    for line, row in zip(shown, as_rows(numbers), strict=True):
        assert all(text in line for _, text in table_cells(row))


def as_rows(numbers: dict[str, Any]) -> list[Row]:
    fields = Row.__dataclass_fields__
    return [Row(**{name: value for name, value in row.items() if name in fields}) for row in numbers["rows"]]


def test_narrow_terminal_loses_no_number() -> None:
    result = run_demo(Settings(tokens=256, heads=1))
    for width in (30, 77):
        stream = StringIO()
        cli._print_results(Console(file=stream, width=width), result)
        for row in result.rows:
            for column, text in table_cells(row):
                assert not text or f"{column}: {text}\n" in stream.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topk", "0"], "'--topk': expected a number in (0, 1], got 0"),
        (["--topk", "1.5"], "'--topk': expected a number in (0, 1], got 1.5"),
        (["--topk", "nan"], "'--topk': expected a number in (0, 1], got nan"),
        (["--topk", "half"], "'--topk': expected a number in (0, 1], got half"),
        (["--tokens", "255"], "'--tokens': expected an integer of at least 256, got 255"),
        (["--tokens", "8k"], "'--tokens': expected an integer of at least 256, got 8k"),
        (["--heads", "0"], "'--heads': expected an integer of at least 1, got 0"),
        (["--seed", "-1"], "'--seed': expected an integer in [0, 2**63), got -1"),
        (["--output", "{folder}"], "'--output': expected a file to write, got the directory {folder}"),
        (
            ["--output", "{folder}/absent/page.html"],
            "'--output': expected a file in a directory that exists, got {folder}/absent/page.html",
        ),
        (["--json", "{folder}"], "'--json': expected a file to write, got the directory {folder}"),
        (
            ["--output", "{folder}/both", "--json", "{folder}/both"],
            "expected different files for --output and --json, got {folder}/both for both",
        ),
    ],
)
def test_bad_options_are_refused_before_any_work(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo_module, "run_demo", lambda *_: pytest.fail("the work started"))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", *(argument.format(folder=tmp_path) for argument in arguments)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.endswith(message.format(folder=tmp_path) + "\n")
    assert list(tmp_path.iterdir()) == []


def test_default_output_is_checked_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sparge-demo.html").mkdir()
    monkeypatch.setattr(demo_module, "run_demo", lambda *_: pytest.fail("the work started"))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo"])
    assert stopped.value.code == 2
    assert "expected a file to write, got the directory sparge-demo.html" in capsys.readouterr().err


def test_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["dome"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("sparge: error: No such command 'dome'")
    assert error.count("\n") == 1


def test_doctor_names_versions_devices_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor"])
    assert not stopped.value.code
    printed = " ".join(capsys.readouterr().out.split())
    assert f"sparge {sparge.__version__}" in printed
    assert f"torch {torch.__version__}" in printed
    choice = choose_backend("auto", torch.device("cpu"))
    assert f"cpu {torch.get_num_threads()} threads" in printed
    assert f"backend {choice.backend!r}: {choice.reason}" in printed


def test_doctor_says_what_is_missing_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = cli._installed
    monkeypatch.setattr(cli, "_installed", lambda name: None if name in ("matplotlib", "triton") else installed(name))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(cli, "_usable_cores", lambda: 6)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor"])
    assert not stopped.value.code
    printed = " ".join(capsys.readouterr().out.split())
    assert "triton missing" in printed
    assert "matplotlib missing" in printed
    assert "pip install 'sparge[plot]'" in printed
    assert "OMP_NUM_THREADS=1 holds torch below 6 cores: unset it" in printed
    assert "Nothing is missing" not in printed


def test_version_and_import_stay_light() -> None:
    script = """
import sys, sparge
heavy = {"typer", "rich", "matplotlib"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from sparge.cli import main
try:
    main(["--version"])
except SystemExit as stopped:
    assert not stopped.code
heavy = {"rich.console", "matplotlib", "sparge.evaluate.demo"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"sparge {sparge.__version__}\n"


@pytest.mark.parametrize("tokens", [256, 300, 2048, 4096, 8192, 10000])
def test_video_grid_fills_the_tokens_asked_for(tokens: int) -> None:
    frames, height, width = video_grid(tokens)
    assert height == width
    assert 8 <= frames <= 12
    assert tokens - height * width < frames * height * width <= tokens


def test_slow_machine_gets_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "ROUND_BUDGET_S", 0.0)
    steps: list[demo_module.Step] = []
    result: Demo = run_demo(Settings(tokens=256, heads=1), steps.append)
    assert {row.rounds for row in result.rows} == {1}
    done = [step.done for step in steps]
    assert done == sorted(done)
    assert done[-1] == steps[-1].total
