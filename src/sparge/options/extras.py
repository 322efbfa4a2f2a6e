"""`install_command`: the command that installs an extra, for error messages."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def install_command(*extras: str) -> str:
    """Return the command that installs the packages of some extras.

    In a clone of the repository the command names the extras. Otherwise it names their packages, because sparge is not
    on a package index yet.
    """
    clone = PACKAGE.parents[1]
    if PACKAGE.parent.name == "src" and (clone / "pyproject.toml").is_file():
        place = "." if clone == Path.cwd() else str(clone)
        return f"pip install -e '{place}[{','.join(extras)}]'"
    packages = dict.fromkeys(name for extra in extras for name in _packages(extra))
    if not packages:
        return f"install the packages of the extra {' and '.join(map(repr, extras))}"
    return f"pip install {' '.join(map(repr, packages))}"


def _packages(extra: str) -> list[str]:
    """Return the requirements of an extra from the package metadata, or [] if the package has no metadata."""
    try:
        requirements = importlib.metadata.requires(PACKAGE.name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    parts = (requirement.partition(";") for requirement in requirements)
    return [name.strip() for name, _, marker in parts if re.search(rf"extra == ['\"]{extra}['\"]", marker)]
