"""The contents of wheel and sdist, the wheel in a separate environment, and the supported versions."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import sparge

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
VERSION = sparge.__version__


def read_toml(*path: str) -> dict[str, Any]:
    return tomllib.loads(ROOT.joinpath(*path).read_text())


def run(*command: object, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command without access to this checkout."""
    # The bytecode cache stays: without it, every process would compile the modules of torch again.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = kept | {"PYTHONPYCACHEPREFIX": os.environ.get("PYTHONPYCACHEPREFIX", "")}
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def build(project: Path, target: str, folder: Path) -> Path:
    command = (sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder)
    done = subprocess.run([str(part) for part in command], cwd=project, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (artifact,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return artifact


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the sdist, which checks that the sdist is complete."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build(folder / f"sparge-{VERSION}", "wheel", folder)


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(f"sparge-{VERSION}.dist-info/METADATA"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel in a new environment, with the other packages of this one. Return its scripts folder."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    scripts, python = folder / "bin", folder / "bin" / "python"
    done = run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel), folder=folder
    )
    assert done.returncode == 0, done.stderr
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # Python searches a path from a .pth file last and ignores the .pth files in it (an editable sparge).
    (site / "torch_from_here.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return scripts


def test_wheel_contains_the_package_its_types_and_its_license(wheel: Path) -> None:
    assert wheel.name == f"sparge-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        text = archive.read(f"sparge-{VERSION}.dist-info/licenses/LICENSE").decode()
    assert text == (ROOT / "LICENSE").read_text()
    assert {name.partition("/")[0] for name in names} == {"sparge", f"sparge-{VERSION}.dist-info"}
    assert "sparge/py.typed" in names
    source = {f"sparge/{path.relative_to(ROOT / 'src' / 'sparge')}" for path in (ROOT / "src/sparge").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == source
    templates = {f"sparge/templates/{path.name}" for path in (ROOT / "src/sparge/templates").iterdir()}
    assert {name for name in names if "/templates/" in name} == templates >= {"sparge/templates/style.css"}


def test_sdist_contains_only_what_a_wheel_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {Path(name).parts[1] for name in archive.getnames()}
    needed = {"src", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "pyproject.toml", "PKG-INFO"}
    assert names - {".gitignore"} == needed


def test_dependencies_are_torch_and_triton(metadata: Message) -> None:
    needed: dict[str, set[str]] = {"": set()} | {extra: set() for extra in metadata.get_all("Provides-Extra", [])}
    for text in metadata.get_all("Requires-Dist", []):
        extra = re.search(r"extra == '([\w-]+)'", text)
        needed[extra[1] if extra else ""].add(re.split(r"[^\w-]", text)[0])
    assert needed.pop("") == {"torch", "triton"}
    assert {name: needed.pop(name) for name in ("vllm", "vllm-omni")} == {"vllm": {"vllm"}, "vllm-omni": {"vllm-omni"}}
    assert needed.pop("all") == set().union(*needed.values())
    assert set(needed) == {"cli", "plot", "transformers", "diffusers"}
    assert needed["cli"] == {"rich", "typer", "matplotlib"}
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Description-Content-Type"] == "text/markdown"


@pytest.mark.skipif(importlib.util.find_spec("twine") is None, reason="twine is not installed")
def test_metadata_is_valid_for_the_index(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_installed_wheel_runs_attention(installed: Path, tmp_path: Path) -> None:
    program = """
import torch, sparge
q, k, v = (torch.randn(1, 2, 300, 32) for _ in range(3))
exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
assert (sparge.attention(q, k, v, topk=1.0, backend="torch") - exact).abs().max() < 2e-6
print(sparge.__file__)
"""
    done = run(installed / "python", "-W", "error", "-c", program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(installed.parent), "the installed copy, not the checkout"


def test_installed_command_runs(installed: Path, tmp_path: Path) -> None:
    for command in ([installed / "sparge"], [installed / "python", "-m", "sparge"]):
        done = run(*command, "--version", folder=tmp_path)
        assert (done.returncode, done.stdout) == (0, f"sparge {VERSION}\n"), done.stderr


@pytest.mark.parametrize(("missing", "argument"), [("typer", "--version"), ("rich", "demo")])
def test_command_without_its_extra_prints_the_install_command(
    installed: Path, missing: str, argument: str, tmp_path: Path
) -> None:
    (tmp_path / f"{missing}.py").write_text(f'raise ImportError("no {missing} here")\n')
    done = run(installed / "sparge", argument, folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    packages = "'matplotlib>=3.8' 'rich>=13' 'typer>=0.16'"
    expected = f"sparge: error: the command needs rich and typer: pip install {packages} (no {missing} here)\n"
    assert done.stderr == expected


def test_errors_name_missing_packages(installed: Path, tmp_path: Path) -> None:
    program = """
import sys
for name in ("numpy", "matplotlib", "transformers", "diffusers"):
    sys.modules[name] = None
import torch, sparge
q = torch.randn(1, 1, 256, 16)
assert sparge.attention(q, q, q, topk=0.5).shape == q.shape
for call in (
    lambda: sparge.predict(q, q).plot(),
    lambda: sparge.enable(torch.nn.Linear(1, 1)),
    lambda: sparge.register(framework="transformers"),
    lambda: sparge.register(framework="diffusers"),
):
    try:
        call()
    except (ImportError, TypeError) as error:
        print(error)
"""
    done = run(installed / "python", "-c", program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    plot, enable, *register = done.stdout.splitlines()
    assert plot.endswith("pip install 'matplotlib>=3.8'")
    needed = {"transformers>=5.17", "diffusers>=0.42", "accelerate>=1"}
    models, command = enable.split(": ")[-2:]
    assert models.endswith("for models of transformers or diffusers")
    assert command.startswith("pip install ")
    assert set(command.split("'")[1::2]) == needed
    transformers, diffusers = (set(text.split("'")[1::2]) for text in register)
    assert (transformers, diffusers) == ({"transformers>=5.17"}, needed)


def test_compat_wheel_contains_its_license(tmp_path: Path) -> None:
    with zipfile.ZipFile(build(ROOT / "compat", "wheel", tmp_path)) as archive:
        names = set(archive.namelist())
    assert names >= {"spas_sage_attn/__init__.py", f"sparge_compat-{VERSION}.dist-info/licenses/LICENSE"}
    assert (ROOT / "compat" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_all_files_have_one_version() -> None:
    assert read_toml("compat", "pyproject.toml")["project"]["version"] == VERSION
    assert read_toml("comfyui", "pyproject.toml")["project"]["version"] == VERSION
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION


def bounds(requirements: list[str]) -> dict[str, str]:
    """Return the lower bounds in pyproject.toml: {"torch": "2.6"}."""
    return {found[1]: found[2] for text in requirements if (found := re.match(r"([\w-]+)>=([\d.]+)", text))}


def test_lower_bounds_equal_the_tested_versions() -> None:
    project = read_toml("pyproject.toml")["project"]
    declared = bounds(
        project["dependencies"] + [text for name in ("cli", "plot") for text in project["optional-dependencies"][name]]
    )
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "tests/oldest.txt").read_text(), re.MULTILINE))
    commands = (ROOT / "Makefile").read_text()
    pinned["triton"] = min(re.findall(r"triton==([\d.]+)", commands))
    assert set(declared) == set(pinned)
    for name, version in declared.items():
        assert f"{pinned[name]}.".startswith(f"{version}."), f"{name}: {version} is declared, {pinned[name]} is tested"
        assert f"| {name} | {pinned[name]} |" in (ROOT / "docs/release.md").read_text()


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_existing_targets(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert set(workflow) >= {"name", True, "permissions", "jobs"}, "YAML reads the key `on` as true"
    assert workflow["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name, job in workflow["jobs"].items():
        assert job["runs-on"], name
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert set(re.findall(r"\bmake (\S+)", step.get("run", ""))) <= targets


def test_workflows_cover_every_supported_python() -> None:
    project = read_toml("pyproject.toml")["project"]
    declared = [text.rpartition(" ")[2] for text in project["classifiers"] if re.search(r"Python :: 3\.\d+$", text)]
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert jobs["tests"]["strategy"]["matrix"]["python-version"] == declared
    assert f">={declared[0]}" == project["requires-python"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    others = {"tests": ["make test"], "slow": ["make test-slow"]}
    assert commands == {name: [f"make {name}"] for name in ("lint", "docs", "oldest")} | others


def test_only_tags_are_published() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    publish = workflow["jobs"]["publish"]
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}
