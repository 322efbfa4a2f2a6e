"""What an attention kernel does about peaks: keys so far above their neighbours that FP8 does not hold both."""

from __future__ import annotations

from sparge.call import Call
from sparge.masks.geometry import BLOCK_K
from sparge.masks.window import max_blocks_per_q_block

EVERY_TILE_KEYS = 4032
"""Largest number of keys per row for which every tile is searched for peaks.

At 4096 keys, 32 heads and topk 0.25 a call takes 238 us with marked blocks and 269 us if every tile is searched (H200).
A peak can hide at most 127 keys beside it, 3 % of 4096."""


def peak_handling(call: Call) -> str:
    """Where an attention kernel looks for peaks, to take what lies far below one as a part of its own.

    Returns:
        "ignored": nowhere. P is not in FP8, or a threshold skips tiles by their maximum and leaves them whole.
        "every_tile": in each of them.
        "marked": in the key blocks that `stages.peaks` marks before it starts: they hold a peak many queries share.
    """
    if not call.has_fp8_values or call.pv_threshold is not None:
        return "ignored"
    keys = max_blocks_per_q_block(call.window, call.shape) * BLOCK_K
    return "every_tile" if keys <= EVERY_TILE_KEYS else "marked"
