"""Draw block masks with matplotlib: the implementation of `BlockMask.plot`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparge.masks.geometry import BLOCK_K, BLOCK_Q
from sparge.options.extras import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEPT_COLOR, SKIPPED_COLOR = "#1f3b63", "#ffffff"
NOT_VISIBLE: dict[str, Any] = {"facecolor": "#eeeeee", "edgecolor": "#c4c4c4", "hatch": "////"}


def plot_blocks(kept: Tensor, visible: Tensor, titles: Sequence[str], *, q_len: int, kv_len: int) -> Figure:
    """Draw one panel per head in rows of four panels. Queries go down, keys to the right.

    Args:
        kept: bool (heads, q_blocks, kv_blocks) on the CPU, True where a block is kept.
        visible: bool (q_blocks, kv_blocks) on the CPU; invisible blocks are hatched.
        titles: one title per head.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch, Rectangle
    except ImportError as error:
        raise ImportError(f"plotting needs matplotlib: {install_command('plot')}") from error

    heads, q_blocks, kv_blocks = kept.shape
    columns = min(heads, 4)
    rows = -(-heads // columns)
    figure = Figure(figsize=(0.6 + 2.9 * columns, 0.8 + 3.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    colors = ListedColormap([SKIPPED_COLOR, KEPT_COLOR]).with_extremes(bad=(0, 0, 0, 0))
    for head, panel in enumerate(panels.flat):
        if head >= heads:
            panel.set_visible(False)
            continue
        panel.add_patch(Rectangle((0, 0), kv_len, q_len, zorder=-1, lw=0, **NOT_VISIBLE))
        image = torch.where(visible, kept[head].double(), torch.nan).numpy()
        extent = (0, kv_blocks * BLOCK_K, q_blocks * BLOCK_Q, 0)
        panel.imshow(image, cmap=colors, vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="nearest")
        panel.set(xlim=(0, kv_len), ylim=(q_len, 0), xticks=token_ticks(kv_len), yticks=token_ticks(q_len))
        panel.set_title(titles[head], fontsize=10)
        panel.tick_params(labelsize=8, labelbottom=head + columns >= heads)
    figure.supxlabel("key token", fontsize=9)
    figure.supylabel("query token", fontsize=9)
    handles = [
        Patch(facecolor=KEPT_COLOR, label="kept"),
        Patch(facecolor=SKIPPED_COLOR, edgecolor="#9a9a9a", label="skipped"),
    ]
    if not bool(visible.all()):
        handles.append(Patch(label="not visible", **NOT_VISIBLE))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def token_ticks(tokens: int) -> range:
    """Return two to five tick positions. Their spacing is a power of two, like the block sizes."""
    return range(0, tokens + 1, max(2 ** math.ceil(math.log2(tokens / 4)), 1))
