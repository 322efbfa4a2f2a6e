"""Controls for racecheck: minimal kernels without a race, and one with a race.

``python tools/gpu/controls.py VARIANT`` runs one kernel and prints "in order" if its result is correct. `sanitize.py`
runs it under the checker.

A kernel passes a number from one warp to a warpgroup and back:

    all_arrive     every thread that writes or reads the number arrives at the barrier itself
    one_arrives    the threads synchronize (bar.warp.sync, bar.sync), then one of them arrives; the roles of the Hopper
                   kernel do the same, because Gluon's `arrive` comes from one thread
    nobody_waits   arrivals as in all_arrive, but no thread waits for them: a race

A byte count completes the writer's barrier, as a TMA copy does. By PTX's memory model, the first two variants have no
race: bar.sync orders the participating threads, and an arrival releases all earlier accesses. racecheck attributes an
arrival only to the arriving thread.

A Gluon kernel starts three roles, each of which stores a number:

    alone     only the roles
    meeting   the four warps that start the roles synchronize first (bar.sync 0, 128), as in the Hopper kernel after it
              has initialized its barriers

These four warps write the role of every other warp, all warps synchronize (bar.sync 1), and the other warps read their
role. A barrier of all threads orders these accesses. racecheck misses this order after an earlier barrier of some
threads.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch

from sparge.backends.gpu.gluon import barrier, gl, jit

HANDOVERS, STARTS = ("all_arrive", "one_arrives", "nobody_waits"), ("alone", "meeting")
ROUNDS, PROGRAMS, LAUNCHES = 4, 8, 4
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
    """Return whether every thread read every number in its round."""
    kernel = torch.cuda._compile_kernel(SOURCE, "hand_over")
    seen = torch.full((ROUNDS, 128), -1, dtype=torch.int32, device="cuda")
    kernel(grid=(1, 1, 1), block=(160, 1, 1), args=(seen, HANDOVERS.index(variant), ROUNDS))
    torch.cuda.synchronize()
    rounds = torch.arange(ROUNDS, dtype=torch.int32, device="cuda")[:, None]
    return bool((seen == rounds).all())


@jit
def _store(numbers_ptr, NUMBER: gl.constexpr):
    gl.store(numbers_ptr + NUMBER, NUMBER + 1)


@jit
def roles_kernel(numbers_ptr, MEETS: gl.constexpr):
    if MEETS:
        barrier()
    gl.warp_specialize(
        [(_store, (numbers_ptr, 0)), (_store, (numbers_ptr, 1)), (_store, (numbers_ptr, 2))], [4, 1], [240, 24]
    )


def start_roles(variant: str) -> bool:
    """Return whether every role stored its number."""
    numbers = torch.zeros(3, dtype=torch.int32, device="cuda")
    for _ in range(LAUNCHES):
        roles_kernel[(PROGRAMS,)](numbers, variant == "meeting", num_warps=4)
    return numbers.tolist() == [1, 2, 3]


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in HANDOVERS + STARTS:
        names = ", ".join(HANDOVERS + STARTS)
        raise SystemExit(f"expected one of {names}, got {' '.join(sys.argv[1:]) or 'nothing'}")
    is_right = (hand_over if sys.argv[1] in HANDOVERS else start_roles)(sys.argv[1])
    print("in order" if is_right else "out of order")
