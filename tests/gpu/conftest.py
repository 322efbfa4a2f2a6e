"""Fixtures and helpers of the device tests: inputs on the device, the float64 oracle, a time limit, a report.

Most of their time is compilation, so several processes help: ``python -m pytest tests/gpu -n 9 --dist worksteal`` with
pytest-xdist (neighboring tests share kernels, so each process gets a run of them), or without these options in one
process. SPARGE_TEST_DEVICE (default "cuda") and SPARGE_TEST_BACKEND (default "triton") select what
is tested. With SPARGE_TEST_REPORT=FILE a run appends one JSON line to that file: counts and seconds of every test file,
the GPU and the versions.
"""

from __future__ import annotations

import faulthandler
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import assert_exact, exact_attention, make_qkv, plain_lse, relative_l1
from sparge.evaluate.machine import describe_gpu, describe_machine

DEVICE = torch.device(os.environ.get("SPARGE_TEST_DEVICE", "cuda"))
BACKEND = os.environ.get("SPARGE_TEST_BACKEND", "triton")
ON_CUDA = DEVICE.type == "cuda"
FP8 = ["int8_fp8", "int8_fp8_fast"] if BACKEND == "hopper" else ["int8_fp8"]
FASTEST = FP8[-1]
quantized_modes = pytest.mark.parametrize("quantization", [*FP8, "int8_fp16"])
modes = pytest.mark.parametrize("quantization", ["none", *FP8, "int8_fp16"])
cuda_only = pytest.mark.skipif(not ON_CUDA, reason="tests what only CUDA has, or sizes only a GPU computes in seconds")
LSE_TOLERANCE = 1e-3
SECONDS_PER_TEST = 300.0

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if WORKERS > 1:  # the reference runs on the CPU: one thread per core in every process would oversubscribe it
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // WORKERS))

COUNTS = ("passed", "failed", "skipped")
_results: dict[str, dict[str, float]] = {}
_started = time.perf_counter()


def make_inputs(*lengths: int, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return `make_qkv` on the device; the values do not depend on the device."""
    query, key, value = make_qkv(*lengths, **{"head_dim": 64, "dtype": dtype, **sizes})
    return query.to(DEVICE), key.to(DEVICE), value.to(DEVICE)


def seeded(seed: int) -> torch.Generator:
    """Return a generator on the device, for inputs that are too large for the host."""
    return torch.Generator(DEVICE).manual_seed(seed)


def random_bits(*shape: int, share: float = 0.6, seed: int = 5) -> Tensor:
    """Return a bool tensor on the device, True for about ``share`` of its entries."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share).to(DEVICE)


def exact(query: Tensor, key: Tensor, value: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
    """Compute `exact_attention` on the device of the inputs."""
    with query.device:
        return exact_attention(query, key, value, **call)


def assert_matches_exact(got: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, **call: Any) -> None:
    """Compare the output within the budget of torch's plain path in the same dtype, the LSE within 1e-3."""
    output, lse = got
    with query.device:
        assert_exact((output, plain_lse(query, key, **call)), query, key, value, **call)  # a float32 LSE always passes
    assert lse.dtype == torch.float32
    assert_lse_matches(lse, exact(query, key, value, **call)[1])


def assert_lse_matches(lse: Tensor, expected: Tensor) -> None:
    assert lse.shape == expected.shape
    empty = expected == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    moved = (lse.double() - expected)[~empty].abs()
    assert bool((moved <= LSE_TOLERANCE).all()), f"the LSE moved by {moved.max():.3g}"


def rms(difference: Tensor) -> float:
    """Return the root mean square over the finite entries."""
    return float(difference[difference.isfinite()].double().square().mean().sqrt())


def assert_like_the_reference(
    got: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    exact_result: tuple[Tensor, Tensor],
    quantization: str = "",
) -> None:
    """Check that output and LSE are as exact as those of the specification, and near them.

    The specification's distance to exact attention is the intended error (quantization, skipped products). P is
    rounded to FP8 relative to the maximum of its own step, and the number of blocks per step differs between backends:
    P's error is then an independent sample of the same size. V is rounded like P, so P's part is at most 1 / sqrt(2) of
    the whole. One of two blocks has the maximum of both, and P changes for the other one only: the two results differ
    by sqrt(2 / 2) of that part, .71 of the whole. Without exp2 it is part of the LSE as well.
    """
    is_code = quantization == "int8_fp8_fast"
    is_fp8 = is_code or quantization == "int8_fp8"
    intended = relative_l1(expected[0].double(), exact_result[0])
    assert relative_l1(got[0].cpu().double(), exact_result[0]) <= 1.1 * intended + 1e-3
    assert relative_l1(got[0].cpu(), expected[0].double()) <= (0.75 if is_fp8 else 0.5) * intended + 1e-3
    assert torch.equal(got[1].cpu() == -torch.inf, expected[1] == -torch.inf)
    intended = rms(expected[1] - exact_result[1])
    assert rms(got[1].cpu() - expected[1]) <= (1.0 if is_code else 0.25) * intended + LSE_TOLERANCE


def forget_recordings() -> None:
    """Drop all recordings, so that the next call of every kind is recorded again."""
    if BACKEND in ("triton", "hopper"):
        from sparge import call
        from sparge.dispatch import call_cache

        call_cache.forget()
        call.forget_recordings()


def equal(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Return whether all tensors are bitwise equal."""
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def assert_nearly_equal(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Compare calls that differ in the order of sums, in which a quantized value may round the other way."""
    assert relative_l1(got[0], expected[0].double()) < 5e-3
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=1e-2)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialized memory with NaN (integers: the largest number).

    torch fills it only in deterministic mode; the warnings of that mode (cuBLAS, cumsum) are ignored.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(4, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.fixture
def much_memory() -> Iterator[None]:
    """Release the memory of a test with billions of elements: other processes may share the GPU."""
    yield
    if ON_CUDA:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def real_stderr(pytestconfig: pytest.Config) -> Iterator[int]:
    """Return a file descriptor that pytest does not capture."""
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        descriptor = os.dup(2)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(autouse=True)
def time_limit(request: pytest.FixtureRequest, real_stderr: int) -> Iterator[None]:
    """End the process and print the stacks if a test takes too long.

    A hung kernel blocks Python in a C call, in which pytest-timeout's signal is not handled.
    """
    marker = request.node.get_closest_marker("timeout")
    asked = marker.args[0] if marker else request.config.getoption("timeout", None)
    faulthandler.dump_traceback_later(float(asked or SECONDS_PER_TEST), exit=True, file=real_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ON_CUDA and not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device; SPARGE_TEST_DEVICE names another")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout(seconds): how long a test may take")
    config.addinivalue_line("filterwarnings", "ignore:.*deterministic:UserWarning")  # see `poisoned_memory`


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a test; with pytest-xdist, the controller receives all reports."""
    file = Path(report.nodeid.partition("::")[0])
    if file.parent.name != Path(__file__).parent.name:
        return
    counts = _results.setdefault(file.name, {**dict.fromkeys(COUNTS, 0), "seconds": 0.0})
    counts["seconds"] += report.duration
    if report.when == "call" or report.outcome != "passed":
        counts[report.outcome] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get("SPARGE_TEST_REPORT")
    if not path or not _results or hasattr(session.config, "workerinput"):
        return
    files = [
        {"file": name, **counts, "seconds": round(counts["seconds"], 1)} for name, counts in sorted(_results.items())
    ]
    line = {
        "files": files,
        "backend": BACKEND,
        **asdict(describe_gpu() if ON_CUDA and torch.cuda.is_available() else describe_machine()),
        **{kind: sum(row[kind] for row in files) for kind in COUNTS},
        "processes": session.config.getoption("numprocesses", None) or 1,
        "seconds": round(time.perf_counter() - _started),
    }
    with open(path, "a") as report:
        report.write(json.dumps(line) + "\n")
