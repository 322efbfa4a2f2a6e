"""Count the Python and C function calls of one steady-state call, and limit them for each kind of call.

Counts do not depend on the speed or load of a machine: a call with a higher count is slower. They differ a little
between releases of Python and torch, and the limits leave room for that. Lower a limit when the overhead falls.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType

LIMITS = {
    "attention, runs dense": 32,  # 26 with Python 3.11 and torch 2.13
    "attention, causal, runs dense": 32,  # 26
    "replace_sdpa, runs dense": 20,  # 17
    "replayed attention": 57,  # 50, more where torch's allocator returns other memory
    "replayed attention, causal": 57,  # 50
    "replayed block_sparse_attention": 77,  # 67
    "replayed attention, key padding": 60,  # 53
    "replayed attention, full mask": 62,  # 55
    "replayed varlen_attention": 82,  # 75
    "replayed varlen_attention, equal lengths": 89,  # 82
    "replayed layer, Hilbert order": 78,  # 71
    "replayed predict": 88,  # 80
}
"""Maximum number of function calls. "Replayed" calls run on a GPU backend that has recorded their launches
(ahead_of_time/test_call_counts.py)."""
LAUNCHES = {
    "replayed attention": 12,
    "replayed attention, causal": 10,
    "replayed block_sparse_attention": 6,
    "replayed attention, key padding": 14,
    "replayed attention, full mask": 14,
    "replayed varlen_attention": 12,
    "replayed varlen_attention, equal lengths": 12,
    "replayed layer, Hilbert order": 16,
    "replayed predict": 5,
}
"""Maximum number of kernel launches of a replayed call."""
WARM_UPS = 4


def count_calls(run: Callable[[], object], ignored_files: tuple[str, ...] = ()) -> int:
    """Return the number of Python and C function calls of ``run`` after a few warm-up calls.

    Args:
        ignored_files: paths of modules whose calls do not count, such as a fake driver.
    """
    for _ in range(WARM_UPS):
        run()
    calls = 0

    def count(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call") and frame.f_code.co_filename not in ignored_files

    before = sys.getprofile()
    was_enabled = gc.isenabled()
    gc.disable()  # collecting runs callbacks
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
        if was_enabled:
            gc.enable()
    return calls - 2  # run itself and the last setprofile
