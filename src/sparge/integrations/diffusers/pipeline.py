"""Enable sparse attention in diffusers' pipelines and models.

Some models use the attention dispatcher, where this library registers a backend. Others call SDPA directly, which a
torch function mode intercepts. In both cases each attention module gets a pair of hooks that open and close a `Scope`
around it. The hooks provide information that an SDPA call does not contain: its layer, the positions of text tokens,
and whether it is cross-attention. The scheduler provides the step. Processors are not replaced, so LoRA, IP-Adapters
and fused projections work, and removing the hooks restores the model.
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
    """Return whether `enable` was called for a model, or for any model of a pipeline."""
    return any(STATE in vars(model) for model in _models_of(target).values())


def disable(target: Any) -> None:
    """Remove all hooks."""
    for model in _models_of(target).values():
        for action in reversed(vars(model).pop(STATE, [])):  # modules may share a processor
            action()


def _models_of(target: Any) -> dict[str, nn.Module]:
    """Return the models of a target (without torch.compile's wrapper), keyed by the prefix of their layer names."""
    if isinstance(target, nn.Module):
        models = {"": target}
    else:
        components = {f"{name}.": without_compile(part) for name, part in target.components.items()}
        models = {
            prefix: part
            for prefix, part in components.items()
            if isinstance(part, nn.Module) and any(kind.__module__.startswith(PARTS) for kind in type(part).__mro__)
        }
    with_attention = {prefix: model for prefix, model in models.items() if blocks_of(model)}
    if not with_attention:
        kinds = ", ".join(type(model).__name__ for model in models.values()) or type(target).__name__
        expected = "model with attention modules" if models else "pipeline with a transformer, a U-Net or a control net"
        raise NotImplementedError(
            f"{kinds}: expected a {expected}, got none "
            "(use `with sparge.replace_sdpa(policy):` for any model that calls SDPA)"
        )
    return with_attention


def _hook_model(model: nn.Module, prefix: str, policy: Policy, schedule: Schedule | None) -> list[Callable[[], None]]:
    """Hook every attention module of every block, and return functions that undo it."""
    modules, total = list(attentions(model)), len(blocks_of(model))
    undo: list[Callable[[], None]] = [close_scopes]
    steps = None if schedule is None else schedule.steps
    if schedule is not None:
        undo += [model.register_forward_pre_hook(schedule.before_forward).remove, schedule.leave]
    structure = structure_of(model)
    inputs = ModelInputs(structure, [f"{prefix}{name}" for _, name, _ in modules])
    undo.append(model.register_forward_pre_hook(inputs.read, with_kwargs=True).remove)
    for index, name, module in modules:
        full_name = f"{prefix}{name}"
        dense = policy.is_dense_layer(index, total) or policy.is_dense_by_budget(full_name)
        layer = Layer(full_name, policy.of_layer(full_name), dense, steps)
        is_merged = name.startswith(tuple(f"{part}." for part in structure.merged))
        hooks = _Hooks(layer, structure, inputs, is_merged=is_merged)
        undo += [*_select_backend(module), add_hooks(module, hooks.open, hooks.close)]
    return undo


def _select_backend(module: nn.Module) -> list[Callable[[], None]]:
    """Set the dispatcher backend of a module to "sparge", or to SDPA if "sparge" cannot be registered.

    Returns:
        Functions that undo this.
    """
    if not _has_dispatcher(module):
        return []
    from diffusers.models.attention_dispatch import AttentionBackendName

    processor: Any = module.processor
    before = processor._attention_backend
    processor._attention_backend = backend.register() or AttentionBackendName.NATIVE
    return [functools.partial(setattr, processor, "_attention_backend", before)]  # unlike a lambda, copied with a model


def _has_dispatcher(module: Any) -> bool:
    return hasattr(getattr(module, "processor", None), "_attention_backend")


class _Hooks:
    """The two hooks of an attention module, which may run in several threads at once."""

    def __init__(self, layer: Layer, structure: Structure, inputs: ModelInputs, *, is_merged: bool) -> None:
        self.layer, self.structure, self.inputs, self.is_merged = layer, structure, inputs, is_merged
        self.calls_sdpa = False  # a processor that has a dispatcher backend may still call SDPA
        self._called_with: tuple[Any, Any] | None = None

    def open(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        encoder = kwargs.get("encoder_hidden_states", args[1] if len(args) > 1 else None)
        is_tracing = torch.compiler.is_compiling()
        current, name = self.inputs.current.get(is_tracing=is_tracing), self.layer.name
        tokens = self._tokens(hidden, encoder, current) if current.tokens is None else current.tokens.get(name, ())
        recorder = None if is_tracing else probe.recorder_of(name)
        processor = getattr(module, "processor", None)
        backend_name = getattr(processor, "_attention_backend", None)  # `set_attention_backend` may change it
        called_with = processor, backend_name
        scope = Scope(self.layer, tokens, current.grid, module, recorder=recorder, called_with=called_with)
        has_mode = self.calls_sdpa or recorder is not None or backend_name != backend.NAME
        open_scope(scope, has_mode=has_mode, is_tracing=is_tracing)

    def close(self, module: Any, _: Any, output: Any) -> None:
        scope = close_scope()
        if scope.mode is not None:
            self.calls_sdpa = self.calls_sdpa or scope.mode.was_used
        failed = output is None
        if failed or torch.compiler.is_compiling() or scope.recorder is not None:
            return
        if scope.calls:
            self._called_with = scope.called_with
        elif self._called_with != scope.called_with:  # else a cache of diffusers returned the output of an earlier step
            count(Reason.NOT_SDPA, self.layer.name)
            if _has_dispatcher(module):
                kind = type(module).__name__
                cause = "(was set_attention_backend called after sparge.enable?)"
                warn_once(kind, f"{kind} did not call SDPA, so it runs unchanged {cause}", stacklevel=2)

    def _tokens(self, hidden: Any, encoder: Any, current: ForwardPass) -> tuple[Tokens, ...]:
        """Derive the tokens of the module's calls from its hidden states and the encoder's hidden states."""
        if self.structure.text is None:
            return _SELF if encoder is None else _CROSS
        if not isinstance(hidden, Tensor):
            return _SELF
        if isinstance(encoder, Tensor):
            text, others = encoder.shape[1], hidden.shape[1]
        elif self.is_merged:
            text = current.text if current.local_text is None else current.local_text
            others = hidden.shape[1] - text
        else:
            return _SELF
        is_first = self.structure.text == "first"
        seam = None if current.local_text is None else text if is_first else others
        return (Tokens(True, ((0, text) if is_first else (others, None),), seam=seam),)


_SELF, _CROSS = (Tokens(True),), (Tokens(False),)
