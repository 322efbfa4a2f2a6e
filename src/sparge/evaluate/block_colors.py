"""Colors of block maps: attention mass on a log scale, blue for kept blocks and red for skipped ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

MASS_FLOOR = 1e-4
"""Low end of the log scale. Skipped blocks with less than this share of their queries' attention are transparent."""


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


def block_image(mass: Tensor, kept: Tensor, visible: Tensor, theme: Theme) -> Any:
    """Return an RGBA image with one pixel per block: kept blocks by their true mass, skipped blocks by the lost mass.

    Args:
        mass: (q_blocks, kv_blocks), the true mass of every block.
        kept: bool (q_blocks, kv_blocks).
        visible: bool (q_blocks, kv_blocks); all other blocks are transparent.

    Returns:
        A NumPy array of bytes, (q_blocks, kv_blocks, 4).
    """
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    levels = LogNorm(MASS_FLOOR, 1, clip=True)(mass.numpy())
    image = LinearSegmentedColormap.from_list("skipped", theme.skipped)(levels, bytes=True)
    image[kept] = LinearSegmentedColormap.from_list("kept", theme.kept)(levels, bytes=True)[kept]
    image[~visible | ~kept & (mass < MASS_FLOOR)] = 0
    return image
