"""One rank of a gloo group, in a process of its own: python -m tests.distributed.worker RANK SIZE STORE WORK.

It runs one of `WORKS` and prints what happened, a line of JSON.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.cases import Case, check, tensors, whole

from sparge.distributed import gathered_attention, mesh_attention
from sparge.distributed.exchange import Exchange

PATIENCE = 60.0
EXAMPLES = Path(__file__).parents[2] / "examples"


def cases(size: int) -> list[Case]:
    """A few of each kind: what a group of processes may do differently from threads is the exchange."""
    found = [
        Case(mode, rule, causal)
        for mode in ("ulysses", "gathered", "ring")
        for rule, causal in (("budget", False), ("topcdf", True), ("dense", False))
    ]
    found += [Case(mode, "budget", True, "head_tail", batch=2) for mode in ("gathered", "ring")]
    found += [Case(mode, "budget", length=1000) for mode in ("ulysses", "gathered", "ring")]
    found += [Case("ulysses", heads=(4, 1)), Case("gathered", options={"kv_heads_at_once": 1})]
    if size == 2:
        found.append(Case("ulysses", lengths=(300, 724)))
    return found


def every_case(size: int) -> dict[str, str]:
    """What went wrong, by case."""
    exchange, failures = Exchange(), {}
    for case in cases(size):
        inputs = tensors(case)
        try:
            check(case, inputs, whole(case, inputs, "torch"), (exchange,), "torch")
        except AssertionError:
            failures[str(case)] = traceback.format_exc()
    return failures


def mesh_cases(size: int) -> dict[str, str]:
    """The same for a mesh of two columns."""
    failures = {}
    mesh = torch.distributed.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("column", "row"))
    exchanges = (Exchange(mesh.get_group("row")), Exchange(mesh.get_group("column")))
    for mode in ("gathered", "ring"):
        for is_causal in (False, True):
            case = Case(mode, "budget", is_causal, "head_tail" if is_causal else "contiguous")
            inputs = tensors(case)
            try:
                check(case, inputs, whole(case, inputs, "torch"), exchanges, "torch")
            except AssertionError:
                failures[str(case)] = traceback.format_exc()
    return failures


def refusals(size: int) -> dict[str, str]:
    """What is said of groups that are none, or no mesh."""
    tokens = torch.randn(1, size, 128, 32)
    mesh = torch.distributed.init_device_mesh("cpu", (size,))
    other = [dist.new_group([rank]) for rank in range(size)][dist.get_rank() - 1]
    calls = {
        "a mesh": lambda: gathered_attention(tokens, tokens, tokens, group=mesh),
        "another's": lambda: gathered_attention(tokens, tokens, tokens, group=other),
        "twice": lambda: mesh_attention(tokens, tokens, tokens, ulysses_group=dist.group.WORLD, group=None),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def examples(size: int) -> dict[str, str]:
    """What each example for so many ranks prints on this one."""
    printed = {}
    sys.path.insert(0, str(EXAMPLES))  # as it is for a script that is run
    for path in sorted(EXAMPLES.glob("parallel_*_attention.py")):
        if f"--nproc-per-node {size} " in path.read_text():
            with contextlib.redirect_stdout(io.StringIO()) as lines:
                runpy.run_path(str(path), run_name="__main__")
            printed[path.name] = lines.getvalue()
    return printed


def gone(rank: int) -> str:
    """The error where another rank is no more."""
    if rank:
        os._exit(3)
    return _error()


def stuck(rank: int) -> str:
    """The error where another rank never calls."""
    if rank:
        time.sleep(30)
        return ""
    return _error()


def _error() -> str:
    tokens = torch.randn(1, 2, 256, 32)
    try:
        gathered_attention(tokens, tokens, tokens, backend="torch")
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


def main(rank: int, size: int, store: str, work: str) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    patience = datetime.timedelta(seconds=5.0 if work == "stuck" else PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=patience)
    result: Any
    if work in ("gone", "stuck"):
        result = {"gone": gone, "stuck": stuck}[work](rank)
    else:
        result = {name: globals()[name](size) for name in work.split(",")}
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)  # groups whose ranks are gone cannot be taken apart


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
