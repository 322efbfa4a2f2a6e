"""Ulysses: ranks exchange tokens for heads, and each computes whole sequences of its heads.

torchrun --nproc-per-node 2 examples/parallel_ulysses_attention.py

prints

    ulysses on 2 ranks: density 0.250, the output is that of one process: True
    heads dealt by what they cost: imbalance 1.42, then 1.01
"""

import torch
import torch.distributed as dist
from parallel import finish, largest_difference, start, tokens

import sparge
from sparge.distributed import HeadBalance, shard, ulysses_attention

rank, ranks, device = start()
query, key, value = tokens(device)  # all of it on every rank, to compare with; a model has its own part alone
parts = [shard(tensor, rank, ranks) for tensor in (query, key, value)]

sparge.reset_stats()
output = ulysses_attention(*parts, topk=0.25, backend="auto" if device.type == "cuda" else "torch")
whole = sparge.attention(query, key, value, topk=0.25, backend="auto" if device.type == "cuda" else "torch")
equal = largest_difference(output, shard(whole, rank, ranks)) < 1e-2
if rank == 0:
    density = sparge.stats().density
    print(f"ulysses on {ranks} ranks: density {density:.3f}, the output is that of one process: {equal}")

# Some heads keep more blocks than others. One HeadBalance for each layer deals them anew in every step.
balance, uneven = HeadBalance(), []
for _ in range(2):
    sparge.reset_stats()
    ulysses_attention(*parts, topk=0.25, balance=balance, backend="auto" if device.type == "cuda" else "torch")
    uneven.append(sparge.stats().imbalance)
if rank == 0:
    print(f"heads dealt by what they cost: imbalance {uneven[0]:.2f}, then {uneven[1]:.2f}")
finish()
