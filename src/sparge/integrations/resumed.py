"""Functions that run inside a context, generators and coroutines among them.

These return before their body runs, and wait in the middle of it. The context is entered each time they go on and left
each time they wait: what others do meanwhile is not inside.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any


def run_within(context: AbstractContextManager[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, of the same kind, with its body inside the context.

    Args:
        context: can be entered any number of times.
    """

    def is_a(kind: Callable[[Any], bool]) -> bool:
        return kind(function) or kind(getattr(function, "__call__", None))  # noqa: B004

    if is_a(inspect.isasyncgenfunction):

        @functools.wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            inner = function(*args, **kwargs)
            step = inner.asend(None)
            while True:
                try:
                    item = await _awaited(context, step)
                except StopAsyncIteration:
                    return
                try:
                    step = inner.asend((yield item))
                except GeneratorExit:
                    await _awaited(context, inner.aclose())
                    raise
                except BaseException as error:
                    step = inner.athrow(error)

    elif is_a(inspect.iscoroutinefunction):

        @functools.wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            return await _awaited(context, function(*args, **kwargs))

    elif is_a(inspect.isgeneratorfunction):

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return (yield from _Steps(context, function(*args, **kwargs)))

    else:

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with context:
                return function(*args, **kwargs)

    return run


class _Steps(Generator[Any, Any, Any]):
    """A generator whose every step is taken inside the context."""

    def __init__(self, context: AbstractContextManager[Any], inner: Any) -> None:
        self._context, self._inner = context, inner

    def send(self, value: Any) -> Any:
        with self._context:
            return self._inner.send(value)

    def throw(self, *exception: Any) -> Any:
        with self._context:
            return self._inner.throw(*exception)


@types.coroutine
def _awaited(context: AbstractContextManager[Any], awaitable: Any) -> Generator[Any, Any, Any]:
    return (yield from _Steps(context, awaitable.__await__()))
