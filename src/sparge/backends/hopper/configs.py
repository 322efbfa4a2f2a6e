"""Launch configurations of the Hopper kernel (docs/lab/hopper.md).

The comment above an entry gives its speed in executed TOPS, then the speeds of other configurations that were tried.
They were measured on an H200 (Triton 3.6) with N 32768, H 16, bfloat16 and a random half of the blocks. Speeds of
"int8_fp8_fast" are from short runs; the others are from ``sparge bench``, whose speeds are 4 % lower. All buffers must
fit in 227 KB of shared memory. Comments give the size of Q, K and V; everything else takes less than 1 KB. All
available registers are used.

``tools/gpu/sweep.py hopper:int8_fp8_fast:128`` measures an entry again (docs/configurations.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from sparge.backends.gpu.config_table import PLAIN, ConfigKey, look_up, overridden, width_class

PRODUCER_REGISTERS = 24
"""Registers per thread of the producer: the minimum that a warpgroup can have."""


@dataclass(frozen=True)
class HopperConfig:
    """Key blocks per stage, stages of K and V, stages of Q, and registers per thread of the second consumer.

    The first consumer gets the registers that the other roles leave.
    """

    blocks: int
    stages: int
    query_stages: int = 2
    registers: int = 240


CONFIGS: dict[ConfigKey, HopperConfig] = {
    # 735; 8 stages 726; one maximum for two stages 638, with spills
    ConfigKey("hopper", "int8_fp8_fast", 64): HopperConfig(2, 4),  # 80 KB
    # 1084; 6 stages 1076
    ConfigKey("hopper", "int8_fp8_fast", 128): HopperConfig(2, 4),  # 160 KB
    ConfigKey("hopper", "int8_fp8_fast", 256): HopperConfig(2, 3),  # 208 KB, all that fits
    # 577
    ConfigKey("hopper", "int8_fp8", 64): HopperConfig(2, 4),  # 80 KB
    # 907
    ConfigKey("hopper", "int8_fp8", 128): HopperConfig(2, 4),  # 160 KB
    ConfigKey("hopper", "int8_fp8", 256): HopperConfig(2, 3),  # 208 KB, all that fits
    # Not timed: as many stages as above.
    ConfigKey("hopper", "int8_fp16", 64): HopperConfig(2, 4),  # 112 KB
    ConfigKey("hopper", "int8_fp16", 128): HopperConfig(2, 3),  # 176 KB; 4 stages 224
    ConfigKey("hopper", "int8_fp16", 256): HopperConfig(1, 3),  # 208 KB, all that fits
    # 463 TFLOP/s
    ConfigKey("hopper", "none", 64): HopperConfig(2, 4),  # 160 KB
    # 617 TFLOP/s
    ConfigKey("hopper", "none", 128): HopperConfig(2, 3, query_stages=1),  # 224 KB, all that fits
    ConfigKey("hopper", "none", 256): HopperConfig(1, 2, query_stages=1),  # 192 KB, all that fits
    # With a threshold, a stage is one block: 64 queries and 64 keys are skipped together.
    # Not measured: four stages, or as many as fit.
    ConfigKey("hopper", "int8_fp8_fast", 64, "threshold"): HopperConfig(1, 4),  # 48 KB
    ConfigKey("hopper", "int8_fp8_fast", 128, "threshold"): HopperConfig(1, 4),  # 96 KB
    ConfigKey("hopper", "int8_fp8_fast", 256, "threshold"): HopperConfig(1, 4),  # 160 KB
    ConfigKey("hopper", "int8_fp8", 64, "threshold"): HopperConfig(1, 4),  # 48 KB
    ConfigKey("hopper", "int8_fp8", 128, "threshold"): HopperConfig(1, 4),  # 96 KB
    ConfigKey("hopper", "int8_fp8", 256, "threshold"): HopperConfig(1, 4),  # 160 KB
    ConfigKey("hopper", "int8_fp16", 64, "threshold"): HopperConfig(1, 4),  # 64 KB
    ConfigKey("hopper", "int8_fp16", 128, "threshold"): HopperConfig(1, 4),  # 128 KB
    ConfigKey("hopper", "int8_fp16", 256, "threshold"): HopperConfig(1, 3),  # 208 KB
    ConfigKey("hopper", "none", 64, "threshold"): HopperConfig(1, 4),  # 96 KB
    ConfigKey("hopper", "none", 128, "threshold"): HopperConfig(1, 4, query_stages=1),  # 160 KB
    ConfigKey("hopper", "none", 256, "threshold"): HopperConfig(1, 2, query_stages=1),  # 192 KB
}


def hopper_config(quantization: str, width: int, *, has_threshold: bool) -> HopperConfig:
    """Return the configuration for a padded head width, with the fallbacks of `config_table.look_up`."""
    key = ConfigKey("hopper", quantization, width_class(width), "threshold" if has_threshold else PLAIN)
    return overridden("hopper", look_up(CONFIGS, key))
