"""What `sparge eval llm` does: load, measure with a progress bar, print a table, write rows and a page."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sparge._version import __version__
from sparge.console import empty_table, print_fitting, told_progress
from sparge.evaluate.language.load import load_model, load_tokenizer
from sparge.evaluate.language.page import render_page
from sparge.evaluate.language.run import FIDELITY, KEY, Settings, evaluate_model, pieces, rows_of, runs
from sparge.evaluate.language.summary import cells, lines_of, remarks
from sparge.evaluate.language.texts import read_text
from sparge.evaluate.rows import Rows
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
    """Evaluate a model by name; see the options of the command.

    Raises:
        ImportError, ValueError: something is missing, or not what was expected.
    """
    check_labels(variants)
    content = read_text(text)
    tokenizer = load_tokenizer(name)
    work = list(pieces(settings, tokenizer, content))
    model = load_model(name, device, dtype)
    _check_positions(model, settings)
    if force:
        variants = [variant.forced(torch.device(device)) for variant in variants]
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
        console.print(f"{rows.found} rows of an earlier run are taken over, {left} runs are left", highlight=False)
    with told_progress(console) as tell:
        done = itertools.count()
        evaluate_model(model, tokenizer, variants, work, rows, lambda line: tell(line, next(done), left))
    shown = rows_of(variants, work, rows)
    _print(console, shown)
    output.write_text(render_page(shown, name, shlex.join(command)), encoding="utf-8")
    for path in filter(None, (output, json_path)):
        console.print(f"Wrote {path}", soft_wrap=True, highlight=False, markup=False)


def _check_positions(model: Any, settings: Settings) -> None:
    """Beyond the positions it was made for, a model's figures mean nothing."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and max(settings.tokens) > most:
        raise ValueError(f"tokens: expected at most {most}, the model's max_position_embeddings, got {settings.tokens}")


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
    for text in remarks(lines):
        console.print(f"- {text}", highlight=False, markup=False)
