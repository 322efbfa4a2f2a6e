"""Markdown tables, with the machine, versions and commits of their rows."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def markdown(header: list[str], body: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_source(header: list[str], body: list[list[str]], rows: list[Row], note: str = "") -> str | None:
    """Return a Markdown table followed by a note and the source of its rows, or None without rows."""
    return f"{markdown(header, body)}\n\n{note}{source_of(rows)}" if rows else None


def source_of(rows: list[Row]) -> str:
    """Return device, versions and commits of the rows."""
    if all("gpu" in row for row in rows):
        parts = [("", "gpu"), ("torch ", "torch"), ("triton ", "triton"), ("CUDA ", "cuda")]
        parts.append(("FlashAttention-4 ", "flash_attn_4"))
    else:
        rows = [row | {"machine": "{processor}, {threads} threads, {system}".format(**row)} for row in rows]
        parts = [("", "machine"), ("torch ", "torch")]
    known = [(word, {str(row[name]) for row in rows if row.get(name) is not None}) for word, name in parts]
    known.append(("commit ", {row["commit"] for row in rows}))
    return "; ".join(word + ", ".join(sorted(values)) for word, values in known if values) + "."
