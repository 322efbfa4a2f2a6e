"""The demo as one HTML page that loads nothing and explains itself: idea, table, maps, words, how to repeat it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from sparge.demo.maps import HATCH, figure, legend, schematic
from sparge.demo.measure import Demo, InputResult, Row, table_cells
from sparge.evaluate.document import document
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, ceil_div

QUANTIZED = {
    "none": "without quantization",
    "int8_fp8": "with Q K in 8-bit integers and P V in 8-bit floating point",
    "int8_fp8_fast": "with Q K in 8-bit integers and P V in 8-bit floating point, without exponentials",
    "int8_fp16": "with Q K in 8-bit integers and P V in 16-bit floating point",
}


def render_page(demo: Demo) -> str:
    """The whole page as text."""
    settings = demo.settings
    body = f"""
<header>
<h1>Sparse attention, measured on this machine</h1>
<p class="lead">Attention compares every token with every other, yet most of the comparisons carry no weight. sparge
predicts which ones do, and computes only those. This page shows, on three made-up inputs, how much time that saves
against torch's dense attention, and what it costs in accuracy.</p>
<p class="machine">{_machine_line(demo)}</p>
</header>
<main>
<section>
<h2>The idea in three pictures</h2>
{_idea(demo)}
</section>
<section>
<h2>Time saved, and its price</h2>
{_table(demo.rows)}
{_table_notes(demo)}
</section>
<section>
<h2>What was kept</h2>
<p>The maps of the first head of each input. Queries run down, keys run right, and one pixel is one block of {BLOCK_Q}
queries by {BLOCK_K} keys. The first map of a row is the truth: how much of its queries' attention each block holds,
from computing all of it. The other two show what each score kept. A kept block has the blue it has in the truth; a
dropped block is red by the attention that was lost with it. So strong red is a loss, and faint blue in a mask is
a block computed for almost nothing; a good prediction shows little of either.</p>
{legend()}
{"".join(figure(result, _sentence(result)) for result in demo.inputs)}
</section>
<section>
<h2>Do it again</h2>
<p><code>{_command(demo)}</code></p>
<p>The same seed gives the same inputs on the same kind of device, and so the same maps, density, recall and error;
times depend on the machine. <code>--topk</code> sets the share of blocks to keep, <code>--json PATH</code> writes the
numbers, <code>sparge demo --help</code> lists the rest. In a program it is one call:</p>
<pre><code>out = sparge.attention(q, k, v, topk={settings.topk:g})</code></pre>
</section>
</main>
<footer><p class="machine">{_machine_line(demo)}</p></footer>"""
    return document(f"sparge demo: topk {settings.topk:g}, {settings.tokens} tokens", HATCH + body)


def machine_parts(demo: Demo) -> Iterator[str]:
    """Device, versions and sizes, for the page and the terminal."""
    machine, gpu, settings, row = demo.machine, demo.gpu, demo.settings, demo.rows[0]
    if gpu is None:
        yield f"{machine.processor}, {machine.threads} threads"
    else:
        yield f"{gpu.gpu}, CUDA {gpu.cuda}"
    yield f"backend {row.backend}" + ("" if row.quantization == "none" else f", {row.quantization}")
    yield f"{settings.dtype}, B 1, H {settings.heads}, D {settings.head_dim}"
    yield f"torch {machine.torch}"
    if gpu is not None:
        yield f"triton {gpu.triton}"
    yield f"sparge {machine.sparge}" + (f" ({machine.commit})" if machine.commit else "")


def _machine_line(demo: Demo) -> str:
    system = (demo.machine.system, f"Python {demo.machine.python}")
    return " <i>/</i> ".join(escape(part) for part in (*machine_parts(demo), *system))


def _command(demo: Demo) -> str:
    settings = demo.settings
    return escape(
        f"sparge demo --device {settings.device} --topk {settings.topk:g} --tokens {settings.tokens} "
        f"--heads {settings.heads} --seed {settings.seed}"
    )


def _idea(demo: Demo) -> str:
    settings = demo.settings
    tokens = settings.tokens
    rows, columns = ceil_div(tokens, BLOCK_Q), ceil_div(tokens, BLOCK_K)
    steps = (
        (
            "The map",
            f"Each token asks a question (its query) of every token's key. The answers fill a square: a row for each "
            f"query, a column for each key, coloured where a query attends. At {tokens} tokens that is "
            f"{tokens**2 / 1e6:.0f} million numbers for every head.",
        ),
        (
            "The blocks",
            f"Hardware works on tiles, so the map is cut into blocks of {BLOCK_Q} queries by {BLOCK_K} keys: "
            f"{rows} x {columns} of them here. A look at a summary of each block predicts how much attention it holds. "
            f"That costs little, because blocks are few.",
        ),
        (
            "The kept",
            f"Of all heads and rows the best {settings.topk:.0%} of the blocks are kept (topk {settings.topk:g}) and "
            "computed as usual; the others are skipped as if they held nothing. Nothing is trained, and the prediction "
            "is made anew for every call.",
        ),
    )
    items = "".join(
        f"<li>{schematic(number)}<h3>{number}. {title}</h3><p>{text}</p></li>"
        for number, (title, text) in enumerate(steps, start=1)
    )
    return f"<ol class='idea'>{items}</ol>"


def _sentence(result: InputResult) -> str:
    """What the default score did on an input, in words."""
    row = result.rows[0]
    cells = dict(table_cells(row))
    needles = ""
    if row.needle_mean is not None:
        needles = f" Of the needles' attention {row.needle_mean:.0%} was kept."
    return (
        f"With the score {row.score}: {cells['dense']} became {cells['sparse']}, {cells['speed-up']} as fast, by "
        f"computing {cells['density']} of the blocks. They hold {cells['mass recall']} of the attention, and the "
        f"output is {row.error:.2%} off.{needles}"
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
    clock = "" if demo.gpu is None else ", by CUDA events"
    first = demo.rows[0]
    kind = QUANTIZED.get(first.quantization, f"with 8-bit products ({first.quantization})")
    notes = [
        (
            "dense, sparse",
            f"Time of one call, {took}{clock}. Dense is torch's own attention in {first.dtype}. Sparse is sparge, "
            f"backend {first.backend}, {kind}; it includes the prediction.",
        ),
        ("speed-up", "Dense time over sparse time."),
        (
            "density",
            "What was computed: kept blocks as a share of those the queries may see. Lower is less work. It is "
            "topk, but for short causal inputs, where the first key block and the diagonal, which are kept whatever "
            "their score, are more than that.",
        ),
        (
            "mass recall",
            "What was found: the share of all attention (the softmax's probability) that lies in the kept blocks. "
            "100% means that nothing of weight was skipped.",
        ),
        (
            "L1 error",
            "What it cost: how far the output is from the dense one, as the sum of absolute differences over the sum "
            "of absolute values. 0.01 is 1%.",
        ),
        (
            "needles",
            "Whether single facts survive: the share of the needles' own attention that was kept, over all heads, as "
            "the mean and for the worst needle.",
        ),
        (
            "score",
            "How blocks are ranked. <b>mean</b> is the paper's: the mean query against the mean key. <b>moment</b>, "
            "the default, takes sampled queries against the mean and the variance of each key block, and so notices a "
            "few strong keys among many weak ones.",
        ),
        (
            "inputs",
            "Made from a seed, because the truth must be known: text with needles, a video's smooth field, and noise, "
            "where no method can save work without loss.",
        ),
    ]
    items = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in notes)
    return f"<dl class='notes'>{items}</dl>"
