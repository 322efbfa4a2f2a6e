"""Launch configurations of the stages before attention: data, each with the reason it was chosen.

Measured on an H200 (Triton 3.6): N 32768, H 16, D 128, bfloat16, unless a row says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

WITHOUT_WARPGROUPS = (8, 12)
"""Generations whose matrix products take both operands from registers. All but 8.0 have 99 KB of shared memory."""

SUMMARIZE_BLOCKS, SUMMARIZE_SLAB, SUMMARIZE_WARPS = 2, 8, 1
"""Key blocks a program summarises, tokens added elementwise before threads exchange sums, warps. 0.078 ms (128
registers), where 4 blocks and 16 tokens take 0.116 (195 registers), 4 and 8 0.092; two warps, 4 and 16 0.086."""

REDUCE_ROWS, REDUCE_COLUMNS, REDUCE_WARPS = 64, 16, 4
"""Partial sums and channels one program takes at a time, warps: 0.006, 0.008 and 0.021 ms at N 8192, 32768 and 131072;
128 and 8 take 0.007, 0.008 and 0.018."""

KEY_VALUE_WARPS = 4
"""0.108 ms; 8 warps 0.113, 16 warps 0.160. The floor, 0.40 GB at 4.24 TB/s, is 0.095."""

QUERY_WARPS = 4
"""0.056 ms; 8 warps 0.072. The floor, 0.20 GB, is 0.047."""


@dataclass(frozen=True)
class ScoreConfig:
    """Sampled queries per program, key blocks per step, warps, pipeline depth."""

    rows: int
    columns: int
    warps: int
    stages: int


def score_config(width: int, architecture: int) -> ScoreConfig:
    """The configuration of the score kernel for a padded head width.

    128 x 64 with two programs a multiprocessor and no pipeline: 0.075 ms (N 131072, H 4: 0.272). Two stages leave room
    for one program only: 0.084; 64 rows 0.110; 256 rows 0.082; 32 columns 0.098; 128 columns 0.084. Where products
    run in registers alone, 64 columns spill.
    """
    return ScoreConfig(128 if width <= 128 else 64, 32 if architecture // 10 in WITHOUT_WARPGROUPS else 64, 8, 1)


def select_warps(columns: int) -> int:
    """Warps for a row of that many blocks, a power of two: 16 entries a thread.

    At N 131072, H 4 (2048 blocks) 0.083 ms; 8 entries 0.104, 4 entries 0.160: sums across warps wait at barriers.
    """
    return max(1, min(16, columns // 512))


SINK_BLOCKS, SINK_STAGES, SINK_WARPS = 8, 3, 4
"""Key blocks one program looks at, pipeline depth, warps: 0.014, 0.025 and 0.025 ms at N 8192, 32768 and 131072; 16
blocks 0.016, 0.025 and 0.025, two warps 0.017, 0.031 and 0.031. The floor, K's codes once: 0.008, 0.016 and 0.016."""
