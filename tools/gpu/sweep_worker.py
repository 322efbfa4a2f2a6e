"""The process of `sweep.py` that runs candidates. It reads a pickled request from standard input.

A request is (case, configurations, turns). With 0 turns, the only configuration runs once, and the answer has its error
and resources; otherwise, the answer has the times of all configurations, measured in turns. A failure is an answer with
a status and the reason.

The public function is called once while the arguments of the kernel's launcher are recorded. Every configuration
launches the kernel with these arguments, and its results are compared with those of the current configuration.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch
from sweep_cases import Case
from torch import Tensor

from sparge import api
from sparge.backends.gpu.config_table import override
from sparge.bench.cases import Problem, executed_flop
from sparge.bench.inputs import make_inputs, random_blocks
from sparge.bench.timing import TimedCall, reason, time_on_cuda
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
PADDED_SHARE = 1 / 16
"""Share of padded keys at the end of the sequence, in cases with a key padding mask."""

SAME_ERROR = 1.1
"""Limit of a configuration's error divided by the current configuration's error. Other tile sizes round differently."""
ROUNDING = 1e-4
"""Absolute tolerance that is added to every limit, for kernels with almost no rounding error."""
WORST_BLOCK = 0.25
"""Limit of the relative difference from the current configuration in any query block."""
WORST_LSE = 0.1
"""Limit of the LSE difference from the current configuration for any query."""
STAGE_DIFFERENCE = 1e-3
"""Limit of the relative difference of a stage's results: sums may be reordered, and quantized values may round
differently."""


class WrongResult(ValueError):
    """Raised if a configuration's result differs from the result of the current configuration."""


@dataclass
class Load:
    """A repeatable launch, with two reference results: of the current configuration, and of exact attention."""

    case: Case
    run: Callable[[], Any]
    flop: float | None = None
    rows: Tensor | None = None
    exact: Tensor | None = None

    def __post_init__(self) -> None:
        self.expected = [tensor.clone() for tensor in tensors_in(self.run())]
        if self.exact is not None:
            self.expected_error = sampled_error(self.expected[0], self.rows, self.exact)


def load_of(case: Case, device: torch.device) -> Load:
    """Create the inputs, call the public function once, and run the current configuration."""
    problem = Problem(case.tokens, case.heads, case.head_dim)
    query, key, value = make_inputs(problem, device)
    if case.quantization == "float32":
        query, key, value = query.float(), key.float(), value.float()
    launcher = launcher_of(case.kernel)
    is_causal = case.variant == "mask_per_query"
    attn_mask, visible = None, case.tokens
    if is_causal or case.kernel == "mask":  # causality as a full (S_q x S_k) mask
        attn_mask = torch.ones(1, 1, case.tokens, case.tokens, dtype=torch.bool, device=device).tril()
    elif case.variant == "mask":
        visible -= round(PADDED_SHARE * case.tokens / BLOCK_K) * BLOCK_K
        attn_mask = (torch.arange(case.tokens, device=device) < visible).expand(1, 1, 1, -1)
    if not case.is_attention:
        with recorded_calls(launcher) as calls:
            api.attention(query, key, value, attn_mask, topk=DENSITY, quantization="int8_fp8", backend="triton")
        return Load(case, first_call(launcher, calls))
    kept = random_blocks(problem.shape, DENSITY, device, is_causal=is_causal)
    options: dict[str, Any] = {"quantization": "none" if case.quantization == "float32" else case.quantization}
    options["pv_threshold"] = PV_THRESHOLD if case.variant == "threshold" else None
    with recorded_calls(launcher) as calls:
        api.block_sparse_attention(query, key, value, kept, attn_mask=attn_mask, backend=case.kernel, **options)
    rows = sampled_queries(case.tokens, device)
    blocks = kept[..., : visible // BLOCK_K]
    exact = exact_rows(query, key[:, :, :visible], value[:, :, :visible], rows, is_causal=is_causal, kept=blocks).output
    return Load(case, first_call(launcher, calls), executed_flop(int(kept.sum()), case.head_dim), rows, exact)


def launcher_of(kernel: str) -> Callable[..., Any]:
    """Return the function that launches a kernel."""
    importlib.import_module("sparge.backends.gpu.pipeline")  # `recorded_calls` also replaces the function there
    module, name = LAUNCHERS[kernel]
    launcher: Callable[..., Any] = getattr(importlib.import_module(f"sparge.backends.{module}"), name)
    return launcher


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


def first_call(function: Callable[..., Any], calls: list[tuple[Any, Any]]) -> Callable[[], Any]:
    """Return a function that repeats the first recorded call.

    It returns the results of the call, or its arguments if the results are written to them.
    """
    if not calls:
        raise RuntimeError(f"expected a call of {function.__module__}.{function.__qualname__}, got none")
    args, kwargs = calls[0]
    if "totals" in kwargs:  # the counters of sparge.stats
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
    by_id = {id(tensor): tensor for part in parts for tensor in tensors_in(part)}
    return list(by_id.values())


def check(load: Load, config: Any) -> dict[str, Any]:
    """Run a configuration once, and return its error and resources.

    Raises:
        WrongResult: the result differs from the current configuration's.
    """
    with override(load.case.kernel, config):
        result = tensors_in(load.run())
        error = stage_difference(result, load) if load.exact is None else attention_error(result, load)
        return {"error": error, **resources(load)}


def attention_error(result: list[Tensor], load: Load) -> float:
    """Return the relative L1 error of sampled queries. Also compare all queries with the current configuration."""
    (output, lse), (expected, expected_lse) = result[:2], load.expected[:2]
    if not torch.isfinite(output).all():
        raise WrongResult("expected finite numbers, got NaN or Inf")
    error = sampled_error(output, load.rows, load.exact)
    by_block = [
        tensor.abs().sum(-1).unflatten(-1, (-1, BLOCK_Q)).sum(-1)
        for tensor in (output.float() - expected.float(), expected.float())
    ]
    lse_difference = torch.where(lse == expected_lse, 0.0, (lse - expected_lse).abs())
    measured = {
        "error": (error, SAME_ERROR * load.expected_error + ROUNDING),
        "difference from the current configuration": (
            relative_l1(output, expected),
            2 * load.expected_error + ROUNDING,
        ),
        "difference in any query block": (float((by_block[0] / by_block[1].clamp(min=1e-30)).max()), WORST_BLOCK),
        "LSE difference": (float(lse_difference.max()), WORST_LSE),
    }
    for name, (value, limit) in measured.items():
        if not value <= limit:
            raise WrongResult(f"{name}: expected at most {limit:.4f}, got {value:.4f}")
    return error


def stage_difference(result: list[Tensor], load: Load) -> float:
    """Return the largest relative L1 difference of all results from the current configuration."""
    largest = 0.0
    for tensor, expected in zip(result, load.expected, strict=True):
        if tensor.shape != expected.shape:
            continue  # partial sums, by program
        tensor, expected = tensor.float(), expected.float()
        difference = torch.where(tensor == expected, 0.0, (tensor - expected).abs()).sum(dtype=torch.float64)
        size = torch.nan_to_num(expected, posinf=0.0, neginf=0.0).abs().sum(dtype=torch.float64)
        largest = max(largest, float(difference / size.clamp(min=1e-30)))
        if not math.isfinite(largest) or largest > STAGE_DIFFERENCE:
            raise WrongResult(f"difference: expected at most {STAGE_DIFFERENCE}, got {largest:.4f}")
    return largest


class Recorder:
    """A recorder for `gpu.launch` that collects the compiled kernels."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []

    def add_launch(self, compiled: Any, *_: Any, **__: Any) -> None:
        if compiled is not None:  # None under Triton's interpreter
            self.compiled.append(compiled)

    def add_buffer(self, *_: Any, **__: Any) -> None:
        pass


def resources(load: Load) -> dict[str, int | None]:
    """Return the largest registers and spills per thread and shared memory per program of the case's kernels."""
    from sparge.backends.gpu.replay import current_recorder

    recorder = Recorder()
    token = current_recorder.set(recorder)  # type: ignore[arg-type]
    try:
        load.run()
    finally:
        current_recorder.reset(token)
    word = "attention" if load.case.is_attention else load.case.kernel
    named = [kernel for kernel in recorder.compiled if word in str(getattr(kernel.metadata, "name", ""))]
    kernels = named or recorder.compiled

    def largest(values: Iterator[int | None]) -> int | None:
        return max((value for value in values if value is not None), default=None)

    return {
        "registers": largest(getattr(kernel, "n_regs", None) for kernel in kernels),
        "spills": largest(getattr(kernel, "n_spills", None) for kernel in kernels),
        "shared": largest(getattr(kernel.metadata, "shared", None) for kernel in kernels),
    }


def time_all(load: Load, configs: list[Any], turns: int) -> dict[str, Any]:
    """Return the median milliseconds of every configuration, by graph replay, or by events if capture fails."""
    variants = {
        str(index): TimedCall(load.run, partial(override, load.case.kernel, config))
        for index, config in enumerate(configs)
    }
    timings = time_on_cuda(variants, turns).values()
    return {
        "ms": [timing.ms if timing.graph_ms is None else timing.graph_ms for timing in timings],
        "problems": [timing.problem for timing in timings],
        "flop": load.flop,
    }


def answer(case: Case, configs: list[Any], turns: int) -> dict[str, Any]:
    """Return the answer to a request."""
    try:
        load = load_of(case, torch.device("cuda", torch.cuda.current_device()))
        return time_all(load, configs, turns) if turns else check(load, configs[0])
    except WrongResult as error:
        return {"status": "wrong", "note": str(error)}
    except Exception as error:
        # Compilers, drivers and allocators raise many types of errors. A failed candidate becomes a row of the table.
        return {"status": "failed", "note": reason(error)}


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)  # kernels may print
        output.write(pickle.dumps(answer(*pickle.load(sys.stdin.buffer))))
