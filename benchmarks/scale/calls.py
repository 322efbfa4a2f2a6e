"""Time calls of `sparge.distributed` on one rank without links: device time and launch overhead.

Copies of this rank's data replace the data of other ranks, so everything is computed and nothing is sent. Outputs are
meaningless; times and densities are valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import sparge
from benchmarks.scale.parts import make_inputs
from benchmarks.scale.plan import WORKLOADS, Workload
from sparge.distributed import context_parallel_attention, shard, split_lengths
from sparge.distributed.communicator import Communicator, Wait
from sparge.evaluate.timing import device_seconds, host_seconds

RANKS = 8
SHARES = (0.5, 0.25, 0.1)
TIMED = 6
MODES: tuple[Literal["ulysses", "gather", "ring"], ...] = ("ulysses", "gather", "ring")


class Mirror(Communicator):
    """A communicator whose peers all have this rank's data. It copies as many bytes as a rank receives."""

    name = "mirror"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, local: Tensor) -> Tensor:
        return local * self.size

    def all_gather(self, local: Tensor) -> Tensor:
        return local.expand(self.size, *local.shape).contiguous()

    def start_gather_tokens(self, tokens: Tensor, lengths: Sequence[int]) -> Wait:
        return partial(self._filled, tokens.permute(2, 0, 1, 3).contiguous(), sum(lengths))

    def exchange(self, tokens: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        del sent
        times = -(-sum(received) // len(tokens))
        return tokens.contiguous().expand(times, *tokens.shape).flatten(0, 1)[: sum(received)]

    def start_ring_shift(
        self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]
    ) -> Callable[[], list[Tensor]]:
        received = [
            self._filled(tensor.permute(2, 0, 1, 3), shape[2]) for tensor, shape in zip(tensors, shapes, strict=True)
        ]
        return lambda: [tensor.contiguous() for tensor in received]

    @staticmethod
    def _filled(tokens: Tensor, length: int) -> Tensor:
        """Repeat tokens (n, B, H, D) up to a length, and return (B, H, length, D)."""
        times = -(-length // len(tokens))
        return tokens.expand(times, *tokens.shape).flatten(0, 1)[:length].permute(1, 2, 0, 3)


def rank_call(
    mode: Literal["ulysses", "gather", "ring"],
    workload: Workload,
    inputs: Sequence[Tensor],
    topk: float,
    ranks: int = RANKS,
) -> Callable[[], Any]:
    """Return a function that runs the call of the middle rank."""
    options: dict[str, Any] = {"is_causal": workload.is_causal, "enable_gqa": True, "topk": topk}
    sharding: Any = "head_tail" if workload.is_causal and mode != "ulysses" else "contiguous"
    lengths = (workload.tokens // ranks,) * ranks if sharding == "head_tail" else split_lengths(workload.tokens, ranks)
    local = [shard(tensor, ranks // 2, ranks, sharding=sharding, lengths=lengths) for tensor in inputs]
    if mode != "ulysses":
        options["sharding"] = sharding
    return partial(
        context_parallel_attention, *local, mode=mode, group=Mirror(ranks // 2, ranks), lengths=lengths, **options
    )


def seconds_of(run: Callable[[], Any]) -> tuple[float, float]:
    """Return seconds per call in a sequence of calls: device time and launch overhead."""
    on_device = device_seconds(run, untimed=3, timed=TIMED)
    on_host = host_seconds(run, timed=TIMED)
    torch.cuda.synchronize()
    return on_device, on_host


@torch.no_grad()
def all_rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each workload that fits one GPU, density and mode."""
    for workload in WORKLOADS[:2]:
        inputs = make_inputs(workload, "cuda")
        tensors = (inputs.query, inputs.key, inputs.value)
        for topk in SHARES:
            whole = partial(sparge.attention, *tensors, is_causal=workload.is_causal, enable_gqa=True, topk=topk)
            one, _ = seconds_of(whole)
            for mode in MODES:
                run = rank_call(mode, workload, tensors, topk)
                sparge.reset_stats()
                run()
                density = sparge.stats().density
                both, host = seconds_of(run)
                row = {"suite": "scale_calls", "workload": workload.name, "mode": mode, "ranks": RANKS, "topk": topk}
                row |= {"ms": 1e3 * both, "host_ms": 1e3 * host, "whole_ms": 1e3 * one, "density": density}
                yield row
        del inputs, tensors, whole, run
        torch.cuda.empty_cache()
