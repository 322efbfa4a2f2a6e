"""The demo's block maps as matplotlib figures: true block mass beside the predicted masks, with axes and needles."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from markupsafe import Markup
from torch import Tensor

from sparge.demo.measure import InputResult, Prediction
from sparge.evaluate.block_colors import DARK, KEPT, LIGHT, NOTHING, RAMP_STEPS, paint_blocks, painted
from sparge.evaluate.charts import COLORS, inline_svg
from sparge.masks.geometry import BLOCK_K, BLOCK_Q
from sparge.masks.plot import token_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_INCHES = 4.0
NEEDLE_KEPT = 0.5
"""A needle is marked as lost if the first head keeps less than this share of its mass."""

CELLS, CELLS_Q, CELLS_K = 24, 6, 3
"""The schematic map: cells along an edge, and the cells of a block."""
KEPT_PER_Q_BLOCK = 3


def map_svg(result: InputResult, prediction: Prediction | None, label: str) -> Markup | None:
    """Return the map of an input as SVG, without a prediction the map of the true mass; None without matplotlib."""
    return _svg(partial(map_figure, result, prediction), label)


def schematic_svg(step: int) -> Markup | None:
    """Return a schematic map, which is not measured: all of it (1), cut into blocks (2), the kept blocks (3)."""
    return _svg(partial(_schematic_figure, step), "")


def _svg(draw: Callable[[], Figure], label: str) -> Markup | None:
    try:
        svg = inline_svg(draw(), label)
    except ImportError:
        return None
    # The ids of the two images repeat in a page, so they become classes.
    return Markup(re.sub(rf'id="({LIGHT.name}|{DARK.name})"', r'class="\1"', str(svg)))


def map_figure(result: InputResult, prediction: Prediction | None) -> Figure:
    """Draw the blocks of one panel in both color themes, the blocks that no query sees, and the needles."""
    from matplotlib.figure import Figure

    kept = torch.ones_like(result.visible) if prediction is None else prediction.kept
    figure = Figure(figsize=(PANEL_INCHES, PANEL_INCHES), layout="constrained")
    panel = figure.subplots()
    q_blocks, kv_blocks = result.visible.shape
    if not bool(result.visible.all()):
        panel.add_patch(_future(result.visible, result.tokens))
    _draw_blocks(panel, paint_blocks(result.mass, kept, result.visible), (kv_blocks * BLOCK_K, q_blocks * BLOCK_Q))
    ticks = list(token_ticks(result.tokens))
    panel.set(xlim=(0, result.tokens), ylim=(result.tokens, 0), xticks=ticks, yticks=ticks)
    panel.set_xlabel("key token", color=COLORS["quiet"], fontsize=9.5)
    panel.set_ylabel("query token", color=COLORS["quiet"], fontsize=9.5)
    panel.tick_params(colors=COLORS["quiet"], labelsize=9)
    for spine in panel.spines.values():
        spine.set_color(COLORS["line"])
    for number, needle in enumerate(result.needles):
        center = (needle.key_start + needle.key_stop) / 2, (needle.query_start + needle.query_stop) / 2
        share = 1.0 if prediction is None else prediction.needles[number]
        _draw_needle(panel, center, number + 1, is_kept=share >= NEEDLE_KEPT)
    return figure


def _draw_blocks(panel: Any, entries: Tensor, size: tuple[int, int]) -> None:
    """Draw palette entries once per color theme; the stylesheet shows one of the two images."""
    panel.set_facecolor("none")
    for theme in (LIGHT, DARK):
        image = panel.imshow(
            painted(entries, theme).numpy(), extent=(0, size[0], size[1], 0), aspect="auto", interpolation="none"
        )
        image.set_gid(theme.name)


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
    """Return the hatched outline of the blocks that no query sees; causal queries see a prefix of the keys."""
    from matplotlib.patches import Polygon

    corners = [(tokens, 0)]
    for q_block, count in enumerate(visible.sum(-1).tolist()):
        corners += [(count * BLOCK_K, q_block * BLOCK_Q), (count * BLOCK_K, (q_block + 1) * BLOCK_Q)]
    return Polygon(
        [*corners, (tokens, tokens)], facecolor="none", edgecolor=COLORS["line"], hatch="////", linewidth=0, zorder=0
    )


def _schematic_figure(step: int) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(2.6, 2.6), layout="constrained")
    panel = figure.subplots()
    entries, outlined = _schematic_entries(step)
    _draw_blocks(panel, entries, (CELLS, CELLS))
    for q_block, kv_block in outlined.nonzero().tolist():
        corner = (kv_block * CELLS_K, q_block * CELLS_Q)
        panel.add_patch(Rectangle(corner, CELLS_K, CELLS_Q, fill=False, edgecolor=COLORS["ink"], linewidth=0.8))
    panel.set(xticks=[], yticks=[], xlim=(0, CELLS), ylim=(CELLS, 0))
    panel.xaxis.set_label_position("top")
    panel.set_xlabel("keys →", color=COLORS["quiet"], fontsize=9)
    panel.set_ylabel("← queries", color=COLORS["quiet"], fontsize=9)
    for spine in panel.spines.values():
        spine.set_color(COLORS["quiet"])
    return figure


def _schematic_entries(step: int) -> tuple[Tensor, Tensor]:
    """Return the palette entries of a made-up map, and which of its blocks are outlined."""
    cells = torch.arange(CELLS)
    distance = (cells[:, None] - cells).abs()
    weight = torch.exp(-distance / 2.0) + 0.8 * (cells == 1) + 0.5 * torch.exp(-(distance - 12).abs() / 1.0)
    levels = (3 * weight.clamp(max=1)).round().long()
    blocks = weight.unflatten(1, (-1, CELLS_K)).unflatten(0, (-1, CELLS_Q)).sum((1, 3))
    kept = torch.zeros_like(blocks, dtype=torch.bool)
    kept.scatter_(1, blocks.topk(KEPT_PER_Q_BLOCK).indices, True)
    shown = levels > 0
    if step == 3:
        shown &= kept.repeat_interleave(CELLS_Q, 0).repeat_interleave(CELLS_K, 1)
    entries = torch.where(shown, KEPT + (levels * RAMP_STEPS // 3 - 1).clamp(min=0) * 3 // 4, NOTHING)
    return entries, {1: torch.zeros_like(kept), 2: torch.ones_like(kept), 3: kept}[step]
