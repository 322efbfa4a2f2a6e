"""The text to evaluate a language model on: a file, a folder, WikiText, or Python's language reference."""

from __future__ import annotations

import platform
from pathlib import Path

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
        return _wikitext()
    raise ValueError(f"text: expected a file, a folder or 'wikitext', got {source!r}")


def describe_text(source: str | None) -> str:
    """Return a description of the text that `read_text` returns."""
    return f"Python {platform.python_version()}'s language reference" if source is None else source


def _wikitext() -> str:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f"text: expected the package datasets (pip install datasets) for {WIKITEXT[0]}") from error
    try:
        return "".join(row["text"] for row in load_dataset(*WIKITEXT, split="test"))
    except Exception as error:  # network problems raise many types of errors
        raise ValueError(f"text: expected {WIKITEXT[0]} on the hub, got {error!r}; use a local file") from error


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
