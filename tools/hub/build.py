"""Build the library as a kernel for the Hugging Face Hub: ``python tools/hub/build.py [FOLDER]``.

    FOLDER/LICENSE
    FOLDER/build/torch-universal/
        __init__.py         the public names, from tools/hub/kernel.py
        *.py, backends/     only the modules that these names need
        metadata.json       name, id, version, license, digests

``--source ORGANIZATION/NAME`` also writes the input of the Hub's own builder for a repository of that name:
FOLDER/build.toml, FOLDER/flake.nix and the same modules in FOLDER/torch-ext/sparge.

The Hub's client imports the package under its id, so no module may refer to the package by name. Imports of the package
become relative, and its operators are registered under the package's name (`sparge._ops`). The id is a hash of the
files. The library and any number of builds can therefore be loaded in one process, each with its own operators,
counters and caches.

Constructs that cannot be rewritten safely raise ValueError: ``import sparge``, and strings that name modules or
operators.
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
"""Version of the kernel, for ``get_kernel(..., version=1)``. Increase it when a public name is removed or changed."""
KERNEL = Path(__file__).with_name("kernel.py")
"""Source of the package's ``__init__.py``."""
NAME = re.compile(rf"{PACKAGE}(\.\w+)*\.?|{PACKAGE}::.*", re.DOTALL)
"""A string that refers to the installed library."""
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
    """Build the kernel and print its folder and id."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "kernel")
    parser.add_argument("--source", metavar="ORGANIZATION/NAME", help="also write the input of the Hub's builder")
    arguments = parser.parse_args()
    variant = build(arguments.folder)
    print(f"{variant}: {json.loads((variant / 'metadata.json').read_text())['id']}")
    if arguments.source is not None:
        print(write_source(arguments.folder, arguments.source))


def build(folder: Path, source: Path = SOURCE) -> Path:
    """Write a kernel repository and replace any previous build.

    Args:
        folder: folder of the repository.
        source: folder of the package.

    Returns:
        The folder of the variant.

    Raises:
        ValueError: a module cannot be rewritten safely.
    """
    files = modules(source)
    identity = f"_{PACKAGE}_{digest_of(files)}"
    variant = folder / "build" / VARIANT
    write(variant, files)
    metadata = {
        "name": PACKAGE,
        "id": identity,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": "cuda"},  # required field; a universal variant is loaded on any backend
        "digest": {"algorithm": "sha256", "files": {name: _sha256(text) for name, text in sorted(files.items())}},
    }
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")
    (variant / "metadata.json").write_bytes(json.dumps(metadata, indent=2).encode() + b"\n")
    return variant


def write_source(folder: Path, repository: str, source: Path = SOURCE) -> Path:
    """Write the input of the Hub's builder and replace any previous one.

    Args:
        folder: folder of the project.
        repository: the repository to publish to, "organization/name".
        source: folder of the package.

    Returns:
        The folder of the modules. It lacks `sparge._ops`, which the Hub's builder generates.
    """
    files = modules(source)
    del files["_ops.py"]
    write(folder / "torch-ext" / PACKAGE, files)
    general = {"name": PACKAGE, "version": VERSION, "license": LICENSE, "repository": repository}
    (folder / "build.toml").write_bytes(BUILD_TOML.format(**general).encode())
    (folder / "flake.nix").write_bytes(FLAKE_NIX.encode())
    return folder / "torch-ext" / PACKAGE


def modules(source: Path) -> dict[str, str]:
    """Return the text of every module of the kernel by file name."""
    files = {"__init__.py": relative_imports(read(KERNEL), PACKAGE, is_package=True)}
    required, parents = required_modules(source)
    for module in required:
        path = path_of(module, source)
        text = relative_imports(read(path), module, is_package=path.name == "__init__.py")
        files[path.relative_to(source).as_posix()] = text
    for package in parents:
        path = path_of(package, source)
        files[path.relative_to(source).as_posix()] = f'"""{ast.get_docstring(parse(read(path)))}"""\n'
    return files


def write(folder: Path, files: dict[str, str]) -> None:
    """Replace a folder with these files."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())


read = functools.partial(Path.read_text, encoding="utf-8")


def digest_of(files: dict[str, str]) -> str:
    """Return a short hash of all file names and contents."""
    whole = hashlib.sha256()
    for name, text in sorted(files.items()):
        whole.update(f"{name}\0{len(text)}\0{text}".encode())
    return whole.hexdigest()[:16]


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def required_modules(source: Path) -> tuple[list[str], list[str]]:
    """Return the modules that the public names import directly or indirectly, and packages that only contain modules.

    A package that no module imports directly does not need its imports: the kernel has only its docstring.
    """
    required: set[str] = set()
    waiting = backends(source) | imported_modules(read(KERNEL), source)
    while waiting:
        module = waiting.pop()
        required |= {module}
        waiting |= imported_modules(read(path_of(module, source)), source) - required
    required -= {PACKAGE}
    paths = [module.split(".") for module in required]
    parents = {".".join(path[:length]) for path in paths for length in range(2, len(path))}
    return sorted(required), sorted(parents - required)


def backends(source: Path) -> set[str]:
    """Return the modules of the backends in `options.common.BACKENDS`, which are imported by name."""
    for node in parse(read(source / "options" / "common.py")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BACKENDS":
            return {f"{PACKAGE}.backends.{name}" for name in ast.literal_eval(node.value)}
    raise ValueError("options/common.py: expected BACKENDS, the names of all backends, got none")


@functools.cache
def parse(text: str) -> ast.Module:
    """Return the cached syntax tree of a module; it must not be modified."""
    return ast.parse(text)


def imported_modules(text: str, source: Path) -> set[str]:
    """Return the names of the package's modules that a module's text imports."""
    modules: set[str] = set()
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names if is_in_package(alias.name)}
        elif isinstance(node, ast.ImportFrom) and node.module and is_in_package(node.module):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            inside = {name for name in names if is_module(name, source)}
            modules |= inside if len(inside) == len(names) else {*inside, node.module}
    return modules - {PACKAGE}


def is_in_package(module: str) -> bool:
    """Return whether a name belongs to the package."""
    return module.partition(".")[0] == PACKAGE


def is_module(module: str, source: Path) -> bool:
    """Return whether a name is a module rather than an attribute of a module."""
    base = source.joinpath(*module.split(".")[1:])
    return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()


def path_of(module: str, source: Path) -> Path:
    """Return the file of a module."""
    base = source.joinpath(*module.split(".")[1:])
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def relative_imports(text: str, module: str, *, is_package: bool = False) -> str:
    """Return a module's text in which imports of the package are relative; nothing else changes.

    Raises:
        ValueError: the module refers to the package by name other than in an import.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]
    tree = parse(text)
    _check(tree, module)
    lines = text.splitlines(keepends=True)
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        if isinstance(node, ast.ImportFrom):
            if node.module is None or node.level or not is_in_package(node.module):
                continue
            head, new = rf"from\s+{re.escape(node.module)}\s+import", f"from {_path(node.module, package)} import"
        else:
            ours = [alias for alias in node.names if is_in_package(alias.name)]
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
    """Return a module relative to a package: ``..options``."""
    parts = module.split(".")
    shared = 0
    while shared < min(len(parts), len(package)) and parts[shared] == package[shared]:
        shared += 1
    return "." * (len(package) - shared + 1) + ".".join(parts[shared:])


def _check(tree: ast.Module, module: str) -> None:
    """Raise ValueError if anything except an import refers to the package by name."""
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
