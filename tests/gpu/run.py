"""Run the GPU tests in several processes, since most of their time is compilation: ``python tests/gpu/run.py [N]``.

Prints the end of each failing process's output; SPARGE_TEST_REPORT=FILE collects the counts (see conftest.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent


def main(processes: int) -> int:
    """The number of processes that failed."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    common = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(FOLDER), "--tb=short", "-p", "no:cacheprovider"]
    running = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**common, "SPARGE_TEST_SHARD": f"{index + 1}/{processes}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(processes)
    ]
    failures = 0
    for index, process in enumerate(running):
        output, _ = process.communicate()
        failures += process.returncode != 0
        summary = [line for line in output.splitlines() if re.search(r"\d (passed|failed|skipped)", line)]
        print(f"part {index + 1}/{processes}: {summary[-1] if summary else 'exit ' + str(process.returncode)}")
        if process.returncode:
            print(output[-4000:])
    return failures


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else max(1, (os.cpu_count() or 2) - 2)))
