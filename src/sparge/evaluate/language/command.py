"""The work of `sparge eval llm`: load, measure with a progress bar, print tables, write rows and a page."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from sparge._version import __version__
from sparge.console import empty_table, print_fitting, told_progress
from sparge.evaluate.language.lengths import check_lengths
from sparge.evaluate.language.load import load_model, load_tokenizer
from sparge.evaluate.language.page import render_page
from sparge.evaluate.language.run import FIDELITY, KEY, NOISE, Settings, evaluate_model, pieces, rows_of, runs
from sparge.evaluate.language.summary import cells, explanations, lines_of, remarks
from sparge.evaluate.language.texts import describe_text, read_text
from sparge.evaluate.rows import Row, Rows
from sparge.evaluate.variants import Variant, check_labels
from sparge.profile import fingerprint


def run(
    name: str,
    variants: Sequence[Variant],
    settings: Settings,
    *,
    text: str | None,
    device: str,
    dtype: torch.dtype,
    force: bool,
    output: Path,
    json_path: Path | None,
    command: Sequence[str],
    console: Console,
) -> None:
    """Evaluate a model by name; the arguments are the options of the command.

    Raises:
        ImportError: a package is missing.
        ValueError: an option does not fit the model, the text or the device.
    """
    check_labels(variants)
    content = read_text(text)
    tokenizer = load_tokenizer(name)
    work = list(pieces(settings, tokenizer, content))
    model = load_model(name, device, dtype)
    if force:
        variants = [variant.forced(torch.device(device)) for variant in variants]
    check_lengths(model, variants, settings.tokens)
    described = {
        "model": name,
        "weights": fingerprint([model]),
        "dtype": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "sparge": __version__,
        "torch": torch.__version__,
    }
    rows = Rows(json_path, described, KEY)
    left = runs(variants, work, rows)
    if rows.found:
        console.print(f"{rows.found} rows of an earlier run are used, {left} runs are left", highlight=False)
    with told_progress(console) as report:
        done = itertools.count()
        evaluate_model(model, tokenizer, variants, work, rows, lambda line: report(line, next(done), left))
    shown = rows_of(variants, work, rows)
    source = describe_text(text)
    _print(console, shown, source)
    output.write_text(render_page(shown, name, shlex.join(command), source), encoding="utf-8")
    for path in filter(None, (output, json_path)):
        console.print(f"Wrote {path}", soft_wrap=True, highlight=False, markup=False)


def _print(console: Console, rows: Sequence[Row], source: str) -> None:
    tasks = [part for part in dict.fromkeys(str(row["part"]) for row in rows) if part not in (FIDELITY, NOISE)]
    lines = lines_of(rows)
    for tokens in sorted({line.tokens for line in lines}):
        at_length = [line for line in lines if line.tokens == tokens]
        shown = [cells(line, tasks=tasks) for line in at_length]
        table = empty_table([column for column, _ in shown[0]], left=("variant", "ran"))
        for row in shown:
            table.add_row(*(text for _, text in row))
        count = at_length[0].kl.values if at_length[0].kl is not None else 0
        windows = f"{count} window{'s' * (count != 1)} of " if count else ""
        console.print(f"{tokens} tokens, {windows}{source}", style="bold", highlight=False, markup=False)
        print_fitting(console, table, shown)
    for text in (*remarks(lines), *explanations(rows)):
        console.print(f"- {text}", highlight=False, markup=False)
