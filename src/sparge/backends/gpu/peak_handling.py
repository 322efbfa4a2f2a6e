"""Where attention kernels check for peaks: scores so far above those of nearby keys that FP8 cannot represent both."""

from __future__ import annotations

from sparge.call import Call
from sparge.masks.geometry import BLOCK_K
from sparge.masks.window import max_blocks_per_q_block

EVERY_TILE_KEYS = 4032
"""Maximum number of visible keys per query at which every tile is checked for peaks.

With 4096 keys, 32 heads and topk 0.25, a call takes 238 us with marked blocks, and 269 us if every tile is checked
(H200). A peak affects at most the 127 other keys of its tile, 3 % of 4096."""


def peak_handling(call: Call) -> str:
    """Return where an attention kernel checks for peaks. Keys far below a peak are added as a separate part.

    Returns:
        "ignored": nowhere, because P is not in FP8, or because the call has a P V threshold.
        "every_tile": in every tile.
        "marked": in key blocks that `stages.peaks` marks beforehand, because many queries share their peak.
    """
    if not call.has_fp8_values or call.pv_threshold is not None:
        return "ignored"
    keys = max_blocks_per_q_block(call.window, call.shape) * BLOCK_K
    return "every_tile" if keys <= EVERY_TILE_KEYS else "marked"
