"""diffusers: the attention of a pipeline's transformer, whichever way it is called.

Some models go through the attention dispatcher, where this library has a backend; others call SDPA themselves, where a
mode sees them. Either way each attention module gets a pair of hooks that open and close a `Scope` around it, so
processors stay as they are (LoRA, IP-Adapters, fused projections), and removing the hooks restores everything. The
hooks know what a call of SDPA does not say: which layer it is, where the text tokens lie, whether it is
cross-attention. The scheduler says which step it is.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparge import validation
from sparge.backends.base import constant
from sparge.decide import Reason, count
from sparge.integrations import diffusers_backend
from sparge.integrations.calls import Layer, Steps
from sparge.integrations.schedule import Schedule
from sparge.integrations.sdpa import Scope, SparseMode
from sparge.policy import Policy


@dataclass(frozen=True)
class Blocks:
    """How a transformer is built.

    Attributes:
        lists: its lists of blocks, in the order they run.
        text: where text tokens lie among the keys of joint attention; None: text comes by cross-attention.
        grid: sizes of the picture or video that its other tokens are, from its configuration and what it was called
            with; None where they are not known.
        merged: the list whose attention gets text and picture as one tensor, text first.
    """

    lists: tuple[str, ...]
    text: Literal["first", "last"] | None
    grid: Callable[[Any, dict[str, Any]], tuple[int, ...]] | None = None
    merged: str | None = None


def _grid_of_latents(config: Any, arguments: dict[str, Any]) -> tuple[int, ...]:
    """Of latents (B, C, T, H, W) or (B, C, H, W) in patches: T, H, W."""
    *_, height, width = arguments["hidden_states"].shape
    patch = config.patch_size
    if isinstance(patch, int):
        patch = (getattr(config, "patch_size_t", None) or 1, patch, patch)
    frames = arguments["hidden_states"].shape[2] if arguments["hidden_states"].ndim == 5 else patch[0]
    return frames // patch[0], height // patch[1], width // patch[2]


def _grid_of_frames(config: Any, arguments: dict[str, Any]) -> tuple[int, ...]:
    """Of latents (B, T, C, H, W) in patches."""
    _, frames, _, height, width = arguments["hidden_states"].shape
    return frames // (config.patch_size_t or 1), height // config.patch_size, width // config.patch_size


def _grid_as_told(_: Any, arguments: dict[str, Any]) -> tuple[int, ...]:
    """Of latents that come as a sequence, with their sizes beside them."""
    return arguments["num_frames"], arguments["height"], arguments["width"]


KNOWN = {
    "CogVideoXTransformer3DModel": Blocks(("transformer_blocks",), "first", _grid_of_frames),
    "FluxTransformer2DModel": Blocks(
        ("transformer_blocks", "single_transformer_blocks"), "first", merged="single_transformer_blocks"
    ),
    "HunyuanVideoTransformer3DModel": Blocks(
        ("transformer_blocks", "single_transformer_blocks"), "last", _grid_of_latents
    ),
    "LTXVideoTransformer3DModel": Blocks(("transformer_blocks",), None, _grid_as_told),
    "MochiTransformer3DModel": Blocks(("transformer_blocks",), "last", _grid_of_latents),
    "SD3Transformer2DModel": Blocks(("transformer_blocks",), "last", _grid_of_latents),
    "WanTransformer3DModel": Blocks(("blocks",), None, _grid_of_latents),
}


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
    for model in models.values():
        validation.check_places("dense_layers", policy.dense_layers, len(_found_blocks(model)))
    policy.check_layers([name for prefix, model in models.items() for name in _layer_names(model, prefix)])
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


def _models_of(target: Any) -> Iterator[tuple[str, nn.Module]]:
    """Transformers with the prefix of their layers' names."""
    if isinstance(target, nn.Module):
        found = {"": target}
    else:
        named = {f"{name}.": getattr(target, name, None) for name in ("transformer", "transformer_2")}
        found = {prefix: model for prefix, model in named.items() if model is not None}
    if not found:
        raise NotImplementedError(
            f"{type(target).__name__}: expected a pipeline with a transformer, got one without "
            "(`with sparge.replace_sdpa(policy):` reaches any model that calls SDPA)"
        )
    for prefix, model in found.items():
        if _blocks_of(model) is None:
            raise NotImplementedError(
                f"{type(model).__name__}: expected one of {', '.join(KNOWN)} "
                "(`with sparge.replace_sdpa(policy):` reaches any model that calls SDPA; "
                "Policy(always_keep=...) keeps its text tokens)"
            )
        yield prefix, model


def _blocks_of(model: nn.Module) -> Blocks | None:
    return next((KNOWN[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in KNOWN), None)


def _hook_model(model: nn.Module, prefix: str, policy: Policy, schedule: Schedule | None) -> list[Callable[[], None]]:
    """Hooks on every attention module of every block."""
    known = _blocks_of(model)
    assert known is not None
    found = _found_blocks(model)
    passes = _Passes()
    undo: list[Callable[[], None]] = [
        passes.unwind,
        _remove(model.register_forward_pre_hook(passes.begin)),
        _remove(model.register_forward_hook(passes.end, always_call=True)),
    ]
    steps = None if schedule is None else schedule.steps
    if schedule is not None:
        undo += [_remove(model.register_forward_pre_hook(schedule.look)), schedule.leave]
    inputs = _Inputs(known)
    undo.append(_remove(model.register_forward_pre_hook(inputs.read, with_kwargs=True)))
    for index, (part, place, block) in enumerate(found):
        dense = policy.is_dense_layer(index, len(found))
        for name, module in block.named_modules():
            if not _is_attention(module):
                continue
            full = f"{prefix}{part}.{place}.{name}"
            layer = Layer(full, policy.of_layer(full), dense or policy.is_dense_by_budget(full), steps)
            undo += _dispatched_here(module)
            hooks = _Hooks(layer, known, inputs, is_merged=part == known.merged)
            undo.append(_remove(module.register_forward_pre_hook(hooks.open, with_kwargs=True)))
            undo.append(_remove(module.register_forward_hook(hooks.close, always_call=True)))
    return undo


def _found_blocks(model: nn.Module) -> list[tuple[str, int, nn.Module]]:
    """All blocks in the order they run, with their list and their place in it."""
    known = _blocks_of(model)
    assert known is not None
    return [(part, place, block) for part in known.lists for place, block in enumerate(getattr(model, part))]


def _layer_names(model: nn.Module, prefix: str) -> list[str]:
    return [
        f"{prefix}{part}.{place}.{name}"
        for part, place, block in _found_blocks(model)
        for name, module in block.named_modules()
        if _is_attention(module)
    ]


def _is_attention(module: nn.Module) -> bool:
    """What diffusers' attention modules, old and new, have in common."""
    return hasattr(module, "processor")


def _remove(handle: Any) -> Callable[[], None]:
    removal: Callable[[], None] = handle.remove
    return removal


def _dispatched_here(module: nn.Module) -> list[Callable[[], None]]:
    """Have a processor that goes through the dispatcher take our backend, or else SDPA, whatever was chosen before."""
    processor: Any = module.processor
    if not hasattr(processor, "_attention_backend"):
        return []
    from diffusers.models.attention_dispatch import AttentionBackendName

    before = processor._attention_backend
    processor._attention_backend = diffusers_backend.register() or AttentionBackendName.NATIVE
    return [functools.partial(setattr, processor, "_attention_backend", before)]  # copied along with a model


def _is_dispatched(module: Any) -> bool:
    """Whether its processor is set to our backend (at the moment: set_attention_backend may be called at any time)."""
    return getattr(module.processor, "_attention_backend", None) == diffusers_backend.NAME


class _Passes:
    """Scopes that a forward pass left open are closed before the next: torch calls no hook after Ctrl-C."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Passes, ()

    def begin(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.unwind()
            self._local.depth = len(diffusers_backend.THREAD.scopes)

    def end(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._local.depth = None

    def unwind(self) -> None:
        depth = getattr(self._local, "depth", None)
        while depth is not None and len(diffusers_backend.THREAD.scopes) > depth:
            mode = diffusers_backend.THREAD.scopes.pop().mode
            if mode is not None:
                mode.__exit__(None, None, None)
        self._local.depth = None


class _Inputs:
    """What the forward pass under way was called with: the number of its text tokens, and the grid of the others.

    Each thread has its own. Compiled blocks share one, whichever thread wrote it last: torch.compile up to torch 2.11
    loses what is written to thread-local objects.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._local = threading.local()
        self._compiled: tuple[int, tuple[int, ...] | None] = 0, None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inputs, (self._blocks,)  # models are copied, what threads know is not

    def read(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = _parameters(type(model))
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        states = arguments.get("encoder_hidden_states")
        count = states.shape[1] if isinstance(states, Tensor) else 0
        grid = None
        if self._blocks.grid is not None:
            try:
                grid = self._blocks.grid(model.config, arguments)
            except (AttributeError, KeyError, TypeError, ValueError):  # called in a way that says nothing of a grid
                grid = None
            if grid is not None and any(size is None for size in grid):
                grid = None
        self._compiled = count, grid
        if not torch.compiler.is_compiling():
            self._local.found = count, grid

    def found(self) -> tuple[int, tuple[int, ...] | None]:
        if torch.compiler.is_compiling():
            return self._compiled
        return getattr(self._local, "found", (0, None))


@constant
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """Names of what a model's forward takes."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


class _Hooks:
    """The two hooks of an attention module. Scopes are kept by thread, as several may run one model."""

    def __init__(self, layer: Layer, blocks: Blocks, inputs: _Inputs, *, is_merged: bool) -> None:
        self.layer = layer
        self.blocks = blocks
        self.inputs = inputs
        self.is_merged = is_merged

    def open(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        encoder = kwargs.get("encoder_hidden_states", args[1] if len(args) > 1 else None)
        scope = Scope(self.layer, *self._describe(hidden, encoder), self.inputs.found()[1])
        diffusers_backend.THREAD.scopes.append(scope)
        if not _is_dispatched(module):
            scope.mode = SparseMode(scope)
            scope.mode.__enter__()

    def close(self, module: Any, _: Any, output: Any) -> None:
        scope = diffusers_backend.THREAD.scopes.pop()
        if scope.mode is not None:
            scope.mode.__exit__(None, None, None)
        failed = output is None
        if scope.calls == 0 and not failed and not torch.compiler.is_compiling():
            count(Reason.NOT_SDPA, self.layer.name)
            _warn_once(type(module).__name__)

    def _describe(self, hidden: Any, encoder: Any) -> tuple[bool | None, tuple[tuple[int, int | None], ...]]:
        """Whether it is self-attention, and the text tokens among its keys."""
        if self.blocks.text is None:
            return encoder is None, ()
        if isinstance(encoder, Tensor) and isinstance(hidden, Tensor):
            first = self.blocks.text == "first"
            return True, ((0, encoder.shape[1]) if first else (hidden.shape[1], None),)
        if self.is_merged:
            return True, ((0, self.inputs.found()[0]),)
        return True, ()


@functools.cache
def _warn_once(kind: str) -> None:
    warnings.warn(
        f"sparge: {kind} did not call SDPA, so it runs as it was (was set_attention_backend called after "
        "sparge.enable?)",
        stacklevel=2,
    )
