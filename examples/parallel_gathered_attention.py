"""Gathered: ranks keep their queries, and get the keys and values of all, a few heads at a time.

torchrun --nproc-per-node 2 examples/parallel_gathered_attention.py

prints

    gathered: density by rank 0.249, 0.251; equal to one process: True
    gathered, causal: density by rank 0.248, 0.252; equal to one process: True
"""

from parallel import BACKEND, finish, report, start, tokens

import sparge
from sparge.distributed import gathered_attention, shard

rank, ranks = start()
whole = tokens(heads=6)  # any number of heads will do
query, key, value = (shard(tensor, rank, ranks) for tensor in whole)
expected = shard(sparge.attention(*whole, topk=0.25, backend=BACKEND), rank, ranks)

sparge.reset_stats()
output = gathered_attention(query, key, value, topk=0.25, backend=BACKEND, kv_heads_at_once=2)
report("gathered", output, expected)

# In causal attention late tokens see more than early ones. Each rank takes a piece of both ends.
query, key, value = (shard(tensor, rank, ranks, sharding="head_tail") for tensor in whole)
expected = sparge.attention(*whole, is_causal=True, topk=0.25, backend=BACKEND)
sparge.reset_stats()
output = gathered_attention(query, key, value, is_causal=True, sharding="head_tail", topk=0.25, backend=BACKEND)
report("gathered, causal", output, shard(expected, rank, ranks, sharding="head_tail"))
finish()
