"""Figures of attention on synthetic inputs; `benchmarks.figures` lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import sparge
from benchmarks.looks import DENSITY, Look
from benchmarks.measure import read_rows
from sparge.evaluate.block_colors import mass_levels, paint_blocks, palette
from sparge.evaluate.inputs import Sample, random_like, text_like, text_with_needles, video_like
from sparge.evaluate.metrics import block_mass, mass_recall, relative_l1
from sparge.masks.geometry import BLOCK_K
from sparge.masks.ordering import OrderName, order_of

RESULTS = Path(__file__).parent / "results"
TOPK = 0.25
IDEA_HEAD, IDEA_TOKENS = 0, 8192
"""Head and length of a video in `benchmarks.cpu`; its row has the error and the time."""


def draw_idea(look: Look) -> Figure:
    """Draw all scores of a head on the left, and its computed blocks on the right."""
    rows = [row for row in read_rows(RESULTS / "cpu.jsonl") if (row["suite"], row["topk"]) == ("speed", TOPK)]
    row = [row for row in rows if not row["is_causal"]][-1]
    sample = video_like(IDEA_TOKENS)
    query, key, tokens = sample.query, sample.key, sample.query.shape[2]
    mask, mass = sparge.predict(query, key, topk=TOPK), block_mass(query, key)
    assert abs(mask.density() - row["density"]) < 1e-3, "expected the density of the committed row"
    assert abs(mass_recall(mask, mass) - row["mass_recall"]) < 1e-3, "expected the mass recall of the committed row"

    figure = look.figure(8.6, 4.75)
    left, right = figure.subplots(1, 2)
    scores = query[0, IDEA_HEAD].double() @ key[0, IDEA_HEAD].double().T * query.shape[-1] ** -0.5
    fine = F.avg_pool2d(scores.softmax(-1)[None, None], 16)[0, 0] * tokens
    everything = {"extent": (0, tokens, tokens, 0), "interpolation": "nearest"}
    left.imshow(
        fine.clamp(min=0.02).log(), cmap=look.colormap(look.page, *look.theme.kept), aspect="equal", **everything
    )
    left.set_title("Video-like attention: every score", fontsize=10.5)

    kept = mask.to_dense()[0, IDEA_HEAD]
    levels = mass_levels(mass[0, IDEA_HEAD])
    colors = torch.tensor(palette(look.theme)[1 : 1 + int(levels.max()) + 1], dtype=torch.float) / 255
    image = torch.zeros(*kept.shape, 4)
    image[kept] = torch.cat([colors[levels[kept]], torch.ones(int(kept.sum()), 1)], -1)
    right.imshow(image.numpy(), aspect="auto", **everything)
    right.set_box_aspect(1)
    right.set_title(f"What is computed: {row['density']:.0%} of the blocks", fontsize=10.5)
    for panel in (left, right):
        look.style(panel)
        panel.set(xticks=range(0, tokens + 1, 2048), yticks=range(0, tokens + 1, 2048), xlabel="key token")
        panel.xaxis.label.set_fontsize(8.5)
    left.set_ylabel("query token", fontsize=8.5)
    stronger = "brighter" if look.name == "dark" else "darker"
    handles = [
        Patch(facecolor=look.theme.kept[2], label=f"kept: 128 queries x 64 keys, {stronger} holds more"),
        Patch(facecolor=look.panel, edgecolor=look.quiet, linewidth=0.6, label="skipped, never computed"),
    ]
    look.legend(figure, handles=handles, loc="outside lower center", ncols=2)
    figure.suptitle(
        f"{row['mass_recall']:.1%} of the attention kept, output off by {row['relative_l1']:.2%}, "
        f"{row['dense_s']:.2f} s became {row['sparse_s']:.2f} s on two CPU cores",
        fontsize=11,
        color=look.ink,
        fontweight="bold",
    )
    return figure


def draw_scores(look: Look) -> Figure:
    """Draw the blocks of a text and of a video that each score keeps."""
    samples = [text_with_needles(8192, heads=1), video_like(8192, heads=1)]
    figure = look.figure(9.6, 6.8)
    panels = figure.subplots(len(samples), 3)
    for row, sample in zip(panels, samples, strict=True):
        _draw_sample(row, sample, look)
    figure.supxlabel("key token", fontsize=9, color=look.ink)
    figure.supylabel("query token", fontsize=9, color=look.ink)
    return figure


def _draw_sample(panels: Any, sample: Sample, look: Look) -> None:
    mass = block_mass(sample.query, sample.key, is_causal=sample.is_causal)
    page = tuple(int(look.page[at : at + 2], 16) for at in (1, 3, 5))
    colors = torch.tensor([page, *palette(look.theme)[1:]], dtype=torch.uint8)
    size = sample.query.shape[2]
    images = [(f"{sample.name}: true attention mass", None)]
    for score in ("moment", "mean"):
        mask = sparge.predict(sample.query, sample.key, is_causal=sample.is_causal, topk=TOPK, score=score)
        share, density = mass_recall(mask, mass), mask.density()
        images.append((f'score "{score}": {density:.1%} of blocks, {share:.1%} of mass', mask))
    visible = mask.visible_blocks()
    for panel, (title, mask) in zip(panels, images, strict=True):
        kept = visible if mask is None else mask.to_dense()[0, 0]
        entries = paint_blocks(mass[0, 0], kept, visible)
        panel.imshow(colors[entries.long()].numpy(), extent=(0, size, size, 0), aspect="auto", interpolation="nearest")
        panel.set_title(title, fontsize=8)
        look.style(panel)
        panel.tick_params(labelsize=7)
        panel.set(xticks=range(0, size + 1, 2048), yticks=range(0, size + 1, 2048))
        for needle in sample.needles:
            panel.plot(needle.key_start, needle.query_start, "o", mfc="none", mec=look.ink, ms=7, mew=0.9)


ROW_DRAWN = 32
"""Index of the drawn query block, of 64."""


def draw_rules(look: Look) -> Figure:
    """Draw the key blocks of a query block, sorted by mass, for two heads, and the blocks that each rule keeps."""
    sample = video_like(8192, heads=1)
    query, key = torch.cat([sample.query, 0.25 * sample.query], 1), sample.key.expand(-1, 2, -1, -1)
    mass = block_mass(query, key, is_causal=False)[0]
    figure = look.figure(9.6, 4.3)
    rules = {
        "TopK(0.25)": sparge.TopK(0.25),
        "TopCdf(0.95)": sparge.TopCdf(0.95),
        "topk=0.25: one budget": sparge.Budget(0.25),
    }
    panels = figure.subplots(2, len(rules), sharex=True, sharey=True)
    for column, (name, rule) in enumerate(rules.items()):
        mask = sparge.predict(query, key, sparsity=rule)
        for head, panel in enumerate(panels[:, column]):
            shares, order = mass[head, ROW_DRAWN].sort(descending=True)
            chosen, places = mask.to_dense()[0, head, ROW_DRAWN][order], torch.arange(len(shares))
            for those, color in ((chosen, look.marks[0]), (~chosen, look.marks[1])):
                panel.bar(places[those], shares[those].clamp(min=1e-5), color=color, width=1.0)
            panel.set(yscale="log", ylim=(1e-5, 1))
            held = f"{int(chosen.sum())} of {len(shares)} blocks, {float(shares[chosen].sum()):.0%} of the mass"
            panel.set_title((f"{name}\n" if head == 0 else "") + held, fontsize=8.5)
            look.style(panel)
    for label, panel in zip(("a concentrated head", "a spread head"), panels[:, 0], strict=True):
        panel.set_ylabel(f"{label}:\nshare of the attention", fontsize=8.5)
    figure.supxlabel("key blocks of one query block, by true share", fontsize=8.5, color=look.ink)
    handles = [Patch(color=look.marks[0], label="kept"), Patch(color=look.marks[1], label="skipped")]
    look.legend(panels[0, -1], handles=handles)
    return figure


def draw_error(look: Look) -> Figure:
    """Draw attention mass and error against density on three kinds of input."""
    figure = look.figure(8.6, 3.2)
    left, right = figure.subplots(1, 2)
    samples = [video_like(4096, heads=2), text_like(4096, heads=2), random_like(4096, heads=2)]
    for sample, color in zip(samples, look.marks, strict=True):
        query, key, value, causal = sample.query, sample.key, sample.value, sample.is_causal
        exact = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        mass = block_mass(query, key, is_causal=causal)
        points = []
        for share in (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.9):
            mask = sparge.predict(query, key, is_causal=causal, sparsity=sparge.TopK(share, min_blocks=0))
            error = relative_l1(sparge.block_sparse_attention(query, key, value, mask), exact)
            points.append((mask.density(), mass_recall(mask, mass), error))
        densities, recalls, errors = zip(*points, strict=True)
        left.plot(densities, recalls, "o-", color=color, ms=3, lw=1.4, label=sample.name)
        right.plot(densities, errors, "o-", color=color, ms=3, lw=1.4, label=sample.name)
    left.set(xlabel=DENSITY, ylabel="mass recall", xlim=(0, 1), ylim=(0, 1.02))
    right.set(xlabel=DENSITY, ylabel="relative L1 error", xlim=(0, 1), yscale="log")
    look.style(left, 8.5, grid=True)
    look.style(right, 8.5, grid=True)
    look.legend(left, loc="lower right")
    return figure


def draw_fp8_bits(look: Look) -> Figure:
    """Draw the bits of 448 * 2^x in E4M3, and the straight line that "int8_fp8_fast" uses instead."""
    figure = look.figure(8.6, 2.9)
    panel = figure.subplots()
    log2_units = torch.linspace(-16, 0, 1601, dtype=torch.float64)
    exact = (448 * 2**log2_units).to(torch.float8_e4m3fn).view(torch.uint8)
    straight = (126 + 8 * log2_units).round().clamp(min=0)
    panel.plot(log2_units, exact, color=look.marks[1], lw=1.6, label="exponential, rounded to E4M3")
    panel.plot(log2_units, straight, color=look.marks[0], lw=1.2, label="126 + 8 x, rounded: no exp2")
    panel.set(xlabel="score relative to the maximum, log2 units", ylabel="bits of the E4M3 value")
    panel.set(xlim=(-16, 0), ylim=(0, 130))
    look.style(panel, grid=True)
    look.legend(panel)
    return figure


ORDER_GRID, ORDER_BLOCK = (4, 16, 16), 5
"""Frames, height and width of the grid, and the marked block."""
ORDERS: dict[OrderName, str] = {"row": "raster order", "hilbert": "Hilbert order"}


def draw_order(look: Look) -> Figure:
    """Draw frames side by side, each block of 64 tokens in its own shade, with one block marked."""
    figure = look.figure(9.6, 4.9)
    panels = figure.subplots(2, ORDER_GRID[0])
    for row, (name, label) in zip(panels, ORDERS.items(), strict=True):
        block = order_of(ORDER_GRID, name).inverse.view(ORDER_GRID) // BLOCK_K  # block of each token
        for frame, panel in enumerate(row):
            colormap = look.colormap(look.panel, look.theme.kept[1])
            panel.imshow((block[frame] * 7 % 16) / 20 + 0.1, cmap=colormap, vmin=0, vmax=1)
            marked = torch.where(block[frame] == ORDER_BLOCK, 1.0, torch.nan)
            panel.imshow(marked, cmap=look.colormap(look.marks[1], look.marks[1]))
            panel.set(xticks=[], yticks=[])
            panel.set_title(f"frame {frame}" if name == "row" else "", fontsize=9)
            look.style(panel)
        row[0].set_ylabel(label, fontsize=9)
    return figure
