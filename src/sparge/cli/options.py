"""Options of the ``sparge`` command: parsers, and declarations that several subcommands share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

DTYPES = ("float32", "bfloat16", "float16")
MIN_TOKENS = 256
MAX_SEED = 2**63 - 1

# The base class of all command-line errors. Older versions of typer import click and newer ones vendor it, so the class
# has no import path that works in all versions.
UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")


def share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = float("nan")
    if not 0 < share <= 1:
        raise typer.BadParameter(f"expected a number in (0, 1], got {text}")
    return share


def dtype(text: str) -> str:
    if text not in ("auto", *DTYPES):
        raise typer.BadParameter(f"expected auto, {', '.join(DTYPES)}, got {text}")
    return text


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


def policy(text: str) -> Any:
    from sparge.policy import Policy

    try:
        return Policy.from_json(Path(text).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError) as error:
        raise typer.BadParameter(f"expected a file that Policy.to_json wrote, got {text!r} ({error})") from error


Device = Annotated[
    str, typer.Option(parser=device, metavar="NAME", help="auto, cuda or cpu; auto is cuda if available.")
]
Dtype = Annotated[str, typer.Option(parser=dtype, metavar="NAME", help="auto: bfloat16 on a GPU, float32 on a CPU.")]
Page = Annotated[Path, typer.Option("--output", parser=writable, metavar="PATH", help="Where to write the HTML page.")]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the random numbers.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Denoising steps; by default the pipeline's own number.")]
Text = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE",
        help="Text to evaluate on: a file, a folder of .txt files, or wikitext (from the hub). The default is Python's "
        "language reference, which needs no download.",
    ),
]


def resolve_device_and_dtype(device: str, dtype: str) -> tuple[str, Any]:
    """Resolve "auto": a GPU with bfloat16 if there is one, else the CPU with float32. Returns a torch dtype."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    return device, getattr(torch, dtype)


@contextmanager
def errors_as_usage(command: str, advice: str, rows: Path | None = None) -> Iterator[None]:
    """Report invalid input, a lack of memory (with ``advice``) and Ctrl-C as one line.

    Args:
        rows: the file that keeps the finished rows of an interrupted command.
    """
    import torch

    try:
        yield
    except (ImportError, NotImplementedError, ValueError) as error:
        raise UsageError(f"{command}: {error}") from error
    except torch.OutOfMemoryError as error:
        raise UsageError(f"{command}: out of memory; {advice}") from error
    except KeyboardInterrupt:
        kept = f": finished rows are in {rows}; run the same command to continue" if rows else ""
        typer.echo(f"Interrupted{kept}", err=True)
        raise typer.Exit(130) from None
