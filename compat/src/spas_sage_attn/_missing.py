"""What a name of the published package says that sparge does not serve."""

from typing import NoReturn


def refuse(module: str, name: str, instead: str) -> NoReturn:
    """Raise for a name that a module is asked for, as its ``__getattr__``.

    Raises:
        AttributeError: a name of Python's own, which its import system asks modules for.
        ImportError: any other.
    """
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    raise ImportError(
        f"{module}.{name}: expected a name that sparge serves, got one it does not; use {instead} (docs/migration.md)"
    )
