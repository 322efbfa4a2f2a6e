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

ALL_BLOCKS = Policy(topk=1.0, backend="torch")
DENSE = Policy(min_tokens=999, backend="torch")


class Marker(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class SecondMode(Marker):
    """A mode that is distinct from `Marker`."""


MODES = {
    "DeviceContext": lambda: torch.device("meta"),
    "SecondMode": SecondMode,
    "SparseMode": lambda: sparge.replace_sdpa(DENSE),
}


def entered_modes() -> list[str]:
    """Return the modes on torch's stack, outermost first."""
    return [type(mode).__name__ for mode in _get_current_function_mode_stack()]


@pytest.fixture(autouse=True)
def stack_in_order() -> Iterator[None]:
    yield
    left = entered_modes()
    for _ in left:  # clean up for other tests
        _get_current_function_mode_stack()[-1].__exit__(None, None, None)
    assert not left, "no modes are left on torch's stack"
    assert not function_mode._KEPT_ALIVE, "finished bodies are released"


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


async def as_coroutine(steps: Any) -> None:
    """Wrap an asynchronous generator in a coroutine that is suspended where the generator yields."""
    awaitable = steps.asend(None)
    with contextlib.suppress(StopAsyncIteration):
        while True:
            await awaitable
            try:
                await pause()
                awaitable = steps.asend(None)
            except BaseException as error:
                awaitable = steps.athrow(error)


def start_body(function: Callable[..., Any], *args: Any, scope: Any = None) -> Any:
    """Call a decorated function of any kind, and return a body with `send`, `throw` and `close`."""
    body = (scope or sparge.replace_sdpa(ALL_BLOCKS))(function)(*args)
    return as_coroutine(body) if hasattr(body, "asend") else body


def run_step(body: Any) -> None:
    """Run the body until it is suspended or ends."""
    with contextlib.suppress(StopIteration):
        body.send(None)


all_kinds = pytest.mark.parametrize("function", [generator, coroutine, async_generator])


@all_kinds
class TestEveryKind:
    @pytest.mark.parametrize("name", MODES)
    def test_modes_are_suspended_with_their_body(self, function: Callable[..., Any], name: str) -> None:
        seen: list[list[str]] = []
        with Marker():
            body = start_body(function, MODES[name](), lambda: seen.append(entered_modes()))
            for own in ([name], [name], [], []):
                run_step(body)
                assert seen[-1] == ["Marker", "SparseMode", *own]
                assert entered_modes() == ["Marker"]
        assert len(seen) == 4

    def test_modes_apply_inside_the_body(self, function: Callable[..., Any]) -> None:
        devices: list[str] = []
        body = start_body(function, torch.device("meta"), lambda: devices.append(torch.empty(1).device.type))
        for _ in range(4):
            run_step(body)
            assert torch.empty(1).device.type == "cpu"
        assert devices == ["meta", "meta", "cpu", "cpu"]

    def test_inner_scope_applies_inside_the_body(self, function: Callable[..., Any]) -> None:
        query, key, value = make_qkv(200)

        def act() -> None:
            F.scaled_dot_product_attention(query, key, value)

        body = start_body(function, sparge.replace_sdpa(DENSE), act)
        for _ in range(4):
            run_step(body)
            act()
        assert sparge.stats().reasons == {"dense: fewer than min_tokens": 2, "sparse: torch": 2}

    def test_reentered_scope(self, function: Callable[..., Any]) -> None:
        scope = sparge.replace_sdpa(ALL_BLOCKS)
        seen: list[int] = []
        body = start_body(function, scope, lambda: seen.append(len(entered_modes())), scope=scope)
        for _ in range(4):
            run_step(body)
            assert entered_modes() == []
        assert seen == [2, 2, 1, 1]

    @pytest.mark.parametrize("steps", [1, 2, 3])
    @pytest.mark.parametrize("end", ["throw", "close", "garbage"])
    def test_body_ends_outside_its_scope(self, function: Callable[..., Any], end: str, steps: int) -> None:
        seen: list[list[str]] = []
        body = start_body(function, SecondMode(), lambda: seen.append(entered_modes()))
        for _ in range(steps):
            run_step(body)
        with Marker():
            if end == "throw":
                with pytest.raises(KeyError):
                    body.throw(KeyError())
            elif end == "close":
                body.close()
            else:
                del body
            assert entered_modes() == ["Marker"]
        assert len(seen) == steps + 1
        assert seen[-1] == ["Marker", "SparseMode"]

    def test_cycles_are_not_collected_inside_modes(self, function: Callable[..., Any]) -> None:
        """The collector closes members of a cycle in any order, even a body whose modes are not on the stack."""
        seen: list[list[str]] = []

        class Act:
            body: Any = None

            def __call__(self) -> None:
                seen.append(entered_modes())

        act = Act()
        act.body = start_body(function, SecondMode(), act)
        body = weakref.ref(act.body)
        run_step(act.body)
        del act
        with Marker():
            gc.collect()
            assert len(seen) == 1
            body().close()  # type: ignore[union-attr]
            assert seen == [["SparseMode", "SecondMode"], ["Marker", "SparseMode"]]
            assert entered_modes() == ["Marker"]
        gc.collect()
        assert body() is None

    def test_interleaved_bodies(self, function: Callable[..., Any]) -> None:
        seen: list[list[str]] = []
        first = start_body(function, Marker(), lambda: seen.append(entered_modes()))
        second = start_body(function, SecondMode(), lambda: seen.append(entered_modes()))
        for body in (first, second) * 4:
            run_step(body)
            assert entered_modes() == []
        assert seen[:4] == [["SparseMode", "Marker"], ["SparseMode", "SecondMode"]] * 2
        assert seen[4:] == [["SparseMode"]] * 4

    def test_nested_bodies(self, function: Callable[..., Any]) -> None:
        seen: list[list[str]] = []
        inner = start_body(function, SecondMode(), lambda: seen.append(entered_modes()))
        turns = [inner] * 3
        run_step(inner)
        outer = start_body(function, Marker(), lambda: run_step(turns.pop()) if turns else None)
        for _ in range(4):
            run_step(outer)
            assert entered_modes() == []
        both, outside = ["SparseMode", "SecondMode"], ["SparseMode", "Marker"]
        assert seen == [both, [*outside, *both], [*outside, "SparseMode"], ["SparseMode", "SparseMode"]]

    @pytest.mark.parametrize("name", MODES)
    def test_each_step_on_another_thread(self, function: Callable[..., Any], name: str) -> None:
        seen: list[list[str]] = []
        body = start_body(function, MODES[name](), lambda: seen.append(entered_modes()))
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            for thread in (one, other) * 2:
                thread.submit(run_step, body).result()
                assert thread.submit(entered_modes).result() == []
        assert seen == [["SparseMode", name]] * 2 + [["SparseMode"]] * 2


def test_async_generator_collected_by_its_loop() -> None:
    seen: list[list[str]] = []

    @sparge.replace_sdpa(ALL_BLOCKS)
    async def run(held: list[Any]) -> AsyncIterator[int]:
        try:
            yield len(held)
        finally:
            await asyncio.sleep(0)
            seen.append(entered_modes())

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


def test_async_generators_closed_by_their_loop() -> None:
    seen: list[list[str]] = []
    steps = sparge.replace_sdpa(ALL_BLOCKS)(async_generator)
    kept = [steps(SecondMode(), lambda: seen.append(entered_modes())) for _ in range(8)]  # closed in any order

    async def main() -> None:
        for body in kept:
            await anext(body)

    with Marker():
        asyncio.run(main())
        assert entered_modes() == ["Marker"]
    assert seen == [["Marker", "SparseMode", "SecondMode"]] * 8 + [["Marker", "SparseMode"]] * 8
