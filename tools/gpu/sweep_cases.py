"""Cases of `sweep.py`: their names, their candidate configurations, and the source code of table rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import product
from typing import Any

from sparge.backends.gpu.config_table import PLAIN, VARIANTS, WIDTHS, ConfigKey, generation_of, look_up
from sparge.backends.gpu.stages import configs as stage_configs
from sparge.backends.hopper import configs as hopper_configs
from sparge.backends.triton import configs as triton_configs

TABLES: Mapping[str, Any] = {"triton": triton_configs.CONFIGS, "hopper": hopper_configs.CONFIGS}
"""Tables of the attention kernels."""
CANDIDATES: dict[str, dict[str, tuple[int | None, ...]]] = {
    "triton": {
        "block_m": (64, 128),
        "blocks": (1, 2),
        "warps": (4, 8),
        # Without a pipeline, Triton 3.6 miscompiles 16-bit products for Hopper if D_v is smaller than D (wrong numbers,
        # bad addresses). A sweep with equal widths would not detect this.
        "stages": (2, 3, 4),
        "max_registers": (None, 128, 168),
    },
    "hopper": {
        "blocks": (1, 2),
        "stages": (2, 3, 4, 5, 6),  # configurations that do not fit fail at launch
        "query_stages": (1, 2),
        "registers": (224, 232, 240),
    },
    "summarize": {"blocks": (1, 2, 4), "slab": (4, 8, 16), "warps": (1, 2, 4)},
    "reduce": {"rows": (32, 64, 128), "columns": (8, 16, 32), "warps": (2, 4, 8)},
    "quantize_key_value": {"warps": (2, 4, 8, 16)},
    "quantize_query": {"warps": (2, 4, 8, 16)},
    "score": {"rows": (64, 128, 256), "columns": (32, 64, 128), "warps": (4, 8), "stages": (1, 2)},
    "score_hopper": {"columns": (32, 64, 128), "stages": (2, 3, 4)},
    "select": {"columns": (128, 256, 512, 1024), "max_warps": (8, 16)},
    "budget": {"rows": (1, 2, 4, 8)},
    "peaks": {"blocks": (4, 8, 16), "stages": (2, 3, 4), "warps": (2, 4, 8)},
    "mask": {"blocks": (4, 8, 16), "warps": (2, 4, 8)},
    "replacement": {"step": (128, 256, 512), "warps": (1, 2, 4)},
}
"""Values to try for each field, by kernel."""
FLOAT32_CANDIDATES: dict[str, tuple[int | None, ...]] = {
    "block_m": (16, 32, 64),
    "blocks": (1,),
    "warps": (4, 8),
    "stages": (1, 2),
    "max_registers": (None,),
}
"""Values to try for unquantized float32 in Triton's attention."""
FIXED_BY_THRESHOLD = {"triton": ("block_m", "blocks"), "hopper": ("blocks",)}
"""Fields that a threshold fixes, because they determine the queries and keys that are skipped together."""
FULL_MASK_TOKENS = 8192
"""Number of tokens with a full (S_q x S_k) mask, whose size is quadratic."""


@dataclass(frozen=True)
class Case:
    """A row of a table of launch configurations, and the size of the problem on which it is measured."""

    name: str
    kernel: str
    quantization: str = "int8_fp8"
    head_dim: int = 128
    variant: str = PLAIN
    tokens: int = 32768
    heads: int = 16

    @property
    def is_attention(self) -> bool:
        """Whether the kernel is an attention kernel (measured in TOPS) and not a stage before attention."""
        return self.kernel in TABLES


def parse_case(text: str) -> Case:
    """Parse ``KERNEL[:QUANTIZATION][:HEAD_DIM][:VARIANT]``; omitted parts use defaults.

    Raises:
        ValueError: the case does not exist.
    """
    kernel, *words = text.split(":")
    if kernel not in CANDIDATES:
        raise ValueError(f"expected a kernel of {', '.join(CANDIDATES)}, got {kernel!r}")
    choices: dict[str, tuple[Any, ...]] = {"head_dim": WIDTHS}
    if kernel in TABLES:
        keys = TABLES[kernel]
        choices["quantization"] = tuple(dict.fromkeys(key.quantization for key in keys))
        choices["variant"] = tuple(variant for variant in VARIANTS if variant in {key.variant for key in keys})
    parts: dict[str, Any] = {}
    for word in words:
        matches = [(name, value) for name, values in choices.items() for value in values if word == str(value)]
        if not matches or matches[0][0] in parts:
            options = "; ".join(f"{name} of {', '.join(map(str, values))}" for name, values in choices.items())
            raise ValueError(f"expected each once, {options}; got {word!r} in {text!r}")
        parts |= dict(matches)
    if parts.get("variant") == "mask_per_query":
        parts["tokens"] = FULL_MASK_TOKENS
    return Case(text, kernel, **parts)


def key_of(case: Case, architecture: int) -> Any:
    """Return the key of the case's row in its table; for a stage, the key of the row that applies."""
    if case.is_attention:
        return ConfigKey(generation_of(architecture), case.quantization, case.head_dim, case.variant)
    return stage_configs.stage_key(case.kernel, case.head_dim, architecture)


def current_config(case: Case, architecture: int) -> Any:
    """Return the configuration that launches currently use."""
    if case.is_attention:
        return look_up(TABLES[case.kernel], key_of(case, architecture))
    return stage_configs.stage_config(case.kernel, case.head_dim, architecture)


def candidates_of(case: Case, current: Any, distance: int) -> list[Any]:
    """Return configurations that differ from the current one in at most ``distance`` fields, nearest first."""
    values = FLOAT32_CANDIDATES if case.quantization == "float32" else CANDIDATES[case.kernel]
    values = {name: tuple(dict.fromkeys((getattr(current, name), *values[name]))) for name in values}
    if case.variant == "threshold":
        values |= {name: (getattr(current, name),) for name in FIXED_BY_THRESHOLD[case.kernel]}
    configs = [replace(current, **dict(zip(values, each, strict=True))) for each in product(*values.values())]
    near = [config for config in configs if len(differences(config, current)) <= distance]
    return sorted(near, key=lambda config: len(differences(config, current)))


def differences(config: Any, other: Any) -> dict[str, Any]:
    """Return the fields and values of ``config`` that differ from ``other``."""
    return {name: value for name, value in asdict(config).items() if value != getattr(other, name)}


def as_code(value: Any) -> str:
    """Return the source code of a key or configuration, without arguments that have their default value."""
    arguments = []
    for field in fields(value):
        entry = getattr(value, field.name)
        if entry != field.default:
            code = f'"{entry}"' if isinstance(entry, str) else repr(entry)
            arguments.append(code if field.default is MISSING else f"{field.name}={code}")
    return f"{type(value).__name__}({', '.join(arguments)})"
