"""Launch the Hopper kernel many times on random problems: ``python tools/gpu/soak.py [launches]`` (default 20000).

Lengths, heads, densities, thresholds and sinks are random. All launches of a problem must be bitwise equal, and the
first must be close to exact attention, except with a threshold. A watchdog ends the process and prints a traceback if
a launch hangs.

SPARGE_TEST_REPORT=FILE appends the counts as a JSON line.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch
from torch import Tensor

from sparge.backends.gpu import pipeline
from sparge.backends.hopper import launcher
from sparge.call import Call
from sparge.evaluate.machine import describe_gpu
from sparge.evaluate.metrics import relative_l1
from sparge.evaluate.oracle import exact_rows
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import Shape

LAUNCHES = 20_000
PER_PROBLEM = 100
SECONDS_PER_PROBLEM = 60.0
SPECS = [
    ("int8_fp8_fast", 128, False, None),
    ("int8_fp8_fast", 64, True, None),
    ("int8_fp8_fast", 128, True, -3.0),
    ("int8_fp8", 128, True, None),
    ("none", 128, True, None),
    ("none", 64, False, -3.0),
    ("int8_fp16", 128, False, None),
    ("int8_fp8_fast", 256, False, None),
    ("none", 256, False, None),
]
"""Quantization, head_dim, causality, P V threshold."""
SINKS = 0.3
"""Fraction of problems in which one key is 12 nats above the others for all queries."""
ERRORS = {"none": 0.01}
LARGEST_ERROR = 0.05
"""Maximum error relative to exact attention over the kept blocks, including quantization and skipped products."""


def random_problem(draw: random.Random, width: int) -> tuple[Shape, list[Tensor], Tensor]:
    """Return sizes, [Q, K, V], and kept blocks of a random density."""
    group, kv_heads = draw.choice([1, 2, 4]), draw.choice([1, 2, 3])
    q_len, kv_len = draw.randint(1, 2000), draw.choice([draw.randint(1, 2000), draw.randint(1, 6000)])
    shape = Shape(draw.choice([1, 2]), group * kv_heads, kv_heads, q_len, kv_len, width, width)
    tensors = [
        torch.randn(shape.batch, heads, length, width, device="cuda", dtype=torch.bfloat16)
        for heads, length in ((shape.heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    ]
    tensors[2] += 0.5
    if draw.random() < SINKS:
        tensors[0][..., 0], tensors[1][..., 0] = width**0.5, 0
        tensors[1][:, :, kv_len // 2, 0] = 12
    rows = (shape.batch, shape.heads, shape.q_blocks, shape.kv_blocks)
    return shape, tensors, torch.rand(rows, device="cuda") < draw.choice([0.02, 0.2, 0.5, 1.0])


def soak(launches: int) -> dict[str, int]:
    """Run the launches, and return counts of launches, problems, bitwise differences and inexact results."""
    draw = random.Random(0)
    counts = {"launches": 0, "problems": 0, "unequal": 0, "inexact": 0}
    while counts["launches"] < launches:
        faulthandler.dump_traceback_later(SECONDS_PER_PROBLEM, exit=True)
        quantization, width, is_causal, threshold = draw.choice(SPECS)
        shape, tensors, dense = random_problem(draw, width)
        mask = BlockMask.from_dense(dense, q_len=shape.q_len, kv_len=shape.kv_len, is_causal=is_causal)
        call = Call(shape, is_causal, width**-0.5, quantization=quantization, pv_threshold=threshold)
        operands, _ = pipeline.prepare(*tensors, call, with_mask=False, with_operands=True)
        assert operands is not None
        first = launcher.attend(operands, mask, call)
        differs = torch.zeros((), dtype=torch.bool, device="cuda")
        for _ in range(PER_PROBLEM - 1):
            again = launcher.attend(operands, mask, call)
            for a, b in zip(first, again, strict=True):
                differs |= (a != b).any()
        counts["unequal"] += bool(differs)
        rows = torch.arange(shape.q_len, device="cuda")
        exact = exact_rows(*tensors, rows, is_causal=is_causal, kept=mask.to_dense()).output
        wrong = float(exact.abs().sum()) > 0 and relative_l1(first[0], exact) > ERRORS.get(quantization, LARGEST_ERROR)
        if wrong and threshold is None:
            print(f"inexact: {quantization} {shape} causal {is_causal}: {relative_l1(first[0], exact):.4f}", flush=True)
            counts["inexact"] += 1
        counts["launches"] += PER_PROBLEM
        counts["problems"] += 1
        if counts["problems"] % 20 == 0:
            print(f"{counts['launches']} launches", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return counts


def main(arguments: list[str]) -> int:
    started = time.perf_counter()
    counts = soak(int(arguments[0]) if arguments else LAUNCHES)
    seconds = round(time.perf_counter() - started)
    print(", ".join(f"{count} {name}" for name, count in counts.items()), f"in {seconds} s")
    path = os.environ.get("SPARGE_TEST_REPORT")
    if path:
        with open(path, "a") as report:
            row = {"tool": "soak", "backend": "hopper", **counts, "seconds": seconds, **asdict(describe_gpu())}
            report.write(json.dumps(row) + "\n")
    return 1 if counts["unequal"] or counts["inexact"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
