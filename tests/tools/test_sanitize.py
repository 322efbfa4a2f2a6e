"""tools/gpu/sanitize.py separates known hazards of stage metadata and of roles from errors."""

from __future__ import annotations

import pytest
import sanitize

REPORT = """========= Error: Potential {} hazard detected at __shared__ 0x410 in block (0,0,0) :
=========     Write Thread (351,0,0) at attention_kernel+0x98a0 in {}
=========     Read Thread (64,0,0) at attention_kernel+0xbcf0 in {}
=========     Current Value : 0
"""


@pytest.fixture(scope="module")
def place():
    """Return a function that finds the only line of a file that contains some words."""

    def find(name: str, *words: str) -> str:
        (path,) = [folder / name for folder in sanitize.FOLDERS if (folder / name).is_file()]
        lines = path.read_text().splitlines()
        (number,) = [n for n, line in enumerate(lines, 1) if all(word in line for word in words)]
        return f"{name}:{number}"

    return find


@pytest.fixture(scope="module")
def metadata(place) -> tuple[str, str]:
    """Return the source lines where the flags of a stage are stored and loaded."""
    return place("producer.py", "metadata.flags", ".store("), place(
        "consumer.py", "load_number(metadata.flags.index(stage)"
    )


def test_kinds_of_hazards(place, metadata: tuple[str, str]) -> None:
    masked, load = metadata
    scale = place("producer.py", "metadata.key_scale.index(stage).store(")
    first_scale = place("softmax.py", "metadata.key_scale.index(")
    block = place("producer.py", "metadata.block.index(stage).store(gl.where")
    first_block = place("softmax.py", "block = metadata.block.index(place).load(")
    count_stored, count = (
        place("producer.py", "NUM_STAGES, num_stages"),
        place("consumer.py", "query_stage, NUM_STAGES"),
    )
    coordinates_stored, coordinates = (
        place("producer.py", "store_coordinates(metadata,"),
        place("coarse.py", "coordinates = load_coordinates("),
    )
    tile_stored, tile = place("scheduler.py", ".store("), place("scheduler.py", ".load(SPEC")
    head, roles = place("kernel.py", "def attention_kernel("), place("kernel.py", "gl.warp_specialize(")
    score_head = place("score_hopper.py", "def hopper_score_kernel(")
    score_roles = place("score_hopper.py", "gl.warp_specialize(")
    ones = place("kernel.py", "ones_smem.store(")
    turn = place("scheduler.py", "gl.where(lanes == 0, taken, 0)")
    listed = place("producer.py", "gl.load(list_ptr + blocks,")
    hidden, exchanged = (
        place("softmax.py", "gl.where(allowed, scores, HIDDEN_BITS)"),
        place("softmax.py", "gl.max(gl.max("),
    )
    in_the_caller = count.replace("consumer.py", "kernel.py")
    expected = {
        (masked, load): "metadata",
        (load, masked): "metadata",
        (scale, first_scale): "metadata",
        (first_block, block): "metadata",
        (count_stored, count): "metadata",
        (tile_stored, tile): "metadata",
        (coordinates_stored, coordinates): "metadata",
        (count_stored, tile): "metadata",
        (masked, tile): "metadata",
        (tile_stored, load): "other",
        (count_stored, in_the_caller): "metadata",
        (masked, in_the_caller): "other",
        (count_stored, "kernel.py:100000"): "other",
        (hidden, scale): "metadata",
        (roles, head): "roles",
        (head, head): "roles",
        (score_roles, score_head): "roles",
        (score_roles, head): "other",
        (turn, tile): "other",
        (masked, masked): "other",
        (masked, count): "other",
        (count_stored, first_scale): "other",
        (masked, listed): "other",
        (masked, exchanged): "other",
        (ones, hidden): "other",
        (scale, head): "other",
        (ones, load): "other",
        (load, head): "other",
        (masked, "somewhere.cu:7"): "other",
        (masked, "mma.py:0"): "other",
        (masked, "mma.py:100000"): "other",
    }
    hazards = {("RAW", *places): kind for places, kind in expected.items()}
    hazards |= {
        ("WAR", scale, first_scale): "metadata",
        ("WAW", scale, first_scale): "other",
        ("WAW", scale, hidden): "other",
    }
    assert {hazard: sanitize.kind_of(hazard) for hazard in hazards} == hazards
    kinds, found = sanitize.count_hazards("".join(REPORT.format(*hazard) for hazard in hazards))
    assert dict(kinds) == {"metadata": 12, "roles": 3, "other": 19}
    assert set(found) == set(hazards)


SUMMARY = "========= RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)\n"


@pytest.fixture
def outputs(place, metadata: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return racecheck's output: two hazards of metadata and one of roles in the calls, and reports of the controls."""
    head = place("kernel.py", "def attention_kernel(")
    hazards = "".join(REPORT.format("RAW", *places) for places in (metadata, metadata[::-1], (head, head)))
    outputs = {
        "calls": hazards + "80 calls\n" + SUMMARY.format(3),
        "all_arrive": "in order\n" + SUMMARY.format(0),
        "one_arrives": "in order\n" + SUMMARY.format(28),
        "nobody_waits": "out of order\n" + SUMMARY.format(9),
        "alone": "in order\n" + SUMMARY.format(0),
        "meeting": "in order\n" + SUMMARY.format(6),
    }
    monkeypatch.delenv("SPARGE_TEST_REPORT", raising=False)
    monkeypatch.setattr(sanitize, "run_part", lambda part, *_tool, **_program: outputs[part])
    return outputs


@pytest.mark.usefixtures("outputs")
def test_known_hazards_are_counted_separately(capsys) -> None:
    assert sanitize.check("racecheck")
    assert "racecheck: 80 calls, 0 errors; excused: {'roles': 1, 'metadata': 2};" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "output", "errors"),
    [
        pytest.param("one_arrives", "in order\n" + SUMMARY.format(0), 2, id="no hazard if one thread arrives"),
        pytest.param("all_arrive", "in order\n" + SUMMARY.format(4), 2, id="hazards if all threads arrive"),
        pytest.param("meeting", "in order\n" + SUMMARY.format(0), 1, id="no hazard between roles that meet"),
        pytest.param("alone", "in order\n" + SUMMARY.format(2), 1, id="hazards of a single role"),
        pytest.param("nobody_waits", SUMMARY.format(0), 0, id="no hazard if nobody waits"),
    ],
)
def test_hazards_are_errors_if_the_checker_passes_the_control(
    outputs: dict[str, str], capsys, part: str, output: str, errors: int
) -> None:
    outputs[part] = output
    assert not sanitize.check("racecheck")
    assert f"racecheck: 80 calls, {errors} errors;" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["one_arrives", "all_arrive", "alone", "meeting"])
def test_failing_control_raises(outputs: dict[str, str], part: str) -> None:
    outputs[part] = outputs[part].replace("in order", "out of order")
    with pytest.raises(RuntimeError, match="expected the control"):
        sanitize.check("racecheck")


def test_unlisted_hazards_are_errors(outputs: dict[str, str], capsys) -> None:
    outputs["calls"] = outputs["calls"].replace(SUMMARY.format(3), SUMMARY.format(5))
    assert not sanitize.check("racecheck")
    assert "2 errors;" in capsys.readouterr().out


def test_known_warning_does_not_cancel_an_error(
    outputs: dict[str, str], place, metadata: tuple[str, str], capsys
) -> None:
    race = REPORT.format("RAW", place("kernel.py", "ones_smem.store("), metadata[1])
    warning = REPORT.format("RAW", *metadata).replace("Error:", "Warning:")
    summary = "========= RACECHECK SUMMARY: 2 hazards displayed (1 errors, 1 warnings)\n"
    outputs["calls"] = race + warning + "80 calls\n" + summary
    assert not sanitize.check("racecheck")
    assert "1 errors; excused: {'roles': 0, 'metadata': 1};" in capsys.readouterr().out


def test_calls_reuse_every_stage_and_have_a_peak() -> None:
    pytest.importorskip("triton.experimental.gluon")
    from sparge.backends.gpu.peak_handling import EVERY_TILE_KEYS
    from sparge.backends.hopper.configs import hopper_config

    kinds = {bool(options.get("is_causal")) for _, _, options in sanitize.LONG_CASES}
    assert kinds == {False, True}
    for head_dim, _, _ in sanitize.LONG_CASES:
        config = hopper_config("int8_fp8_fast", head_dim, has_threshold=False)
        for _, kv_len in sanitize.LONG:
            assert kv_len // 64 > config.stages * config.blocks
    assert {kv_len <= EVERY_TILE_KEYS for _, kv_len in sanitize.LONG} == {False, True}
