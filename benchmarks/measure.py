"""Read, select and append rows of benchmarks/results, and measure the peak memory of a process."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sparge.evaluate.machine import describe_gpu, describe_machine
from sparge.options.common import RENAMED_QUANTIZATIONS

IDENTITY = (
    *("suite", "backend", "tokens", "queries", "heads", "head_dim", "is_causal", "topk", "asked_density"),
    *("kernel", "family", "segments", "unequal", "mask", "call"),
)
"""The fields that identify a case. Rows with equal values in all of them are repeated measurements."""
DEFAULTS = {"backend": "triton", "segments": 1, "unequal": False}
"""Values of fields that some rows do not have."""


def peak_resident_bytes(function: Callable[[], object]) -> int | None:
    """Return the increase of resident memory during a call, or None if the system does not report it."""
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # return freed memory, which the call could reuse
    if trim is not None:
        trim(0)
    clear.write_text("5")  # reset the high-water mark
    before = _status_bytes("VmRSS")
    function()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"expected {field} in /proc/self/status, got none")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a file, or none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def newest(rows: list[dict[str, Any]], suite: str) -> list[dict[str, Any]]:
    """Return the latest row of every case of a suite, in the order in which the cases were first measured.

    Only the GPU of the latest row counts. Quick rows and rows of failed cases are ignored. Kernels have their current
    names.
    """
    rows = [row for row in rows if row["suite"] == suite and not row.get("quick") and "case" not in row["problems"]]
    rows = [
        {**row, "kernel": RENAMED_QUANTIZATIONS.get(row["kernel"], row["kernel"])} if "kernel" in row else row
        for row in rows
    ]
    rows_by_case = {
        tuple(row.get(name, DEFAULTS.get(name)) for name in IDENTITY): row
        for row in rows
        if row["gpu"] == rows[-1]["gpu"]
    }
    return list(rows_by_case.values())


def append_row(path: Path, row: dict[str, Any], *, gpu: bool = False) -> None:
    """Append a row with machine, versions, commit, time and (with ``gpu``) the GPU; print the row without these."""
    time = {"time": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({**row, **_machine(gpu), **time}) + "\n")
    print(
        {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in row.items()}, flush=True
    )


@cache
def _machine(gpu: bool) -> dict[str, Any]:
    """Return machine, versions and commit of this process. Finding them takes 0.2 s."""
    transformers = {"transformers": metadata.version("transformers")} if find_spec("transformers") else {}
    device = asdict(describe_gpu()) if gpu and torch.cuda.is_available() else {}
    return {**transformers, **asdict(describe_machine()), **device}
