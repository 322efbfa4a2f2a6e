"""`sparge bench` and `benchmarks.gpu_suites` without a GPU: arithmetic, errors, and suites with stand-ins for CUDA."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import gpu_suites
from benchmarks.gpu_suites import MaskedProblem, PackedProblem
from benchmarks.measure import newest
from benchmarks.numerics import __main__ as numerics
from torch import Tensor

import sparge
from conftest import exact_attention
from sparge.backends.gpu.backend import CROSSOVER
from sparge.bench import cases as bench_cases
from sparge.bench import rivals
from sparge.bench import run as bench
from sparge.bench import timing as bench_timing
from sparge.bench.cases import DEFAULT_SUITES, SUITES, Case, Problem
from sparge.bench.inputs import make_inputs, random_blocks
from sparge.bench.table import VIEWS, problem_notes
from sparge.bench.timing import TimedCall, Timing
from sparge.call import Call
from sparge.evaluate.inputs import frame_grid
from sparge.evaluate.machine import Gpu
from sparge.evaluate.metrics import block_mass, relative_l1
from sparge.evaluate.oracle import sampled_queries

CPU = torch.device("cpu")
GPU = Gpu("NVIDIA H200", "9.0", "2.11.0", "3.6.0", "13.0", "0.1.0", "0123456789")
Row = dict[str, Any]


class TestArithmetic:
    def test_flop_and_tflops(self) -> None:
        problem = Problem(8192, 32)
        assert problem.flop == 4 * 32 * 8192**2 * 128
        assert bench_cases.tflops(problem.flop, 1.779) == pytest.approx(618, abs=0.1)
        assert bench_cases.tflops(problem.flop, None) is None
        assert Problem(8192, 32, is_causal=True).flop == problem.flop / 2

    def test_few_causal_queries_see_almost_all_keys(self) -> None:
        pairs = Problem(1024, 1, 1, is_causal=True, queries=128).flop / 4
        visible = torch.ones(128, 1024, dtype=torch.bool).tril(1024 - 128).sum()
        assert pairs == pytest.approx(int(visible), rel=1e-3)

    def test_ratio_needs_both_times(self) -> None:
        assert bench_cases.ratio(6.0, 2.0) == 3.0
        assert bench_cases.ratio(None, 2.0) is None
        assert bench_cases.ratio(6.0, None) is None

    @pytest.mark.parametrize("density", [1.0, 0.5, 0.25, 0.1])
    def test_random_blocks_have_the_density_in_every_query_block(self, density: float) -> None:
        shape = Problem(2048, 3).shape
        kept = random_blocks(shape, density, CPU)
        assert kept.shape == (1, 3, 16, 32)
        assert set(kept.sum(-1).flatten().tolist()) == {round(32 * density)}
        assert density == 1.0 or not torch.equal(kept[0, 0], kept[0, 1])
        executed = bench_cases.executed_flop(int(kept.sum()), 128)
        assert executed == pytest.approx(Problem(2048, 3).flop * round(32 * density) / 32)

    def test_random_causal_blocks_have_the_density_of_visible_blocks_and_the_diagonal(self) -> None:
        shape = Problem(1024, 2, is_causal=True).shape
        kept = random_blocks(shape, 0.5, CPU, is_causal=True)
        for row in range(8):
            visible = 2 * (row + 1)
            assert kept[0, :, row].sum(-1).tolist() == [max(2, visible // 2)] * 2
            assert kept[0, :, row, visible - 2 : visible].all()
            assert not kept[0, :, row, visible:].any()


class TestCases:
    def test_suites_match_the_documentation(self) -> None:
        assert DEFAULT_SUITES == ("end_to_end", "kernel", "memory")
        assert {name: len(groups) for name, groups in SUITES.items()} == {
            "end_to_end": 7,
            "kernel": 16,
            "memory": 3,
            "crossover": 60,
        }
        assert {*SUITES} == {*bench.ROWS_OF}
        assert [case.density for case in SUITES["kernel"] if case.with_flex] == [0.5, 0.25, 0.5, 0.25]
        relative = [math.prod(size) / CROSSOVER.scores for size in bench_cases.CROSSOVER_SIZES]
        assert any(0.5 < scores < 1 for scores in relative), "no size just below the crossover"
        assert any(1 <= scores < 1.1 for scores in relative), "no size just above the crossover"

    @pytest.mark.parametrize("quick", [True, False])
    def test_quick_runs_one_case_per_suite(self, quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench, "cuda_bench", lambda _: bench.Bench(CPU, "torch", "int8_fp8"))
        monkeypatch.setattr(bench, "measure", lambda _, case, rows_of: iter([{"case": case, "rows_of": rows_of}]))
        rows = list(bench.run_bench(("kernel", "memory"), quick))
        assert [row["rows_of"] for row in rows[:1] + rows[-1:]] == [bench.kernel, bench.memory]
        assert len(rows) == (2 if quick else 19)
        assert all(row["quick"] is quick and row["time"] for row in rows)

    def test_every_case_has_inputs(self) -> None:
        for case in itertools.chain(*SUITES.values()):
            frames, height, width = frame_grid(case.problem.tokens)
            assert frames * height * width == case.problem.tokens
        assert frame_grid(32768) == (32, 32, 32)
        with pytest.raises(ValueError, match="expected a multiple of 256, got 300"):
            frame_grid(300)


class TestInputs:
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_structure(self, is_causal: bool) -> None:
        problem = Problem(2048, 2, 64, is_causal, queries=512)
        query, key, value = make_inputs(problem, CPU)
        assert (query.shape, key.shape, value.shape) == ((1, 2, 512, 64), (1, 2, 2048, 64), (1, 2, 2048, 64))
        assert {tensor.dtype for tensor in (query, key, value)} == {torch.bfloat16}
        assert all(tensor.is_contiguous() for tensor in (query, key, value)), "some rivals require contiguous tensors"
        assert key.float().mean(2).std() > 1.5, "keys have an offset per channel"
        mass = block_mass(query, key, is_causal=is_causal)
        best = mass.topk(8).values.sum(-1).mean()
        assert best > 0.5, "a quarter of the blocks has more than half of the mass"
        if is_causal:
            assert mass[..., 0].mean() > 3 / 32, "text has a sink"

    def test_inputs_depend_on_the_seed(self) -> None:
        problem = Problem(512, 1, 64)
        first, again, other = (make_inputs(problem, CPU, seed)[0] for seed in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_fewer_queries_are_the_last_queries(self) -> None:
        everything = make_inputs(Problem(512, 1, 64), CPU)[0]
        few = make_inputs(Problem(512, 1, 64, queries=128), CPU)[0]
        assert torch.equal(few, everything[:, :, -128:])


def prepare_operands(inputs: Any, call: Call, with_mask: bool) -> tuple[Any, Any]:
    """Prepare the operands as the Triton pipeline does, with public functions on a CPU."""
    (query, key, _), shape = inputs, call.shape
    assert (shape.q_len, shape.kv_len, shape.head_dim) == (query.shape[2], key.shape[2], query.shape[3])
    assert call.scale == 1 / math.sqrt(shape.head_dim)
    mask = sparge.predict(query, key, sparsity=call.sparsity, is_causal=call.is_causal) if with_mask else None
    return inputs, mask


def attend(operands: Any, mask: Any, call: Call, backend: str) -> tuple[Tensor, Tensor]:
    if mask is None:
        mask = torch.ones(call.shape.q_blocks, call.shape.kv_blocks, dtype=torch.bool)
    return sparge.block_sparse_attention(
        *operands, mask, quantization=call.quantization, skipped=call.skipped, backend=backend, return_lse=True
    )


def fake_times(variants: dict[str, TimedCall], turns: int) -> dict[str, Timing]:
    """Run every variant once, and return 4 ms for dense kernels, and less for sparge in proportion to topk."""
    assert turns == bench.TURNS
    timings = {}
    for name, variant in variants.items():
        try:
            variant.once()
            kind, _, topk = name.partition(" ")
            ms = {"sparge": 2.0, "prepare": 0.1, "attend": 1.0}.get(kind, 4.0) * float(topk or 1.0)
            timings[name] = Timing(ms, ms / 2)
        except Exception as error:
            timings[name] = Timing(problem=bench_timing.reason(error))
    return timings


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> bench.Bench:
    functions = {
        "prepare_operands": prepare_operands,
        "repeat_preparation": lambda _call, _tensors, prepare: prepare(),
        "attention_kernel": lambda backend: partial(attend, backend=backend),
        "time_on_cuda": fake_times,
        "peak_extra_bytes": lambda run: run().nbytes // 2,
    }
    for name, function in functions.items():
        monkeypatch.setattr(bench, name, function)
    return bench.Bench(CPU, "torch", "int8_fp8")


@pytest.fixture
def fake_fa4(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Install a stand-in for FlashAttention-4, and return the list of its calls."""
    calls: list[str] = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, None]:
        calls.append(f"{tuple(q.shape)} {causal}")
        assert all(tensor.is_contiguous() for tensor in (q, k, v))
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2), None

    def flash_attn_varlen_func(q: Tensor, *_: Tensor, **options: Any) -> Tensor:
        assert options["cu_seqlens_k"] is options["cu_seqlens_q"] and options["max_seqlen_k"] == 256
        calls.append(f"packed {tuple(q.shape)} {options['cu_seqlens_q'].tolist()}")
        return q

    functions = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
    for module in (rivals, gpu_suites):
        monkeypatch.setattr(module, "import_fa4", lambda: SimpleNamespace(**functions))
    yield calls


def rows_of_case(on_cpu: bench.Bench, case: Case, *functions: Any) -> list[Row]:
    """Return the rows of a case after a round trip through JSON."""
    rows_of = functions or (bench.ROWS_OF[case.suite],)
    rows = [{**row, "quick": False, **bench.stamp(GPU)} for row in bench.measure(on_cpu, case, *rows_of)]
    back = [json.loads(json.dumps(row, allow_nan=False)) for row in rows]
    assert back == rows
    return back


class TestSuites:
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_end_to_end(self, on_cpu: bench.Bench, is_causal: bool) -> None:
        problem = Problem(1024, 1, 32, is_causal)
        rows = rows_of_case(on_cpu, Case("end_to_end", problem))
        query, key, value = make_inputs(problem, CPU)
        exact, _ = exact_attention(query.float(), key.float(), value.float(), is_causal=is_causal)
        sampled = sampled_queries(1024, CPU)
        assert [row["topk"] for row in rows] == [1.0, 0.5, 0.25, 0.1]
        for row in rows:
            topk = row["topk"]
            options = {"is_causal": is_causal, "quantization": "int8_fp8", "backend": "torch"}
            options |= {"sparsity": sparge.Dense()} if topk == 1.0 else {"topk": topk}
            output = sparge.attention(query, key, value, **options)
            expected = relative_l1(output[:, :, sampled], exact[:, :, sampled])
            assert row["relative_l1"] == pytest.approx(expected, rel=1e-4)
            mask = sparge.predict(query, key, topk=topk, is_causal=is_causal)
            assert row["density"] == mask.density()
            assert (row["flash_ms"], row["sparge_ms"], row["sparge_graph_ms"]) == (4.0, 2.0 * topk, topk)
            assert row["sparge_tflops"] == pytest.approx(problem.flop / (2.0 * topk) / 1e9)
            assert row["prepare_ms"] == pytest.approx(0.1 * topk)
            assert row["attend_ms"] == pytest.approx(0.5 * topk)
        assert rows[0]["relative_l1"] < 0.03
        assert [row["relative_l1"] for row in rows] == sorted(row["relative_l1"] for row in rows)

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_stages_compute_the_whole_call(self, on_cpu: bench.Bench, is_causal: bool) -> None:
        problem = Problem(1024, 1, 32, is_causal)
        inputs = make_inputs(problem, CPU)
        call = bench.resolved_call(on_cpu, inputs, problem, 0.25)
        output, _ = bench.stages(on_cpu, inputs, call)["attend"].once()
        assert torch.equal(output, bench.whole_call(on_cpu, inputs, problem, 0.25).once())
        assert call.skipped == ("drop" if is_causal else "mean")

    def test_missing_rival_gives_a_reason(self, on_cpu: bench.Bench) -> None:
        """A CPU has neither cuDNN nor FlashAttention-4."""
        row = rows_of_case(on_cpu, Case("end_to_end", Problem(512, 1, 64)))[1]
        assert row["cudnn_ms"] is row["cudnn_tflops"] is row["cudnn_relative_l1"] is row["fa4_ms"] is None
        assert set(row["problems"]) == {"cudnn", "fa4"}
        assert (row["fastest"], row["speedup"]) == ("flash", 4.0), "the speed-up is relative to kernels that ran"
        cells = VIEWS["end_to_end"].cells(row)
        assert (cells["dense"], cells["dense ms"], cells["sparge ms"]) == ("FA2", "4.00", "1.00")
        assert f"cudnn: {row['problems']['cudnn']}" in problem_notes([row, row])

    def test_fastest_dense_kernel_is_the_baseline(
        self, on_cpu: bench.Bench, fake_fa4: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """FlashAttention-4 gets its layout, computes the same result, and is the baseline if it is fastest."""

        def time(variants: dict[str, TimedCall], turns: int) -> dict[str, Timing]:
            return fake_times(variants, turns) | {"fa4": Timing(3.0, 2.5)}

        with monkeypatch.context() as patch:
            patch.setattr(bench, "time_on_cuda", time)
            row = rows_of_case(on_cpu, Case("end_to_end", Problem(512, 1, 64, True)))[1]
        assert (row["fastest"], row["speedup"], row["graph_speedup"]) == ("fa4", 3.0, 4.0), (
            "in a CUDA graph, FA2 takes 2 ms"
        )
        assert row["fa4_relative_l1"] < 1e-2 and "fa4" not in row["problems"]
        cells = VIEWS["end_to_end"].cells(row)
        assert (cells["dense"], cells["dense ms"]) == ("FA4", "3.00")
        assert set(fake_fa4) == {"(1, 512, 1, 64) True"}

    @pytest.mark.parametrize("queries", [512, 128])
    def test_crossover(self, on_cpu: bench.Bench, queries: int) -> None:
        rows = rows_of_case(on_cpu, Case("crossover", Problem(512, 1, 64, True, queries), topks=(0.5, 0.25)))
        assert [(row["topk"], row["speedup"], row["graph_speedup"]) for row in rows] == [
            (0.5, 4.0, 4.0),
            (0.25, 8.0, 8.0),
        ]
        assert {row["queries"] for row in rows} == {queries}

    def test_kernel(self, on_cpu: bench.Bench) -> None:
        rows = rows_of_case(on_cpu, Case("kernel", Problem(1024, 2, 64), density=0.25))
        assert [row["kernel"] for row in rows] == ["int8_fp8", "int8_fp16", "none"]
        for row in rows:
            assert (row["asked_density"], row["density"], row["graph_ms"]) == (0.25, 0.25, 2.0)
            assert row["executed_tops"] == pytest.approx(4 * 2 * 1024**2 * 64 * 0.25 / 2.0 / 1e9)
        errors = {row["kernel"]: row["relative_l1"] for row in rows}
        assert errors["none"] < 0.004 < errors["int8_fp8"] < 0.05
        assert errors["int8_fp16"] < errors["int8_fp8"]

    def test_memory(self, on_cpu: bench.Bench) -> None:
        (row,) = rows_of_case(on_cpu, Case("memory", Problem(512, 2, 64)))
        assert (row["input_bytes"], row["output_bytes"]) == (3 * 2 * 512 * 64 * 2, 2 * 512 * 64 * 2)
        assert row["extra_share"] == pytest.approx(1 / 6)

    def test_failing_case_is_one_row(self, on_cpu: bench.Bench) -> None:
        (row,) = rows_of_case(on_cpu, Case("kernel", Problem(300, 1, 64), density=0.5))
        assert row["problems"] == {"case": "ValueError: tokens: expected a multiple of 256, got 300"}
        assert VIEWS["kernel"].cells(row)["ms"] == "n/a"
        assert newest([row], "kernel") == []

    def test_broken_kernel_affects_only_its_own_columns(
        self, on_cpu: bench.Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("illegal memory access")

        monkeypatch.setattr(bench, "attention_kernel", lambda _: broken)
        row = rows_of_case(on_cpu, Case("end_to_end", Problem(512, 1, 64)))[0]
        assert row["attend_ms"] is None
        assert row["problems"]["attend"] == "RuntimeError: illegal memory access"
        assert row["prepare_ms"] == 0.1


class TestGpuSuites:
    @pytest.mark.parametrize("main", [gpu_suites.main, numerics.main])
    def test_without_a_gpu_the_error_is_one_line(
        self, main: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr("sys.argv", ["main"])
        with pytest.raises(SystemExit):
            main()
        assert capsys.readouterr().err.endswith("error: expected a CUDA device, got none\n")

    def test_cases(self) -> None:
        assert {name: len(cases) for name, cases in gpu_suites.SUITES.items()} == {
            "hopper": 8,
            "dense": 4,
            "packed": 8,
            "masks": 7,
        }
        for case in itertools.chain(*gpu_suites.SUITES.values()):
            assert gpu_suites.ROWS_OF[case.suite]
            assert frame_grid(case.problem.tokens)

    def test_named_kernels(self, on_cpu: bench.Bench) -> None:
        kernels = {"int8_fp8": ("int8_fp8", "torch"), "twin int8_fp8": ("int8_fp8", "reference")}
        case = Case("hopper", Problem(256, 1, 64), density=0.5)
        rows = rows_of_case(on_cpu, case, partial(bench.kernel, kernels=kernels))
        assert [row["kernel"] for row in rows] == list(kernels)
        assert all(0.001 < row["relative_l1"] < 0.05 for row in rows)

    def test_dense_calls_in_16_bits(self, on_cpu: bench.Bench) -> None:
        case = Case("dense", Problem(256, 1, 64), (1.0,))
        (row,) = rows_of_case(on_cpu, case, gpu_suites.dense_calls)
        assert (row["quantization"], row["density"]) == ("none", 1.0)
        assert 0.0001 < row["relative_l1"] < 0.004  # quantized: above 0.004
        assert (row["fastest"], row["speedup"]) == ("flash", 2.0)  # `fake_times`

    def test_flash_attention_4_runs_all_segments_in_one_call(self, on_cpu: bench.Bench, fake_fa4: list[str]) -> None:
        case = Case("packed", PackedProblem(256, 1, 32, segments=3), (0.5,))
        (row,) = rows_of_case(on_cpu, case, gpu_suites.packed, gpu_suites.packed_inputs)
        assert row["fa4_ms"] == 4.0 and row["fastest"] == "fa4", "the first kernel wins a tie"
        assert row["fa4_relative_l1"] > 0.1, "the stand-in returns its queries"
        assert set(fake_fa4) == {"packed (768, 1, 32) [0, 256, 512, 768]"}

    @pytest.mark.parametrize("unequal", [False, True])
    def test_packed(self, on_cpu: bench.Bench, unequal: bool) -> None:
        problem = PackedProblem(256, 1, 32, segments=3, unequal=unequal)
        lengths = [128, 256, 192] if unequal else [256] * 3
        assert problem.lengths == lengths
        assert problem.flop == sum(Problem(length, 1, 32).flop for length in lengths)
        sparge.reset_stats()
        rows = rows_of_case(on_cpu, Case("packed", problem, (1.0, 0.5)), gpu_suites.packed, gpu_suites.packed_inputs)
        calls = 3 if unequal else 1
        assert sparge.stats().sparse == 3 + calls + calls, "a loop, a packed call, and the call for its error"
        inputs = gpu_suites.packed_inputs(problem, CPU)
        assert [tensor.shape for tensor in inputs] == [(3, 1, 256, 32)] * 3
        assert not torch.equal(inputs[0][0], inputs[0][1])
        segments = [
            tuple(tensor[index : index + 1, :, :length] for tensor in inputs) for index, length in enumerate(lengths)
        ]
        exact = torch.cat([exact_attention(*(tensor.float() for tensor in each))[0] for each in segments], 2)
        for row, topk in zip(rows, (1.0, 0.5), strict=True):
            options = {"sparsity": sparge.Dense()} if topk == 1.0 else {"topk": topk}
            options |= {"quantization": "int8_fp8", "backend": "torch"}
            parts = [sparge.attention(*segment, **options) for segment in segments]
            expected = relative_l1(torch.cat(parts, 2), exact)  # no queries are sampled at this length
            assert row["relative_l1"] == pytest.approx(expected, rel=1e-4)
            assert (row["segments"], row["topk"], row["density"]) == (3, topk, topk)
            assert (row["sparge_ms"], row["loop_ms"], row["speedup"]) == (2.0 * topk, 4.0 * topk, 2.0 / topk)
            assert row["loop_speedup"] == 2.0 and set(row["problems"]) == {"fa4", "cudnn"}
        other = {**rows[1], "segments": 4}
        assert newest([rows[1], other], "packed") == [rows[1], other]

    @pytest.mark.parametrize("mask", ["documents", "window", "random", "bias"])
    def test_masks(self, on_cpu: bench.Bench, mask: str) -> None:
        problem = MaskedProblem(256, 2, 32, mask=mask)
        (row,) = rows_of_case(on_cpu, Case("masks", problem, (0.5,)), gpu_suites.masks)
        inputs = make_inputs(problem, CPU)
        entries = gpu_suites.make_mask(problem, CPU)
        assert entries.shape == (1, 2 if mask == "bias" else 1, 256, 256)
        exact, _ = exact_attention(*(tensor.float() for tensor in inputs), attn_mask=entries)
        got = sparge.attention(*inputs, entries, topk=0.5, backend="torch")
        assert row["relative_l1"] == pytest.approx(relative_l1(got, exact), rel=1e-4)
        density = sparge.predict(*inputs[:2], attn_mask=entries, topk=0.5, backend="torch").density()
        assert (row["mask"], row["density"], row["problems"]) == (mask, density, {})
        assert None not in (row["sdpa_ms"], row["sparge_ms"], row["prepare_ms"], row["attend_ms"])
        assert newest([row, {**row, "mask": "another"}], "masks") == [row, {**row, "mask": "another"}]
