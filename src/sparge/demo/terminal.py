"""The demo in a terminal: progress while it runs, then its table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from sparge.console import empty_table, print_fitting, told_progress
from sparge.demo import measure
from sparge.demo.measure import Demo, Row, Settings, table_cells
from sparge.demo.page import machine_parts


def run_with_progress(settings: Settings) -> Demo:
    """Run the demo and show the current step on stderr, if stderr is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return measure.run_demo(settings)
    with told_progress(console) as report:
        return measure.run_demo(settings, lambda step: report(step.doing, step.done, step.total))


def print_results(console: Console, result: Demo) -> None:
    """Print the machine, and a line for each input and score."""
    console.print(f"topk {result.settings.topk:g}; {'; '.join(machine_parts(result))}", highlight=False, markup=False)
    print_fitting(console, _results_table(result.rows), [list(table_cells(row)) for row in result.rows])


def _results_table(rows: tuple[Row, ...]) -> Table:
    table = empty_table([column for column, _ in table_cells(rows[0])], left=("input", "score"))
    before = None
    for row in rows:
        if before not in (None, row.input):
            table.add_row()
        cells = [text for _, text in table_cells(row)]
        table.add_row("" if row.input == before else cells[0], *cells[1:])
        before = row.input
    return table
