"""Ulysses: ranks exchange tokens for heads, and each computes whole sequences of its heads.

torchrun --nproc-per-node 2 examples/parallel_ulysses_attention.py

prints

    ulysses: density by rank 0.144, 0.356; equal to one process: True
    heads dealt by what they cost: imbalance 1.43, then 1.01
"""

from parallel import BACKEND, finish, report, start, tokens

import sparge
from sparge.distributed import HeadBalance, shard, ulysses_attention

rank, ranks = start()
whole = tokens()  # on every rank, to compare with; a model has its own part alone
expected = shard(sparge.attention(*whole, topk=0.25, backend=BACKEND), rank, ranks)
query, key, value = (shard(tensor, rank, ranks) for tensor in whole)

sparge.reset_stats()
output = ulysses_attention(query, key, value, topk=0.25, backend=BACKEND)
report("ulysses", output, expected)

# Some heads keep more blocks than others. One HeadBalance for each layer deals them anew in every step.
balance, imbalances = HeadBalance(), []
for _ in range(2):
    sparge.reset_stats()
    ulysses_attention(query, key, value, topk=0.25, backend=BACKEND, balance=balance)
    imbalances.append(sparge.stats().imbalance)
if rank == 0:
    print("heads dealt by what they cost: imbalance {:.2f}, then {:.2f}".format(*imbalances))
finish()
