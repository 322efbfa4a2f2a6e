"""Read and append rows of benchmarks/results, and measure the peak memory of a process."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sparge.evaluate.machine import describe_gpu, describe_machine


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


def append_row(path: Path, row: dict[str, Any], *, gpu: bool = False) -> None:
    """Append a row with machine, versions, commit and (with `gpu`) the GPU; print the row without these."""
    transformers = {"transformers": metadata.version("transformers")} if find_spec("transformers") else {}
    machine = asdict(describe_gpu()) if gpu and torch.cuda.is_available() else {}
    time = {"time": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    stamped = {**row, **transformers, **asdict(describe_machine()), **time, **machine}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(stamped) + "\n")
    print(
        {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in row.items()}, flush=True
    )
