"""`replay` starts what was recorded: the same kernels in the same order, on the memory of the new call.

Kernels are stand-ins here that compute on CPU memory by address, as a GPU's do.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

import sparge
from sparge.backends.cuda import replay
from sparge.backends.cuda.config_table import override
from sparge.backends.cuda.launch import buffer_like, zeros_like
from sparge.backends.cuda.replay import ALIGNMENT, MOST_REPLAYS, replayed
from sparge.backends.cuda.stages import configs as stage_configs
from sparge.backends.triton import configs as triton_configs

LENGTH = 300


class Kernel:
    """``target[i] = first[i] * factor + second[i]`` for ``length`` float32 numbers, by address."""

    def __init__(self) -> None:
        self.starts = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        assert grid == (1, 1, 1)
        return self.start

    def start(self, *arguments: Any) -> None:
        self.starts += 1
        *addresses, factor, length = arguments
        numbers = [(ctypes.c_float * length).from_address(address) for address in addresses]
        for i in range(length):
            numbers[2][i] = numbers[0][i] * factor + numbers[1][i]


KERNEL = Kernel()


def fused(first: Tensor, second: Tensor, target: Tensor, factor: float, length: int = LENGTH) -> None:
    """Launch as `launch` does."""
    KERNEL.start(first.data_ptr(), second.data_ptr(), target.data_ptr(), factor, length)
    recorder = replay.current_recorder.get()
    if recorder is not None:
        recorder.add_launch(KERNEL, 1, [], [first, second, target], [factor, length])  # type: ignore[arg-type]


def chain(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two results by four buffers; nobody reads ``a`` any more when ``d`` is written."""
    a, b, c, d, output, lse = (buffer_like(first, True, LENGTH) for _ in range(6))
    fused(first, second, a, 1.0)
    fused(a, first, b, 2.0)
    fused(b, a, c, 3.0)
    fused(c, b, d, 4.0)
    fused(d, second, output, 5.0)
    fused(d, c, lse, 6.0)
    return output, lse


def counted(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """`chain`, and on top of its LSE what a buffer that begins with zeros holds once the first input is added to it."""
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
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replay, "_replays", OrderedDict())
    yield
    assert replay.current_recorder.get() is None


class Caller:
    """Calls a function through `replayed`, and counts how often the function itself ran."""

    def __init__(self, function: Callable[..., tuple[Tensor, Tensor]] = chain) -> None:
        self.function, self.runs = function, 0

    def __call__(self, *tensors: Tensor, kind: str = "a kind") -> tuple[Tensor, Tensor]:
        def run() -> tuple[Tensor, Tensor]:
            self.runs += 1
            return self.function(*tensors)

        return replayed((kind,), tensors, run)


def assert_right(got: tuple[Tensor, Tensor], tensors: tuple[Tensor, Tensor]) -> None:
    for result, wanted in zip(got, expected(*tensors), strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


def test_later_calls_are_replayed_on_their_own_tensors() -> None:
    call = Caller()
    results = []
    for seed in range(4):
        tensors = inputs(seed)
        starts = KERNEL.starts
        results.append((call(*tensors), tensors))
        assert KERNEL.starts == starts + 6
    assert call.runs == 1
    for got, tensors in results:  # nobody overwrote an earlier result
        assert_right(got, tensors)


def test_buffers_share_the_workspace() -> None:
    call = Caller()
    call(*inputs(0))
    (recorded,) = replay._replays.values()
    assert recorded is not None
    a, b, c, d = recorded.offsets
    assert len({a, b, c}) == 3, "c is made of the other two"
    assert d == a
    assert recorded.workspace_bytes == 3 * 1536, "1200 bytes each, in steps of 512"


@pytest.mark.parametrize("change", ["kind", "dtype", "stride", "alignment", "one less"])
def test_what_differs_is_recorded_anew(change: str) -> None:
    call = Caller()
    first, second = inputs(0)
    call(first, second)
    if change == "kind":
        call(first, second, kind="another")
    elif change == "dtype":
        call(first, second.double())  # the stand-in misreads it; only the way taken matters
    elif change == "stride":
        call(first, torch.randn(LENGTH, 2)[:, 0])
    elif change == "alignment":
        call(first, torch.randn(LENGTH + 1)[1:])
    else:
        call.function = lambda tensor: chain(tensor, tensor)
        call(first)
    assert call.runs == 2


def test_a_tensor_given_twice_is_a_kind_of_its_own() -> None:
    """Recorded with one tensor in both places, a replay could not tell which of two to read."""
    call = Caller()
    for tensors in (inputs(0), inputs(1)):
        for pair in ((tensors[0], tensors[0]), tensors, (tensors[1], tensors[1])):
            assert_right(call(*pair), pair)
    assert call.runs == 2


def test_what_torch_computes_in_between_is_not_replayed() -> None:
    call = Caller(lambda first, second: chain(first, second * 2))
    for seed in range(3):
        first, second = inputs(seed)
        assert_right(call(first, second), (first, second * 2))
    assert call.runs == 3


def test_a_buffer_that_torch_fills_is_not_replayed() -> None:
    """Its identity does not change, and the next workspace holds anything."""

    def counting(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        zeros = buffer_like(first, True, LENGTH).zero_()
        output, lse = chain(first, second)
        fused(zeros, lse, lse, 1.0)
        return output, lse

    call = Caller(counting)
    for seed in range(3):
        tensors = inputs(seed)
        assert_right(call(*tensors), tensors)
    assert call.runs == 3


def test_a_buffer_of_zeros_is_cleared_for_every_replay() -> None:
    call = Caller(counted)
    for seed in range(4):
        tensors = inputs(seed)
        output, lse = call(*tensors)
        wanted = expected(*tensors)
        torch.testing.assert_close(output, wanted[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, wanted[1] + tensors[0], rtol=1e-5, atol=1e-5)
    assert call.runs == 1


def test_a_result_that_torch_computes_is_not_replayed() -> None:
    call = Caller(lambda first, second: (chain(first, second)[0] * 2, chain(first, second)[1]))
    for seed in range(3):
        tensors = inputs(seed)
        output, lse = call(*tensors)
        assert_right((output / 2, lse), tensors)
    assert call.runs == 3


def test_an_input_that_is_returned_is_not_replayed() -> None:
    call = Caller(lambda first, second: (chain(first, second)[0], second))
    for seed in range(3):
        tensors = inputs(seed)
        assert call(*tensors)[1] is tensors[1]
    assert call.runs == 3


def test_a_view_of_an_input_is_not_replayed() -> None:
    """Its address may lie elsewhere in the next call's tensor."""
    call = Caller(lambda first, second: chain(first, second[1:]))
    for seed in range(3):
        first, second = inputs(seed)
        longer = torch.cat([second[:1], second])
        assert_right(call(first, longer), (first, second))
    assert call.runs == 3


def test_a_missing_input_is_a_kind_of_its_own() -> None:
    first, second = inputs(0)
    runs = []

    def run() -> tuple[Tensor, Tensor]:
        runs.append(1)
        return chain(first, second)

    for tensors in ((first, None, second), (None, first, second), (first, None, second), (None, first, second)):
        assert_right(replayed(("a kind",), tensors, run), (first, second))
    assert len(runs) == 2


def test_an_error_leaves_no_recorder() -> None:
    def broken(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        chain(first, second)
        raise RuntimeError("out of memory")

    call = Caller(broken)
    tensors = inputs(0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            call(*tensors)
    call.function = chain
    assert_right(call(*tensors), tensors)


def test_the_kind_unused_for_longest_is_forgotten() -> None:
    call = Caller()
    tensors = inputs(0)
    call(*tensors, kind="used")
    call(*tensors, kind="unused")
    for number in range(MOST_REPLAYS - 1):
        call(*tensors, kind=str(number))
        call(*tensors, kind="used")
    assert len(replay._replays) == MOST_REPLAYS
    runs = call.runs
    call(*tensors, kind="used")
    assert call.runs == runs
    call(*tensors, kind="unused")
    assert call.runs == runs + 1
    replay.forget()
    call(*tensors, kind="used")
    assert call.runs == runs + 2


class TestConfigurations:
    """Whoever changes one need not tell anybody."""

    CHANGES: ClassVar[dict[str, Callable[[pytest.MonkeyPatch], None]]] = {
        "a row": lambda patch: patch.setitem(
            triton_configs.CONFIGS, next(iter(triton_configs.CONFIGS)), triton_configs.AttentionConfig(16, 1, 1, 1)
        ),
        "a row of another module": lambda patch: patch.delitem(
            stage_configs.CONFIGS, next(iter(stage_configs.CONFIGS))
        ),
        "a table": lambda patch: patch.setattr(triton_configs, "CONFIGS", {}),
        "a function": lambda patch: patch.setattr(stage_configs, "stage_config", lambda *_: None),
        "another name": lambda patch: patch.setattr(stage_configs, "FAVOURITE", 1, raising=False),
    }

    @pytest.mark.parametrize("change", CHANGES)
    def test_calls_are_recorded_anew(self, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
        call, tensors = Caller(), inputs(0)
        for runs in (1, 1):
            assert_right(call(*tensors), tensors)
            assert call.runs == runs
        with monkeypatch.context() as patch:
            self.CHANGES[change](patch)
            for runs in (2, 2):
                assert_right(call(*tensors), tensors)
                assert call.runs == runs
        for runs in (3, 3):  # changed back
            assert_right(call(*tensors), tensors)
            assert call.runs == runs

    def test_an_override_is_a_kind_of_its_own(self) -> None:
        call, tensors = Caller(), inputs(0)
        call(*tensors)
        for runs in (2, 2):
            with override("triton", triton_configs.AttentionConfig(16, 1, 1, 1)):
                call(*tensors)
            assert call.runs == runs
        call(*tensors)
        assert call.runs == 2

    def test_every_table_is_looked_at(self) -> None:
        names = {
            ".".join(("sparge", *path.relative_to(Path(sparge.__file__).parent).with_suffix("").parts))
            for path in (Path(sparge.__file__).parent / "backends").rglob("configs.py")
        }
        assert len(names) >= 3
        for name in names:
            importlib.import_module(name)
        Caller()(*inputs(0))
        assert set(replay._configurations.modules) == names


def test_threads_record_and_forget_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thread gets the result of its own tensors, while recordings come and go."""
    monkeypatch.setattr(replay, "MOST_REPLAYS", 3)

    def work(seed: int) -> None:
        call, tensors = Caller(), inputs(seed)
        for turn in range(40):
            assert_right(call(*tensors, kind=str((seed + turn) % 7)), tensors)

    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))
    finally:
        sys.setswitchinterval(switch_interval)
    assert len(replay._replays) <= 3


@st.composite
def buffers(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    count = draw(st.integers(0, 12))
    sizes = draw(st.lists(st.integers(0, 5000), min_size=count, max_size=count))
    steps = st.lists(st.integers(0, 8), max_size=4).map(sorted)
    return sizes, draw(st.lists(steps, min_size=count, max_size=count))


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


def test_a_workspace_is_no_larger_than_what_is_in_use_at_once() -> None:
    """The sizes and uses of a call of 131 072 tokens and 4 heads: codes of K and V take the place of probabilities."""
    mebibytes = {"moments": 6, "query codes": 64, "probabilities": 32, "lists": 32, "key codes": 64, "value codes": 64}
    uses = [[0, 3], [2, 6], [3, 4], [4, 6], [5, 6], [5, 6]]
    offsets, total = replay._pack([size * 2**20 for size in mebibytes.values()], uses)
    assert total == (64 + 32 + 64 + 64) * 2**20
    assert len(offsets) == 6
