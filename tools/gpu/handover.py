"""Control for racecheck: a minimal kernel that passes a number from one warp to a warpgroup and back in three ways.

``python tools/gpu/handover.py VARIANT`` runs it and prints "in order" if every number was read in its round.
`sanitize.py` runs it under the checker.

    all_arrive     every thread that writes or reads the number arrives at the barrier itself
    one_arrives    the threads synchronize (bar.warp.sync, bar.sync), then one of them arrives; the roles of the Hopper
                   kernel do the same, because Gluon's `arrive` comes from one thread
    nobody_waits   arrivals as in all_arrive, but no thread waits for them: a race

The writer's barrier is completed by a byte count, as by a TMA copy. By PTX's memory model the first two variants are
in order: bar.sync orders the participating threads, and an arrival releases everything before it. racecheck attributes
an arrival to the arriving thread alone.
"""

from __future__ import annotations

import sys

import torch

VARIANTS = ("all_arrive", "one_arrives", "nobody_waits")
ROUNDS = 4
SOURCE = r"""
__device__ void wait(unsigned address, int parity) {
  asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }"
               :: "r"(address), "r"(parity) : "memory");
}

__device__ void arrive(unsigned address) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(address) : "memory");
}

__device__ void arrive_with_bytes(unsigned address) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 16;" :: "r"(address) : "memory");
  asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], 16;" :: "r"(address) : "memory");
}

extern "C" __global__ void hand_over(int* seen, int variant, int rounds) {
  __shared__ alignas(8) unsigned long long full_storage, free_storage;
  __shared__ int number;
  const bool all_arrive = variant != 1, waits = variant != 2;
  const unsigned full = (unsigned)__cvta_generic_to_shared(&full_storage);
  const unsigned free = (unsigned)__cvta_generic_to_shared(&free_storage);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(full), "r"(all_arrive ? 32 : 1));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(free), "r"(all_arrive ? 128 : 1));
  }
  __syncthreads();
  for (int round = 0; round < rounds; round++) {
    if (threadIdx.x >= 128) {
      if (waits) wait(free, (round & 1) ^ 1);
      number = round;
      __syncwarp();
      if (all_arrive || threadIdx.x == 128) arrive_with_bytes(full);
    } else {
      if (waits) wait(full, round & 1);
      seen[round * 128 + threadIdx.x] = number;
      asm volatile("bar.sync 1, 128;" ::: "memory");
      if (all_arrive || threadIdx.x == 0) arrive(free);
    }
  }
}
"""


def hand_over(variant: str) -> bool:
    """Run one variant and return whether every thread read every number in its round."""
    kernel = torch.cuda._compile_kernel(SOURCE, "hand_over")
    seen = torch.full((ROUNDS, 128), -1, dtype=torch.int32, device="cuda")
    kernel(grid=(1, 1, 1), block=(160, 1, 1), args=(seen, VARIANTS.index(variant), ROUNDS))
    torch.cuda.synchronize()
    rounds = torch.arange(ROUNDS, dtype=torch.int32, device="cuda")[:, None]
    return bool((seen == rounds).all())


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in VARIANTS:
        raise SystemExit(f"expected one of {', '.join(VARIANTS)}, got {' '.join(sys.argv[1:]) or 'nothing'}")
    print("in order" if hand_over(sys.argv[1]) else "out of order")
