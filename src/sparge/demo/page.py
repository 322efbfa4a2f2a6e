"""The demo as one HTML page that loads nothing: a table, then true block mass beside the predicted masks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

import torch
from torch import Tensor

from sparge.demo.measure import HEAD_DIM, Demo, InputResult, Prediction, Row, table_cells
from sparge.evaluate.inputs import Needle
from sparge.evaluate.plots import DARK, LIGHT, MASS_FLOOR, Theme, paint_blocks, palette, png_data_uri, token_ticks
from sparge.geometry import BLOCK_K, BLOCK_Q

SIDE = 320
"""Edge of a square map in SVG units; the panel around it holds the labels."""

LEFT, TOP, RIGHT, BOTTOM = 50, 6, 10, 36
NEEDLE_KEPT = 0.5
"""A needle whose first head keeps less than this share of its mass is marked as lost."""


def render_page(demo: Demo) -> str:
    """The whole page as text."""
    settings = demo.settings
    body = f"""
<header>
<h1>Sparse attention, measured on this machine</h1>
<p class="lead">sparge predicts which blocks of 128 queries by 64 keys matter, and computes only those. Below: how much
time that saves at topk {settings.topk:g} against torch's dense attention, and what it costs in accuracy, on three
synthetic inputs.</p>
<p class="machine">{_machine_line(demo)}</p>
</header>
<main>
<section>
<h2>Time saved, and its price</h2>
{_table(demo.rows)}
{_table_notes(demo)}
</section>
<section>
<h2>What is kept</h2>
<p>The first head of each input. Queries run down, keys run right, and one pixel is one block. The first map is the
truth: how much of its queries' attention each block holds. The other two show what each score kept: a kept block has
the colour it has in the truth, a dropped block is red by the attention that was lost with it. Faint blue in a mask is a
block computed for almost nothing; the stronger the red, the greater the loss.</p>
{_legend()}
{"".join(_figure(result) for result in demo.inputs)}
</section>
</main>
<footer><p>Reproduce with <code>{_command(demo)}</code></p></footer>"""
    return f"""<!doctype html>
<html lang="en-GB">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>sparge demo: topk {settings.topk:g}, {settings.tokens} tokens</title>
<style>{_STYLE}</style>
</head>
<body>{_HATCH}{body}
</body>
</html>
"""


def _machine_line(demo: Demo) -> str:
    machine, settings = demo.machine, demo.settings
    parts = [
        f"{machine.processor}, {machine.threads} threads",
        machine.system,
        f"Python {machine.python}",
        f"torch {machine.torch}",
        f"sparge {machine.sparge}" + (f" ({machine.commit})" if machine.commit else ""),
        f"float32, B 1, H {settings.heads}, D {HEAD_DIM}",
    ]
    return " <i>/</i> ".join(escape(part) for part in parts)


def _command(demo: Demo) -> str:
    settings = demo.settings
    return escape(
        f"sparge demo --topk {settings.topk:g} --tokens {settings.tokens} --heads {settings.heads} "
        f"--seed {settings.seed}"
    )


def _table(rows: tuple[Row, ...]) -> str:
    heading = "".join(f"<th scope='col'>{escape(column)}</th>" for column, _ in table_cells(rows[0]))
    lines = []
    before = None
    for row in rows:
        kind = "same" if row.input == before else "first"
        before = row.input
        lines.append(f"<tr class='{kind}'>{''.join(_cells(row))}</tr>")
    return f"<table class='results'><thead><tr>{heading}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _cells(row: Row) -> Iterator[str]:
    for index, (column, text) in enumerate(table_cells(row)):
        if index == 0:
            yield f"<th scope='row'>{escape(text)} <small>{row.tokens} tokens</small></th>"
        elif text:
            yield f"<td data-label='{escape(column)}'>{escape(text)}</td>"
        else:
            yield "<td class='none'></td>"


def _table_notes(demo: Demo) -> str:
    rounds = sorted({row.rounds for row in demo.rows})
    took = "the median of " + " or ".join(str(count) for count in rounds) + " interleaved rounds"
    if rounds == [1]:
        took = "one round"
    notes = [
        ("dense, sparse", f"Seconds for one call, {took}. Sparse time includes the prediction."),
        (
            "density",
            "Blocks computed, as a share of those the queries may see. It exceeds topk for causal inputs, because the "
            "first key block, the diagonal and at least 16 blocks per row are kept whatever their score.",
        ),
        ("mass recall", "Share of the softmax probability that lies in the kept blocks."),
        ("L1 error", "Sum of absolute differences from the dense output, over the sum of its absolute values."),
        (
            "needles",
            "Share of the needles' own mass that was kept, over all heads: mean, and the worst needle. A needle cut by "
            "a block border is harder to keep, and where borders fall depends on the length.",
        ),
        (
            "score",
            "How blocks are ranked. <b>mean</b> is the paper's: the mean query against the mean key. <b>moment</b>, "
            "the default, takes sampled queries against the mean and the variance of each key block.",
        ),
    ]
    items = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in notes)
    return f"<dl class='notes'>{items}</dl>"


def _legend() -> str:
    ticks = "".join(f"<span>{100 * 10.0**power:g}%</span>" for power in range(round(math.log10(MASS_FLOOR)), 1))
    return f"""<div class="legend">
<div><span class="ramp kept"></span><div class="ticks">{ticks}</div><p>kept, by the attention it holds</p></div>
<div><span class="ramp dropped"></span><div class="ticks">{ticks}</div><p>dropped, by the attention lost</p></div>
<div class="swatches"><p><span class="swatch"></span>dropped, under {100 * MASS_FLOOR:g}%</p>
<p><span class="swatch hatch"></span>the future: not visible</p>
<p><svg viewBox="-9 -9 18 18" class="mark found"><circle r="6"/></svg>needle kept
<svg viewBox="-9 -9 18 18" class="mark lost"><circle r="6"/><path d="M-4-4 4 4M-4 4 4-4"/></svg>needle lost</p></div>
</div>"""


def _figure(result: InputResult) -> str:
    everything = torch.ones_like(result.visible)
    panels = [_panel("True attention mass", "", result, everything, None)]
    for prediction in result.predictions:
        detail = f"{100 * prediction.density:.1f}% of blocks, {100 * prediction.recall:.1f}% of mass"
        panels.append(_panel(f"Kept by {prediction.score}", detail, result, prediction.kept, prediction))
    needles = _needle_table(result) if result.needles else ""
    return f"""<figure>
<figcaption><h3>{escape(result.name)}</h3><p>{escape(result.about)}</p></figcaption>
<div class="panels">{"".join(panels)}</div>
{needles}
</figure>"""


def _panel(title: str, detail: str, result: InputResult, kept: Tensor, prediction: Prediction | None) -> str:
    entries = paint_blocks(result.mass, kept, result.visible)
    scale = SIDE / result.tokens
    rows, columns = entries.shape
    size = f"width='{columns * BLOCK_K * scale:.2f}' height='{rows * BLOCK_Q * scale:.2f}'"
    images = "".join(
        f"<image class='{name}' {size} preserveAspectRatio='none' href='{png_data_uri(entries, palette(theme))}'/>"
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


_HATCH = """
<svg width="0" height="0" style="position:absolute" aria-hidden="true"><pattern id="hatch" width="6" height="6"
patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path d="M0 0V6" class="hatching"/></pattern></svg>"""


def _theme_variables(theme: Theme) -> str:
    return f"--kept:{','.join(theme.kept)};--dropped:{','.join(theme.dropped)}"


_STYLE = (
    f":root{{--page:#fbfbf9;--paper:#fff;--ink:#1b1f24;--quiet:#5a626c;--line:#d9dbd8;--hatch:#dcdedb;"
    f"--lost:#b3150f;{_theme_variables(LIGHT)}}}"
    f"@media(prefers-color-scheme:dark){{:root{{--page:#111418;--paper:#0b0d10;--ink:#e7e9ec;--quiet:#9aa3ad;"
    f"--line:#30363d;--hatch:#2a3037;--lost:#ff8a75;{_theme_variables(DARK)}}}}}"
    """
*{box-sizing:border-box}
body{margin:0 auto;padding:3rem 1.5rem 4rem;max-width:1200px;background:var(--page);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:2rem;line-height:1.2;letter-spacing:-.02em;margin:0 0 .6rem}
h2{font-size:1.3rem;letter-spacing:-.01em;margin:3rem 0 .8rem}
h3{font-size:1.05rem;margin:0}
h4{font-size:.95rem;margin:0}
p{margin:0 0 .8rem;max-width:46rem}
.lead{font-size:1.1rem}
.machine{max-width:none;font-size:.85rem;color:var(--quiet)}
.machine i{font-style:normal;opacity:.5;padding:0 .2em}
small{font-weight:400;color:var(--quiet)}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.results{width:100%}
.results th,.results td{padding:.45rem .6rem;text-align:right;white-space:nowrap}
.results thead th{font-size:.85rem;font-weight:500;color:var(--quiet);border-bottom:1px solid var(--ink)}
.results th:first-child,.results td:nth-child(2),.results thead th:nth-child(2){text-align:left}
.results th:first-child{padding-left:0}
.results td:last-child,.results thead th:last-child{padding-right:0}
.results th:first-child small{display:block;font-size:.8rem;line-height:1.1}
.results .first>*{border-top:1px solid var(--line)}
.results tbody .first:first-child>*{border-top:0}
.results .same th{visibility:hidden}
.results .same>*{padding-top:0}
.results .same small{display:none!important}
.results td:nth-child(5){font-weight:650}
.notes{display:grid;grid-template-columns:repeat(auto-fit,minmax(20rem,1fr));gap:.7rem 2.5rem;margin:1.4rem 0 0;
font-size:.88rem;line-height:1.45}
.notes dt{font-weight:600}
.notes dd{margin:0;color:var(--quiet)}
.legend{display:flex;flex-wrap:wrap;gap:1rem 3rem;align-items:flex-start;margin:1.4rem 0 0;font-size:.82rem}
.legend p{margin:.15rem 0 0;color:var(--quiet);line-height:1.5}
.ramp{display:block;width:17rem;max-width:100%;height:.8rem}
.ramp.kept{background:linear-gradient(to right,var(--kept))}
.ramp.dropped{background:linear-gradient(to right,var(--dropped));box-shadow:inset 0 0 0 1px var(--line)}
.ticks{display:flex;justify-content:space-between;width:17rem;max-width:100%;font-variant-numeric:tabular-nums}
.swatches p{margin:0}
.swatch{display:inline-block;width:1.6rem;height:.8rem;margin-right:.5rem;vertical-align:-.05rem;
background:var(--paper);border:1px solid var(--line)}
.hatch{background:repeating-linear-gradient(135deg,var(--hatch) 0 1.5px,transparent 1.5px 5px)}
.legend svg{width:1.1rem;height:1.1rem;vertical-align:-.25rem;margin-right:.35rem}
.legend svg+svg,.legend .lost{margin-left:1rem}
figure{margin:2.4rem 0 0}
figcaption{margin-bottom:.9rem}
figcaption p{margin:.15rem 0 0}
.panels{display:grid;grid-template-columns:repeat(3,1fr);gap:1.2rem 1.6rem}
.panel>h4,.panel>p{padding-left:13.2%}
.panel>p{margin:0 0 .35rem;font-size:.85rem;color:var(--quiet);font-variant-numeric:tabular-nums}
.panel>svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:10.5px;fill:var(--quiet);font-variant-numeric:tabular-nums}
svg .axis{font-size:11px}
image{image-rendering:pixelated}
.dark{display:none}
.paper{fill:var(--paper)}
.frame{fill:none;stroke:var(--line)}
.tick{stroke:var(--quiet);fill:none}
.future{fill:url(#hatch)}
.hatching{stroke:var(--hatch);stroke-width:3}
.mark circle,.mark path{fill:none;stroke:var(--ink);stroke-width:1.6}
.mark .halo{stroke:var(--paper);stroke-width:4.5}
.mark.lost circle:not(.halo),.mark.lost path{stroke:var(--lost)}
.mark text{fill:var(--ink);font-weight:600;paint-order:stroke;stroke:var(--paper);stroke-width:3px}
.mark.lost text{fill:var(--lost)}
.needles{margin-top:1rem;font-size:.88rem}
.needles p{margin:0 0 .3rem;color:var(--quiet)}
.needles th,.needles td{padding:.15rem .9rem .15rem 0;text-align:right;min-width:3.4rem}
.needles th:first-child{text-align:left;font-weight:500}
.needles thead th{color:var(--quiet);font-weight:500;border-bottom:1px solid var(--line)}
.needles .low{color:var(--lost)}
footer{margin-top:3rem;padding-top:1rem;border-top:1px solid var(--line);font-size:.85rem;color:var(--quiet)}
@media(prefers-color-scheme:dark){.dark{display:inline}.light{display:none}}
@media(max-width:900px){.panels{grid-template-columns:1fr;max-width:30rem}}
@media(max-width:860px){
body{padding:1.6rem 1rem 3rem}
h1{font-size:1.6rem}
.results thead{display:none}
.results,.results tbody{display:block}
.results tr{display:grid;grid-template-columns:1fr 1fr;gap:.1rem 1.4rem;padding:.7rem 0;
border-top:1px solid var(--line)}
.results .first>*,.results th:first-child{border:0;padding:0}
.results th:first-child{visibility:visible!important;text-align:left}
.results td:last-child{grid-column:1/-1}
.results th:first-child small,.results .same small{display:inline!important}
.results td{display:flex;justify-content:space-between;padding:0;white-space:normal}
.results td::before{content:attr(data-label);color:var(--quiet);font-weight:400}
.results .none{display:none}
.notes{grid-template-columns:1fr}
.needles th,.needles td{padding-right:.5rem;min-width:2.6rem}
}
"""
)
