"""``sparge bench``: compare sparge with dense attention kernels, with speed, density and error in each row.

    end_to_end   whole calls, and their stages, against the dense kernels of `rivals`
    kernel       the attention kernel alone over random blocks, against FlexAttention; density 1 is dense attention
    memory       peak memory beyond inputs and output
    crossover    the smallest sizes at which sparse calls are faster
    host         launch overhead per call (`host`), also on a CPU

Errors are measured on 256 queries per head (`evaluate.oracle`). If a column could not be measured, it is None, and
``problems`` of the row contains the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from sparge import api
from sparge.backends import base
from sparge.backends.gpu.backend import GpuBackend
from sparge.bench.cases import SUITES, Case, Problem, Row, executed_flop, ratio, tflops
from sparge.bench.host import host_rows
from sparge.bench.inputs import make_inputs, random_blocks
from sparge.bench.rivals import RIVALS, fa4_version, fastest
from sparge.bench.timing import TimedCall, attempt, peak_extra_bytes, reason, time_on_cuda
from sparge.call import Call
from sparge.dispatch.resolve import Options, check_tensors, resolve
from sparge.dispatch.validation import check_scale
from sparge.evaluate.inputs import Inputs
from sparge.evaluate.machine import Gpu, describe_gpu
from sparge.evaluate.oracle import exact_rows, sampled_error, sampled_queries
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q
from sparge.options.common import Quantization
from sparge.options.rules import Budget, Dense

TURNS, QUICK_TURNS = 5, 2
MEMORY_TOPK = 0.5
QUANTIZATIONS = ("int8_fp8_fast", "int8_fp8", "int8_fp16", "none")
"""Quantizations, fastest first."""

TimedCalls = dict[str, TimedCall]


@dataclass(frozen=True)
class Bench:
    """Setup of a measurement: the device with its backend and quantization, and the number of turns."""

    device: torch.device
    backend: str
    quantization: Quantization
    turns: int = TURNS


RowsOf = Callable[[Bench, Case, Inputs], Iterator[Row]]


def cuda_bench(quick: bool = False) -> Bench:
    """Return the setup for the current CUDA device, with the backend and quantization that "auto" selects."""
    device = torch.device("cuda", torch.cuda.current_device())
    backend = base.resolve("auto", device)
    quantization = cast(Quantization, base.resolve_quantization("auto", backend, device))
    return Bench(device, backend, quantization, QUICK_TURNS if quick else TURNS)


def run_bench(suites: tuple[str, ...], quick: bool) -> Iterator[Row]:
    """Yield rows of the suites as they are measured, each with device, versions, commit and time.

    With ``quick``, only the first case of each suite runs. Only the suite "host" can run without a CUDA device.
    """
    bench = cuda_bench(quick) if suites != ("host",) else None
    gpu = describe_gpu() if torch.cuda.is_available() else None
    for suite in suites:
        for row in host_rows(quick) if bench is None or suite == "host" else suite_rows(bench, suite, quick):
            yield {**row, "quick": quick, **stamp(gpu)}


def suite_rows(bench: Bench, suite: str, quick: bool) -> Iterator[Row]:
    for case in SUITES[suite][: 1 if quick else None]:
        yield from measure(bench, case, ROWS_OF[suite])


def stamp(gpu: Gpu | None) -> Row:
    """Return the time, and the device, versions and commit of a GPU."""
    row: Row = {"time": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    if gpu is not None:
        row |= {**asdict(gpu), "cudnn": torch.backends.cudnn.version(), "flash_attn_4": fa4_version()}
    return row


def measure(
    bench: Bench, case: Case, rows_of: RowsOf, make: Callable[[Any, torch.device], Inputs] = make_inputs
) -> Iterator[Row]:
    """Create the inputs of a case and yield its rows. If the case fails, yield one row with the reason."""
    fields = {"suite": case.suite, "backend": bench.backend, **asdict(case.problem), "turns": bench.turns}
    try:
        torch.cuda.empty_cache()  # free memory of earlier cases; does nothing without CUDA
        for row in rows_of(bench, case, make(case.problem, bench.device)):
            yield {**fields, **row}
    except Exception as error:
        # The other cases still run, for example after running out of memory or on an unsupported GPU.
        yield {**fields, "asked_density": case.density, "problems": {"case": reason(error)}}


def end_to_end(bench: Bench, case: Case, inputs: Inputs) -> Iterator[Row]:
    """Yield a row for each topk: whole calls and their stages, and the errors of sparge and of all dense kernels."""
    problem = case.problem
    sparse = {}
    for topk in case.topks:
        call = resolved_call(bench, inputs, problem, topk)
        sparse[topk] = {"sparge": whole_call(bench, inputs, problem, topk)} | stages(bench, inputs, call, topk != 1.0)
    error, density = exact_error(inputs, problem.is_causal), partial(density_of, bench, inputs, problem)
    yield from rows_by_topk(bench, problem, dense_kernels(inputs, problem), sparse, density, error, tuple(RIVALS))


def crossover(bench: Bench, case: Case, inputs: Inputs) -> Iterator[Row]:
    """Yield a row for each topk: whole calls without their errors."""
    problem = case.problem
    sparse = {topk: {"sparge": whole_call(bench, inputs, problem, topk)} for topk in case.topks}
    density = partial(density_of, bench, inputs, problem)
    yield from rows_by_topk(bench, problem, dense_kernels(inputs, problem), sparse, density)


def kernel(
    bench: Bench, case: Case, inputs: Inputs, kernels: dict[str, tuple[str, str]] | None = None
) -> Iterator[Row]:
    """Yield a row for each attention kernel, all on the same random blocks.

    Args:
        kernels: (quantization, backend) by the name of the kernel; all quantizations of the backend by default.
    """
    problem = case.problem
    assert case.density is not None
    if kernels is None:
        supported = base.get(bench.backend).quantizations
        kernels = {name: (name, bench.backend) for name in QUANTIZATIONS if name in supported}
    kept = random_blocks(problem.shape, case.density, bench.device, is_causal=problem.is_causal)
    mask = BlockMask.from_dense(kept, q_len=problem.queries, kv_len=problem.tokens, is_causal=problem.is_causal)
    calls = {}
    for name, (quantization, backend) in kernels.items():
        call = call_of(problem, Dense(), quantization)
        calls[name] = attention_stage(call, partial(prepare_operands, inputs, call, False), backend, mask)
    if case.with_flex:
        calls["flex"] = _flex(inputs, mask)
    timings = time_on_cuda(calls, bench.turns)
    error = exact_error(inputs, problem.is_causal, kept)
    flop = executed_flop(int(kept.sum()), problem.head_dim)
    for name, timing in timings.items():
        problems = {name: timing.problem} if timing.problem else {}
        # FlexAttention may not support capture. Its calls take milliseconds, so launch overhead does not matter.
        ms = timing.ms if timing.graph_ms is None else timing.graph_ms
        yield {
            "kernel": name,
            "asked_density": case.density,
            "density": mask.density(),
            "ms": timing.ms,
            "graph_ms": timing.graph_ms,
            "executed_tops": tflops(flop, ms),
            "relative_l1": attempt(problems, name, partial(error, calls[name].once)),
            "problems": problems,
        }


def _flex(inputs: Inputs, mask: BlockMask) -> TimedCall:
    """Return compiled FlexAttention over the same blocks, with tiles set to the block size.

    FlexAttention's default tile for head_dim 64 does not divide blocks of 64 keys.
    """
    tile = {"BLOCK_M": BLOCK_Q, "BLOCK_N": BLOCK_K}
    return TimedCall(partial(_compiled_flex(), *inputs, block_mask=mask.to_flex(), kernel_options=tile))


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def memory(bench: Bench, case: Case, inputs: Inputs) -> Iterator[Row]:
    """Yield one row with the peak memory of a sparse call."""
    call = whole_call(bench, inputs, case.problem, MEMORY_TOPK)
    problems: dict[str, str] = {}
    attempt(problems, "sparge", call.once)  # compiles and loads the kernels
    extra = attempt(problems, "sparge", partial(peak_extra_bytes, call.run))
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


ROWS_OF: dict[str, RowsOf] = {"end_to_end": end_to_end, "kernel": kernel, "memory": memory, "crossover": crossover}


def rows_by_topk(
    bench: Bench,
    problem: Problem,
    dense: TimedCalls,
    sparse: dict[float, TimedCalls],
    density: Callable[[float], float],
    error: Callable[[Callable[[], Any]], float] | None = None,
    compared: tuple[str, ...] = (),
) -> Iterator[Row]:
    """Time dense calls and the sparse calls of all topks in turns, and yield a row for every topk.

    Args:
        dense: calls by name.
        sparse: calls by topk and name; "sparge" is the whole call.
        density: returns the density at a topk.
        error: runs a call and returns its error; None to measure no errors.
        compared: names of the dense calls whose errors are also measured.
    """
    calls = dense | {f"{name} {topk}": call for topk, named in sparse.items() for name, call in named.items()}
    timings = time_on_cuda(calls, bench.turns)
    dense_problems: dict[str, str] = {}
    dense_errors: Row = {}
    if error:
        for name in compared:
            dense_errors[f"{name}_relative_l1"] = attempt(dense_problems, name, partial(error, dense[name].once))
    for topk, named in sparse.items():
        measured = {name: timings[f"{name} {topk}"] for name in named} | {name: timings[name] for name in dense}
        problems = {name: timing.problem for name, timing in measured.items() if timing.problem} | dense_problems
        row: Row = {"topk": topk, "quantization": bench.quantization}
        for name, timing in measured.items():
            row |= {f"{name}_ms": timing.ms, f"{name}_graph_ms": timing.graph_ms}
        for name in ("sparge", *dense):
            row[f"{name}_tflops"] = tflops(problem.flop, measured[name].ms)
        for speedup, suffix in (("graph_speedup", "_graph_ms"), ("speedup", "_ms")):
            row["fastest"] = fastest(row, suffix, dense)
            row[speedup] = ratio(row.get(f"{row['fastest']}{suffix}"), row[f"sparge{suffix}"])
        if "attend" in named:
            row["attend_ms"] = measured["attend"].graph_ms
        row["density"] = attempt(problems, "density", partial(density, topk))
        if error:
            row["relative_l1"] = attempt(problems, "sparge", partial(error, named["sparge"].once))
        yield {**row, **dense_errors, "problems": problems}


def rule_of(topk: float) -> Budget | Dense:
    return Dense() if topk == 1.0 else Budget(topk)


def dense_kernels(inputs: Inputs, problem: Problem) -> TimedCalls:
    return {name: rival.call(inputs, problem.is_causal) for name, rival in RIVALS.items()}


def whole_call(bench: Bench, inputs: Inputs, problem: Problem, topk: float) -> TimedCall:
    """Return a whole call with a named backend, so that no size falls back to dense attention."""
    return TimedCall(partial(api.attention, *inputs, **_options(bench, problem, topk)))


def resolved_call(bench: Bench, inputs: Inputs, problem: Problem, topk: float) -> Call:
    """Return the `Call` that `whole_call` resolves to, with defaults such as block means for skipped blocks."""
    options = Options(**_options(bench, problem, topk))
    return resolve(check_tensors(*inputs, options), None, options).call


def _options(bench: Bench, problem: Problem, topk: float) -> dict[str, Any]:
    return {
        "is_causal": problem.is_causal,
        "sparsity": rule_of(topk),
        "quantization": bench.quantization,
        "backend": bench.backend,
    }


def call_of(problem: Problem, sparsity: Budget | Dense, quantization: str, **options: Any) -> Call:
    scale = check_scale(None, problem.head_dim)
    return Call(problem.shape, problem.is_causal, scale, sparsity, quantization=quantization, **options)


def stages(bench: Bench, inputs: Inputs, call: Call, with_mask: bool = True) -> TimedCalls:
    """Return two calls: "prepare", the stages before the attention kernel, and "attend", the kernel.

    Without ``with_mask``, for dense attention, the stages only quantize.
    """
    prepare = partial(prepare_operands, inputs, call, with_mask)
    tensors = inputs if call.attn_mask is None else (*inputs, call.attn_mask)
    backend = base.get(bench.backend).serving(call, inputs[0].dtype).name
    return {
        "prepare": TimedCall(partial(repeat_preparation, call, tensors, prepare)),
        "attend": attention_stage(call, prepare, backend),
    }


def attention_stage(call: Call, prepare: Callable[[], Any], backend: str, mask: BlockMask | None = None) -> TimedCall:
    """Return the attention kernel over the blocks of ``mask``, or over the predicted blocks if it is None.

    The first call, which is a warm-up, prepares the operands.
    """
    prepared = cache(prepare)

    def run() -> Any:
        operands, predicted = prepared()
        return attention_kernel(backend)(operands, predicted if mask is None else mask, call)

    return TimedCall(run)


def attention_kernel(backend: str) -> Callable[..., Any]:
    """Return the launcher of a backend's attention kernel."""
    gpu_backend = base.get(backend)
    assert isinstance(gpu_backend, GpuBackend)
    return gpu_backend.launcher


def prepare_operands(inputs: Inputs, call: Call, with_mask: bool) -> tuple[Any, BlockMask | None]:
    """Run the stages before the attention kernel, and return the operands and the predicted mask."""
    from sparge.backends.gpu import pipeline

    return pipeline.prepare(*inputs, call, with_mask=with_mask, with_operands=True)


def repeat_preparation(call: Call, inputs: Sequence[Tensor], prepare: Callable[[], Any]) -> None:
    """Run the stages before the attention kernel. The first call is recorded, and later calls replay it."""
    from sparge.backends.gpu.replay import replayed

    def run() -> tuple[Tensor, ...]:
        operands, mask = prepare()
        lists = () if mask is None else (mask.kv_num_blocks, mask.kv_indices)
        return operands.query, operands.key, operands.value, *lists

    replayed(call.recordings, "preparation", inputs, run)


def density_of(bench: Bench, inputs: Inputs, problem: Problem, topk: float) -> float:
    """Return the density of the predicted mask."""
    if topk == 1.0:
        return 1.0
    query, key, _ = inputs
    return api.predict(query, key, topk=topk, is_causal=problem.is_causal, backend=bench.backend).density()


def exact_error(inputs: Inputs, is_causal: bool, kept: Tensor | None = None) -> Callable[[Callable[[], Any]], float]:
    """Return a function that runs a call and returns its error against exact attention over the ``kept`` blocks."""
    rows = sampled_queries(inputs[0].shape[2], inputs[0].device)
    return partial(error_of, rows, exact_rows(*inputs, rows, is_causal=is_causal, kept=kept).output)


def error_of(rows: Tensor, exact: Tensor, run: Callable[[], Any]) -> float:
    """Run a call that returns an output or (output, LSE), and return the error of its output."""
    result = run()
    return sampled_error(result[0] if isinstance(result, tuple) else result, rows, exact)
