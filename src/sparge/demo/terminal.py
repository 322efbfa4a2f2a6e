"""The demo in a terminal: progress while it runs, then its table."""

from __future__ import annotations

from rich.console import Console

from sparge.console import empty_table, print_fitting, told_progress
from sparge.demo import measure
from sparge.demo.measure import Demo, Settings, table_cells
from sparge.demo.page import machine_parts


def run_with_progress(settings: Settings) -> Demo:
    """Run the demo and show the current step on stderr, if stderr is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return measure.run_demo(settings)
    with told_progress(console) as report:
        return measure.run_demo(settings, report)


def print_results(console: Console, result: Demo) -> None:
    """Print the machine, and a line for each input and score."""
    console.print(f"topk {result.settings.topk:g}; {'; '.join(machine_parts(result))}", highlight=False, markup=False)
    rows = [list(table_cells(row)) for row in result.rows]
    table = empty_table([column for column, _ in rows[0]], left=("input", "score"))
    previous = None
    for row in rows:
        (_, name), *cells = row
        if previous not in (None, name):
            table.add_row()
        table.add_row("" if name == previous else name, *(text for _, text in cells))
        previous = name
    print_fitting(console, table, rows)
