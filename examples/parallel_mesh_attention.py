"""A mesh of two machines with two GPUs each: heads are exchanged within a machine, keys and values between machines.

torchrun --nproc-per-node 4 examples/parallel_mesh_attention.py

prints

    ulysses x gathered: density by rank 0.147, 0.358, 0.140, 0.354; equal to one process: True
    ulysses x ring: density by rank 0.147, 0.358, 0.140, 0.354; equal to one process: True
"""

from parallel import BACKEND, HAS_GPU, finish, report, start, tokens
from torch.distributed.device_mesh import init_device_mesh

import sparge
from sparge.distributed import mesh_attention, shard

rank, ranks = start()
mesh = init_device_mesh("cuda" if HAS_GPU else "cpu", (2, ranks // 2), mesh_dim_names=("machine", "gpu"))
groups = {"ulysses_group": mesh.get_group("gpu"), "group": mesh.get_group("machine")}
whole = tokens()
query, key, value = (shard(tensor, rank, ranks) for tensor in whole)  # machine by machine, GPU by GPU
expected = sparge.attention(*whole, topk=0.25, backend=BACKEND)

for inner in ("gathered", "ring"):
    sparge.reset_stats()
    output = mesh_attention(query, key, value, **groups, inner=inner, topk=0.25, backend=BACKEND)
    report(f"ulysses x {inner}", output, shard(expected, rank, ranks))
finish()
