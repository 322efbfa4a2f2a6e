"""diffusers: sparse attention in the transformers of a pipeline.

Some models use the attention dispatcher, where this library registers a backend. Others call SDPA directly, which a
torch function mode intercepts. In both cases each attention module gets a pair of hooks that open and close a `Scope`
around it. Processors are not replaced (LoRA, IP-Adapters, fused projections), and removing the hooks restores the
model. The hooks provide information that an SDPA call does not contain: its layer, the positions of text tokens, and
whether it is cross-attention. The scheduler provides the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparge.dispatch.reasons import Reason, count
from sparge.integrations.diffusers import backend, probe
from sparge.integrations.diffusers.inputs import ForwardPass, ModelInputs
from sparge.integrations.diffusers.models import Structure, attentions, blocks_of, structure_of
from sparge.integrations.diffusers.schedule import Schedule
from sparge.integrations.hooks import add_hooks, close_scope, close_scopes, open_scope, without_compile
from sparge.integrations.layers import Layer, Steps, warn_once
from sparge.integrations.sdpa import Scope, Tokens
from sparge.options import checks
from sparge.policy import Policy

STATE = "_sparge_enabled"
"""Attribute of an enabled transformer: functions that undo `enable`, called in reverse order."""

PARTS = ("diffusers.models.transformers.", "diffusers.models.unets.", "diffusers.models.controlnets.")
"""Modules of the model classes that `enable` handles in a pipeline."""


def enable(target: Any, policy: Policy, scheduler: Any) -> None:
    """Hook the transformers of a pipeline, or one transformer, and the scheduler.

    Raises:
        NotImplementedError: the target has no model with attention.
        ValueError: the policy has step rules without a scheduler, or names blocks that the model does not have.
    """
    models = _models_of(target)
    pipeline = target if hasattr(target, "scheduler") and not isinstance(target, nn.Module) else None
    if pipeline is not None and scheduler is not None:
        raise ValueError("scheduler: expected None (the pipeline has one), got one")
    if policy.has_step_rules and scheduler is None and pipeline is None:
        raise ValueError(
            "policy: expected a pipeline, or scheduler=..., for rules about denoising steps, "
            f"got a bare {type(target).__name__}"
        )
    for prefix, model in models.items():
        if not prefix.startswith("controlnet"):  # a control net has fewer blocks than the model it controls
            checks.check_indices("dense_layers", policy.dense_layers, len(blocks_of(model)))
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
    """Return whether `enable` was called for a model, or for a pipeline that contains it."""
    return any(STATE in vars(model) for model in _models_of(target).values())


def disable(target: Any) -> None:
    """Remove all hooks."""
    for model in _models_of(target).values():
        for action in reversed(vars(model).pop(STATE, [])):  # modules may share a processor
            action()


def _models_of(target: Any) -> dict[str, nn.Module]:
    """Return the models of a target (without torch.compile's wrapper), keyed by the prefix of their layer names."""
    if isinstance(target, nn.Module):
        found = {"": target}
    else:
        parts = {f"{name}.": without_compile(part) for name, part in target.components.items()}
        found = {
            prefix: part
            for prefix, part in parts.items()
            if isinstance(part, nn.Module) and any(kind.__module__.startswith(PARTS) for kind in type(part).__mro__)
        }
    with_attention = {prefix: model for prefix, model in found.items() if blocks_of(model)}
    if not with_attention:
        kinds = ", ".join(type(model).__name__ for model in found.values()) or type(target).__name__
        expected = "model with attention modules" if found else "pipeline with a transformer, a U-Net or a control net"
        raise NotImplementedError(
            f"{kinds}: expected a {expected}, got none "
            "(use `with sparge.replace_sdpa(policy):` for any model that calls SDPA)"
        )
    return with_attention


def _hook_model(model: nn.Module, prefix: str, policy: Policy, schedule: Schedule | None) -> list[Callable[[], None]]:
    """Hook every attention module of every block; return functions to undo it."""
    found = list(attentions(model))
    total = len(blocks_of(model))
    undo: list[Callable[[], None]] = [close_scopes]
    steps = None if schedule is None else schedule.steps
    if schedule is not None:
        undo += [model.register_forward_pre_hook(schedule.before_forward).remove, schedule.leave]
    structure = structure_of(model)
    inputs = ModelInputs(structure, [f"{prefix}{name}" for _, name, _ in found])
    undo.append(model.register_forward_pre_hook(inputs.read, with_kwargs=True).remove)
    for index, name, module in found:
        full = f"{prefix}{name}"
        dense = policy.is_dense_layer(index, total) or policy.is_dense_by_budget(full)
        layer = Layer(full, policy.of_layer(full), dense, steps)
        undo += _select_backend(module)
        hooks = _Hooks(
            layer, structure, inputs, is_merged=name.startswith(tuple(f"{part}." for part in structure.merged))
        )
        undo.append(add_hooks(module, hooks.open, hooks.close))
    return undo


def _select_backend(module: nn.Module) -> list[Callable[[], None]]:
    """Set the dispatcher backend of a module to "sparge", or to SDPA if that is impossible; return undo functions."""
    if not _has_dispatcher(module):
        return []
    from diffusers.models.attention_dispatch import AttentionBackendName

    processor: Any = module.processor
    before = processor._attention_backend
    processor._attention_backend = backend.register() or AttentionBackendName.NATIVE
    return [functools.partial(setattr, processor, "_attention_backend", before)]  # unlike a lambda, copied with a model


def _has_dispatcher(module: Any) -> bool:
    """Return whether the processor of a module uses the dispatcher."""
    return hasattr(getattr(module, "processor", None), "_attention_backend")


def _backend_name(module: Any) -> Any:
    """Return the current dispatcher backend of a module. ``set_attention_backend`` may change it at any time."""
    return getattr(getattr(module, "processor", None), "_attention_backend", None)


class _Hooks:
    """The two hooks of an attention module. Scopes are kept per thread, as several threads may run one model."""

    def __init__(self, layer: Layer, structure: Structure, inputs: ModelInputs, *, is_merged: bool) -> None:
        self.layer = layer
        self.structure = structure
        self.inputs = inputs
        self.is_merged = is_merged
        self.calls_sdpa = False  # a processor that has a dispatcher backend may still call SDPA
        self._called_with: tuple[Any, Any] | None = None

    def open(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        encoder = kwargs.get("encoder_hidden_states", args[1] if len(args) > 1 else None)
        now = self.inputs.current.get()
        tokens = self._tokens(hidden, encoder, now) if now.tokens is None else now.tokens.get(self.layer.name, ())
        recorder = None if torch.compiler.is_compiling() else probe.recorder_of(self.layer.name)
        scope = Scope(self.layer, tokens, now.grid, module, recorder=recorder)
        has_mode = self.calls_sdpa or recorder is not None or _backend_name(module) != backend.NAME
        open_scope(scope, has_mode=has_mode)

    def close(self, module: Any, _: Any, output: Any) -> None:
        scope = close_scope()
        if scope.mode is not None:
            self.calls_sdpa = self.calls_sdpa or scope.mode.was_used
        failed = output is None
        if failed or torch.compiler.is_compiling() or scope.recorder is not None:
            return
        called_with = getattr(module, "processor", None), _backend_name(module)
        if scope.calls:
            self._called_with = called_with
        elif self._called_with != called_with:  # if equal, a cache of diffusers returned the output of an earlier step
            count(Reason.NOT_SDPA, self.layer.name)
            if _has_dispatcher(module):
                kind = type(module).__name__
                cause = "(was set_attention_backend called after sparge.enable?)"
                warn_once(kind, f"{kind} did not call SDPA, so it runs unchanged {cause}", stacklevel=2)

    def _tokens(self, hidden: Any, encoder: Any, now: ForwardPass) -> tuple[Tokens, ...]:
        """Return the tokens of the module's calls, from the arguments of the module."""
        if self.structure.text is None:
            return (_SELF if encoder is None else _CROSS,)
        if not isinstance(hidden, Tensor):
            return (_SELF,)
        own_text = now.own_text
        if isinstance(encoder, Tensor):
            text, others = encoder.shape[1], hidden.shape[1]
        elif self.is_merged:
            text = now.text if own_text is None else own_text
            others = hidden.shape[1] - text
        else:
            return (_SELF,)
        first = self.structure.text == "first"
        seam = None if own_text is None else text if first else others
        return (Tokens(True, ((0, text) if first else (others, None),), seam=seam),)


_SELF, _CROSS = Tokens(True), Tokens(False)
