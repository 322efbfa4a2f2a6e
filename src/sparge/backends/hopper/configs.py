"""Launch configurations of the Hopper kernel: data, each with the reason it was chosen (docs/performance.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


CONFIGS = {
    ("int8_fp8_codes", 64): HopperConfig(2, 4),
    ("int8_fp8_codes", 128): HopperConfig(2, 4),
    ("int8_fp8_codes", 256): HopperConfig(2, 3),
    ("int8_fp8", 64): HopperConfig(2, 4),
    ("int8_fp8", 128): HopperConfig(2, 4),
    ("int8_fp8", 256): HopperConfig(2, 3),
    ("int8_fp16", 64): HopperConfig(2, 4),
    ("int8_fp16", 128): HopperConfig(2, 3),
    ("int8_fp16", 256): HopperConfig(1, 3),
    ("none", 64): HopperConfig(2, 4),
    ("none", 128): HopperConfig(2, 3, rows_ahead=1),
    ("none", 256): HopperConfig(1, 2, rows_ahead=1),
}
"""By arithmetic and head width. Stages are what fits 227 KB; registers are all there are."""


def hopper_config(arithmetic: str, width: int, *, has_threshold: bool) -> HopperConfig:
    """The configuration for a padded head width.

    With a threshold a tile is one block, the 64 rows and 64 keys that are skipped together, and has its own maximum.
    """
    config = CONFIGS[arithmetic, width]
    return replace(config, blocks=1, stages=min(config.stages * config.blocks, 4)) if has_threshold else config
