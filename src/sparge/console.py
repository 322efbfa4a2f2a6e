"""Console output: plain text, tables that fit the width of the terminal, and progress with or without a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

LINE_SECONDS = 30.0
"""Minimum time between two lines of progress without a terminal."""


def plain_console(stderr: bool = False) -> Console:
    """Return a console that prints text as it is, because "[plot]" and paths would be parsed as markup."""
    return Console(markup=False, highlight=False, stderr=stderr)


def print_written(console: Console, *paths: object) -> None:
    """Print a line for each file that was written; None is ignored."""
    for path in paths:
        if path is not None:
            console.print(f"Wrote {path}", soft_wrap=True)


@contextmanager
def show_progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows progress, given the current step, the number of finished steps and the total.

    On a terminal the function updates a progress bar. Otherwise it prints a line at most every `LINE_SECONDS`.
    """
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("")
            yield lambda step, done, total: bar.update(task, description=step, completed=done, total=total)
        return
    last = time.monotonic()

    def print_line(step: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            console.print(f"{done} of {total} done; {step}", soft_wrap=True)

    yield print_line


def print_table(
    console: Console, rows: Sequence[Sequence[tuple[str, str]]], left: Sequence[str], padding: int = 1
) -> None:
    """Print a table, or one cell per line if the console is too narrow.

    Args:
        rows: pairs (column, text) of each row.
        left: columns that are left-aligned.
        padding: number of spaces between columns.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, padding, 0, 0), pad_edge=False, show_edge=False)
    for column, _ in rows[0]:
        heading = column.replace("speed-up", "speed-\nup").replace(" ", "\n", 1)  # two lines, to fit into 80 columns
        table.add_column(heading, justify="left" if column in left else "right", no_wrap=True)
    for cells in rows:
        table.add_row(*(text for _, text in cells))
    if Measurement.get(console, console.options.update(width=1000), table).maximum <= console.width:
        console.print(table)
        return
    for cells in rows:
        console.print()
        for column, text in cells:
            if text:
                console.print(f"{column}: {text}", soft_wrap=True)
    console.print()
