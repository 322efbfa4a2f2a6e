"""What `sparge eval llm` does: load, measure with a progress bar, print a table, write rows and a page."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sparge._version import __version__
from sparge.console import empty_table, print_fitting
from sparge.evaluate.language.load import load
from sparge.evaluate.language.page import render_page
from sparge.evaluate.language.run import KEY, Settings, evaluate_model, pieces, rows_of, runs
from sparge.evaluate.language.summary import FIDELITY, cells, lines_of
from sparge.evaluate.language.texts import read_text
from sparge.evaluate.rows import Rows
from sparge.evaluate.variants import Variant


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
    """Evaluate a model by name; see the options of the command.

    Raises:
        ImportError, ValueError: something is missing, or not what was expected.
    """
    content = read_text(text)
    model, tokenizer = load(name, device, dtype)
    if force:
        variants = [variant.forced(torch.device(device)) for variant in variants]
    described = {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "sparge": __version__,
        "torch": torch.__version__,
        "text": text or "Python's language reference",
        "text_hash": hashlib.sha256(content.encode()).hexdigest()[:12],
        "seed": settings.seed,
    }
    rows = Rows(json_path, described, KEY)
    work = list(pieces(settings, tokenizer, content))
    left = runs(variants, work, rows)
    if rows.found:
        console.print(f"{rows.found} rows of an earlier run are taken over, {left} runs are left", highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=left)

        def progress(line: str) -> None:
            bar.update(task, description=line)
            bar.advance(task)

        evaluate_model(model, tokenizer, variants, work, rows, progress)
    shown = rows_of(variants, work, rows)
    _print(console, shown)
    output.write_text(render_page(shown, name, shlex.join(command)), encoding="utf-8")
    for path in filter(None, (output, json_path)):
        console.print(f"Wrote {path}", soft_wrap=True, highlight=False, markup=False)


def _print(console: Console, rows: Sequence[dict[str, object]]) -> None:
    tasks = list(dict.fromkeys(str(row["part"]) for row in rows if row["part"] != FIDELITY))
    lines = lines_of(rows)
    for tokens in sorted({line.tokens for line in lines}):
        shown = [cells(line, tasks=tasks) for line in lines if line.tokens == tokens]
        table = empty_table([column for column, _ in shown[0]], left=("variant", "ran"))
        for row in shown:
            table.add_row(*(text for _, text in row))
        console.print(f"{tokens} tokens", style="bold")
        print_fitting(console, table, shown)
