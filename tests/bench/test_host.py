"""Suite "host": every kind of call has a row, also on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import sparge
from sparge.bench import host
from sparge.bench.timing import TimedCall
from sparge.cli import app

CPU = torch.device("cpu")
CALLS = {
    "SDPA",
    "attention, runs dense",
    "attention",
    "attention, key padding",
    "attention, full mask",
    "attention, Hilbert order",
    "varlen_attention",
    "block_sparse_attention",
    "enabled layer, Hilbert order",
    "replace_sdpa, runs dense",
    "replace_sdpa",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_command_measures_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "QUICK_TURNS", 1)
    monkeypatch.setattr(host, "BATCH", 1)
    monkeypatch.setattr(host, "_frameworks", lambda *_: {})  # importing them takes seconds
    path = tmp_path / "host.jsonl"
    with pytest.raises(SystemExit) as stopped:
        app.main(["bench", "--suite", "host", "--quick", "--json", str(path)])
    assert not stopped.value.code
    rows = {row["call"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert rows.keys() >= CALLS
    for name, row in rows.items():
        assert row["problems"] == {}, name
        assert (row["suite"], row["device"], row["launches"], row["quick"]) == ("host", "cpu", None, True)
        assert row["total_us"] > 0 and {"processor", "torch", "commit", "time"} <= row.keys()
        assert row["over_sdpa_us"] == pytest.approx(row["total_us"] - rows["SDPA"]["total_us"])
    printed = capsys.readouterr().out
    _, *table, appended = printed.splitlines()
    assert max(map(len, table)) <= 80 and appended == f"Rows appended to {path}"
    assert "Launch overhead per call" in printed
    assert all(name in printed for name in CALLS)


def test_calls_run_as_named() -> None:
    for name, call in host.calls_on(host.CPU_PROBLEM, CPU).items():
        sparge.reset_stats()
        call.once()
        stats = sparge.stats()
        if name == "SDPA" or name.endswith("stock"):
            assert (stats.sparse, stats.dense) == (0, 0), name
        else:
            assert (stats.sparse > 0) != name.endswith("runs dense"), name


def test_failing_call_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(host, "calls_on", lambda *_: {"SDPA": TimedCall(lambda: None), "broken": TimedCall(fail)})
    monkeypatch.setattr(host, "QUICK_TURNS", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, row = host.host_rows(quick=True)
    assert row["total_us"] is row["over_sdpa_us"] is None
    assert row["problems"] == {"call": "RuntimeError: out of memory"}


def test_clearing_the_caches_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    times = iter([5.0, 1.0, 9.0, 2.0])

    def clock(run: Callable[[], object]) -> float:
        order.append("timed")
        run()
        return next(times)

    monkeypatch.setattr(host, "host_seconds", clock)
    monkeypatch.setattr(host, "BATCH", 3)
    monkeypatch.setattr(host.call_cache, "forget", lambda: order.append("clear"))
    call = TimedCall(lambda: order.append("call"))
    assert host._clock(call, CPU, clears_caches=True) == 5.0
    assert host._clock(call, CPU, clears_caches=False) == 2.0
    assert order == ["clear", "timed", "call", "call", *["timed", "call"] * 3]
