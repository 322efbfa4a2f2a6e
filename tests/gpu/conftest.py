"""Fixtures and helpers for the device tests: inputs on the device, the float64 oracle, a time limit, a report.

Most of the time is compilation, so use several processes: ``python -m pytest tests/gpu -n 9 --dist worksteal`` with
pytest-xdist (consecutive tests share kernels, so each process gets consecutive tests), or without these options in one
process. SPARGE_TEST_DEVICE (default "cuda") and SPARGE_TEST_BACKEND (default "triton") select what
is tested. With SPARGE_TEST_REPORT=FILE, a run appends a JSON line to that file: counts and seconds of every test file,
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
cuda_only = pytest.mark.skipif(not ON_CUDA, reason="needs CUDA features, or is too slow without a GPU")
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
    """Check the output against the error budget of torch's plain path in the same dtype, and the LSE within 1e-3."""
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
    """Return the root mean square of the finite entries."""
    return float(difference[difference.isfinite()].double().square().mean().sqrt())


def assert_close_to_reference(
    got: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    exact_result: tuple[Tensor, Tensor],
    quantization: str = "",
) -> None:
    """Check that output and LSE are as accurate as those of the reference, and close to them.

    The error of the reference against exact attention is the intended error (quantization, skipped products). P is
    rounded to FP8 relative to the maximum of its step, and backends have different numbers of blocks per step. The
    rounding error of P is then an independent sample of the same size. V has the same rounding error, so P contributes
    at most 1 / sqrt(2) of the total. In a step of two blocks, P changes only in the block that does not have the
    maximum. The two results therefore differ by sqrt(2 / 2) of P's contribution, 0.71 of the total. Without exp2, the
    error of P is part of the LSE as well.
    """
    is_exponential_free = quantization == "int8_fp8_fast"
    is_fp8 = is_exponential_free or quantization == "int8_fp8"
    intended = relative_l1(expected[0].double(), exact_result[0])
    assert relative_l1(got[0].cpu().double(), exact_result[0]) <= 1.1 * intended + 1e-3
    assert relative_l1(got[0].cpu(), expected[0].double()) <= (0.75 if is_fp8 else 0.5) * intended + 1e-3
    assert torch.equal(got[1].cpu() == -torch.inf, expected[1] == -torch.inf)
    intended = rms(expected[1] - exact_result[1])
    assert rms(got[1].cpu() - expected[1]) <= (1.0 if is_exponential_free else 0.25) * intended + LSE_TOLERANCE


def forget_recordings() -> None:
    """Drop all cached calls and recordings, so the next call is recorded again."""
    if BACKEND in ("triton", "hopper"):
        from sparge import call
        from sparge.dispatch import call_cache

        call_cache.forget()
        call.forget_recordings()


def equal(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Return whether all tensors are bitwise equal."""
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def assert_nearly_equal(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Compare calls with a different order of sums, where a quantized value may round the other way."""
    assert relative_l1(got[0], expected[0].double()) < 5e-3
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=1e-2)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialized memory with NaN (integers: the maximum).

    torch does this only in deterministic mode; the warnings of that mode (cuBLAS, cumsum) are ignored.
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
def empty_cuda_cache() -> Iterator[None]:
    """Release cached GPU memory after a test with billions of elements: other processes may share the GPU."""
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

    A hung kernel blocks Python in a C call, where the signal of pytest-timeout is not handled.
    """
    marker = request.node.get_closest_marker("timeout")
    seconds = marker.args[0] if marker else request.config.getoption("timeout", None)
    faulthandler.dump_traceback_later(float(seconds or SECONDS_PER_TEST), exit=True, file=real_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ON_CUDA and not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device; SPARGE_TEST_DEVICE names another")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout(seconds): time limit of a test")
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
