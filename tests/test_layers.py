"""The layers of the library: allowed imports between packages, no cycles, a bounded depth, few root modules."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import sparge

SOURCE = Path(sparge.__file__).parent
MAX_ROOT_MODULES = 12
MAX_LEVELS = 12

MODEL = {"options", "masks", "call", "numerics"}
"""The lowest layers: the types that describe a call, and arithmetic on them."""
CORE = MODEL | {"backends", "dispatch", "policy", "stats"}
LIBRARY = CORE | {"api", "profile", "varlen", "_ops", "_version"}
ALLOWED = {
    "options": set(),
    "masks": {"options"},
    "call": {"options", "masks"},
    "numerics": {"options", "masks"},
    "reference": MODEL,
    "backends": MODEL | {"reference"},
    "stats": set(),
    "console": set(),
    "policy": {"options", "masks"},
    "dispatch": CORE | {"_ops"},
    "profile": {"options", "masks", "policy"},
    "api": CORE,
    "varlen": CORE | {"_ops"},
    "distributed": CORE,
    "integrations": LIBRARY | {"distributed"},
    "compat": LIBRARY | {"integrations"},
    "serving": LIBRARY | {"integrations"},
    "evaluate": LIBRARY | {"integrations", "reference", "console"},
    "calibration": LIBRARY | {"integrations", "evaluate"},
    "bench": LIBRARY | {"integrations", "evaluate", "distributed", "reference"},
    "demo": LIBRARY | {"integrations", "evaluate", "reference", "console"},
    "cli": LIBRARY | {"integrations", "evaluate", "calibration", "bench", "demo", "console"},
}
"""For each package and root module, the others that it may import."""
ALLOWED_BACKENDS = {"gpu": {"torch"}, "triton": {"gpu"}, "hopper": {"gpu"}}
"""For each package of `sparge.backends`, the others that it may import."""


@cache
def modules() -> dict[str, Path]:
    """Return the file of every module of the library, keyed by dotted name."""
    files = {}
    for path in SOURCE.rglob("*.py"):
        parts = ["sparge", *path.relative_to(SOURCE).with_suffix("").parts]
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


@cache
def imports_of(name: str) -> frozenset[str]:
    """Return the modules of the library that a module imports, also inside functions."""
    targets = set()
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            targets |= {f"{node.module}.{alias.name}" for alias in node.names}
    imported = set()
    for target in targets:
        parts = target.split(".")
        if parts[0] == "sparge":
            while ".".join(parts) not in modules():
                parts.pop()
            imported.add(".".join(parts))
    return frozenset(imported)


def package_of(name: str) -> str:
    return name.split(".")[1] if "." in name else name


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_packages_import_only_lower_layers(package: str) -> None:
    members = [name for name in modules() if package_of(name) == package]
    assert members, "the package exists"
    imported = {package_of(target) for name in members for target in imports_of(name)}
    assert imported - {package} <= ALLOWED[package]


def test_every_package_has_a_layer() -> None:
    assert {package_of(name) for name in modules()} == {*ALLOWED, "sparge", "__main__", "_version", "_ops"}


@pytest.mark.parametrize("name", sorted(name for name in modules() if name.count(".") > 2 and ".backends." in name))
def test_backends_do_not_import_each_other(name: str) -> None:
    backend = name.split(".")[2]
    others = {target.split(".")[2] for target in imports_of(name) if target.count(".") > 1 and ".backends." in target}
    assert others - {backend, "base", "output_layout"} <= ALLOWED_BACKENDS.get(backend, set())


def test_imports_have_no_cycles() -> None:
    order = tuple(TopologicalSorter({name: imports_of(name) - {name} for name in modules()}).static_order())
    assert len(order) == len(modules())


def test_the_packages_form_few_levels() -> None:
    """The level of a package is one more than the highest level of the packages that it imports."""
    graph: dict[str, set[str]] = {}
    for name in modules():
        graph.setdefault(package_of(name), set()).update(package_of(target) for target in imports_of(name))
    levels: dict[str, int] = {}
    for package in TopologicalSorter({name: below - {name} for name, below in graph.items()}).static_order():
        levels[package] = 1 + max((levels[below] for below in graph[package] - {package}), default=0)
    assert max(levels.values()) <= MAX_LEVELS, levels


def test_the_root_has_few_modules() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= MAX_ROOT_MODULES
