"""Launch configurations: data, each with the reason it was chosen.

Measured on an H200 (Triton 3.6): N 32768, H 16, D 128, bfloat16, unless a row says otherwise; attention on a random
half of the blocks, in executed TOPS.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparge.backends.cuda.stages.configs import WITHOUT_WARPGROUPS
from sparge.geometry import BLOCK_Q, ROW_GROUP


@dataclass(frozen=True)
class AttentionConfig:
    """Queries per program, key blocks per step, warps, pipeline depth, register limit (None: the compiler's)."""

    block_m: int
    blocks: int
    warps: int
    stages: int
    max_registers: int | None = None


HOPPER = {
    # 712; 2 stages 700, one block a step 669, 128 queries and 8 warps 573
    ("int8_fp8", 128): AttentionConfig(ROW_GROUP, 2, 4, 3),
    # 502; 128 registers 524, but spills with Triton 3.9; 4 stages 497, one block a step 461
    ("int8_fp8", 64): AttentionConfig(ROW_GROUP, 2, 4, 3, 168),
    # 481; 3 stages 467, 64 queries 452 to 460
    ("int8_fp16", 128): AttentionConfig(BLOCK_Q, 2, 8, 2),
    # 403; two blocks a step 391
    ("int8_fp16", 64): AttentionConfig(ROW_GROUP, 1, 4, 4),
    # 437 TFLOP/s; 2 stages 427, 64 queries 401
    ("none", 128): AttentionConfig(BLOCK_Q, 2, 8, 3),
    # 359; 168 registers and 2 stages 370, but spills with Triton 3.9
    ("none", 64): AttentionConfig(ROW_GROUP, 2, 4, 3),
    # D 256: 436; 4 warps 374
    ("int8_fp8", 256): AttentionConfig(ROW_GROUP, 1, 8, 3),
    # D 256: 460; 8 warps 342
    ("int8_fp16", 256): AttentionConfig(ROW_GROUP, 1, 4, 3),
    # D 256: 274; 4 warps 277, with spills
    ("none", 256): AttentionConfig(ROW_GROUP, 1, 8, 2),
}

BLACKWELL = {
    **HOPPER,
    # Not timed: chosen because two blocks a step spill there.
    ("int8_fp8", 128): AttentionConfig(BLOCK_Q, 1, 8, 3),
    ("int8_fp8", 64): AttentionConfig(ROW_GROUP, 1, 4, 3),
    ("int8_fp16", 128): AttentionConfig(BLOCK_Q, 1, 8, 3),
}

SMALL = {
    # Not timed: chosen to fit 99 KB of shared memory (the bytes they need) without spills on 8.9 and 12.0.
    ("int8_fp8", 128): AttentionConfig(ROW_GROUP, 1, 4, 3),  # two blocks a step spill
    ("int8_fp8", 64): AttentionConfig(ROW_GROUP, 2, 4, 3),  # 45336
    ("int8_fp16", 128): AttentionConfig(BLOCK_Q, 2, 8, 2),  # 98324
    ("int8_fp16", 64): AttentionConfig(ROW_GROUP, 1, 4, 4),  # 49164
    ("none", 128): AttentionConfig(BLOCK_Q, 1, 8, 2),  # 82432
    ("none", 64): AttentionConfig(ROW_GROUP, 1, 4, 3),  # 49152
    ("int8_fp8", 256): AttentionConfig(ROW_GROUP, 1, 8, 3),  # 86280
    ("int8_fp16", 256): AttentionConfig(ROW_GROUP, 1, 8, 2),  # 73988
    ("none", 256): AttentionConfig(ROW_GROUP, 1, 8, 1),  # 73984
}

FLOAT32 = {
    # Three TF32 products stand for one, and registers are short: larger tiles spill (64 queries, D 128: 464 bytes).
    64: AttentionConfig(ROW_GROUP, 1, 4, 2),
    128: AttentionConfig(32, 1, 8, 2),
    256: AttentionConfig(16, 1, 8, 1),
}
FLOAT32_SMALL = {
    64: AttentionConfig(32, 1, 4, 2),  # 65536 bytes
    128: AttentionConfig(16, 1, 4, 1),  # 49152
    256: AttentionConfig(16, 1, 8, 1),  # 98304
}


def attention_config(
    arithmetic: str,
    width: int,
    *,
    architecture: int,
    is_float32: bool,
    has_threshold: bool,
    has_mask: bool,
    mask_per_query: bool,
) -> AttentionConfig:
    """The configuration for a padded head width (the larger of D and D_v).

    With a threshold, the 64 rows and 64 keys that are skipped together are one step of one program. On Hopper all but
    those for float32 have two stages at least: without a pipeline Triton 3.6 miscompiles 16-bit products there when
    D_v is narrower than D (wrong numbers, bad addresses).
    """
    is_small = architecture // 10 in WITHOUT_WARPGROUPS
    width = next(limit for limit in (64, 128, 256) if width <= limit)
    if arithmetic == "none" and is_float32:
        config = (FLOAT32_SMALL if is_small else FLOAT32)[width]
        return replace(config, block_m=ROW_GROUP) if has_threshold else config
    if width < 256 and has_threshold:
        return AttentionConfig(ROW_GROUP, 1, 4, 3)
    if width < 256 and mask_per_query:  # its tiles are buffered too
        return AttentionConfig(ROW_GROUP, 1, 8, 2)
    if width < 256 and has_mask and (is_small or (arithmetic, width) != ("none", 128)):
        # Two blocks a step spill (840 bytes of stack): 59 ms instead of 5.3 at D 128 in int8_fp8, 52 instead of 5.4 at
        # D 64 in 16 bits (32768 tokens, 8 heads, density .5, H200). 8 warps 8.6, 128 queries and 8 warps 6.3.
        return AttentionConfig(ROW_GROUP, 1, 4, 3)
    table = SMALL if is_small else BLACKWELL if architecture // 10 in (10, 11) else HOPPER
    return table[arithmetic, width]
