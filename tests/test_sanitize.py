"""The hazards that tests/gpu/sanitize.py counts apart: those between notes and between roles, and no others."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

REPORT = """========= Error: Potential RAW hazard detected at __shared__ 0x410 in block (0,0,0) :
=========     Write Thread (351,0,0) at attention_kernel+0x98a0 in {}
=========     Read Thread (64,0,0) at attention_kernel+0xbcf0 in {}
=========     Current Value : 0
"""


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
    path = Path(__file__).parent / "gpu" / "sanitize.py"
    spec = importlib.util.spec_from_file_location("sanitize", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def place(sanitize: ModuleType):
    """The place of the one line of a file that holds some words."""

    def find(name: str, *words: str) -> str:
        lines = (sanitize.KERNEL / name).read_text().splitlines()
        (number,) = [n for n, line in enumerate(lines, 1) if all(word in line for word in words)]
        return f"{name}:{number}"

    return find


def test_hazards_are_sorted_by_the_lines_they_are_between(sanitize: ModuleType, place) -> None:
    note, load = place("producer.py", "masked_smem", ".store("), place("rows.py", "notes.index(stage).load(")
    count = place("attention.py", "slot * 2 + 1).load(")
    head, roles = place("attention.py", "def attention_kernel("), place("attention.py", "gl.warp_specialize(")
    ones = place("attention.py", "ones_smem.store(")
    listed = place("producer.py", "gl.load(list_base + listed")
    expected = {
        (note, load): "notes",
        (load, note): "notes",
        (note, count): "notes",
        (roles, head): "roles",
        (head, head): "roles",
        (note, note): "error",
        (note, listed): "error",
        (ones, load): "error",
        (load, head): "error",
        (note, "somewhere.cu:7"): "error",
        (note, "rows.py:100000"): "error",
    }
    assert {places: sanitize.kind_of(places) for places in expected} == expected
    kinds, between = sanitize.count_hazards("".join(REPORT.format(*places) for places in expected))
    assert dict(kinds) == {"notes": 3, "roles": 2, "error": 6}
    assert set(between) == set(expected)


@pytest.mark.parametrize(
    ("one", "every", "errors"),
    [(12, 0, 1), (0, 0, 3), (12, 4, 3)],
    ids=["the checker does not follow the order", "it does", "it reports everything"],
)
def test_notes_are_errors_to_a_checker_that_follows_them(
    sanitize: ModuleType, place, monkeypatch: pytest.MonkeyPatch, capsys, one: int, every: int, errors: int
) -> None:
    note, load = place("producer.py", "masked_smem", ".store("), place("rows.py", "notes.index(stage).load(")
    head = place("attention.py", "def attention_kernel(")
    hazards = "".join(REPORT.format(*places) for places in ((note, load), (load, note), (head, head)))
    summary = "========= RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)\n"
    outputs = {  # one of the four hazards of the calls is not printed in a form we know, and must not get lost
        "calls": hazards + "80 calls\n" + summary.format(4),
        "all_arrive": summary.format(every),
        "one_arrives": summary.format(one),
        "nobody_waits": summary.format(9),
    }
    monkeypatch.delenv("SPARGE_TEST_REPORT", raising=False)
    monkeypatch.setattr(sanitize, "run_part", lambda part, *_tool, **_program: outputs[part])
    assert not sanitize.check("racecheck")
    assert f"racecheck: 80 calls, {errors} errors;" in capsys.readouterr().out
    outputs["calls"] = REPORT.format(note, load) + "80 calls\n" + summary.format(1)
    assert sanitize.check("racecheck") == (errors == 1)
    outputs["nobody_waits"] = summary.format(0)
    assert not sanitize.check("racecheck")
