"""Launch configurations: expected values, fallbacks for missing keys, overrides."""

from __future__ import annotations

from dataclasses import astuple
from itertools import product
from typing import Any

import pytest

from sparge.backends.gpu import config_table
from sparge.backends.gpu.config_table import ConfigKey, active_overrides, look_up, overridden, override, variant_of
from sparge.backends.gpu.stages import configs as stage_configs
from sparge.backends.hopper import configs as hopper_configs
from sparge.backends.triton import configs as triton_configs
from sparge.masks.geometry import ROW_GROUP

CAPABILITIES = {"hopper": (90,), "blackwell": (100, 103, 110), "small": (80, 86, 89, 120, 121)}
VARIANTS = {
    "plain": {"has_threshold": False, "has_mask": False, "mask_per_query": False},
    "threshold": {"has_threshold": True, "has_mask": False, "mask_per_query": False},
    "mask": {"has_threshold": False, "has_mask": True, "mask_per_query": False},
    "mask_per_query": {"has_threshold": False, "has_mask": True, "mask_per_query": True},
}

TRITON: dict[tuple[str, str, int], tuple[tuple[int, ...], ...]] = {
    ("hopper", "int8_fp8", 64): ((64, 2, 4, 3, 168), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 8, 2)),
    ("hopper", "int8_fp8", 128): ((64, 2, 4, 3), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 8, 2)),
    ("hopper", "int8_fp8", 256): ((64, 1, 8, 3), (64, 1, 8, 3), (64, 1, 8, 3), (64, 1, 8, 3)),
    ("hopper", "int8_fp16", 64): ((64, 1, 4, 4), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 8, 2)),
    ("hopper", "int8_fp16", 128): ((128, 2, 8, 2), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 8, 2)),
    ("hopper", "int8_fp16", 256): ((64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 4, 3)),
    ("hopper", "none", 64): ((64, 2, 4, 3), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 8, 2)),
    ("hopper", "none", 128): ((128, 2, 8, 3), (64, 1, 4, 3), (128, 2, 8, 3), (64, 1, 8, 2)),
    ("hopper", "none", 256): ((64, 1, 8, 2), (64, 1, 8, 2), (64, 1, 8, 2), (64, 1, 8, 2)),
    ("hopper", "float32", 64): ((64, 1, 4, 2), (64, 1, 4, 2), (64, 1, 4, 2), (64, 1, 4, 2)),
    ("hopper", "float32", 128): ((32, 1, 8, 2), (64, 1, 8, 2), (32, 1, 8, 2), (32, 1, 8, 2)),
    ("hopper", "float32", 256): ((16, 1, 8, 1), (64, 1, 8, 1), (16, 1, 8, 1), (16, 1, 8, 1)),
    ("blackwell", "int8_fp8", 64): ((64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 8, 2)),
    ("blackwell", "int8_fp8", 128): ((128, 1, 8, 3), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 8, 2)),
    ("blackwell", "int8_fp8", 256): ((64, 1, 8, 3), (64, 1, 8, 3), (64, 1, 8, 3), (64, 1, 8, 3)),
    ("blackwell", "int8_fp16", 64): ((64, 1, 4, 4), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 8, 2)),
    ("blackwell", "int8_fp16", 128): ((128, 1, 8, 3), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 8, 2)),
    ("blackwell", "int8_fp16", 256): ((64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 4, 3)),
    ("blackwell", "none", 64): ((64, 2, 4, 3), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 8, 2)),
    ("blackwell", "none", 128): ((128, 2, 8, 3), (64, 1, 4, 3), (128, 2, 8, 3), (64, 1, 8, 2)),
    ("blackwell", "none", 256): ((64, 1, 8, 2), (64, 1, 8, 2), (64, 1, 8, 2), (64, 1, 8, 2)),
    ("blackwell", "float32", 64): ((64, 1, 4, 2), (64, 1, 4, 2), (64, 1, 4, 2), (64, 1, 4, 2)),
    ("blackwell", "float32", 128): ((32, 1, 8, 2), (64, 1, 8, 2), (32, 1, 8, 2), (32, 1, 8, 2)),
    ("blackwell", "float32", 256): ((16, 1, 8, 1), (64, 1, 8, 1), (16, 1, 8, 1), (16, 1, 8, 1)),
    ("small", "int8_fp8", 64): ((64, 2, 4, 3), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 8, 2)),
    ("small", "int8_fp8", 128): ((64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 8, 2)),
    ("small", "int8_fp8", 256): ((64, 1, 8, 3), (64, 1, 8, 3), (64, 1, 8, 3), (64, 1, 8, 3)),
    ("small", "int8_fp16", 64): ((64, 1, 4, 4), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 8, 2)),
    ("small", "int8_fp16", 128): ((128, 2, 8, 2), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 8, 2)),
    ("small", "int8_fp16", 256): ((64, 1, 8, 2), (64, 1, 8, 2), (64, 1, 8, 2), (64, 1, 8, 2)),
    ("small", "none", 64): ((64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 8, 2)),
    ("small", "none", 128): ((128, 1, 8, 2), (64, 1, 4, 3), (64, 1, 4, 3), (64, 1, 8, 2)),
    ("small", "none", 256): ((64, 1, 8, 1), (64, 1, 8, 1), (64, 1, 8, 1), (64, 1, 8, 1)),
    ("small", "float32", 64): ((32, 1, 4, 2), (64, 1, 4, 2), (32, 1, 4, 2), (32, 1, 4, 2)),
    ("small", "float32", 128): ((16, 1, 4, 1), (64, 1, 4, 1), (16, 1, 4, 1), (16, 1, 4, 1)),
    ("small", "float32", 256): ((16, 1, 8, 1), (64, 1, 8, 1), (16, 1, 8, 1), (16, 1, 8, 1)),
}
"""Queries, blocks, warps, stages (and registers) of every variant, keyed by generation, quantization and width."""

HOPPER = {
    ("int8_fp8_fast", 64): ((2, 4, 2, 240), (1, 4, 2, 240)),
    ("int8_fp8_fast", 128): ((2, 4, 2, 240), (1, 4, 2, 240)),
    ("int8_fp8_fast", 256): ((2, 3, 2, 240), (1, 4, 2, 240)),
    ("int8_fp8", 64): ((2, 4, 2, 240), (1, 4, 2, 240)),
    ("int8_fp8", 128): ((2, 4, 2, 240), (1, 4, 2, 240)),
    ("int8_fp8", 256): ((2, 3, 2, 240), (1, 4, 2, 240)),
    ("int8_fp16", 64): ((2, 4, 2, 240), (1, 4, 2, 240)),
    ("int8_fp16", 128): ((2, 3, 2, 240), (1, 4, 2, 240)),
    ("int8_fp16", 256): ((1, 3, 2, 240), (1, 3, 2, 240)),
    ("none", 64): ((2, 4, 2, 240), (1, 4, 2, 240)),
    ("none", 128): ((2, 3, 1, 240), (1, 4, 1, 240)),
    ("none", 256): ((1, 2, 1, 240), (1, 2, 1, 240)),
}
"""Configurations without and with a threshold, keyed by quantization and width."""


def as_triton(config: triton_configs.AttentionConfig) -> tuple[int, ...]:
    return tuple(number for number in astuple(config) if number is not None)


@pytest.mark.parametrize("generation", CAPABILITIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_triton_configs_do_not_change(generation: str, variant: str) -> None:
    column = list(VARIANTS).index(variant)
    checked = 0
    for (key_generation, quantization, width), expected in TRITON.items():
        if key_generation != generation:
            continue
        narrower = (16, 32, 64) if width == 64 else (width,)
        for architecture, padded in product(CAPABILITIES[generation], narrower):
            config = triton_configs.attention_config(
                "none" if quantization == "float32" else quantization,
                padded,
                architecture=architecture,
                is_float32=quantization == "float32",
                **VARIANTS[variant],
            )
            assert as_triton(config) == expected[column], (architecture, quantization, padded)
            checked += 1
    assert checked == 4 * (3 + 1 + 1) * len(CAPABILITIES[generation])


@pytest.mark.parametrize("quantization", ["int8_fp8", "int8_fp16"])
def test_quantized_calls_do_not_use_float32_configs(quantization: str) -> None:
    options = {"architecture": 90, **VARIANTS["plain"]}
    expected = TRITON["hopper", quantization, 128][0]
    assert as_triton(triton_configs.attention_config(quantization, 128, is_float32=True, **options)) == expected


def test_hopper_configs_do_not_change() -> None:
    assert {(key.quantization, key.width) for key in hopper_configs.CONFIGS} == set(HOPPER)
    for (quantization, width), expected in HOPPER.items():
        for has_threshold in (False, True):
            config = hopper_configs.hopper_config(quantization, width, has_threshold=has_threshold)
            assert astuple(config) == expected[has_threshold]


@pytest.mark.parametrize("architecture", [80, 89, 90, 100, 120])
def test_stage_configs_do_not_change(architecture: int) -> None:
    is_small = architecture // 10 in (8, 12)
    assert astuple(stage_configs.stage_config("summarize")) == (2, 8, 1)
    assert astuple(stage_configs.stage_config("reduce")) == (64, 16, 4)
    assert stage_configs.stage_config("quantize_key_value").warps == 4
    assert astuple(stage_configs.stage_config("peaks")) == (8, 3, 4)
    for width in (16, 32, 64, 128, 256):
        assert stage_configs.stage_config("quantize_query", width).warps == (4 if width <= 128 else 8)
        expected = (128 if width <= 128 else 64, 32 if is_small else 64, 8, 1)
        assert astuple(stage_configs.stage_config("score", width, architecture)) == expected
    warps = [stage_configs.stage_config("select").warps(columns) for columns in (32, 512, 1024, 2048, 8192, 65536)]
    assert warps == [1, 1, 2, 4, 16, 16]


def test_threshold_takes_precedence_over_masks() -> None:
    """The threshold determines how many queries are skipped together."""
    for has_mask, per_query in ((False, False), (True, False), (True, True)):
        assert variant_of(has_threshold=True, has_mask=has_mask, mask_per_query=per_query) == "threshold"
    assert variant_of(has_threshold=False, has_mask=True, mask_per_query=True) == "mask_per_query"


def test_tiles_with_a_threshold_equal_the_skipped_groups() -> None:
    for generation, quantization, width in TRITON:
        key = ConfigKey(generation, quantization, width, "threshold")
        config = look_up(triton_configs.CONFIGS, key)
        assert (config.block_m, config.blocks) == (ROW_GROUP, 1), key
    for key, hopper in hopper_configs.CONFIGS.items():
        assert key.variant != "threshold" or hopper.blocks == 1


def test_fallback_order() -> None:
    """The variant of the base generation, the plain variant of the key's generation, the plain variant of the base."""
    requested = ConfigKey("small", "none", 64, "mask")
    order = [
        requested,
        ConfigKey("hopper", "none", 64, "mask"),
        ConfigKey("small", "none", 64),
        ConfigKey("hopper", "none", 64),
    ]
    table = {key: position for position, key in enumerate(order, 1)}
    for expected, key in enumerate(order, 1):
        assert look_up(table, requested) == expected
        del table[key]
    table[ConfigKey("small", "none", 128, "mask")] = 5
    with pytest.raises(KeyError):
        look_up(table, requested)


def test_unknown_generations_use_the_configurations_of_hopper() -> None:
    assert config_table.generation_of(130) == "hopper"


def test_overrides_end_with_their_context() -> None:
    other, inner = triton_configs.AttentionConfig(128, 1, 8, 4), triton_configs.AttentionConfig(64, 1, 8, 4)

    def chosen() -> Any:
        return triton_configs.attention_config("int8_fp8", 128, architecture=90, is_float32=False, **VARIANTS["plain"])

    default = chosen()
    with override("triton", other):
        assert chosen() == other
        assert astuple(hopper_configs.hopper_config("int8_fp8", 128, has_threshold=False)) == (2, 4, 2, 240)
        with override("triton", inner), override("mask", stage_configs.MaskConfig(4, 2)):
            assert chosen() == inner
            assert stage_configs.stage_config("mask").blocks == 4
            assert active_overrides() == (
                ("triton", other),
                ("triton", inner),
                ("mask", stage_configs.MaskConfig(4, 2)),
            )
        assert chosen() == other
    assert chosen() == default
    assert active_overrides() == ()
    with override("triton", "not a config"), pytest.raises(AssertionError, match=r"expected .*AttentionConfig"):
        overridden("triton", default)
