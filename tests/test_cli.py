"""The ``sparge`` command: printed output, written files, and errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import typer
from rich.console import Console

import sparge
from sparge.backends import base
from sparge.bench import run as bench_module
from sparge.bench.cases import SUITE_NAMES
from sparge.bench.table import VIEWS
from sparge.cli import app
from sparge.demo import measure as demo_module
from sparge.demo.measure import DEFAULTS, Demo, Row, Settings, run_demo, table_cells
from sparge.evaluate import machine as machine_module
from sparge.evaluate.inputs import Sample, random_like, text_with_needles, video_like
from sparge.evaluate.machine import Gpu
from sparge.evaluate.metrics import block_mass, mass_recall, needle_recall, relative_l1
from sparge.options.extras import install_command

TOKENS = 2048


def run_command(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": str(columns)}
    return subprocess.run(
        [sys.executable, "-m", "sparge.cli.app", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )


@pytest.fixture(scope="module")
def demo_results(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, dict[str, Any]]:
    """Run a small demo and return its printed output, its page and its JSON."""
    folder = tmp_path_factory.mktemp("demo")
    page, numbers = folder / "page.html", folder / "numbers.json"
    done = run_command(
        *("demo", "--device", "cpu", "--tokens", str(TOKENS), "--heads", "1", "--topk", "0.4"),
        *("--output", str(page), "--json", str(numbers)),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, page.read_text(encoding="utf-8"), json.loads(numbers.read_text())


@pytest.fixture(scope="module")
def samples() -> dict[str, Sample]:
    made = (make(TOKENS, heads=1) for make in (text_with_needles, video_like, random_like))
    return {sample.name: sample for sample in made}


def test_demo_numbers_equal_the_public_functions(
    demo_results: tuple[str, str, dict[str, Any]], samples: dict[str, Sample]
) -> None:
    rows = demo_results[2]["rows"]
    assert [(row["input"], row["score"]) for row in rows] == [
        (name, score) for name in ("needles", "video-like", "random") for score in ("moment", "mean")
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
        assert (row["backend"], row["quantization"], row["dtype"]) == ("torch", "none", "float32")


def test_demo_prints_every_number_in_80_columns(demo_results: tuple[str, str, dict[str, Any]]) -> None:
    printed, _, numbers = demo_results
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    lines = [line for line in printed.splitlines() if re.search(r"\b(moment|mean) .*x .*%", line)]
    assert len(lines) == len(numbers["rows"]) == 6
    for line, row in zip(lines, as_rows(numbers), strict=True):
        assert all(text in line for column, text in table_cells(row) if column != "input")
    assert "page.html" in printed
    assert "numbers.json" in printed


def test_page_shows_the_same_numbers(demo_results: tuple[str, str, dict[str, Any]]) -> None:
    _, page, numbers = demo_results
    shown = re.findall(r"<tr class='(?:first|same)'>(.*?)</tr>", page)
    assert len(shown) == 6
    for line, row in zip(shown, as_rows(numbers), strict=True):
        assert all(text in line for _, text in table_cells(row))


def as_rows(numbers: dict[str, Any]) -> list[Row]:
    fields = Row.__dataclass_fields__
    return [Row(**{name: value for name, value in row.items() if name in fields}) for row in numbers["rows"]]


def test_narrow_terminal_shows_every_number() -> None:
    result = run_demo(Settings(tokens=256, heads=1))
    for width in (30, 77):
        stream = StringIO()
        app._print_demo(Console(file=stream, width=width), result)
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
        (["--device", "tpu"], "'--device': expected auto, cuda or cpu, got tpu"),
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
def test_invalid_demo_options_are_rejected_before_any_work(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo_module, "run_demo", lambda *_: pytest.fail("the work started"))
    with pytest.raises(SystemExit) as stopped:
        app.main(["demo", *(argument.format(folder=tmp_path) for argument in arguments)])
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
        app.main(["demo"])
    assert stopped.value.code == 2
    assert "expected a file to write, got the directory sparge-demo.html" in capsys.readouterr().err


def test_unknown_command_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        app.main(["dome"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("sparge: error: No such command 'dome'")
    assert error.count("\n") == 1


def test_doctor_names_versions_devices_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        app.main(["doctor"])
    assert not stopped.value.code
    printed = " ".join(capsys.readouterr().out.split())
    assert f"sparge {sparge.__version__}" in printed
    assert f"torch {torch.__version__}" in printed
    cpu = torch.device("cpu")
    assert f"cpu {torch.get_num_threads()} threads" in printed
    assert f"backend {base.resolve('auto', cpu)!r}: {base.explain(cpu)}" in printed


def test_doctor_lists_missing_packages_and_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = app._installed
    monkeypatch.setattr(app, "_installed", lambda name: None if name in ("matplotlib", "triton") else installed(name))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(app, "_usable_cores", lambda: 6)
    with pytest.raises(SystemExit) as stopped:
        app.main(["doctor"])
    assert not stopped.value.code
    printed = " ".join(capsys.readouterr().out.split())
    assert "triton missing" in printed
    assert "matplotlib missing" in printed
    assert f"pages have no charts: {install_command('plot')}" in printed
    assert "OMP_NUM_THREADS=1 limits torch to fewer than 6 cores: unset it" in printed
    assert "Nothing is missing" not in printed


def test_version_and_import_load_few_packages() -> None:
    script = """
import sys, sparge
heavy = {"typer", "rich", "matplotlib"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from sparge.cli.app import main
try:
    main(["--version"])
except SystemExit as stopped:
    assert not stopped.code
heavy = {"rich.console", "matplotlib", "sparge.demo.measure"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"sparge {sparge.__version__}\n"


def test_slow_machines_time_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "ROUND_BUDGET_S", 0.0)
    result: Demo = run_demo(Settings(tokens=300, heads=1))
    assert {row.rounds for row in result.rows} == {1}
    assert {row.input: row.tokens for row in result.rows} == {"needles": 300, "video-like": 256, "random": 300}


def test_every_step_is_reported_before_it_starts() -> None:
    steps: list[tuple[str, int, int]] = []
    run_demo(Settings(tokens=256, heads=1), lambda *step: steps.append(step))
    assert [done for _, done, _ in steps] == list(range(steps[-1][2] + 1))
    assert [doing for doing, _, _ in steps[:3]] == [
        "needles: making the input",
        "needles: warming up",
        "needles: timing dense attention",
    ]
    assert steps[-1][0] == "done"


@pytest.mark.parametrize(
    ("has_cuda", "arguments", "expected"),
    [
        (False, [], DEFAULTS["cpu"]),
        (True, [], DEFAULTS["cuda"]),
        (True, ["--device", "cpu", "--heads", "3"], Settings(heads=3)),
        (True, ["--tokens", "4096", "--seed", "7"], replace(DEFAULTS["cuda"], tokens=4096, seed=7)),
    ],
)
def test_demo_selects_the_best_device(
    has_cuda: bool, arguments: list[str], expected: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[Settings] = []

    def run_demo(settings: Settings, *_: object) -> None:
        requested.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(demo_module, "run_demo", run_demo)
    with pytest.raises((KeyboardInterrupt, SystemExit, typer.Abort)):
        app.main(["demo", *arguments, "--output", str(tmp_path / "page.html")])
    assert requested == [expected]


def test_demo_out_of_gpu_memory_prints_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_demo(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(demo_module, "run_demo", run_demo)
    with pytest.raises(SystemExit) as stopped:
        app.main(["demo", "--tokens", "4096", "--output", str(tmp_path / "page.html")])
    assert stopped.value.code == 2
    expected = (
        "sparge: error: demo: expected enough memory for 4096 tokens, got out of memory; use a smaller --tokens\n"
    )
    assert capsys.readouterr().err == expected


def test_older_demo_results_can_be_read() -> None:
    """The committed file may lack the newest fields of a row."""
    numbers = json.loads((Path(__file__).parent.parent / "benchmarks/results/demo.json").read_text())
    for row, stored in zip(as_rows(numbers), numbers["rows"], strict=True):
        assert row.speedup == pytest.approx(stored["speedup"])
        assert dict(table_cells(row))["input"] == stored["input"]


def bench_row(topk: float) -> dict[str, Any]:
    """Return a result row of the suite "memory", which has the fewest fields."""
    return {
        **{"suite": "memory", "tokens": 8192, "queries": 8192, "heads": 32, "head_dim": 128, "is_causal": False},
        **{"topk": topk, "input_bytes": 192 * 2**20, "output_bytes": 64 * 2**20, "extra_bytes": 96 * 2**20},
        **{"extra_share": 0.5, "problems": {}, "quick": True},
    }


@pytest.fixture
def fake_gpu_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], bool]]:
    """Fake a GPU and the benchmark. Return a list that records the suites and the ``quick`` option of each run."""
    requested: list[tuple[tuple[str, ...], bool]] = []

    def run_bench(suites: tuple[str, ...], quick: bool) -> Iterator[dict[str, Any]]:
        requested.append((suites, quick))
        yield bench_row(0.5)
        failed = {"extra_bytes": None, "extra_share": None, "problems": {"sparge": "RuntimeError: out of memory"}}
        yield bench_row(0.25) | failed

    gpu = Gpu("NVIDIA H200", "9.0", "2.11.0", "3.6.0", "13.0", "0.1.0", "0123456789")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine_module, "describe_gpu", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(type(base.get("triton")), "unavailable_reason", lambda *_: None)
    monkeypatch.setattr(bench_module, "run_bench", run_bench)
    return requested


def test_bench_prints_tables_and_appends_rows(
    fake_gpu_runs: list[tuple[tuple[str, ...], bool]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.jsonl"
    path.write_text(json.dumps({"suite": "before"}) + "\n")
    command = ["bench", "--suite", "memory", "--suite", "kernel", "--suite", "memory", "--quick", "--json", str(path)]
    with pytest.raises(SystemExit) as stopped:
        app.main(command)
    assert not stopped.value.code
    assert fake_gpu_runs == [(("memory", "kernel"), True)]
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert written[:2] == [{"suite": "before"}, bench_row(0.5)]
    assert len(written) == 3
    printed = capsys.readouterr()
    first, second, *rest = printed.out.splitlines()
    assert second.startswith("FlashAttention-4: missing (sparge bench compares only with cuDNN and FlashAttention-2)")
    assert first == ("NVIDIA H200, capability 9.0; torch 2.11.0, triton 3.6.0, CUDA 13.0, sparge 0.1.0 (0123456789)")
    shown = [line.split() for line in rest]
    assert ["8192", "32", "128", "no", "0.5", "192", "MiB", "64", "MiB", "96", "MiB", "0.50x"] in shown
    assert ["8192", "32", "128", "no", "0.25", "192", "MiB", "64", "MiB", "n/a", "n/a"] in shown
    assert "n/a: sparge: RuntimeError: out of memory" in rest
    assert rest[-1] == f"Rows appended to {path}"
    assert printed.err.count("\n") == 2
    assert printed.err.startswith("memory: N 8192, H 32, D 128, causal no, topk 0.5, q + k + v 192 MiB")


def test_bench_runs_the_default_suites(fake_gpu_runs: list[tuple[tuple[str, ...], bool]]) -> None:
    with pytest.raises(SystemExit):
        app.main(["bench"])
    assert fake_gpu_runs == [(("end_to_end", "kernel", "memory"), False)]


def test_interrupted_bench_keeps_the_rows_measured_so_far(
    fake_gpu_runs: list[tuple[tuple[str, ...], bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.jsonl"

    def cut_short(*_: object) -> Iterator[dict[str, Any]]:
        yield bench_row(0.5)
        assert json.loads(path.read_text()) == bench_row(0.5), "written as soon as measured"
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_module, "run_bench", cut_short)
    with pytest.raises((KeyboardInterrupt, SystemExit, typer.Abort)):
        app.main(["bench", "--json", str(path)])
    assert fake_gpu_runs == []
    assert json.loads(path.read_text()) == bench_row(0.5)


def test_bench_tables_fit_80_columns() -> None:
    """Every column has its longest possible text."""
    times = ["sparge", "fa4", "cudnn", "flash", "prepare", "attend", "sparge_graph"]
    row = bench_row(1.0) | {"tokens": 131072, "queries": 131072, "kernel": "flex", "asked_density": 0.25}
    row |= {f"{name}_ms": 123.4 for name in times} | {"graph_ms": 123.4, "executed_tops": 1234.5}
    row |= {"sparge_tflops": 12345.6, "speedup": 12.3, "graph_speedup": 12.3, "density": 0.123, "relative_l1": 0.0123}
    row |= {"cudnn_ms": 100.1}
    row |= {"call": "enabled layer, Hilbert order", "total_us": 1234.5}
    row |= {"over_sdpa_us": 1234.5, "launches": 123}
    stream = StringIO()
    rows = {name: row | {"suite": name} for name in SUITE_NAMES}
    app._print_bench(Console(file=stream, width=80), list(rows.values()))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for view in VIEWS.values():
        texts = " ".join(view.cells(rows[view.suite]).values())
        assert "n/a" not in texts
        assert texts.split() in [line.split() for line in lines]


def test_bench_needs_triton(
    fake_gpu_runs: list[tuple[tuple[str, ...], bool]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        type(base.get("triton")), "unavailable_reason", lambda *_: "expected Triton 3.4 or newer, got 3.2.0"
    )
    with pytest.raises(SystemExit) as stopped:
        app.main(["bench"])
    assert stopped.value.code == 2
    expected = "sparge: error: bench: expected Triton 3.4 or newer, got 3.2.0\n"
    assert capsys.readouterr().err == expected
    assert fake_gpu_runs == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_bench_without_cuda_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.jsonl"
    with pytest.raises(SystemExit) as stopped:
        app.main(["bench", "--json", str(path)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error == (
        f"sparge: error: bench: expected a CUDA device, got none (torch {torch.__version__}); see sparge doctor\n"
    )
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--suite", "speed"],
            "'--suite': expected one of end_to_end, kernel, memory, crossover, host, got speed",
        ),
        (["--json", "{folder}"], "'--json': expected a file to write, got the directory {folder}"),
    ],
)
def test_bench_rejects_invalid_options(
    arguments: list[str],
    message: str,
    fake_gpu_runs: list[tuple[tuple[str, ...], bool]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        app.main(["bench", *(argument.format(folder=tmp_path) for argument in arguments)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.endswith(message.format(folder=tmp_path) + "\n")
    assert fake_gpu_runs == []


def test_progress_without_a_terminal_prints_a_line_every_30_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparge import console

    times = iter([0.0, 10.0, 31.0, 31.0, 45.0, 70.0, 70.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(times))
    written = StringIO()
    with console.show_progress(Console(file=written, width=20)) as report:
        for done in range(4):
            report(f"piece {done} [of work]", done, 4)
    assert written.getvalue() == "1 of 4 done; piece 1 [of work]\n3 of 4 done; piece 3 [of work]\n"
