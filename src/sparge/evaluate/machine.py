"""Describe the machine of a measurement for result rows and pages: processor or GPU, versions and commit."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from sparge._version import __version__


@dataclass(frozen=True)
class Machine:
    """A machine and its software. ``commit`` is None for an installed copy outside a checkout."""

    processor: str
    threads: int
    system: str
    python: str
    torch: str
    sparge: str
    commit: str | None

    def __str__(self) -> str:
        commit = f" ({self.commit})" if self.commit else ""
        return f"{self.processor}, {self.threads} threads; torch {self.torch}, sparge {self.sparge}{commit}"


def describe_machine() -> Machine:
    """Return the processor, thread count and versions of this process."""
    return Machine(
        processor=_processor_name(),
        threads=torch.get_num_threads(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        sparge=__version__,
        commit=_commit(),
    )


@dataclass(frozen=True)
class Gpu:
    """A CUDA device and its software. ``triton`` is None where it is not installed."""

    gpu: str
    capability: str
    torch: str
    triton: str | None
    cuda: str | None
    sparge: str
    commit: str | None

    def __str__(self) -> str:
        commit = f" ({self.commit})" if self.commit else ""
        return (
            f"{self.gpu}, capability {self.capability}; torch {self.torch}, triton {self.triton}, CUDA {self.cuda}, "
            f"sparge {self.sparge}{commit}"
        )


def describe_gpu() -> Gpu:
    """Return the current CUDA device and the versions of this process."""
    major, minor = torch.cuda.get_device_capability()
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    return Gpu(
        gpu=torch.cuda.get_device_name(),
        capability=f"{major}.{minor}",
        torch=torch.__version__,
        triton=triton,
        cuda=torch.version.cuda,
        sparge=__version__,
        commit=_commit(),
    )


def _output(*command: str) -> str | None:
    """Return the output of a command, or None if it fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, timeout=5, text=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _processor_name() -> str:
    for line in (_output("lscpu") or "").splitlines():
        name, _, text = line.partition(":")
        if name.strip() == "Model name":
            return text.strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of the checkout that this package runs from, with "-dirty" if the package was changed."""
    git = ("git", "-C", str(Path(__file__).resolve().parents[1]))
    # A copy inside another repository (in its .venv) is not tracked there.
    if _output(*git, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _output(*git, "rev-parse", "--short=10", "HEAD")
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return f"{commit}-dirty" if commit and changed else commit
