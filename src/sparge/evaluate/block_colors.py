"""Colors of block maps: attention mass on a log scale, blue for kept blocks and red for skipped ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MASS_FLOOR = 1e-4
"""Low end of the log scale. Skipped blocks with less than this share of their queries' attention are transparent."""

RAMP_STEPS = 120
NOTHING, KEPT, SKIPPED = 0, 1, 1 + RAMP_STEPS
"""Palette entries: transparent, then the ramp of kept blocks, then the ramp of skipped blocks."""


@dataclass(frozen=True)
class Theme:
    """Color ramps from little attention mass to all of it, as evenly spaced hex colors."""

    name: str
    kept: tuple[str, ...]
    skipped: tuple[str, ...]


LIGHT = Theme(
    "light",
    kept=("#d3e1f3", "#86b0e0", "#2d6cb5", "#0a2653"),
    skipped=("#fff4f1", "#f5a897", "#d5392c", "#6f0510"),
)
DARK = Theme(
    "dark",
    kept=("#1c2d47", "#2c5f9f", "#68a7ee", "#e6f2ff"),
    skipped=("#1d1718", "#7d2b29", "#e8573f", "#ffd0bf"),
)


def mass_levels(mass: Tensor) -> Tensor:
    """Return the position of each mass on the log scale from MASS_FLOOR to 1: integers in [0, RAMP_STEPS)."""
    decades = torch.log10(mass.double().clamp(min=MASS_FLOOR) / MASS_FLOOR)
    return (decades / -math.log10(MASS_FLOOR) * RAMP_STEPS).long().clamp(max=RAMP_STEPS - 1)


def paint_blocks(mass: Tensor, kept: Tensor, visible: Tensor) -> Tensor:
    """Return palette entries: kept blocks by their true mass, skipped blocks by the mass that they lose.

    Args:
        mass: (q_blocks, kv_blocks), the true mass of every block.
        kept: bool (q_blocks, kv_blocks).
        visible: bool (q_blocks, kv_blocks); all other blocks are transparent.

    Returns:
        uint8 (q_blocks, kv_blocks).
    """
    levels = mass_levels(mass)
    lost = torch.where(mass < MASS_FLOOR, NOTHING, SKIPPED + levels)
    return torch.where(visible, torch.where(kept, KEPT + levels, lost), NOTHING).to(torch.uint8)


def palette(theme: Theme) -> list[list[int]]:
    """Return the (red, green, blue) colors of the entries of `paint_blocks`; entry 0 is transparent."""
    return [[0, 0, 0], *_ramp(theme.kept), *_ramp(theme.skipped)]


def painted(entries: Tensor, theme: Theme) -> Tensor:
    """Return the RGBA image of palette entries: uint8 (rows, columns, 4).

    Example:
        >>> painted(torch.tensor([[NOTHING, KEPT]]), LIGHT).tolist()
        [[[0, 0, 0, 0], [211, 225, 243, 255]]]
    """
    colors = torch.tensor(palette(theme), dtype=torch.uint8)[entries.long()]
    opacity = torch.where(entries == NOTHING, 0, 255).to(torch.uint8)
    return torch.cat([colors, opacity[..., None]], -1)


def _ramp(anchors: tuple[str, ...]) -> list[list[int]]:
    """Return RAMP_STEPS colors, linear in sRGB between evenly spaced anchors, as in a CSS gradient."""
    stops = torch.tensor([[int(anchor[at : at + 2], 16) for at in (1, 3, 5)] for anchor in anchors]).double()
    positions = torch.linspace(0, len(stops) - 1, RAMP_STEPS, dtype=torch.float64)
    left = positions.long().clamp(max=len(stops) - 2)
    colors = torch.lerp(stops[left], stops[left + 1], (positions - left)[:, None])
    found: list[list[int]] = colors.round().long().tolist()
    return found
