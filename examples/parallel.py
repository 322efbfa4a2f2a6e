"""What the parallel_*_attention examples share: the process group, and a sequence to attend to."""

import torch
import torch.distributed as dist
from torch import Tensor

IS_OURS = not dist.is_initialized()


def start() -> tuple[int, int, torch.device]:
    """Join the group that torchrun made: this rank, how many there are, and the device to compute on."""
    has_gpu = torch.cuda.is_available()
    if IS_OURS:
        dist.init_process_group("nccl" if has_gpu else "gloo")
    rank = dist.get_rank()
    if has_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return rank, dist.get_world_size(), torch.device("cuda" if has_gpu else "cpu")


def finish() -> None:
    """Leave it."""
    if IS_OURS:
        dist.destroy_process_group()


def tokens(device: torch.device, heads: int = 8, length: int = 2048, width: int = 64) -> list[Tensor]:
    """Query, key and value of a sequence, the same on every rank; the first heads look at more of it than the last."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, length, width, generator=generator) for _ in range(3))
    key += 2 * torch.randn(1, heads, length // 64, 1, width, generator=generator).expand(-1, -1, -1, 64, -1).flatten(2, 3)
    query *= torch.linspace(0.05, 1.5, heads)[:, None, None]
    return [tensor.to(device, torch.float16 if device.type == "cuda" else torch.float32) for tensor in (query, key, value)]


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Over all ranks."""
    difference = (one.float() - other.float()).abs().max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    return float(difference)
