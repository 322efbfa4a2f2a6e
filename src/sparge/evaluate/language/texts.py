"""The text to evaluate a language model on: a file, a folder, WikiText, or Python's language reference."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from torch import Tensor

WIKITEXT = ("Salesforce/wikitext", "wikitext-103-raw-v1")


def read_text(source: str | None) -> str:
    """Return the whole text of a source.

    Args:
        source: a file, a folder of .txt files, "wikitext" (from the hub, with the package datasets), or None for
            Python's language reference, which is part of the standard library.

    Raises:
        ValueError: the source does not exist or has no text.
    """
    if source is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    path = Path(source)
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise ValueError(f"text: expected .txt files in {source!r}, got none")
        return "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if source == "wikitext":
        return "".join(row["text"] for row in from_hub(*WIKITEXT, split="test"))
    raise ValueError(f"text: expected a file, a folder or 'wikitext', got {source!r}")


def describe_text(source: str | None) -> str:
    """Return a description of the text that `read_text` returns."""
    return f"Python {platform.python_version()}'s language reference" if source is None else source


def from_hub(*name: str, split: str) -> Any:
    """Load a data set from the hub.

    Raises:
        ValueError: the package datasets is missing, or the hub cannot be reached.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f"{name[0]}: expected the package datasets (pip install datasets), or a local file") from error
    try:
        return load_dataset(*name, split=split)
    except Exception as error:  # network problems raise many types of errors
        raise ValueError(f"{name[0]}: expected a data set on the hub, got {error!r}; use a local file") from error


def windows_of(tokens: Tensor, length: int, count: int) -> list[Tensor]:
    """Return up to ``count`` consecutive windows (1, length) of tokens (N,).

    Raises:
        ValueError: there are fewer tokens than a window has.

    Example:
        >>> import torch
        >>> [window.tolist() for window in windows_of(torch.arange(7), 3, 5)]
        [[[0, 1, 2]], [[3, 4, 5]]]
    """
    if len(tokens) < length:
        raise ValueError(f"text: expected {length} tokens or more, got {len(tokens)}; use a longer text")
    return [tokens[None, start : start + length] for start in range(0, len(tokens) - length + 1, length)][:count]
