"""Launch configurations of the Hopper kernel: data, each with the reason it was chosen (docs/performance.md).

``sparge sweep hopper:int8_fp8:128`` derives a row anew (docs/configurations.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from sparge.backends.cuda.config_table import PLAIN, ConfigKey, look_up, overridden, width_class

PRODUCER_REGISTERS = 24
"""The least a warpgroup can be left with."""


@dataclass(frozen=True)
class HopperConfig:
    """Key blocks per tile, stages (a tile each), rows whose queries are held.

    Registers are those of the second consumer; the first gets what is left.
    """

    blocks: int
    stages: int
    rows_ahead: int = 2
    registers: int = 240


CONFIGS: dict[ConfigKey, HopperConfig] = {
    # Stages are what fits 227 KB; registers are all there are.
    ConfigKey("hopper", "int8_fp8_codes", 64): HopperConfig(2, 4),
    ConfigKey("hopper", "int8_fp8_codes", 128): HopperConfig(2, 4),
    ConfigKey("hopper", "int8_fp8_codes", 256): HopperConfig(2, 3),
    ConfigKey("hopper", "int8_fp8", 64): HopperConfig(2, 4),
    ConfigKey("hopper", "int8_fp8", 128): HopperConfig(2, 4),
    ConfigKey("hopper", "int8_fp8", 256): HopperConfig(2, 3),
    ConfigKey("hopper", "int8_fp16", 64): HopperConfig(2, 4),
    ConfigKey("hopper", "int8_fp16", 128): HopperConfig(2, 3),
    ConfigKey("hopper", "int8_fp16", 256): HopperConfig(1, 3),
    ConfigKey("hopper", "none", 64): HopperConfig(2, 4),
    ConfigKey("hopper", "none", 128): HopperConfig(2, 3, rows_ahead=1),
    ConfigKey("hopper", "none", 256): HopperConfig(1, 2, rows_ahead=1),
    # With a threshold a tile is one block, the 64 rows and 64 keys that are skipped together, and has its own maximum;
    # four stages are enough.
    ConfigKey("hopper", "int8_fp8_codes", 64, "threshold"): HopperConfig(1, 4),
    ConfigKey("hopper", "int8_fp8_codes", 128, "threshold"): HopperConfig(1, 4),
    ConfigKey("hopper", "int8_fp8_codes", 256, "threshold"): HopperConfig(1, 4),
    ConfigKey("hopper", "int8_fp8", 64, "threshold"): HopperConfig(1, 4),
    ConfigKey("hopper", "int8_fp8", 128, "threshold"): HopperConfig(1, 4),
    ConfigKey("hopper", "int8_fp8", 256, "threshold"): HopperConfig(1, 4),
    ConfigKey("hopper", "int8_fp16", 64, "threshold"): HopperConfig(1, 4),
    ConfigKey("hopper", "int8_fp16", 128, "threshold"): HopperConfig(1, 4),
    ConfigKey("hopper", "int8_fp16", 256, "threshold"): HopperConfig(1, 3),
    ConfigKey("hopper", "none", 64, "threshold"): HopperConfig(1, 4),
    ConfigKey("hopper", "none", 128, "threshold"): HopperConfig(1, 4, rows_ahead=1),
    ConfigKey("hopper", "none", 256, "threshold"): HopperConfig(1, 2, rows_ahead=1),
}

CANDIDATES = {"blocks": (1, 2), "stages": (2, 3, 4, 5, 6), "rows_ahead": (1, 2), "registers": (224, 232, 240)}
"""What a sweep tries for each field; what does not fit says so when it is started."""
FIXED_BY_THRESHOLD = ("blocks",)
"""Fields that a threshold fixes: they say what is skipped together."""


def hopper_config(quantization: str, width: int, *, has_threshold: bool) -> HopperConfig:
    """The configuration for a padded head width, by the order of `config_table.look_up`."""
    key = ConfigKey("hopper", quantization, width_class(width), "threshold" if has_threshold else PLAIN)
    return overridden("hopper", look_up(CONFIGS, key))
