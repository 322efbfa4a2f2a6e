"""``sparge bench``: compare sparge with its rivals on one CUDA device, with speed, density and error in each row.

Suites: "end_to_end" (a whole call against the dense kernels of `rivals`), "kernel" (attention over random blocks alone,
against FlexAttention), "error" (quantized dense attention against exact attention), "memory" (peak beyond inputs and
output), "crossover" (the smallest sizes at which sparse calls are faster), "hopper" (the Hopper kernel against the
Triton kernel), "numerics" (errors of every INT8/FP8 mode on families of inputs, against their
limits), "packed" (a call over packed segments against
a loop over them, and against the dense kernels), "masks" (a whole call under a full mask, against SDPA with the same
mask),
"host" (launch overhead per call, see `host`). Errors are those of 256 queries per head, see `evaluate.oracle`. A column
that could not be measured is None; ``problems`` of its row holds the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import cache, partial
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge import api
from sparge.backends import base
from sparge.backends.gpu.backend import GpuBackend
from sparge.bench import host
from sparge.bench.cases import (
    CROSSOVER_TOPKS,
    ERROR_TARGETS,
    QUANTIZATIONS,
    Group,
    Problem,
    Row,
    executed_flop,
    groups_of,
    random_blocks,
    ratio,
    tflops,
)
from sparge.bench.inputs import make_inputs
from sparge.bench.masks import MASKS, exact_under_mask
from sparge.bench.numerics import family_named, inputs_of, numerics_rows
from sparge.bench.rivals import RIVALS, fa4_version, fastest, in_turn
from sparge.bench.timing import (
    Timing,
    Variant,
    attempt,
    copy_bandwidth,
    peak_extra_bytes,
    reason,
    time_on_cuda,
)
from sparge.call import Call
from sparge.evaluate.machine import Gpu, describe_gpu, describe_machine
from sparge.evaluate.oracle import exact_rows, sampled_error, sampled_queries
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q
from sparge.options.common import Quantization
from sparge.options.rules import Budget, Dense
from sparge.varlen import varlen_attention

TURNS, QUICK_TURNS = 5, 2
MEMORY_TOPK = 0.5

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Bench:
    """The device and functions of a measurement. Tests replace the parts that need a CUDA device."""

    device: torch.device
    backend: str
    quantization: Quantization
    prepare: Callable[..., Any]
    """`pipeline.prepare`: everything before the attention kernel."""
    kernel: Callable[[str], Callable[..., Any]]
    """Return the launcher of a backend's attention kernel."""
    time: Callable[[dict[str, Variant], int], dict[str, Timing]]
    peak_extra_bytes: Callable[[Callable[[], Tensor]], int]
    bytes_per_s: float
    repeat: Callable[[Call, Sequence[Tensor], Callable[[], Any]], None]
    """Run `prepare` as in repeated calls, which replay a recording if one exists."""
    turns: int = TURNS


def _kernel_of(backend: str) -> Callable[..., Any]:
    found = base.get(backend)
    assert isinstance(found, GpuBackend)
    return found.launcher


def cuda_bench(quick: bool) -> Bench:
    """Measure on the current CUDA device, in the quantization that "auto" takes there."""
    from sparge.backends.gpu import pipeline

    device = torch.device("cuda", torch.cuda.current_device())
    backend = base.resolve("auto", device)
    return Bench(
        device=device,
        backend=backend,
        quantization=cast(Quantization, base.resolve_quantization("auto", backend, device)),
        prepare=pipeline.prepare,
        kernel=_kernel_of,
        time=time_on_cuda,
        peak_extra_bytes=peak_extra_bytes,
        bytes_per_s=copy_bandwidth(),
        repeat=repeat_preparation,
        turns=QUICK_TURNS if quick else TURNS,
    )


def repeat_preparation(call: Call, inputs: Sequence[Tensor], prepare: Callable[[], Any]) -> None:
    """Run the stages before the attention kernel: recorded the first time, replayed after that."""
    from sparge.backends.gpu.replay import replayed

    def run() -> tuple[Tensor, ...]:
        operands, mask = prepare()
        lists = () if mask is None else (mask.kv_num_blocks, mask.kv_indices)
        return operands.query, operands.key, operands.value, *lists

    replayed(call, "preparation", inputs, run)


def run_bench(suites: tuple[str, ...], quick: bool) -> Iterator[Row]:
    """Yield rows of the suites as they are measured, each with device, versions, commit and time.

    The suite "host" alone also runs without a CUDA device.
    """
    bench = cuda_bench(quick) if suites != ("host",) else None
    gpu = describe_gpu() if torch.cuda.is_available() else None
    for group in groups_of(suites, quick):
        rows = host_suite(group, quick) if bench is None or group.suite == "host" else measure(bench, group)
        for row in rows:
            yield {**row, "quick": quick, **stamp(gpu)}


def host_suite(group: Group, quick: bool) -> Iterator[Row]:
    """Return rows of the suite "host" with the host's processor, on the current CUDA device or else on the CPU."""
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
    problem = group.problem if has_cuda else host.CPU_PROBLEM
    turns = host.QUICK_TURNS if quick else host.TURNS
    for row in host.host_rows(problem, device, turns=turns):
        yield {**row, **asdict(describe_machine())}


def stamp(gpu: Gpu | None) -> Row:
    """Return the device, versions, commit and time that every row contains."""
    row: Row = {"time": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    if gpu is not None:
        row |= {**asdict(gpu), "cudnn": torch.backends.cudnn.version(), "flash_attn_4": fa4_version()}
    return row


def measure(bench: Bench, group: Group) -> Iterator[Row]:
    """Return the rows of one group; one row with the reason if the whole group fails."""
    case = {"suite": group.suite, "backend": bench.backend, **group.problem.fields(), "turns": bench.turns}
    case |= {"family": group.family} if group.family else {}
    case |= {"mask": group.mask} if group.mask else {}
    try:
        torch.cuda.empty_cache()  # free memory of earlier groups; does nothing without CUDA
        make = partial(inputs_of, group.family) if group.family else make_inputs
        inputs = make(group.problem, bench.device)
        for row in MEASURES[group.suite](bench, group, inputs):
            yield {**case, **row}
    except Exception as error:
        # Out of memory, an unsupported card: the other groups still run.
        yield {**case, "asked_density": group.density, "problems": {"case": reason(error)}}


def _end_to_end(bench: Bench, group: Group, inputs: Inputs) -> Iterator[Row]:
    problem = group.problem
    rows = sampled_queries(problem.queries, bench.device)
    exact = exact_rows(*inputs, rows, is_causal=problem.is_causal).output
    variants = _rivals(inputs, problem)
    for topk in group.topks:
        variants[f"sparge {topk}"] = _sparge(bench, inputs, problem, topk)
        variants[f"prepare {topk}"], variants[f"attend {topk}"] = _stages(bench, inputs, problem, topk)
    timings = bench.time(variants, bench.turns)
    common: dict[str, str] = {}
    errors = {
        f"{name}_relative_l1": attempt(common, name, partial(_error, variants[name].once, rows, exact))
        for name in RIVALS
    }
    for topk in group.topks:
        named = {name: timings[f"{name} {topk}"] for name in ("sparge", "prepare", "attend")}
        named |= {name: timings[name] for name in RIVALS}
        problems = _problems(named, common)
        density = attempt(problems, "density", partial(_density, bench, inputs, problem, topk))
        error = attempt(problems, "sparge", partial(_error, variants[f"sparge {topk}"].once, rows, exact))
        yield {
            "topk": topk,
            "quantization": bench.quantization,
            **_speeds(problem, named),
            "density": density,
            "relative_l1": error,
            **errors,
            "prepare_ms": named["prepare"].ms,
            "attend_ms": named["attend"].graph_ms,
            "floor_ms": 1e3 * problem.preparation_bytes / bench.bytes_per_s,
            "copy_tb_per_s": bench.bytes_per_s / 1e12,
            "problems": problems,
        }


def _crossover(bench: Bench, group: Group, inputs: Inputs) -> Iterator[Row]:
    problem = group.problem
    variants = _rivals(inputs, problem)
    variants |= {f"sparge {topk}": _sparge(bench, inputs, problem, topk) for topk in CROSSOVER_TOPKS}
    timings = bench.time(variants, bench.turns)
    for topk in CROSSOVER_TOPKS:
        named = {name: timings[name] for name in RIVALS} | {"sparge": timings[f"sparge {topk}"]}
        problems = _problems(named)
        density = attempt(problems, "density", partial(_density, bench, inputs, problem, topk))
        yield {
            "topk": topk,
            "quantization": bench.quantization,
            **_speeds(problem, named),
            "density": density,
            "problems": problems,
        }


def _kernel(bench: Bench, group: Group, inputs: Inputs) -> Iterator[Row]:
    yield from _given(bench, group, inputs, {name: (name, bench.backend) for name in _quantizations(bench)})


def _hopper(bench: Bench, group: Group, inputs: Inputs) -> Iterator[Row]:
    base.resolve("hopper", bench.device)  # raises with the reason if it is unavailable
    kernels = {name: (name, "hopper") for name in ("int8_fp8_fast", "int8_fp8", "none")} | {
        "twin int8_fp8": ("int8_fp8", "triton")
    }
    yield from _given(bench, group, inputs, kernels)


def _quantizations(bench: Bench) -> tuple[str, ...]:
    """Return the quantizations of the backend, fastest first."""
    return tuple(name for name in QUANTIZATIONS if name in base.get(bench.backend).quantizations)


def _given(bench: Bench, group: Group, inputs: Inputs, kernels: dict[str, tuple[str, str]]) -> Iterator[Row]:
    """Return rows of kernels, given as (quantization, backend) by name, over the same random blocks."""
    problem = group.problem
    assert group.density is not None
    kept = random_blocks(problem.shape, group.density, bench.device, is_causal=problem.is_causal)
    mask = BlockMask.from_dense(kept, q_len=problem.queries, kv_len=problem.tokens, is_causal=problem.is_causal)
    rows = sampled_queries(problem.queries, bench.device)
    exact = exact_rows(*inputs, rows, is_causal=problem.is_causal, kept=kept).output
    variants = {name: _given_blocks(bench, inputs, problem, mask, *kernel) for name, kernel in kernels.items()}
    if group.with_flex:
        variants["flex"] = _flex(inputs, mask)
    timings = bench.time(variants, bench.turns)
    flop = executed_flop(int(kept.sum()), problem.head_dim)
    for name, timing in timings.items():
        problems = _problems({name: timing})
        # FlexAttention may refuse capture; a call of milliseconds hides its launch.
        ms = timing.ms if timing.graph_ms is None else timing.graph_ms
        error = attempt(problems, name, partial(_error, variants[name].once, rows, exact))
        yield {
            "kernel": name,
            "asked_density": group.density,
            "density": mask.density(),
            "ms": timing.ms,
            "graph_ms": timing.graph_ms,
            "executed_tops": tflops(flop, ms),
            "relative_l1": error,
            "problems": problems,
        }


def _dense_errors(bench: Bench, group: Group, inputs: Inputs) -> Iterator[Row]:
    problem = group.problem
    rows = sampled_queries(problem.queries, bench.device)
    exact = exact_rows(*inputs, rows, is_causal=problem.is_causal).output
    runs: dict[str, Callable[[], object]] = {
        name: partial(
            api.attention,
            *inputs,
            is_causal=problem.is_causal,
            sparsity=Dense(),
            quantization=name,
            backend=bench.backend,
        )
        for name in _quantizations(bench)
    }
    runs |= {name: variant.once for name, variant in _rivals(inputs, problem).items()}
    for name, run in runs.items():
        problems: dict[str, str] = {}
        error = attempt(problems, name, partial(_error, run, rows, exact))
        yield {"kernel": name, "relative_l1": error, "target": ERROR_TARGETS.get(name), "problems": problems}


def _memory(bench: Bench, group: Group, inputs: Inputs) -> Iterator[Row]:
    call = _sparge(bench, inputs, group.problem, MEMORY_TOPK)
    problems: dict[str, str] = {}
    attempt(problems, "sparge", call.once)  # compiles and loads the kernels
    extra = attempt(problems, "sparge", partial(bench.peak_extra_bytes, call.run))
    input_bytes = sum(tensor.nbytes for tensor in inputs)
    yield {
        "topk": MEMORY_TOPK,
        "quantization": bench.quantization,
        "input_bytes": input_bytes,
        "output_bytes": inputs[0].nbytes,
        "extra_bytes": extra,
        "extra_share": None if extra is None else extra / input_bytes,
        "problems": problems,
    }


def _numerics(bench: Bench, group: Group, inputs: Inputs) -> Iterator[Row]:
    assert group.family is not None
    yield from numerics_rows(bench.backend, family_named(group.family), group.problem, inputs)


def _packed(bench: Bench, group: Group, inputs: Inputs) -> Iterator[Row]:
    problem = group.problem
    alone = [
        (q[None, :, :length], k[None, :, :length], v[None, :, :length])
        for q, k, v, length in zip(*inputs, problem.lengths, strict=True)
    ]
    rows = [sampled_queries(length, bench.device) for length in problem.lengths]
    exact = [
        exact_rows(*segment, sampled, is_causal=problem.is_causal).output
        for segment, sampled in zip(alone, rows, strict=True)
    ]
    variants = {name: rival.packed(alone, problem.is_causal) for name, rival in RIVALS.items()}
    for topk in group.topks:
        variants[f"loop {topk}"] = in_turn([_sparge(bench, segment, problem, topk) for segment in alone])
        variants[f"sparge {topk}"] = _sparge_packed(bench, alone, problem, topk)
    timings = bench.time(variants, bench.turns)
    for topk in group.topks:
        named = {name: timings[name] for name in RIVALS}
        named |= {name: timings[f"{name} {topk}"] for name in ("sparge", "loop")}
        problems = _problems(named)
        once = variants[f"sparge {topk}"].once
        density = attempt(problems, "density", partial(_packed_density, bench, alone, problem, topk))
        error = attempt(problems, "sparge", partial(_packed_error, once, problem.lengths, rows, exact))
        fa4 = partial(_packed_error, variants["fa4"].once, problem.lengths, rows, exact)
        yield {
            "topk": topk,
            "quantization": bench.quantization,
            **_speeds(problem, named),
            "loop_ms": named["loop"].ms,
            "loop_graph_ms": named["loop"].graph_ms,
            "loop_speedup": ratio(named["loop"].ms, named["sparge"].ms),
            "density": density,
            "relative_l1": error,
            "fa4_relative_l1": attempt(problems, "fa4", fa4),
            "problems": problems,
        }


def _sparge_packed(bench: Bench, alone: list[Inputs], problem: Problem, topk: float) -> Variant:
    """Return a call of `varlen_attention` on one backend, with tokens first and bounds on the host."""
    tokens = [torch.cat([part[0].transpose(0, 1) for part in side]) for side in zip(*alone, strict=True)]
    bounds = [0, *accumulate(problem.lengths)]
    sparsity = Dense() if topk == 1.0 else Budget(topk)
    call = partial(varlen_attention, *tokens, bounds, bounds, causal=problem.is_causal, sparsity=sparsity)
    return Variant(partial(call, quantization=bench.quantization, backend=bench.backend))


def _packed_density(bench: Bench, alone: list[Inputs], problem: Problem, topk: float) -> float:
    """Return the density over all segments."""
    if topk == 1.0:
        return 1.0
    masks = [api.predict(*part[:2], topk=topk, is_causal=problem.is_causal, backend=bench.backend) for part in alone]
    kept = sum(int(mask.kv_num_blocks.sum()) for mask in masks)
    return kept / sum(int(mask.visible_num_blocks.sum()) for mask in masks)


def _packed_error(run: Callable[[], Any], lengths: list[int], rows: list[Tensor], exact: list[Tensor]) -> float:
    parts = zip(run().split(lengths), rows, strict=True)
    found = torch.cat([output[sampled].transpose(0, 1)[None] for output, sampled in parts], 2)
    return sampled_error(found, torch.arange(found.shape[2], device=found.device), torch.cat(exact, 2))


def _masks(bench: Bench, group: Group, inputs: Inputs) -> Iterator[Row]:
    """Return rows under a full mask, with the quantization and the backend that "auto" selects there."""
    problem = group.problem
    assert group.mask is not None
    mask = MASKS[group.mask](problem, bench.device)
    quantization = base.resolve_quantization("auto", bench.backend, bench.device, has_mask=True)
    rows = sampled_queries(problem.queries, bench.device)
    exact = exact_under_mask(*inputs, rows, mask)
    options: Row = {"attn_mask": mask, "backend": bench.backend}
    variants = {"sdpa": Variant(partial(F.scaled_dot_product_attention, *inputs, attn_mask=mask))}
    for topk in group.topks:
        call = replace(_call(problem, Budget(topk), quantization), attn_mask=mask)
        prepare = partial(bench.prepare, *inputs, call, with_mask=True, with_operands=True)
        serving = base.get(bench.backend).serving(call, inputs[0].dtype).name
        variants[f"sparge {topk}"] = Variant(
            partial(api.attention, *inputs, topk=topk, quantization=cast(Quantization, quantization), **options)
        )
        variants[f"prepare {topk}"], variants[f"attend {topk}"] = (
            Variant(partial(bench.repeat, call, (*inputs, mask), prepare)),
            _attend(bench, call, prepare, serving),
        )
    timings = bench.time(variants, bench.turns)
    for topk in group.topks:
        named = {name: timings[f"{name} {topk}"] for name in ("sparge", "prepare", "attend")}
        problems = _problems(named | {"sdpa": timings["sdpa"]})
        blocks = attempt(problems, "density", partial(api.predict, *inputs[:2], topk=topk, **options))
        error = attempt(problems, "sparge", partial(_error, variants[f"sparge {topk}"].once, rows, exact))
        yield {
            "topk": topk,
            "quantization": quantization,
            "sdpa_ms": timings["sdpa"].ms,
            "sparge_ms": named["sparge"].ms,
            "sparge_graph_ms": named["sparge"].graph_ms,
            "prepare_ms": named["prepare"].ms,
            "attend_ms": named["attend"].graph_ms,
            "speedup": ratio(timings["sdpa"].ms, named["sparge"].ms),
            "density": None if blocks is None else blocks.density(),
            "relative_l1": error,
            "problems": problems,
        }


MEASURES: dict[str, Callable[[Bench, Group, Inputs], Iterator[Row]]] = {
    "end_to_end": _end_to_end,
    "kernel": _kernel,
    "error": _dense_errors,
    "memory": _memory,
    "crossover": _crossover,
    "hopper": _hopper,
    "numerics": _numerics,
    "packed": _packed,
    "masks": _masks,
}


def _rivals(inputs: Inputs, problem: Problem) -> dict[str, Variant]:
    return {name: rival.call(inputs, problem.is_causal) for name, rival in RIVALS.items()}


def _flex(inputs: Inputs, mask: BlockMask) -> Variant:
    """Return compiled FlexAttention over the same blocks. Its default tile for head_dim 64 does not divide 64 keys."""
    tile = {"BLOCK_M": BLOCK_Q, "BLOCK_N": BLOCK_K}
    return Variant(partial(_compiled_flex(), *inputs, block_mask=mask.to_flex(), kernel_options=tile))


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _sparge(bench: Bench, inputs: Inputs, problem: Problem, topk: float) -> Variant:
    """Return a whole call on an explicit backend, so that no size falls back to dense attention."""
    sparsity = Dense() if topk == 1.0 else Budget(topk)
    call = partial(api.attention, *inputs, is_causal=problem.is_causal, sparsity=sparsity)
    return Variant(partial(call, quantization=bench.quantization, backend=bench.backend))


def _stages(bench: Bench, inputs: Inputs, problem: Problem, topk: float) -> tuple[Variant, Variant]:
    """Return the stages before the attention kernel, and the kernel. Dense attention only quantizes."""
    call = _call(problem, Dense() if topk == 1.0 else Budget(topk), bench.quantization)
    prepare = partial(bench.prepare, *inputs, call, with_mask=topk != 1.0, with_operands=True)
    return Variant(partial(bench.repeat, call, inputs, prepare)), _attend(bench, call, prepare, bench.backend)


def _given_blocks(
    bench: Bench, inputs: Inputs, problem: Problem, mask: BlockMask, quantization: str, backend: str
) -> Variant:
    call = _call(problem, Dense(), quantization)

    def prepare() -> tuple[Any, BlockMask]:
        return bench.prepare(*inputs, call, with_mask=False, with_operands=True)[0], mask

    return _attend(bench, call, prepare, backend)


def _call(problem: Problem, sparsity: Budget | Dense, quantization: str) -> Call:
    return Call(problem.shape, problem.is_causal, problem.head_dim**-0.5, sparsity, quantization=quantization)


def _attend(bench: Bench, call: Call, prepare: Callable[[], tuple[Any, Any]], backend: str) -> Variant:
    """Return the attention kernel on operands that the first call (a warm-up) prepares."""
    prepared = cache(prepare)
    return Variant(lambda: bench.kernel(backend)(*prepared(), call))


def _density(bench: Bench, inputs: Inputs, problem: Problem, topk: float) -> float:
    if topk == 1.0:
        return 1.0
    return api.predict(*inputs[:2], topk=topk, is_causal=problem.is_causal, backend=bench.backend).density()


def _error(run: Callable[[], Any], rows: Tensor, exact: Tensor) -> float:
    """Return the error of a call's result, which is an output or (output, LSE)."""
    result = run()
    return sampled_error(result[0] if isinstance(result, tuple) else result, rows, exact)


def _speeds(problem: Problem, timings: dict[str, Timing]) -> Row:
    """Return times and effective TFLOP/s of sparge and its rivals, and the speed-up over the fastest rival."""
    columns: Row = {}
    for name in ("sparge", *RIVALS):
        if name in timings:
            timing = timings[name]
            columns |= {f"{name}_ms": timing.ms, f"{name}_graph_ms": timing.graph_ms}
            columns[f"{name}_tflops"] = tflops(problem.flop, timing.ms)
    columns["fastest"] = fastest(columns)
    for speedup, suffix in (("speedup", "_ms"), ("graph_speedup", "_graph_ms")):
        columns[speedup] = ratio(columns.get(f"{fastest(columns, suffix)}{suffix}"), columns[f"sparge{suffix}"])
    return columns


def _problems(timings: dict[str, Timing], known: dict[str, str] | None = None) -> dict[str, str]:
    return {name: timing.problem for name, timing in timings.items() if timing.problem} | (known or {})
