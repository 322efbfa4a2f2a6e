"""Run the GPU tests in several processes, since most of their time is compilation: ``python tests/gpu/run.py [N]``.

Prints the end of each failing process's output. SPARGE_TEST_REPORT=FILE appends one JSON line to it: counts and seconds
of every test file, the GPU and the versions (see conftest.py).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
COUNTS = ("passed", "failed", "skipped")


def main(processes: int) -> int:
    """The number of processes that failed."""
    started = time.perf_counter()
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    common = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(FOLDER), "--tb=short", "-p", "no:cacheprovider"]
    with TemporaryDirectory() as reports:
        running = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={
                    **common,
                    "SPARGE_TEST_SHARD": f"{index + 1}/{processes}",
                    "SPARGE_TEST_REPORT": f"{reports}/{index}.json",
                },
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
        parts = [json.loads(file.read_text()) for file in sorted(Path(reports).iterdir())]
    if parts:
        report = {**merged(parts), "processes": processes, "seconds": round(time.perf_counter() - started)}
        report["crashed"] = processes - len(parts)  # their tests are in no count
        print(", ".join(f"{report[kind]} {kind}" for kind in (*COUNTS, "crashed")))
        if "SPARGE_TEST_REPORT" in os.environ:
            with open(os.environ["SPARGE_TEST_REPORT"], "a") as file:
                file.write(json.dumps(report) + "\n")
    return failures


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The reports of all processes as one, and the sums over all files."""
    files: dict[str, Counter[str]] = {}
    for part in parts:
        for entry in part["files"]:
            files.setdefault(entry.pop("file"), Counter()).update(entry)
    rows = [
        {"file": name, **{kind: count[kind] for kind in COUNTS}, "seconds": round(count["seconds"], 1)}
        for name, count in sorted(files.items())
    ]
    return {**parts[0], "files": rows, **{kind: sum(row[kind] for row in rows) for kind in COUNTS}}


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else max(1, (os.cpu_count() or 2) - 2)))
