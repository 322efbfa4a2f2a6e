"""Run functions inside a torch function mode, including generators and coroutines.

A call of a generator function or coroutine function returns before the body runs, and the body may be suspended in the
middle. The mode and the modes that the body itself has entered are on torch's stack only while the body runs, so each
step leaves the stack unchanged. If they stayed there, another scope that exits would pop the mode of a suspended body:
torch always pops the top of the stack.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Generator
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode


def run_within(new_mode: Callable[[], TorchFunctionMode], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the same kind whose body runs inside a mode.

    Args:
        new_mode: returns a new mode for each call.
        function: a function, generator function, coroutine function or asynchronous generator function.
    """

    def is_a(kind: Callable[[Any], bool]) -> bool:
        return kind(function) or kind(getattr(function, "__call__", None))  # noqa: B004

    if is_a(inspect.isasyncgenfunction):

        @functools.wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            inner = function(*args, **kwargs)
            modes = _Modes(new_mode(), inner)
            step = _first_step(inner)
            while True:
                try:
                    item = await _await(modes, step)
                except StopAsyncIteration:
                    return
                try:
                    step = inner.asend((yield item))
                except GeneratorExit:
                    await _await(modes, inner.aclose())
                    raise
                except BaseException as error:
                    step = inner.athrow(error)

    elif is_a(inspect.iscoroutinefunction):

        @functools.wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            inner = function(*args, **kwargs)
            return await _await(_Modes(new_mode(), inner), inner)

    elif is_a(inspect.isgeneratorfunction):

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            inner = function(*args, **kwargs)
            return (yield from _Steps(_Modes(new_mode(), inner), inner))

    else:

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with new_mode():
                return function(*args, **kwargs)

    return run


class _Modes:
    """The mode of one call and the modes that its body enters. They are on torch's stack only during a step.

    A body that is suspended inside its own modes is kept alive until its caller closes it. The garbage collector closes
    the members of a cycle in any order, and would close the body while its modes are not on the stack.
    """

    def __init__(self, mode: TorchFunctionMode, body: Any) -> None:
        self._modes, self._body = [mode], body  # the outermost mode first

    def step(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that resumes the body until it is suspended or ends."""
        depth = len(_get_current_function_mode_stack())
        for mode in self._modes:
            _push_mode(mode)
        try:
            return function(*args)
        finally:
            self._modes = _get_current_function_mode_stack()[depth:]
            for _ in self._modes:
                _pop_mode()
            (_KEPT_ALIVE.add if len(self._modes) > 1 else _KEPT_ALIVE.discard)(self)


_KEPT_ALIVE: set[_Modes] = set()


class _Steps(Generator[Any, Any, Any]):
    """A generator that runs each step inside the modes."""

    def __init__(self, modes: _Modes, inner: Any) -> None:
        self._modes, self._inner = modes, inner

    def send(self, value: Any) -> Any:
        return self._modes.step(self._inner.send, value)

    def throw(self, *exception: Any) -> Any:
        return self._modes.step(self._inner.throw, *exception)


@types.coroutine
def _await(modes: _Modes, awaitable: Any) -> Generator[Any, Any, Any]:
    return (yield from _Steps(modes, awaitable.__await__()))


def _first_step(inner: Any) -> Any:
    """Start an asynchronous generator without the hooks of the event loop, which would close it outside the modes."""
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(firstiter=None, finalizer=lambda _: None)
    try:
        return inner.asend(None)
    finally:
        sys.set_asyncgen_hooks(*hooks)
