"""Measure each rank's part of attention on one GPU: `python -m benchmarks.scale [--only WORD ...] [--calls]`.

This takes minutes. Rows go to benchmarks/results/scale.jsonl. `python -m benchmarks.tables` then updates the table of
docs/scale.md, with bytes and link times from benchmarks/scale/plan.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.measure import append_row
from benchmarks.scale import calls
from benchmarks.scale.measure import all_rows

RESULTS = Path(__file__).parent.parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], help='measure parts whose name contains one of these texts, e.g. "1M: ring"'
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="maximum number of timed calls per part; default: %(default)s"
    )
    parser.add_argument("--budget", type=float, default=480, help="seconds after which no part starts; default: 480")
    parser.add_argument("--calls", action="store_true", help="measure the functions of sparge.distributed on one rank")
    parser.add_argument("--results", type=Path, help="default: scale.jsonl or scale_calls.jsonl")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, got none")
    if args.calls:
        rows = calls.all_rows()
    else:
        rows = all_rows("cuda", repeats=args.repeats, only=args.only, budget_s=args.budget)
    for row in rows:
        append_row(args.results or RESULTS / f"scale{'_calls' * args.calls}.jsonl", row, gpu=True)


if __name__ == "__main__":
    main()
