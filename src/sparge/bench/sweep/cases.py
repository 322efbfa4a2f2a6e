"""Cases of ``sparge sweep``, their candidate configurations, and the notation of both.

A case is a row in a table of launch configurations. Its name is ``KERNEL[:QUANTIZATION][:HEAD_DIM][:VARIANT]``.
"""

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
TOKENS, HEADS = 32768, 16
TOKENS_PER_QUERY = 8192
"""Largest number of tokens with a full (S_q x S_k) mask, whose size is quadratic."""


@dataclass(frozen=True)
class Case:
    """A row to derive: the kernel, the fields of its key, and the size of the problem on which it is measured."""

    kernel: str
    quantization: str = "int8_fp8"
    head_dim: int = 128
    variant: str = PLAIN
    tokens: int = TOKENS
    heads: int = HEADS

    @property
    def is_attention(self) -> bool:
        """Whether the kernel is an attention kernel (measured in TOPS) and not a stage before attention."""
        return self.kernel in ATTENTION

    def __str__(self) -> str:
        words = [self.kernel, *([self.quantization] if self.is_attention else []), str(self.head_dim)]
        return ":".join([*words, *([] if self.variant == PLAIN else [self.variant])])


def parse_case(text: str, tokens: int = TOKENS, heads: int = HEADS) -> Case:
    """Parse ``KERNEL[:QUANTIZATION][:HEAD_DIM][:VARIANT]``; omitted parts use defaults.

    Raises:
        ValueError: the case does not exist.

    Example:
        >>> parse_case("triton:none:64:mask").variant
        'mask'
        >>> str(parse_case("score"))
        'score:128'
    """
    kernel, *words = text.split(":")
    if kernel not in KERNELS:
        raise ValueError(f"expected a kernel of {', '.join(KERNELS)}, got {kernel!r}")
    choices: dict[str, tuple[Any, ...]] = {"head_dim": WIDTHS}
    if kernel in ATTENTION:
        table = ATTENTION[kernel].CONFIGS
        choices["quantization"] = tuple(dict.fromkeys(key.quantization for key in table))
        variants = {key.variant for key in table}
        choices["variant"] = tuple(variant for variant in VARIANTS if variant in variants)
    named: dict[str, Any] = {}
    for word in words:
        known = [(name, value) for name, values in choices.items() for value in values if word == str(value)]
        if not known or known[0][0] in named:
            listed = "; ".join(f"{name} of {', '.join(map(str, values))}" for name, values in choices.items())
            raise ValueError(f"expected each once, {listed}; got {word!r} in {text!r}")
        named |= dict(known)
    if named.get("variant") == "mask_per_query":
        tokens = min(tokens, TOKENS_PER_QUERY)
    return Case(kernel=kernel, tokens=tokens, heads=heads, **named)


def key_of(case: Case, architecture: int) -> Any:
    """Return the key of the case's row in its table; for a stage, the key of the row that applies."""
    if case.is_attention:
        return ConfigKey(generation_of(architecture), case.quantization, case.head_dim, case.variant)
    return stage_configs.stage_key(case.kernel, case.head_dim, architecture)


def chosen_config(case: Case, architecture: int) -> Any:
    """Return the configuration that launches currently use."""
    if case.is_attention:
        return look_up(ATTENTION[case.kernel].CONFIGS, key_of(case, architecture))
    return stage_configs.stage_config(case.kernel, case.head_dim, architecture)


def candidates_of(case: Case, chosen: Any, distance: int) -> list[Any]:
    """Return configurations that differ from the chosen one in at most ``distance`` fields, nearest first."""
    values: dict[str, tuple[Any, ...]]
    if not case.is_attention:
        values = dict(stage_configs.CANDIDATES[case.kernel])
    elif case.quantization == "float32":
        values = dict(triton_configs.FLOAT32_CANDIDATES)
    else:
        values = dict(ATTENTION[case.kernel].CANDIDATES)
    for name in values:
        current = getattr(chosen, name)
        values[name] = tuple(dict.fromkeys((current, *values[name])))
    if case.variant == "threshold":
        values |= {name: (getattr(chosen, name),) for name in ATTENTION[case.kernel].FIXED_BY_THRESHOLD}
    configs = [replace(chosen, **dict(zip(values, each, strict=True))) for each in product(*values.values())]
    near = [config for config in configs if len(differences(config, chosen)) <= distance]
    return sorted(near, key=lambda config: len(differences(config, chosen)))


def differences(config: Any, other: Any) -> dict[str, Any]:
    """Return the fields and values of ``config`` that differ from ``other``."""
    others = asdict(other)
    return {name: value for name, value in asdict(config).items() if value != others[name]}


def describe(changes: Mapping[str, Any]) -> str:
    """Format fields and their values.

    Example:
        >>> describe({"block_m": 128, "warps": 8})
        'block_m=128, warps=8'
    """
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def as_code(value: Any) -> str:
    """Return the source code of a key or configuration. Arguments with a default are named, and default values omitted.

    Example:
        >>> as_code(triton_configs.AttentionConfig(64, 2, 4, 3, max_registers=168))
        'AttentionConfig(64, 2, 4, 3, max_registers=168)'
        >>> as_code(ConfigKey("hopper", "none", 64, "mask"))
        'ConfigKey("hopper", "none", 64, "mask")'
    """
    arguments, is_positional = [], True
    for field in fields(value):
        entry = getattr(value, field.name)
        code = f'"{entry}"' if isinstance(entry, str) else repr(entry)
        is_positional &= entry != field.default and (field.default is MISSING or isinstance(entry, str))
        if entry != field.default:
            arguments.append(code if is_positional else f"{field.name}={code}")
    return f"{type(value).__name__}({', '.join(arguments)})"
