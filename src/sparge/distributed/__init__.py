"""Attention over sequences that are split over several ranks of torch.distributed (docs/scale.md)."""

from sparge.distributed.api import context_parallel_attention
from sparge.distributed.balance import HeadBalance
from sparge.distributed.sharding import shard, split_lengths

__all__ = ["HeadBalance", "context_parallel_attention", "shard", "split_lengths"]
