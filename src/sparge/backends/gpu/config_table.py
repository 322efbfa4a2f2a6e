"""Look up launch configurations: keys of the tables, the fallback for missing keys, and overrides.

The tables are next to the kernels, in `triton.configs`, `hopper.configs` and `gpu.stages.configs`. tools/gpu/sweep.py
measures their entries (docs/configurations.md).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TypeVar

Config = TypeVar("Config")

BASE = "hopper"
"""The generation that the configurations were measured on; fallback for other generations."""
PLAIN = "plain"
"""The variant without a mask or a threshold; fallback for other variants."""
VARIANTS = (PLAIN, "threshold", "mask", "mask_per_query")
WIDTHS = (64, 128, 256)

GENERATIONS = {8: "small", 9: BASE, 10: "blackwell", 11: "blackwell", 12: "small"}
"""Generation of each major compute capability. On "small" GPUs, matrix instructions read both operands from registers,
and shared memory is at most 99 KB except on compute capability 8.0."""


@dataclass(frozen=True)
class ConfigKey:
    """The key of a configuration.

    Attributes:
        generation: one of `GENERATIONS`.
        quantization: the quantization of the call, or "float32" for unquantized float32.
        width: padded channels of a head, the larger of D and D_v, one of `WIDTHS`.
        variant: one of `VARIANTS`.
    """

    generation: str
    quantization: str
    width: int
    variant: str = PLAIN


def generation_of(architecture: int) -> str:
    """Return the generation of a compute capability given as one number (89, 90)."""
    return GENERATIONS.get(architecture // 10, BASE)


def width_class(width: int) -> int:
    """Return the smallest of `WIDTHS` that is at least a padded head width."""
    return next(limit for limit in WIDTHS if width <= limit)


def variant_of(*, has_threshold: bool, has_mask: bool, mask_per_query: bool) -> str:
    """Return the first variant that applies: threshold, full (S_q x S_k) mask, any mask, or `PLAIN`."""
    if has_threshold:
        return "threshold"
    if mask_per_query:
        return "mask_per_query"
    return "mask" if has_mask else PLAIN


def look_up(table: Mapping[ConfigKey, Config], key: ConfigKey) -> Config:
    """Return the configuration of a key. If the key is missing, use the first of these that exists:

    1. the same variant of the `BASE` generation,
    2. the `PLAIN` variant of the key's own generation,
    3. the `PLAIN` variant of the `BASE` generation.

    Quantization and width never fall back.

    Raises:
        KeyError: none of them exists.
    """
    plain = replace(key, variant=PLAIN)
    for candidate in (key, replace(key, generation=BASE), plain, replace(plain, generation=BASE)):
        config = table.get(candidate)
        if config is not None:
            return config
    raise KeyError(key)


_overrides: ContextVar[tuple[tuple[str, Hashable], ...]] = ContextVar("overrides", default=())


@contextmanager
def override(kernel: str, config: Hashable) -> Iterator[None]:
    """Override the table's configuration of a kernel by ``config`` within the context, in this thread only.

    Calls with different overrides have different recordings (`active_overrides`).
    """
    token = _overrides.set((*_overrides.get(), (kernel, config)))
    try:
        yield
    finally:
        _overrides.reset(token)


def active_overrides() -> tuple[tuple[str, Hashable], ...]:
    """Return kernels and configurations of all active overrides, the innermost last."""
    return _overrides.get()


def overridden(kernel: str, config: Config) -> Config:
    """Return the configuration of the kernel's innermost `override`, or ``config`` without an override."""
    for name, replacement in reversed(_overrides.get()):
        if name == kernel:
            assert isinstance(replacement, type(config)), f"{kernel}: expected {type(config)}, got {replacement!r}"
            return replacement
    return config
