"""The functions that the processes of ``sparge sweep`` run.

    prepare CASE                  create the load and run the chosen configuration
    check CASE CONFIG             run a configuration once: error, registers, spills, shared memory
    time_all CASE CONFIGS TURNS   time configurations in turns: median milliseconds of each

The load is a problem of the tables: B 1, bfloat16, video-like inputs, a random half of the blocks. The public function
is called once while the arguments of the kernel's launcher are recorded. Every configuration launches the kernel with
these arguments.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparge import api
from sparge.backends.gpu.config_table import override
from sparge.bench.cases import Problem, executed_flop
from sparge.bench.inputs import make_inputs, random_blocks
from sparge.bench.sweep.cases import Case
from sparge.bench.timing import Variant, reason, time_on_cuda
from sparge.evaluate.metrics import relative_l1
from sparge.evaluate.oracle import exact_rows, sampled_error, sampled_queries
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q

LAUNCHERS = {
    "triton": ("triton.attention", "attend"),
    "hopper": ("hopper.launcher", "attend"),
    "summarize": ("gpu.stages.summary", "summarize_key_value"),
    "reduce": ("gpu.stages.summary", "summarize_key_value"),
    "quantize_query": ("gpu.stages.quantize", "summarize_query"),
    "quantize_key_value": ("gpu.stages.quantize", "quantize_key_value"),
    "score": ("gpu.stages.score", "block_probabilities"),
    "score_hopper": ("gpu.stages.score", "block_probabilities"),
    "select": ("gpu.stages.select", "select"),
    "budget": ("gpu.stages.select", "select"),
    "peaks": ("gpu.stages.peaks", "mark_peaks"),
    "replacement": ("gpu.stages.replacement", "replaced_bias"),
    "mask": ("gpu.stages.mask_blocks", "mask_blocks"),
}
"""Module and function that launch each kernel."""

DENSITY = 0.5
PV_THRESHOLD = -8.0
HIDDEN_SHARE = 1 / 16
"""Share of padded keys at the end of the sequence, in cases with a mask."""

SAME_ERROR = 1.1
"""Limit of a configuration's error divided by the chosen configuration's error. Other tile sizes round differently."""
ROUNDING = 1e-4
"""Absolute tolerance that is added to every limit, for kernels with almost no rounding error."""
WORST_BLOCK = 0.25
"""Limit of the relative difference from the chosen configuration in any query block."""
WORST_LSE = 0.1
"""Limit of the LSE difference from the chosen configuration for any query."""
STAGE_DIFFERENCE = 1e-3
"""Limit of the relative difference of a stage's results: sums may be reordered, and quantized values may round
differently."""


class WrongResult(ValueError):
    """Raised if a configuration's result differs from the result of the chosen configuration."""


class CandidateFailure(RuntimeError):
    """Raised if a configuration does not compile or run."""


class DeviceLost(CandidateFailure):
    """Raised if the process of a configuration can no longer launch kernels."""


@dataclass
class Load:
    """A repeatable launch, with two reference results: from the chosen configuration, and from exact attention."""

    case: Case
    run: Callable[[], Any]
    flop: float | None = None
    rows: Tensor | None = None
    exact: Tensor | None = None

    def __post_init__(self) -> None:
        self.chosen = [tensor.clone() for tensor in tensors_in(self.run())]
        self.chosen_error: float | None = None
        if self.rows is not None and self.exact is not None:
            self.chosen_error = sampled_error(self.chosen[0], self.rows, self.exact)


def load_of(case: Case, device: torch.device) -> Load:
    """Create the inputs, call the public function once, and run the chosen configuration."""
    problem = Problem(case.tokens, case.heads, case.head_dim)
    query, key, value = make_inputs(problem, device)
    if case.quantization == "float32":
        query, key, value = query.float(), key.float(), value.float()
    function = _launcher(case.kernel)
    is_causal = case.variant == "mask_per_query"
    attn_mask, seen = None, case.tokens
    if is_causal or case.kernel == "mask":  # causality as a full (S_q x S_k) mask
        attn_mask = torch.ones(1, 1, case.tokens, case.tokens, dtype=torch.bool, device=device).tril()
    elif case.variant == "mask":
        seen -= round(HIDDEN_SHARE * case.tokens / BLOCK_K) * BLOCK_K
        attn_mask = (torch.arange(case.tokens, device=device) < seen).expand(1, 1, 1, -1)
    if not case.is_attention:
        with recorded_calls(function) as calls:
            api.attention(query, key, value, attn_mask, topk=DENSITY, quantization="int8_fp8", backend="triton")
        return Load(case, _again(function, calls))
    kept = random_blocks(problem.shape, DENSITY, device, is_causal=is_causal)
    options: dict[str, Any] = {"quantization": "none" if case.quantization == "float32" else case.quantization}
    options["pv_threshold"] = PV_THRESHOLD if case.variant == "threshold" else None
    with recorded_calls(function) as calls:
        api.block_sparse_attention(query, key, value, kept, attn_mask=attn_mask, backend=case.kernel, **options)
    rows = sampled_queries(case.tokens, device)
    blocks = kept[..., : seen // BLOCK_K]
    exact = exact_rows(query, key[:, :, :seen], value[:, :, :seen], rows, is_causal=is_causal, kept=blocks).output
    return Load(case, _again(function, calls), executed_flop(int(kept.sum()), case.head_dim), rows, exact)


def _launcher(kernel: str) -> Callable[..., Any]:
    importlib.import_module("sparge.backends.gpu.pipeline")  # `recorded_calls` also replaces the function there
    module, name = LAUNCHERS[kernel]
    function: Callable[..., Any] = getattr(importlib.import_module(f"sparge.backends.{module}"), name)
    return function


@contextmanager
def recorded_calls(function: Callable[..., Any]) -> Iterator[list[tuple[Any, Any]]]:
    """Record the arguments of every call of a function, in all modules of sparge that import it."""
    calls: list[tuple[Any, Any]] = []

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return function(*args, **kwargs)

    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "sparge"]
    names = [(module, name) for module in modules for name, value in list(vars(module).items()) if value is function]
    for module, name in names:
        setattr(module, name, recorded)
    try:
        yield calls
    finally:
        for module, name in names:
            setattr(module, name, function)


def _again(function: Callable[..., Any], calls: list[tuple[Any, Any]]) -> Callable[[], Any]:
    """Return a function that repeats the first recorded call.

    It returns the results of the call, or its arguments if the results are written to them.
    """
    if not calls:
        raise RuntimeError(f"expected a call of {function.__module__}.{function.__qualname__}, got none")
    args, kwargs = calls[0]
    if "totals" in kwargs:  # counting is not part of the load
        kwargs = {**kwargs, "totals": None}

    def run() -> Any:
        result = function(*args, **kwargs)
        return (args, kwargs) if result is None else result

    return run


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in nested results, without duplicates."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value) or isinstance(value, BlockMask):
        value = vars(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    found = {id(tensor): tensor for part in parts for tensor in tensors_in(part)}
    return list(found.values())


def check(load: Load, config: Any) -> dict[str, Any]:
    """Run a configuration once.

    Raises:
        WrongResult: the result differs from the chosen configuration's.
    """
    with override(load.case.kernel, config):
        result = tensors_in(load.run())
        error = _stage_difference(result, load) if load.exact is None else _attention_error(result, load)
        return {"error": error, **_resources(load)}


def _attention_error(result: list[Tensor], load: Load) -> float:
    """Return the relative L1 error of sampled queries. Also compare all queries with the chosen configuration."""
    assert load.rows is not None and load.exact is not None and load.chosen_error is not None
    (output, lse), (chosen, chosen_lse) = result[:2], load.chosen[:2]
    if not torch.isfinite(output).all():
        raise WrongResult("expected finite numbers, got NaN or Inf")
    error = sampled_error(output, load.rows, load.exact)
    limit = SAME_ERROR * load.chosen_error + ROUNDING
    if error > limit:
        raise WrongResult(f"expected an error of at most {limit:.4f}, got {error:.4f}")
    difference, limit = relative_l1(output, chosen), 2 * load.chosen_error + ROUNDING
    if difference > limit:
        raise WrongResult(f"expected at most {limit:.4f} from the chosen configuration, got {difference:.4f}")
    apart, size = (
        tensor.abs().sum(-1).unflatten(-1, (-1, BLOCK_Q)).sum(-1)
        for tensor in (output.float() - chosen.float(), chosen.float())
    )
    worst = float((apart / size.clamp(min=1e-30)).max())
    if worst > WORST_BLOCK:
        raise WrongResult(f"expected query blocks within {WORST_BLOCK} of the chosen configuration, got {worst:.2f}")
    worst = float(torch.where(lse == chosen_lse, 0.0, (lse - chosen_lse).abs()).max())
    if not worst <= WORST_LSE:
        raise WrongResult(f"expected an LSE within {WORST_LSE} of the chosen configuration, got {worst:.2f}")
    return error


def _stage_difference(result: list[Tensor], load: Load) -> float:
    """Return the largest relative L1 difference of all results from the chosen configuration."""
    largest = 0.0
    for found, chosen in zip(result, load.chosen, strict=True):
        if found.shape != chosen.shape:
            continue  # partial sums, by program
        mine, theirs = found.float(), chosen.float()
        apart = torch.where(mine == theirs, 0.0, (mine - theirs).abs()).sum(dtype=torch.float64)
        size = torch.nan_to_num(theirs, posinf=0.0, neginf=0.0).abs().sum(dtype=torch.float64)
        largest = max(largest, float(apart / size.clamp(min=1e-30)))
        if not math.isfinite(largest) or largest > STAGE_DIFFERENCE:
            raise WrongResult(f"expected at most {STAGE_DIFFERENCE} from the chosen configuration, got {largest:.4f}")
    return largest


class _Kernels:
    """A recorder for `gpu.launch` that collects the compiled kernels."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []

    def add_launch(self, compiled: Any, *_: Any, **__: Any) -> None:
        if compiled is not None:  # None under Triton's interpreter
            self.compiled.append(compiled)

    def add_buffer(self, *_: Any, **__: Any) -> None:
        pass


def _resources(load: Load) -> dict[str, int | None]:
    """Return the largest registers and spills per thread and shared memory per program of the case's kernels."""
    from sparge.backends.gpu.replay import current_recorder

    kernels = _Kernels()
    token = current_recorder.set(kernels)  # type: ignore[arg-type]
    try:
        load.run()
    finally:
        current_recorder.reset(token)
    word = "attention" if load.case.is_attention else load.case.kernel
    named = [compiled for compiled in kernels.compiled if word in str(getattr(compiled.metadata, "name", ""))]
    found = named or kernels.compiled

    def largest(values: Iterator[int | None]) -> int | None:
        return max((value for value in values if value is not None), default=None)

    return {
        "registers": largest(getattr(compiled, "n_regs", None) for compiled in found),
        "spills": largest(getattr(compiled, "n_spills", None) for compiled in found),
        "shared": largest(getattr(compiled.metadata, "shared", None) for compiled in found),
    }


def time_all(load: Load, configs: list[Any], turns: int) -> dict[str, Any]:
    """Return the median milliseconds of every configuration, by graph replay, or by events if capture fails."""
    variants = {
        str(index): Variant(load.run, partial(override, load.case.kernel, config))
        for index, config in enumerate(configs)
    }
    timings = time_on_cuda(variants, turns).values()
    return {
        "ms": [timing.ms if timing.graph_ms is None else timing.graph_ms for timing in timings],
        "problems": [timing.problem for timing in timings],
        "flop": load.flop,
    }


_loads: dict[Case, Load] = {}
"""The load of the latest case of this process."""


def perform(function: Callable[..., Any], case: Case, *args: Any) -> Any:
    """Return the result of `prepare`, `check` or `time_all` on the load of a case.

    Raises:
        WrongResult: from `check`.
        CandidateFailure: any other error; `DeviceLost` if the process can no longer launch kernels.
    """
    try:
        if case not in _loads:
            _loads.clear()  # frees the memory of the previous load
            torch.cuda.empty_cache()
            _loads[case] = load_of(case, torch.device("cuda", torch.cuda.current_device()))
        return function(_loads[case], *args)
    except WrongResult:
        raise
    except Exception as error:
        # Compilers, drivers and allocators raise many types of errors. A failed candidate becomes a row of the table.
        raise (CandidateFailure if _accepts_launches() else DeviceLost)(reason(error)) from None


def prepare(load: Load) -> None:
    """Do nothing; `perform` has created the load."""


def _accepts_launches() -> bool:
    """Return whether the device accepts launches. After an illegal memory access, it rejects them in this process."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True
