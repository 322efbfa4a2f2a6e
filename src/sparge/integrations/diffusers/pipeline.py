"""diffusers: the attention of a pipeline's transformer, whichever way it is called.

Some models go through the attention dispatcher, where this library has a backend; others call SDPA themselves, where a
mode sees them. Either way each attention module gets a pair of hooks that open and close a `Scope` around it, so
processors stay as they are (LoRA, IP-Adapters, fused projections), and removing the hooks restores everything. The
hooks know what a call of SDPA does not say: which layer it is, where the text tokens lie, whether it is
cross-attention. The scheduler says which step it is.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparge.backends.base import constant
from sparge.dispatch.reasons import Reason, count
from sparge.distributed.mesh import Mesh
from sparge.integrations.diffusers import backend, context_parallel, probe
from sparge.integrations.diffusers.models import Blocks, attentions, blocks_of, found_blocks, grid_of
from sparge.integrations.diffusers.schedule import Schedule
from sparge.integrations.hooks import THREAD, Passes, close_scope, hooked, open_mode, parameters_of
from sparge.integrations.layers import Layer, Steps
from sparge.integrations.sdpa import Scope, Tokens
from sparge.options import checks
from sparge.policy import Policy

STATE = "_sparge_enabled"
"""Attribute of an enabled transformer: what undoes it."""


def enable(target: Any, policy: Policy, scheduler: Any) -> None:
    """Hook the transformers of a pipeline, or one transformer, and the scheduler.

    Raises:
        NotImplementedError: a model this version does not know.
        ValueError: rules about steps without a scheduler, or about blocks it does not have.
    """
    models = dict(_models_of(target))
    pipeline = target if hasattr(target, "scheduler") and not isinstance(target, nn.Module) else None
    if pipeline is not None and scheduler is not None:
        raise ValueError("scheduler: expected None (the pipeline has one), got one")
    if policy.has_step_rules and scheduler is None and pipeline is None:
        raise ValueError(
            "policy: expected a pipeline, or scheduler=..., for rules about denoising steps, "
            f"got a bare {type(target).__name__}"
        )
    for prefix, model in models.items():
        if not prefix.startswith("controlnet"):  # it has fewer blocks than what it controls
            checks.check_places("dense_layers", policy.dense_layers, len(found_blocks(model)))
    policy.check_layers([f"{prefix}{name}" for prefix, model in models.items() for _, name, _ in attentions(model)])
    for model in models.values():
        if is_enabled(model):  # by itself or with a pipeline
            disable(model)
    schedule = None
    if policy.has_step_rules:
        schedule = Schedule(Steps(policy), len(models), scheduler, pipeline)
    for prefix, model in models.items():
        setattr(model, STATE, _hook_model(model, prefix, policy, schedule))


def is_enabled(target: Any) -> bool:
    """Whether `enable` was called for it, or for a pipeline it belongs to."""
    return any(STATE in vars(model) for _, model in _models_of(target))


def disable(target: Any) -> None:
    """Remove all hooks."""
    for _, model in _models_of(target):
        for action in reversed(vars(model).pop(STATE, [])):  # modules may share a processor
            action()


PARTS = ("diffusers.models.transformers.", "diffusers.models.unets.", "diffusers.models.controlnets.")
"""Where the classes of a pipeline's models come from that have attention worth the while."""


def _models_of(target: Any) -> Iterator[tuple[str, nn.Module]]:
    """Models with the prefix of their layers' names."""
    if isinstance(target, nn.Module):
        found = {"": target}
    else:
        found = {
            f"{name}.": part
            for name, part in target.components.items()
            if isinstance(part, nn.Module) and any(kind.__module__.startswith(PARTS) for kind in type(part).__mro__)
        }
    if not found:
        raise NotImplementedError(
            f"{type(target).__name__}: expected a pipeline with a transformer, a U-Net or a control net, got none "
            "(`with sparge.replace_sdpa(policy):` reaches any model that calls SDPA)"
        )
    reached = {prefix: model for prefix, model in found.items() if found_blocks(model)}
    if not reached:
        kinds = ", ".join(type(model).__name__ for model in found.values())
        raise NotImplementedError(
            f"{kinds}: expected a model with attention modules, got none "
            "(`with sparge.replace_sdpa(policy):` reaches any model that calls SDPA)"
        )
    yield from reached.items()


def _hook_model(model: nn.Module, prefix: str, policy: Policy, schedule: Schedule | None) -> list[Callable[[], None]]:
    """Hooks on every attention module of every block."""
    found = list(attentions(model))
    total = len(found_blocks(model))
    passes = Passes(probe.is_probing)
    undo: list[Callable[[], None]] = [
        passes.unwind,
        _remove(model.register_forward_pre_hook(passes.begin)),
        _remove(model.register_forward_hook(passes.end, always_call=True)),
    ]
    steps = None if schedule is None else schedule.steps
    if schedule is not None:
        undo += [_remove(model.register_forward_pre_hook(schedule.look)), schedule.leave]
    blocks = blocks_of(model)
    inputs = _Inputs(blocks, [f"{prefix}{name}" for _, name, _ in found])
    undo.append(_remove(model.register_forward_pre_hook(inputs.read, with_kwargs=True)))
    for index, name, module in found:
        full = f"{prefix}{name}"
        dense = policy.is_dense_layer(index, total) or policy.is_dense_by_budget(full)
        layer = Layer(full, policy.of_layer(full), dense, steps)
        undo += _dispatched_here(module)
        hooks = _Hooks(layer, blocks, inputs, is_merged=name.startswith(tuple(f"{part}." for part in blocks.merged)))
        undo.append(hooked(module, hooks.open, hooks.close))
    return undo


def _remove(handle: Any) -> Callable[[], None]:
    removal: Callable[[], None] = handle.remove
    return removal


def _dispatched_here(module: nn.Module) -> list[Callable[[], None]]:
    """Have a processor that goes through the dispatcher take our backend, or else SDPA, whatever was chosen before."""
    if not _has_dispatcher(module):
        return []
    from diffusers.models.attention_dispatch import AttentionBackendName

    processor: Any = module.processor
    before = processor._attention_backend
    processor._attention_backend = backend.register() or AttentionBackendName.NATIVE
    return [functools.partial(setattr, processor, "_attention_backend", before)]  # copied along with a model


def _has_dispatcher(module: Any) -> bool:
    """Whether its processor goes through the dispatcher."""
    return hasattr(getattr(module, "processor", None), "_attention_backend")


def _is_dispatched(module: Any) -> bool:
    """Whether its processor is set to our backend (at the moment: set_attention_backend may be called at any time)."""
    return getattr(getattr(module, "processor", None), "_attention_backend", None) == backend.NAME


class _Inputs:
    """What the forward pass under way was called with: text tokens, the grid of the others, or what a probe found.

    Each thread has its own. Compiled blocks share one, whichever thread wrote it last: torch.compile up to torch 2.11
    loses what is written to thread-local objects.
    """

    def __init__(self, blocks: Blocks, layers: Sequence[str]) -> None:
        self._blocks = blocks
        self._layers = layers
        self._probed: dict[Hashable, dict[str, tuple[Tokens, ...]]] = {}
        self._latest: dict[str, tuple[Tokens, ...]] = {}
        self._split: tuple[Any, bool] = (None, False)
        self._local = threading.local()
        self._compiled = _Pass()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inputs, (self._blocks, self._layers)  # models are copied, what threads know is not

    def read(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if probe.is_probing():
            return
        names = parameters_of(type(model))
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        states = arguments.get("encoder_hidden_states")
        text = states.shape[1] if isinstance(states, Tensor) else 0
        grid = grid_of(self._blocks.grid, getattr(model, "config", None), arguments)
        if torch.compiler.is_compiling():
            grid = grid or self._compiled.grid  # what cannot be read in it is that of the latest pass
        part = self._compiled.part if torch.compiler.is_compiling() else self._part(model, text)
        found = self._tokens(model, arguments, part) if self._blocks.text == "probe" else None
        self._compiled = _Pass(text, grid, found, part)
        if not torch.compiler.is_compiling():
            self._local.found = self._compiled

    def _part(self, model: nn.Module, text: int) -> _Part | None:
        """What a rank has of the text, where tokens are split over ranks."""
        mesh = context_parallel.mesh_of_model(model)
        if mesh is None:
            return None
        config: Any = model._parallel_config
        if self._split[0] is not config:
            self._split = (config, context_parallel.splits_text(model))
        return _Part(mesh, context_parallel.own_share(text, mesh) if self._split[1] else None)

    def _tokens(self, model: nn.Module, arguments: dict[str, Any], part: _Part | None) -> dict[str, tuple[Tokens, ...]]:
        """What a probe finds for such arguments; nothing where it fails, which is said.

        A compiled or captured pass cannot be probed: it takes what the latest one that was neither found.
        """
        if torch.compiler.is_compiling():
            if not self._probed:
                _warn_of_probe(type(model).__name__, "a compiled one (run it once before it is compiled)")
            return self._latest
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return self._latest
        kind = (_kind(arguments), part is not None)
        if kind not in self._probed:
            try:
                found = probe.probe(model.forward, arguments, self._layers)
            except Exception as error:  # whatever a model makes of other latents
                found = {}
                _warn_of_probe(type(model).__name__, f"{type(error).__name__}: {error}")
            if part is not None:
                found = context_parallel.of_all_ranks(found, part.mesh, part.text)
            self._probed[kind] = found
            if len(self._probed) > MAX_KINDS:
                self._probed.pop(next(iter(self._probed)))
        self._latest = self._probed[kind]
        return self._latest

    def found(self) -> _Pass:
        if torch.compiler.is_compiling():
            return self._compiled
        return getattr(self._local, "found", _Pass())


@dataclass(frozen=True)
class _Pass:
    """A forward pass: the number of its text tokens, the grid of the others, what a probe found for each layer.

    All of it is about the tokens of all ranks, where they are split; what a rank has of them is its ``part``.
    """

    text: int = 0
    grid: tuple[int, ...] | None = None
    tokens: dict[str, tuple[Tokens, ...]] | None = None
    part: _Part | None = None


@dataclass(frozen=True)
class _Part:
    """Tokens that are split over ranks.

    Attributes:
        text: how many of the text's this rank has; None: text is not split by itself.
    """

    mesh: Mesh
    text: int | None


def _kind(value: Any) -> Hashable:
    """What of an argument decides where tokens lie: shapes, masks, numbers of things; not the numbers to denoise."""
    if isinstance(value, Tensor):
        is_small = not value.is_floating_point() and value.numel() <= SMALL
        return tuple(value.shape), tuple(value.flatten().tolist()) if is_small else None
    if isinstance(value, dict):
        places = {
            name: item
            for name, item in value.items()
            if name != "t" and not any(part in str(name) for part in NOT_PLACES)
        }
        return tuple((name, _kind(item)) for name, item in places.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    is_plain = value is None or isinstance(value, (str, int))
    return cast(Hashable, value if is_plain else type(value))


SMALL = 2**16
"""Masks and ids of so many entries are read; what is larger says nothing about places but by its shape."""

NOT_PLACES = ("timestep", "sigma", "guidance", "return_dict")
"""In names of arguments that change along a schedule, and move no token; so does one that is called "t"."""

MAX_KINDS = 64
"""Kinds of inputs whose probes are remembered."""


class _Hooks:
    """The two hooks of an attention module. Scopes are kept by thread, as several may run one model."""

    def __init__(self, layer: Layer, blocks: Blocks, inputs: _Inputs, *, is_merged: bool) -> None:
        self.layer = layer
        self.blocks = blocks
        self.inputs = inputs
        self.is_merged = is_merged
        self.calls_sdpa = False  # a processor that is to be dispatched may call it all the same

    def open(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        encoder = kwargs.get("encoder_hidden_states", args[1] if len(args) > 1 else None)
        now = self.inputs.found()
        tokens = self._describe(hidden, encoder, now) if now.tokens is None else now.tokens.get(self.layer.name, ())
        recorder = None if torch.compiler.is_compiling() else probe.recorder_of(self.layer.name)
        scope = Scope(self.layer, tokens, now.grid, recorder=recorder)
        THREAD.scopes.append(scope)
        if self.calls_sdpa or recorder is not None or not _is_dispatched(module):
            open_mode(scope)

    def close(self, module: Any, _: Any, output: Any) -> None:
        scope = close_scope()
        if scope.mode is not None:
            self.calls_sdpa = self.calls_sdpa or scope.mode.was_used
        failed = output is None
        if scope.calls == 0 and not failed and not torch.compiler.is_compiling() and scope.recorder is None:
            count(Reason.NOT_SDPA, self.layer.name)
            if _has_dispatcher(module):
                _warn_once(type(module).__name__)

    def _describe(self, hidden: Any, encoder: Any, now: _Pass) -> tuple[Tokens, ...]:
        """What the tokens of its calls are, by what the module was called with."""
        if self.blocks.text is None:
            return (_SELF if encoder is None else _CROSS,)
        if not isinstance(hidden, Tensor):
            return (_SELF,)
        own_text = None if now.part is None else now.part.text
        if isinstance(encoder, Tensor):
            text, others = encoder.shape[1], hidden.shape[1]
        elif self.is_merged:
            text = now.text if own_text is None else own_text
            others = hidden.shape[1] - text
        else:
            return (_SELF,)
        first = self.blocks.text == "first"
        seam = None if own_text is None else text if first else others
        return (Tokens(True, ((0, text) if first else (others, None),), seam=seam),)


_SELF, _CROSS = Tokens(True), Tokens(False)


@functools.cache
def _warn_once(kind: str) -> None:
    warnings.warn(
        f"sparge: {kind} did not call SDPA, so it runs as it was (was set_attention_backend called after "
        "sparge.enable?)",
        stacklevel=2,
    )


@constant
def _warn_of_probe(kind: str, obstacle: str) -> None:
    warnings.warn(
        f"sparge: {kind}: expected a forward pass in which its text tokens can be found, got {obstacle}; "
        "no tokens are kept besides those of Policy(always_keep=...)",
        stacklevel=2,
    )
