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

ATTENTION: Mapping[str, Any] = {"triton": triton_configs, "hopper": hopper_configs}
"""Modules with the tables of the attention kernels."""
KERNELS = (*ATTENTION, *stage_configs.CANDIDATES)
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
        return self.kernel in ATTENTION


def parse_case(text: str) -> Case:
    """Parse ``KERNEL[:QUANTIZATION][:HEAD_DIM][:VARIANT]``; omitted parts use defaults.

    Raises:
        ValueError: the case does not exist.
    """
    kernel, *words = text.split(":")
    if kernel not in KERNELS:
        raise ValueError(f"expected a kernel of {', '.join(KERNELS)}, got {kernel!r}")
    choices: dict[str, tuple[Any, ...]] = {"head_dim": WIDTHS}
    if kernel in ATTENTION:
        keys = ATTENTION[kernel].CONFIGS
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
        return look_up(ATTENTION[case.kernel].CONFIGS, key_of(case, architecture))
    return stage_configs.stage_config(case.kernel, case.head_dim, architecture)


def candidates_of(case: Case, current: Any, distance: int) -> list[Any]:
    """Return configurations that differ from the current one in at most ``distance`` fields, nearest first."""
    values: dict[str, tuple[Any, ...]]
    if not case.is_attention:
        values = dict(stage_configs.CANDIDATES[case.kernel])
    elif case.quantization == "float32":
        values = dict(triton_configs.FLOAT32_CANDIDATES)
    else:
        values = dict(ATTENTION[case.kernel].CANDIDATES)
    values = {name: tuple(dict.fromkeys((getattr(current, name), *values[name]))) for name in values}
    if case.variant == "threshold":
        values |= {name: (getattr(current, name),) for name in ATTENTION[case.kernel].FIXED_BY_THRESHOLD}
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
