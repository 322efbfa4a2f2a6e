"""Tables of launch configurations: what a row is called, which row stands in for a missing one, who may override.

The tables themselves lie beside the kernels: `triton.configs`, `hopper.configs` and `cuda.stages.configs`. Their rows
are derived by ``sparge sweep`` (docs/configurations.md).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TypeVar

Config = TypeVar("Config")

BASE = "hopper"
"""The generation that was measured; its rows serve where another generation has none."""
PLAIN = "plain"
"""The variant without a mask or a threshold; its rows serve where another variant has none."""
VARIANTS = (PLAIN, "threshold", "mask", "mask_per_query")
WIDTHS = (64, 128, 256)

GENERATIONS = {8: "small", 9: BASE, 10: "blackwell", 11: "blackwell", 12: "small"}
"""By the major compute capability. The matrix products of "small" generations take both operands from registers; all
but 8.0 have 99 KB of shared memory."""


@dataclass(frozen=True)
class ConfigKey:
    """What a configuration is for.

    Attributes:
        generation: one of `GENERATIONS`.
        quantization: that of the call, or "float32" for unquantised float32.
        width: padded channels of a head, the larger of D and D_v, one of `WIDTHS`.
        variant: one of `VARIANTS`.
    """

    generation: str
    quantization: str
    width: int
    variant: str = PLAIN


def generation_of(architecture: int) -> str:
    """The generation of a compute capability given as one number (89, 90)."""
    return GENERATIONS.get(architecture // 10, BASE)


def width_class(width: int) -> int:
    """The smallest of `WIDTHS` that holds a padded head width."""
    return next(limit for limit in WIDTHS if width <= limit)


def variant_of(*, has_threshold: bool, has_mask: bool, mask_per_query: bool) -> str:
    """The variant of a call. Where several apply, the first of threshold, mask per query and mask counts."""
    if has_threshold:
        return "threshold"
    if mask_per_query:
        return "mask_per_query"
    return "mask" if has_mask else PLAIN


def look_up(table: Mapping[ConfigKey, Config], key: ConfigKey) -> Config:
    """The row of a key. Where there is none, the first of these that exists:

    1. the same variant of the `BASE` generation,
    2. the `PLAIN` variant of the key's own generation,
    3. the `PLAIN` variant of the `BASE` generation.

    Quantization and width never fall back.

    Raises:
        KeyError: none of them exists.
    """
    plain = replace(key, variant=PLAIN)
    for candidate in (key, replace(key, generation=BASE), plain, replace(plain, generation=BASE)):
        found = table.get(candidate)
        if found is not None:
            return found
    raise KeyError(key)


_overrides: ContextVar[tuple[tuple[str, Hashable], ...]] = ContextVar("overrides", default=())


@contextmanager
def override(kernel: str, config: Hashable) -> Iterator[None]:
    """Launch a kernel in this configuration, whatever its table says, in this thread and for the length of a block.

    Calls under it are recorded apart from others (`active_overrides`).
    """
    token = _overrides.set((*_overrides.get(), (kernel, config)))
    try:
        yield
    finally:
        _overrides.reset(token)


def active_overrides() -> tuple[tuple[str, Hashable], ...]:
    """Kernels and configurations of all overrides that hold now, the innermost last."""
    return _overrides.get()


def overridden(kernel: str, config: Config) -> Config:
    """The configuration, or the one that the innermost `override` of the kernel has put in its place."""
    for name, replacement in reversed(_overrides.get()):
        if name == kernel:
            assert isinstance(replacement, type(config)), f"{kernel}: expected {type(config)}, got {replacement!r}"
            return replacement
    return config
