"""Awkward calls under NVIDIA's checkers: ``python tests/gpu/sanitize.py [memcheck] [racecheck] [synccheck]``.

Without a name it is memcheck. A checker must find nothing in the calls. memcheck also runs over a kernel that is told
of more keys than there are, where it must find something (Triton's kernel: what the copy engine reads outside a tensor
is 0). Before that the calls run without a checker, which compiles the kernels. Every allocation is freed and made anew
by the driver (no caching), so that reads beyond a tensor's end are seen. SPARGE_TEST_BACKEND names the backend (default
"triton").

Under racecheck, accesses that Triton itself makes to start and end the roles of a warp-specialised kernel are counted
apart: it reports them in a kernel that does nothing else, too (their place is the head of the kernel).

SPARGE_TEST_REPORT=FILE appends the counts of each checker as a JSON line.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch

import sparge
from sparge.evaluate.machine import describe_gpu

BACKEND = os.environ.get("SPARGE_TEST_BACKEND", "triton")
CHECKERS = ("memcheck", "racecheck", "synccheck")
SECONDS = 240
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) error)")
HAZARD = re.compile(r"hazard detected at .*\n.* in (\S+:\d+)\n.* in (\S+:\d+)\n")
OPTIONS = {"racecheck": ("--racecheck-report", "all", "--print-limit", "100000", "--show-backtrace", "no")}
FP8 = "int8_fp8_codes" if BACKEND == "hopper" else "int8_fp8"
LENGTHS = [(1, 1), (1, 200), (129, 321), (330, 129), (257, 257)]
CASES: list[tuple[int, int, dict[str, Any]]] = [
    (64, 64, {"topk": 0.5, "quantization": FP8}),
    (128, 128, {"topk": 0.5, "quantization": FP8, "is_causal": True}),
    (72, 40, {"topk": 0.5, "quantization": "int8_fp16", "always_keep": [(0, 1)]}),
    (128, 128, {"topk": 0.5, "quantization": "none", "is_causal": True}),
    (100, 24, {"sparsity": sparge.TopCdf(0.8, min_blocks=1), "score": "mean", "quantization": "none"}),
    (64, 64, {"sparsity": sparge.TopK(0.4, similarity_threshold=0.02, pv_threshold=-4.0), "quantization": FP8}),
    (128, 64, {"sparsity": sparge.Dense(), "quantization": FP8, "is_causal": True}),
    (64, 64, {"topk": 0.5, "quantization": "int8_fp16", "padded": True, "is_causal": True}),
]


def make_calls() -> int:
    """Every case at every length, twice: recorded with a tensor per buffer, then replayed. The number of calls."""
    calls = 0
    for head_dim, value_dim, options in CASES:
        padded = options.get("padded", False)
        for q_len, kv_len in LENGTHS:
            query, key, value = (
                torch.randn(2, heads, length, width, device="cuda", dtype=torch.bfloat16)
                for heads, length, width in ((4, q_len, head_dim), (2, kv_len, head_dim), (2, kv_len, value_dim))
            )
            last_seen = torch.tensor([kv_len, max(1, kv_len // 3)], device="cuda")[:, None]
            mask = (torch.arange(kv_len, device="cuda") < last_seen)[:, None, None] if padded else None
            call = {"attn_mask": mask, "enable_gqa": True, "return_lse": True, "backend": BACKEND, **options}
            call.pop("padded", None)
            for _ in range(2):
                sparge.attention(query, key, value, **call)
                calls += 1
    torch.cuda.synchronize()
    return calls


def make_fault() -> None:
    """Read far beyond the end of K and V."""
    from sparge.backends.triton import pipeline
    from sparge.geometry import Shape

    query, key, value = (torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    shape = replace(Shape(1, 1, 1, 128, 128, 64, 64), kv_len=4096)
    pipeline.attention(query, key, value, None, shape, is_causal=False, scale=0.125)
    torch.cuda.synchronize()


def run_part(part: str, *tool: str) -> str:
    """What this program prints when it does one part, perhaps under a tool."""
    return subprocess.run(
        [*tool, sys.executable, __file__, part],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    ).stdout


def errors_of(output: str) -> int:
    """What a tool counted."""
    found = SUMMARY.search(output)
    if found is None:
        raise RuntimeError(f"expected the tool's summary, got:\n{output[-2000:]}")
    return int(found.group(1) or found.group(2) or 0)


def start_of_roles() -> str:
    """Where Triton's code that starts and ends roles is said to stand: file and line of the kernel's head."""
    if BACKEND != "hopper":
        return ""
    from sparge.backends.hopper.attention import attention_kernel

    lines, first = inspect.getsourcelines(attention_kernel.fn)
    head = next(place for place, line in enumerate(lines) if line.startswith("def "))
    return f"attention.py:{first + head}"


def check(checker: str) -> bool:
    """Whether the calls are clean, and the checker is not blind."""
    tool = ("compute-sanitizer", "--tool", checker, *OPTIONS.get(checker, ()))
    output = run_part("calls", *tool)
    errors, made = errors_of(output), re.search(r"(\d+) calls", output)
    head = start_of_roles()
    hazards = Counter(HAZARD.findall(output))
    of_triton = hazards.pop((head, head), 0)
    errors -= of_triton
    calls = int(made.group(1)) if made else 0
    control = errors_of(run_part("fault", *tool)) if checker == "memcheck" else None
    print(f"{checker}: {calls} calls, {errors} errors, {of_triton} in Triton's start and end of roles", flush=True)
    if control is not None:
        print(f"{control} in a call that reads beyond the end", flush=True)
    for (first, second), count in hazards.most_common():
        print(f"{count} hazards between {first} and {second}", flush=True)
    if errors:
        print(output[-6000:])
    path = os.environ.get("SPARGE_TEST_REPORT")
    if path:
        row = {
            "tool": checker,
            "backend": BACKEND,
            "calls": calls,
            "errors": errors,
            "of_triton": of_triton,
            "control_errors": control,
            **asdict(describe_gpu()),
        }
        with open(path, "a") as report:
            report.write(json.dumps(row) + "\n")
    return calls > 0 and errors == 0 and control != 0


def main(arguments: list[str]) -> int:
    if arguments == ["calls"]:
        print(f"{make_calls()} calls")
        return 0
    if arguments == ["fault"]:
        make_fault()
        return 0
    unknown = set(arguments) - set(CHECKERS)
    if unknown:
        raise SystemExit(f"expected some of {', '.join(CHECKERS)}, got {', '.join(sorted(unknown))}")
    print(run_part("calls").strip(), "without a checker", flush=True)
    return 0 if all([check(checker) for checker in arguments or ["memcheck"]]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
