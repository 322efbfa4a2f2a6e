"""An evaluation of a language model as one HTML page that loads nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from sparge.evaluate import charts
from sparge.evaluate.charts import Curve, Point
from sparge.evaluate.document import document, machine_line, notes, table
from sparge.evaluate.language.run import DENSE, FIDELITY, is_stock
from sparge.evaluate.language.summary import Line, cells, lines_of, remarks
from sparge.evaluate.rows import Row
from sparge.evaluate.variants import family_of, spaced

MAX_ALONG = 8
"""Variants whose loss is drawn by position: the first that went sparse."""

MAX_MAPS = 12
"""Heat maps of needles that are drawn, dense first."""


def render_page(rows: Sequence[Row], model: str, command: str) -> str:
    """The whole page as text. Rows are those of one run."""
    lines = lines_of(rows)
    tasks = list(dict.fromkeys(row["part"] for row in rows if row["part"] != FIDELITY))
    lengths = sorted({line.tokens for line in lines})
    sections = [_length_section(tokens, [line for line in lines if line.tokens == tokens], tasks) for tokens in lengths]
    body = f"""
<header>
<h1>{escape(model)}, sparse against dense</h1>
<p class="lead">The same model reads the same tokens twice: with its own dense attention, and with attention that leaves
out blocks or computes in 8 bits. This page shows how far the second is from the first, in what the model predicts and
in what it finds, beside how much was computed.</p>
<p class="machine">{escape(machine_line(rows[0]))}</p>
</header>
<main>
{"".join(sections)}
{_positions(rows, max(lengths))}
{_needle_maps(rows)}
<section>
<h2>What the numbers mean</h2>
{notes(_words(tasks))}
</section>
<section>
<h2>Do it again</h2>
<p><code>{escape(command)}</code></p>
<p>A run that was interrupted goes on where it stopped when the same command is given again with the same
<code>--json</code> file. <code>sparge eval llm --help</code> lists all options.</p>
</section>
</main>
<footer><p class="machine">{escape(machine_line(rows[0]))}</p></footer>"""
    return document(f"{model}: sparse against dense", body, charts.STYLE)


def _length_section(tokens: int, lines: Sequence[Line], tasks: Sequence[str]) -> str:
    shown = [cells(line, tasks=tasks) for line in lines]
    first = next((line for line in lines if line.dense_perplexity is not None), None)
    told = ""
    if first is not None and first.kl is not None:
        told = f"<p>Dense perplexity {first.dense_perplexity:.3f} over {first.kl.values} windows.</p>"
    figures = [_curves("KL divergence", lines, "nats per token", log=True), *_score_curves(lines, tasks)]
    return f"""<section><h2>{tokens} tokens</h2>{told}
<div class="scroll">{table([name for name, _ in shown[0]], [[text for _, text in row] for row in shown])}</div>
{_remarks(lines)}
<div class="charts">{"".join(figures)}</div></section>"""


def _remarks(lines: Sequence[Line]) -> str:
    found = "".join(f"<li>{escape(text)}</li>" for text in remarks(lines))
    return f"<ul class='remarks'>{found}</ul>" if found else ""


def _curves(title: str, lines: Sequence[Line], label: str, *, log: bool) -> str:
    drawn: dict[str, list[Point]] = {}
    for line in lines:
        if line.kl is not None:
            density = 1.0 if line.density is None else line.density
            point = Point(density, line.kl.mean, line.kl.half, line.variant)
            drawn.setdefault(family_of(line.variant), []).append(point)
    return charts.curves(
        f"{title} against density",
        [Curve(name, points) for name, points in drawn.items()],
        "density: share of the visible blocks that is computed",
        label,
        log_y=log,
    )


def _score_curves(lines: Sequence[Line], tasks: Sequence[str]) -> list[str]:
    figures = []
    for task in tasks:
        drawn: dict[str, list[Point]] = {}
        for line in lines:
            if task in line.scores:
                density = 1.0 if line.density is None else line.density
                point = Point(density, line.scores[task].mean, None, line.variant)
                drawn.setdefault(family_of(line.variant), []).append(point)
        scored = [line.scores[task] for line in lines if task in line.scores]
        if scored:
            figures.append(
                charts.curves(
                    f"{task}: score against density",
                    [Curve(name, points) for name, points in drawn.items()],
                    "density: share of the visible blocks that is computed",
                    "score",
                    level=("dense", scored[0].dense),
                    y_range=(0.0, 1.0),
                )
            )
    return figures


def _positions(rows: Sequence[Row], tokens: int) -> str:
    """KL by position in the longest windows."""
    measured = [row for row in rows if row["part"] == FIDELITY and row["tokens"] == tokens]
    variants = list(dict.fromkeys(row["variant"] for row in measured if row["density"] is not None))[:MAX_ALONG]
    if not variants:
        return ""

    def drawn(name: str, minus: str | None) -> list[Curve]:
        found = []
        for variant in variants:
            of_variant = [row for row in measured if row["variant"] == variant]
            parts = len(of_variant[0][name])
            points = []
            for part in range(parts):
                values = [row[name][part] - (row[minus][part] if minus else 0.0) for row in of_variant]
                points.append(Point((part + 0.5) / parts * tokens, statistics.fmean(values), None, variant))
            found.append(Curve(spaced(variant), points))
        return found

    kl = charts.curves("KL by position", drawn("kl_by_position", None), "token", "nats per token", log_y=True)
    rise = charts.curves(
        "Loss by position, above dense", drawn("nll_by_position", "dense_nll_by_position"), "token", "nats per token"
    )
    return f"""<section><h2>Where in the window</h2><p>Windows of {tokens} tokens, in stretches. Early tokens see few
blocks, and all of them are kept; what is lost shows later.</p><div class="charts">{kl}{rise}</div></section>"""


def _needle_maps(rows: Sequence[Row]) -> str:
    """Depth by length, one map for each variant."""
    needles = [row for row in rows if row["part"] == "needle"]
    if not needles:
        return ""
    variants = [None, *dict.fromkeys(row["variant"] for row in needles if not is_stock(row))]
    lengths = sorted({row["tokens"] for row in needles})
    depths = sorted({row["depth"] for row in needles})
    maps = []
    for variant in variants[:MAX_MAPS]:
        values: list[list[float | None]] = []
        for depth in depths:
            line: list[float | None] = []
            for tokens in lengths:
                found = [
                    row["score"]
                    for row in needles
                    if (None if is_stock(row) else row["variant"], row["depth"], row["tokens"])
                    == (variant, depth, tokens)
                ]
                line.append(statistics.fmean(found) if found else None)
            values.append(line)
        names = [f"{depth:.0%}" for depth in depths]
        maps.append(charts.heat_map(variant or DENSE, names, [str(tokens) for tokens in lengths], values, "depth"))
    left = "" if len(variants) <= MAX_MAPS else f"<p>{len(variants) - MAX_MAPS} further variants are in the rows.</p>"
    return f"""<section><h2>Needles</h2><p>A fact is hidden in the text at a depth (0 % is the start) and asked for
behind it; the share of right answers, for each depth and length.</p><div class="charts">{"".join(maps)}</div>{left}
</section>"""


def _words(tasks: Sequence[str]) -> dict[str, str]:
    words = {
        "density": "What was computed: kept blocks as a share of those the queries may see, over all calls that went "
        "sparse. A dash where none did.",
        "KL": "How far the distribution of the next token is from the dense model's, in nats, averaged over tokens. "
        "0 is equal. It notices every change; perplexity does not, and may even improve when attention is cut.",
        "same token": "How often the most likely next token is the dense model's: what greedy decoding would notice.",
        "perplexity, against dense": "How well the text is predicted, and how much worse than by the dense model.",
        "±": "95 % intervals over the windows, by Student's t; differences are paired with the dense model.",
        "oracle": "The same rule on the attention that blocks really hold: no score can choose better under that rule.",
    }
    if tasks:
        words["scores"] = (
            "Share of right answers, the dense model's in brackets. The prompt is read sparsely, the answer is decoded "
            "densely, as in generation. A needle is right when each token of the answer is the most likely one."
        )
    return words
