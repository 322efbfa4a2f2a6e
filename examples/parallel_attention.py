"""Attention over a sequence that is split over several GPUs, in one of three modes, on one or several machines.

torchrun --nproc-per-node 2 examples/parallel_attention.py --mode ulysses   # or gather, ring
torchrun --nproc-per-node 4 examples/parallel_attention.py --mode gather --machines 2

prints

    ulysses: density by rank 0.144, 0.356; equal to one process: True
    ulysses, balanced heads: imbalance 1.43, then 1.01

    gather: density by rank 0.253, 0.247; equal to one process: True
    gather, causal: density by rank 0.244, 0.256; equal to one process: True

    ring: density by rank 0.253, 0.247; equal to one process: True
    ring, causal: density by rank 0.244, 0.256; equal to one process: True

    gather on 2 machines: density by rank 0.147, 0.358, 0.140, 0.354; equal to one process: True

    ring on 2 machines: density by rank 0.147, 0.358, 0.140, 0.354; equal to one process: True
"""

import argparse

from parallel import BACKEND, HAS_GPU, finish, report, start, tokens
from torch.distributed.device_mesh import init_device_mesh

import sparge
from sparge.distributed import HeadBalance, context_parallel_attention, shard

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=("ulysses", "gather", "ring"), default="ulysses")
parser.add_argument("--machines", type=int, default=1, help="exchange heads within each machine, K and V between them")
arguments = parser.parse_args()
mode, machines = arguments.mode, arguments.machines

rank, ranks = start()
whole = tokens()  # the whole sequence, for the comparison; in a model, each rank has only its part
options = {"mode": mode, "topk": 0.25, "backend": BACKEND}
name = mode
if machines > 1:
    name += f" on {machines} machines"
    options["group"] = init_device_mesh("cuda" if HAS_GPU else "cpu", (machines, ranks // machines))

query, key, value = (shard(tensor, rank, ranks) for tensor in whole)
expected = sparge.attention(*whole, topk=0.25, backend=BACKEND)
sparge.reset_stats()
output = context_parallel_attention(query, key, value, **options)
report(name, output, shard(expected, rank, ranks))

if mode == "ulysses":
    # Some heads keep more blocks than others. One HeadBalance for each layer reassigns them in every step.
    balance, imbalances = HeadBalance(), []
    for _ in range(2):
        sparge.reset_stats()
        context_parallel_attention(query, key, value, **options, balance=balance)
        imbalances.append(sparge.stats().imbalance)
    if rank == 0:
        print("ulysses, balanced heads: imbalance {:.2f}, then {:.2f}".format(*imbalances))
elif machines == 1:
    # Late tokens see more keys than early ones, so each rank gets a piece from the start and a piece from the end.
    query, key, value = (shard(tensor, rank, ranks, sharding="head_tail") for tensor in whole)
    expected = sparge.attention(*whole, is_causal=True, topk=0.25, backend=BACKEND)
    sparge.reset_stats()
    output = context_parallel_attention(query, key, value, is_causal=True, sharding="head_tail", **options)
    report(f"{mode}, causal", output, shard(expected, rank, ranks, sharding="head_tail"))
finish()
