"""Compare checkouts: measure the same calls with each of them in turns, so that drift affects all of them.

    python tools/gpu/compare.py before=../before after=. --cases 4096x32@0.25 32768x16x64c@0.1 8192x32:none

A case is TOKENSxHEADS[xHEAD_DIM][c][@TOPK][:QUANTIZATION]. "c" means causal; without a topk, calls compute all blocks.
Each process measures all cases with one checkout, whose own inputs and `sparge.bench` it uses. Rows go to stderr as
they are measured. At the end, the tool prints the machine and the commits, and for each case and checkout

    the median time of a call over all processes, its range, and its change relative to the first checkout
    the relative L1 error against exact attention
    whether all outputs equal those of the first checkout in every bit

If a process fails, its error ends the run after the table of the rounds before it.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "src"))  # the checkout in PYTHONPATH comes first

import torch

from sparge.backends import base
from sparge.bench.cases import Problem, Row
from sparge.bench.inputs import make_inputs
from sparge.bench.run import Bench, exact_error, rule_of, whole_call
from sparge.bench.timing import repeats_for
from sparge.evaluate.machine import describe_gpu, describe_machine
from sparge.evaluate.timing import device_seconds, host_seconds
from sparge.options import checks
from sparge.options.common import QUANTIZATIONS

TURNS = 7
"""Measurements of a call in one process, of which the row has the median."""
SECONDS_PER_CASE = 120.0
"""After this time in one case, a watchdog ends the process and prints a traceback."""
CASE = re.compile(
    r"(?P<tokens>\d+)x(?P<heads>\d+)(x(?P<dim>\d+))?(?P<causal>c)?(@(?P<topk>\d*\.?\d+))?(:(?P<quantization>\w+))?"
)


@dataclass(frozen=True)
class ComparedCall:
    """A call to compare; topk 1.0 means all blocks."""

    text: str
    problem: Problem
    topk: float
    quantization: str


def parse_case(text: str) -> ComparedCall:
    """Parse a case.

    Raises:
        ValueError: the text has another format, or the topk or the quantization is invalid.
    """
    found = CASE.fullmatch(text)
    if found is None:
        raise ValueError(f"case: expected TOKENSxHEADS[xHEAD_DIM][c][@TOPK][:QUANTIZATION], got {text!r}")
    problem = Problem(int(found["tokens"]), int(found["heads"]), int(found["dim"] or 128), found["causal"] is not None)
    topk = float(found["topk"] or 1.0)
    rule_of(topk)  # checks the topk
    quantization = found["quantization"] or "auto"
    checks.check_choice("quantization", quantization, QUANTIZATIONS)
    return ComparedCall(text, problem, topk, quantization)


def measure_call(case: ComparedCall) -> Row:
    """Return time, error and digests of the output's bits, measured with the imported checkout."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs = make_inputs(case.problem, device)
    bench = Bench(device, base.resolve("auto", device), case.quantization)
    run = whole_call(bench, inputs, case.problem, case.topk).run
    outputs = [run().clone() for _ in range(3)]  # on a GPU: compile, record, replay
    digests = {hashlib.sha256(output.cpu().view(torch.uint8).numpy().tobytes()).hexdigest() for output in outputs}
    seconds = device_seconds if device.type == "cuda" else host_seconds
    untimed, timed = repeats_for(1e3 * seconds(run))
    times = [1e6 * seconds(run, untimed=untimed, timed=timed) for _ in range(TURNS)]
    error = exact_error(inputs, case.problem.is_causal)(run)
    machine = describe_gpu() if device.type == "cuda" else describe_machine()
    row = {"case": case.text, "us": statistics.median(times), "error": error, "digests": sorted(digests)}
    return {**row, "machine": str(machine)}


def measure_in_process(checkout: Path, cases: Sequence[str]) -> list[Row]:
    """Measure all cases with a checkout, in a new process.

    Raises:
        RuntimeError: the process failed.
    """
    command = [sys.executable, __file__, "--measure", "--cases", *cases]
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    sys.stderr.write(process.stdout)
    if process.returncode:
        raise RuntimeError(f"{checkout}: {process.stderr.strip()[-2000:]}")
    return [json.loads(line) for line in process.stdout.splitlines()]


def table_text(rows: dict[str, dict[str, list[Row]]]) -> str:
    """Format the rows of every case and checkout. Cases that one of the checkouts has not measured are omitted."""
    lines = []
    for case, of_case in rows.items():
        if not all(of_case.values()):
            continue
        first = next(iter(of_case.values()))
        digests = {digest for row in first for digest in row["digests"]}
        for name, measured in of_case.items():
            times = [row["us"] for row in measured]
            change = statistics.median(times) / statistics.median(row["us"] for row in first) - 1
            error = max((row["error"] for row in measured), key=lambda error: (math.isnan(error), error))
            equal = {digest for row in measured for digest in row["digests"]} == digests and len(digests) == 1
            lines.append(
                f"{case:24} {name:12} {statistics.median(times):10.1f} us ({min(times):.1f} to {max(times):.1f})"
                f" {change:+7.1%}  error {error:.4f}  bits {'equal' if equal else 'differ'}"
            )
    return "\n".join(lines)


def machines_text(rows: dict[str, dict[str, list[Row]]]) -> str:
    """Format the machine, the versions and the commit of every checkout."""
    found = {
        name: row["machine"] for of_case in rows.values() for name, measured in of_case.items() for row in measured
    }
    return "\n".join(f"{name}: {machine}" for name, machine in found.items())


def parse_checkout(text: str) -> tuple[str, Path]:
    """Parse NAME=FOLDER.

    Raises:
        ValueError: the text has another format, or the folder is not a checkout.
    """
    name, equals, folder = text.partition("=")
    if not (name and equals and (Path(folder) / "src/sparge").is_dir()):
        raise ValueError(f"checkout: expected NAME=FOLDER with a folder that contains src/sparge, got {text!r}")
    return name, Path(folder)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--cases", nargs="+", required=True, metavar="CASE")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each checkout")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    try:
        cases = [parse_case(text) for text in args.cases]
        checkouts = dict(parse_checkout(text) for text in args.checkouts)
    except ValueError as error:
        parser.error(str(error))
    if args.measure:
        for case in cases:
            faulthandler.dump_traceback_later(SECONDS_PER_CASE, exit=True)
            print(json.dumps(measure_call(case)), flush=True)
            faulthandler.cancel_dump_traceback_later()
        return
    if not 0 < len(checkouts) == len(args.checkouts):
        parser.error(f"expected checkouts with different names, got {args.checkouts}")
    if args.rounds < 1:
        parser.error(f"rounds: expected at least 1, got {args.rounds}")
    rows: dict[str, dict[str, list[Row]]] = {text: {name: [] for name in checkouts} for text in args.cases}
    try:
        for turn in range(args.rounds):
            for name, folder in checkouts.items():
                print(f"round {turn + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
                for row in measure_in_process(folder, args.cases):
                    rows[row["case"]][name].append(row)
    finally:
        print(table_text(rows))
        print(machines_text(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
