"""Launch configurations of the Triton attention kernel.

The comment above an entry gives its speed in executed TOPS (TFLOP/s without quantization), then the speeds of other
configurations that were tried. They were measured on an H200 (Triton 3.6) with N 32768, H 16, bfloat16 and a random
half of the blocks. ``tools/gpu/sweep.py triton:int8_fp8:128`` measures an entry again (docs/configurations.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from sparge.backends.gpu.config_table import ConfigKey, generation_of, look_up, overridden, variant_of, width_class


@dataclass(frozen=True)
class AttentionConfig:
    """Queries per program, key blocks per step, warps, pipeline depth, register limit (None: the compiler decides)."""

    block_m: int
    blocks: int
    warps: int
    stages: int
    max_registers: int | None = None


CONFIGS: dict[ConfigKey, AttentionConfig] = {
    # 712; 2 stages 700, one block a step 669, 128 queries and 8 warps 573
    ConfigKey("hopper", "int8_fp8", 128): AttentionConfig(64, 2, 4, 3),
    # 502; 128 registers 524, but spills with Triton 3.9; 4 stages 497, one block a step 461
    ConfigKey("hopper", "int8_fp8", 64): AttentionConfig(64, 2, 4, 3, max_registers=168),
    # 436; 4 warps 374
    ConfigKey("hopper", "int8_fp8", 256): AttentionConfig(64, 1, 8, 3),
    # 481; 3 stages 467, 64 queries 452 to 460
    ConfigKey("hopper", "int8_fp16", 128): AttentionConfig(128, 2, 8, 2),
    # 403; two blocks a step 391
    ConfigKey("hopper", "int8_fp16", 64): AttentionConfig(64, 1, 4, 4),
    # 460; 8 warps 342
    ConfigKey("hopper", "int8_fp16", 256): AttentionConfig(64, 1, 4, 3),
    # 437; 2 stages 427, 64 queries 401
    ConfigKey("hopper", "none", 128): AttentionConfig(128, 2, 8, 3),
    # 359; 168 registers and 2 stages 370, but spills with Triton 3.9
    ConfigKey("hopper", "none", 64): AttentionConfig(64, 2, 4, 3),
    # 274; 4 warps 277, with spills
    ConfigKey("hopper", "none", 256): AttentionConfig(64, 1, 8, 2),
    # Not timed. Three TF32 products replace one, and registers are scarce: larger tiles spill (64 queries, D 128: 464
    # bytes).
    ConfigKey("hopper", "float32", 64): AttentionConfig(64, 1, 4, 2),
    ConfigKey("hopper", "float32", 128): AttentionConfig(32, 1, 8, 2),
    ConfigKey("hopper", "float32", 256): AttentionConfig(16, 1, 8, 1),
    # A threshold: the 64 queries and 64 keys that are skipped together are one step of one program. Otherwise untimed.
    # (At width 256 the rows without a variant have this form.)
    ConfigKey("hopper", "int8_fp8", 64, "threshold"): AttentionConfig(64, 1, 4, 3),
    ConfigKey("hopper", "int8_fp8", 128, "threshold"): AttentionConfig(64, 1, 4, 3),
    ConfigKey("hopper", "int8_fp16", 64, "threshold"): AttentionConfig(64, 1, 4, 3),
    ConfigKey("hopper", "int8_fp16", 128, "threshold"): AttentionConfig(64, 1, 4, 3),
    ConfigKey("hopper", "none", 64, "threshold"): AttentionConfig(64, 1, 4, 3),
    ConfigKey("hopper", "none", 128, "threshold"): AttentionConfig(64, 1, 4, 3),
    ConfigKey("hopper", "float32", 64, "threshold"): AttentionConfig(64, 1, 4, 2),
    ConfigKey("hopper", "float32", 128, "threshold"): AttentionConfig(64, 1, 8, 2),
    ConfigKey("hopper", "float32", 256, "threshold"): AttentionConfig(64, 1, 8, 1),
    # A mask: two blocks a step spill (840 bytes of stack), except unquantized at width 128, which needs no entry here.
    # 32768 tokens, 8 heads, density 0.5: 5.3 ms; two blocks a step 59, 8 warps 8.6, 128 queries and 8 warps 6.3
    ConfigKey("hopper", "int8_fp8", 128, "mask"): AttentionConfig(64, 1, 4, 3),
    # 5.4 ms; two blocks a step 52
    ConfigKey("hopper", "none", 64, "mask"): AttentionConfig(64, 1, 4, 3),
    ConfigKey("hopper", "int8_fp8", 64, "mask"): AttentionConfig(64, 1, 4, 3),
    ConfigKey("hopper", "int8_fp16", 64, "mask"): AttentionConfig(64, 1, 4, 3),
    ConfigKey("hopper", "int8_fp16", 128, "mask"): AttentionConfig(64, 1, 4, 3),
    # A full (S_q x S_k) mask: its tiles are buffered too. Not timed.
    ConfigKey("hopper", "int8_fp8", 64, "mask_per_query"): AttentionConfig(64, 1, 8, 2),
    ConfigKey("hopper", "int8_fp8", 128, "mask_per_query"): AttentionConfig(64, 1, 8, 2),
    ConfigKey("hopper", "int8_fp16", 64, "mask_per_query"): AttentionConfig(64, 1, 8, 2),
    ConfigKey("hopper", "int8_fp16", 128, "mask_per_query"): AttentionConfig(64, 1, 8, 2),
    ConfigKey("hopper", "none", 64, "mask_per_query"): AttentionConfig(64, 1, 8, 2),
    ConfigKey("hopper", "none", 128, "mask_per_query"): AttentionConfig(64, 1, 8, 2),
    # Not timed: chosen because two blocks a step spill there.
    ConfigKey("blackwell", "int8_fp8", 128): AttentionConfig(128, 1, 8, 3),
    ConfigKey("blackwell", "int8_fp8", 64): AttentionConfig(64, 1, 4, 3),
    ConfigKey("blackwell", "int8_fp16", 128): AttentionConfig(128, 1, 8, 3),
    # Not timed: chosen to fit 99 KB of shared memory (the bytes used, in comments) without spills on 8.9 and 12.0.
    ConfigKey("small", "int8_fp8", 128): AttentionConfig(64, 1, 4, 3),  # two blocks a step spill
    ConfigKey("small", "int8_fp8", 64): AttentionConfig(64, 2, 4, 3),  # 45336
    ConfigKey("small", "int8_fp8", 256): AttentionConfig(64, 1, 8, 3),  # 86280
    ConfigKey("small", "int8_fp16", 128): AttentionConfig(128, 2, 8, 2),  # 98324
    ConfigKey("small", "int8_fp16", 64): AttentionConfig(64, 1, 4, 4),  # 49164
    ConfigKey("small", "int8_fp16", 256): AttentionConfig(64, 1, 8, 2),  # 73988
    ConfigKey("small", "none", 128): AttentionConfig(128, 1, 8, 2),  # 82432
    ConfigKey("small", "none", 64): AttentionConfig(64, 1, 4, 3),  # 49152
    ConfigKey("small", "none", 256): AttentionConfig(64, 1, 8, 1),  # 73984
    ConfigKey("small", "none", 128, "mask"): AttentionConfig(64, 1, 4, 3),
    ConfigKey("small", "float32", 64): AttentionConfig(32, 1, 4, 2),  # 65536
    ConfigKey("small", "float32", 128): AttentionConfig(16, 1, 4, 1),  # 49152
    ConfigKey("small", "float32", 256): AttentionConfig(16, 1, 8, 1),  # 98304
    ConfigKey("small", "float32", 128, "threshold"): AttentionConfig(64, 1, 4, 1),
}


def attention_config(
    quantization: str,
    width: int,
    *,
    architecture: int,
    is_float32: bool,
    has_threshold: bool,
    has_mask: bool,
    mask_per_query: bool,
) -> AttentionConfig:
    """Return the configuration for a padded head width, the larger of D and D_v: see `config_table.look_up`."""
    key = ConfigKey(
        generation=generation_of(architecture),
        quantization="float32" if quantization == "none" and is_float32 else quantization,
        width=width_class(width),
        variant=variant_of(has_threshold=has_threshold, has_mask=has_mask, mask_per_query=mask_per_query),
    )
    return overridden("triton", look_up(CONFIGS, key))
