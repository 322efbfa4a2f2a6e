"""Tables from rows of ``sparge bench`` and of the GPU tests, in the terminal and on pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks import tables
from benchmarks.measure import newest

from sparge.bench import run as bench
from sparge.bench.cases import Problem
from sparge.bench.table import KERNELS, VIEWS, one_line
from sparge.evaluate.machine import Gpu

GPU = Gpu("NVIDIA H200", "9.0", "2.11.0", "3.6.0", "13.0", "0.1.0", "0123456789")
Row = dict[str, Any]
Writer = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Writer:
    """Return a function that writes a file of rows, which replaces the results."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)

    def write(name: str, *rows: Row) -> None:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


END_TO_END: Row = {
    **{"suite": "end_to_end", **asdict(Problem(32768, 16)), "topk": 0.5, "quick": False, "problems": {}},
    **{"sparge_ms": 5.994, "sparge_graph_ms": 5.9, "cudnn_ms": 14.1, "flash_ms": 25.0, "sparge_tflops": 1467.4},
    **{"speedup": 2.352, "density": 0.5, "relative_l1": 0.01249, "prepare_ms": 0.421},
    **{"attend_ms": 5.4, **bench.stamp(GPU)},
}


class TestTables:
    def test_cells(self) -> None:
        assert list(VIEWS["end_to_end"].cells(END_TO_END).items()) == [
            ("N", "32768"),
            ("H", "16"),
            ("D", "128"),
            ("causal", "no"),
            ("topk", "0.5"),
            ("dense", "cuDNN"),
            ("dense ms", "14.1"),
            ("sparge ms", "5.99"),
            ("TFLOP/s", "1467"),
            ("speed-up", "2.35x"),
            ("density", "0.500"),
            ("rel. L1", "0.0125"),
        ]
        cells = VIEWS["prepare"].cells(END_TO_END)
        assert [cells[name] for name in ("prepare ms", "attend ms")] == ["0.421", "5.40"]
        assert VIEWS["end_to_end"].cells({**END_TO_END, "topk": 1.0})["topk"] == "dense"
        assert one_line(END_TO_END).startswith(
            "end_to_end: N 32768, H 16, D 128, causal no, topk 0.5, dense cuDNN, dense ms"
        )

    def test_tables_use_the_newest_row_of_each_case_on_the_last_gpu(self) -> None:
        quarter = {**END_TO_END, "topk": 0.25}
        again = {**END_TO_END, "sparge_ms": 5.0}
        quick = {**END_TO_END, "quick": True}
        other = {**END_TO_END, "suite": "memory"}
        assert newest([END_TO_END, quarter, again, quick, other], "end_to_end") == [again, quarter]
        other_gpu = {**quarter, "gpu": "NVIDIA L40S"}
        assert newest([END_TO_END, other_gpu], "end_to_end") == [other_gpu]
        assert newest([], "end_to_end") == []

    def test_markdown_from_the_results(self, write: Writer) -> None:
        page = (
            "a\n<!-- table: gpu_end_to_end -->\nold\n<!-- /table -->\nb\n<!-- table: gpu_masks -->\n<!-- /table -->\n"
        )
        assert tables.fill(page) == page, "without results the page is unchanged"
        half = {**END_TO_END, "backend": "hopper"}
        tenth = {**half, "topk": 0.1, "density": 0.104, "speedup": None}
        triton = {**END_TO_END, "sparge_ms": 7.0}
        no_cudnn = {"cudnn_ms": None, "problems": {"cudnn": "No kernel."}}
        missing = {**half, "tokens": 8192, **no_cudnn}

        write("gpu", tenth, half, triton, missing)
        filled = tables.fill(page)
        assert "| N | H | D | causal | dense kernels, ms | topk 0.5 | topk 0.1 |\n" in filled
        cells = "14.1 cuDNN, 25.0 FA2 | 5.99, **2.35x**, 0.0125 | 5.99, n/a, 0.0125, density 0.104"
        assert f"| 32768 | 16 | 128 | no | {cells} |\n" in filled
        assert "| 8192 | 16 | 128 | no | 25.0 FA2 | 5.99, **2.35x**, 0.0125 |  |\n" in filled
        assert "7.00" not in filled, "rows without a backend belong to Triton"
        assert (
            "ms, speed-up over the fastest dense kernel, rel. L1; bf16, B 1; NVIDIA H200; torch 2.11.0; triton 3.6.0; "
            "CUDA 13.0; commit 0123456789."
        ) in filled
        assert (
            "Measured without FlashAttention-4: commit 0123456789.\n\nn/a: cudnn: No kernel.\n<!-- /table -->" in filled
        )
        assert "FA4" not in filled, "a kernel without measurements is omitted"
        write("gpu", half, {**half, "tokens": 8192, "fa4_ms": 12.0, "flash_attn_4": "4.0"})
        filled = tables.fill(page)
        assert "| 32768 | 16 | 128 | no | 14.1 cuDNN, 25.0 FA2 | 5.99," in filled
        assert "| 8192 | 16 | 128 | no | 12.0 FA4, 14.1 cuDNN, 25.0 FA2 | 5.99," in filled
        assert "FlashAttention-4 4.0;" in filled and "Measured without FlashAttention-4: commit 0123456789." in filled
        write("gpu", {**missing, "flash_ms": None})
        assert "| N | H | D | causal | topk 0.5 |\n" in tables.fill(page), "no dense kernel ran"
        assert filled.endswith("<!-- table: gpu_masks -->\n<!-- /table -->\n")
        assert "old" not in filled

    def test_kernels_are_columns(self, write: Writer) -> None:
        row = {**END_TO_END, "suite": "hopper", "asked_density": 0.5, "executed_tops": 1027.4, "graph_ms": 4.281}
        rows = [{**row, "kernel": "int8_fp8_fast"}, {**row, "kernel": "none", "graph_ms": 7.191}]
        write("gpu", *rows)
        table = tables.fill("<!-- table: gpu_hopper -->\n<!-- /table -->\n")
        assert f"| causal | density | {KERNELS['int8_fp8_fast']} | 16 bits |\n" in table
        assert "| 32768 | 16 | 128 | no | 0.5 | 4.28, 1027, 0.0125 | 7.19, 1027, 0.0125 |\n" in table

    def test_speedups_are_relative_to_the_fastest_dense_kernel(self) -> None:
        assert tables._baseline(END_TO_END) == ("cuDNN", 14.1)
        assert tables._baseline({**END_TO_END, "fa4_ms": 12.0}) == ("FlashAttention-4", 12.0)
        model = {"stock_ms": 50.0, "sparse_ms": 30.0, "relative_l1": 0.01, "commit": "0123456789"}
        assert tables._baseline(model) == ("torch's SDPA", 50.0)
        assert tables._baseline({**model, "fa4_ms": 45.0}) == ("FlashAttention-4", 45.0)
        assert tables._model_cell({**model, "fa4_ms": 45.0}) == "30, **1.50x**, 0.0100"
        assert tables._without_fa4([model]) == "\n\nMeasured without FlashAttention-4: commit 0123456789."
        assert tables._without_fa4([{**model, "fa4_ms": 45.0}]) == tables._without_fa4([{"commit": "a"}]) == ""

    def test_results_of_the_gpu_tests_are_shown(self, write: Writer) -> None:
        page = "<!-- table: gpu_tests -->\nold\n<!-- /table -->\n"
        assert tables.fill(page) == page
        machine = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0", "commit": "0123456789"}
        files = [{"file": "test_a.py", "passed": 5, "failed": 1, "skipped": 2}]
        run = {"files": files, "passed": 5, "failed": 1, "skipped": 2, "backend": "triton", "crashed": 0, **machine}
        older = {**run, "failed": 7}
        tool = {"tool": "memcheck", "calls": 80, "errors": 0, "control_errors": 194, **machine}
        other = {**run, "backend": "hopper", "files": [{**files[0], "failed": 0, "skipped": 0}]}
        soak = {"tool": "soak", "backend": "hopper", "launches": 200, "problems": 2, "unequal": 0, "inexact": 0}
        soak |= {"seconds": 3, **machine}
        races = {**tool, "tool": "racecheck", "backend": "hopper", "control_errors": 9}
        races["apart"] = {"roles": 3, "metadata": 40}
        write("gpu_tests", older, tool, run, other, soak, races)
        filled = tables.fill(page)
        assert "| tests | 'triton' | 'hopper' |\n" in filled
        assert "| `test_a.py` | 5 passed, 1 failed, 2 skipped | 5 passed |\n" in filled
        assert "| all | **5 passed, 1 failed, 2 skipped** | **5 passed** |\n" in filled
        assert "memcheck, 'triton': 0 errors in 80 calls (194 in a call made to fail); NVIDIA H200;" in filled
        assert (
            "racecheck, 'hopper': 0 errors in 80 calls (9 in a call made to fail), and false positives: "
            "3 between roles and 40 of metadata; NVIDIA H200;"
        ) in filled
        assert "soak, 'hopper': 200 launches of 2 problems in 3 s, none hung; 0 problems whose bits changed" in filled
        assert "crashed" not in filled
        write("gpu_tests", {**run, "crashed": 3})
        assert "**3 processes crashed with 'triton'; their tests are not counted.**" in tables.fill(page)
        assert "old" not in filled and "7" not in filled.replace("0123456789", "")
