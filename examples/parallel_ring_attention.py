"""Ring: keys and values travel from rank to rank, and what queries get of each part is merged by the LSE.

torchrun --nproc-per-node 2 examples/parallel_ring_attention.py

prints

    ring: density by rank 0.253, 0.247; equal to one process: True
    ring, causal: density by rank 0.244, 0.256; equal to one process: True
"""

from parallel import BACKEND, finish, report, start, tokens

import sparge
from sparge.distributed import ring_attention, shard

rank, ranks = start()
whole = tokens()
query, key, value = (shard(tensor, rank, ranks) for tensor in whole)
expected = shard(sparge.attention(*whole, topk=0.25, backend=BACKEND), rank, ranks)

# Which blocks are kept is decided for the whole sequence before anything travels: one budget, as on one device.
sparge.reset_stats()
output = ring_attention(query, key, value, topk=0.25, backend=BACKEND)
report("ring", output, expected)

query, key, value = (shard(tensor, rank, ranks, sharding="head_tail") for tensor in whole)
expected = sparge.attention(*whole, is_causal=True, topk=0.25, backend=BACKEND)
sparge.reset_stats()
output = ring_attention(query, key, value, is_causal=True, sharding="head_tail", topk=0.25, backend=BACKEND)
report("ring, causal", output, shard(expected, rank, ranks, sharding="head_tail"))
finish()
