"""``sparge bench``: compare sparge with other kernels on one CUDA device, with speed, density and error in each row.

    end_to_end   whole calls, and their stages, against the dense kernels of `rivals`
    kernel       the attention kernel alone over random blocks, against FlexAttention; density 1 is dense attention
    memory       peak memory beyond inputs and output
    crossover    the smallest sizes at which sparse calls are faster
    hopper       the Hopper kernel against the Triton kernel
    numerics     errors of every INT8/FP8 mode on families of inputs, against their limits
    packed       calls over packed segments, against a loop over the segments and against the dense kernels
    masks        whole calls with a full mask, against SDPA with the same mask
    host         launch overhead per call (`host`)

Errors are measured on 256 queries per head (`evaluate.oracle`). If a column could not be measured, it is None, and
``problems`` of the row contains the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
    QUANTIZATIONS,
    Group,
    Problem,
    Row,
    executed_flop,
    groups_of,
    ratio,
    tflops,
)
from sparge.bench.inputs import make_inputs, make_mask, random_blocks
from sparge.bench.numerics import inputs_of, numerics_rows
from sparge.bench.rivals import RIVALS, fa4_version, fastest, run_in_turn
from sparge.bench.timing import Variant, attempt, copy_bandwidth, peak_extra_bytes, reason, time_on_cuda
from sparge.call import Call
from sparge.evaluate.inputs import Inputs
from sparge.evaluate.machine import Gpu, describe_gpu, describe_machine
from sparge.evaluate.oracle import exact_rows, sampled_error, sampled_queries
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q
from sparge.options.common import Quantization
from sparge.options.rules import Budget, Dense
from sparge.varlen import varlen_attention

TURNS, QUICK_TURNS = 5, 2
MEMORY_TOPK = 0.5

Variants = dict[str, Variant]


@dataclass(frozen=True)
class Bench:
    """Setup of a measurement: the device with its backend, quantization and copy bandwidth, and the number of turns."""

    device: torch.device
    backend: str
    quantization: Quantization
    bytes_per_s: float
    turns: int = TURNS


def cuda_bench(quick: bool) -> Bench:
    """Return the setup for the current CUDA device, with the backend and quantization that "auto" selects."""
    device = torch.device("cuda", torch.cuda.current_device())
    backend = base.resolve("auto", device)
    quantization = cast(Quantization, base.resolve_quantization("auto", backend, device))
    return Bench(device, backend, quantization, copy_bandwidth(), QUICK_TURNS if quick else TURNS)


def attention_kernel(backend: str) -> Callable[..., Any]:
    """Return the launcher of a backend's attention kernel."""
    found = base.get(backend)
    assert isinstance(found, GpuBackend)
    return found.launcher


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


def run_bench(suites: tuple[str, ...], quick: bool) -> Iterator[Row]:
    """Yield rows of the suites as they are measured, each with device, versions, commit and time.

    Only the suite "host" can run without a CUDA device.
    """
    bench = cuda_bench(quick) if suites != ("host",) else None
    gpu = describe_gpu() if torch.cuda.is_available() else None
    for group in groups_of(suites, quick):
        rows = host_suite(group, quick) if bench is None or group.suite == "host" else measure(bench, group)
        for row in rows:
            yield {**row, "quick": quick, **stamp(gpu)}


def host_suite(group: Group, quick: bool) -> Iterator[Row]:
    """Yield rows of the suite "host" with the host's processor, from the current CUDA device or else the CPU."""
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
    turns = host.QUICK_TURNS if quick else host.TURNS
    for row in host.host_rows(group.problem if has_cuda else host.CPU_PROBLEM, device, turns=turns):
        yield {**row, **asdict(describe_machine())}


def stamp(gpu: Gpu | None) -> Row:
    """Return the device, versions, commit and time that every row contains."""
    row: Row = {"time": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    if gpu is not None:
        row |= {**asdict(gpu), "cudnn": torch.backends.cudnn.version(), "flash_attn_4": fa4_version()}
    return row


def measure(bench: Bench, group: Group) -> Iterator[Row]:
    """Yield the rows of one group. If the whole group fails, yield one row with the reason."""
    case = {"suite": group.suite, "backend": bench.backend, **asdict(group.problem), "turns": bench.turns}
    case |= {"family": group.family} if group.family else {}
    case |= {"mask": group.mask} if group.mask else {}
    try:
        torch.cuda.empty_cache()  # free memory of earlier groups; does nothing without CUDA
        make = partial(inputs_of, group.family) if group.family else make_inputs
        for row in SUITES[group.suite](bench, group, make(group.problem, bench.device)):
            yield {**case, **row}
    except Exception as error:
        # The other groups still run, for example after running out of memory or on an unsupported GPU.
        yield {**case, "asked_density": group.density, "problems": {"case": reason(error)}}


def _end_to_end(bench: Bench, group: Group, inputs: Inputs) -> Iterator[Row]:
    problem = group.problem
    sparse = {}
    for topk in group.topks:
        call = _call(problem, _rule(topk), bench.quantization)
        sparse[topk] = {"sparge": _sparge(bench, inputs, problem, topk)} | _stages(bench, inputs, call, topk != 1.0)
    error, density = _error_of(bench, inputs, problem.is_causal), partial(_density, bench, [inputs], problem)
    for row in _by_topk(bench, problem, _rivals(inputs, problem), sparse, density, error, tuple(RIVALS)):
        floor_ms = 1e3 * problem.preparation_bytes / bench.bytes_per_s
        yield {**row, "floor_ms": floor_ms, "copy_tb_per_s": bench.bytes_per_s / 1e12}


def _crossover(bench: Bench, group: Group, inputs: Inputs) -> Iterator[Row]:
    problem = group.problem
    sparse = {topk: {"sparge": _sparge(bench, inputs, problem, topk)} for topk in group.topks}
    yield from _by_topk(bench, problem, _rivals(inputs, problem), sparse, partial(_density, bench, [inputs], problem))


def _packed(bench: Bench, group: Group, inputs: Inputs) -> Iterator[Row]:
    problem = group.problem
    segments: list[Inputs] = [
        (q[None, :, :length], k[None, :, :length], v[None, :, :length])
        for q, k, v, length in zip(*inputs, problem.lengths, strict=True)
    ]
    rows = [sampled_queries(length, bench.device) for length in problem.lengths]
    pairs = zip(segments, rows, strict=True)
    exact = torch.cat([exact_rows(*one, sampled, is_causal=problem.is_causal).output for one, sampled in pairs], 2)
    query, key, value = (torch.cat([part[0].transpose(0, 1) for part in side]) for side in zip(*segments, strict=True))
    bounds = [0, *accumulate(problem.lengths)]  # on the host
    options: Any = {"causal": problem.is_causal, "backend": bench.backend}
    packed = partial(varlen_attention, query, key, value, bounds, bounds, **options)

    def error(run: Callable[[], Tensor]) -> float:
        parts = zip(run().split(problem.lengths), rows, strict=True)
        found = torch.cat([output[sampled].transpose(0, 1)[None] for output, sampled in parts], 2)
        return sampled_error(found, torch.arange(found.shape[2], device=found.device), exact)

    dense = {name: rival.packed(segments, problem.is_causal) for name, rival in RIVALS.items()}
    sparse = {
        topk: {
            "loop": run_in_turn([_sparge(bench, segment, problem, topk) for segment in segments]),
            "sparge": Variant(partial(packed, sparsity=_rule(topk), quantization=bench.quantization)),
        }
        for topk in group.topks
    }
    density = partial(_density, bench, segments, problem)
    for row in _by_topk(bench, problem, dense, sparse, density, error, ("fa4",)):
        yield {**row, "loop_speedup": ratio(row["loop_ms"], row["sparge_ms"])}


def _masks(bench: Bench, group: Group, inputs: Inputs) -> Iterator[Row]:
    """Yield rows with a full mask, with the quantization that "auto" selects for calls with a mask."""
    problem = group.problem
    assert group.mask is not None
    mask = make_mask(group.mask, problem, bench.device)
    quantization = cast(Quantization, base.resolve_quantization("auto", bench.backend, bench.device, has_mask=True))
    rows = sampled_queries(problem.queries, bench.device)
    query, key, value = (tensor.double() for tensor in inputs)
    entries = mask[:, :, rows] if mask.dtype == torch.bool else mask[:, :, rows].double()
    exact = F.scaled_dot_product_attention(query[:, :, rows], key, value, attn_mask=entries)
    error = partial(_error, rows, exact)
    sparse = {}
    for topk in group.topks:
        call = _call(problem, Budget(topk), quantization, attn_mask=mask)
        options: dict[str, Any] = {"topk": topk, "quantization": quantization, "backend": bench.backend}
        whole = Variant(partial(api.attention, *inputs, attn_mask=mask, **options))
        sparse[topk] = {"sparge": whole} | _stages(bench, inputs, call)

    def density(topk: float) -> float:
        return api.predict(*inputs[:2], attn_mask=mask, topk=topk, backend=bench.backend).density()

    dense = {"sdpa": Variant(partial(F.scaled_dot_product_attention, *inputs, attn_mask=mask))}
    for row in _by_topk(bench, problem, dense, sparse, density, error):
        yield {**row, "quantization": quantization}


def _by_topk(
    bench: Bench,
    problem: Problem,
    dense: Variants,
    sparse: dict[float, Variants],
    density: Callable[[float], float],
    error: Callable[[Callable[[], Any]], float] | None = None,
    compared: tuple[str, ...] = (),
) -> Iterator[Row]:
    """Time the dense variants and the sparse variants of all topks in turns, and yield a row for every topk.

    Args:
        sparse: variants by topk; "sparge" is the whole call.
        density: returns the density at a topk.
        error: runs a call and returns its error; None to measure no errors.
        compared: dense variants whose errors are also measured.
    """
    variants = dense | {f"{name} {topk}": variant for topk, own in sparse.items() for name, variant in own.items()}
    timings = time_on_cuda(variants, bench.turns)
    common: dict[str, str] = {}
    errors: Row = {}
    if error:
        for name in compared:
            errors[f"{name}_relative_l1"] = attempt(common, name, partial(error, dense[name].once))
    for topk, own in sparse.items():
        found = {name: timings[f"{name} {topk}"] for name in own} | {name: timings[name] for name in dense}
        problems = {name: timing.problem for name, timing in found.items() if timing.problem} | common
        row: Row = {"topk": topk, "quantization": bench.quantization}
        for name, timing in found.items():
            row |= {f"{name}_ms": timing.ms, f"{name}_graph_ms": timing.graph_ms}
        for name in ("sparge", *dense):
            row[f"{name}_tflops"] = tflops(problem.flop, found[name].ms)
        for speedup, suffix in (("graph_speedup", "_graph_ms"), ("speedup", "_ms")):
            row["fastest"] = fastest(row, suffix, dense)
            row[speedup] = ratio(row.get(f"{row['fastest']}{suffix}"), row[f"sparge{suffix}"])
        if "attend" in own:
            row["attend_ms"] = found["attend"].graph_ms
        row["density"] = attempt(problems, "density", partial(density, topk))
        if error:
            row["relative_l1"] = attempt(problems, "sparge", partial(error, own["sparge"].once))
        yield {**row, **errors, "problems": problems}


def _quantizations(bench: Bench) -> tuple[str, ...]:
    """Return the quantizations of the backend, fastest first."""
    return tuple(name for name in QUANTIZATIONS if name in base.get(bench.backend).quantizations)


def _kernel(bench: Bench, group: Group, inputs: Inputs) -> Iterator[Row]:
    """Yield rows of several attention kernels on the same random blocks."""
    problem = group.problem
    kernels = {name: (name, bench.backend) for name in _quantizations(bench)}
    if group.suite == "hopper":
        base.resolve("hopper", bench.device)  # raises with the reason if it is unavailable
        kernels = {name: (name, "hopper") for name in ("int8_fp8_fast", "int8_fp8", "none")}
        kernels["twin int8_fp8"] = "int8_fp8", "triton"
    assert group.density is not None
    kept = random_blocks(problem.shape, group.density, bench.device, is_causal=problem.is_causal)
    mask = BlockMask.from_dense(kept, q_len=problem.queries, kv_len=problem.tokens, is_causal=problem.is_causal)
    variants = {}
    for name, (quantization, backend) in kernels.items():
        call = _call(problem, Dense(), quantization)
        prepare = partial(prepare_operands, inputs, call, False)
        variants[name] = _attend(call, prepare, backend, mask)
    if group.with_flex:
        variants["flex"] = _flex(inputs, mask)
    timings = time_on_cuda(variants, bench.turns)
    error = _error_of(bench, inputs, problem.is_causal, kept)
    flop = executed_flop(int(kept.sum()), problem.head_dim)
    for name, timing in timings.items():
        problems = {name: timing.problem} if timing.problem else {}
        # FlexAttention may not support capture. Its calls take milliseconds, so launch overhead does not matter.
        ms = timing.ms if timing.graph_ms is None else timing.graph_ms
        yield {
            "kernel": name,
            "asked_density": group.density,
            "density": mask.density(),
            "ms": timing.ms,
            "graph_ms": timing.graph_ms,
            "executed_tops": tflops(flop, ms),
            "relative_l1": attempt(problems, name, partial(error, variants[name].once)),
            "problems": problems,
        }


def _flex(inputs: Inputs, mask: BlockMask) -> Variant:
    """Return compiled FlexAttention over the same blocks, with tiles set to the block size.

    FlexAttention's default tile for head_dim 64 does not divide blocks of 64 keys.
    """
    tile = {"BLOCK_M": BLOCK_Q, "BLOCK_N": BLOCK_K}
    return Variant(partial(_compiled_flex(), *inputs, block_mask=mask.to_flex(), kernel_options=tile))


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _memory(bench: Bench, group: Group, inputs: Inputs) -> Iterator[Row]:
    call = _sparge(bench, inputs, group.problem, MEMORY_TOPK)
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


SUITES: dict[str, Callable[[Bench, Group, Inputs], Iterator[Row]]] = {
    "end_to_end": _end_to_end,
    "kernel": _kernel,
    "memory": _memory,
    "crossover": _crossover,
    "hopper": _kernel,
    "numerics": lambda bench, group, inputs: numerics_rows(bench.backend, group, inputs),
    "packed": _packed,
    "masks": _masks,
}


def _rivals(inputs: Inputs, problem: Problem) -> Variants:
    return {name: rival.call(inputs, problem.is_causal) for name, rival in RIVALS.items()}


def _rule(topk: float) -> Budget | Dense:
    return Dense() if topk == 1.0 else Budget(topk)


def _sparge(bench: Bench, inputs: Inputs, problem: Problem, topk: float) -> Variant:
    """Return a whole call with a named backend, so that no size falls back to dense attention."""
    call = partial(api.attention, *inputs, is_causal=problem.is_causal, sparsity=_rule(topk))
    return Variant(partial(call, quantization=bench.quantization, backend=bench.backend))


def _call(problem: Problem, sparsity: Budget | Dense, quantization: str, **options: Any) -> Call:
    scale = problem.head_dim**-0.5
    return Call(problem.shape, problem.is_causal, scale, sparsity, quantization=quantization, **options)


def _stages(bench: Bench, inputs: Inputs, call: Call, with_mask: bool = True) -> Variants:
    """Return two variants: the stages before the attention kernel, and the kernel.

    Without a mask, that is for dense attention, the stages only quantize.
    """
    prepare = partial(prepare_operands, inputs, call, with_mask)
    tensors = inputs if call.attn_mask is None else (*inputs, call.attn_mask)
    backend = base.get(bench.backend).serving(call, inputs[0].dtype).name
    return {
        "prepare": Variant(partial(repeat_preparation, call, tensors, prepare)),
        "attend": _attend(call, prepare, backend),
    }


def _attend(call: Call, prepare: Callable[[], Any], backend: str, mask: BlockMask | None = None) -> Variant:
    """Return the attention kernel over the blocks of ``mask``, or over the predicted blocks if it is None.

    The first call, which is a warm-up, prepares the operands.
    """
    prepared = cache(prepare)

    def run() -> Any:
        operands, predicted = prepared()
        return attention_kernel(backend)(operands, predicted if mask is None else mask, call)

    return Variant(run)


def _density(bench: Bench, calls: list[Inputs], problem: Problem, topk: float) -> float:
    """Return the density over all calls together."""
    if topk == 1.0:
        return 1.0
    rule: dict[str, Any] = {"topk": topk, "is_causal": problem.is_causal, "backend": bench.backend}
    masks = [api.predict(query, key, **rule) for query, key, _ in calls]
    kept = sum(int(mask.kv_num_blocks.sum()) for mask in masks)
    return kept / sum(int(mask.visible_num_blocks.sum()) for mask in masks)


def _error_of(
    bench: Bench, inputs: Inputs, is_causal: bool, kept: Tensor | None = None
) -> Callable[[Callable[[], Any]], float]:
    """Return a function that runs a call and returns its error against exact attention."""
    rows = sampled_queries(inputs[0].shape[2], bench.device)
    return partial(_error, rows, exact_rows(*inputs, rows, is_causal=is_causal, kept=kept).output)


def _error(rows: Tensor, exact: Tensor, run: Callable[[], Any]) -> float:
    """Run a call and return its error. Its result is an output or (output, LSE)."""
    result = run()
    return sampled_error(result[0] if isinstance(result, tuple) else result, rows, exact)
