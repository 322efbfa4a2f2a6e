"""Time whole models with random weights: stock, dense quantized, and sparse. `python -m benchmarks.models`

Models have published shapes (`model_shapes`) and random weights, so attention has little structure. Speed-ups are
valid for trained models, but errors are not. "Stock" is torch's SDPA. If FlashAttention-4 is installed, the dense
model is also timed with it, except when compiled. Needs a CUDA device.

    forward     one forward pass: stock, dense quantized, and sparse; eager, or compiled block by block
    schedule    20 denoising steps; the first fifth is dense, in 16 bits or quantized
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import sparge
from benchmarks.measure import append_row
from benchmarks.model_shapes import CASES, Case, build
from sparge.bench.rivals import fa4_version, import_fa4, output_of
from sparge.bench.timing import attempt
from sparge.evaluate.timing import device_seconds, take_turns

RESULTS = Path(__file__).parent / "results" / "models.jsonl"
STEPS, DENSE_STEPS = 20, 0.2


class Fa4Sdpa(TorchFunctionMode):
    """Run SDPA calls on FlashAttention-4 if it computes the same result, to time a dense model at its fastest."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = _fa4_sdpa(*args, **kwargs or {}) if func is F.scaled_dot_product_attention else None
        return func(*args, **kwargs or {}) if output is None else output


def _fa4_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001, FlashAttention-4 always allows it
) -> Tensor | None:
    """Return the output, or None for a call with a mask, dropout, float32 or top-left causality."""
    is_aligned = not is_causal or query.shape[2] == key.shape[2]
    if attn_mask is not None or dropout_p or query.dtype == torch.float32 or query.ndim != 4 or not is_aligned:
        return None
    tokens_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return output_of(import_fa4().flash_attn_func(*tokens_first, causal=is_causal, softmax_scale=scale)).transpose(1, 2)


@contextmanager
def enabled(case: Case, policy: sparge.Policy, scheduler: Any = None) -> Iterator[None]:
    """Enable sparse attention within the context."""
    sparge.enable(case.model, policy, scheduler=scheduler)
    try:
        yield
    finally:
        sparge.disable(case.model)


def all_dense_quantized(case: Case) -> sparge.Policy:
    """Return a policy that runs all layers dense, and quantized if that is faster."""
    config = case.model.config
    names = ("num_layers", "num_single_layers", "num_hidden_layers")
    layers = sum(getattr(config, name, None) or 0 for name in names)
    return sparge.Policy(dense_layers=tuple(range(layers)), dense="8bit")


@contextmanager
def compiled(model: nn.Module) -> Iterator[None]:
    """Compile each block within the context, as diffusers and transformers recommend."""
    blocks = [block for part in model.children() if isinstance(part, nn.ModuleList) for block in part]
    for block in blocks:
        block.compile(fullgraph=True)
    try:
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None
        torch.compiler.reset()


Contexts = dict[str, Callable[[], Any]]


def _other_kernels() -> Contexts:
    """Return contexts in which a dense model runs a rival kernel instead of SDPA's choice, by name of the rival."""
    return {} if fa4_version() is None else {"fa4": Fa4Sdpa}


def compare(
    contexts: Contexts, policies: Sequence[str], warm_up: Callable[[], Any], run: Callable[[], Tensor], **turns: int
) -> dict[str, dict[str, Any]]:
    """Time a call in every context, interleaved, and return the columns of each policy.

    Args:
        contexts: contexts by name: "stock", other dense kernels, and policies.
        policies: names of the contexts that are policies.
        warm_up: called once in every context before its first timed call, to compile and tune kernels.
        run: the timed call.
        turns: ``turns`` and ``discarded`` of `take_turns`.
    """
    results: dict[str, tuple[Tensor, sparge.Stats]] = {}
    problems: dict[str, str] = {}

    def timed(name: str) -> float:
        with contexts[name]():
            if name not in results:
                warm_up()
            sparge.reset_stats()
            outputs: list[Tensor] = []
            seconds = device_seconds(lambda: outputs.append(run()), untimed=0, timed=1)
            results[name] = outputs[-1].float(), sparge.stats()
            return seconds

    def clock(name: str) -> float | None:
        is_other_kernel = name not in ("stock", *policies)
        return attempt(problems, name, partial(timed, name)) if is_other_kernel else timed(name)

    times = take_turns({name: partial(clock, name) for name in contexts}, **turns)
    milliseconds = {name: 1e3 * statistics.median(values) if values else None for name, values in times.items()}
    stock = results["stock"][0]
    errors = {name: float((output - stock).abs().sum() / stock.abs().sum()) for name, (output, _) in results.items()}
    dense = [name for name in contexts if name not in policies]
    common: dict[str, Any] = {f"{name}_ms": milliseconds[name] for name in dense} | {"problems": problems}
    common |= {f"{name}_relative_l1": errors[name] for name in dense[1:] if name in errors}
    return {
        name: {
            **common,
            "sparse_ms": milliseconds[name],
            "density": stats.density if stats.sparse else 1.0,
            "relative_l1": errors[name],
            "reasons": stats.reasons,
        }
        for name, (_, stats) in results.items()
        if name in policies
    }


@torch.no_grad()
def forward_rows(
    name: str, case: Case, shares: list[float], repeats: int, is_compiled: bool
) -> Iterator[dict[str, Any]]:
    """Yield a row for each variant of a forward pass."""
    step = torch.tensor([500.0], device="cuda")
    policies = {"8 bits": all_dense_quantized(case)} | {f"{share:g}": sparge.Policy(topk=share) for share in shares}
    contexts: Contexts = {"stock": nullcontext, **({} if is_compiled else _other_kernels())}
    contexts |= {variant: partial(enabled, case, policy) for variant, policy in policies.items()}
    run = partial(case.forward, case.model, case.latents, step)
    discarded = 1 if is_compiled else 0  # the first turn after compilation is 1.5x as fast as later turns
    with compiled(case.model) if is_compiled else nullcontext():
        columns = compare(contexts, list(policies), run, run, turns=repeats, discarded=discarded)
    for variant, of_policy in columns.items():
        topk = None if variant == "8 bits" else float(variant)
        row = {"case": "forward", "model": name, "variant": variant, "topk": topk, "compiled": is_compiled}
        yield row | of_policy


@torch.no_grad()
def schedule_rows(name: str, case: Case, share: float, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each precision of the dense steps of a schedule."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler()

    def run(steps: int = STEPS) -> Tensor:
        scheduler.set_timesteps(steps, device="cuda")
        latents = case.latents
        assert latents is not None
        for step in scheduler.timesteps:
            noise = case.forward(case.model, latents, step[None])
            latents = scheduler.step(noise, step, latents, return_dict=False)[0]
        return latents

    contexts: Contexts = {"stock": nullcontext, **_other_kernels()}
    for bits in ("16bit", "8bit"):
        policy = sparge.Policy(topk=share, dense_first_steps=DENSE_STEPS, dense=bits)  # type: ignore[arg-type]
        contexts[bits] = partial(enabled, case, policy, scheduler)
    # A warm-up of two steps, one dense and one sparse, compiles and tunes.
    columns = compare(contexts, ("16bit", "8bit"), partial(run, steps=2), run, turns=repeats, discarded=0)
    for bits, of_policy in columns.items():
        row = {"case": "schedule", "model": name, "variant": bits, "topk": share, "steps": STEPS}
        yield row | {"dense_steps": DENSE_STEPS} | of_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topk", type=float, nargs="+", default=[0.5, 0.25, 0.15])
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compiled", action="store_true", help="compile each block instead of running eagerly")
    parser.add_argument(
        "--schedule", action="store_true", help="time whole schedules at topk 0.25 instead of forward passes"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    for name in args.models:
        case = build(name)
        if args.schedule:
            rows = schedule_rows(name, case, 0.25, args.repeats)
        else:
            rows = forward_rows(name, case, args.topk, args.repeats, args.compiled)
        for row in rows:
            append_row(args.results, row | {"flash_attn_4": fa4_version()}, gpu=True)
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
