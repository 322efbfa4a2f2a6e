"""Run edge cases under NVIDIA's checkers: ``python tools/gpu/sanitize.py [memcheck] [racecheck] [synccheck]``.

The default is memcheck. A checker must report no error for the calls and an error for a control. The control of
memcheck passes a number of keys beyond the end of K (to the Triton kernel: out-of-bounds reads by TMA return 0). The
control of racecheck has threads that do not wait. The calls run once without a checker to compile the kernels.
PyTorch's caching allocator is off, so that reads beyond a tensor's end are detected. SPARGE_TEST_BACKEND is the backend
(default "triton").

Two kinds of hazards that racecheck reports in warp-specialized kernels (Hopper's attention and scores) are counted
separately, as long as a control shows that they are false positives. racecheck then proves nothing about their order,
which only the soak and the numerical comparisons test.

    roles     hazards between the head of a kernel and the start of its roles, where Triton's own accesses are
              reported. They are excused if racecheck also reports the variant "meeting" of `controls.py`, with an
              earlier barrier of some warps, and does not report "alone"
    metadata  hazards between a line of the producer that stores a stage's metadata and a line that loads it. They are
              excused if racecheck also reports the variant "one_arrives" of `controls.py`, and does not report
              "all_arrive". A load that the compiler moved is reported at a line without an access
              to shared memory

SPARGE_TEST_REPORT=FILE appends the counts of each checker as a JSON line.
"""

from __future__ import annotations

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
SUMMARY = re.compile(
    r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)"
)
HAZARD = re.compile(r"Potential (\w+) hazard detected at .*\n.* in (\S+:\d+)\n.* in (\S+:\d+)\n")
OPTIONS = {"racecheck": ("--racecheck-report", "hazard", "--print-limit", "100000", "--show-backtrace", "no")}
CONSUMER = ("accumulator.py:", "coarse.py:", "consumer.py:", "mma.py:", "softmax.py:")
ACCESS = re.compile(
    r"\.(load|store)\(|convert_layout|gl\.(max|min|sum)\(|_max\(|_sum\(|max_by_lane\(|load_(tile_value|lengths|coordinates|number)\("
)
"""Operations that access or may access shared memory, including exchanges between threads."""
STARTS = ("def attention_kernel(", "def hopper_score_kernel(", "    gl.warp_specialize(")
"""Lines of `WITH_ROLES` at which Triton's own accesses are reported."""
BACKENDS = Path(sparge.__file__).parent / "backends"
FOLDERS = (BACKENDS / "hopper", BACKENDS / "gpu" / "stages")
WITH_ROLES = ("kernel.py", "score_hopper.py")
FP8 = "int8_fp8_fast" if BACKEND == "hopper" else "int8_fp8"
LENGTHS = [(1, 1), (1, 200), (129, 321), (330, 129), (257, 257)]
LONG = [(129, 1472), (1500, 1500), (65, 4160)]
"""Lengths with more stages than are in flight at once, and with enough keys that peaks are marked before the kernel."""
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
LONG_CASES: list[tuple[int, int, dict[str, Any]]] = [
    (128, 128, {"sparsity": sparge.Dense(), "quantization": FP8}),
    (64, 64, {"sparsity": sparge.Dense(), "quantization": FP8, "is_causal": True}),
]
"""Cases that run on inputs with one score far above the others, whose stage is computed in two parts."""


def make_calls() -> int:
    """Run every case at every length twice, recorded and replayed, and return the number of calls."""
    problems = [(case, lengths) for case in CASES for lengths in LENGTHS]
    problems += [(case, lengths) for case in LONG_CASES for lengths in LONG]
    for (head_dim, value_dim, options), (q_len, kv_len) in problems:
        query, key, value = (
            torch.randn(2, heads, length, width, device="cuda", dtype=torch.bfloat16)
            for heads, length, width in ((4, q_len, head_dim), (2, kv_len, head_dim), (2, kv_len, value_dim))
        )
        if kv_len > 1000:
            query[..., 0], key[..., 0] = head_dim**0.5, 0
            key[:, :, kv_len // 2, 0] = 12
        last_seen = torch.tensor([kv_len, max(1, kv_len // 3)], device="cuda")[:, None]
        mask = (torch.arange(kv_len, device="cuda") < last_seen)[:, None, None] if options.get("padded") else None
        call = {"attn_mask": mask, "enable_gqa": True, "return_lse": True, "backend": BACKEND, **options}
        call.pop("padded", None)
        for _ in range(2):
            sparge.attention(query, key, value, **call)
    torch.cuda.synchronize()
    return 2 * len(problems)


def make_fault() -> None:
    """Read far beyond the end of K and V."""
    from sparge.backends import base
    from sparge.call import Call
    from sparge.masks.geometry import Shape

    query, key, value = (torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    shape = replace(Shape(1, 1, 1, 128, 128, 64, 64), kv_len=4096)
    base.get("triton").attend(query, key, value, None, Call(shape, False, 0.125))  # type: ignore[arg-type]
    torch.cuda.synchronize()


def run_part(part: str, *tool: str, program: str = "sanitize.py") -> str:
    """Return the output of one part of a program, optionally run under a tool."""
    return subprocess.run(
        [*tool, sys.executable, str(Path(__file__).with_name(program)), part],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    ).stdout


def count_errors(output: str) -> int:
    """Return the number of errors and warnings in a tool's summary."""
    summary = SUMMARY.search(output)
    if summary is None:
        raise RuntimeError(f"expected the tool's summary, got:\n{output[-2000:]}")
    return sum(int(count) for count in summary.groups() if count)


def line_at(location: str) -> str:
    """Return the source line at a location such as "consumer.py:44", or "" for files of other folders.

    A line of `consume` may be reported as a line of its caller kernel.py, at a line without an access.
    """
    name, _, number = location.partition(":")
    path = next((folder / name for folder in FOLDERS if (folder / name).is_file()), None)
    lines = [] if path is None else ["", *path.read_text().splitlines()]
    line = lines[int(number)] if int(number) < len(lines) else ""
    if name == "kernel.py" and not line.startswith(STARTS) and not ACCESS.search(line):
        return line_at(f"consumer.py:{number}")
    return line


def kind_of(hazard: tuple[str, str, str]) -> str:
    """Return the kind of a hazard, "roles", "metadata" or "other", from its order (RAW, WAR, WAW) and two locations."""
    order, *locations = hazard
    files = {location.partition(":")[0] for location in locations}
    if files in ({name} for name in WITH_ROLES) and all(line_at(location).startswith(STARTS) for location in locations):
        return "roles"
    if order == "WAW":  # metadata has one writer
        return "other"
    for writer, reader in (locations, locations[::-1]):
        stored = _stored_at(writer)
        line = line_at(reader)
        if stored is None:
            continue
        has_no_line = reader.startswith(CONSUMER) and line and not ACCESS.search(line)
        of_tile = stored == "metadata.tile" and re.search(r"\bload_(tile_value|lengths|coordinates)\(", line)
        in_helper = reader.startswith("scheduler.py:") and ".load(SPEC" in line  # `load_number` loads only metadata
        name = re.escape(stored)
        if has_no_line or of_tile or in_helper:
            return "metadata"
        if re.search(rf"\b{name}\.index\(.*\.load\(|\bload_number\({name}\.index\(", line):
            return "metadata"
    return "other"


def _stored_at(location: str) -> str | None:
    """Return the name of the metadata that a line stores, or None; the producer's helpers store "metadata.tile"."""
    if not location.startswith(("producer.py:", "scheduler.py:")):
        return None
    line = line_at(location)
    if re.search(r"^ *store_(tile_value|lengths|coordinates)\(", line):
        return "metadata.tile"
    stored = re.search(r"^ *(metadata\.\w+)\.index\(.*\.store\(", line)
    return None if stored is None else stored.group(1)


def count_hazards(output: str) -> tuple[Counter[str], Counter[tuple[str, str, str]]]:
    """Return two counts of hazards: by kind, and by order and locations."""
    hazards = Counter(HAZARD.findall(output))
    kinds: Counter[str] = Counter()
    for hazard, count in hazards.items():
        kinds[kind_of(hazard)] += count
    return kinds, hazards


def run_controls(checker: str, *tool: str) -> dict[str, int]:
    """Return a checker's error counts for its controls: a fault, and for racecheck also kernels without a race."""
    if checker == "memcheck":
        return {"fault": count_errors(run_part("fault", *tool))}
    if checker != "racecheck":
        return {}
    variants = ("all_arrive", "one_arrives", "nobody_waits", "alone", "meeting")
    outputs = {variant: run_part(variant, *tool, program="controls.py") for variant in variants}
    for name, output in outputs.items():
        if name != "nobody_waits" and not re.search(r"^in order$", output, re.MULTILINE):
            raise RuntimeError(f"expected the control {name} to be in order, got:\n{output[-2000:]}")
    return {name: count_errors(output) for name, output in outputs.items()}


def check(checker: str) -> bool:
    """Return whether a checker reports no error for the calls and an error for its control."""
    tool = ("compute-sanitizer", "--tool", checker, *OPTIONS.get(checker, ()))
    output = run_part("calls", *tool)
    made = re.search(r"^(\d+) calls", output, re.MULTILINE)
    calls = int(made.group(1)) if made else 0
    controls = run_controls(checker, *tool)
    kinds, hazards = count_hazards(output)
    is_excused = {
        "roles": controls.get("meeting", 0) > 0 and controls["alone"] == 0,
        "metadata": controls.get("one_arrives", 0) > 0 and controls["all_arrive"] == 0,
    }
    excused = {kind: kinds[kind] if is_excused[kind] else 0 for kind in is_excused}
    errors = count_errors(output) - sum(excused.values())
    faults = controls.get("fault", controls.get("nobody_waits"))
    print(f"{checker}: {calls} calls, {errors} errors; excused: {excused}; controls: {controls}", flush=True)
    for hazard, count in hazards.most_common():
        order, *locations = hazard
        print(f"{count} {order} hazards ({kind_of(hazard)}) between {' and '.join(locations)}", flush=True)
    if errors:
        print(output[-6000:])
    path = os.environ.get("SPARGE_TEST_REPORT")
    if path:
        row = {"tool": checker, "backend": BACKEND, "calls": calls, "errors": errors, "apart": excused}
        row |= {"controls": controls, "control_errors": faults, **asdict(describe_gpu())}
        with open(path, "a") as report:
            report.write(json.dumps(row) + "\n")
    return calls > 0 and errors == 0 and faults != 0


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
