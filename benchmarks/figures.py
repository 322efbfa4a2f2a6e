"""Draw the pictures in docs/figures: `python -m benchmarks.figures`.

masks.png     true attention mass beside what each score keeps
hopper.png    who does what when in the Hopper kernel
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import sparge
from sparge.evaluate.inputs import Sample, text_with_needles, video_like
from sparge.evaluate.metrics import block_mass, mass_recall
from sparge.evaluate.plots import LIGHT, causal_visibility, paint_blocks, palette

FOLDER = Path(__file__).parent.parent / "docs" / "figures"
TOPK = 0.25

TILE, MAXIMUM, CODES, PRODUCT, FOLD = 10.0, 1.6, 3.2, 2.0, 1.8
"""Lengths in hopper.png: a tile, its maximum, its P, its S or P V, adding it to the output."""
ROLES = ("copy engine", "consumer 0", "products of 0", "consumer 1", "products of 1")
KINDS = {
    "K, V": "#b9c4d0",
    "maximum": "#f2b880",
    "P": "#e6875c",
    "add": "#d9d2c5",
    "S": "#7aa6c2",
    "P V": "#4f7d5f",
}


def draw_masks() -> Figure:
    samples = [text_with_needles(8192, heads=1), video_like(8192, heads=1)]
    figure = Figure(figsize=(9.6, 6.8), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(samples), 3)
    for row, sample in zip(panels, samples, strict=True):
        _draw_sample(row, sample)
    figure.supxlabel("key token", fontsize=9)
    figure.supylabel("query token", fontsize=9)
    return figure


def _draw_sample(panels, sample: Sample) -> None:
    mass = block_mass(sample.query, sample.key, is_causal=sample.is_causal)
    colours = torch.tensor([(255, 255, 255), *palette(LIGHT)[1:]], dtype=torch.uint8)
    size = sample.query.shape[2]
    pictures = [(f"{sample.name}: true attention mass", None)]
    for score in ("moment", "mean"):
        mask = sparge.predict(sample.query, sample.key, is_causal=sample.is_causal, topk=TOPK, score=score)
        share, density = mass_recall(mask, mass), mask.density()
        pictures.append((f'score "{score}": {density:.1%} of blocks, {share:.1%} of mass', mask))
    visible = causal_visibility(mask)
    for panel, (title, mask) in zip(panels, pictures, strict=True):
        kept = visible if mask is None else mask.to_dense()[0, 0]
        entries = paint_blocks(mass[0, 0], kept, visible)
        panel.imshow(colours[entries.long()].numpy(), extent=(0, size, size, 0), aspect="auto", interpolation="nearest")
        panel.set_title(title, fontsize=8)
        panel.tick_params(labelsize=7)
        panel.set(xticks=range(0, size + 1, 2048), yticks=range(0, size + 1, 2048))
        for needle in sample.needles:
            panel.plot(needle.key_start, needle.query_start, "o", mfc="none", mec="black", ms=7, mew=0.9)


def draw_hopper() -> Figure:
    """Tiles of both consumers, half a tile apart: the order of things, not their exact length."""
    figure = Figure(figsize=(9.6, 3.4), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    height = {role: len(ROLES) - 1 - place for place, role in enumerate(ROLES)}

    def bar(role: str, kind: str, start: float, length: float, label: str) -> None:
        panel.barh(height[role], length, left=start, height=0.62, color=KINDS[kind], edgecolor="white", linewidth=1)
        panel.text(start + length / 2, height[role], label, ha="center", va="center", fontsize=7, clip_on=True)

    for tile in range(2):
        bar("copy engine", "K, V", tile * TILE, 0.9 * TILE, f"K, V of tile {tile + 3}")
        for consumer in (0, 1):
            role, products, start = f"consumer {consumer}", f"products of {consumer}", (tile + 0.5 * consumer) * TILE
            bar(role, "maximum", start, MAXIMUM, f"max {tile}")
            bar(role, "P", start + MAXIMUM, CODES, f"P {tile}")
            ready = start + MAXIMUM + CODES
            bar(products, "P V", ready, PRODUCT, f"P V {tile}")
            bar(products, "S", ready + PRODUCT, PRODUCT, f"S {tile + 1}")
            bar(role, "add", ready + PRODUCT, FOLD, f"+ P V {tile}")
    panel.set(yticks=list(height.values()), yticklabels=list(height), xlim=(0, 2 * TILE), xticks=[], xlabel="time")
    panel.tick_params(labelsize=8)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    return figure


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in (("masks", draw_masks), ("hopper", draw_hopper)):
        draw().savefig(FOLDER / f"{name}.png")
        print(f"wrote {FOLDER / name}.png")


if __name__ == "__main__":
    main()
