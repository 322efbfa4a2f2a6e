"""The demo's block maps as matplotlib figures: true block mass beside the predicted masks, with axes and needles."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from markupsafe import Markup
from torch import Tensor

from sparge.demo.measure import InputResult
from sparge.evaluate.block_colors import DARK, LIGHT, block_image
from sparge.evaluate.charts import COLORS, inline_svg
from sparge.masks.geometry import BLOCK_K, BLOCK_Q
from sparge.masks.plot import token_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_INCHES = 4.0
NEEDLE_KEPT = 0.5
"""A needle is marked as lost if less than this share of its mass is kept."""


def map_svg(result: InputResult, index: int | None, label: str) -> Markup | None:
    """Return the figure of `map_figure` as SVG; None without matplotlib."""
    try:
        svg = inline_svg(map_figure(result, index), label)
    except ImportError:
        return None
    # Every figure of a page uses the same two ids, so they become classes.
    return Markup(re.sub(rf'id="({LIGHT.name}|{DARK.name})"', r'class="\1"', str(svg)))


def map_figure(result: InputResult, index: int | None) -> Figure:
    """Draw the blocks of the first head that the ``index``-th score keeps; if ``index`` is None, the true mass.

    The figure contains the blocks in both color themes, the area that no query sees, and the needles.
    """
    from matplotlib.figure import Figure

    kept = torch.ones_like(result.visible) if index is None else result.kept[index]
    figure = Figure(figsize=(PANEL_INCHES, PANEL_INCHES), layout="constrained")
    panel = figure.subplots()
    q_blocks, kv_blocks = result.visible.shape
    if not bool(result.visible.all()):
        panel.add_patch(_future(result.visible, result.tokens))
    panel.set_facecolor("none")
    for theme in (LIGHT, DARK):  # the stylesheet shows one of the two images
        image = block_image(result.mass, kept, result.visible, theme)
        extent = (0, kv_blocks * BLOCK_K, q_blocks * BLOCK_Q, 0)
        panel.imshow(image, extent=extent, aspect="auto", interpolation="none").set_gid(theme.name)
    ticks = list(token_ticks(result.tokens))
    panel.set(xlim=(0, result.tokens), ylim=(result.tokens, 0), xticks=ticks, yticks=ticks)
    panel.set_xlabel("key token", color=COLORS["quiet"], fontsize=9.5)
    panel.set_ylabel("query token", color=COLORS["quiet"], fontsize=9.5)
    panel.tick_params(colors=COLORS["quiet"], labelsize=9)
    for spine in panel.spines.values():
        spine.set_color(COLORS["line"])
    for number, needle in enumerate(result.needles):
        center = (needle.key_start + needle.key_stop) / 2, (needle.query_start + needle.query_stop) / 2
        share = 1.0 if index is None else result.rows[index].needles[number]
        _draw_needle(panel, center, number + 1, is_kept=share >= NEEDLE_KEPT)
    return figure


def _draw_needle(panel: Any, center: tuple[float, float], number: int, *, is_kept: bool) -> None:
    """Draw a numbered ring, with a cross in it if the needle is lost."""
    color = COLORS["ink" if is_kept else "lost"]
    for edge, width in ((COLORS["paper"], 4.0), (color, 1.5)):
        panel.plot(*center, marker="o", markersize=10, markerfacecolor="none", markeredgecolor=edge, mew=width)
    if not is_kept:
        panel.plot(*center, marker="x", markersize=6, markeredgecolor=color, mew=1.5)
    panel.annotate(
        str(number), center, xytext=(8, 0), textcoords="offset points", va="center", fontsize=9.5, weight="bold",
        color=color,
    )  # fmt: skip


def _future(visible: Tensor, tokens: int) -> Any:
    """Return a hatched polygon over the blocks that no query sees. Causal queries see a prefix of the keys."""
    from matplotlib.patches import Polygon

    corners = [(tokens, 0)]
    for q_block, count in enumerate(visible.sum(-1).tolist()):
        corners += [(count * BLOCK_K, q_block * BLOCK_Q), (count * BLOCK_K, (q_block + 1) * BLOCK_Q)]
    return Polygon(
        [*corners, (tokens, tokens)], facecolor="none", edgecolor=COLORS["line"], hatch="////", linewidth=0, zorder=0
    )
