"""Draw docs/figures/masks.png: true attention mass beside what each score keeps. `python -m benchmarks.figures`."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import sparge
from sparge.evaluate.inputs import Sample, text_like, video_like
from sparge.evaluate.metrics import block_mass, mass_recall
from sparge.evaluate.plots import LIGHT, causal_visibility, paint_blocks, palette

TARGET = Path(__file__).parent.parent / "docs" / "figures" / "masks.png"
TOPK = 0.25


def draw() -> Figure:
    samples = [text_like(8192, heads=1), video_like((8, 32, 32), heads=1)]
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


def main() -> None:
    TARGET.parent.mkdir(exist_ok=True)
    draw().savefig(TARGET)
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
