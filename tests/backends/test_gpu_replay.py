"""Replays launch the recorded kernels again, with the addresses of the tensors of the new call.

The kernels are Python functions that access CPU memory by address, as GPU kernels access theirs.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from fake_driver import FakeDriver
from sparge.backends.gpu import driver, replay
from sparge.backends.gpu.config_table import override
from sparge.backends.gpu.launch import buffer_like, zeros_like
from sparge.backends.gpu.replay import ALIGNMENT, MAX_RECORDINGS, _predecessors, _spans, in_branch, replayed
from sparge.backends.triton import configs as triton_configs
from sparge.call import Call
from sparge.masks.geometry import Shape

LENGTH = 300
SIZES = [8, 8, 8, 4, 4, 8, 8]
"""Bytes of the kernel's parameters: three tensors, two numbers, and two scratch buffers that it does not use."""
DRIVER = FakeDriver()


def compute(arguments: list[bytes]) -> None:
    """Compute ``target[i] = first[i] * factor + second[i]`` for ``length`` float32 numbers, by address."""
    *addresses, factor, length = struct.unpack("=3Qfi", b"".join(arguments[:5]))
    first, second, target = ((ctypes.c_float * length).from_address(address) for address in addresses)
    for i in range(length):
        target[i] = first[i] * factor + second[i]


class Kernel:
    """A compiled kernel with the attributes that the recorder and the driver read."""

    name = "fused"
    src = SimpleNamespace(
        signature={
            **dict.fromkeys(("first_ptr", "second_ptr", "target_ptr"), "*fp32"),
            "factor": "fp32",
            "length": "i32",
            "SIZE": "constexpr",
        }
    )
    metadata = SimpleNamespace(
        global_scratch_size=0,
        profile_scratch_size=0,
        num_warps=1,
        shared=0,
        tensordesc_meta=None,
    )

    def __init__(self) -> None:
        self.starts = 0
        self.function = DRIVER.add_function(self.start, SIZES)

    def start(self, programs: int, arguments: list[bytes]) -> None:
        assert programs == 7
        self.starts += 1
        compute(arguments)


KERNEL = Kernel()


def fused(first: Tensor, second: Tensor, target: Tensor, factor: float, length: int = LENGTH) -> None:
    """Run the kernel and record the launch, as `launch` does."""
    numbers = struct.pack("=3Qfi", first.data_ptr(), second.data_ptr(), target.data_ptr(), factor, length)
    KERNEL.start(7, [numbers])
    recorder = replay.current_recorder.get()
    if recorder is not None:
        recorder.add_launch(KERNEL, 7, [], [first, second, target], [factor, length, 64])  # type: ignore[arg-type]


def chain(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Compute two results through four buffers. ``a`` is no longer needed when ``d`` is written."""
    a, b, c, d, output, lse = (buffer_like(first, True, LENGTH) for _ in range(6))
    fused(first, second, a, 1.0)
    fused(a, first, b, 2.0)
    fused(b, a, c, 3.0)
    fused(c, b, d, 4.0)
    fused(d, second, output, 5.0)
    fused(d, c, lse, 6.0)
    return output, lse


def counted(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `chain`, and add the first input to its LSE through a buffer of zeros."""
    count = zeros_like(first, LENGTH)
    fused(count, first, count, 1.0)
    output, lse = chain(first, second)
    fused(count, lse, lse, 1.0)
    return output, lse


def expected(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    a = first + second
    b = 2 * a + first
    c = 3 * b + a
    d = 4 * c + b
    return 5 * d + second, 6 * d + c


def inputs(seed: int, **changes: Any) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, LENGTH + 1, generator=generator).unbind()
    return first[:LENGTH].clone(), second[:LENGTH].clone().to(**changes)


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(driver, "load", lambda: DRIVER)
    monkeypatch.setattr(replay, "_current_stream", lambda _: 0)
    monkeypatch.setattr(replay, "_is_capturing", lambda: False)
    yield
    assert replay.current_recorder.get() is None


class Caller:
    """Call a function through `replayed`, and count how often the function itself runs."""

    def __init__(self, function: Callable[..., tuple[Tensor, Tensor]] = chain) -> None:
        self.function, self.runs = function, 0
        self.call = Call(Shape(1, 1, 1, LENGTH, LENGTH, 64, 64), False, 1.0)

    def __call__(self, *tensors: Tensor | None, kind: str = "a kind") -> tuple[Tensor, Tensor]:
        def run() -> tuple[Tensor, Tensor]:
            self.runs += 1
            return self.function(*tensors)

        return replayed(self.call.recordings, kind, tensors, run)


def assert_correct(got: tuple[Tensor, Tensor], tensors: tuple[Tensor, Tensor]) -> None:
    for result, correct in zip(got, expected(*tensors), strict=True):
        torch.testing.assert_close(result, correct, rtol=1e-5, atol=1e-5)


def test_later_calls_are_replayed_on_new_tensors() -> None:
    call = Caller()
    results = []
    for seed in range(4):
        tensors = inputs(seed)
        starts = KERNEL.starts
        results.append((call(*tensors), tensors))
        assert KERNEL.starts == starts + 6
    assert call.runs == 1
    for got, tensors in results:  # earlier results are not overwritten
        assert_correct(got, tensors)


def test_buffers_share_the_workspace() -> None:
    call = Caller()
    call(*inputs(0))
    (recorded,) = call.call.recordings.values()
    assert recorded is not None
    a, b, c, d = recorded.offsets
    assert len({a, b, c}) == 3, "c is computed from a and b, so no two share memory"
    assert d == a
    assert recorded.workspace_bytes == 3 * 1536, "1200 bytes each, rounded up to a multiple of 512"


@pytest.mark.parametrize("change", ["kind", "dtype", "stride", "alignment", "fewer tensors"])
def test_different_metadata_is_recorded_separately(change: str) -> None:
    call = Caller()
    first, second = inputs(0)
    call(first, second)
    if change == "kind":
        call(first, second, kind="another")
    elif change == "dtype":
        call(first, second.double())  # the fake kernel misreads it; only the number of runs matters
    elif change == "stride":
        call(first, torch.randn(LENGTH, 2)[:, 0])
    elif change == "alignment":
        call(first, torch.randn(LENGTH + 1)[1:])
    else:
        call.function = lambda tensor: chain(tensor, tensor)
        call(first)
    assert call.runs == 2


def test_calls_with_one_tensor_for_two_arguments_are_recorded_separately() -> None:
    """A recording with one tensor for both arguments cannot be replayed with two tensors."""
    call = Caller()
    for tensors in (inputs(0), inputs(1)):
        for pair in ((tensors[0], tensors[0]), tensors, (tensors[1], tensors[1])):
            assert_correct(call(*pair), pair)
    assert call.runs == 2


def test_calls_with_torch_operators_in_between_are_not_replayed() -> None:
    call = Caller(lambda first, second: chain(first, second * 2))
    for seed in range(3):
        first, second = inputs(seed)
        assert_correct(call(first, second), (first, second * 2))
    assert call.runs == 3


def test_calls_with_a_buffer_that_torch_fills_are_not_replayed() -> None:
    """Filling a buffer in place cannot be detected from its address, and a replay does not repeat it."""

    def counting(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        zeros = buffer_like(first, True, LENGTH).zero_()
        output, lse = chain(first, second)
        fused(zeros, lse, lse, 1.0)
        return output, lse

    call = Caller(counting)
    for seed in range(3):
        tensors = inputs(seed)
        assert_correct(call(*tensors), tensors)
    assert call.runs == 3


def test_zero_buffers_are_cleared_for_every_replay() -> None:
    call = Caller(counted)
    for seed in range(4):
        tensors = inputs(seed)
        output, lse = call(*tensors)
        correct = expected(*tensors)
        torch.testing.assert_close(output, correct[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, correct[1] + tensors[0], rtol=1e-5, atol=1e-5)
    assert call.runs == 1


def test_calls_whose_result_torch_computes_are_not_replayed() -> None:
    call = Caller(lambda first, second: (chain(first, second)[0] * 2, chain(first, second)[1]))
    for seed in range(3):
        tensors = inputs(seed)
        output, lse = call(*tensors)
        assert_correct((output / 2, lse), tensors)
    assert call.runs == 3


def test_calls_that_return_an_input_are_not_replayed() -> None:
    call = Caller(lambda first, second: (chain(first, second)[0], second))
    for seed in range(3):
        tensors = inputs(seed)
        assert call(*tensors)[1] is tensors[1]
    assert call.runs == 3


def test_calls_with_an_offset_view_of_an_input_are_not_replayed() -> None:
    """The offset of the view may differ in the next call."""
    call = Caller(lambda first, second: chain(first, second[1:]))
    for seed in range(3):
        first, second = inputs(seed)
        longer = torch.cat([second[:1], second])
        assert_correct(call(first, longer), (first, second))
    assert call.runs == 3


def test_calls_with_views_at_offset_0_are_replayed() -> None:
    def viewed(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        a, output, lse = (buffer_like(first, True, LENGTH) for _ in range(3))
        fused(first.view(2, -1).expand(3, 2, -1), second[: LENGTH // 2], a.view(torch.int32)[None], 1.0)
        fused(a, second.view(2, -1), output, 2.0)
        fused(a.view(-1, 2), first, lse, 3.0)
        return output, lse

    call = Caller(viewed)
    for seed in range(4):
        first, second = inputs(seed)
        output, lse = call(first, second)
        torch.testing.assert_close(output, 2 * (first + second) + second, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, 3 * (first + second) + first, rtol=1e-5, atol=1e-5)
    assert call.runs == 1


def test_calls_that_write_to_an_input_are_replayed() -> None:
    def adding(first: Tensor, second: Tensor, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        a, b = chain(first, second)
        fused(a, output, output, 1.0)
        fused(b, lse, lse, 1.0)
        return output, lse

    call = Caller(adding)
    for seed in range(4):
        tensors = inputs(seed)
        output, lse = torch.full((LENGTH,), 7.0), torch.full((LENGTH,), 8.0)
        got = call(*tensors, output, lse)
        assert got[0] is output
        assert got[1] is lse
        correct = expected(*tensors)
        torch.testing.assert_close(output, correct[0] + 7.0, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, correct[1] + 8.0, rtol=1e-5, atol=1e-5)
    assert call.runs == 1


def test_calls_with_a_missing_input_are_recorded_separately() -> None:
    first, second = inputs(0)
    call = Caller(lambda *_: chain(first, second))
    for tensors in ((first, None, second), (None, first, second), (first, None, second), (None, first, second)):
        assert_correct(call(*tensors), (first, second))
    assert call.runs == 2


def test_errors_clear_the_current_recorder() -> None:
    def broken(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        chain(first, second)
        raise RuntimeError("out of memory")

    call = Caller(broken)
    tensors = inputs(0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            call(*tensors)
    call.function = chain
    assert_correct(call(*tensors), tensors)


def test_the_number_of_recordings_is_bounded() -> None:
    call, tensors = Caller(), inputs(0)
    for number in range(2 * MAX_RECORDINGS + 3):
        assert_correct(call(*tensors, kind=str(number)), tensors)
        assert len(call.call.recordings) <= MAX_RECORDINGS


def test_calls_with_an_override_are_recorded_separately() -> None:
    call, tensors = Caller(), inputs(0)
    call(*tensors)
    for runs in (2, 2):
        with override("triton", triton_configs.AttentionConfig(16, 1, 1, 1)):
            call(*tensors)
        assert call.runs == runs
    call(*tensors)
    assert call.runs == 2


def test_only_kernels_with_moved_tensors_are_updated() -> None:
    call, first, second = Caller(), inputs(0), inputs(1)
    for tensors in (first, first):
        call(*tensors)
    results = [call(*tensors) for tensors in (first, second, first, second)]
    for got, tensors in zip(results, (first, second, first, second), strict=True):
        assert_correct(got, tensors)
    updates, launches = DRIVER.updates, DRIVER.graph_launches
    replayed_again = [call(*second) for _ in range(3)]
    assert DRIVER.graph_launches == launches + 3
    assert DRIVER.updates - updates <= 3 * 6
    for got in replayed_again:
        assert_correct(got, second)


def test_calls_in_a_captured_stream_run_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Caller(counted)
    for seed, is_capturing in enumerate((False, False, True, False, True, True, False)):
        monkeypatch.setattr(replay, "_is_capturing", lambda is_capturing=is_capturing: is_capturing)
        tensors, graphs, runs = inputs(seed), DRIVER.graph_launches, call.runs
        output, lse = call(*tensors)
        correct = expected(*tensors)
        torch.testing.assert_close(output, correct[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, correct[1] + tensors[0], rtol=1e-5, atol=1e-5)
        is_replayed = seed > 0 and not is_capturing
        assert (DRIVER.graph_launches - graphs, call.runs - runs) == (is_replayed, not is_replayed)


def test_threads_without_a_cuda_context_get_one() -> None:
    call = Caller()
    for seed in range(3):
        tensors = inputs(seed)
        call(*tensors)
    DRIVER.has_context = False
    tensors = inputs(4)
    assert_correct(call(*tensors), tensors)
    assert DRIVER.has_context


def test_unused_lse_is_part_of_the_workspace() -> None:
    call, tensors = Caller(), inputs(0)
    call(*tensors)
    (recorded,) = call.call.recordings.values()
    output = recorded.run_without_lse([tensor.data_ptr() for tensor in tensors])
    torch.testing.assert_close(output, expected(*tensors)[0], rtol=1e-5, atol=1e-5)


def test_constants_are_created_once() -> None:
    created = []

    def make() -> Tensor:
        created.append(1)
        return torch.full((LENGTH,), 3.0)

    def with_constant(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        number = replay.constant("three", first.device, make)
        output, lse = chain(first, second)
        fused(number, lse, lse, 1.0)
        return output, lse

    call = Caller(with_constant)
    for seed in range(3):
        tensors = inputs(seed)
        _, lse = call(*tensors)
        torch.testing.assert_close(lse, expected(*tensors)[1] + 3.0, rtol=1e-5, atol=1e-5)
    assert (call.runs, len(created)) == (1, 1)


def test_instrumented_kernels_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's launcher allocates their scratch memory."""
    monkeypatch.setattr(Kernel.metadata, "profile_scratch_size", 8)
    call = Caller()
    for seed in range(3):
        tensors = inputs(seed)
        assert_correct(call(*tensors), tensors)
    assert call.runs == 3


def test_threads_share_a_recording() -> None:
    """Every thread gets the result for its own tensors."""
    call = Caller()
    call(*inputs(0))

    def work(seed: int) -> None:
        tensors = inputs(seed)
        for _ in range(20):
            assert_correct(call(*tensors), tensors)

    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))
    finally:
        sys.setswitchinterval(switch_interval)
    assert call.runs == 1


@st.composite
def buffers(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    count = draw(st.integers(0, 12))
    sizes = draw(st.lists(st.integers(0, 5000), min_size=count, max_size=count))
    steps = st.lists(st.integers(0, 8), max_size=4).map(sorted)
    return sizes, draw(st.lists(steps, min_size=count, max_size=count))


def branched(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Run two branches between a launch before and a launch after them."""
    a, b, c, d, e, output, lse = (buffer_like(first, True, LENGTH) for _ in range(7))
    fused(first, second, a, 1.0)
    with in_branch("left"):
        fused(a, first, b, 2.0)
    with in_branch("right"):
        fused(a, second, d, 3.0)
    with in_branch("left"):
        fused(b, a, c, 4.0)
    with in_branch("right"):
        fused(d, a, e, 5.0)
    fused(c, e, output, 6.0)
    fused(output, a, lse, 7.0)
    return output, lse


def test_branches_may_run_in_any_order() -> None:
    caller = Caller(branched)
    for seed in range(3):
        first, second = inputs(seed)
        a = first + second
        output = 6 * (4 * (2 * a + first) + a) + 5 * (3 * a + second) + a
        torch.testing.assert_close(caller(first, second), (output, 7 * output + a))


def test_launches_after_branches_depend_on_all_branches() -> None:
    branches = [None, "a", "b", "a", None, None, "b", "a"]
    assert _predecessors(branches) == [(), (0,), (0,), (1,), (3, 2), (4,), (5,), (5,)]
    assert _spans(branches) == [(0, 0), (1, 3), (1, 3), (1, 3), (4, 4), (5, 5), (6, 7), (6, 7)]


def test_recordings_may_start_with_a_branch() -> None:
    assert _predecessors(["a", "b", None]) == [(), (), (0, 1)]


@given(buffers())
def test_buffers_in_use_at_the_same_time_never_overlap(drawn: tuple[list[int], list[list[int]]]) -> None:
    sizes, uses = drawn
    offsets, total = replay._pack(sizes, uses)
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert all(offset + size <= total for offset, size in zip(offsets, sizes, strict=True))
    for i in range(len(sizes)):
        for j in range(i):
            if not uses[i] or not uses[j]:
                continue
            in_time = uses[i][0] <= uses[j][-1] and uses[j][0] <= uses[i][-1]
            in_space = offsets[i] < offsets[j] + sizes[j] and offsets[j] < offsets[i] + sizes[i]
            assert not (in_time and in_space)


def test_workspace_is_no_larger_than_the_concurrent_buffers() -> None:
    """Buffers of a call with 131 072 tokens and 4 heads: quantized K and V reuse the memory of the probabilities."""
    mebibytes = {
        "moments": 6,
        "quantized query": 64,
        "probabilities": 32,
        "lists": 32,
        "quantized key": 64,
        "quantized value": 64,
    }
    uses = [[0, 3], [2, 6], [3, 4], [4, 6], [5, 6], [5, 6]]
    offsets, total = replay._pack([size * 2**20 for size in mebibytes.values()], uses)
    assert total == (64 + 32 + 64 + 64) * 2**20
    assert len(offsets) == 6
