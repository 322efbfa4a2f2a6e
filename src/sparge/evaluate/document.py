"""The frame of an HTML page that loads nothing: head, style, body. Tables and notes that all pages share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sparge.evaluate.style import STYLE


def document(title: str, body: str, style: str = "") -> str:
    """A whole page."""
    return f"""<!doctype html>
<html lang="en-GB">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{STYLE}{style}</style>
</head>
<body>{body}
</body>
</html>
"""


def machine_line(row: Mapping[str, Any], *parts: str) -> str:
    """What a row was measured on: device, whatever the caller adds, dtype and versions."""
    device = row.get("gpu") or f"{row['processor']}, {row['threads']} threads"
    commit = f" ({row['commit']})" if row.get("commit") else ""
    versions = (f"torch {row['torch']}", f"sparge {row['sparge']}{commit}")
    return " / ".join((device, *parts, row["run"]["dtype"], *versions))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A plain table, the first column words, the others numbers."""
    heading = "".join(f"<th scope='col'>{escape(column)}</th>" for column in columns)
    lines = "".join(
        f"<tr><th scope='row'>{escape(row[0])}</th>"
        + "".join(
            f"<td data-label='{escape(column)}'>{escape(cell)}</td>"
            for column, cell in zip(columns[1:], row[1:], strict=True)
        )
        + "</tr>"
        for row in rows
    )
    told = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table class='figures'>{told}<thead><tr>{heading}</tr></thead><tbody>{lines}</tbody></table>"


def notes(words: Mapping[str, str]) -> str:
    """What the columns of a table mean."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in words.items())
    return f"<dl class='notes'>{items}</dl>"
