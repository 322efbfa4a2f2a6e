"""Attention over sequences whose tokens lie on several GPUs, on torch.distributed process groups (docs/scale.md)."""

from sparge.distributed.balance import HeadBalance
from sparge.distributed.modes import gathered_attention, mesh_attention, ring_attention, ulysses_attention
from sparge.distributed.places import shard, split_lengths

__all__ = [
    "HeadBalance",
    "gathered_attention",
    "mesh_attention",
    "ring_attention",
    "shard",
    "split_lengths",
    "ulysses_attention",
]
