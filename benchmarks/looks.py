"""Colors and drawing helpers that the figures share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from sparge.evaluate.block_colors import DARK, LIGHT, Theme

DENSITY = "density: share of the visible blocks"


@dataclass(frozen=True)
class Look:
    """Colors of a light or dark page, and drawing helpers that use them."""

    name: str
    page: str
    ink: str
    quiet: str
    panel: str
    marks: tuple[str, str, str]
    theme: Theme

    def figure(self, width: float, height: float) -> Figure:
        """Return a transparent figure; width and height are in inches."""
        figure = Figure(figsize=(width, height), layout="constrained", dpi=160)
        FigureCanvasAgg(figure)
        figure.patch.set_alpha(0)
        return figure

    def style(self, panel: Any, labels: float | None = None, *, grid: bool = False) -> None:
        """Apply the page's colors and a font size of labels to a panel."""
        panel.set_facecolor(self.panel)
        panel.tick_params(labelsize=8, colors=self.quiet)
        for spine in panel.spines.values():
            spine.set_color(self.quiet)
            spine.set_linewidth(0.6)
        for text in (panel.title, panel.xaxis.label, panel.yaxis.label):
            text.set_color(self.ink)
        if labels is not None:
            panel.xaxis.label.set_fontsize(labels)
            panel.yaxis.label.set_fontsize(labels)
        if grid:
            panel.grid(color=self.quiet, alpha=0.25, lw=0.5)

    def legend(self, owner: Any, size: float = 8.5, **options: Any) -> None:
        """Add a legend without a frame to a panel or a figure."""
        owner.legend(frameon=False, fontsize=size, labelcolor=self.ink, **options)

    def colormap(self, *colors: str) -> LinearSegmentedColormap:
        return LinearSegmentedColormap.from_list("shades", colors)

    def level(self, panel: Any, value: float, text: str = "", **place: Any) -> None:
        """Draw a dashed horizontal line with a text near its end."""
        panel.axhline(value, color=self.quiet, lw=0.8, ls="--")
        place = {"x": 0.99, "ha": "right", "va": "bottom"} | place
        panel.text(y=value, s=text, fontsize=7.5, color=self.quiet, transform=panel.get_yaxis_transform(), **place)


LOOKS = (
    Look("light", "#ffffff", "#1f2328", "#59636e", "#f3f4f6", ("#2d6cb5", "#d5392c", "#7a8594"), LIGHT),
    Look("dark", "#0d1117", "#f0f6fc", "#9198a1", "#161b22", ("#68a7ee", "#e8573f", "#8b949e"), DARK),
)
