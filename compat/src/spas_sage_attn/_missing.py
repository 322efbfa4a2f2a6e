"""The error for names of the published package that sparge does not provide."""

from typing import NoReturn


def raise_missing(module: str, name: str, instead: str) -> NoReturn:
    """Raise an error for a missing name of a module. The ``__getattr__`` of the module calls this function.

    Raises:
        AttributeError: the name starts with two underscores. Python's import system looks up such names.
        ImportError: any other name.
    """
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    raise ImportError(
        f"{module}.{name}: expected a name that sparge provides, got another; use {instead} (docs/migration.md)"
    )
