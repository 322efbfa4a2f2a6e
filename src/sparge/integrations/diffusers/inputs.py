"""Derive the positions of text tokens and the grid of all other tokens from the arguments of each forward pass."""

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
"""`_signature` contains the values of masks and ids with at most this many entries, and only the shape of others."""
NOT_POSITIONS = ("timestep", "sigma", "guidance", "return_dict")
"""Substrings of the names of arguments that change at each step without moving tokens. "t" is another such argument."""
MAX_SIGNATURES = 64
"""Maximum number of signatures whose probe results are cached."""


@dataclass(frozen=True)
class ForwardPass:
    """The tokens of a forward pass.

    Attributes:
        text: the number of text tokens on all ranks.
        grid: sizes of the image or video that all other tokens form, on all ranks.
        tokens: the result of a probe, by layer; None for a model with a row in `models.KNOWN`.
        local_text: the number of text tokens on this rank; None if the ranks do not split text separately.
    """

    text: int = 0
    grid: tuple[int, ...] | None = None
    tokens: dict[str, tuple[Tokens, ...]] | None = None
    local_text: int | None = None


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
        """Set ``current`` from the arguments of a forward pass; a pre-hook."""
        arguments = arguments_of(model, args, kwargs)
        states = arguments.get("encoder_hidden_states")
        text = states.shape[1] if isinstance(states, Tensor) else 0
        grid = grid_of(self._structure.grid, getattr(model, "config", None), arguments)
        if torch.compiler.is_compiling():  # unreadable values are taken from the latest pass
            latest = self.current.get(is_tracing=True)
            grid, mesh, local_text = grid or latest.grid, None, latest.local_text
        else:
            mesh, local_text = self._mesh_and_local_text(model, text)
        tokens = self._tokens(model, arguments, mesh, local_text) if self._structure.text == "probe" else None
        self.current.set(ForwardPass(text, grid, tokens, local_text))

    def _mesh_and_local_text(self, model: nn.Module, text: int) -> tuple[Mesh | None, int | None]:
        """Return the ranks that split the tokens, and `ForwardPass.local_text`."""
        config: Any = getattr(model, "_parallel_config", None)
        mesh = context_parallel.mesh_of(config)
        if mesh is None:
            return None, None
        if self._split[0] is not config:
            self._split = (config, context_parallel.splits_text(model))
        return mesh, context_parallel.local_share(text, mesh) if self._split[1] else None

    def _tokens(
        self, model: nn.Module, arguments: dict[str, Any], mesh: Mesh | None, local_text: int | None
    ) -> dict[str, tuple[Tokens, ...]]:
        """Return the result of a probe for these arguments. If the probe fails, warn and return no tokens.

        A pass that is compiled or captured in a CUDA graph cannot be probed. It uses the latest result.
        """
        if torch.compiler.is_compiling():
            if not self._probed:
                _warn_about_probe(type(model).__name__, "a compiled one (run it once before it is compiled)")
            return self._latest
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return self._latest
        signature = (_signature(arguments), mesh is not None)
        if signature not in self._probed:
            try:
                result = probe.probe(model.forward, arguments, self._layers)
            except Exception as error:  # a model may raise any error for the changed latents
                result = {}
                _warn_about_probe(type(model).__name__, f"{type(error).__name__}: {error}")
            if mesh is not None:
                result = context_parallel.gather_probe(result, mesh, local_text)
            self._probed[signature] = result
            if len(self._probed) > MAX_SIGNATURES:
                self._probed.pop(next(iter(self._probed)))
        self._latest = self._probed[signature]
        return self._latest


def _signature(value: Any) -> Hashable:
    """Return a cache key of the arguments that determine token positions: shapes, masks and counts, but no latents."""
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
def _warn_about_probe(kind: str, got: str) -> None:
    warnings.warn(
        f"sparge: {kind}: expected a forward pass in which the text tokens can be found, got {got}; only the tokens of "
        "Policy(always_keep=...) are always kept",
        stacklevel=2,
    )
