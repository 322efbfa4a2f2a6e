"""Accuracy contract: errors of sampled queries, LSE error of INT8, recorded inputs, and tables of the page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import tables as page_tables
from benchmarks.numerics import __main__ as measurement
from benchmarks.numerics import captured
from benchmarks.numerics.captured import RECORDED, Recorded, captured_families
from benchmarks.numerics.families import FAMILIES, by_name
from benchmarks.numerics.limits import errors_of, limit_without_exp2, lse_limits, lse_rounding, output_limit
from benchmarks.numerics.problem import call, problem_of
from torch import Tensor

from conftest import exact_attention
from sparge.evaluate.capture import Captured, load, save
from sparge.evaluate.metrics import relative_l1
from sparge.evaluate.oracle import ExactRows, exact_rows

ROWS = torch.arange(100)


def rounded(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Round to 255 levels of the largest entry over the dimensions."""
    step = tensor.abs().amax(dims, keepdim=True) / 127
    return (tensor / step).round() * step


class TestErrors:
    def test_errors_of_sampled_queries(self) -> None:
        torch.manual_seed(0)
        exact = ExactRows(torch.randn(1, 2, 3, 8).double(), torch.randn(1, 2, 3).double())
        output, lse = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5)
        rows = torch.tensor([0, 2, 4])
        output[:, :, rows], lse[:, :, rows] = exact.output.float() * 1.01, exact.lse.float()
        lse[0, 1, 4] += 0.5
        errors = errors_of(output, lse, rows, exact)
        assert errors.relative_l1 == pytest.approx(0.01, rel=1e-4)
        assert (errors.lse_mean, errors.lse_worst) == (pytest.approx(0.5 / 6, rel=1e-4), pytest.approx(0.5, rel=1e-4))

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_infinite_errors_raise(self, bad: float) -> None:
        exact = ExactRows(torch.ones(1, 1, 2, 4).double(), torch.ones(1, 1, 2).double())
        output, lse = exact.output.float(), exact.lse.float()
        output[0, 0, 1, 2] = bad
        with pytest.raises(ValueError, match="expected a finite output"):
            errors_of(output, lse, torch.arange(2), exact)
        lse[0, 0, 1] = bad
        with pytest.raises(ValueError, match="expected a finite LSE"):
            errors_of(exact.output.float(), lse, torch.arange(2), exact)

    def test_limit_is_higher_for_p_without_exp2(self) -> None:
        assert limit_without_exp2(0.02, by_name("sink-13"), 8192) == pytest.approx(0.025)

    def test_limit_allows_lost_keys_beside_a_peak_of_few_queries(self) -> None:
        own_sinks, shared_sinks = by_name("own-sink-13"), by_name("sink-13-several")
        assert output_limit(own_sinks, 128, 4032) == output_limit(shared_sinks, 128, 131072) == 0.02
        assert output_limit(own_sinks, 128, 4096) - 0.02 == pytest.approx(127 / 4096)
        assert output_limit(own_sinks, 128, 8192) - 0.02 == pytest.approx(127 / 8192)
        assert limit_without_exp2(0.02, own_sinks, 8192) - 0.025 == pytest.approx(127 / 8192)


class TestLseRounding:
    @pytest.mark.parametrize(
        "name", ["random-2", "random-4", "sink-13", "field", "rising-40", "outliers-k-matched-3x30"]
    )
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_equals_the_error_of_rounding_to_int8(self, name: str, is_causal: bool) -> None:
        """Averaged over eight samples: queries share the rounding of keys, so one sample is not enough."""
        measured, derived = [], []
        for seed in range(8):
            query, key, value = by_name(name).make(100, 512, 1, 64, dtype=torch.float64, seed=seed)
            exact = exact_rows(query, key, value, ROWS, is_causal=is_causal)
            derived.append(lse_rounding(query, key, ROWS, exact, is_causal=is_causal).square().mean())
            smooth = key - key.mean(2, keepdim=True)
            balance = (smooth.abs().amax(2, keepdim=True) / query.abs().amax(2, keepdim=True)).sqrt()
            query8 = rounded(query * balance, (3,))
            key8 = rounded((smooth / balance).unflatten(2, (-1, 64)), (3, 4)).flatten(2, 3)
            lse = exact_rows(query8, key8, value, ROWS, is_causal=is_causal).lse
            lse = lse + (query @ key.mean(2, keepdim=True).mT / 8).squeeze(-1)
            measured.append((lse - exact.lse).square().mean())
        assert 0.6 < math.sqrt(sum(measured) / sum(derived)) < 1.5

    def test_p_without_exp2_adds_the_rounding_of_p(self) -> None:
        """With one dominant key, quantizing P changes its logarithm by 1/38; many keys average it out."""
        for name, low, high in (("sink-20", 0.02, 0.03), ("sink-0", 0.0, 0.002)):
            query, key, value = by_name(name).make(100, 1024, 1, 64)
            exact = exact_rows(query, key, value, ROWS)
            without, quantized = (lse_rounding(query, key, ROWS, exact, without_exp2=flag) for flag in (False, True))
            added = (quantized.square() - without.square()).sqrt()
            assert low <= added.min() and added.max() <= high

    def test_limits(self) -> None:
        query, key, value = by_name("tiny-queries").make(100, 1024, 1, 64)
        exact = exact_rows(query, key, value, ROWS)
        limits = lse_limits(query, key, ROWS, exact)
        assert limits == (pytest.approx(0.002, abs=1e-6), pytest.approx(0.02, abs=1e-6)), (
            "logits of 0 have no rounding error"
        )


class TestCaptured:
    SIZES = RECORDED["smollm2"].sizes

    def test_every_limit_has_a_recording(self) -> None:
        names = [f"{model}-{call}" for model, recorded in RECORDED.items() for call in recorded.limits]
        assert [family.name for family in captured_families()] == names

    def test_recordings_have_the_listed_sizes(self) -> None:
        for recorded in RECORDED.values():
            for recording in load(captured.FOLDER / recorded.file):
                assert recording.is_causal == recorded.is_causal
                assert recording.scale == recorded.sizes["head_dim"] ** -0.5

    def test_language_layers_differ_as_documented(self) -> None:
        """`benchmarks/capture.py` explains the choice of layers."""
        families = {family.name: family for family in captured_families()}
        weights, sink_values = {}, {}
        for name in ("smollm2-1", "smollm2-18", "smollm2-27"):
            query, key, value = families[name].make(**self.SIZES, dtype=torch.float32)
            visible = torch.ones(512, 1024, dtype=torch.bool).tril(512)
            logits = (query @ key.mT / 8).masked_fill(~visible, -math.inf)
            weights[name] = float(logits.softmax(-1)[..., 0].mean())
            sink_values[name] = float(value[0, 0, 0].norm() / value[0, 0].norm(dim=-1).median())
        assert weights["smollm2-1"] < 0.01 < 0.2 < weights["smollm2-27"] < 0.8 < weights["smollm2-18"]
        assert sink_values["smollm2-18"] < 0.1 < sink_values["smollm2-27"] < 0.3 < sink_values["smollm2-1"]

    def test_video_layers_differ_as_documented(self) -> None:
        families = {family.name: family for family in captured_families()}
        effective, logits = {}, {}
        for name in ("tiny-video-1-4", "tiny-video-3-15"):
            query, key, _ = families[name].make(**RECORDED["tiny-video"].sizes, dtype=torch.float32)
            scores = query @ key.mT * 128**-0.5
            effective[name] = float((1 / scores.softmax(-1).square().sum(-1)).mean())
            logits[name] = float(scores.max())
        assert effective["tiny-video-3-15"] < 5 < 800 < effective["tiny-video-1-4"]
        assert logits["tiny-video-1-4"] < 8 < 25 < logits["tiny-video-3-15"]

    def test_fewer_queries_are_the_last_queries_and_other_sizes_raise(self) -> None:
        family = captured_families()[0]
        everything, few = (family.make(**{**self.SIZES, "q_len": q_len})[0] for q_len in (512, 60))
        assert torch.equal(everything[:, :, -60:], few)
        with pytest.raises(ValueError, match=r"expected the recorded sizes .* got .*'kv_len': 2048"):
            family.make(**{**self.SIZES, "q_len": 60, "kv_len": 2048})
        with pytest.raises(ValueError, match=r"expected the recorded sizes .* got .'q_len': 513"):
            family.make(**{**self.SIZES, "q_len": 513})

    def test_step_is_part_of_the_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes = {"q_len": 3, "kv_len": 5, "heads": 1, "head_dim": 16, "kv_heads": 1}
        query, key, value = (torch.randn(1, 1, length, 16) for length in (3, 5, 5))
        call = Captured("transformer.blocks.4.attn1", 12, query, key, value, False, 0.25)
        save([call], tmp_path / "clip.safetensors")
        known = {"clip": Recorded("clip.safetensors", sizes, is_causal=False, limits={"4-12": 0.5})}
        monkeypatch.setattr(captured, "RECORDED", known)
        monkeypatch.setattr(captured, "FOLDER", tmp_path)
        (family,) = captured_families()
        assert (family.name, family.limit, family.may_be_causal) == ("clip-4-12", 0.5, False)
        assert torch.equal(family.make(**sizes, dtype=torch.float32)[0], query)


class TestMeasurement:
    def test_every_family_has_cases(self) -> None:
        sizes = {family.name: list(measurement.sizes_of(family)) for family in (*FAMILIES, *captured_families())}
        assert all(sizes.values())
        assert {size["kv_len"] for size in sizes["field"]} == {8192, 32768, 131072}
        assert {size.get("head_dim", 128) for size in sizes["sink-13"]} == {64, 128}
        assert any(size.get("is_causal") for size in sizes["sink-13"])

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_rows_have_errors_and_limits(self, is_causal: bool) -> None:
        """Each row has the errors of its call, and marks a family that exceeds its limit."""
        kernels = [("reference", name) for name in ("int8_fp8", "int8_fp8_fast", "int8_fp16")]
        problem = problem_of(by_name("sink-13"), 40, 512, head_dim=64, dtype=torch.bfloat16, is_causal=is_causal)
        rows = list(measurement.rows_of(problem, tuple(kernels)))
        assert [(row["backend"], row["kernel"]) for row in rows] == kernels
        exact, exact_lse = exact_attention(problem.query, problem.key, problem.value, is_causal=is_causal)
        for row in rows:
            output, lse = call(problem, row["kernel"], row["backend"])
            assert row["relative_l1"] == pytest.approx(relative_l1(output, exact), rel=1e-6)
            difference = (lse - exact_lse).abs()
            assert row["lse_mean"] == pytest.approx(float(difference.mean()), rel=1e-6)
            assert row["lse_worst"] == pytest.approx(float(difference.max()), rel=1e-6)
            limits = (row["target"], row["lse_mean_target"], row["lse_worst_target"])
            errors = (row["relative_l1"], row["lse_mean"], row["lse_worst"])
            assert row["passes"] == all(error <= limit for error, limit in zip(errors, limits, strict=True))
            assert row["cudnn_relative_l1"] is None and set(row["problems"]) == {"cudnn"}
            assert (row["tokens"], row["queries"], row["heads"], row["head_dim"]) == (512, 40, 1, 64)
        limit = 0.02 * 2**0.5  # a sink's logit in 64 channels
        assert [row["target"] for row in rows][::2] == pytest.approx([limit, limit])
        assert rows[1]["target"] == min(rows[0]["target"], 1.15 * rows[0]["relative_l1"] + 2e-3)

    def test_rows_of_a_recorded_layer(self) -> None:
        (family,) = (family for family in captured_families() if family.name == "smollm2-27")
        (size,) = measurement.sizes_of(family)
        problem = problem_of(family, **{**size, "q_len": 64})
        kernels = (("reference", "int8_fp8"), ("reference", "int8_fp16"))
        rows = list(measurement.rows_of(problem, kernels))
        assert [(row["tokens"], row["heads"], row["head_dim"], row["is_causal"]) for row in rows] == [
            (1024, 3, 64, True)
        ] * 2
        assert all(0.001 < row["relative_l1"] < 0.05 for row in rows)

    def test_failing_call_has_a_reason(self) -> None:
        problem = problem_of(by_name("sink-13"), 40, 512, head_dim=64)
        (row,) = measurement.rows_of(problem, (("hopper", "int8_fp8"),))
        assert row["relative_l1"] is row["lse_mean"] is None
        assert not row["passes"] and set(row["problems"]) == {"cudnn", "int8_fp8"}


MACHINE = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0", "commit": "0123456789"}


def numerics_row(family: str, kind: str, backend: str, kernel: str, error: float, **changed: Any) -> dict[str, Any]:
    row = {"suite": "numerics", "quick": False, "problems": {}, "tokens": 8192, "queries": 512, "heads": 2}
    row |= {"head_dim": 128, "is_causal": False, "family": family, "kind": kind, "backend": backend, "kernel": kernel}
    row |= {"relative_l1": error, "target": 0.02, "lse_mean": 0.001, "lse_worst": 0.0123, "passes": error <= 0.02}
    return row | {"cudnn_relative_l1": 0.0016, **MACHINE, **changed}


class TestTables:
    @pytest.fixture
    def tables(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setattr(page_tables, "RESULTS", tmp_path)
        return page_tables

    def test_page_is_unchanged_without_results(self, tables: Any) -> None:
        page = "".join(f"<!-- table: {name} -->\n<!-- /table -->\n" for name in tables.NUMERIC_TABLES)
        assert tables.fill(page) == page

    def test_numbers_in_tables(self, tables: Any, tmp_path: Path) -> None:
        rows = [
            numerics_row("sink-9", "sink", "hopper", "int8_fp8", 0.5),
            numerics_row("sink-9", "sink", "hopper", "int8_fp8", 0.004),
            numerics_row("sink-9", "sink", "hopper", "int8_fp8_fast", 0.0301),
            numerics_row("sink-13", "sink", "hopper", "int8_fp8", 0.0081),
            numerics_row("sink-13", "sink", "hopper", "int8_fp8_fast", 0.0107),
            numerics_row("field", "field", "hopper", "int8_fp8", 0.014, lse_mean=0.0042),
            numerics_row("field", "field", "hopper", "int8_fp8_fast", 0.0141, head_dim=64),
        ]
        (tmp_path / "numerics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        filled = {name: tables.fill(f"<!-- table: {name} -->\n<!-- /table -->") for name in tables.NUMERIC_TABLES}
        kinds = filled["numerics_kinds"]
        assert "| families | limit | `int8_fp8_fast` | `int8_fp8` | cuDNN bf16 |\n" in kinds
        assert "| sink | 0.020 | **0.0301** | 0.0081 | 0.0016 |\n" in kinds
        assert "| field | 0.020 |  | 0.0140 | 0.0016 |\n" in kinds, "rows of head_dim 64 are omitted"
        assert "NVIDIA H200; torch 2.11.0; triton 3.6.0; CUDA 13.0; commit 0123456789." in kinds

    def test_language(self, tables: Any, tmp_path: Path) -> None:
        row = {"case": "language", "variant": "dense,quantization=int8_fp8", "tokens": 8192, "windows": 8}
        row |= {"density": None, "kl": 0.00193, "kl_half": 0.00004, "agreement": 0.9876, "rise": 0.0012}
        row |= {"rise_half": 0.0003, "needle": 0.75, "dense_needle": 0.5, **MACHINE}
        (tmp_path / "evaluation.jsonl").write_text(json.dumps(row) + "\n")
        filled = tables.fill("<!-- table: numerics_language -->\n<!-- /table -->")
        assert "| `int8_fp8` | 0.00193 ± 0.00004 | 98.8% | +0.12 ± 0.03 % | 0.75 (0.50) |\n" in filled
