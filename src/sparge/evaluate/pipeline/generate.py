"""Call a pipeline once from a seed, and time the whole call and its steps."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sparge.evaluate.capture import device_of, tracked_schedule
from sparge.evaluate.pipeline.frames import Frames, frames_of
from sparge.evaluate.timing import synchronized_time
from sparge.integrations.layers import Steps
from sparge.policy import Policy

RESERVED = ("prompt", "generator", "output_type", "return_dict")
"""Arguments of a pipeline that the evaluation sets itself."""


@dataclass(frozen=True)
class Generated:
    """An image or clip, and its time."""

    frames: Frames
    seconds: float  # time of the whole call, with text encoders and VAE
    step_seconds: tuple[float, ...]  # time of each step of the scheduler; empty if the scheduler cannot be tracked


def parameters_of(pipe: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(pipe.__call__).parameters


def check_arguments(pipe: Any, arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a pipeline's call.

    Raises:
        ValueError: an argument is unknown, or an evaluation sets it.
    """
    parameters = parameters_of(pipe)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in arguments:
        if name in RESERVED:
            raise ValueError(f"arguments: expected none that the evaluation sets itself, got {name!r}")
        if name not in parameters and not takes_any:
            names = ", ".join(parameter for parameter in parameters if parameter not in RESERVED)
            raise ValueError(f"arguments: expected arguments of {type(pipe).__name__} ({names}), got {name!r}")


def generate(pipe: Any, prompt: str | None, seed: int, arguments: Mapping[str, Any]) -> Generated:
    """Call the pipeline once. All random numbers come from the seed, even if the pipeline takes no generator."""
    parameters = parameters_of(pipe)
    call: dict[str, Any] = dict(arguments)
    if prompt is not None:
        call["prompt"] = prompt
    if "output_type" in parameters:
        call["output_type"] = "np"  # PIL images hide NaN
    if "generator" in parameters:
        call["generator"] = torch.Generator("cpu").manual_seed(seed)
    device = device_of(pipe)
    clock = _Clock(device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad(), tracked_schedule(pipe, clock):
        torch.manual_seed(seed)
        start = synchronized_time(device)
        output = pipe(**call)
        seconds = synchronized_time(device) - start
    steps = tuple(after - before for before, after in itertools.pairwise(clock.marks))
    return Generated(frames_of(output), seconds, steps)


class _Clock(Steps):
    """Records the times at which a schedule starts and each of its steps ends."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(Policy())
        self._device = device
        self.marks: list[float] = []

    def start(self, total: int) -> None:
        super().start(total)
        self.marks = [synchronized_time(self._device)]

    def advance(self) -> None:
        super().advance()
        self.marks.append(synchronized_time(self._device))


@contextmanager
def without_progress_bar(pipe: Any) -> Iterator[None]:
    """Turn off the pipeline's own progress bar within the context."""
    before = dict(getattr(pipe, "_progress_bar_config", {}))
    pipe.set_progress_bar_config(**{**before, "disable": True})
    try:
        yield
    finally:
        pipe.set_progress_bar_config(**before)
