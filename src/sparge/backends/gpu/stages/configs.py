"""Launch configurations of the stages before attention.

The comment above an entry gives its measured time, then the times of other configurations that were tried. All times
are from an H200 (Triton 3.6) with N 32768, H 16, D 128, bfloat16, unless an entry names another case.
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
    """Key blocks per program; tokens that are added elementwise before threads exchange sums; warps."""

    blocks: int
    slab: int
    warps: int


@dataclass(frozen=True)
class ReduceConfig:
    """Partial sums per step of a program, channels per program, warps."""

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
    """Key blocks per program, pipeline depth, warps."""

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
    """Query blocks per program, a power of two up to 128. The number of warps comes from `SelectConfig`."""

    rows: int


@dataclass(frozen=True)
class ReplacementConfig:
    """Key blocks per step of a program, warps."""

    step: int
    warps: int


@dataclass(frozen=True)
class MaskConfig:
    """Key blocks per program, warps."""

    blocks: int
    warps: int


CONFIGS: dict[StageKey, Any] = {
    # 0.078 ms (128 registers). blocks=4, slab=16: 0.116 (195 registers); blocks=4: 0.092; blocks=4, slab=16, warps=2:
    # 0.086
    StageKey("summarize"): SummarizeConfig(2, 8, 1),
    # 0.006, 0.008 and 0.021 ms for N 8192, 32768 and 131072. rows=128, columns=8: 0.007, 0.008 and 0.018
    StageKey("reduce"): ReduceConfig(64, 16, 4),
    # 0.108 ms; 0.40 GB at 4.24 TB/s would take 0.095. warps=8: 0.113; warps=16: 0.160
    StageKey("quantize_key_value"): QuantizeConfig(4),
    # 0.056 ms; 0.20 GB would take 0.047. warps=8: 0.072
    StageKey("quantize_query"): QuantizeConfig(4),
    # Not timed: as many numbers per thread as at width 128.
    StageKey("quantize_query", width=256): QuantizeConfig(8),
    # 0.075 ms (N 131072, H 4: 0.272), with two programs per multiprocessor. stages=2 leaves room for one: 0.084;
    # rows=64: 0.110; rows=256: 0.082; columns=32: 0.098; columns=128: 0.084
    StageKey("score"): ScoreConfig(128, 64, 8, 1),
    # Not timed.
    StageKey("score", width=256): ScoreConfig(64, 64, 8, 1),
    # Not timed: columns=64 spills if products read their operands from registers.
    StageKey("score", "small"): ScoreConfig(128, 32, 8, 1),
    StageKey("score", "small", width=256): ScoreConfig(64, 32, 8, 1),
    # 0.020, 0.089 and 0.288 ms for N 8192, 32768 and 131072. columns=64, stages=4: 0.021, 0.092 and 0.307, or with 128
    # rows per consumer 0.020, 0.094 and 0.314. A third consumer: 0.026, 0.096 and 0.316
    StageKey("score_hopper"): HopperScoreConfig(128, 2),
    # Not timed.
    StageKey("score_hopper", width=256): HopperScoreConfig(32, 4),
    # N 131072, H 4 (2048 blocks; 16 entries per thread): 0.083 ms, and 0.068 since the search starts in the budget's
    # last level. 8 entries per thread: 0.104; 4 entries: 0.160, because sums across warps wait at barriers
    StageKey("select"): SelectConfig(512, 16),
    # 0.009, 0.018 and 0.043 ms for N 8192, 32768 and 131072. rows=4: 0.009, 0.022 and 0.044; rows=1: 0.010, 0.023 and
    # 0.041
    StageKey("budget"): BudgetConfig(2),
    # 0.014, 0.025 and 0.025 ms for N 8192, 32768 and 131072; one read of INT8 K would take 0.008, 0.016 and 0.016.
    # blocks=16: 0.016, 0.025 and 0.025; warps=2: 0.017, 0.031 and 0.031
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
