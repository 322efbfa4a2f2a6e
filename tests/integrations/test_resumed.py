"""Decorated generators and coroutines that are suspended inside their own torch function modes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import types
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import sparge
from conftest import make_qkv
from sparge import Policy
from sparge.integrations import function_mode

pytestmark = pytest.mark.timeout(120)

ALL = Policy(topk=1.0, backend="torch")
DENSE = Policy(min_tokens=999, backend="torch")


class Marker(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Other(Marker):
    """A second mode."""


MODES = {
    "DeviceContext": lambda: torch.device("meta"),
    "Other": Other,
    "SparseMode": lambda: sparge.replace_sdpa(DENSE),
}


def entered() -> list[str]:
    """Return the modes on torch's stack, outermost first."""
    return [type(mode).__name__ for mode in _get_current_function_mode_stack()]


@pytest.fixture(autouse=True)
def stack_in_order() -> Iterator[None]:
    yield
    left = [_get_current_function_mode_stack()[-1].__exit__(None, None, None) for _ in entered()]  # for other tests
    assert not left, "modes left on torch's stack"
    assert not function_mode._KEPT_ALIVE, "bodies kept alive that have ended"


@types.coroutine
def pause() -> Generator[None, None, None]:
    yield


def generator(mode: Any, act: Callable[[], Any]) -> Iterator[None]:
    try:
        with mode:
            act()
            yield
            act()
            yield
        act()
        yield
    finally:
        act()


async def coroutine(mode: Any, act: Callable[[], Any]) -> None:
    try:
        with mode:
            act()
            await pause()
            act()
            await pause()
        act()
        await pause()
    finally:
        act()


async def async_generator(mode: Any, act: Callable[[], Any]) -> AsyncIterator[None]:
    try:
        with mode:
            act()
            yield
            act()
            await pause()
        act()
        yield
    finally:
        act()


async def drained(steps: Any) -> None:
    """Drive an asynchronous generator as a coroutine that is suspended where the generator yields."""
    step = steps.asend(None)
    with contextlib.suppress(StopAsyncIteration):
        while True:
            await step
            try:
                await pause()
                step = steps.asend(None)
            except BaseException as error:
                step = steps.athrow(error)


def start(function: Callable[..., Any], *args: Any, scope: Any = None) -> Any:
    """Send to, throw into and close the body of a decorated function of any kind."""
    body = (scope or sparge.replace_sdpa(ALL))(function)(*args)
    return drained(body) if hasattr(body, "asend") else body


def step(body: Any) -> None:
    """Run the body until it is suspended or ends."""
    with contextlib.suppress(StopIteration):
        body.send(None)


every_kind = pytest.mark.parametrize("function", [generator, coroutine, async_generator])


@every_kind
class TestEveryKind:
    @pytest.mark.parametrize("name", MODES)
    def test_modes_are_suspended_with_their_body(self, function: Callable[..., Any], name: str) -> None:
        seen: list[list[str]] = []
        with Marker():
            body = start(function, MODES[name](), lambda: seen.append(entered()))
            for own in ([name], [name], [], []):
                step(body)
                assert seen[-1] == ["Marker", "SparseMode", *own]
                assert entered() == ["Marker"]
        assert len(seen) == 4

    def test_modes_apply_inside_the_body(self, function: Callable[..., Any]) -> None:
        devices: list[str] = []
        body = start(function, torch.device("meta"), lambda: devices.append(torch.empty(1).device.type))
        for _ in range(4):
            step(body)
            assert torch.empty(1).device.type == "cpu"
        assert devices == ["meta", "meta", "cpu", "cpu"]

    def test_scopes_in_scopes(self, function: Callable[..., Any]) -> None:
        query, key, value = make_qkv(200)

        def act() -> None:
            F.scaled_dot_product_attention(query, key, value)

        body = start(function, sparge.replace_sdpa(DENSE), act)
        for _ in range(4):
            step(body)
            act()
        assert sparge.stats().reasons == {"dense: fewer than min_tokens": 2, "sparse: torch": 2}

    def test_a_scope_inside_itself(self, function: Callable[..., Any]) -> None:
        scope = sparge.replace_sdpa(ALL)
        seen: list[int] = []
        body = start(function, scope, lambda: seen.append(len(entered())), scope=scope)
        for _ in range(4):
            step(body)
            assert entered() == []
        assert seen == [2, 2, 1, 1]

    @pytest.mark.parametrize("steps", [1, 2, 3])
    @pytest.mark.parametrize("end", ["throw", "close", "garbage"])
    def test_a_body_that_ends_elsewhere(self, function: Callable[..., Any], end: str, steps: int) -> None:
        seen: list[list[str]] = []
        body = start(function, Other(), lambda: seen.append(entered()))
        for _ in range(steps):
            step(body)
        with Marker():
            if end == "throw":
                with pytest.raises(KeyError):
                    body.throw(KeyError())
            elif end == "close":
                body.close()
            else:
                del body
            assert entered() == ["Marker"]
        assert len(seen) == steps + 1
        assert seen[-1] == ["Marker", "SparseMode"]

    def test_cycles_are_not_collected_inside_modes(self, function: Callable[..., Any]) -> None:
        """The collector closes members of a cycle in any order, and a body while its modes are not on the stack."""
        seen: list[list[str]] = []

        class Act:
            body: Any = None

            def __call__(self) -> None:
                seen.append(entered())

        act = Act()
        act.body = start(function, Other(), act)
        body = weakref.ref(act.body)
        step(act.body)
        del act
        with Marker():
            gc.collect()
            assert len(seen) == 1
            body().close()  # type: ignore[union-attr]
            assert seen == [["SparseMode", "Other"], ["Marker", "SparseMode"]]
            assert entered() == ["Marker"]
        gc.collect()
        assert body() is None

    def test_interleaved(self, function: Callable[..., Any]) -> None:
        seen: list[list[str]] = []
        first = start(function, Marker(), lambda: seen.append(entered()))
        second = start(function, Other(), lambda: seen.append(entered()))
        for body in (first, second) * 4:
            step(body)
            assert entered() == []
        assert seen[:4] == [["SparseMode", "Marker"], ["SparseMode", "Other"]] * 2
        assert seen[4:] == [["SparseMode"]] * 4

    def test_one_inside_the_other(self, function: Callable[..., Any]) -> None:
        seen: list[list[str]] = []
        inner = start(function, Other(), lambda: seen.append(entered()))
        turns = [inner] * 3
        step(inner)
        outer = start(function, Marker(), lambda: step(turns.pop()) if turns else None)
        for _ in range(4):
            step(outer)
            assert entered() == []
        both, outside = ["SparseMode", "Other"], ["SparseMode", "Marker"]
        assert seen == [both, [*outside, *both], [*outside, "SparseMode"], ["SparseMode", "SparseMode"]]

    @pytest.mark.parametrize("name", MODES)
    def test_each_step_on_another_thread(self, function: Callable[..., Any], name: str) -> None:
        seen: list[list[str]] = []
        body = start(function, MODES[name](), lambda: seen.append(entered()))
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            for thread in (one, other) * 2:
                thread.submit(step, body).result()
                assert thread.submit(entered).result() == []
        assert seen == [["SparseMode", name]] * 2 + [["SparseMode"]] * 2


def test_a_mode_that_outlives_its_body() -> None:
    """The caller inherits the mode, as from any function."""

    @sparge.replace_sdpa(ALL)
    def run(modes: contextlib.ExitStack) -> Iterator[None]:
        modes.enter_context(Other())
        yield

    with Marker():
        with contextlib.ExitStack() as modes:
            for _ in run(modes):
                assert entered() == ["Marker"]
            assert entered() == ["Marker", "Other"]
        assert entered() == ["Marker"]


def test_a_mode_of_the_caller_left_by_the_body() -> None:
    @sparge.replace_sdpa(ALL)
    def run(modes: contextlib.ExitStack) -> Iterator[list[str]]:
        modes.close()
        yield entered()
        yield entered()

    with Marker(), contextlib.ExitStack() as modes:
        modes.enter_context(Other())
        body = run(modes)
        next(body)
        assert entered() == ["Marker"]
        assert next(body) == ["Marker", "SparseMode"]


def test_an_async_generator_that_its_loop_collects() -> None:
    seen: list[list[str]] = []

    @sparge.replace_sdpa(ALL)
    async def run(held: list[Any]) -> AsyncIterator[int]:
        try:
            yield len(held)
        finally:
            await asyncio.sleep(0)
            seen.append(entered())

    async def main() -> None:
        held: list[Any] = []
        held.append(run(held))
        await anext(held[0])
        del held
        gc.collect()
        for _ in range(4):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert seen == [["SparseMode"]]


def test_async_generators_that_their_loop_closes() -> None:
    seen: list[list[str]] = []
    steps = sparge.replace_sdpa(ALL)(async_generator)
    kept = [steps(Other(), lambda: seen.append(entered())) for _ in range(8)]  # closed in any order

    async def main() -> None:
        for body in kept:
            await anext(body)

    with Marker():
        asyncio.run(main())
        assert entered() == ["Marker"]
    assert seen == [["Marker", "SparseMode", "Other"]] * 8 + [["Marker", "SparseMode"]] * 8
