"""Programs for processes of their own that compile kernels; this process may be interpreting them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

collect_ignore = ["worker.py", "launches.py"]
if importlib.util.find_spec("triton") is None:
    collect_ignore += ["test_compile.py", "test_launch.py", "test_replay.py"]


def run_program(program: str) -> Any:
    """Run Python source beside this folder's modules; what its last line of output says, as JSON."""
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
