"""A Gluon kernel that starts three roles as the Hopper kernel does, which do nothing but store a number each.

``python tests/gpu/roles.py`` runs it; `sanitize.py` does so under racecheck: what is reported here is Triton's own.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch

from sparge.backends.hopper.gluon import gl, jit

PROGRAMS, LAUNCHES = 528, 20
"""In four programs, once, racecheck reported nothing."""


@jit
def _store(numbers_ptr, NUMBER: gl.constexpr):
    gl.store(numbers_ptr + NUMBER, NUMBER + 1)


@jit
def roles_kernel(numbers_ptr):
    gl.warp_specialize(
        [(_store, (numbers_ptr, 0)), (_store, (numbers_ptr, 1)), (_store, (numbers_ptr, 2))], [4, 1], [240, 24]
    )


if __name__ == "__main__":
    numbers = torch.zeros(3, dtype=torch.int32, device="cuda")
    for _ in range(LAUNCHES):
        roles_kernel[(PROGRAMS,)](numbers, num_warps=4)
    print("in order" if numbers.tolist() == [1, 2, 3] else "out of order")
