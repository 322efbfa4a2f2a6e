"""Run programs that compile kernels in a separate process, because this process may interpret kernels."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from filelock import FileLock

collect_ignore = ["worker.py", "launches.py"]
if importlib.util.find_spec("triton") is None:
    collect_ignore += ["test_compile.py", "test_launch.py", "test_replay.py", "test_call_counts.py"]


@pytest.fixture(scope="session")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a variant of `run_program` that shares its results between all processes of a test run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def run(program: str) -> Any:
        result = folder / f"{hashlib.sha256(program.encode()).hexdigest()}.json"
        with FileLock(result.with_suffix(".lock")):
            if not result.exists():
                result.write_text(json.dumps(run_program(program)))
        return json.loads(result.read_text())

    return run


def run_program(program: str) -> Any:
    """Run Python source that may import this folder's modules, and parse its last line of output as JSON."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    folder = str(Path(__file__).parent)
    with TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r})\n{program}"],
            env={**environment, "TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
