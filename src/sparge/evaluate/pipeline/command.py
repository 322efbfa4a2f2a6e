"""The work of `sparge eval pipeline`: load, measure with a progress bar, print a table, write rows and a page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sparge.console import empty_table, print_fitting, told_progress
from sparge.evaluate.pipeline.load import load
from sparge.evaluate.pipeline.page import render_page
from sparge.evaluate.pipeline.run import Progress, Result, evaluate_pipeline
from sparge.evaluate.pipeline.summary import cells, lines_of, remarks
from sparge.evaluate.variants import Variant


def run(
    name: str,
    variants: Sequence[Variant],
    *,
    prompts: Sequence[str],
    seeds: Sequence[int],
    arguments: Mapping[str, Any],
    device: str,
    dtype: torch.dtype,
    errors: bool,
    force: bool,
    trust_remote_code: bool,
    offload: bool = False,
    output: Path,
    json_path: Path,
    command: Sequence[str],
    console: Console,
) -> None:
    """Evaluate a pipeline by name; the arguments are the options of the command.

    Raises:
        ImportError: a package is missing.
        ValueError: an option does not fit the pipeline.
    """
    pipe = load(name, device, dtype, trust_remote_code, offload)
    if force:
        variants = [variant.forced(torch.device(device)) for variant in variants]
    with told_progress(console) as report:
        is_first = True

        def show(progress: Progress) -> None:
            nonlocal is_first
            if is_first and progress.found:
                console.print(f"{progress.found} rows of an earlier run are used", highlight=False)
            is_first = False
            report(progress.doing, progress.done, progress.total)

        result = evaluate_pipeline(
            pipe,
            variants,
            prompts=prompts,
            seeds=seeds,
            arguments=arguments,
            name=name,
            rows=json_path,
            errors=errors,
            progress=show,
        )
    print_result(console, result)
    output.write_text(render_page(result, shlex.join(command)), encoding="utf-8")
    for path in (output, json_path):
        console.print(f"Wrote {path}", soft_wrap=True, highlight=False, markup=False)


def print_result(console: Console, result: Result) -> None:
    """Print the table of the page and its remarks."""
    lines = lines_of(result)
    shown = [cells(line, lines) for line in lines]
    table = empty_table([column for column, _ in shown[0]], left=("variant", "ran"))
    for row in shown:
        table.add_row(*(text for _, text in row))
    print_fitting(console, table, shown)
    for text in remarks(result, lines):
        console.print(f"- {text}", highlight=False, markup=False)


def parse_argument(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE, the value as JSON where possible.

    Raises:
        ValueError: the name or the value is missing.

    Example:
        >>> parse_argument("guidance_scale=3.5"), parse_argument("negative_prompt=blurred, dark")
        (('guidance_scale', 3.5), ('negative_prompt', 'blurred, dark'))
    """
    name, equals, value = text.partition("=")
    if not name.isidentifier() or not equals:
        raise ValueError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
