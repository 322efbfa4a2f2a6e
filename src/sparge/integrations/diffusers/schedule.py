"""Where a diffusers scheduler stands, told by itself.

Its ``set_timesteps``, ``set_begin_index`` (pictures made from pictures begin in the middle) and ``step`` are overridden
by a subclass of its class, which it becomes while it is followed. Nothing is read from a device, and guidance may take
any number of passes a step. Copies of the scheduler stay whole, and pipelines, which look at the methods' signatures,
see the original ones.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, cast

from sparge.integrations.layers import Steps

_STEPS = "_sparge_steps"
_ORIGINAL = "_sparge_original"
"""Attribute of the subclass: the class it stands for."""


class Schedule:
    """Follows the scheduler of a pipeline, also when it is replaced, or one that is given.

    Args:
        steps: what layers look at.
        users: models that do.
        scheduler: the scheduler to follow, if there is no pipeline.
        pipeline: whose ``scheduler`` to follow.
    """

    def __init__(self, steps: Steps, users: int, scheduler: Any = None, pipeline: Any = None) -> None:
        self.steps = steps
        self.users = users
        self._pipeline = pipeline
        self._scheduler = pipeline.scheduler if pipeline is not None else scheduler
        _follow(self._scheduler, steps)

    def look(self, *_: Any) -> None:
        """Before each forward pass: a scheduler put in place after `enable` has started its schedule by now."""
        if self._pipeline is None or self._pipeline.scheduler is self._scheduler:
            return
        _leave(self._scheduler, self.steps)
        self._scheduler = self._pipeline.scheduler
        _follow(self._scheduler, self.steps)
        self.steps.start(len(self._scheduler.timesteps))

    def leave(self) -> None:
        """Say that one of ``users`` is gone; behind the last of them the scheduler is followed no more."""
        self.users -= 1
        if self.users == 0:
            _leave(self._scheduler, self.steps)


def _follow(scheduler: Any, steps: Steps) -> None:
    """Have a scheduler tell these steps where it stands; several may follow one, as when pipelines share it."""
    if _STEPS not in vars(scheduler):
        setattr(scheduler, _STEPS, [])
        kind = type(scheduler)  # that of a followed one, if it was made from it
        scheduler.__class__ = _followed(cast(Hashable, getattr(kind, _ORIGINAL, kind)))
    getattr(scheduler, _STEPS).append(steps)


def _leave(scheduler: Any, steps: Steps) -> None:
    """Give a scheduler that nobody follows its own class back."""
    followers = getattr(scheduler, _STEPS)
    followers[:] = [other for other in followers if other is not steps]
    if not followers:
        scheduler.__class__ = getattr(type(scheduler), _ORIGINAL)
        delattr(scheduler, _STEPS)


@functools.cache
def _followed(kind: Any) -> type[Any]:
    """The class with its methods overridden, under its own name: schedulers are saved by it."""

    @functools.wraps(kind.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = kind.set_timesteps(self, *args, **kwargs)
        for steps in getattr(self, _STEPS, ()):
            steps.start(len(self.timesteps))
        return result

    @functools.wraps(kind.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = kind.step(self, *args, **kwargs)
        for steps in getattr(self, _STEPS, ()):
            steps.advance()
        return result

    def __reduce_ex__(self: Any, _: int) -> Any:  # nobody follows a copy
        return _made, (kind, {name: value for name, value in vars(self).items() if name != _STEPS})

    methods = {"set_timesteps": set_timesteps, "step": step, "__reduce_ex__": __reduce_ex__}
    if hasattr(kind, "set_begin_index"):

        @functools.wraps(kind.set_begin_index)
        def set_begin_index(self: Any, begin_index: int = 0) -> None:
            kind.set_begin_index(self, begin_index)
            for steps in getattr(self, _STEPS, ()):
                steps.start(len(self.timesteps) - begin_index)

        methods["set_begin_index"] = set_begin_index
    followed: type[Any] = type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__, _ORIGINAL: kind})
    return followed


def _made(kind: Any, state: dict[str, Any]) -> Any:
    """A scheduler of its own class, from a copy of a followed one."""
    scheduler = kind.__new__(kind)
    vars(scheduler).update(state)
    return scheduler
