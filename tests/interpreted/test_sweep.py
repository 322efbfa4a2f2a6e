"""The worker of tools/gpu/sweep.py with interpreted kernels: loads, correct and wrong results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sweep_cases import current_config, parse_case
from sweep_worker import Load, WrongResult, check, launcher_of, load_of, tensors_in

from sparge.backends.gpu.config_table import override

CPU = torch.device("cpu")
TOKENS = 256


def load(text: str) -> Load:
    return load_of(replace(parse_case(text), tokens=TOKENS, heads=1), CPU)


@pytest.fixture(scope="module")
def plain() -> Load:
    return load("triton:none:64")


@contextmanager
def changed(loaded: Load, change: Any) -> Iterator[Load]:
    """Yield a copy of a `Load` (a repeatable launch) that calls ``change`` with its result tensors after each run."""

    def run() -> Any:
        result = loaded.run()
        change(tensors_in(result))
        return result

    wrong = copy(loaded)
    wrong.run = run
    yield wrong


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("triton:int8_fp16:64:mask", 0.02),
        ("triton:none:64:mask_per_query", 0.01),
    ],
)
def test_attention_with_another_configuration(text: str, error: float) -> None:
    loaded = load(text)
    assert loaded.expected_error < error, "the oracle has the same mask"
    current = current_config(loaded.case, 90)
    result = check(loaded, replace(current, block_m=32, stages=2))
    assert result["error"] < error
    assert set(result) == {"error", "registers", "spills", "shared"}


def test_overrides_reach_the_launch(plain: Load) -> None:
    config = replace(current_config(plain.case, 90), block_m=32, warps=8)
    with patch("sparge.backends.triton.attention.launch") as launch, override("triton", config):
        plain.run()
    options = launch.call_args.kwargs
    assert (options["SPEC"].block_m, options["num_warps"], options["SPEC"].counts_blocks) == (32, 8, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda results: results[0].mul_(1.5), "error: expected at most"),
        (lambda results: results[0][0, 0, 5].fill_(float("nan")), "expected finite numbers"),
        (lambda results: results[0][0, 0, 128:256].neg_(), "expected at most"),
        (lambda results: results[1][0, 0, 7].add_(1.0), "LSE difference: expected at most"),
    ],
)
def test_wrong_attention_raises(plain: Load, change: Any, message: str) -> None:
    with changed(plain, change) as wrong, pytest.raises(WrongResult, match=message):
        check(wrong, current_config(plain.case, 90))


@pytest.mark.parametrize("kernel", ["reduce", "quantize_key_value", "select"])
def test_stages_with_another_configuration(kernel: str) -> None:
    loaded = load(f"{kernel}:64")
    current = current_config(loaded.case, 90)
    changes = {"reduce": {"rows": 32}, "quantize_key_value": {"warps": 8}, "select": {"columns": 256}}
    assert check(loaded, replace(current, **changes[kernel]))["error"] <= 1e-3
    with (
        changed(loaded, lambda results: results[0].add_(1)) as wrong,
        pytest.raises(WrongResult, match="expected at most"),
    ):
        check(wrong, current)


def test_mask_stage_has_a_mask() -> None:
    loaded = load("mask:64")
    assert check(loaded, replace(current_config(loaded.case, 90), blocks=4))["error"] == 0


def test_loading_a_stage_that_does_not_run_raises() -> None:
    """A call that selects its blocks gets the bias of means from the selection."""
    with pytest.raises(RuntimeError, match=r"expected a call of .*replaced_bias, got none"):
        load("replacement:64")


def test_captures_restore_the_launcher(plain: Load) -> None:
    function = launcher_of("triton")
    assert not hasattr(function, "__wrapped__")
    assert load("triton:int8_fp16:64").case != plain.case, "a second capture records its own call"
    assert launcher_of("triton") is function
