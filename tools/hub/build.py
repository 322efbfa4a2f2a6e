"""The library as a kernel of the Hugging Face hub: ``python tools/hub/build.py FOLDER`` (build/kernel unless told).

    FOLDER/LICENSE
    FOLDER/build/torch-universal/
        __init__.py         the public names, from tools/hub/kernel.py
        *.py, backends/     the modules these need, and no others
        sparge/             the same names, for clients that look for a folder of the kernel's name
        metadata.json       name, id, version, licence, digests

``--source ORGANISATION/NAME`` writes what the hub's builder makes a repository of that name from: FOLDER/build.toml,
FOLDER/flake.nix and the same modules in FOLDER/torch-ext/sparge.

The hub's client imports the package under its id, so no module may call the package by its name: imports of it become
relative ones, and the namespace of its operators is the package's name (`sparge._ops`). The id is made of what the
files hold. So the library and any number of builds live in one process, each with its own operators, counts and caches.

What cannot be turned round safely is refused: ``import sparge``, and strings that are names of modules or operators.
"""

from __future__ import annotations

import argparse
import ast
import base64
import functools
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "sparge"
PACKAGE = "sparge"
VARIANT = "torch-universal"
LICENSE = "apache-2.0"
VERSION = 1
"""Of the kernel, for ``get_kernel(..., version=1)``. It rises when a public name goes, or means something else."""
KERNEL = Path(__file__).with_name("kernel.py")
"""Becomes the package's own module."""
NAME = re.compile(rf"{PACKAGE}(\.\w+)*\.?|{PACKAGE}::.*", re.DOTALL)
"""A string that would lead back to the installed library."""
FOR_OLD_CLIENTS = '''\
"""The names of the package in the folder above, for versions of `kernels` that look for them here."""

import importlib.util
import sys
from pathlib import Path

if {id!r} not in sys.modules:
    _spec = importlib.util.spec_from_file_location({id!r}, Path(__file__).parents[1] / "__init__.py")
    sys.modules[{id!r}] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[{id!r}])

globals().update({{name: getattr(sys.modules[{id!r}], name) for name in sys.modules[{id!r}].__all__}})
__all__ = sys.modules[{id!r}].__all__
'''
BUILD_TOML = """\
[general]
name = "{name}"
version = {version}
edition = 5
license = "{license}"
backends = ["cpu", "cuda"]

[general.hub]
repo-id = "{repository}"

[torch-noarch]
"""
FLAKE_NIX = """\
{
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""


def main() -> None:
    """Build, and say where."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "kernel")
    parser.add_argument("--source", metavar="ORGANISATION/NAME", help="write what the hub's builder reads, besides")
    arguments = parser.parse_args()
    variant = build(arguments.folder)
    print(f"{variant}: {json.loads((variant / 'metadata.json').read_text())['id']}")
    if arguments.source is not None:
        print(write_source(arguments.folder, arguments.source))


def build(folder: Path, source: Path = SOURCE) -> Path:
    """Write a kernel repository, in place of the build that was there.

    Args:
        folder: of the repository.
        source: the package's folder.

    Returns:
        The folder of the variant.

    Raises:
        ValueError: a module that cannot be turned round.
    """
    files = modules(source)
    identity = f"_{PACKAGE}_{digest_of(files)}"
    files[f"{PACKAGE}/__init__.py"] = FOR_OLD_CLIENTS.format(id=identity)
    variant = folder / "build" / VARIANT
    write(variant, files)
    metadata = {
        "name": PACKAGE,
        "id": identity,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": "cuda"},  # one must be named; a universal variant is taken on every other, too
        "digest": {"algorithm": "sha256", "files": {name: _sha256(text) for name, text in sorted(files.items())}},
    }
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")
    (variant / "metadata.json").write_bytes(json.dumps(metadata, indent=2).encode() + b"\n")
    return variant


def write_source(folder: Path, repository: str, source: Path = SOURCE) -> Path:
    """Write what the hub's builder reads, in place of what was there.

    Args:
        folder: of the project.
        repository: where it is to be published, "organisation/name".
        source: the package's folder.

    Returns:
        The folder of the modules. Instead of `sparge._ops` the hub's builder puts one of its own.
    """
    files = modules(source)
    del files["_ops.py"]
    write(folder / "torch-ext" / PACKAGE, files)
    general = {"name": PACKAGE, "version": VERSION, "license": LICENSE, "repository": repository}
    (folder / "build.toml").write_bytes(BUILD_TOML.format(**general).encode())
    (folder / "flake.nix").write_bytes(FLAKE_NIX.encode())
    return folder / "torch-ext" / PACKAGE


def modules(source: Path) -> dict[str, str]:
    """All modules of the kernel, by the names of their files."""
    files = {"__init__.py": relative(read(KERNEL), PACKAGE, is_package=True)}
    for module in needed(source):
        path = path_of(module, source)
        text = relative(read(path), module, is_package=path.name == "__init__.py")
        files[path.relative_to(source).as_posix()] = text
    return files


def write(folder: Path, files: dict[str, str]) -> None:
    """Write a folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())


def read(path: Path) -> str:
    """A source file."""
    return path.read_text(encoding="utf-8")


def digest_of(files: dict[str, str]) -> str:
    """A few digits that differ where any name or content does."""
    whole = hashlib.sha256()
    for name, text in sorted(files.items()):
        whole.update(f"{name}\0{len(text)}\0{text}".encode())
    return whole.hexdigest()[:16]


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def needed(source: Path) -> list[str]:
    """Names of all modules that the public names need, wherever in the code they are imported."""
    found: set[str] = set()
    waiting = backends(source) | imported(read(KERNEL), source)
    while waiting:
        module = waiting.pop()
        parts = module.split(".")
        found |= {module}
        parents = {".".join(parts[:length]) for length in range(2, len(parts))}
        waiting |= (parents | imported(read(path_of(module, source)), source)) - found
    return sorted(found - {PACKAGE})


def backends(source: Path) -> set[str]:
    """Modules that no import names: those of the backends, by `BACKENDS` of `options.common`."""
    for node in parsed(read(source / "options" / "common.py")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BACKENDS":
            return {f"{PACKAGE}.backends.{name}" for name in ast.literal_eval(node.value)}
    raise ValueError("options/common.py: expected BACKENDS, the names of all backends, got none")


@functools.cache
def parsed(text: str) -> ast.Module:
    """The tree of a module, which nobody changes."""
    return ast.parse(text)


def imported(text: str, source: Path) -> set[str]:
    """Names of the package's modules that a module imports."""
    modules = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names if is_ours(alias.name)}
        elif isinstance(node, ast.ImportFrom) and node.module and is_ours(node.module):
            modules |= {node.module} - {PACKAGE}
            inside = (f"{node.module}.{alias.name}" for alias in node.names)
            modules |= {module for module in inside if exists(module, source)}
    return modules


def is_ours(module: str) -> bool:
    """Whether a name is that of the package, or of something in it."""
    return module.partition(".")[0] == PACKAGE


def exists(module: str, source: Path) -> bool:
    """Whether a name is that of a module, and not of something in one."""
    base = source.joinpath(*module.split(".")[1:])
    return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()


def path_of(module: str, source: Path) -> Path:
    """The file of a module."""
    base = source.joinpath(*module.split(".")[1:])
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def relative(text: str, module: str, *, is_package: bool = False) -> str:
    """A module's text with relative imports of the package, and all else as it was.

    Raises:
        ValueError: it calls the package by its name in another way.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]
    tree = parsed(text)
    _check(tree, module)
    lines = text.splitlines(keepends=True)
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        if isinstance(node, ast.ImportFrom):
            if node.module is None or node.level or not is_ours(node.module):
                continue
            head, new = rf"from\s+{re.escape(node.module)}\s+import", f"from {_path(node.module, package)} import"
        else:
            ours = [alias for alias in node.names if is_ours(alias.name)]
            if not ours:
                continue
            (alias, *others), where = node.names, f"{module}, line {node.lineno}"
            if others or alias.asname is None or alias.name == PACKAGE:
                raise ValueError(f"{where}: expected `from {PACKAGE}... import ...`, got `{ast.unparse(node)}`")
            parent, _, name = alias.name.rpartition(".")
            head = rf"import\s+{re.escape(alias.name)}"
            new = f"from {_path(parent, package)} import {name}"
        start = len(lines[node.lineno - 1].encode()[: node.col_offset].decode())
        line = lines[node.lineno - 1]
        changed, count = re.subn(rf"\A{head}\b", new, line[start:])
        if count != 1:
            raise ValueError(f"{module}, line {node.lineno}: expected an import on one line, got {line.strip()!r}")
        lines[node.lineno - 1] = line[:start] + changed
    return "".join(lines)


def _path(module: str, package: list[str]) -> str:
    """A module as seen from a package: ``..config``."""
    parts = module.split(".")
    shared = 0
    while shared < min(len(parts), len(package)) and parts[shared] == package[shared]:
        shared += 1
    return "." * (len(package) - shared + 1) + ".".join(parts[shared:])


def _check(tree: ast.Module, module: str) -> None:
    """Raise ValueError where something other than an import leads to the package by its name."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for where, what in _mentions(tree, documentation):
        raise ValueError(f"{module}, line {where}: expected no name of the package or its operators, got {what}")


def _mentions(tree: ast.AST, documentation: set[int]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            if NAME.fullmatch(node.value):
                yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Name) and node.id == PACKAGE:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and node.attr == PACKAGE:
            yield node.lineno, ast.unparse(node)


if __name__ == "__main__":
    main()
