"""The error for names of the published package that sparge does not provide."""

from typing import NoReturn


def raise_missing(module: str, name: str, instead: str) -> NoReturn:
    """Raise for a name that a module does not have; called by its ``__getattr__``.

    Raises:
        AttributeError: the name starts with two underscores; Python's import system looks such names up.
        ImportError: any other name.
    """
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    raise ImportError(
        f"{module}.{name}: expected a name that sparge provides, got another; use {instead} (docs/migration.md)"
    )
