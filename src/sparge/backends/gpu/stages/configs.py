"""Launch configurations of the stages before attention, each with the reason for its choice.

Measured on an H200 (Triton 3.6): N 32768, H 16, D 128, bfloat16, unless an entry names another case.
``tools/gpu/sweep.py score`` measures an entry again (docs/configurations.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparge.backends.gpu.config_table import BASE, generation_of, overridden, width_class


@dataclass(frozen=True)
class StageKey:
    """Key of a configuration: kernel, generation (`config_table.GENERATIONS`), padded head width (None: any)."""

    kernel: str
    generation: str = BASE
    width: int | None = None


@dataclass(frozen=True)
class SummarizeConfig:
    """Key blocks per program, tokens added elementwise before sums are reduced across threads, warps."""

    blocks: int
    slab: int
    warps: int


@dataclass(frozen=True)
class ReduceConfig:
    """Partial sums and channels that a program reads at a time, warps."""

    rows: int
    columns: int
    warps: int


@dataclass(frozen=True)
class QuantizeConfig:
    """Warps; a program quantizes one block."""

    warps: int


@dataclass(frozen=True)
class ScoreConfig:
    """Sampled queries per program, key blocks per step, warps, pipeline depth."""

    rows: int
    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class HopperScoreConfig:
    """Key blocks per tile, tiles in shared memory."""

    columns: int
    stages: int


@dataclass(frozen=True)
class PeakConfig:
    """Key blocks that one program checks, pipeline depth, warps."""

    blocks: int
    stages: int
    warps: int


@dataclass(frozen=True)
class SelectConfig:
    """Key blocks of a query block per warp, maximum number of warps."""

    columns: int
    max_warps: int

    def warps(self, columns: int) -> int:
        """Return the number of warps, a power of two, for a query block with this many key blocks."""
        return max(1, min(self.max_warps, columns // self.columns))


@dataclass(frozen=True)
class BudgetConfig:
    """Query blocks per program, a power of two up to 128. The number of warps is that of "select"."""

    rows: int


@dataclass(frozen=True)
class ReplacementConfig:
    """Key blocks that a program reads at a time, warps."""

    step: int
    warps: int


@dataclass(frozen=True)
class MaskConfig:
    """Key blocks of a mask that one program reads, warps."""

    blocks: int
    warps: int


CONFIGS: dict[StageKey, Any] = {
    # 0.078 ms (128 registers); 4 blocks and 16 tokens 0.116 (195 registers), 4 and 8 0.092; two warps, 4 and 16 0.086
    StageKey("summarize"): SummarizeConfig(2, 8, 1),
    # N 8192, 32768 and 131072: 0.006, 0.008 and 0.021 ms; 128 and 8 0.007, 0.008 and 0.018
    StageKey("reduce"): ReduceConfig(64, 16, 4),
    # 0.108 ms; 8 warps 0.113, 16 warps 0.160. The floor, 0.40 GB at 4.24 TB/s, is 0.095
    StageKey("quantize_key_value"): QuantizeConfig(4),
    # 0.056 ms; 8 warps 0.072. The floor, 0.20 GB, is 0.047
    StageKey("quantize_query"): QuantizeConfig(4),
    # Not timed: the same numbers per thread.
    StageKey("quantize_query", width=256): QuantizeConfig(8),
    # Two programs a multiprocessor and no pipeline: 0.075 ms (N 131072, H 4: 0.272). Two stages leave room for one
    # program only: 0.084; 64 rows 0.110, 256 rows 0.082, 32 columns 0.098, 128 columns 0.084
    StageKey("score"): ScoreConfig(128, 64, 8, 1),
    # Not timed.
    StageKey("score", width=256): ScoreConfig(64, 64, 8, 1),
    # Not timed: 64 columns spill where products keep operands in registers.
    StageKey("score", "small"): ScoreConfig(128, 32, 8, 1),
    StageKey("score", "small", width=256): ScoreConfig(64, 32, 8, 1),
    # N 8192, 32768 and 131072: 0.020, 0.089 and 0.288 ms; 64 columns and 4 stages 0.021, 0.092 and 0.307; with 128 rows
    # 0.020, 0.094 and 0.314. A third consumer: 0.026, 0.096 and 0.316
    StageKey("score_hopper"): HopperScoreConfig(128, 2),
    # Not timed.
    StageKey("score_hopper", width=256): HopperScoreConfig(32, 4),
    # 16 entries per thread. At N 131072, H 4 (2048 blocks) 0.083 ms (0.068 since the search starts in the budget's last
    # level); 8 entries 0.104, 4 entries 0.160: sums across warps wait at barriers
    StageKey("select"): SelectConfig(512, 16),
    # N 8192, 32768 and 131072: 0.009, 0.018 and 0.043 ms; 4 rows 0.009, 0.022 and 0.044, one row 0.010, 0.023 and 0.041
    StageKey("budget"): BudgetConfig(2),
    # N 8192, 32768 and 131072: 0.014, 0.025 and 0.025 ms; 16 blocks 0.016, 0.025 and 0.025, two warps 0.017, 0.031 and
    # 0.031. The floor, one read of INT8 K: 0.008, 0.016 and 0.016
    StageKey("peaks"): PeakConfig(8, 3, 4),
    # Not timed.
    StageKey("replacement"): ReplacementConfig(256, 2),
    # Not timed.
    StageKey("mask"): MaskConfig(8, 4),
}


def stage_key(kernel: str, width: int = 128, architecture: int = 90) -> StageKey:
    """Return the key of the configuration for a kernel, a padded head width and a compute capability (89, 90).

    Return the first of these that exists: this generation and width, this generation and any width, `BASE` and this
    width, `BASE` and any width.
    """
    generation, limit = generation_of(architecture), width_class(width)
    keys = (StageKey(kernel, each, of) for each in (generation, BASE) for of in (limit, None))
    return next(key for key in keys if key in CONFIGS)


def stage_config(kernel: str, width: int = 128, architecture: int = 90) -> Any:
    """Return the configuration of a kernel, with the fallbacks of `stage_key`."""
    return overridden(kernel, CONFIGS[stage_key(kernel, width, architecture)])
