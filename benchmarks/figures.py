"""Draw the figures in docs/figures: `python -m benchmarks.figures [name ...]`.

idea      an attention map, the kept blocks, and the error and time that follow
scores    true attention mass beside the blocks that each score keeps
rules     blocks of two heads that TopK, TopCdf and one budget keep
error     the error of the output by density, on three kinds of input
codes     why P needs no exp2: the bits of an FP8 value are almost linear in its logarithm
quality   loss and needles of a trained language model by density
video     PSNR of clips of a trained video model by density and by time
replacement   errors on smooth fields: skipped blocks dropped, replaced by means, and in Hilbert order
order     tokens of a video in one key block, in raster and in Hilbert order
calibration   errors of each layer of a language model by density, and the budgets that follow
scale     attention and exposed exchange on 8 and 2 x 8 GPUs, by split
hopper    the order of work in the Hopper kernel

Figures of a `Look` are drawn twice, for light and dark pages: idea-light.png and idea-dark.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

import sparge
from benchmarks.accuracy_tables import rows_of
from benchmarks.measure import read_rows
from benchmarks.scale import plan
from benchmarks.scale import summary as scale
from sparge.evaluate.block_colors import DARK, LIGHT, Theme, mass_levels, paint_blocks, palette
from sparge.evaluate.inputs import Sample, random_like, text_like, text_with_needles, video_like
from sparge.evaluate.metrics import block_mass, mass_recall, relative_l1
from sparge.masks.geometry import BLOCK_K
from sparge.masks.ordering import OrderName, order_of

FOLDER = Path(__file__).parent.parent / "docs" / "figures"
RESULTS = Path(__file__).parent / "results"
TOPK = 0.25
QUALITY_TOKENS = 8192
IDEA_HEAD = 0
IDEA_TOKENS = 8192
"""The video of `benchmarks.cpu`, whose row has the error and time."""


@dataclass(frozen=True)
class Look:
    """Colors of a page and of its marks."""

    name: str
    page: str
    ink: str
    quiet: str
    panel: str
    marks: tuple[str, str, str]
    theme: Theme


LOOKS = (
    Look("light", "#ffffff", "#1f2328", "#59636e", "#f3f4f6", ("#2d6cb5", "#d5392c", "#7a8594"), LIGHT),
    Look("dark", "#0d1117", "#f0f6fc", "#9198a1", "#161b22", ("#68a7ee", "#e8573f", "#8b949e"), DARK),
)

STAGE, MAXIMUM, SOFTMAX, PRODUCT, ADD = 10.0, 1.6, 3.2, 2.0, 1.8
"""Lengths in hopper.png: a stage, its maximum, its P, its S or P V, adding it to the output."""
ROLES = ("copy engine", "consumer 0", "products of 0", "consumer 1", "products of 1")
KINDS = {
    "K, V": "#b9c4d0",
    "maximum": "#f2b880",
    "P": "#e6875c",
    "add": "#d9d2c5",
    "S": "#7aa6c2",
    "P V": "#4f7d5f",
}


def new_figure(width: float, height: float, look: Look | None = None) -> Figure:
    """Return a figure of a size in inches, transparent if a look is given."""
    figure = Figure(figsize=(width, height), layout="constrained", dpi=110 if look is None else 160)
    FigureCanvasAgg(figure)
    if look is not None:
        figure.patch.set_alpha(0)
    return figure


def dress(panel: Any, look: Look) -> None:
    """Apply the page's colors to axes."""
    panel.set_facecolor(look.panel)
    panel.tick_params(labelsize=8, colors=look.quiet)
    for spine in panel.spines.values():
        spine.set_color(look.quiet)
        spine.set_linewidth(0.6)
    for text in (panel.title, panel.xaxis.label, panel.yaxis.label):
        text.set_color(look.ink)


def measured_on_cpu(topk: float) -> dict[str, Any]:
    """Return the newest committed row of full attention at this topk."""
    rows = read_rows(RESULTS / "cpu.jsonl")
    return [row for row in rows if row["suite"] == "speed" and not row["is_causal"] and row["topk"] == topk][-1]


def attention_map(query: Tensor, key: Tensor, cell: int) -> Tensor:
    """Return the mean attention of one head in cells of ``cell`` x ``cell`` tokens: (S / cell, S / cell)."""
    scores = query.double() @ key.double().T * query.shape[-1] ** -0.5
    return F.avg_pool2d(scores.softmax(-1)[None, None], cell)[0, 0]


def draw_idea(look: Look) -> Figure:
    """Draw all scores of a head on the left and the computed blocks on the right."""
    sample, row = video_like(IDEA_TOKENS), measured_on_cpu(TOPK)
    query, key = sample.query, sample.key
    mask = sparge.predict(query, key, topk=TOPK)
    mass = block_mass(query, key)
    tokens = query.shape[2]
    assert abs(mask.density() - row["density"]) < 1e-3, "expected the blocks of the committed row, got others"
    assert abs(mass_recall(mask, mass) - row["mass_recall"]) < 1e-3, "expected its mass recall, got another"

    figure = new_figure(8.6, 4.75, look)
    left, right = figure.subplots(1, 2)
    ramp = LinearSegmentedColormap.from_list("mass", [look.page, *look.theme.kept])
    fine = attention_map(query[0, IDEA_HEAD], key[0, IDEA_HEAD], 16) * tokens
    left.imshow(
        fine.clamp(min=0.02).log(), cmap=ramp, extent=(0, tokens, tokens, 0), interpolation="nearest", aspect="equal"
    )
    left.set_title("Video-like attention: every score", fontsize=10.5)

    kept = mask.to_dense()[0, IDEA_HEAD]
    levels = mass_levels(mass[0, IDEA_HEAD])
    colors = torch.tensor(palette(look.theme)[1 : 1 + int(levels.max()) + 1], dtype=torch.float) / 255
    image = torch.zeros(*kept.shape, 4)
    image[kept] = torch.cat([colors[levels[kept]], torch.ones(int(kept.sum()), 1)], -1)
    right.imshow(image.numpy(), extent=(0, tokens, tokens, 0), interpolation="nearest", aspect="auto")
    right.set_box_aspect(1)
    right.set_title(f"What is computed: {row['density']:.0%} of the blocks", fontsize=10.5)
    for panel in (left, right):
        dress(panel, look)
        panel.set(xticks=range(0, tokens + 1, 2048), yticks=range(0, tokens + 1, 2048), xlabel="key token")
        panel.xaxis.label.set_fontsize(8.5)
    left.set_ylabel("query token", fontsize=8.5)
    handles = [
        Patch(facecolor=look.theme.kept[2], label="kept: 128 queries x 64 keys, darker holds more"),
        Patch(facecolor=look.panel, edgecolor=look.quiet, linewidth=0.6, label="skipped, never computed"),
    ]
    if look.name == "dark":
        handles[0].set_label("kept: 128 queries x 64 keys, brighter holds more")
    figure.legend(
        handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8.5, labelcolor=look.ink
    )
    figure.suptitle(
        f"{row['mass_recall']:.1%} of the attention kept, output off by {row['relative_l1']:.2%}, "
        f"{row['dense_s']:.2f} s became {row['sparse_s']:.2f} s on two CPU cores",
        fontsize=11,
        color=look.ink,
        fontweight="bold",
    )
    return figure


def draw_scores(look: Look) -> Figure:
    """Draw the blocks that each score keeps of a text and of a video."""
    samples = [text_with_needles(8192, heads=1), video_like(8192, heads=1)]
    figure = new_figure(9.6, 6.8, look)
    panels = figure.subplots(len(samples), 3)
    for row, sample in zip(panels, samples, strict=True):
        _draw_sample(row, sample, look)
    for name, label in (("supxlabel", "key token"), ("supylabel", "query token")):
        getattr(figure, name)(label, fontsize=9, color=look.ink)
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
        dress(panel, look)
        panel.tick_params(labelsize=7)
        panel.set(xticks=range(0, size + 1, 2048), yticks=range(0, size + 1, 2048))
        for needle in sample.needles:
            panel.plot(needle.key_start, needle.query_start, "o", mfc="none", mec=look.ink, ms=7, mew=0.9)


ROW_DRAWN = 32
"""Index of the drawn query block, of 64."""


def draw_rules(look: Look) -> Figure:
    """Draw the blocks of one query block of two heads, the most probable first, and those that each rule keeps."""
    sample = video_like(8192, heads=1)
    query, key = torch.cat([sample.query, 0.25 * sample.query], 1), sample.key.expand(-1, 2, -1, -1)
    mass = block_mass(query, key, is_causal=False)[0]
    figure = new_figure(9.6, 4.3, look)
    rules = {
        "TopK(0.25)": sparge.TopK(0.25),
        "TopCdf(0.95)": sparge.TopCdf(0.95),
        "topk=0.25: one budget": sparge.Budget(0.25),
    }
    panels = figure.subplots(2, len(rules), sharex=True, sharey=True)
    for column, (name, rule) in enumerate(rules.items()):
        mask = sparge.predict(query, key, sparsity=rule)
        for head, panel in enumerate(panels[:, column]):
            kept = mask.to_dense()[0, head, ROW_DRAWN]
            shares, order = mass[head, ROW_DRAWN].sort(descending=True)
            chosen = kept[order]
            places = torch.arange(len(shares))
            for flag, color in ((True, look.marks[0]), (False, look.marks[1])):
                those = chosen == flag
                panel.bar(places[those], shares[those].clamp(min=1e-5), color=color, width=1.0)
            panel.set(yscale="log", ylim=(1e-5, 1))
            rule_of_head = f"{name}\n" if head == 0 else ""
            held = f"{int(chosen.sum())} of {len(shares)} blocks, {float(shares[chosen].sum()):.0%} of the mass"
            panel.set_title(rule_of_head + held, fontsize=8.5)
            dress(panel, look)
    for label, panel in zip(("a concentrated head", "a spread head"), panels[:, 0], strict=True):
        panel.set_ylabel(f"{label}:\nshare of the attention", fontsize=8.5)
    figure.supxlabel("key blocks of one query block, by true share", fontsize=8.5, color=look.ink)
    handles = [Patch(color=look.marks[0], label="kept"), Patch(color=look.marks[1], label="skipped")]
    panels[0, -1].legend(handles=handles, frameon=False, fontsize=8.5, labelcolor=look.ink)
    return figure


def draw_error(look: Look) -> Figure:
    """Draw mass and error by density on three kinds of input."""
    figure = new_figure(8.6, 3.2, look)
    left, right = figure.subplots(1, 2)
    samples = [video_like(4096, heads=2), text_like(4096, heads=2), random_like(4096, heads=2)]
    for sample, color in zip(samples, look.marks, strict=True):
        query, key, value, causal = sample.query, sample.key, sample.value, sample.is_causal
        exact = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        mass = block_mass(query, key, is_causal=causal)
        densities, recalls, errors = [], [], []
        for share in (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.9):
            mask = sparge.predict(query, key, is_causal=causal, sparsity=sparge.TopK(share, min_blocks=0))
            densities.append(mask.density())
            recalls.append(mass_recall(mask, mass))
            errors.append(relative_l1(sparge.block_sparse_attention(query, key, value, mask), exact))
        left.plot(densities, recalls, "o-", color=color, ms=3, lw=1.4, label=sample.name)
        right.plot(densities, errors, "o-", color=color, ms=3, lw=1.4, label=sample.name)
    left.set(xlabel="density: share of the visible blocks", ylabel="mass recall", xlim=(0, 1), ylim=(0, 1.02))
    right.set(xlabel="density: share of the visible blocks", ylabel="relative L1 error", xlim=(0, 1), yscale="log")
    for panel in (left, right):
        _finish(panel, look)
    left.legend(frameon=False, fontsize=8.5, labelcolor=look.ink, loc="lower right")
    return figure


def draw_codes(look: Look) -> Figure:
    """Draw the bits of 448 * 2^x in E4M3 beside the straight line of "int8_fp8_fast"."""
    figure = new_figure(8.6, 2.9, look)
    panel = figure.subplots()
    log2_units = torch.linspace(-16, 0, 1601, dtype=torch.float64)
    exact = (448 * 2**log2_units).to(torch.float8_e4m3fn).view(torch.uint8)
    straight = (126 + 8 * log2_units).round().clamp(min=0)
    panel.plot(log2_units, exact, color=look.marks[1], lw=1.6, label="exponential, rounded to E4M3")
    panel.plot(log2_units, straight, color=look.marks[0], lw=1.2, label="126 + 8 x, rounded: no exp2")
    panel.set(
        xlabel="score relative to the maximum, log2 units",
        ylabel="bits of the E4M3 value",
        xlim=(-16, 0),
        ylim=(0, 130),
    )
    dress(panel, look)
    panel.grid(color=look.quiet, alpha=0.25, lw=0.5)
    panel.legend(frameon=False, fontsize=8.5, labelcolor=look.ink)
    return figure


def draw_quality(look: Look) -> Figure:
    """Draw KL and needles of SmolLM2 by density: budgets, TopK, TopCdf and the oracle.

    Budgets by layer were measured with twice as many needles, so they are in the left panel only.
    """
    rows = [row for row in rows_of(RESULTS, "language") if row["tokens"] == QUALITY_TOKENS]
    figure = new_figure(8.6, 3.3, look)
    left, right = figure.subplots(1, 2)
    kinds = (
        ("topk", "one budget (topk)", look.marks[0], "o"),
        ("rows", "equal share per query block (TopK)", look.marks[1], "s"),
        ("cdf", "TopCdf", look.ink, "D"),
        ("topk oracle", "one budget, oracle", look.marks[2], "^"),
    )
    for kind, label, color, mark in kinds:
        of_kind = _by_density(row for row in rows if _kind(row["variant"]) == kind)
        densities = [row["density"] for row in of_kind]
        halves = [row["kl_half"] for row in of_kind]
        style = {"color": color, "marker": mark, "ms": 4, "lw": 1.4, "label": label}
        left.errorbar(densities, [row["kl"] for row in of_kind], halves, elinewidth=0.8, capsize=2, **style)
        found = [row for row in of_kind if "needle" in row]
        right.plot([row["density"] for row in found], [row["needle"] for row in found], **style)
    layers = _by_density(row for row in rows_of(RESULTS, "layers") if row["variant"].startswith("layers="))
    style = {"color": look.marks[0], "marker": "o", "mfc": look.page, "ms": 4, "lw": 1.2, "ls": "--"}
    left.plot([row["density"] for row in layers], [row["kl"] for row in layers], **style)
    right.plot([], [], label="budgets by layer (left)", **style)
    bits = next(row for row in rows if row["variant"] == "dense,quantization=int8_fp8")
    left.axhline(bits["kl"], color=look.quiet, lw=0.8, ls="--")
    left.text(0.99, bits["kl"], "dense, quantized", ha="right", va="bottom", fontsize=7.5, color=look.quiet,
              transform=left.get_yaxis_transform())  # fmt: skip
    dense = next(row for row in rows if "dense_needle" in row)["dense_needle"]
    right.axhline(dense, color=look.quiet, lw=0.8, ls="--")
    right.text(0.99, dense, "dense", ha="right", va="bottom", fontsize=7.5, color=look.quiet,
               transform=right.get_yaxis_transform())  # fmt: skip
    left.set(yscale="log", xlabel="density: share of the visible blocks", ylabel="KL from dense, nats a token")
    left.set_yticks((0.0005, 0.002, 0.005, 0.02, 0.1), labels=("0.0005", "0.002", "0.005", "0.02", "0.1"))
    left.minorticks_off()
    right.set(ylim=(0, 1.02), xlabel="density: share of the visible blocks", ylabel="needles found")
    for panel in (left, right):
        _finish(panel, look)
    right.legend(frameon=False, fontsize=8, labelcolor=look.ink, loc="lower right")
    return figure


def draw_video(look: Look) -> Figure:
    """Draw the PSNR of the tiny video model's clips against dense ones by density and by time of a forward pass."""
    rows = rows_of(RESULTS, "tiny video")
    figure = new_figure(8.6, 3.3, look)
    left, right = figure.subplots(1, 2, sharey=True)
    bits = "quantization=int8_fp8_fast"
    kinds = (
        (f"topk {bits}", "topk: means, Hilbert order", look.marks[0], "o-"),
        (f"topk {bits} dense_first_steps=0.2", "the same, first fifth of the steps dense", look.ink, "D-"),
        (f"topk {bits} order=row", "topk in raster order", look.marks[2], "^"),
        (f"topk {bits} skipped=drop", "topk, skipped blocks dropped", look.marks[2], "v"),
        (f"rows {bits} skipped=drop order=row", "equal shares, dropped, raster", look.marks[1], "s-"),
    )
    for kind, label, color, mark in kinds:
        of_kind = _by_density(row for row in rows if _kind(row["variant"], bits) == kind)
        style = {"color": color, "ms": 4, "lw": 1.4, "label": label}
        left.plot([row["density"] for row in of_kind], [row["psnr"] for row in of_kind], mark, **style)
    by_bits = {"16 bits": "quantization=none", "quantized, and dense quantized": bits}
    for (label, word), mark, color in zip(by_bits.items(), "ov", look.marks[:2], strict=True):
        kept = _by_density(
            row for row in rows if row["variant"].endswith(word) and row["variant"].startswith(("topk", "dense,"))
        )
        right.plot([row["forward_graph_ms"] for row in kept], [row["psnr"] for row in kept], color=color, marker=mark,
                   ms=4, lw=1.4, label=label)  # fmt: skip
    dense = next(row for row in rows if row["variant"] == "dense")["forward_graph_ms"]
    right.axvline(dense, color=look.quiet, lw=0.8, ls="--")
    right.text(dense, 0.03, "dense ", ha="right", va="bottom", fontsize=7.5, color=look.quiet,
               transform=right.get_xaxis_transform())  # fmt: skip
    noise = next(row for row in rows if row["variant"] == "sdpa=flash")
    for panel in (left, right):
        panel.axhline(noise["psnr"], color=look.quiet, lw=0.8, ls="--")
        _finish(panel, look)
    left.text(0.01, noise["psnr"], "dense, another kernel", ha="left", va="top", fontsize=7.5, color=look.quiet,
              transform=left.get_yaxis_transform())  # fmt: skip
    left.set(ylim=(20, 55), xlabel="density: share of the blocks", ylabel="PSNR against dense, dB")
    right.set(xlabel="forward pass on the device, ms")
    left.legend(frameon=False, fontsize=7, labelcolor=look.ink, loc="upper left", bbox_to_anchor=(0, 0.9))
    right.legend(frameon=False, fontsize=8, labelcolor=look.ink, loc="upper left", bbox_to_anchor=(0, 0.9))
    return figure


def draw_replacement(look: Look) -> Figure:
    """Draw one panel for each field of `benchmarks.fields`, quantized on a GPU."""
    rows = read_rows(RESULTS / "fields.jsonl")
    rows = [row for row in rows if row["suite"] == "error"]
    fields = list(dict.fromkeys((row["amplitude"], row["noise"]) for row in rows))
    figure = new_figure(9.6, 2.7, look)
    panels = figure.subplots(1, len(fields), sharey=True)
    curves = (
        ("dropped", "drop", "row", "--", look.marks[1]),
        ("replaced by means", "mean", "row", "-", look.marks[2]),
        ("the same, Hilbert order", "mean", "hilbert", "-", look.marks[0]),
    )
    for panel, (amplitude, noise) in zip(panels, fields, strict=True):
        for label, skipped, order, style, color in curves:
            points = {
                row["density"]: row["relative_l1"]
                for row in rows
                if (row["amplitude"], row["noise"], row["skipped"], row["order"]) == (amplitude, noise, skipped, order)
            }
            look_of: dict[str, Any] = {"marker": "o", "ms": 3, "lw": 1.4, "color": color, "label": label}
            panel.loglog(list(points), list(points.values()), style, **look_of)
        panel.set_title(f"amplitude {amplitude}, noise {noise}", fontsize=9)
        panel.set_xticks([0.05, 0.1, 0.25, 0.5], ["5 %", "10 %", "25 %", "50 %"])
        panel.minorticks_off()
        panel.set_xlabel("blocks kept", fontsize=8)
        dress(panel, look)
    panels[0].set_ylabel("relative L1 error", fontsize=8)
    panels[0].set_yticks([0.003, 0.01, 0.03, 0.1, 0.3], ["0.003", "0.01", "0.03", "0.1", "0.3"])
    handles, labels = panels[0].get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    for text in legend.get_texts():
        text.set_color(look.ink)
    return figure


ORDER_GRID, ORDER_BLOCK = (4, 16, 16), 5
"""Frames, height and width of the grid, and the marked block."""
ORDERS_DRAWN: tuple[OrderName, ...] = ("row", "hilbert")


def draw_order(look: Look) -> Figure:
    """Draw frames side by side, each block of 64 tokens in its own shade, one of them marked."""
    frames = ORDER_GRID[0]
    figure = new_figure(9.6, 4.9, look)
    panels = figure.subplots(2, frames)
    shades = LinearSegmentedColormap.from_list("blocks", [look.panel, look.theme.kept[1]])
    for row, name in zip(panels, ORDERS_DRAWN, strict=True):
        place = order_of(ORDER_GRID, name).inverse.view(ORDER_GRID)  # of every token
        block = place // BLOCK_K
        for frame, panel in enumerate(row):
            panel.imshow((block[frame] * 7 % 16) / 20 + 0.1, cmap=shades, vmin=0, vmax=1)
            marked = torch.where(block[frame] == ORDER_BLOCK, 1.0, torch.nan)
            panel.imshow(marked, cmap=LinearSegmentedColormap.from_list("one", [look.marks[1]] * 2))
            panel.set_xticks([])
            panel.set_yticks([])
            panel.set_title(f"frame {frame}" if name == "row" else "", fontsize=9)
            dress(panel, look)
        row[0].set_ylabel("raster order" if name == "row" else "Hilbert order", fontsize=9)
    return figure


def draw_calibration(look: Look) -> Figure:
    """Draw the profile of `benchmarks/results/smollm2-profile.json`."""
    profile = sparge.Profile.load(RESULTS / "smollm2-profile.json")
    budgets = profile.by_layer()
    shades = LinearSegmentedColormap.from_list("layers", [look.marks[0], look.marks[1]])
    colors = [shades(place / (len(budgets) - 1)) for place in range(len(budgets))]
    figure = new_figure(9.6, 3.2, look)
    left, right = figure.subplots(1, 2)
    for color, curve in zip(colors, profile.curves.values(), strict=True):
        left.loglog(curve.densities, curve.worst(), color=color, lw=1)
    left.axhline(profile.max_error, color=look.ink, lw=1, ls=":")
    left.set_xticks([0.05, 0.1, 0.2, 0.4, 0.8], ["5 %", "10 %", "20 %", "40 %", "80 %"])
    left.minorticks_off()
    left.set(xlabel="blocks kept", ylabel="relative L1 error, worst input")
    right.bar(range(len(budgets)), budgets, color=colors)
    shared = profile.at(density=profile.density).by_layer()
    right.plot(range(len(shared)), shared, "o", color=look.ink, ms=3, label="the same mean, allocated by mass")
    right.axhline(profile.density, color=look.ink, lw=1, ls=":")
    right.legend(frameon=False, fontsize=8, labelcolor=look.ink, loc="upper right")
    right.set(xlabel="layer", ylabel="budget", ylim=(0, 1))
    for panel in (left, right):
        dress(panel, look)
        panel.xaxis.label.set_size(8)
        panel.yaxis.label.set_size(8)
    return figure


SCALE_DRAWN = ("16 bits", "8 bits", "0.25", "0.1")
"""Variants of `benchmarks.scale`, from the top of a group down."""


def draw_scale(look: Look) -> Figure:
    """Draw seconds of all layers, attention and exchange stacked, by workload (columns) and cluster (rows)."""
    rows = scale.rows_of(RESULTS)
    shades = LinearSegmentedColormap.from_list("variants", [look.page, look.marks[0]])
    colors = [look.marks[2], shades(0.4), shades(0.7), shades(1.0)]
    figure = new_figure(10.4, 7.4, look)
    heights = [max(len(plan.splits(workload, cluster)) for workload in plan.WORKLOADS) for cluster in plan.CLUSTERS]
    panels = figure.subplots(len(plan.CLUSTERS), len(plan.WORKLOADS), height_ratios=heights)
    for line, cluster in zip(panels, plan.CLUSTERS, strict=True):
        for panel, workload in zip(line, plan.WORKLOADS, strict=True):
            _draw_splits(panel, rows, workload, cluster, colors, look)
            dress(panel, look)
            panel.set_title(f"{workload.name}, {cluster.name}", fontsize=9)
            panel.xaxis.label.set_fontsize(8.5)
    for panel in panels[-1]:
        panel.set_xlabel("seconds a pass, all layers", fontsize=8.5)
    names = {**scale.SHOWN, "0.25": "topk 0.25"}
    handles = [Patch(color=color, label=names[name]) for name, color in zip(SCALE_DRAWN, colors, strict=True)]
    handles.append(Patch(color=look.marks[1], label="exchange that is not hidden"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8, labelcolor=look.ink
    )
    return figure


def _draw_splits(
    panel: Any, rows: Any, workload: plan.Workload, cluster: plan.Cluster, colors: list[Any], look: Look
) -> None:
    """Draw a group of bars for each split, with the sum at the end."""
    splits, thick = plan.splits(workload, cluster), 0.8 / len(SCALE_DRAWN)
    widest = 0.0
    for group, split in enumerate(splits):
        for place, (variant, color) in enumerate(zip(SCALE_DRAWN, colors, strict=True)):
            height = group + (place - (len(SCALE_DRAWN) - 1) / 2) * thick
            layer = scale.layer_of(rows, workload, split, cluster, variant)
            if layer is None:
                panel.text(0, height, f" {scale.NOT_MEASURED}", va="center", fontsize=6, color=look.quiet)
                continue
            attention, total = workload.layers * layer.attention, workload.layers * layer.total
            panel.barh(height, attention, height=0.9 * thick, color=color)
            panel.barh(height, total - attention, left=attention, height=0.9 * thick, color=look.marks[1])
            panel.text(total, height, f" {total:.3g}", va="center", fontsize=6.5, color=look.ink)
            widest = max(widest, total)
    names = [split.name.replace(" x ", "\nx ") for split in splits]
    panel.set(yticks=range(len(splits)), yticklabels=names, ylim=(len(splits) - 0.5, -0.5))
    panel.set_xlim(0, 1.15 * widest or 1.0)
    if not widest:
        panel.set_xticks([])


def _by_density(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["density"])


def _finish(panel: Any, look: Look) -> None:
    """Format frame, grid and labels of a panel of curves."""
    dress(panel, look)
    panel.grid(color=look.quiet, alpha=0.25, lw=0.5)
    panel.xaxis.label.set_fontsize(8.5)
    panel.yaxis.label.set_fontsize(8.5)


def _kind(variant: str, quantization: str = "quantization=none") -> str:
    """Return the kind of a variant with this quantization, without its density; "" for all others.

    Example:
        >>> _kind("topk=0.5,score=mean,quantization=none"), _kind("topk=0.5,quantization=int8_fp8")
        ('topk score=mean', '')
    """
    words = variant.split(",")
    if quantization not in words or not words[0].startswith(("topk=", "rows=", "cdf=")):
        return ""
    shown = [word for word in words[1:] if word != "quantization=none"]
    return " ".join([words[0].partition("=")[0], *shown])


def draw_hopper() -> Figure:
    """Draw stages of both consumers, half a stage apart: their order, not their exact length."""
    figure = new_figure(9.6, 3.4)
    panel = figure.subplots()
    height = {role: len(ROLES) - 1 - place for place, role in enumerate(ROLES)}

    def bar(role: str, kind: str, start: float, length: float, label: str) -> None:
        panel.barh(height[role], length, left=start, height=0.62, color=KINDS[kind], edgecolor="white", linewidth=1)
        panel.text(start + length / 2, height[role], label, ha="center", va="center", fontsize=7, clip_on=True)

    for stage in range(2):
        bar("copy engine", "K, V", stage * STAGE, 0.9 * STAGE, f"K, V of stage {stage + 3}")
        for consumer in (0, 1):
            role, products, start = f"consumer {consumer}", f"products of {consumer}", (stage + 0.5 * consumer) * STAGE
            bar(role, "maximum", start, MAXIMUM, f"max {stage}")
            bar(role, "P", start + MAXIMUM, SOFTMAX, f"P {stage}")
            ready = start + MAXIMUM + SOFTMAX
            bar(products, "P V", ready, PRODUCT, f"P V {stage}")
            bar(products, "S", ready + PRODUCT, PRODUCT, f"S {stage + 1}")
            bar(role, "add", ready + PRODUCT, ADD, f"+ P V {stage}")
    panel.set(yticks=list(height.values()), yticklabels=list(height), xlim=(0, 2 * STAGE), xticks=[], xlabel="time")
    panel.tick_params(labelsize=8)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    return figure


DRAWN: dict[str, Callable[[Look], Figure]] = {
    "idea": draw_idea,
    "scores": draw_scores,
    "rules": draw_rules,
    "error": draw_error,
    "codes": draw_codes,
    "quality": draw_quality,
    "video": draw_video,
    "replacement": draw_replacement,
    "order": draw_order,
    "calibration": draw_calibration,
    "scale": draw_scale,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="figures to draw; all by default")
    names = parser.parse_args().names or [*DRAWN, "hopper"]
    FOLDER.mkdir(exist_ok=True)
    for name in names:
        if name == "hopper":
            figures = {"hopper.png": draw_hopper()}
        else:
            figures = {f"{name}-{look.name}.png": DRAWN[name](look) for look in LOOKS}
        for file, figure in figures.items():
            figure.savefig(FOLDER / file)
            print(f"wrote {FOLDER / file}")


if __name__ == "__main__":
    main()
