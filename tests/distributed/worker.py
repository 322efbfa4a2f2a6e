"""Run tasks on ranks of gloo groups, each rank in its own process.

    python -m tests.distributed.worker FOLDER SIZE TASKS [SIZE TASKS ...]

Each pair of arguments is a group: the number of ranks and a comma-separated list of functions of this module. The
groups run one after another, and each rank writes its results to FOLDER/SIZE-TASKS-RANK.json. One process imports
everything and forks the ranks, because imports take longer than most tasks. A task that loses ranks ends with rank 0.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import json
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor  # once, before ranks are forked
import torch.multiprocessing
from tests.distributed.cases import Case, check_rank, make_tensors, run_one_process

import sparge
from sparge.distributed import HeadBalance, context_parallel_attention
from sparge.distributed.communicator import Communicator

TIMEOUT_S = 60.0
EXAMPLES = Path(__file__).parents[2] / "examples"


def cases(size: int) -> list[Case]:
    """Return a few cases of each mode: only the collectives differ from those of `test_modes`."""
    modes = ("ulysses", "gather", "ring")
    cases = [Case(mode, "budget") for mode in modes] + [Case(mode, "budget", length=1000) for mode in modes]
    cases += [Case(mode, "budget", True, "head_tail", batch=2) for mode in ("gather", "ring")]
    if size == 2:
        cases += [Case(mode, rule, causal) for mode in modes for rule, causal in (("topcdf", True), ("dense", False))]
        cases += [Case("ulysses", heads=(4, 1)), Case("gather", options={"kv_heads_at_once": 1})]
        cases.append(Case("ulysses", lengths=(300, 724)))
    return cases


def every_case(size: int) -> dict[str, str]:
    """Run all cases and return the errors by case."""
    communicator, failures = Communicator(), {}
    for case in cases(size):
        inputs = make_tensors(case)
        try:
            check_rank(case, inputs, run_one_process(case, inputs, "torch"), (communicator,), "torch")
        except AssertionError:
            failures[str(case)] = traceback.format_exc()
    return failures


def mesh_cases(size: int) -> dict[str, str]:
    """Run cases on a mesh with two columns and return the errors by case."""
    failures = {}
    mesh = torch.distributed.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("column", "row"))
    communicators = (Communicator(mesh.get_group("row")), Communicator(mesh.get_group("column")))
    for mode in ("gather", "ring"):
        for is_causal in (False, True):
            case = Case(mode, "budget", is_causal, "head_tail" if is_causal else "contiguous")
            inputs = make_tensors(case)
            try:
                check_rank(case, inputs, run_one_process(case, inputs, "torch"), communicators, "torch")
            except AssertionError:
                failures[str(case)] = traceback.format_exc()
    return failures


PER_HEAD_RULE = sparge.TopK(torch.full((4,), 0.5))
MASK = torch.ones(1, 1, 1, 512, dtype=torch.bool)
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "topk": ({"topk": 0.5}, {"topk": 0.25}),
    "is_causal": ({"is_causal": False}, {"is_causal": True}),
    "scale": ({"scale": 0.2}, {"scale": 0.3}),
    "mode": ({"mode": "ulysses"}, {"mode": "gather"}),
    "sharding": ({"mode": "ring"}, {"mode": "ring", "sharding": "head_tail"}),
    "lengths": ({"lengths": (256, 256)}, {"lengths": (128, 256)}),
    "kv_heads_at_once": ({"mode": "gather"}, {"mode": "gather", "kv_heads_at_once": 1}),
    "balance": ({}, {"balance": HeadBalance()}),
    "window": ({}, {"window": (100, 100)}),
    "sparsity": (
        {"topk": None, "sparsity": PER_HEAD_RULE},
        {"topk": None, "sparsity": sparge.TopK(torch.tensor([0.5, 0.5, 0.5, 0.6]))},
    ),
    "score": ({}, {"score": "mean"}),
    "quantization": ({"quantization": "none"}, {"quantization": "int8_fp8"}),
    "skipped": ({}, {"skipped": "drop"}),
    "always_keep": ({"always_keep": [(0, 100)]}, {"always_keep": [(0, 50)]}),
    "exact_queries": ({}, {"exact_queries": [(0, 50)]}),
    "return_lse": ({}, {"return_lse": True}),
    "backend": ({}, {"backend": "reference"}),
    "attn_mask": ({}, {"attn_mask": MASK}),
    "query dtype": ({}, {"dtype": torch.bfloat16}),
    "query heads": ({}, {"heads": 2}),
    "layout": ({}, {"layout": "NHD"}),
    "gradients": ({}, {"grad": True}),
    "resolved to": ({"lengths": (256, 300)}, {"lengths": (256, 300)}),
}
"""Options of rank 0 and of the other ranks, keyed by the name in the error."""


def invalid_groups(size: int) -> dict[str, str]:
    """Return the errors for invalid groups and for missing ``lengths``."""
    tokens = torch.randn(1, size, 128, 32)
    gather = functools.partial(context_parallel_attention, mode="gather")
    other = [dist.new_group([rank]) for rank in range(size)][dist.get_rank() - 1]
    calls = {
        "not a group": lambda: gather(tokens, tokens, tokens, group="row"),
        "group without this rank": lambda: gather(tokens, tokens, tokens, group=other),
        "not a mesh": lambda: gather(tokens, tokens, tokens, group=(dist.group.WORLD, None)),
        "different lengths": lambda: gather(*[torch.randn(1, 2, 100 + dist.get_rank(), 32)] * 3),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError, RuntimeError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def different_options(_: int) -> dict[str, Any]:
    """Return the error of this rank for each entry of `DIFFERENT`, and for later calls with equal options."""
    rank = dist.get_rank()
    equal = {"topk": 0.5, "backend": "torch"}
    tokens = torch.randn(1, 4, 256, 32)
    errors = {}
    for name, (first, *others) in DIFFERENT.items():
        options: dict[str, Any] = equal | (others[-1] if rank else first)
        dtype, heads = options.pop("dtype", torch.float32), options.pop("heads", 4)
        tensors = [tokens[:, :heads].to(dtype, copy=True).requires_grad_(options.pop("grad", False)) for _ in range(3)]
        if options.get("layout") == "NHD":
            tensors = [tensor.transpose(1, 2) for tensor in tensors]
        with torch.enable_grad():
            errors[name] = _raised(
                lambda tensors=tensors, options=options: context_parallel_attention(*tensors, **options)
            )
    errors["equal"] = _raised(lambda: context_parallel_attention(tokens, tokens, tokens, **equal))
    errors["another kind"] = _raised(lambda: context_parallel_attention(*[tokens] * 3, **equal, scale=0.1 * (1 + rank)))
    errors["equal again"] = _raised(lambda: context_parallel_attention(tokens, tokens, tokens, **equal))
    return errors


def _raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def collectives(size: int) -> dict[str, list[int]]:
    """Count the tensors that each of three equal calls gathers from all ranks, by call."""
    counts = [0]
    gather = Communicator.all_gather

    def counted(self: Communicator, local: torch.Tensor) -> torch.Tensor:
        counts[-1] += 1
        return gather(self, local)

    Communicator.all_gather = counted  # type: ignore[method-assign]
    tokens = torch.randn(1, 4, 256, 32)
    mask = torch.ones(1, 1, 1, 256 * size, dtype=torch.bool)
    kinds: dict[str, dict[str, Any]] = {mode: {"mode": mode} for mode in ("ulysses", "gather", "ring")}
    kinds["mask"] = {"attn_mask": mask, "always_keep": [(0, 100)]}
    kinds["per head"] = {"sparsity": sparge.TopK(torch.tensor([0.1, 0.5, 0.7, 0.9]))}
    counts_by_kind = {}
    for name, options in kinds.items():
        counts_by_kind[name] = []
        for _ in range(3):
            counts.append(0)
            rule = {} if "sparsity" in options else {"topk": 0.5}
            context_parallel_attention(tokens, tokens, tokens, scale=0.5, backend="torch", **rule, **options)
            counts_by_kind[name].append(counts[-1])
    Communicator.all_gather = gather  # type: ignore[method-assign]
    return counts_by_kind


def examples(size: int) -> dict[str, str]:
    """Run the example and return its output on this rank, by mode."""
    printed = {}
    sys.path.insert(0, str(EXAMPLES))  # as Python does for a script
    for mode in ("ulysses", "gather", "ring") if size == 2 else ("gather", "ring"):
        sys.argv = ["parallel_attention.py", "--mode", mode, "--machines", str(size // 2)]
        with contextlib.redirect_stdout(io.StringIO()) as lines:
            runpy.run_path(str(EXAMPLES / sys.argv[0]), run_name="__main__")
        printed[mode if size == 2 else f"{mode} on {size // 2} machines"] = lines.getvalue()
    return printed


def gone(rank: int, connected: Path) -> str:
    """Return the error after another rank has exited."""
    if rank:
        while not connected.exists():  # rank 0 may still be connecting to this one
            time.sleep(0.01)
        os._exit(3)
    connected.touch()
    return _error()


def stuck(rank: int, _: Path) -> str:
    """Return the error if another rank does not make the call."""
    if rank:
        time.sleep(30)
        return ""
    return _error()


def _error() -> str:
    tokens = torch.randn(1, 2, 256, 32)
    try:
        context_parallel_attention(tokens, tokens, tokens, mode="gather", backend="torch")
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


def run_tasks(rank: int, size: int, folder: Path, tasks: str) -> None:
    """Run the tasks of one rank and write its results."""
    group = f"{size}-{tasks}"
    timeout = datetime.timedelta(seconds=2.0 if tasks == "stuck" else TIMEOUT_S)
    store = f"file://{folder}/{group}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
    result = (
        TASKS_THAT_LOSE_RANKS[tasks](rank, folder / f"{group}.connected")
        if tasks in TASKS_THAT_LOSE_RANKS
        else {name: globals()[name](size) for name in tasks.split(",")}
    )
    (folder / f"{group}-{rank}.json").write_text(json.dumps(result))
    os._exit(0)  # a group with failed ranks cannot be destroyed


TASKS_THAT_LOSE_RANKS = {"gone": gone, "stuck": stuck}


def main(folder: Path, groups: list[str]) -> None:
    torch.set_num_threads(1)  # forked processes do not have the other threads
    torch.set_grad_enabled(False)
    context = torch.multiprocessing.get_context("fork")
    for size, tasks in zip(map(int, groups[::2]), groups[1::2], strict=True):
        ranks = [context.Process(target=run_tasks, args=(rank, size, folder, tasks)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks[:1] if tasks in TASKS_THAT_LOSE_RANKS else ranks:
            process.join()
        for process in ranks:
            process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
