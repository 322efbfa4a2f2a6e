"""Pictures of block maps: `plot_block_mask` with matplotlib, and one-pixel-per-block PNGs that need no library."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape
from sparge.masks.visibility import find_visibility
from sparge.masks.window import Window
from sparge.options.extras import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Colour = tuple[int, int, int]

MASS_FLOOR = 1e-4
"""A block with less of its queries' attention than this is drawn as empty: 0.01 %, the low end of the log scale."""

RAMP_STEPS = 120
NOTHING, KEPT, DROPPED = 0, 1, 1 + RAMP_STEPS
"""Palette entries: transparent, then the ramp of kept blocks, then the ramp of dropped ones."""


@dataclass(frozen=True)
class Theme:
    """Ramps from little mass to all of it, as evenly spaced hex colours."""

    kept: tuple[str, ...]
    dropped: tuple[str, ...]


LIGHT = Theme(
    kept=("#d3e1f3", "#86b0e0", "#2d6cb5", "#0a2653"),
    dropped=("#fff4f1", "#f5a897", "#d5392c", "#6f0510"),
)
DARK = Theme(
    kept=("#1c2d47", "#2c5f9f", "#68a7ee", "#e6f2ff"),
    dropped=("#1d1718", "#7d2b29", "#e8573f", "#ffd0bf"),
)


_FUTURE: dict[str, Any] = {"facecolor": "#eeeeee", "edgecolor": "#c4c4c4", "hatch": "////"}


def plot_block_mask(mask: BlockMask, *, batch: int = 0, max_heads: int = 8) -> Figure:
    """Draw the kept blocks of the first heads of one batch entry, queries down and keys to the right.

    Args:
        mask: the mask to draw.
        batch: which batch entry.
        max_heads: draw at most this many heads, four panels a row.

    Returns:
        A figure with an Agg canvas. Blocks that lie wholly in the causal future or outside of the window are hatched; a
        mask does not remember which blocks an ``attn_mask`` hid, so those look dropped.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: ``batch`` or ``max_heads`` is out of range.

    Example:
        >>> import torch, sparge
        >>> q = torch.randn(1, 2, 2048, 64)
        >>> figure = sparge.predict(q, q, sparsity=sparge.TopK(0.25), is_causal=True).plot()
        >>> figure.axes[0].get_title()
        'head 0: 73.5% kept'
    """
    batches, heads, _, _ = mask.shape
    if not 0 <= batch < batches:
        raise ValueError(f"batch: expected a value in [0, {batches}), got {batch}")
    if max_heads < 1:
        raise ValueError(f"max_heads: expected 1 or more, got {max_heads}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch, Rectangle
    except ImportError as error:
        raise ImportError(f"plotting needs matplotlib: {install_command('plot')}") from error

    shown = min(heads, max_heads)
    columns = min(shown, 4)
    rows = -(-shown // columns)
    figure = Figure(figsize=(0.6 + 2.9 * columns, 0.8 + 3.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    kept = mask.to_dense()[batch, :shown].cpu()
    visible = causal_visibility(mask)
    colours = ListedColormap(["#ffffff", "#1f3b63"]).with_extremes(bad=(0, 0, 0, 0))
    q_blocks, kv_blocks = visible.shape
    for head, panel in enumerate(panels.flat):
        if head >= shown:
            panel.set_visible(False)
            continue
        future = Rectangle((0, 0), mask.kv_len, mask.q_len, zorder=-1, lw=0, **_FUTURE)
        panel.add_patch(future)
        picture = torch.where(visible, kept[head].double(), torch.nan).numpy()
        extent = (0, kv_blocks * BLOCK_K, q_blocks * BLOCK_Q, 0)
        panel.imshow(picture, cmap=colours, vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="nearest")
        panel.set(xlim=(0, mask.kv_len), ylim=(mask.q_len, 0), xticks=token_ticks(mask.kv_len))
        panel.set(yticks=token_ticks(mask.q_len))
        panel.set_title(f"head {head}: {_density(mask, batch, head)} kept", fontsize=10)
        panel.tick_params(labelsize=8, labelbottom=head + columns >= shown)
    figure.supxlabel("key token", fontsize=9)
    figure.supylabel("query token", fontsize=9)
    handles = [
        Patch(facecolor="#1f3b63", label="kept"),
        Patch(facecolor="#ffffff", edgecolor="#9a9a9a", label="dropped"),
    ]
    if not bool(visible.all()):
        handles.append(Patch(label="not visible", **_FUTURE))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def causal_visibility(mask: BlockMask) -> Tensor:
    """Blocks that causality and a window let the queries see: bool (q_blocks, kv_blocks), on the CPU."""
    shape = Shape(1, 1, 1, mask.q_len, mask.kv_len, 1, 1)
    blocks = find_visibility(shape, Window(*mask.window), None, torch.device("cpu")).blocks
    return blocks.expand(1, 1, *mask.shape[2:])[0, 0]


def token_ticks(tokens: int) -> range:
    """Two to five tick positions, multiples of a power of two as blocks are."""
    return range(0, tokens + 1, max(2 ** math.ceil(math.log2(tokens / 4)), 1))


def _density(mask: BlockMask, batch: int, head: int) -> str:
    visible = int(mask.visible_num_blocks[batch, head].sum())
    return f"{100 * int(mask.kv_num_blocks[batch, head].sum()) / max(visible, 1):.1f}%"


def mass_levels(mass: Tensor) -> Tensor:
    """Where each mass lies on the log scale from MASS_FLOOR to 1: integers in [0, RAMP_STEPS)."""
    decades = torch.log10(mass.double().clamp(min=MASS_FLOOR) / MASS_FLOOR)
    return (decades / -math.log10(MASS_FLOOR) * RAMP_STEPS).long().clamp(max=RAMP_STEPS - 1)


def paint_blocks(mass: Tensor, kept: Tensor, visible: Tensor) -> Tensor:
    """Palette entries of a picture: kept blocks by their true mass, dropped ones by the mass that is lost with them.

    Args:
        mass: (q_blocks, kv_blocks), the true mass of every block.
        kept: bool, the same shape.
        visible: bool, the same shape; what nobody may see stays transparent.

    Returns:
        uint8, the same shape, for `png_data_uri`.
    """
    levels = mass_levels(mass)
    lost = torch.where(mass < MASS_FLOOR, NOTHING, DROPPED + levels)
    return torch.where(visible, torch.where(kept, KEPT + levels, lost), NOTHING).to(torch.uint8)


def palette(theme: Theme) -> list[Colour]:
    """The colours behind the entries of `paint_blocks`; entry 0 is transparent."""
    return [(0, 0, 0), *_ramp(theme.kept), *_ramp(theme.dropped)]


def png_data_uri(entries: Tensor, colours: list[Colour]) -> str:
    """An indexed PNG, one pixel per entry (rows, columns) of uint8, as a ``data:`` address."""
    height, width = entries.shape
    scanlines = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), entries], 1)  # filter type 0 before each row
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(channel for colour in colours for channel in colour)),
        (b"tRNS", b"\x00"),
        (b"IDAT", zlib.compress(bytes(scanlines.flatten().tolist()), 9)),
        (b"IEND", b""),
    ]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _ramp(anchors: tuple[str, ...]) -> list[Colour]:
    """RAMP_STEPS colours, linear in sRGB between evenly spaced anchors, as a CSS gradient draws them."""
    stops = [[int(anchor[at : at + 2], 16) for at in (1, 3, 5)] for anchor in anchors]
    colours = []
    for step in range(RAMP_STEPS):
        position = step / (RAMP_STEPS - 1) * (len(stops) - 1)
        left = min(int(position), len(stops) - 2)
        red, green, blue = (
            round(low + (position - left) * (high - low))
            for low, high in zip(stops[left], stops[left + 1], strict=True)
        )
        colours.append((red, green, blue))
    return colours
