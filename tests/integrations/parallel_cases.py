"""Run cases of context parallelism on several gloo processes, which write their results to a folder.

    python parallel_cases.py FOLDER [CASE]

One process imports everything and forks two ranks, then four: imports take longer than all cases.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import logging
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import families
import torch
import torch._dynamo  # once, before ranks are forked
import torch.distributed as dist
import torch.multiprocessing
from diffusers import ContextParallelConfig, ParallelConfig
from families.family import first_tensor
from tiny_pipelines import PIPELINES, call
from tiny_transformers import TRANSFORMERS, build
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import sparge
from sparge import Budget, Policy, TopK
from sparge.integrations.diffusers import backend
from sparge.integrations.hooks import THREAD
from sparge.integrations.layers import Layer
from sparge.integrations.sdpa import Scope, Tokens

SPARSE = Policy(sparsity=Budget(0.4), backend="torch", on_unsupported="raise")
LOOSE = replace(SPARSE, on_unsupported="dense")
DENSE = Policy(min_tokens=10**6)
ULYSSES, RING = {"ulysses_degree": 2}, {"ring_degree": 2}
DEGREES = {"ulysses": ULYSSES, "ring": RING}
MODELS = ("wan", "flux", "ltx", "qwen_image", "flux2", "chronoedit", "minimax_h3", "helios", "ltx2")
FAMILIES = {
    "qwen_image": "QwenImageTransformer2DModel",
    "flux2": "Flux2Transformer2DModel",
    "chronoedit": "ChronoEditTransformer3DModel",
    "minimax_h3": "MiniMaxH3Transformer3DModel",
    "ltx2": "LTX2VideoTransformer3DModel",
}
"""Class names of the models that are built from the tables of families."""

EXAMPLES = Path(__file__).parents[2] / "examples"

Case = Callable[[], Any]
CASES: dict[int, dict[str, Case]] = {2: {}, 4: {}}
"""Functions by number of ranks and name."""
SLOW = "compiled"
"""Runs only on request: torch's tracing takes as long as ten other cases."""


def case(name: str, ranks: int = 2) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        CASES[ranks][name] = function
        return function

    return register


def model_of(name: str) -> tuple[Any, dict[str, Any]]:
    if name in TRANSFORMERS:
        return build(name)
    torch.manual_seed(0)
    if name == "helios":
        return helios()
    built = families.build(FAMILIES[name])
    if name == "ltx2":  # not in diffusers' plan
        built.model._cp_plan = {**built.model._cp_plan, "cross_attn_rope": built.model._cp_plan["rope"]}
    return built.model.eval(), built.inputs


def helios() -> tuple[Any, dict[str, Any]]:
    """Return Helios with an even number of tokens, and a plan for its two blocks."""
    tiny = families.build("HeliosTransformer3DModel")
    # diffusers derives is_amplify_history from the length of the whole sequence.
    config = {**tiny.model.config, "is_amplify_history": False}
    model = diffusers.HeliosTransformer3DModel(**{k: v for k, v in config.items() if not k.startswith("_")}).eval()
    model._cp_plan = {name: plan for name, plan in model._cp_plan.items() if name.split(".")[1] in "*01"}
    noise = {
        name: torch.randn(1, 4, frames, 32, 24)
        for name, frames in {"hidden_states": 3, "latents_history_short": 1, "latents_history_mid": 2}.items()
    }
    return model, {**tiny.inputs, **noise, "latents_history_long": torch.randn(1, 4, 4, 32, 24)}


def run(model: Any, inputs: dict[str, Any]) -> Tensor:
    return first_tensor(model(**inputs, return_dict=False))


def with_reasons(function: Callable[[], Any]) -> tuple[Any, dict[str, dict[str, int]]]:
    """Return the result of a function, and the counts of reasons by layer."""
    sparge.reset_stats()
    result = function()
    return result, {name: dict(row.reasons) for name, row in sparge.stats().layers.items()}


def compare_ranks(name: str, policy: Policy, degrees: dict[str, Any]) -> dict[str, Any]:
    """Run a model on one rank and on two, and return both outputs and the stock output."""
    model, inputs = model_of(name)
    stock = run(model, inputs)
    sparge.enable(model, policy)
    expected, expected_reasons = with_reasons(lambda: run(model, inputs))
    model.enable_parallelism(config=ContextParallelConfig(**degrees))
    got, reasons = with_reasons(lambda: run(model, inputs))
    return {"stock": stock, "expected": expected, "got": got, "expected_reasons": expected_reasons, "reasons": reasons}


for _name in MODELS:
    for _kind, _degrees in DEGREES.items():
        case(f"{_name}, {_kind}")(lambda name=_name, degrees=_degrees: compare_ranks(name, SPARSE, degrees))

for _name in ("wan", "flux", "ltx"):
    case(f"{_name}, dense ring")(lambda name=_name: compare_ranks(name, DENSE, RING))

PER_HEAD = Policy(
    sparsity=TopK(torch.tensor([0.2, 0.7]), min_blocks=1, pv_threshold=torch.tensor([-3.0, -9.0])), backend="torch"
)
for _kind, _degrees in DEGREES.items():
    case(f"wan per head, {_kind}")(lambda degrees=_degrees: compare_ranks("wan", PER_HEAD, degrees))


def compare_latents(name: str, degrees: dict[str, Any]) -> dict[str, Any]:
    """Run a pipeline with a dense first step on one rank and on two, and return the final latents."""
    pipe = PIPELINES[name]()
    policy = replace(SPARSE, dense_first_steps=1)
    options = {"max_sequence_length": 64} if name == "flux" else {}
    stock = call(name, pipe, **options)[-1]
    sparge.enable(pipe, policy)
    expected, expected_reasons = with_reasons(lambda: call(name, pipe, **options)[-1])
    pipe.transformer.enable_parallelism(config=ContextParallelConfig(**degrees))
    got, reasons = with_reasons(lambda: call(name, pipe, **options)[-1])
    return {"stock": stock, "expected": expected, "got": got, "expected_reasons": expected_reasons, "reasons": reasons}


for _name, _kind in (("wan", "ulysses"), ("flux", "ulysses"), ("ltx", "ring")):
    case(f"pipeline {_name}, {_kind}")(lambda name=_name, degrees=DEGREES[_kind]: compare_latents(name, degrees))


@case("orders")
def orders() -> dict[str, Tensor]:
    """Run `enable` and ``set_attention_backend`` before and after ``enable_parallelism``, and undo them."""
    backend.register(SPARSE)
    results = {}
    for name in ("wan", "flux"):
        model, inputs = model_of(name)
        results[f"{name} stock"] = run(model, inputs)
        model.enable_parallelism(config=ContextParallelConfig(**ULYSSES))
        results[f"{name} native"] = run(model, inputs)
        sparge.enable(model, SPARSE)
        results[f"{name} parallel, enable"] = run(model, inputs)
        sparge.disable(model)
        results[f"{name} disabled"] = run(model, inputs)
        sparge.enable(model, SPARSE)
        results[f"{name} enabled again"] = run(model, inputs)
    model, inputs = model_of("wan")
    model.set_attention_backend("sparge")
    results["wan by name"] = run(model, inputs)
    model.enable_parallelism(config=ContextParallelConfig(**RING))
    results["wan by name, parallel"] = run(model, inputs)
    model, inputs = model_of("wan")
    model.enable_parallelism(config=ContextParallelConfig(**RING))
    model.set_attention_backend("sparge")
    results["wan parallel, by name"] = run(model, inputs)
    model.set_attention_backend("native")
    return results


@case(SLOW)
def compiled() -> dict[str, Any]:
    """Run a compiled module: one graph before attention and one after it."""
    model, inputs = model_of("flux")
    sparge.enable(model, SPARSE)
    model.enable_parallelism(config=ContextParallelConfig(**RING))
    expected, expected_reasons = with_reasons(lambda: run(model, inputs))
    model.transformer_blocks[0].attn.compile(backend="eager")
    got, reasons = with_reasons(lambda: run(model, inputs))
    return {"expected": expected, "got": got, "expected_reasons": expected_reasons, "reasons": reasons}


TEXT, GRID = 40, (2, 11, 16)


def config_of(ulysses: int, ring: int, **options: Any) -> Any:
    """Return the configuration that ``enable_parallelism`` would set up, without a model."""
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    config = ParallelConfig(
        context_parallel_config=ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, **options)
    )
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)
    return config


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def shard(tensor: Tensor, dim: int, text: int) -> Tensor:
    """Return this rank's shard of text and image tokens."""
    parts = tensor.tensor_split((text,), dim)
    shards = (part.tensor_split(dist.get_world_size(), dim)[dist.get_rank()] for part in parts)
    return torch.cat(list(shards), dim)


def gather(tensor: Tensor, text: int) -> Tensor:
    """Return the tokens (B, S, H, D) of all ranks. Inverts `shard`."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tensor)
    seams = [len(part) for part in torch.arange(text).tensor_split(len(gathered))]
    parts = [part.tensor_split((seam,), 1) for part, seam in zip(gathered, seams, strict=True)]
    return torch.cat([first for first, _ in parts] + [second for _, second in parts], 1)


def run_in_scope(tokens: Tokens, policy: Policy, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, int]]:
    """Call the backend in a scope with these tokens, and return its output and the reasons."""
    sparge.reset_stats()
    THREAD.scopes.append(Scope(Layer("layer", policy), (tokens,), GRID))
    try:
        output = backend.attention(*args, **kwargs)
    finally:
        THREAD.scopes.pop()
    return output, dict(sparge.stats().layers["layer"].reasons)


def attention(
    config: Any,
    *,
    heads: int = 4,
    kv_heads: int | None = None,
    text: int = TEXT,
    tokens: int = TEXT + 2 * 11 * 16,
    mask: Tensor | None = None,
    own_mask: Tensor | None = None,
    policy: Policy = SPARSE,
    runs_dense: bool = False,
    text_last: bool = False,
    **call: Any,
) -> dict[str, Any]:
    """Run a call with text and image tokens on one rank and on all ranks; with `runs_dense`, one rank runs dense."""
    first = tokens - text if text_last else text
    query = noise(2, tokens, heads, 16)
    key, value = noise(2, tokens, kv_heads or heads, 16) / 2, noise(2, tokens, kv_heads or heads, 24)
    alone_by = DENSE if runs_dense else policy
    ranges = ((first, None) if text_last else (0, first),)
    expected, expected_reasons = run_in_scope(Tokens(True, ranges), alone_by, query, key, value, mask, **call)
    seam = len(torch.arange(first).tensor_split(dist.get_world_size())[dist.get_rank()])
    parts = (shard(tensor, 1, first) for tensor in (query, key, value))
    rank_tokens = Tokens(True, ((seam, None) if text_last else (0, seam),), seam=seam)
    got, reasons = run_in_scope(rank_tokens, policy, *parts, own_mask, **call, _parallel_config=config)
    return {"expected": expected, "got": gather(got, first), "expected_reasons": expected_reasons, "reasons": reasons}


@case("uneven")
def uneven() -> dict[str, Any]:
    """Run numbers of tokens, text tokens and heads that the ranks do not divide evenly."""
    sizes = {"heads": 3, "text": 37, "tokens": 37 + 2 * 11 * 16}
    sizes_without_grid = {"text": 37, "tokens": 37 + 351}
    return {
        "ulysses": attention(config_of(2, 1, ulysses_anything=True), **sizes),
        "ring": attention(config_of(1, 2, ring_anything=True), **sizes),
        "ulysses, no grid": attention(config_of(2, 1, ulysses_anything=True), **sizes_without_grid),
        "ring, no grid": attention(config_of(1, 2, ring_anything=True), **sizes_without_grid),
        "ring, text last": attention(config_of(1, 2, ring_anything=True), **sizes, text_last=True),
    }


def key_masks() -> dict[str, Tensor]:
    """Return masks over all keys: padding after the text, holes, and an additive mask that differs by head."""
    keys = torch.arange(TEXT + 2 * 11 * 16)
    padded = torch.stack([(keys < 30) | (keys >= TEXT), keys >= 0])[:, None, None]
    return {
        "padding": padded,
        "2-D": padded[:, 0, 0],
        "holes": (keys % 7 != 3)[None, None, None],
        "additive": noise(1, 4, 1, len(keys)),
    }


def with_masks(config: Any) -> dict[str, Any]:
    return {
        name: attention(config, mask=mask, own_mask=shard(mask, mask.ndim - 1, TEXT))
        for name, mask in key_masks().items()
    }


@case("masks")
def masks() -> dict[str, Any]:
    size = TEXT + 2 * 11 * 16
    rows = noise(1, 4, size, size) > -0.5
    shown = (noise(2, 1, 1, size) > -0.5).expand(-1, 4, size, -1)
    own_sizes = (2, 4, size // 2, size // 2)
    results = {}
    for kind, config in {"ulysses": config_of(2, 1), "ring": config_of(1, 2)}.items():
        results |= {f"{kind}, {name}": result for name, result in with_masks(config).items()}
        results[f"{kind}, expanded"] = attention(
            config, mask=shown, own_mask=shard(shown[:, :, :1], 3, TEXT).expand(own_sizes)
        )
        for which, mask in {"own": shard(rows, 2, TEXT), "all": rows}.items():
            result = attention(config, mask=rows, own_mask=mask, policy=LOOSE, runs_dense=kind == "ring")
            results[f"{kind}, {which} rows"] = result
    return results


@case("balance")
def balance() -> dict[str, Any]:
    """Run three steps of a layer whose first heads attend widely, with an additive mask that differs by head."""
    size, config = 1024, config_of(2, 1)
    query, key, value = (noise(1, size, 8, 16) for _ in range(3))
    key = key + 2 * noise(1, size // 64, 1, 8, 16).expand(-1, -1, 64, -1, -1).flatten(1, 2)
    query = query * torch.tensor([0.05] * 4 + [2.0] * 4)[:, None]
    mask = noise(1, 8, 1, size) / 4
    expected, _ = run_in_scope(Tokens(True), SPARSE, query, key, value, mask)
    layer, got, imbalances = Layer("layer", SPARSE), [], []
    for _ in range(3):
        sparge.reset_stats()
        THREAD.scopes.append(Scope(layer, (Tokens(True),), None))
        own_part = (shard(tensor, 1, 0) for tensor in (query, key, value))
        output = backend.attention(*own_part, shard(mask, 3, 0), _parallel_config=config)
        THREAD.scopes.pop()
        got.append(gather(output, 0))
        imbalances.append(sparge.stats().layers["layer"].imbalance)
    return {"expected": expected, "got": got, "imbalances": imbalances}


@case("kinds of calls")
def kinds_of_calls() -> dict[str, Any]:
    ulysses, ring = config_of(2, 1), config_of(1, 2)
    return {
        "grouped, ulysses": attention(ulysses, kv_heads=2, enable_gqa=True),
        "one key head, ulysses": attention(ulysses, kv_heads=1, enable_gqa=True),
        "grouped, ring": attention(ring, kv_heads=2, enable_gqa=True),
        "causal, ulysses": attention(ulysses, is_causal=True),
        "scaled, ring": attention(ring, scale=0.3),
        "few query blocks, ring": attention(ring, text=20, tokens=120, policy=LOOSE, runs_dense=True),
        "exact text, ring": attention(ring, text=10, tokens=1810, policy=replace(SPARSE, sparsity=Budget(0.6))),
        "text last, ulysses": attention(ulysses, text_last=True),
        "text last, ring": attention(ring, text_last=True),
        "similarity, ulysses": attention(
            ulysses, policy=replace(LOOSE, sparsity=Budget(0.4, similarity_threshold=0.1)), runs_dense=True
        ),
        "row order, ring": attention(ring, text=0, tokens=512, policy=replace(SPARSE, order="row")),
        "dropped, ring": attention(ring, policy=replace(SPARSE, skipped="drop")),
        "quantized, ulysses": attention(ulysses, policy=replace(SPARSE, quantization="int8_fp8")),
        "cdf, ring": attention(ring, policy=Policy(sparsity=sparge.TopCdf(0.7), backend="torch")),
    }


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except (NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@case("errors")
def errors() -> dict[str, str]:
    ulysses, ring = config_of(2, 1), config_of(1, 2)
    size = (TEXT + 2 * 11 * 16) // 2
    different = replace(SPARSE, sparsity=Budget(0.2)) if dist.get_rank() else replace(SPARSE)
    return {
        "mask": error_of(lambda: attention(ring, own_mask=torch.ones(size, size, dtype=torch.bool))),
        "causal": error_of(lambda: attention(ring, is_causal=True)),
        "heads": error_of(lambda: attention(ulysses, heads=1)),
        "policy": error_of(lambda: attention(ulysses, policy=different, scale=0.7)),  # not compared before
    }


@case("gradients")
def gradients() -> dict[str, Any]:
    """Run calls with gradients, which use diffusers' own context parallelism and run dense."""
    query = noise(1, 400, 2, 16).requires_grad_()
    tokens = Tokens(True)
    with torch.enable_grad():
        expected, _ = run_in_scope(tokens, LOOSE, query, query, query)
        part = shard(query.detach(), 1, 0).requires_grad_()
        got, reasons = run_in_scope(tokens, LOOSE, part, part, part, _parallel_config=config_of(2, 1))
        expected.square().sum().backward()
        got.square().sum().backward()
    return {"expected": shard(query.grad, 1, 0), "got": part.grad, "reasons": reasons}


@case("example")
def example() -> str:
    """Return the output that the script prints on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        runpy.run_path(str(EXAMPLES / "parallel_diffusers.py"))
    return lines.getvalue()


@case("mesh of two by two", ranks=4)
def mesh() -> dict[str, Any]:
    config = config_of(2, 2)
    return {
        "sparse": attention(config),
        "dense": attention(config, policy=DENSE),
        "per head": attention(
            config, policy=Policy(sparsity=TopK(torch.tensor([0.2, 0.7, 0.3, 1.0]), min_blocks=1), backend="torch")
        ),
        **with_masks(config),
    }


def work(rank: int, ranks: int, folder: Path) -> None:
    """Run all cases for this number of ranks. Stops at the first failure, after which ranks could deadlock."""
    torch.set_num_threads(1)
    backend.register()
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{ranks}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    results: dict[str, Any] = {}
    with torch.no_grad():
        for name, function in CASES[ranks].items():
            try:
                results[name] = function()
            except Exception:
                results["failed"] = f"{name}, rank {rank}\n{traceback.format_exc()}"
                break
    torch.save(results, folder / f"{ranks}-{rank}.pt")
    os._exit(0)  # a group with failed ranks cannot be destroyed


def main(folder: Path, only: str | None = None) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    context = torch.multiprocessing.get_context("fork")
    for ranks, cases in CASES.items():
        CASES[ranks] = {name: cases[name] for name in cases if (name == only if only else name != SLOW)}
        if not CASES[ranks]:
            continue
        processes = [context.Process(target=work, args=(rank, ranks, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES))  # as if a script in this folder ran
    main(Path(sys.argv[1]), *sys.argv[2:])
