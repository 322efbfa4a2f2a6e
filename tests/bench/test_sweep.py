"""``sparge sweep`` without a GPU: cases, candidates, recommendations with their reasons, and failures."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparge.backends.gpu.stages.configs import ScoreConfig, SelectConfig
from sparge.backends.triton.configs import AttentionConfig
from sparge.bench.sweep import run as sweep_run
from sparge.bench.sweep import worker
from sparge.bench.sweep.cases import (
    KERNELS,
    Case,
    as_code,
    candidates_of,
    chosen_config,
    differences,
    key_of,
    parse_case,
)
from sparge.bench.sweep.results import (
    Outcome,
    Sweep,
    json_rows,
    known_failures,
    reason_for,
    recommend,
    row_text,
    table_text,
)
from sparge.bench.sweep.run import CandidateTimeout, Process, Workers, missing_device, run_sweep, sweep_case
from sparge.bench.sweep.worker import CandidateFailure, WrongResult
from sparge.cli import app
from sparge.evaluate.machine import Gpu

GPU = Gpu("NVIDIA H200", "9.0", "2.11.0", "3.6.0", "13.0", "0.1.0", "0123456789")
CASE = Case("triton")
CHOSEN = AttentionConfig(64, 2, 4, 3)
Row = dict[str, Any]
FLOP = 712e9
"""A launch of 1 ms reaches 712 TOPS."""


class FakeWorkers:
    """Stand-in for `Workers` with an answer, an error, or milliseconds for each configuration."""

    def __init__(self, count: int | None = 2, **answers: Any) -> None:
        self.count = count or 1
        self.answers: dict[Any, Any] = answers.get("answers", {})
        self.ms: Callable[[Any], float | None] = answers.get("ms", lambda _: 1.0)
        self.groups: list[list[Any]] = []
        self.turns: list[int] = []
        self.breaks_timing_of: Any = None
        self.now = 0.0

    def clock(self) -> float:
        """Return the number of requests so far, each of which takes 1 s."""
        return self.now

    def run(self, timeout_s: float, function: Any, case: Case, *args: Any) -> dict[str, Any]:
        assert timeout_s > 0
        self.now += 1.0
        if function is worker.check:
            answer = self.answers.get(args[0], {})
            if isinstance(answer, Exception):
                raise answer
            return {"error": 0.01, "registers": 168, "spills": 0, "shared": 65536, **answer}
        assert function is worker.time_all
        configs, turns = args
        if self.breaks_timing_of in configs:
            raise CandidateFailure("the process died")
        self.groups.append(configs)
        self.turns.append(turns)
        flop = FLOP if case.is_attention else None
        return {"ms": [self.ms(config) for config in configs], "problems": [None] * len(configs), "flop": flop}

    def close(self) -> None:
        pass


def outcomes_of(workers: FakeWorkers, case: Case = CASE, **options: Any) -> dict[Any, Outcome]:
    return {outcome.config: outcome for outcome in sweep_case(case, workers, 90, **options).outcomes}


class TestCases:
    def test_parts_of_a_name_in_any_order(self) -> None:
        assert parse_case("triton") == Case("triton", "int8_fp8", 128, "plain", 32768, 16)
        assert parse_case("triton:none:64:mask", 8192, 2) == Case("triton", "none", 64, "mask", 8192, 2)
        assert parse_case("hopper:threshold:256:int8_fp16") == Case("hopper", "int8_fp16", 256, "threshold")
        assert parse_case("select:64") == Case("select", head_dim=64)
        assert {parse_case(kernel).kernel for kernel in KERNELS} == set(KERNELS)

    def test_full_masks_have_fewer_tokens(self) -> None:
        assert parse_case("triton:mask_per_query").tokens == 8192
        assert parse_case("triton:mask_per_query", 4096).tokens == 4096

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

    def test_names_can_be_parsed(self) -> None:
        for text in ("triton:int8_fp8:128", "hopper:none:64:threshold", "score:256"):
            assert str(parse_case(text)) == text

    def test_code_of_chosen_configurations(self) -> None:
        assert chosen_config(CASE, 90) == CHOSEN
        assert chosen_config(parse_case("triton:float32:128"), 89) == AttentionConfig(16, 1, 4, 1)
        assert chosen_config(parse_case("hopper:none:128"), 90).blocks == 2
        assert chosen_config(parse_case("score:256"), 90) == ScoreConfig(64, 64, 8, 1)
        assert as_code(key_of(parse_case("triton:none:64:mask"), 90)) == 'ConfigKey("hopper", "none", 64, "mask")'
        assert as_code(key_of(parse_case("score:256"), 120)) == 'StageKey("score", "small", width=256)'


class TestCandidates:
    @pytest.mark.parametrize("text", ["triton:none:64", "hopper:int8_fp8:128", *KERNELS[2:]])
    @pytest.mark.parametrize("distance", [1, 2])
    def test_candidates_are_the_chosen_configuration_and_its_neighbors(self, text: str, distance: int) -> None:
        case = parse_case(text)
        chosen = chosen_config(case, 90)
        candidates = candidates_of(case, chosen, distance)
        distances = [len(differences(config, chosen)) for config in candidates]
        assert candidates[0] == chosen
        assert distances == sorted(distances)
        assert distances[-1] <= distance
        assert len(set(candidates)) == len(candidates) > 3

    def test_all_candidates(self) -> None:
        assert len(candidates_of(CASE, CHOSEN, 5)) == 2 * 2 * 2 * 3 * 3
        assert len(candidates_of(CASE, CHOSEN, 1)) == 1 + 1 + 1 + 1 + 2 + 2

    def test_threshold_fixes_the_tile(self) -> None:
        case = parse_case("triton:int8_fp8:128:threshold")
        candidates = candidates_of(case, chosen_config(case, 90), 5)
        assert {(config.block_m, config.blocks) for config in candidates} == {(64, 1)}
        case = parse_case("hopper:int8_fp8:128:threshold")
        assert {config.blocks for config in candidates_of(case, chosen_config(case, 90), 4)} == {1}

    def test_one_stage_is_only_a_candidate_for_float32(self) -> None:
        """With one stage, Triton 3.6 miscompiles kernels with D_v < D, which a sweep does not detect."""
        for text in ("triton:none:256", "triton:int8_fp16:64:mask"):
            case = parse_case(text)
            assert min(config.stages for config in candidates_of(case, chosen_config(case, 90), 5)) == 2
        case = parse_case("triton:float32:64")
        assert {config.stages for config in candidates_of(case, chosen_config(case, 90), 5)} == {1, 2}

    def test_chosen_value_is_always_a_candidate(self) -> None:
        case = parse_case("triton:none:256")
        chosen = chosen_config(case, 89)
        assert chosen.stages == 1
        assert {config.stages for config in candidates_of(case, chosen, 1)} == {1, 2, 3, 4}


def outcome(config: Any, tops: float | None, **fields: Any) -> Outcome:
    ms = None if tops is None else 712 / tops
    return Outcome(config, **{"status": "right", "ms": ms, "tops": tops, "spills": 0, "is_final": True, **fields})


def sweep_of(*outcomes: Outcome, case: Case = CASE, chosen: Any = CHOSEN) -> Sweep:
    return Sweep(case, key_of(case, 90), chosen, list(outcomes))


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
    other, chosen = outcome(replace(CHOSEN, stages=4), tops, **fields), outcome(CHOSEN, 712)
    assert recommend([other, chosen], CHOSEN) is (other if is_recommended else chosen)


def test_recommendation_may_spill_as_much_as_the_chosen_configuration() -> None:
    better = outcome(replace(CHOSEN, stages=4), 800, spills=8)
    assert recommend([better, outcome(CHOSEN, 712, spills=8)], CHOSEN) is better


class TestReason:
    @pytest.mark.parametrize(
        ("best", "others", "reason"),
        [
            (
                {},
                [
                    ({"stages": 2}, 700, {}),
                    ({"stages": 4}, 690, {}),
                    ({"blocks": 1}, 669, {}),
                    ({"block_m": 128, "warps": 8}, 573, {}),
                    ({"warps": 8}, 500, {}),
                    ({"max_registers": 128}, None, {"status": "wrong"}),
                ],
                "712; 700 with stages=2; 669 with blocks=1; 573 with block_m=128, warps=8",
            ),
            ({}, [({"max_registers": 128}, 740, {"spills": 12})], "712; 740 with max_registers=128 and spills"),
            ({"max_registers": 168}, [({}, 700, {})], "712; 700 with max_registers=None"),
        ],
    )
    def test_reason_compares_with_other_candidates(self, best: Row, others: list[Any], reason: str) -> None:
        recommended = replace(CHOSEN, **best)
        outcomes = [outcome(replace(CHOSEN, **changes), tops, **fields) for changes, tops, fields in others]
        sweep = sweep_of(outcome(recommended, 712), *outcomes)
        assert reason_for(sweep) == reason
        row = f'ConfigKey("hopper", "int8_fp8", 128): {as_code(recommended)},'
        assert row_text(sweep) == f"    # {reason}\n    {row}"

    def test_stages_are_in_milliseconds(self) -> None:
        case, chosen = Case("select"), SelectConfig(512, 16)
        slower = Outcome(SelectConfig(128, 16), "right", ms=0.0313)
        sweep = sweep_of(Outcome(chosen, "right", ms=0.017), slower, case=case, chosen=chosen)
        assert reason_for(sweep) == "0.0170 ms; 0.0313 with columns=128"
        assert row_text(sweep).splitlines()[1] == '    StageKey("select"): SelectConfig(512, 16),'

    def test_long_reasons_stay_within_the_line(self) -> None:
        sweep = sweep_of(
            outcome(CHOSEN, 712),
            outcome(AttentionConfig(128, 1, 8, 2, 128), 600),
            outcome(AttentionConfig(128, 1, 8, 3, 128), 500),
            outcome(AttentionConfig(128, 1, 8, 4), 400),
        )
        lines = row_text(sweep).splitlines()
        assert len(lines) == 3
        assert all(len(line) <= 120 for line in lines)
        assert lines[1].startswith("    # ")

    def test_without_timings_there_is_no_row(self) -> None:
        sweep = sweep_of(outcome(CHOSEN, None))
        assert sweep.recommended is None
        assert reason_for(sweep) == row_text(sweep) == ""


class TestSweep:
    def test_every_candidate_is_checked_and_timed_with_the_chosen_configuration(self) -> None:
        workers = FakeWorkers(ms=lambda config: 1.0 + 0.1 * len(differences(config, CHOSEN)))
        outcomes = outcomes_of(workers)
        assert set(outcomes) == set(candidates_of(CASE, CHOSEN, 2))
        assert all(each.status == "right" and each.ms for each in outcomes.values())
        assert all(group[0] == CHOSEN for group in workers.groups)
        assert all(len(group) <= sweep_run.FIRST_GROUP for group in workers.groups)
        assert workers.turns[-1] > workers.turns[0]
        assert next(iter(outcomes)) == CHOSEN, "fastest first"
        assert outcomes[CHOSEN].tops == pytest.approx(712)

    def test_final_round_has_the_fastest_candidates_without_spills(self) -> None:
        spills, fast = replace(CHOSEN, max_registers=128), replace(CHOSEN, stages=2)
        speeds = {spills: 0.5, fast: 0.8}
        workers = FakeWorkers(answers={spills: {"spills": 12}}, ms=lambda config: speeds.get(config, 1.0))
        sweep = sweep_case(CASE, workers, 90)
        assert fast in workers.groups[-1]
        assert spills not in workers.groups[-1]
        assert sweep.recommended is not None
        assert sweep.recommended.config == fast

    def test_failures_of_every_kind_are_listed(self) -> None:
        wrong, fails, hangs, dies = candidates_of(CASE, CHOSEN, 1)[1:5]
        answers = {
            wrong: WrongResult("expected finite numbers, got NaN or Inf"),
            fails: CandidateFailure("OutOfResources: shared memory"),
            hangs: CandidateTimeout("no answer within 60 s"),
            dies: CandidateFailure("the process died"),
        }
        workers = FakeWorkers(answers=answers, ms=lambda config: 0.1 if config in answers else 1.0)
        sweep = sweep_case(CASE, workers, 90)
        status = {each.config: each.status for each in sweep.outcomes}
        assert [status[config] for config in answers] == ["wrong", "failed", "timed out", "failed"]
        assert not any(config in group for group in workers.groups for config in answers)
        assert sweep.recommended is not None
        assert sweep.recommended.config not in answers
        text = table_text(sweep)
        assert "wrong: expected finite numbers" in text
        assert "timed out: no answer within 60 s" in text

    def test_candidate_that_fails_during_timing(self) -> None:
        """The other candidates are timed one by one afterward."""
        workers = FakeWorkers()
        workers.breaks_timing_of = breaks = replace(CHOSEN, stages=4)
        outcomes = outcomes_of(workers, distance=1)
        assert outcomes[breaks].status == "failed"
        assert "while it was timed" in (outcomes[breaks].note or "")
        assert all(each.ms for config, each in outcomes.items() if config != breaks)

    def test_case_that_cannot_run(self) -> None:
        workers = FakeWorkers(answers={CHOSEN: CandidateFailure("RuntimeError: no memory")})
        sweep = sweep_case(CASE, workers, 90)
        assert sweep.problem == "the chosen configuration: failed, RuntimeError: no memory"
        assert {each.status for each in sweep.outcomes if each.config != CHOSEN} == {"not tried"}
        assert workers.groups == []
        assert "Not swept: the chosen configuration: failed, RuntimeError: no memory" in table_text(sweep)

    def test_wrong_result_of_the_chosen_configuration(self) -> None:
        """Without a correct reference, no candidate can be checked."""
        workers = FakeWorkers(answers={CHOSEN: WrongResult("garbage")})
        sweep = sweep_case(CASE, workers, 90)
        assert sweep.problem == "the chosen configuration: wrong, garbage"
        assert sweep.recommended is None

    def test_only_the_chosen_configuration_works(self) -> None:
        answers = {config: CandidateFailure("no") for config in candidates_of(CASE, CHOSEN, 2)[1:]}
        sweep = sweep_case(CASE, FakeWorkers(answers=answers), 90)
        assert sweep.recommended is not None
        assert reason_for(sweep) == "712"

    def test_known_failures_are_not_repeated(self) -> None:
        known = Outcome(replace(CHOSEN, stages=4), "wrong", "garbage")
        workers = FakeWorkers(answers={known.config: ValueError("tried again")})
        assert outcomes_of(workers, known=[known])[known.config] is known

    def test_sweep_of_a_stage(self) -> None:
        case = Case("score")
        sweep = sweep_case(case, FakeWorkers(ms=lambda _: 0.075), 90)
        assert reason_for(sweep).startswith("0.0750 ms; ")
        assert table_text(sweep).splitlines()[1].split()[0] == "ms"


class TestBudget:
    def test_missing_candidates_are_counted(self) -> None:
        workers = FakeWorkers(count=1)
        sweep = sweep_case(CASE, workers, 90, deadline=20.0, clock=workers.clock)
        missing = [each for each in sweep.outcomes if each.status == "not tried"]
        assert missing
        assert f"Out of time: {len(missing)} of {len(sweep.outcomes)} candidates" in table_text(sweep)
        assert sweep.recommended is not None, "the checked candidates are timed"

    def test_chosen_configuration_is_checked_even_without_time(self) -> None:
        workers = FakeWorkers(count=1)
        sweep = sweep_case(CASE, workers, 90, deadline=0.0, clock=workers.clock)
        status = {each.config: each.status for each in sweep.outcomes}
        assert status.pop(CHOSEN) == "right"
        assert set(status.values()) == {"not tried"}
        assert sweep.recommended is None

    def test_cases_share_the_remaining_time(self) -> None:
        cases = [parse_case(text) for text in ("triton:int8_fp8:128", "triton:none:128")]
        workers = FakeWorkers(count=1)
        swept = list(run_sweep(cases, workers, 90, machine={}, budget_s=50.0, clock=workers.clock))
        assert [sweep.case for sweep in swept] == cases
        assert all(sweep.recommended is not None and "Out of time" in table_text(sweep) for sweep in swept)

    def test_without_a_budget_all_candidates_are_timed(self) -> None:
        (sweep,) = run_sweep([CASE], FakeWorkers(), 90, machine={})
        assert not any(each.is_missing for each in sweep.outcomes)


class TestRows:
    def test_json_and_resuming(self, tmp_path: Path) -> None:
        wrong, slow = candidates_of(CASE, CHOSEN, 1)[1:3]
        workers = FakeWorkers(answers={wrong: WrongResult("garbage")}, ms=lambda config: 2.0 if config == slow else 1.0)
        sweep = sweep_case(CASE, workers, 90, distance=1)
        rows = [json.loads(json.dumps({**row, **asdict(GPU)})) for row in json_rows(sweep)]
        assert len(rows) == len(sweep.outcomes)
        best = [row for row in rows if row["is_recommended"]]
        assert len(best) == 1
        assert best[0]["is_chosen"]
        assert best[0]["row"] == row_text(sweep)
        assert {"suite", "kernel", "quantization", "head_dim", "variant", "tokens", "heads"} <= set(rows[0])
        assert {"ms", "tops", "error", "registers", "spills", "shared", "status", "gpu", "triton", "commit"} <= set(
            rows[0]
        )
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (known,) = known_failures(path, CASE, 90, asdict(GPU))
        assert (known.config, known.status, known.note) == (wrong, "wrong", "garbage")
        assert known_failures(path, replace(CASE, head_dim=64), 90, asdict(GPU)) == []
        assert known_failures(path, CASE, 90, asdict(replace(GPU, triton="3.9.0"))) == []
        assert known_failures(tmp_path / "none.jsonl", CASE, 90, {}) == []

    def test_table(self) -> None:
        slow = replace(CHOSEN, stages=2)
        fields = {"registers": 168, "shared": 65536, "error": 0.0123}
        lines = table_text(sweep_of(outcome(CHOSEN, 712, **fields), outcome(slow, 700, **fields))).splitlines()
        assert lines[0] == "triton:int8_fp8:128, N 32768, H 16 (* recommended, = in use)"
        assert lines[2].split() == ["*=", "712", "0.0123", "168", "0", "65536", *as_code(CHOSEN).split(), "right"]
        assert lines[3].split() == ["700", "0.0123", "168", "0", "65536", *as_code(slow).split(), "right"]
        assert lines[-1].strip() == 'ConfigKey("hopper", "int8_fp8", 128): AttentionConfig(64, 2, 4, 3),'


def test_process_that_dies_or_hangs_is_replaced() -> None:
    process = Process()
    try:
        first = process.run(60, os.getpid)
        assert process.run(60, os.getpid) == first
        with pytest.raises(CandidateFailure, match="the process died"):
            process.run(60, os._exit, 3)
        assert (second := process.run(60, os.getpid)) != first
        with pytest.raises(CandidateTimeout, match="no answer within 0 s"):
            process.run(0.3, time.sleep, 60)
        assert process.run(60, os.getpid) not in (first, second)
    finally:
        process.close()
    process.close()


def test_process_that_cannot_start_fails_the_candidate_and_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killing process 0 would end the caller's whole process group."""
    broken: Any = SimpleNamespace(
        submit=lambda *_: (_ for _ in ()).throw(sweep_run.BrokenProcessPool()), shutdown=lambda **_: None
    )
    killed: list[Any] = []
    monkeypatch.setattr(sweep_run, "ProcessPoolExecutor", lambda *_: broken)
    monkeypatch.setattr(sweep_run.os, "kill", lambda *args: killed.append(args))
    process = Process()
    with pytest.raises(CandidateFailure, match="the process died"):
        process.run(60, os.getpid)
    process._pool = broken  # as after an interrupt while the process starts
    process.close()
    assert not killed


def test_process_that_lost_its_device_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    process, ended = Process(), []
    monkeypatch.setattr(process, "close", lambda: ended.append(True))
    future: Any = SimpleNamespace(result=lambda _: (_ for _ in ()).throw(worker.DeviceLost("illegal address")))
    process._pool = SimpleNamespace(submit=lambda *_: future)  # type: ignore[assignment]
    with pytest.raises(CandidateFailure, match="illegal address"):
        process.run(60, os.getpid)
    assert ended


def test_workers_create_inputs_before_the_timeout_of_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(Process, "run", lambda _, *args: calls.append(args))
    Workers(1).run(7.0, worker.check, CASE, CHOSEN)
    prepare = (sweep_run.PREPARE_TIMEOUT_S, worker.perform, worker.prepare, CASE)
    assert calls == [prepare, (7.0, worker.perform, worker.check, CASE, CHOSEN)]


class TestCommand:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
    def test_needs_a_device(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert missing_device([CASE]) is not None
        with pytest.raises(SystemExit) as stopped:
            app.main(["sweep", "triton:int8_fp8:128"])
        assert stopped.value.code == 2
        assert "sparge: error: sweep: expected a CUDA device to measure on, got none" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["triton:int4"], "got 'int4' in 'triton:int4'"),
            (["triton", "--resume"], "expected --json with --resume"),
            (["triton", "--distance", "0"], "expected an integer of at least 1, got 0"),
        ],
    )
    def test_invalid_arguments_raise(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as stopped:
            app.main(["sweep", *arguments])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err

    def test_prints_tables_and_appends_rows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sweep_run, "missing_device", lambda _: None)
        monkeypatch.setattr("sparge.evaluate.machine.describe_gpu", lambda: GPU)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(sweep_run, "Workers", FakeWorkers)
        path = tmp_path / "rows.jsonl"
        with pytest.raises(SystemExit) as stopped:
            app.main(
                ["sweep", "triton:int8_fp8:128", "score:64", "--distance", "1", "--json", str(path), "--jobs", "1"]
            )
        assert not stopped.value.code
        printed = capsys.readouterr()
        assert 'ConfigKey("hopper", "int8_fp8", 128): AttentionConfig(64, 2, 4, 3),' in printed.out
        assert "score:64, N 32768" in printed.out
        assert "triton:int8_fp8:128 1/" in printed.err
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert {row["kernel"] for row in rows} == {"triton", "score"}
        assert all(row["gpu"] == GPU.gpu and row["commit"] == GPU.commit and row["time"] for row in rows)


class TestWorker:
    def test_every_kernel_has_a_launcher(self) -> None:
        pytest.importorskip("triton.experimental.gluon")
        assert set(worker.LAUNCHERS) == set(KERNELS)
        for kernel in KERNELS:
            assert callable(worker._launcher(kernel))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
    def test_without_a_device_every_request_fails(self) -> None:
        with pytest.raises(worker.DeviceLost):
            worker.perform(worker.prepare, CASE)

    def test_errors_become_failures_except_wrong_results(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(_: Any, error: Exception) -> None:
            raise error

        monkeypatch.setattr(worker, "_loads", {CASE: None})
        monkeypatch.setattr(worker, "_accepts_launches", lambda: True)
        with pytest.raises(worker.WrongResult, match="got garbage"):
            worker.perform(fail, CASE, worker.WrongResult("got garbage"))
        with pytest.raises(CandidateFailure, match="KeyError: 'no kernel'") as failed:
            worker.perform(fail, CASE, KeyError("no kernel"))
        assert not isinstance(failed.value, worker.DeviceLost)

    def test_capture_finds_functions_imported_under_other_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def function(number: int, *, more: int = 0) -> int:
            return number + more

        monkeypatch.setattr(sweep_run, "elsewhere", function, raising=False)
        with worker.recorded_calls(function) as calls:
            assert sweep_run.elsewhere(1, more=2) == 3  # type: ignore[attr-defined]
        assert calls == [((1,), {"more": 2})]
        assert sweep_run.elsewhere is function  # type: ignore[attr-defined]
        assert worker._again(function, calls)() == 3
        with pytest.raises(RuntimeError, match=r"expected a call of .*function, got none"):
            worker._again(function, [])

    def test_functions_without_a_result_are_compared_by_their_arguments(self) -> None:
        scale = torch.ones(3)
        flip = worker._again(_negate, [((scale,), {})])
        assert worker.tensors_in(flip())[0] is scale
        assert scale.tolist() == [-1.0] * 3


def _negate(tensor: torch.Tensor) -> None:
    tensor.neg_()
