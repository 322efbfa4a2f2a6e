"""The demo's maps as SVG: true block mass beside the predicted masks, with axes, needles and a legend."""

from __future__ import annotations

import math
from html import escape

import torch
from torch import Tensor

from sparge.demo.measure import InputResult, Prediction
from sparge.evaluate.inputs import Needle
from sparge.masks.geometry import BLOCK_K, BLOCK_Q
from sparge.masks.plot import DARK, LIGHT, MASS_FLOOR, paint_blocks, palette, png_data_uri, token_ticks

SIDE = 320
"""Edge of a square map in SVG units; the panel around it holds the labels."""

LEFT, TOP, RIGHT, BOTTOM = 50, 6, 10, 36
CELLS, BLOCK_ROWS, BLOCK_COLUMNS = 24, 6, 3
"""The schematic map: cells along an edge, and the cells of a block; twice as many queries as keys, as in a real one."""
KEPT_OF_ROW = 3
NEEDLE_KEPT = 0.5
"""A needle whose first head keeps less than this share of its mass is marked as lost."""


def legend() -> str:
    """What the colours and marks of the maps mean."""
    ticks = "".join(f"<span>{100 * 10.0**power:g}%</span>" for power in range(round(math.log10(MASS_FLOOR)), 1))
    return f"""<div class="legend">
<div><span class="ramp kept"></span><div class="ticks">{ticks}</div><p>kept, by the attention it holds</p></div>
<div><span class="ramp dropped"></span><div class="ticks">{ticks}</div><p>dropped, by the attention lost</p></div>
<div class="swatches"><p><span class="swatch"></span>dropped, held under {100 * MASS_FLOOR:g}%</p>
<p><span class="swatch hatch"></span>the future: not visible</p>
<p><svg viewBox="-9 -9 18 18" class="mark found"><circle r="6"/></svg>needle kept
<svg viewBox="-9 -9 18 18" class="mark lost"><circle r="6"/><path d="M-4-4 4 4M-4 4 4-4"/></svg>needle lost</p></div>
</div>"""


def schematic(step: int) -> str:
    """A drawn map, not a measured one. Step 1: the map; 2: cut into blocks; 3: the blocks that are kept."""
    cells = torch.arange(CELLS)
    distance = (cells[:, None] - cells).abs()
    weight = torch.exp(-distance / 2.0) + 0.8 * (cells == 1) + 0.5 * torch.exp(-(distance - 12).abs() / 1.0)
    levels = (3 * weight.clamp(max=1)).round().long()
    blocks = weight.unflatten(1, (-1, BLOCK_COLUMNS)).unflatten(0, (-1, BLOCK_ROWS)).sum((1, 3))
    kept = torch.zeros_like(blocks, dtype=torch.bool).scatter_(1, blocks.topk(KEPT_OF_ROW).indices, True)
    shown = torch.ones_like(levels, dtype=torch.bool)
    if step == 3:
        shown = kept.repeat_interleave(BLOCK_ROWS, 0).repeat_interleave(BLOCK_COLUMNS, 1)
    painted = ""
    for level in (1, 2, 3):
        squares = "".join(f"M{x} {y}h1v1h-1z" for y, x in ((levels == level) & shown).nonzero().tolist())
        painted += f"<path class='level{level}' d='{squares}'/>"
    outlined = {1: torch.zeros_like(kept), 2: torch.ones_like(kept), 3: kept}[step]
    outlines = "".join(
        f"M{x * BLOCK_COLUMNS} {y * BLOCK_ROWS}h{BLOCK_COLUMNS}v{BLOCK_ROWS}h-{BLOCK_COLUMNS}z"
        for y, x in outlined.nonzero().tolist()
    )
    lines = f"<path class='cut' d='{outlines}'/>"
    return (
        f"<svg class='schematic' viewBox='-2.6 -2.2 {CELLS + 3} {CELLS + 2.6}' aria-hidden='true'>"
        f"<rect class='paper' width='{CELLS}' height='{CELLS}'/>{painted}{lines}"
        f"<rect class='border' width='{CELLS}' height='{CELLS}'/>"
        f"<text x='{CELLS / 2}' y='-.7' text-anchor='middle'>keys &#8594;</text>"
        f"<text transform='translate(-.8 {CELLS / 2}) rotate(-90)' text-anchor='middle'>&#8592; queries</text></svg>"
    )


def figure(result: InputResult, told: str) -> str:
    """The maps of one input below what it is and what was ``told`` about its result."""
    everything = torch.ones_like(result.visible)
    panels = [_panel("True attention mass", "", result, everything, None)]
    for prediction in result.predictions:
        detail = f"{100 * prediction.density:.1f}% of blocks, {100 * prediction.recall:.1f}% of mass"
        panels.append(_panel(f"Kept by {prediction.score}", detail, result, prediction.kept, prediction))
    needles = _needle_table(result) if result.needles else ""
    return f"""<figure>
<figcaption><h3>{escape(result.name)}</h3><p>{escape(result.about)}</p>
<p class="told">{escape(told)}</p></figcaption>
<div class="panels">{"".join(panels)}</div>
{needles}
</figure>"""


def _panel(title: str, detail: str, result: InputResult, kept: Tensor, prediction: Prediction | None) -> str:
    entries = paint_blocks(result.mass, kept, result.visible)
    scale = SIDE / result.tokens
    rows, columns = entries.shape
    size = f"width='{columns * BLOCK_K * scale:.2f}' height='{rows * BLOCK_Q * scale:.2f}'"
    kind = "fine" if columns > SIDE else "coarse"
    images = "".join(
        f"<image class='{kind} {name}' {size} preserveAspectRatio='none' "
        f"href='{png_data_uri(entries, palette(theme))}'/>"
        for name, theme in (("light", LIGHT), ("dark", DARK))
    )
    hatched = "" if bool(result.visible.all()) else f"<path class='future' d='{_future(result, scale)}'/>"
    marks = "".join(
        _needle_mark(number, needle, prediction, scale) for number, needle in enumerate(result.needles, start=1)
    )
    spoken = escape(f"{result.name}: {title} {detail}".strip())
    return f"""<div class="panel"><h4>{title}</h4><p>{detail or "all visible blocks"}</p>
<svg viewBox="0 0 {LEFT + SIDE + RIGHT} {TOP + SIDE + BOTTOM}" role="img" aria-label="{spoken}">
<g transform="translate({LEFT} {TOP})">
<rect class="paper" width="{SIDE}" height="{SIDE}"/>
<svg width="{SIDE}" height="{SIDE}" viewBox="0 0 {SIDE} {SIDE}">{images}{hatched}</svg>
<rect class="frame" width="{SIDE}" height="{SIDE}"/>
{_axes(result.tokens, scale)}{marks}
</g></svg></div>"""


def _axes(tokens: int, scale: float) -> str:
    """Ticks in tokens along both axes."""
    parts = []
    for tick in token_ticks(tokens):
        at = tick * scale
        parts.append(f"<path class='tick' d='M{at:.1f} {SIDE}v4M0 {at:.1f}h-4'/>")
        anchor = "end" if at > SIDE - 12 else "middle"
        parts.append(f"<text x='{at:.1f}' y='{SIDE + 15}' text-anchor='{anchor}'>{tick}</text>")
        parts.append(f"<text x='-7' y='{max(at, 4) + 3.5:.1f}' text-anchor='end'>{tick}</text>")
    middle = SIDE / 2
    parts.append(f"<text class='axis' x='{middle}' y='{SIDE + 31}' text-anchor='middle'>key token</text>")
    parts.append(
        f"<text class='axis' transform='translate(-41 {middle}) rotate(-90)' text-anchor='middle'>query token</text>"
    )
    return "".join(parts)


def _future(result: InputResult, scale: float) -> str:
    """Outline of the blocks no query may see: a staircase, as causal rows see a prefix of the keys."""
    seen = result.visible.sum(-1).tolist()
    steps = "".join(f"V{row * BLOCK_Q * scale:.2f}H{count * BLOCK_K * scale:.2f}" for row, count in enumerate(seen))
    return f"M{SIDE} 0{steps}V{SIDE}H{SIDE}z"


def _needle_mark(number: int, needle: Needle, prediction: Prediction | None, scale: float) -> str:
    x = (needle.key_start + needle.key_stop) / 2 * scale
    y = (needle.query_start + needle.query_stop) / 2 * scale
    share = 1.0 if prediction is None else prediction.needles[number - 1]
    kind, cross = ("found", "") if share >= NEEDLE_KEPT else ("lost", "<path d='M-4-4 4 4M-4 4 4-4'/>")
    told = "" if prediction is None else f": {100 * share:.0f}% kept"
    return (
        f"<g class='mark {kind}' transform='translate({x:.1f} {y:.1f})'><title>needle {number}{told}</title>"
        f"<circle class='halo' r='6'/><circle r='6'/>{cross}<text x='9' y='3.5'>{number}</text></g>"
    )


def _needle_table(result: InputResult) -> str:
    heading = "".join(f"<th scope='col'>{number}</th>" for number, _ in enumerate(result.needles, start=1))
    lines = "".join(
        f"<tr><th scope='row'>{row.score}</th>"
        + "".join(f"<td{' class=low' if share < NEEDLE_KEPT else ''}>{100 * share:.0f}%</td>" for share in row.needles)
        + "</tr>"
        for row in result.rows
    )
    heads = result.rows[0].heads
    return f"""<div class="needles"><p>Share of each needle's attention that was kept, over all {heads} heads (the
maps mark the first head only):</p>
<table><thead><tr><th scope="col">needle</th>{heading}</tr></thead><tbody>{lines}</tbody></table></div>"""


HATCH = """
<svg width="0" height="0" style="position:absolute" aria-hidden="true"><pattern id="hatch" width="6" height="6"
patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path d="M0 0V6" class="hatching"/></pattern></svg>"""
