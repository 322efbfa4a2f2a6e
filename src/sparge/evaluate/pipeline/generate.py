"""One call of a pipeline from a seed, timed as a whole and by step."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sparge.evaluate.pipeline.output import Frames, frames_of
from sparge.integrations.diffusers.schedule import Schedule
from sparge.integrations.layers import Steps
from sparge.policy import Policy

RESERVED = ("prompt", "generator", "return_dict")
"""Arguments of a pipeline that an evaluation gives itself."""


@dataclass(frozen=True)
class Generated:
    """A picture or clip and how long it took.

    Attributes:
        seconds: of the whole call, text encoders and VAE included.
        step_seconds: between steps of the scheduler; empty where the pipeline's scheduler is not followed.
    """

    frames: Frames
    seconds: float
    step_seconds: tuple[float, ...]


def device_of(pipe: Any) -> torch.device:
    """Where the pipeline computes, also while its models wait elsewhere."""
    return torch.device(pipe._execution_device)


def parameters_of(pipe: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(pipe.__call__).parameters


def check_arguments(pipe: Any, arguments: Mapping[str, Any]) -> None:
    """Say which arguments the pipeline does not take.

    Raises:
        ValueError: an unknown one, or one that an evaluation gives itself.
    """
    known = parameters_of(pipe)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for name in arguments:
        if name in RESERVED:
            raise ValueError(f"arguments: expected prompts and seeds apart from the others, got {name!r} among them")
        if name not in known and not takes_any:
            told = ", ".join(one for one in known if one not in RESERVED)
            raise ValueError(f"arguments: expected those of {type(pipe).__name__} ({told}), got {name!r}")
    if arguments.get("output_type") == "latent":
        raise ValueError("arguments: expected an output_type with pixels, got 'latent'")


def generate(pipe: Any, prompt: str | None, seed: int, arguments: Mapping[str, Any]) -> Generated:
    """Call the pipeline once. Random numbers come from the seed alone, whether they are drawn by generator or not."""
    known = parameters_of(pipe)
    call: dict[str, Any] = dict(arguments)
    if prompt is not None:
        call["prompt"] = prompt
    if "output_type" in known:
        call.setdefault("output_type", "np")  # PIL images hide NaN
    if "generator" in known:
        call["generator"] = torch.Generator("cpu").manual_seed(seed)
    device = device_of(pipe)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad(), _timed_steps(pipe, device) as clock:
        torch.manual_seed(seed)
        start = _now(device)
        output = pipe(**call)
        seconds = _now(device) - start
    steps = tuple(after - before for before, after in itertools.pairwise(clock.marks))
    return Generated(frames_of(output), seconds, steps)


class _Clock(Steps):
    """Notes when a schedule starts and when each of its steps is done."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(Policy())
        self._device = device
        self.marks: list[float] = []

    def start(self, total: int) -> None:
        super().start(total)
        self.marks = [_now(self._device)]

    def advance(self) -> None:
        super().advance()
        self.marks.append(_now(self._device))


@contextmanager
def _timed_steps(pipe: Any, device: torch.device) -> Iterator[_Clock]:
    clock = _Clock(device)
    scheduler = getattr(pipe, "scheduler", None)
    if not (hasattr(scheduler, "set_timesteps") and hasattr(scheduler, "step")):
        yield clock
        return
    schedule = Schedule(clock, users=1, pipeline=pipe)
    try:
        yield clock
    finally:
        schedule.leave()


def _now(device: torch.device) -> float:
    """The time, once the device has done what it was given."""
    if device.type in ("cuda", "mps", "xpu"):
        getattr(torch, device.type).synchronize()
    return time.perf_counter()


@contextmanager
def quiet(pipe: Any) -> Iterator[None]:
    """Without the pipeline's own progress bar."""
    before = dict(getattr(pipe, "_progress_bar_config", {}))
    pipe.set_progress_bar_config(**{**before, "disable": True})
    try:
        yield
    finally:
        pipe.set_progress_bar_config(**before)
