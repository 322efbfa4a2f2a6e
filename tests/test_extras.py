"""Commands that install optional packages."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from sparge.options import extras
from sparge.options.extras import install_command


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(extras, "PACKAGE", tmp_path / "src" / "sparge")
    return tmp_path


def test_install_command_in_a_clone(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_command("cli") == f"pip install -e '{clone}[cli]'"
    monkeypatch.chdir(clone)
    assert install_command("cli", "plot") == "pip install -e '.[cli,plot]'"


def test_install_command_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "PACKAGE", tmp_path / "site-packages" / "sparge")
    requirements = ["torch>=2.6", "rich>=13; extra == 'cli'", 'typer>=0.16; extra == "cli"', "rich>=13; extra == 'all'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: requirements)
    assert install_command("cli", "all") == "pip install 'rich>=13' 'typer>=0.16'"


def test_install_command_of_a_copy_without_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "PACKAGE", tmp_path / "a_copy")
    assert install_command("plot") == "install the packages of the extra 'plot'"


def test_no_message_names_an_extra_of_the_unpublished_package() -> None:
    sources = Path(__file__).parents[1] / "src"
    assert not [path for path in sources.rglob("*.py") if "sparge[" in path.read_text()]
