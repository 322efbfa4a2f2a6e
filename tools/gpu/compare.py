"""Compare checkouts: measure the same calls with each of them in turns, so that drift affects all of them.

    python tools/gpu/compare.py before=../before after=. --cases 4096x32@0.25 32768x16x64c@0.1 8192x32:none

A case is TOKENSxHEADS[xHEAD_DIM][c][@TOPK][:QUANTIZATION]. "c" means causal; without a topk, calls are dense. Each
process measures all cases with one checkout. For each case and checkout, the tool prints

    the median time of a call over all processes, its range, and its change relative to the first checkout
    the relative L1 error against exact attention
    whether all outputs equal those of the first checkout in every bit
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "src"))  # the checkout in PYTHONPATH comes first

import torch

import sparge
from sparge.bench.cases import Problem
from sparge.bench.inputs import make_inputs
from sparge.bench.timing import repeats_for
from sparge.evaluate.oracle import exact_rows, sampled_error, sampled_queries
from sparge.evaluate.timing import device_seconds, host_seconds
from sparge.options.rules import Budget, Dense

TURNS = 7
SECONDS_PER_CASE = 120.0
"""After this time in one case, a watchdog ends the process and prints a traceback."""
CASE = re.compile(
    r"(?P<tokens>\d+)x(?P<heads>\d+)(x(?P<dim>\d+))?(?P<causal>c)?(@(?P<topk>\d*\.?\d+))?(:(?P<quantization>\w+))?"
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One kind of call."""

    text: str
    problem: Problem
    topk: float | None
    quantization: str


def parse_case(text: str) -> Case:
    """Parse a case.

    Raises:
        ValueError: the text has another format.
    """
    found = CASE.fullmatch(text)
    if found is None:
        raise ValueError(f"case: expected TOKENSxHEADS[xHEAD_DIM][c][@TOPK][:QUANTIZATION], got {text!r}")
    problem = Problem(int(found["tokens"]), int(found["heads"]), int(found["dim"] or 128), found["causal"] is not None)
    topk = None if found["topk"] is None else float(found["topk"])
    return Case(text, problem, topk, found["quantization"] or "auto")


def measure(case: Case, backend: str) -> Row:
    """Return time, error and a digest of the output's bits, measured with the imported checkout."""
    on_gpu = torch.cuda.is_available()
    problem, device = case.problem, torch.device("cuda" if on_gpu else "cpu")
    inputs = make_inputs(problem, device)
    sparsity = Dense() if case.topk is None else Budget(case.topk)
    options = {"sparsity": sparsity, "quantization": case.quantization, "backend": backend}
    run = partial(sparge.attention, *inputs, is_causal=problem.is_causal, **options)
    outputs = [
        run().clone() for _ in range(3)
    ]  # the first call compiles, the second one records, the third one replays
    digests = {hashlib.sha256(output.cpu().view(torch.uint8).numpy().tobytes()).hexdigest() for output in outputs}
    seconds = device_seconds if on_gpu else host_seconds
    untimed, timed = repeats_for(1e3 * seconds(run))
    times = [1e6 * seconds(run, untimed=untimed, timed=timed) for _ in range(TURNS)]
    rows = sampled_queries(problem.queries, device)
    error = sampled_error(outputs[-1], rows, exact_rows(*inputs, rows, is_causal=problem.is_causal).output)
    return {"case": case.text, "us": statistics.median(times), "error": error, "digests": sorted(digests)}


def measure_in_process(checkout: Path, cases: Sequence[str], backend: str) -> Iterator[Row]:
    """Measure all cases with a checkout, in a new process.

    Raises:
        RuntimeError: the process failed.
    """
    command = [sys.executable, __file__, "--measure", "--backend", backend, "--cases", *cases]
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{checkout}: {process.stderr.strip()[-2000:]}")
    yield from map(json.loads, process.stdout.splitlines())


def table_text(rows: dict[str, dict[str, list[Row]]]) -> str:
    """Format the rows of every case and checkout."""
    lines = []
    for case, of_case in rows.items():
        base: list[Row] = next(iter(of_case.values()))
        digests = {digest for row in base for digest in row["digests"]}
        for name, measured in of_case.items():
            times = [row["us"] for row in measured]
            change = statistics.median(times) / statistics.median(row["us"] for row in base) - 1
            equal = {digest for row in measured for digest in row["digests"]} == digests and len(digests) == 1
            lines.append(
                f"{case:24} {name:12} {statistics.median(times):10.1f} us ({min(times):.1f} to {max(times):.1f})"
                f" {change:+7.1%}  error {measured[-1]['error']:.4f}  bits {'equal' if equal else 'differ'}"
            )
    return "\n".join(lines)


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
    parser.add_argument("--backend", default="auto", help="with a name, short calls do not run dense")
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
            print(json.dumps(measure(case, args.backend)), flush=True)
            faulthandler.cancel_dump_traceback_later()
        return
    if not checkouts:
        parser.error("expected at least one NAME=FOLDER, got none")
    rows: dict[str, dict[str, list[Row]]] = {text: {name: [] for name in checkouts} for text in args.cases}
    for turn in range(args.rounds):
        for name, folder in checkouts.items():
            print(f"round {turn + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
            for row in measure_in_process(folder, args.cases, args.backend):
                rows[row["case"]][name].append(row)
    print(table_text(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
