"""Timing, peak memory and the description of the machine that every result row carries."""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch

import sparge

REPOSITORY = Path(__file__).parent.parent


def interleaved_medians(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each function after one warm-up, taking turns so that drift hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_extra_bytes(function: Callable[[], object]) -> int | None:
    """How far the process's resident memory rises above its level before the call; None where Linux does not tell."""
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        return None
    clear.write_text("5")  # resets the high-water mark
    before = _status_bytes("VmRSS")
    function()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"expected {field} in /proc/self/status, got none")


def environment() -> dict[str, str | int]:
    """Machine, versions, commit and time."""
    return {
        "machine": f"{_cpu_name()}, {torch.get_num_threads()} threads, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sparge": sparge.__version__,
        "commit": _commit(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/*.py")
    return git("rev-parse", "--short=10", "HEAD") + ("+changes" if changed else "")


def _cpu_name() -> str:
    found = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    for line in found.splitlines():
        if line.startswith("Model name:"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown CPU"
