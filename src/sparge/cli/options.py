"""Parsers of the options of the ``sparge`` command. Each returns a value or raises an error with the expected form."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import typer

MIN_TOKENS = 256
MAX_SEED = 2**63 - 1

# The base of every wrong-command-line error. typer vendors click since 0.2x and imports it before, so the class has no
# name that all versions share.
UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")


def share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = float("nan")
    if not 0 < share <= 1:
        raise typer.BadParameter(f"expected a number in (0, 1], got {text}")
    return share


def integer(text: str, low: int, high: int, expected: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if not low <= number <= high:
        raise typer.BadParameter(f"expected {expected}, got {text}")
    return number


def tokens(text: str) -> int:
    return integer(text, MIN_TOKENS, sys.maxsize, f"an integer of at least {MIN_TOKENS}")


def count(text: str) -> int:
    return integer(text, 1, sys.maxsize, "an integer of at least 1")


def seed(text: str) -> int:
    return integer(text, 0, MAX_SEED, "an integer in [0, 2**63)")


def device(text: str) -> str:
    if text not in ("auto", "cuda", "cpu"):
        raise typer.BadParameter(f"expected auto, cuda or cpu, got {text}")
    if text == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise typer.BadParameter(f"expected a CUDA device, got none (torch {torch.__version__}); see sparge doctor")
    return text


def writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise typer.BadParameter(f"expected a file to write, got the directory {text}")
    if not path.exists() and not path.parent.is_dir():
        raise typer.BadParameter(f"expected a file in a directory that exists, got {text}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"expected a file that can be written, got {text}")
    return path
