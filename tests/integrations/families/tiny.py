"""A tiny model with random weights, its inputs, and what the keys of its attention are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Keys = tuple[tuple[int, int], ...] | Literal["cross", "other"]
"""What the keys of a call are: ranges of those that are no tokens of what is denoised (text, references, sound), among
those that are; "cross" where none is; "other" where no query is either."""


@dataclass(frozen=True)
class Tiny:
    """A model and what it is called with.

    Attributes:
        inputs: keywords of its forward, with a few hundred tokens.
        layers: the modules that call attention, in order, and what the keys of their calls are, as its code says; a
            list where a module makes calls of several kinds.
        rounding: what its output differs by from stock, with everything kept, relative to its largest number.
    """

    model: nn.Module
    inputs: dict[str, Any]
    layers: dict[str, Keys | list[Keys]]
    rounding: float = 128 * 2**-23


Builder = Callable[[], Tiny]


def noise(*shape: int) -> Tensor:
    """Numbers that depend on the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def first_tensor(output: Any) -> Tensor:
    """What a model returns first."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output
