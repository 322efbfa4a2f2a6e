"""Markdown tables, and the machine, versions and commits of their rows."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def markdown(header: list[str], body: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cpu_source(rows: list[Row]) -> str:
    """Return machine, versions and commits of the rows."""
    machine = ", ".join(sorted({f"{row['processor']}, {row['threads']} threads, {row['system']}" for row in rows}))
    torch = ", ".join(sorted({row["torch"] for row in rows}))
    commit = ", ".join(sorted({row["commit"] for row in rows}))
    return f"{machine}; torch {torch}; commit {commit}."


def gpu_source(rows: list[Row]) -> str:
    """Return device, versions and commits of the rows."""
    parts = [("", "gpu"), ("torch ", "torch"), ("triton ", "triton"), ("CUDA ", "cuda")]
    parts += [("FlashAttention-4 ", "flash_attn_4"), ("commit ", "commit")]
    known = [(word, {str(row[field]) for row in rows if row.get(field) is not None}) for word, field in parts]
    return "; ".join(word + ", ".join(sorted(values)) for word, values in known if values) + "."
