"""`Family`, the description of a tiny model, and values that many descriptions share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import diffusers
import torch
from torch import Tensor, nn

Keys = tuple[tuple[int, int], ...] | Literal["cross", "other"]
"""Keys of an attention call: ranges of keys that are not denoised (text, references, sound) if others are denoised;
"cross" if no key is denoised; "other" if no query is denoised either."""

Layers = dict[str, Keys | list[Keys]]
"""Modules that call attention, in order, with the keys of their calls; a list if the calls of a module differ."""


@dataclass(frozen=True)
class Tiny:
    """A model with random weights, the keyword arguments of its forward pass, and its expected calls."""

    model: nn.Module
    inputs: dict[str, Any]
    layers: Layers
    rounding: float


@dataclass(frozen=True)
class Family:
    """A model class in one configuration, its inputs, and the attention calls that its code makes.

    Attributes:
        layers: attention calls by module.
        config: keyword arguments of the class.
        inputs: keyword arguments of `forward`, with a few hundred tokens.
        prepare: function that changes the new model, for example weights that start at zero.
        model_class: the class, if `diffusers` does not export it under the name of the row.
        builder: function that returns a model and its inputs, in place of `config` and `inputs`.
        rounding: tolerance of the output with all blocks kept, relative to the largest output.
    """

    layers: Layers
    config: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] | None = None
    model_class: type[nn.Module] | None = None
    builder: Callable[[], tuple[nn.Module, dict[str, Any]]] | None = None
    rounding: float = 128 * 2**-23

    def variant(
        self, *, config: dict[str, Any] | None = None, inputs: dict[str, Any] | None = None, **others: Any
    ) -> Family:
        """Return a copy with additional configuration and inputs, and with `others` replaced."""
        return replace(self, config=self.config | (config or {}), inputs=self.inputs | (inputs or {}), **others)

    def build(self, class_name: str) -> Tiny:
        """Return the model, with the same weights for every call, and a copy of its inputs."""
        torch.manual_seed(0)
        if self.builder is not None:
            model, inputs = self.builder()
        else:
            model = (self.model_class or getattr(diffusers, class_name))(**self.config)
            inputs = copy.deepcopy(self.inputs)
        if self.prepare is not None:
            self.prepare(model)
        return Tiny(model, inputs, self.layers, self.rounding)


def noise(*shape: int) -> Tensor:
    """Return random numbers that depend only on the shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def padding_mask(length: int, valid: int) -> Tensor:
    """Return a bool mask (1, length) whose first `valid` entries are true."""
    return (torch.arange(length) < valid)[None]


def positions(height: int, width: int, frame: int = 0) -> Tensor:
    """Return (frame, row, column) of each token of an image."""
    axes = ([float(frame)], range(height), range(width))
    return torch.cartesian_prod(*(torch.tensor(list(axis), dtype=torch.float) for axis in axes))


# Values that many families share.

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
CHANNELS = {"in_channels": 4, "out_channels": 4}
TEXT = {"encoder_hidden_states": noise(1, 70, 16)}
TEXT_AT_3 = {"timestep": torch.tensor([3]), **TEXT}
TEXT_AT_HALF = {"timestep": torch.tensor([0.5]), **TEXT}
TEXT_MASK = padding_mask(70, valid=50)


def repeat_layers(count: int, layers: Layers) -> Layers:
    """Return the layers of `count` blocks, whose number replaces {} in each name."""
    return {name.format(index): keys for index in range(count) for name, keys in layers.items()}


def self_then_cross(blocks: str, count: int = 2) -> Layers:
    """Return the layers of blocks with self-attention without text, followed by cross-attention."""
    return repeat_layers(count, {f"{blocks}.{{}}.attn1": (), f"{blocks}.{{}}.attn2": "cross"})


def transformers_in(*places: str, attn2: Keys = "cross") -> Layers:
    """Return the layers of U-Net modules that have one transformer block each."""
    blocks = [f"{place}.transformer_blocks.0" for place in places]
    return {f"{block}.{name}": keys for block in blocks for name, keys in (("attn1", ()), ("attn2", attn2))}


# Functions for `prepare`.


def randomize_zero_weights(model: nn.Module) -> None:
    """Give random weights to linear layers that start at zero and would hide the output of attention."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.2)


def randomize(*names: str) -> Callable[[nn.Module], None]:
    """Return a function that gives random weights to the named modules, which start at zero."""

    def prepare(model: nn.Module) -> None:
        for name in names:
            for weight in model.get_submodule(name).parameters():
                nn.init.normal_(weight, std=0.1)

    return prepare


def first_tensor(output: Any) -> Tensor:
    """Return the first tensor of a model's output."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output
