"""Ranks of gloo groups, in processes of their own.

    python -m tests.distributed.worker FOLDER SIZE WORKS [SIZE WORKS ...]

One group after another, each of so many ranks, runs its works, functions of this module with commas between them. What
a rank has found is FOLDER/SIZE-WORKS-RANK.json. One process imports everything and forks the ranks: to import takes
longer than most works. A work that loses ranks ends with rank 0.
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

import torch
import torch.distributed as dist
import torch.distributed.tensor  # by the first comparison of each rank, if not once for all
import torch.multiprocessing
from tests.distributed.cases import Case, check, tensors, whole

from sparge.distributed import gathered_attention, mesh_attention
from sparge.distributed.exchange import Exchange

PATIENCE = 60.0
EXAMPLES = Path(__file__).parents[2] / "examples"


def cases(size: int) -> list[Case]:
    """A few of each kind: what a group of processes may do differently from threads is the exchange."""
    modes = ("ulysses", "gathered", "ring")
    found = [Case(mode, "budget") for mode in modes] + [Case(mode, "budget", length=1000) for mode in modes]
    found += [Case(mode, "budget", True, "head_tail", batch=2) for mode in ("gathered", "ring")]
    if size == 2:
        found += [Case(mode, rule, causal) for mode in modes for rule, causal in (("topcdf", True), ("dense", False))]
        found += [Case("ulysses", heads=(4, 1)), Case("gathered", options={"kv_heads_at_once": 1})]
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
        "uneven": lambda: gathered_attention(*[torch.randn(1, 2, 100 + dist.get_rank(), 32)] * 3),
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


def work(rank: int, size: int, folder: Path, works: str) -> None:
    """The life of one rank."""
    group = f"{size}-{works}"
    patience = datetime.timedelta(seconds=2.0 if works == "stuck" else PATIENCE)
    store = f"file://{folder}/{group}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=patience)
    result = LOSING[works](rank) if works in LOSING else {name: globals()[name](size) for name in works.split(",")}
    (folder / f"{group}-{rank}.json").write_text(json.dumps(result))
    os._exit(0)  # groups whose ranks are gone cannot be taken apart


LOSING = {"gone": gone, "stuck": stuck}


def main(folder: Path, groups: list[str]) -> None:
    torch.set_num_threads(1)  # others would not live on in forked processes
    torch.set_grad_enabled(False)
    context = torch.multiprocessing.get_context("fork")
    for size, works in zip(map(int, groups[::2]), groups[1::2], strict=True):
        ranks = [context.Process(target=work, args=(rank, size, folder, works)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks[:1] if works in LOSING else ranks:
            process.join()
        for process in ranks:
            process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
