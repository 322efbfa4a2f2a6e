"""Control for racecheck: a minimal Gluon kernel that starts three roles, each of which stores a number.

``python tools/gpu/roles.py VARIANT`` runs it and prints "in order" if each number was stored. `sanitize.py` runs it
under the checker.

    alone     the roles only
    meeting   the four warps that start the roles synchronize first (bar.sync 0, 128), as in the Hopper kernel after it
              has initialized its barriers

These four warps write the role of each other warp, all warps synchronize (bar.sync 1), and the others read it. A
barrier of all threads orders these accesses. racecheck misses this order after an earlier barrier of some threads.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch

from sparge.backends.gpu.gluon import barrier, gl, jit

VARIANTS = ("alone", "meeting")
PROGRAMS, LAUNCHES = 8, 4


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


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in VARIANTS:
        raise SystemExit(f"expected one of {', '.join(VARIANTS)}, got {' '.join(sys.argv[1:]) or 'nothing'}")
    numbers = torch.zeros(3, dtype=torch.int32, device="cuda")
    for _ in range(LAUNCHES):
        roles_kernel[(PROGRAMS,)](numbers, sys.argv[1] == "meeting", num_warps=4)
    print("in order" if numbers.tolist() == [1, 2, 3] else "out of order")
