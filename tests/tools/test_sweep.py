"""tools/gpu/sweep.py without a GPU: cases, candidates, recommendations with their reasons, and failures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import sweep
import sweep_worker
import torch
from sweep import Outcome, Sweep, recommend, row_text, sweep_case, table_text
from sweep_cases import (
    CANDIDATES,
    FLOAT32_CANDIDATES,
    TABLES,
    Case,
    as_code,
    candidates_of,
    current_config,
    differences,
    key_of,
    parse_case,
)

from sparge.backends.gpu.stages import configs as stage_configs
from sparge.backends.gpu.stages.configs import SelectConfig
from sparge.backends.triton.configs import AttentionConfig
from sparge.evaluate.machine import Gpu

GPU = Gpu("NVIDIA H200", "9.0", "2.11.0", "3.6.0", "13.0", "0.1.0", "0123456789")
CASE = parse_case("triton")
CURRENT = AttentionConfig(64, 2, 4, 3)
FLOP = 712e9
"""A launch of 1 ms reaches 712 TOPS."""


class TestCases:
    def test_parts_of_a_name_in_any_order(self) -> None:
        assert Case("triton", "triton", "int8_fp8", 128, "plain", 32768, 16) == CASE
        text = "hopper:threshold:256:int8_fp16"
        assert parse_case(text) == Case(text, "hopper", "int8_fp16", 256, "threshold")
        assert parse_case("triton:mask_per_query").tokens == 8192
        assert {parse_case(kernel).kernel for kernel in CANDIDATES} == set(CANDIDATES)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("cuda", "expected a kernel of triton, hopper, summarize"),
            ("triton:int4", "got 'int4' in 'triton:int4'"),
            ("triton:64:128", "got '128'"),
            ("triton:96", "head_dim of 64, 128, 256"),
            ("hopper:mask", "variant of plain, threshold; got 'mask'"),
            ("score:int8_fp8", "got 'int8_fp8'"),
        ],
    )
    def test_invalid_names_raise(self, text: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            parse_case(text)

    def test_keys_and_current_configurations(self) -> None:
        assert current_config(CASE, 90) == CURRENT
        assert current_config(parse_case("triton:float32:128"), 89) == AttentionConfig(16, 1, 4, 1)
        key = key_of(parse_case("triton:none:64:mask"), 90)
        assert as_code(key) == 'ConfigKey("hopper", "none", 64, variant="mask")'
        assert as_code(key_of(parse_case("score:256"), 120)) == 'StageKey("score", generation="small", width=256)'
        assert as_code(replace(CURRENT, max_registers=168)) == "AttentionConfig(64, 2, 4, 3, max_registers=168)"

    @pytest.mark.parametrize("text", ["triton:none:64", "hopper:int8_fp8:128", *list(CANDIDATES)[2:]])
    @pytest.mark.parametrize("distance", [1, 2])
    def test_candidates_are_the_current_configuration_and_its_neighbors(self, text: str, distance: int) -> None:
        case = parse_case(text)
        current = current_config(case, 90)
        candidates = candidates_of(case, current, distance)
        distances = [len(differences(config, current)) for config in candidates]
        assert candidates[0] == current
        assert distances == sorted(distances)
        assert distances[-1] <= distance
        assert len(set(candidates)) == len(candidates) > 3

    def test_candidates_are_fields_and_include_the_current_values(self) -> None:
        rows = [(key.kernel, "hopper", config, CANDIDATES[key.kernel]) for key, config in stage_configs.CONFIGS.items()]
        for kernel, table in TABLES.items():
            for key, config in table.items():
                is_float32 = key.quantization == "float32"
                rows.append((kernel, key.generation, config, FLOAT32_CANDIDATES if is_float32 else CANDIDATES[kernel]))
        for kernel, generation, config, candidates in rows:
            assert set(candidates) == {field.name for field in fields(config)}
            if generation == "hopper":
                assert all(getattr(config, name) in values for name, values in candidates.items()), (kernel, config)

    def test_threshold_fixes_the_tile(self) -> None:
        for text, fixed in (("triton", ("block_m", "blocks")), ("hopper", ("blocks",))):
            case = parse_case(f"{text}:threshold")
            current = current_config(case, 90)
            assert not any({*fixed} & {*differences(config, current)} for config in candidates_of(case, current, 5))

    def test_one_stage_is_only_a_candidate_for_float32(self) -> None:
        """With one stage, Triton 3.6 miscompiles kernels with D_v < D, which a sweep does not detect."""
        stages = {}
        for text in ("triton:none:256", "triton:int8_fp16:64:mask", "triton:float32:64"):
            case = parse_case(text)
            stages[text] = min(config.stages for config in candidates_of(case, current_config(case, 90), 5))
        assert list(stages.values()) == [2, 2, 1]


def outcome(config: Any, tops: float | None, **fields: Any) -> Outcome:
    ms = None if tops is None else 712 / tops
    return Outcome(config, **{"status": "right", "ms": ms, "tops": tops, "spills": 0, "is_final": True, **fields})


@pytest.mark.parametrize(
    ("tops", "fields", "is_recommended"),
    [
        (730, {}, True),
        (716, {}, False),  # within the noise
        (900, {"status": "wrong"}, False),
        (900, {"status": "failed"}, False),
        (900, {"spills": 12}, False),
        (900, {"is_final": False}, False),  # only the last round counts
    ],
)
def test_recommendation(tops: float, fields: dict[str, Any], is_recommended: bool) -> None:
    other, current = outcome(replace(CURRENT, stages=4), tops, **fields), outcome(CURRENT, 712)
    assert recommend([other, current], CURRENT) is (other if is_recommended else current)


def test_recommendation_may_spill_as_much_as_the_current_configuration() -> None:
    better = outcome(replace(CURRENT, stages=4), 800, spills=8)
    assert recommend([better, outcome(CURRENT, 712, spills=8)], CURRENT) is better


def test_row_has_the_fastest_alternatives_as_its_reason() -> None:
    changes = [
        ({"stages": 2}, 700, {}),
        ({"stages": 4}, 690, {}),
        ({"blocks": 1}, 669, {"spills": 12}),
        ({"block_m": 128, "warps": 8}, 573, {}),
        ({"warps": 8}, 500, {}),
        ({"max_registers": 128}, None, {"status": "wrong"}),
    ]
    best = outcome(CURRENT, 712)
    others = [outcome(replace(CURRENT, **change), tops, **fields) for change, tops, fields in changes]
    text = row_text(Sweep(CASE, key_of(CASE, 90), CURRENT, [best, *others]), best)
    assert text.splitlines() == [
        "    # 712; 700 with stages=2; 669 with blocks=1 and spills; 573 with block_m=128, warps=8",
        '    ConfigKey("hopper", "int8_fp8", 128): AttentionConfig(64, 2, 4, 3),',
    ]


def test_row_of_a_stage_is_in_milliseconds() -> None:
    case, best = parse_case("select"), Outcome(SelectConfig(512, 16), "right", ms=0.017)
    slower = Outcome(SelectConfig(128, 16), "right", ms=0.0313)
    text = row_text(Sweep(case, key_of(case, 90), best.config, [best, slower]), best)
    assert text.splitlines() == [
        "    # 0.0170 ms; 0.0313 with columns=128",
        '    StageKey("select"): SelectConfig(512, 16),',
    ]


class FakeWorker:
    """Stand-in for `run_worker` with an answer or milliseconds for each configuration. Each request takes 1 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[Any, dict[str, Any]] = {}
        self.ms: Callable[[Any], float] = lambda _: 1.0
        self.breaks_timing_of: Any = None
        self.groups: list[list[Any]] = []
        self.now = 0.0
        monkeypatch.setattr(sweep, "run_worker", self.run)
        monkeypatch.setattr(sweep.time, "monotonic", lambda: self.now)

    def run(self, case: Case, configs: Sequence[Any], turns: int) -> dict[str, Any]:
        self.now += 1.0
        if not turns:
            return {"error": 0.01, "registers": 168, "spills": 0, "shared": 65536, **self.answers.get(configs[0], {})}
        if self.breaks_timing_of in configs:
            return {"status": "failed", "note": "the process died"}
        self.groups.append(list(configs))
        flop = FLOP if case.is_attention else None
        return {"ms": [self.ms(config) for config in configs], "problems": [None] * len(configs), "flop": flop}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> FakeWorker:
    return FakeWorker(monkeypatch)


def swept(deadline: float = float("inf"), case: Case = CASE, **options: Any) -> Sweep:
    return sweep_case(case, 90, **{"distance": 2, "jobs": 1, "deadline": deadline, **options})


class TestSweep:
    def test_every_candidate_is_checked_and_timed_with_the_current_configuration(self, worker: FakeWorker) -> None:
        worker.ms = lambda config: 1.0 + 0.1 * len(differences(config, CURRENT))
        outcomes = swept().outcomes
        assert {each.config for each in outcomes} == set(candidates_of(CASE, CURRENT, 2))
        assert all(each.status == "right" and each.ms for each in outcomes)
        assert [group[0] for group in worker.groups] == [CURRENT, CURRENT]
        assert sum(each.is_final for each in outcomes) == 1 + sweep.FINALISTS
        assert outcomes[0].config == CURRENT and outcomes[0].tops == pytest.approx(712)

    def test_final_round_has_the_fastest_candidates_without_spills(self, worker: FakeWorker) -> None:
        spills, fast = replace(CURRENT, max_registers=128), replace(CURRENT, stages=2)
        worker.answers = {spills: {"spills": 12}}
        worker.ms = lambda config: {spills: 0.5, fast: 0.8}.get(config, 1.0)
        result = swept()
        assert fast in worker.groups[-1] and spills not in worker.groups[-1]
        best = recommend(result.outcomes, CURRENT)
        assert best is not None and best.config == fast

    def test_failures_are_listed_and_not_timed(self, worker: FakeWorker) -> None:
        wrong, fails, hangs = candidates_of(CASE, CURRENT, 1)[1:4]
        worker.answers = {
            wrong: {"status": "wrong", "note": "expected finite numbers, got NaN or Inf"},
            fails: {"status": "failed", "note": "OutOfResources: shared memory"},
            hangs: {"status": "timed out", "note": "no answer within 240 s"},
        }
        result = swept()
        assert not any(config in group for group in worker.groups for config in worker.answers)
        text = table_text(result)
        assert "wrong: expected finite numbers" in text
        assert "timed out: no answer within 240 s" in text
        assert text.splitlines()[-1].strip() == f"{as_code(result.key)}: {as_code(CURRENT)},"

    def test_candidate_that_fails_during_timing(self, worker: FakeWorker) -> None:
        """The other candidates are timed one by one afterward."""
        worker.breaks_timing_of = breaks = replace(CURRENT, stages=4)
        outcomes = {each.config: each for each in swept(distance=1).outcomes}
        assert (outcomes[breaks].status, outcomes[breaks].note) == (
            "failed",
            "while it was timed: the process died",
        )
        assert all(each.ms for config, each in outcomes.items() if config != breaks)

    def test_without_a_correct_reference_nothing_else_runs(self, worker: FakeWorker) -> None:
        worker.answers = {CURRENT: {"status": "failed", "note": "RuntimeError: no memory"}}
        result = swept()
        assert [each.status for each in result.outcomes] == ["failed"]
        assert recommend(result.outcomes, CURRENT) is None and "no memory" in table_text(result)

    @pytest.mark.usefixtures("worker")
    def test_time_limit(self) -> None:
        result = swept(deadline=20.0)
        untried = [each for each in result.outcomes if each.status == "not tried"]
        assert untried
        assert f"Out of time: {len(untried)} of {len(result.outcomes)} candidates" in table_text(result)
        assert recommend(result.outcomes, CURRENT) is not None, "the checked candidates are timed"

    @pytest.mark.usefixtures("worker")
    def test_command_prints_tables_and_appends_rows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(sweep, "describe_gpu", lambda: GPU)
        path = tmp_path / "rows.jsonl"
        sweep.main(["triton:int8_fp8:128", "score:64", "--distance", "1", "--budget", "50", "--json", str(path)])
        printed = capsys.readouterr().out
        assert 'ConfigKey("hopper", "int8_fp8", 128): AttentionConfig(64, 2, 4, 3),' in printed
        assert "score:64, N 32768" in printed
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert {row["kernel"] for row in rows} == {"triton", "score"}
        assert all(row["gpu"] == GPU.gpu and row["commit"] == GPU.commit for row in rows)
        assert sum(row["is_recommended"] for row in rows) == 2

    @pytest.mark.parametrize("arguments", [["triton:int4"], ["triton", "--distance", "x"], []])
    def test_invalid_arguments_exit(self, arguments: list[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            sweep.main(arguments)


class TestWorker:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
    def test_process_answers_with_its_failure(self) -> None:
        answer = sweep.run_worker(CASE, [CURRENT], 0)
        assert answer["status"] == "failed" and "CUDA" in answer["note"]

    @pytest.mark.parametrize(
        ("code", "timeout_s", "status", "note"),
        [
            (
                "import os, sys; print('lost', file=sys.stderr); sys.stderr.flush(); os._exit(3)",
                60,
                "failed",
                "3: lost",
            ),
            ("import time; time.sleep(60)", 1, "timed out", "no answer within 1 s"),
        ],
    )
    def test_process_that_dies_or_hangs(
        self, code: str, timeout_s: float, status: str, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = tmp_path / "worker.py"
        script.write_text(code)
        monkeypatch.setattr(sweep, "WORKER", script)
        monkeypatch.setattr(sweep, "CHECK_TIMEOUT_S", timeout_s)
        answer = sweep.run_worker(CASE, [CURRENT], 0)
        assert answer["status"] == status and note in answer["note"]

    def test_every_kernel_has_a_launcher(self) -> None:
        pytest.importorskip("triton.experimental.gluon")
        assert set(sweep_worker.LAUNCHERS) == set(CANDIDATES)
        for kernel in CANDIDATES:
            assert callable(sweep_worker.launcher_of(kernel))

    def test_functions_without_a_result_are_compared_by_their_arguments(self) -> None:
        scale = torch.ones(3)
        flip = sweep_worker.first_call(_negate, [((scale,), {})])
        assert sweep_worker.tensors_in(flip())[0] is scale
        assert scale.tolist() == [-1.0] * 3
        with pytest.raises(RuntimeError, match=r"expected a call of .*_negate, got none"):
            sweep_worker.first_call(_negate, [])


def _negate(tensor: torch.Tensor) -> None:
    tensor.neg_()
