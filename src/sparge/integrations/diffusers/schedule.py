"""Track the step of a denoising schedule by intercepting the calls of a diffusers scheduler.

A tracked scheduler becomes an instance of a subclass of its class, which overrides ``set_timesteps``,
``set_begin_index`` (image-to-image pipelines begin in the middle of a schedule) and ``step``. Nothing is read from a
device, and guidance may run any number of forward passes per step. Copies of the scheduler have its original class. The
overrides keep the original signatures, which pipelines inspect.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch

from sparge.dispatch.reasons import Reason
from sparge.integrations.layers import Steps

_STEPS = "_sparge_steps"
"""Attribute of a tracked scheduler: the `Steps` that it updates."""
_ORIGINAL = "_sparge_original"
"""Attribute of the subclass: the class that it extends."""


class Schedule:
    """Track a scheduler, or the scheduler of a pipeline, which may be replaced later.

    A copy of this object tracks no scheduler. It belongs to a copied model, which is in no pipeline until
    `sparge.enable` is called again.

    Args:
        steps: the position in the schedule, which layers read.
        users: number of models that read ``steps``.
        scheduler: the scheduler to track, if there is no pipeline.
        pipeline: the pipeline whose ``scheduler`` is tracked.
    """

    def __init__(self, steps: Steps, users: int, scheduler: Any = None, pipeline: Any = None) -> None:
        self.steps = steps
        self.users = users
        self._pipeline = pipeline
        self._scheduler = pipeline.scheduler if pipeline is not None else scheduler
        self._has_warned = False
        if self._scheduler is None:
            steps.dense = Reason.UNKNOWN_SCHEDULE
        else:
            _track(self._scheduler, steps)

    def __reduce__(self) -> tuple[Any, ...]:
        return Schedule, (self.steps, self.users)

    def before_forward(self, model: Any, *_: Any) -> None:
        """Track the pipeline's current scheduler; a pre-hook of the model's forward.

        If the pipeline got a new scheduler after `enable`, its schedule has already started at the first forward pass.
        """
        if self._pipeline is not None and self._pipeline.scheduler is not self._scheduler:
            _untrack(self._scheduler, self.steps)
            self._scheduler = self._pipeline.scheduler
            _track(self._scheduler, self.steps)
            self.steps.start(len(self._scheduler.timesteps))
        if not torch.compiler.is_compiling() and not self._has_warned and self._is_outside():
            self._has_warned = True
            warnings.warn(
                f"sparge: a forward pass of {type(model).__name__} is outside the schedule of the pipeline or "
                "scheduler that sparge.enable was called with, so rules about steps cannot be applied and it runs "
                "dense (call sparge.enable with the pipeline that runs)",
                stacklevel=2,
            )

    def _is_outside(self) -> bool:
        """Return whether no schedule has started, or the latest schedule has ended."""
        return self.steps.dense is Reason.UNKNOWN_SCHEDULE or self.steps.index >= self.steps.total

    def leave(self) -> None:
        """Remove one user; the scheduler is no longer tracked after the last one."""
        self.users -= 1
        if self.users == 0 and self._scheduler is not None:
            _untrack(self._scheduler, self.steps)


def _track(scheduler: Any, steps: Steps) -> None:
    """Make a scheduler update ``steps``. If pipelines share a scheduler, each pipeline has its own `Steps`."""
    if _STEPS not in vars(scheduler):
        setattr(scheduler, _STEPS, [])
        kind = type(scheduler)  # the subclass, if it was created from the class of a tracked scheduler
        scheduler.__class__ = _tracked_class(cast(Hashable, getattr(kind, _ORIGINAL, kind)))
    getattr(scheduler, _STEPS).append(steps)


def _untrack(scheduler: Any, steps: Steps) -> None:
    """Stop updating ``steps``. Restore the class of the scheduler if it updates no other `Steps`."""
    tracked = getattr(scheduler, _STEPS)
    tracked[:] = [other for other in tracked if other is not steps]
    if not tracked:
        scheduler.__class__ = getattr(type(scheduler), _ORIGINAL)
        delattr(scheduler, _STEPS)


@functools.cache
def _tracked_class(kind: Any) -> type[Any]:
    """Return a subclass that updates `Steps`. It keeps the name of its base: schedulers are saved by class name."""

    def updating(name: str, update: Callable[..., None]) -> Callable[..., Any]:
        """Return a method of ``kind`` that also calls ``update`` with the scheduler, `Steps` and the arguments."""

        @functools.wraps(getattr(kind, name))
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = getattr(kind, name)(self, *args, **kwargs)
            for steps in getattr(self, _STEPS, ()):
                update(self, steps, *args, **kwargs)
            return result

        return method

    def __reduce_ex__(self: Any, _: int) -> Any:  # a copy is not tracked
        return kind.__new__, (kind,), {name: value for name, value in vars(self).items() if name != _STEPS}

    methods = {
        "set_timesteps": updating("set_timesteps", lambda self, steps, /, *_, **__: steps.start(len(self.timesteps))),
        "step": updating("step", lambda _, steps, /, *__, **___: steps.advance()),
        "__reduce_ex__": __reduce_ex__,
    }
    if hasattr(kind, "set_begin_index"):

        def begin(self: Any, steps: Steps, /, begin_index: int = 0) -> None:
            steps.start(len(self.timesteps) - begin_index)

        methods["set_begin_index"] = updating("set_begin_index", begin)
    tracked: type[Any] = type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__, _ORIGINAL: kind})
    return tracked
