"""Every kernel compiles for every supported architecture, fits its memory, stays in registers and uses tensor cores.

    architecture          16 bits    INT8       FP8
    8.0 (Ampere)          HMMA       IMMA       -
    8.9 (Ada)             HMMA       IMMA       QMMA
    9.0 (Hopper)          HGMMA      IGMMA      QGMMA
    10.0 (Blackwell)      UTCHMMA    UTCIMMA    UTCQMMA    INT8 is IMMA up to Triton 3.6
    12.0 (RTX Blackwell)  HMMA       IMMA       QMMA

Block scores are 16-bit products. 8.6 is not tested: it equals 8.0 with the shared memory of 8.9. No GPU is needed.
`worker` compiles in a separate process, because this one may interpret kernels. Each test compiles for one
architecture, so parallel tests compile nothing twice.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ahead_of_time.worker import FP8_ARCHITECTURE, SLOW, spills_per_step

WORKER = Path(__file__).with_name("worker.py")
KERNELS = {
    "mask_kernel",
    "sample_kernel",
    "size_kernel",
    "summarize_kernel",
    "reduce_kernel",
    "key_similarity_kernel",
    "quantize_query_kernel",
    "quantize_key_value_kernel",
    "mark_peaks_kernel",
    "score_kernel",
    "count_kernel",
    "select_kernel",
    "replaced_bias_kernel",
    "move_kernel",
    "attention_kernel",
}
HOPPER_KERNELS = {"hopper_score_kernel"}
WITH_FP8 = {"mark_peaks_kernel", "replaced_bias_kernel"}
"""Kernels that are compiled only for cases with FP8."""
SYNCHRONOUS = {"16 bits": {"HMMA"}, "INT8": {"IMMA"}, "FP8": {"QMMA"}}
MATRIX_INSTRUCTIONS = {
    80: SYNCHRONOUS,
    89: SYNCHRONOUS,
    90: {"16 bits": {"HGMMA"}, "INT8": {"IGMMA"}, "FP8": {"QGMMA"}},
    100: {"16 bits": {"UTCHMMA"}, "INT8": {"UTCIMMA", "IMMA"}, "FP8": {"UTCQMMA"}},
    120: SYNCHRONOUS,
}
COARSE_INSTRUCTIONS = {90: {"HGMMA", "HMMA"}, 100: {"UTCHMMA", "HMMA"}}
"""Additional instructions that INT8 modes may use: scores of coarse tiles are 16-bit products."""
PRODUCTS = {
    "none": {"16 bits"},
    "int8_fp16": {"INT8", "16 bits"},
    "int8_fp8": {"INT8", "FP8"},
    "int8_fp8_fast": {"INT8", "FP8"},
}
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Maximum bytes per program, from the CUDA programming guide."""
TENSOR_MEMORY = 512
"""Columns of tensor memory on compute capability 10.0."""
KNOWN_SPILLS = {
    # Coarse tiles, also combined with means and masks. The accesses per step are in the coarse loop, not in the main
    # loop. Triton 3.9.
    (80, "attention_kernel, int8_fp16 similarity attention"): (16, 0),
    (89, "attention_kernel, int8_fp8 threshold"): (80, 13),
    (89, "attention_kernel, int8_fp8 means"): (656, 113),
    (90, "attention_kernel, int8_fp8"): (24, 0),
    (90, "attention_kernel, int8_fp8 D 64"): (8, 0),
    (90, "attention_kernel, int8_fp8 every tile"): (80, 0),
    (90, "attention_kernel, int8_fp8 keys"): (24, 0),
    (90, "attention_kernel, int8_fp8 means"): (136, 0),
    (90, "attention_kernel, int8_fp8 packed"): (224, 10),
    (90, "attention_kernel, int8_fp8 threshold"): (88, 0),
    (90, "attention_kernel, int8_fp8 window"): (144, 0),
    (120, "attention_kernel, int8_fp8"): (48, 0),
    (120, "attention_kernel, int8_fp8 means"): (800, 104),
    (120, "attention_kernel, int8_fp8 threshold"): (32, 0),
    (89, "attention_kernel, int8_fp16 similarity attention"): (16, 0),
    # ptxas of Triton 3.9 keeps loop variables on the stack around a large branch. With 3.6, these kernels use at most
    # 60 % of the bytes, and none in a step.
    (90, "attention_kernel, int8_fp8_fast on hopper"): (128, 2),
    (90, "attention_kernel, int8_fp8_fast D 64 on hopper"): (32, 0),
    (90, "attention_kernel, int8_fp8_fast D 256 on hopper"): (152, 2),
    (90, "attention_kernel, int8_fp8_fast causal on hopper"): (144, 16),
    (90, "attention_kernel, int8_fp8_fast causal every tile on hopper"): (144, 16),
    (90, "attention_kernel, int8_fp8_fast means on hopper"): (136, 16),  # tokens first
    (90, "attention_kernel, int8_fp8 on hopper"): (48, 0),
    (90, "attention_kernel, int8_fp16 on hopper"): (24, 0),
    (90, "attention_kernel, none on hopper"): (16, 0),
    (90, "attention_kernel, none D 256 on hopper"): (48, 0),
    (90, "attention_kernel, int8_fp8_fast window on hopper"): (144, 16),
    (90, "attention_kernel, int8_fp8_fast packed on hopper"): (144, 16),
    (90, "attention_kernel, none window on hopper"): (24, 0),
    # Sums of keys and values together. Shapes that do not spill were slower on an H200 (docs/lab/hopper.md).
    (89, "summarize_kernel, int8_fp8 means"): (56, 0),
    (90, "summarize_kernel, int8_fp8 means"): (112, 0),
    (90, "summarize_kernel, int8_fp8 packed"): (112, 0),
    (100, "summarize_kernel, int8_fp8 means"): (112, 0),
    (120, "summarize_kernel, int8_fp8 means"): (96, 0),
    (120, "attention_kernel, int8_fp16"): (16, 2),
}
"""Allowed bytes of stack and stack accesses per step: the maximum over Triton 3.6 and 3.9. A lower register limit can
be worth some spills (`configs`). Most of the bytes are for rare cases, such as a masked tile or a tile with a peak."""


def compile_for(architecture: int, cache: Path, *options: str) -> list[dict[str, Any]]:
    """Compile all kernels and return the fields of `worker.Result` for each."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    fusion = {"TRITON_DEFAULT_FP_FUSION": "0"}  # the default from Triton 3.10 on
    worker = subprocess.run(
        [sys.executable, str(WORKER), str(architecture), *options],
        env={**environment, **fusion, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert worker.returncode == 0, worker.stderr[-4000:]
    return [json.loads(line) for line in worker.stdout.splitlines()]


def faults(result: dict[str, Any], architecture: int) -> list[str]:
    """Return descriptions of all violated limits of a compiled kernel."""
    found = []
    if result["shared"] > SHARED_MEMORY[architecture]:
        found.append(f"expected at most {SHARED_MEMORY[architecture]} bytes of shared memory, got {result['shared']}")
    if result["tensor_memory"] > TENSOR_MEMORY:
        found.append(f"expected at most {TENSOR_MEMORY} columns of tensor memory, got {result['tensor_memory']}")
    instructions = result["instructions"]
    if not result["is_fused"]:
        found.append("expected fused multiply-adds")
    spills = sum(instructions.get(name, 0) for name in ("LDL", "STL"))
    known, per_step = KNOWN_SPILLS.get((architecture, f"{result['kernel']}, {result['case']}"), (0, 0))
    if result["stack"] > known or result["local"] or (spills and not known):
        found.append(f"expected at most {known} bytes of stack, got {result['stack']}, {spills} loads and stores")
    if result["spills_per_step"] > per_step:
        found.append(f"expected at most {per_step} stack accesses per step, got {result['spills_per_step']}")
    products = {
        "attention_kernel": PRODUCTS[result["case"].split()[0]],
        "score_kernel": {"16 bits"},
        "hopper_score_kernel": {"16 bits"},
        "mark_peaks_kernel": {"INT8"},
    }
    expected = [MATRIX_INSTRUCTIONS[architecture][kind] for kind in products.get(result["kernel"], ())]
    used = {name for name in instructions if name.endswith("MMA")}
    coarse = COARSE_INSTRUCTIONS.get(architecture, {"HMMA"}) if result["case"].startswith("int8") else set()
    if not all(used & names for names in expected) or used - set().union(coarse, *expected):
        found.append(f"expected the matrix instructions {expected}, got {sorted(used)}")
    if result["case"].endswith("on hopper") and result["kernel"] == "attention_kernel":
        found += hopper_faults(result)
    return found


def assert_no_faults(results: list[dict[str, Any]], architecture: int) -> None:
    wrong = [
        f"{result['kernel']}, {result['case']}: {fault}" for result in results for fault in faults(result, architecture)
    ]
    assert not wrong, "\n".join(wrong)


def hopper_faults(result: dict[str, Any]) -> list[str]:
    """Return descriptions of instructions that would slow down a warp-specialized kernel."""
    instructions = result["instructions"]
    found = []
    if not instructions.get("UTMALDG"):
        found.append("expected TMA loads (UTMALDG)")
    products = sum(count for name, count in instructions.items() if name.endswith("GMMA"))
    if instructions["WARPGROUP"] >= products:  # ptxas adds two per product if it serializes them
        found.append(f"expected fewer fences and waits than {products} products, got {instructions['WARPGROUP']}")
    if "fast" in result["case"]:
        if instructions["MUFU"] >= 64:  # a thread holds 32 or 64 scores of a tile
            found.append(f"expected P without exp2, got {instructions['MUFU']}")
        if not instructions.get("F2IP"):
            found.append("expected FP8 bits that are rounded and packed by one instruction (F2IP), got none")
    return found


# Compiling for 9.0 takes more than a minute on one core. It is the only check of the Hopper kernel without a GPU,
# because Triton cannot interpret it. `make test-slow` compiles for the other architectures in four minutes on one core.
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(found, marks=[pytest.mark.slow] * (found != 90)) for found in MATRIX_INSTRUCTIONS],
    ids="sm_{}".format,
)
def test_kernels_fit_their_architecture(architecture: int, tmp_path: Path) -> None:
    results = compile_for(architecture, tmp_path)
    with_fp8 = architecture >= FP8_ARCHITECTURE
    expected = KERNELS - (set() if with_fp8 else WITH_FP8) | (HOPPER_KERNELS if architecture == 90 else set())
    assert {result["kernel"] for result in results} == expected
    assert_no_faults(results, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SLOW, ids="sm_{}".format)
def test_slow_cases_fit_their_architecture(architecture: int, tmp_path: Path) -> None:
    results = compile_for(architecture, tmp_path, "slow")
    assert {result["case"] for result in results} == SLOW[architecture]
    assert_no_faults(results, architecture)


def test_spills_per_step_count_the_innermost_loop_without_rare_cases() -> None:
    rare = [(16 * index, "LDL", None) for index in range(4, 40)]
    rare[20:25] = [(16 * 24, "HMMA", None), *rare[21:24], (16 * 28, "BRA", 16 * 24)]  # a nested loop
    code = [
        (0, "STL", None),  # before the loop
        (16, "IGMMA", None),
        (32, "LDL", None),
        (48, "BRA", 40 * 16),
        *rare,
        (40 * 16, "STL", None),
        (41 * 16, "BRA", 16),
        (42 * 16, "STL", None),
        (43 * 16, "BRA", 0),  # an outer loop
    ]
    assert spills_per_step(code) == 2
    others = [(address, re.sub("IGMMA|HMMA", "FFMA", name), target) for address, name, target in code]
    assert spills_per_step(others) == 0
