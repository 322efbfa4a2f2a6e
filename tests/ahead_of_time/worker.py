"""Compile every kernel for one architecture without a GPU and print a `Result` per kernel, as JSON lines.

    python worker.py 90
    python worker.py 120 slow

The launchers run on CPU tensors. A fake Triton driver reports the architecture, and each launch stops after
compilation, so signatures, alignments, configurations and options are those of real calls.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sparge.backends import base
from sparge.backends.gpu import launch
from sparge.backends.gpu.stages.order import move
from sparge.backends.gpu.stages.replacement import replaced_bias
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import Shape
from sparge.masks.segments import Segment, tables_of
from sparge.options.rules import Budget, TopCdf
from sparge.options.scores import Mean, Moment, Spread

BATCH, HEADS, KV_HEADS = 1, 4, 2
FP8_ARCHITECTURE = 89
HOPPER_ARCHITECTURE = 90
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)([^;]*)", re.MULTILINE)
MIN_SKIPPED_INSTRUCTIONS = 20
"""A forward branch inside a loop that skips more instructions than this guards a rare case."""


@dataclass(frozen=True)
class Case:
    """Options of one attention call, and the kernels to compile for it.

    Attributes:
        attn_mask: None, "keys" (a bool mask over keys), or "bool" or "bias" (full masks).
        has_similarity: predict with block means, a similarity threshold and TopCdf.
        length: number of tokens. At `peak_handling.EVERY_TILE_KEYS`, the kernel searches every tile for a peak.
        kernels: regular expression; calls share most of their kernels, and each is compiled once.
        backend: "triton", or "hopper" for compute capability 9.0.
        is_typical: False for a case that resembles another case; it is compiled for 9.0 only.
        is_packed: pack two segments of different lengths.
    """

    quantization: str
    head_dim: int = 128
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    pv_threshold: float | None = None
    skipped: str = "drop"
    attn_mask: str | None = None
    has_similarity: bool = False
    length: int = 16384
    kernels: str = "attention"
    backend: str = "triton"
    is_typical: bool = True
    is_packed: bool = False


CASES = {
    "int8_fp8": Case("int8_fp8", kernels="attention|key_value|summarize|peaks"),
    "int8_fp8 D 64": Case("int8_fp8", head_dim=64),
    "int8_fp8 every tile": Case("int8_fp8", is_causal=True, length=4096, is_typical=False),
    "int8_fp8 threshold": Case("int8_fp8", pv_threshold=-8.0),
    "int8_fp8 means": Case("int8_fp8", skipped="mean", kernels="attention|summarize|replaced"),
    "int8_fp8 keys": Case("int8_fp8", attn_mask="keys", is_typical=False),
    "int8_fp16": Case("int8_fp16", kernels="."),
    "int8_fp16 D 64": Case("int8_fp16", head_dim=64, is_typical=False),
    "int8_fp16 similarity": Case(
        "int8_fp16", is_causal=True, attn_mask="keys", has_similarity=True, kernels="similarity|select"
    ),
    "int8_fp16 similarity attention": Case("int8_fp16", is_causal=True, attn_mask="keys", has_similarity=True),
    "none": Case("none"),
    "none D 64": Case("none", head_dim=64, is_typical=False),
    "none bool": Case("none", attn_mask="bool", length=256, kernels="mask_kernel|sample_kernel"),
    "none bias": Case("none", attn_mask="bias", length=256, kernels="mask_kernel|sample_kernel|score"),
    "none bias attention": Case("none", attn_mask="bias", length=256),
    "int8_fp8_fast on hopper": Case("int8_fp8_fast", backend="hopper"),
    "int8_fp8_fast causal on hopper": Case("int8_fp8_fast", is_causal=True, backend="hopper"),
    "int8_fp8_fast D 64 on hopper": Case("int8_fp8_fast", head_dim=64, backend="hopper"),
    "int8_fp8_fast D 256 on hopper": Case("int8_fp8_fast", head_dim=256, backend="hopper"),
    "int8_fp8_fast causal every tile on hopper": Case("int8_fp8_fast", is_causal=True, length=4096, backend="hopper"),
    "int8_fp8_fast means on hopper": Case("int8_fp8_fast", skipped="mean", kernels="attention|score", backend="hopper"),
    "int8_fp8_fast stages of means": Case("int8_fp8_fast", skipped="mean", kernels="replaced|query", backend="hopper"),
    "int8_fp8_fast threshold on hopper": Case("int8_fp8_fast", pv_threshold=-8.0, backend="hopper"),
    "int8_fp8 on hopper": Case("int8_fp8", backend="hopper"),
    "int8_fp16 on hopper": Case("int8_fp16", is_causal=True, backend="hopper"),
    "none on hopper": Case("none", backend="hopper"),
    "int8_fp8 window": Case("int8_fp8", window=(5000, 0), kernels="attention|peaks|score|select", is_typical=False),
    "int8_fp8_fast window on hopper": Case("int8_fp8_fast", window=(5000, 0), backend="hopper"),
    "none window on hopper": Case("none", window=(5000, 0), backend="hopper"),
    "none D 256 on hopper": Case("none", head_dim=256, backend="hopper"),
    "int8_fp8 packed": Case("int8_fp8", skipped="mean", kernels=".", is_packed=True, is_typical=False),
    "int8_fp8_fast packed on hopper": Case("int8_fp8_fast", is_causal=True, backend="hopper", is_packed=True),
}


SLOW = {
    90: {
        *("int8_fp8 D 64", "int8_fp8 every tile", "int8_fp8 keys", "int8_fp8 means", "int8_fp8 packed"),
        *("int8_fp8 threshold", "int8_fp8 window", "int8_fp8 on hopper"),
        *("int8_fp16 D 64", "int8_fp16 similarity attention", "none D 64", "none bias attention"),
        *("none D 256 on hopper", "none window on hopper"),
        *("int8_fp8_fast D 64 on hopper", "int8_fp8_fast D 256 on hopper", "int8_fp8_fast causal on hopper"),
        *("int8_fp8_fast causal every tile on hopper", "int8_fp8_fast means on hopper"),
        *("int8_fp8_fast threshold on hopper", "int8_fp8_fast window on hopper"),
    },
    100: {"int8_fp8 D 64", "int8_fp8 threshold", "none bias", "none bias attention"},
}
SLOW[120] = SLOW[100]
"""Cases, by architecture, that only `make test-slow` compiles.

On 9.0, the other cases cover every kernel, and every mode of both attention kernels, at D 128. The slow ones change a
width, a mask or an option of the attention kernel. tests/interpreted checks the results of these options, except those
of the Hopper kernel, which Triton cannot interpret. On 10.0 and 12.0, the slow cases resemble cases of 8.9 and 9.0.
"""


@dataclass(frozen=True)
class Result:
    """Resources and instructions of a compiled kernel.

    Attributes:
        registers, stack, local: per thread; stack and other local memory in bytes.
        spills_per_step: stack accesses in one step of the worst innermost loop with matrix products.
        is_fused: products and sums are contracted to one instruction (FMA).
        shared, tensor_memory: per program; bytes of shared memory, columns of tensor memory.
        instructions: counts by mnemonic.
    """

    case: str
    kernel: str
    registers: int
    stack: int
    local: int
    spills_per_step: int
    is_fused: bool
    shared: int
    tensor_memory: int
    instructions: dict[str, int]


class Device:
    """A fake Triton driver with the methods that compilation uses."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def dump(binary: Path, option: str) -> str:
    """Run cuobjdump on a compiled kernel."""
    return subprocess.run([CUOBJDUMP, option, binary], check=True, capture_output=True, text=True).stdout


def inspect(case: str, kernel: str, compiled: Any, folder: Path) -> Result:
    """Return the resources and instructions of a kernel. Disassemble it only if it has matrix products or spills."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    usage = dump(binary, "-res-usage")
    found = RESOURCES.search(usage)
    assert found is not None, usage[:1000]
    registers, stack, local = map(int, found.groups())
    code = dump(binary, "-sass") if "mma" in compiled.asm["ptx"] or stack or local else ""
    instructions = [
        (int(address, 16), name, int(target[1], 16) if (target := re.search(r"0x([0-9a-f]+)", rest)) else None)
        for address, name, rest in INSTRUCTION.findall(code)
    ]
    return Result(
        case=case,
        kernel=kernel,
        registers=registers,
        stack=stack,
        local=local,
        spills_per_step=spills_per_step(instructions),
        is_fused=compiled.metadata.enable_fp_fusion,
        shared=compiled.metadata.shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0,
        instructions=dict(Counter(name for _, name, _ in instructions)),
    )


def spills_per_step(instructions: list[tuple[int, str, int | None]]) -> int:
    """Count stack accesses in one step of the worst innermost loop with matrix products, without its rare cases."""
    index_of = {address: index for index, (address, _, _) in enumerate(instructions)}
    jumps = {
        index: index_of[target]
        for index, (_, name, target) in enumerate(instructions)
        if name == "BRA" and target is not None and target in index_of
    }
    products = {name for _, name, _ in instructions if name.endswith("MMA")}
    # If the kernel has warpgroup products, other products belong to a rare stage.
    products = {name for name in products if name.endswith("GMMA")} or products
    loops = [
        (first, last)
        for last, first in jumps.items()
        if first < last and any(name in products for _, name, _ in instructions[first:last])
    ]
    most = 0
    for first, last in loops:
        if any((other != (first, last)) and first <= other[0] and other[1] <= last for other in loops):
            continue  # not the innermost
        index, spills = first, 0
        while index <= last:
            spills += instructions[index][1] in ("LDL", "STL")
            target = jumps.get(index, 0)
            index = target if index + MIN_SKIPPED_INSTRUCTIONS < target <= last else index + 1
        most = max(most, spills)
    return most


def run_case(case: Case) -> None:
    """Launch the whole pipeline on zeros, and the kernels that `GpuBackend.attention` does not launch."""
    lengths = [case.length, case.length - 100] if case.is_packed else [case.length]
    batch, tokens = (1, sum(lengths)) if case.is_packed else (BATCH, case.length)
    query, key, value = (
        torch.zeros(batch, heads, tokens, case.head_dim, dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    if case.skipped == "mean":  # image models store tokens before heads
        query, key, value = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value))
    attn_mask = None
    if case.attn_mask == "keys":
        attn_mask = torch.ones(BATCH, 1, 1, case.length, dtype=torch.bool)
    elif case.attn_mask == "bool":
        attn_mask = torch.ones(1, 1, case.length, case.length, dtype=torch.bool)
    elif case.attn_mask == "bias":
        attn_mask = torch.zeros(1, 1, case.length, case.length, dtype=torch.bfloat16)
    segments = None
    if case.is_packed:
        parts = tuple(
            Segment(case.length * index, length, case.length * index, length) for index, length in enumerate(lengths)
        )
        results = torch.zeros(tokens, HEADS, case.head_dim, dtype=torch.bfloat16), torch.zeros(HEADS, tokens)
        segments = tables_of(parts, HEADS, torch.device("cpu")).with_results(*results)
        query, key, value = (tensor.expand(len(parts), -1, -1, -1) for tensor in (query, key, value))
    request = Call(
        Shape(len(query), HEADS, KV_HEADS, case.length, case.length, case.head_dim, case.head_dim),
        is_causal=case.is_causal,
        window=case.window,
        scale=case.head_dim**-0.5,
        sparsity=TopCdf(0.9, similarity_threshold=0.5) if case.has_similarity else Budget(0.5),
        score=Mean() if case.has_similarity else Spread() if case.skipped == "mean" else Moment(),
        quantization=case.quantization,
        pv_threshold=case.pv_threshold,
        skipped=case.skipped,
        attn_mask=attn_mask,
        segments=segments,
    )
    totals = torch.zeros(3, dtype=torch.int64)
    base.get(case.backend).attention(query, key, value, request, totals=totals)
    if request.skipped == "mean":  # only `block_sparse_attention` launches this kernel
        counts = torch.zeros(request.shape.batch, HEADS, request.shape.q_blocks, dtype=torch.int32)
        indices = counts[..., None].expand(-1, -1, -1, request.shape.kv_blocks).contiguous()
        mask = BlockMask(counts, indices, counts, case.length, case.length)
        replaced_bias(mask, torch.zeros(request.shape.batch, KV_HEADS, request.shape.kv_blocks), request)
    move(query, torch.arange(query.shape[2]), 0, torch.empty_like(query))


def cases_for(architecture: int, *, is_slow: bool) -> dict[str, Case]:
    """Return the cases that an architecture supports: those in `SLOW`, or all others."""
    slow = SLOW.get(architecture, set())
    return {
        name: case
        for name, case in CASES.items()
        if (name in slow) == is_slow
        and (case.quantization != "int8_fp8" or architecture >= FP8_ARCHITECTURE)
        and (architecture == HOPPER_ARCHITECTURE or (case.is_typical and case.backend != "hopper"))
    }


def main(architecture: int, *, is_slow: bool = False) -> None:
    """Compile all cases for an architecture and print their results."""
    driver.set_active(Device(architecture))
    launch._architecture = lambda *_: architecture
    compile_and_launch = JITFunction.run
    launched: list[tuple[str, Any]] = []
    pattern = ""

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:  # noqa: ARG001
        if re.search(pattern, self.__name__):
            launched.append((self.__name__, compile_and_launch(self, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = compile_only
    with TemporaryDirectory() as folder:
        for name, case in cases_for(architecture, is_slow=is_slow).items():
            launched.clear()
            pattern = case.kernels
            run_case(case)
            for kernel, compiled in launched:
                result = inspect(name, kernel, compiled, Path(folder))
                sys.stdout.write(json.dumps(asdict(result)) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), is_slow="slow" in sys.argv[2:])
