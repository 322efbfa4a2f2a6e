"""Tables for a terminal of any width."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def print_fitting(console: Console, table: Table, rows: Sequence[Sequence[tuple[str, str]]]) -> None:
    """The table, or where the console is too narrow for its columns the same cells, one to a line."""
    if Measurement.get(console, console.options.update(width=1000), table).maximum <= console.width:
        console.print(table)
        return
    for cells in rows:
        console.print()
        for column, text in cells:
            if text:
                console.print(f"{column}: {text}", highlight=False, markup=False, soft_wrap=True)
    console.print()


def empty_table(columns: Sequence[str], left: Sequence[str], padding: int = 1) -> Table:
    """A table with headings of two lines, to fit 80 columns; numbers stand right."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, padding, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        heading = column.replace("speed-up", "speed-\nup").replace(" ", "\n", 1)
        table.add_column(heading, justify="left" if column in left else "right", no_wrap=True)
    return table
