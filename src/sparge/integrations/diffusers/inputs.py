"""Find the positions of text tokens and the grid of all other tokens in the arguments of the current forward pass."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparge.backends.base import constant
from sparge.distributed.mesh import Mesh
from sparge.integrations.diffusers import context_parallel, probe
from sparge.integrations.diffusers.models import Structure, grid_of
from sparge.integrations.hooks import PassState, arguments_of
from sparge.integrations.sdpa import Tokens

MAX_READ = 2**16
"""Masks and ids with more entries are not read; `_signature` contains their shape alone."""

NOT_POSITIONS = ("timestep", "sigma", "guidance", "return_dict")
"""Substrings of the names of arguments that change at each step without moving tokens. "t" is another such argument."""

MAX_SIGNATURES = 64
"""Maximum number of signatures whose probe results are kept."""


@dataclass(frozen=True)
class ForwardPass:
    """The tokens of a forward pass. If tokens are split over ranks, ``text`` and ``grid`` cover all ranks.

    Attributes:
        text: the number of text tokens.
        grid: sizes of the image or video that the other tokens form.
        tokens: the tokens of each layer's calls, found by a probe; None for a model with a row in `models.KNOWN`.
        own_text: the number of text tokens on this rank; None if text is not split over ranks separately.
    """

    text: int = 0
    grid: tuple[int, ...] | None = None
    tokens: dict[str, tuple[Tokens, ...]] | None = None
    own_text: int | None = None


class ModelInputs:
    """Keeps the `ForwardPass` of each thread.

    Args:
        structure: the structure of the model.
        layers: the names of its attention modules.
    """

    def __init__(self, structure: Structure, layers: Sequence[str]) -> None:
        self._structure = structure
        self._layers = layers
        self._probed: dict[Hashable, dict[str, tuple[Tokens, ...]]] = {}
        self._latest: dict[str, tuple[Tokens, ...]] = {}
        self._split: tuple[Any, bool] = (None, False)
        self.current = PassState(ForwardPass())

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelInputs, (self._structure, self._layers)

    def read(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the arguments of a forward pass; a pre-hook."""
        arguments = arguments_of(model, args, kwargs)
        states = arguments.get("encoder_hidden_states")
        text = states.shape[1] if isinstance(states, Tensor) else 0
        grid = grid_of(self._structure.grid, getattr(model, "config", None), arguments)
        if torch.compiler.is_compiling():  # values that cannot be read are copied from the latest pass
            latest = self.current.get()
            grid, mesh, own_text = grid or latest.grid, None, latest.own_text
        else:
            mesh, own_text = self._mesh_and_own_text(model, text)
        tokens = self._tokens(model, arguments, mesh, own_text) if self._structure.text == "probe" else None
        self.current.set(ForwardPass(text, grid, tokens, own_text))

    def _mesh_and_own_text(self, model: nn.Module, text: int) -> tuple[Mesh | None, int | None]:
        """Return the ranks that split the tokens, and the number of text tokens on this rank as in `ForwardPass`."""
        config: Any = getattr(model, "_parallel_config", None)
        mesh = context_parallel.mesh_of(config)
        if mesh is None:
            return None, None
        if self._split[0] is not config:
            self._split = (config, context_parallel.splits_text(model))
        return mesh, context_parallel.own_share(text, mesh) if self._split[1] else None

    def _tokens(
        self, model: nn.Module, arguments: dict[str, Any], mesh: Mesh | None, own_text: int | None
    ) -> dict[str, tuple[Tokens, ...]]:
        """Return the result of a probe for these arguments. If the probe fails, warn and return no tokens.

        A pass that is compiled or captured in a CUDA graph cannot be probed. It uses the latest result.
        """
        if torch.compiler.is_compiling():
            if not self._probed:
                _warn_of_probe(type(model).__name__, "a compiled one (run it once before it is compiled)")
            return self._latest
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return self._latest
        signature = (_signature(arguments), mesh is not None)
        if signature not in self._probed:
            try:
                found = probe.probe(model.forward, arguments, self._layers)
            except Exception as error:  # a model may raise any error for the changed latents
                found = {}
                _warn_of_probe(type(model).__name__, f"{type(error).__name__}: {error}")
            if mesh is not None:
                found = context_parallel.gather_probe(found, mesh, own_text)
            self._probed[signature] = found
            if len(self._probed) > MAX_SIGNATURES:
                self._probed.pop(next(iter(self._probed)))
        self._latest = self._probed[signature]
        return self._latest


def _signature(value: Any) -> Hashable:
    """Return a cache key of the inputs that determine token positions: shapes, masks and counts, but no latents."""
    if isinstance(value, Tensor):
        is_small = not value.is_floating_point() and value.numel() <= MAX_READ
        return tuple(value.shape), tuple(value.flatten().tolist()) if is_small else None
    if isinstance(value, dict):
        positions = {
            name: item
            for name, item in value.items()
            if name != "t" and not any(part in str(name) for part in NOT_POSITIONS)
        }
        return tuple((name, _signature(item)) for name, item in positions.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    is_plain = value is None or isinstance(value, (str, int))
    return cast(Hashable, value if is_plain else type(value))


@constant
def _warn_of_probe(kind: str, got: str) -> None:
    warnings.warn(
        f"sparge: {kind}: expected a forward pass in which the text tokens can be found, got {got}; only the tokens of "
        "Policy(always_keep=...) are always kept",
        stacklevel=2,
    )
