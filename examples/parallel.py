"""Shared code of the parallel examples: the process group, inputs, and a comparison with one process."""

import torch
import torch.distributed as dist
from torch import Tensor

import sparge

IS_OURS = not dist.is_initialized()
HAS_GPU = torch.cuda.is_available()
BACKEND = "auto" if HAS_GPU else "torch"  # "auto" would run this short sequence dense on a CPU


def start() -> tuple[int, int]:
    """Join the process group of torchrun, and return this rank and the number of ranks."""
    if IS_OURS:
        dist.init_process_group("nccl" if HAS_GPU else "gloo")
    if HAS_GPU:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return dist.get_rank(), dist.get_world_size()


def finish() -> None:
    """Leave the process group."""
    if IS_OURS:
        dist.destroy_process_group()


def tokens(heads: int = 8) -> list[Tensor]:
    """Return query, key and value of a sequence, equal on all ranks. The first heads attend to the most keys."""
    generator = torch.Generator().manual_seed(0)
    length = 8192 if HAS_GPU else 2048
    query, key, value = (torch.randn(1, heads, length, 64, generator=generator) for _ in range(3))
    block_means = torch.randn(1, heads, length // 64, 64, generator=generator)
    key += 2 * block_means.repeat_interleave(64, dim=2)
    query *= torch.linspace(0.05, 1.5, heads)[:, None, None]
    return [tensor.half().cuda() if HAS_GPU else tensor for tensor in (query, key, value)]


def report(name: str, output: Tensor, expected: Tensor) -> None:
    """Print the density of each rank, and whether the outputs of all ranks equal the expected ones."""
    densities: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(densities, sparge.stats().density)
    error = (output.float() - expected.float()).norm() / expected.float().norm()
    dist.all_reduce(error, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        by_rank = ", ".join(f"{density:.3f}" for density in densities)
        print(f"{name}: density by rank {by_rank}; equal to one process: {bool(error < (0.05 if HAS_GPU else 1e-5))}")
