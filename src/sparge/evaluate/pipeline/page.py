"""An evaluation of a pipeline as one HTML page that loads nothing: table, curves, frames side by side, errors."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from html import escape

from sparge.evaluate import charts
from sparge.evaluate.charts import Curve, Point
from sparge.evaluate.document import document, machine_line, notes, table
from sparge.evaluate.pipeline.pictures import GAIN, Gallery, galleries
from sparge.evaluate.pipeline.run import Result
from sparge.evaluate.pipeline.summary import Line, cells, lines_of, remarks, time_text
from sparge.evaluate.rows import Row
from sparge.evaluate.variants import family_of, spaced

MAX_STEPS = 12
"""Columns of a map of errors; neighbouring steps are taken together beyond."""

NEAR_NOISE = 15.0
"""A line for noise is drawn where the best variant comes so near to it, in dB: far ones would flatten all curves."""

STYLE = """
.gallery{border-collapse:collapse;width:100%;table-layout:fixed;min-width:40rem;
max-width:calc(13.5rem + var(--columns)*15rem)}
.gallery th{font-size:.82rem;font-weight:500;text-align:left;vertical-align:top;padding:.3rem .8rem .3rem 0;
overflow-wrap:anywhere}
.gallery th:first-child{width:13.5rem}
.gallery thead th{color:var(--quiet);padding-bottom:.2rem;vertical-align:bottom}
.gallery td{padding:.15rem}
.gallery small{display:block}
.picture{position:relative;background:var(--paper) 0 0/100% 100%}
.picture img,.moving img{display:block;width:100%}
.over{position:absolute;inset:0;background:0 0/100% 100%;opacity:0}
.picture:hover .over,.picture:focus .over{opacity:1}
.moving{display:grid;grid-template-columns:repeat(auto-fill,minmax(11rem,1fr));gap:.8rem;margin:.8rem 0}
.moving figure{margin:0}
.moving figcaption{font-size:.82rem;margin:0 0 .2rem}
summary{cursor:pointer;margin:.8rem 0}
.heat td{padding:.22rem .35rem}
.figures th:first-child{min-width:10rem}
.figures td:nth-child(2),.figures thead th:nth-child(2){text-align:left;white-space:normal;min-width:6rem}
.maps{display:flex;flex-wrap:wrap;gap:1.6rem 2.4rem;margin-top:1.4rem}
.maps .scroll{max-width:100%}
"""


MAX_ALONG = 8
"""Variants whose quality is drawn frame by frame, from the first on."""


def render_page(result: Result, command: str) -> str:
    """The whole page as text.

    Args:
        command: what to run to get it again.
    """
    lines = lines_of(result)
    told = "".join(f"<li>{escape(text)}</li>" for text in remarks(result, lines))
    shown = galleries(result)
    machine = escape(machine_line(result.rows[0], result.rows[0]["run"]["pipeline"]))
    body = f"""
<header>
<h1>{escape(result.name)}, sparse against dense</h1>
<p class="lead">The same pipeline starts from the same noise several times: with its own dense attention, and with
attention that leaves out blocks or computes in fewer bits. This page shows how far what comes out is from the dense
result, beside how much was computed and how long it took.</p>
<p class="machine">{machine}</p>
</header>
<main>
<section>
<h2>What it costs, and what it saves</h2>
<p>{escape(_asked(result))}</p>
{_table(lines)}
<ul class="remarks">{told}</ul>
<div class="charts">{"".join(_figures(result, lines))}</div>
</section>
{_pictures(result, shown)}
{_error_maps(result)}
<section>
<h2>What the numbers mean</h2>
{notes(_words(lines))}
</section>
<section>
<h2>Do it again</h2>
<p><code>{escape(command)}</code></p>
<p>A run that was interrupted goes on where it stopped when the same command is given again: rows and
dense frames are kept. <code>sparge eval pipeline --help</code> lists all options. In a program:</p>
<pre><code>{escape(_program(result))}</code></pre>
</section>
</main>
<footer><p class="machine">{machine}</p></footer>"""
    return document(f"{result.name}: sparse against dense", body, charts.STYLE + STYLE + _dense_pictures(shown))


def _asked(result: Result) -> str:
    frames, height, width = result.row("dense", result.items[0], None)["shape"][:3]
    what = "pictures" if frames == 1 else f"clips of {frames} frames,"
    prompts = len({item.prompt for item in result.items})
    seeds = len({item.seed for item in result.items})
    count = f"{prompts} prompt{'s' * (prompts > 1)}, " if result.items[0].prompt is not None else ""
    arguments = ", ".join(f"{name} {value}" for name, value in result.rows[0]["run"]["arguments"].items())
    return f"{count}{seeds} seed{'s' * (seeds > 1)}; {what} {width} x {height} pixels" + (
        f"; {arguments}." if arguments else "."
    )


def _table(lines: Sequence[Line]) -> str:
    shown = [cells(line, lines) for line in lines]
    rows = [[spaced(row[0][1]), *(text for _, text in row[1:])] for row in shown]
    return f"<div class='scroll'>{table([column for column, _ in shown[0]], rows)}</div>"


def _figures(result: Result, lines: Sequence[Line]) -> Iterator[str]:
    """Quality against density and against time, and along the clip."""
    dense, *others = lines
    kinds = {variant.label: variant.kind for variant in result.variants}
    drawn = [line for line in others if kinds[line.variant] != "sdpa" and line.density is not None]
    best = max((line.psnr.mean for line in drawn if line.psnr is not None), default=0.0)
    noise = [
        (line.variant, line.psnr.mean) for line in others if kinds[line.variant] == "sdpa" and line.psnr is not None
    ]
    level = next((one for one in noise if one[1] < best + NEAR_NOISE), None)
    density = "density: share of the blocks that is computed"

    def by_family(x: str, y: str) -> list[Curve]:
        found: dict[str, list[Point]] = {}
        for line in drawn:
            value, across = getattr(line, y), line.density if x == "density" else line.seconds
            is_timed = x == "density" or kinds[line.variant] != "oracle"  # it looks at everything first
            if value is not None and across is not None and is_timed:
                point = Point(across, value.mean, value.half, line.variant)
                found.setdefault(family_of(line.variant), []).append(point)
        return [Curve(name, points) for name, points in found.items()]

    yield charts.curves("PSNR against density", by_family("density", "psnr"), density, "dB", level=level)
    yield charts.curves(
        "PSNR against time",
        by_family("seconds", "psnr"),
        f"seconds a call (dense: {time_text(dense.seconds)})",
        "dB",
        level=level,
    )
    yield charts.curves("SSIM against density", by_family("density", "ssim"), density, "SSIM")
    yield charts.curves("LPIPS against density", by_family("density", "lpips"), density, "LPIPS")
    yield charts.curves(
        "PSNR along the clip",
        [Curve(spaced(line.variant), _along(result, line.variant)) for line in drawn[:MAX_ALONG]],
        "frame",
        "dB",
        whole_x=False,
    )


def _along(result: Result, label: str) -> list[Point]:
    """The mean PSNR of each frame, over all clips; nothing for pictures."""
    rows = [row["psnr_frames"] for row in result.rows if row["part"] == "variant" and row["variant"] == label]
    if len(rows[0]) < 2:
        return []
    frames = [[value for value in values if value is not None] for values in zip(*rows, strict=False)]
    return [Point(number, statistics.fmean(values)) for number, values in enumerate(frames, start=1) if values]


def _pictures(result: Result, shown: Sequence[Gallery]) -> str:
    if not shown:
        return ""
    parts = []
    for place, gallery in enumerate(shown):
        columns = "".join(f"<th scope='col'>{escape(column)}</th>" for column in gallery.columns)
        lines = "".join(_strip_rows(result, gallery, place, number) for number in range(len(gallery.strips)))
        title = f"<h3>{escape(gallery.title)}</h3>" if gallery.title else ""
        parts.append(
            f"<figure>{title}<div class='scroll'><table class='gallery' "
            f"style='--columns:{len(gallery.columns)}'><thead><tr><th></th>{columns}</tr></thead>"
            f"<tbody>{lines}</tbody></table></div>{_moving(gallery)}</figure>"
        )
    return (
        "<section><h2>Side by side</h2><p>Hold the pointer over a picture (or tap it) to see the dense one in its "
        f"place. Below each stands its difference from dense, {GAIN} times enlarged: black is equal.</p>"
        f"{''.join(parts)}</section>"
    )


def _strip_rows(result: Result, gallery: Gallery, place: int, number: int) -> str:
    strip = gallery.strips[number]
    if not number:
        cells_text = "".join(
            f"<td><div class='picture {_class(place, column)}' role='img' aria-label='dense, {escape(name)}' "
            f"style='aspect-ratio:{gallery.ratio:.4f}'></div></td>"
            for column, name in enumerate(gallery.columns)
        )
        return f"<tr><th scope='row'>dense</th>{cells_text}</tr>"
    pictures = "".join(
        f"<td><div class='picture' tabindex='0'><img src='{uri}' alt='{escape(strip.variant)}, {escape(name)}'>"
        f"<span class='over {_class(place, column)}'></span></div></td>"
        for column, (uri, name) in enumerate(zip(strip.pictures, gallery.columns, strict=True))
    )
    differences = "".join(
        f"<td><div class='picture'><img src='{uri}' alt='difference, {escape(name)}'></div></td>"
        for uri, name in zip(strip.differences, gallery.columns, strict=True)
    )
    return (
        f"<tr><th scope='row'>{escape(spaced(strip.variant))}"
        f"<small>{escape(_told(result, gallery, strip.variant))}</small></th>{pictures}</tr>"
        f"<tr><th scope='row'><small>difference x {GAIN}</small></th>{differences}</tr>"
    )


def _told(result: Result, gallery: Gallery, label: str) -> str:
    """The PSNR of the clip that is shown; of pictures, which have a column each, the range."""
    variant = next(variant for variant in result.variants if variant.label == label)
    found = [result.row("variant", item, variant)["psnr"] for item in gallery.items]
    values = [value for value in found if value is not None]
    if not values:
        return "equal"
    low, high = min(values), max(values)
    return f"PSNR {low:.1f} dB" if low == high else f"PSNR {low:.1f} to {high:.1f} dB"


def _moving(gallery: Gallery) -> str:
    if not gallery.strips[0].moving:
        return ""
    clips = "".join(
        f"<figure><figcaption>{escape(spaced(strip.variant or 'dense'))}</figcaption>"
        f"<img src='{strip.moving}' alt='{escape(strip.variant or 'dense')}, the clip'></figure>"
        for strip in gallery.strips
    )
    return f"<details><summary>The clip in motion</summary><div class='moving'>{clips}</div></details>"


def _class(place: int, column: int) -> str:
    return f"dense-{place}-{column}"


def _dense_pictures(shown: Sequence[Gallery]) -> str:
    """Dense pictures as classes: each is shown in its row and under every variant, and stands in the page once."""
    return "".join(
        f".{_class(place, column)}{{background-image:url({uri})}}\n"
        for place, gallery in enumerate(shown)
        for column, uri in enumerate(gallery.strips[0].pictures)
    )


def _error_maps(result: Result) -> str:
    rows = [row for row in result.rows if row["part"] == "errors" and row["layers"]]
    if not rows:
        return ""
    worst = max(value for row in rows for values in row["values"] for value in values if value is not None) or 1.0
    return (
        "<section><h2>Where attention errs</h2><p>The error of each layer's attention output at each denoising step, "
        "in percent of its size, against exact attention on the same inputs: those of the variant's own way, first "
        f"prompt and seed. Blue is none, red is the worst of all maps ({100 * worst:.3g} %). Rows or columns that "
        "stand out are layers or steps to keep dense (<code>dense_layers</code>, <code>dense_first_steps</code>).</p>"
        f"<div class='maps'>{''.join(_error_map(row, worst) for row in rows)}</div></section>"
    )


def _error_map(row: Row, worst: float) -> str:
    groups = _groups(row["steps"])
    heading = "".join(
        f"<th scope='col'>{steps[0]}{f' to {steps[-1]}' if len(steps) > 1 else ''}</th>" for steps in groups
    )
    lines = ""
    for layer, values in zip(row["layers"], row["values"], strict=True):
        by_step = dict(zip(row["steps"], values, strict=True))
        painted = "".join(_error_cell([by_step[step] for step in steps], worst) for steps in groups)
        lines += f"<tr><th scope='row'>{escape(layer)}</th>{painted}</tr>"
    return (
        f"<div class='scroll'><table class='heat'><caption>{escape(row['variant'])}</caption>"
        f"<thead><tr><th>layer / step</th>{heading}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _groups(steps: Sequence[int]) -> list[Sequence[int]]:
    """Neighbouring steps together, so that columns fit."""
    size = -(-len(steps) // MAX_STEPS)
    return [steps[start : start + size] for start in range(0, len(steps), size)]


def _error_cell(values: Sequence[float | None], worst: float) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "<td style='background:none'></td>"
    mean = statistics.fmean(known)
    return f"<td style='--share:{1 - mean / worst:.3f}'>{100 * mean:.2g}</td>"


def _program(result: Result) -> str:
    policies = [variant.asked for variant in result.variants if variant.kind == "policy"]
    policy = policies[0].to_json() if policies else "{}"
    return (
        f"sparge.enable(pipe, sparge.Policy.from_json({policy!r}))"
        if result.is_known
        else (f"with sparge.replace_sdpa(sparge.Policy.from_json({policy!r})):\n    pipe(...)")
    )


def _words(lines: Sequence[Line]) -> dict[str, str]:
    """What the columns mean, those that are there."""
    words = {
        "ran": "Whether attention went sparse. Cross-attention to text always runs dense and is not counted here. "
        '"below the crossover" means that sequences are too short for sparsity to save time, so dense was taken.',
        "density": "Share of the attention map's blocks that was computed. Steps and layers that a policy keeps dense "
        "count in full.",
        "PSNR dB": "Peak signal-to-noise ratio of all pixels against the dense picture or clip, in decibels; the mean "
        "over prompts and seeds. Above 35 the two are hard to tell apart, at 25 to 35 details differ, below 20 the "
        "picture is another one. That is a distance and no judgement: a clip that went another way may look as good. "
        "8-bit pixels that differ by one level everywhere have 48; equal ones have no number.",
        "SSIM": "Structural similarity: 1 for equal pictures. It sees edges and texture more than brightness.",
        "LPIPS": "Distance in the features of a neural network, near to what people see: 0 for equal, below 0.1 "
        "similar.",
        "temporal difference": "Mean change from frame to frame that the dense clip does not have, of a range of 1: "
        "flicker, or movement that differs.",
        "step": "Mean time between two steps of the scheduler; the median over prompts and seeds.",
        "call": "Time of a whole call, text encoders and VAE included; the median over prompts and seeds, after "
        "a warm-up.",
        "speed-up": "Dense time of a call over the variant's, for the same prompt and seed; the geometric mean.",
        "±": "Half of the interval that would cover the mean in 95 of 100 repetitions with other prompts and seeds, by "
        "Student's t. Few prompts make it wide.",
    }
    columns = {column for column, _ in cells(lines[-1], lines)} | {"±"}
    return {name: text for name, text in words.items() if name in columns}
