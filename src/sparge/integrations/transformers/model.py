"""transformers: `enable` and `disable` for a model."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparge.dispatch.reasons import Reason, count
from sparge.integrations.hooks import add_hooks, close_scope, close_scopes, open_scope
from sparge.integrations.layers import Layer, warn_once
from sparge.integrations.sdpa import UNKNOWN, Scope
from sparge.integrations.transformers import eager
from sparge.integrations.transformers.attention import (
    BY_NAME,
    INPUTS,
    LAYER,
    NAME,
    check_no_steps,
    is_cross,
    register_functions,
)
from sparge.integrations.transformers.images import ImageInputs, takes_images
from sparge.options import checks
from sparge.policy import Policy

STATE = "_sparge_enabled"
"""Attribute of an enabled model: its `Enabled`."""
IMPLEMENTATION = "_attn_implementation_internal"
"""Attribute of a config: the name of the attention implementation."""

REGISTRY = "ALL_ATTENTION_FUNCTIONS"
"""A name in the code of modules whose attention implementation can be set."""
SDPA = "scaled_dot_product_attention"
OWN = ("softmax", SDPA)
"""Names in the code of modules that compute attention themselves."""

Attentions = Sequence[tuple[str, nn.Module]]
"""Attention modules with their names in a model."""


@dataclass
class Enabled:
    """The state of an enabled model, which is copied and pickled with it.

    Attributes:
        undo: functions that restore the model.
    """

    undo: list[Callable[[], None]]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        register_functions()  # `enable` may not have been called in the process that loads the model


def enable(model: Any, policy: Policy, scheduler: Any) -> None:
    """Switch a PreTrainedModel to sparse attention.

    Raises:
        NotImplementedError: the model cannot run on SDPA, or does not use transformers' attention functions.
        ValueError: ``scheduler`` is given; the policy has step rules, or names layers that the model does not have; or
            the model contains an enabled model, or is part of one.
    """
    if scheduler is not None:
        raise ValueError(f"scheduler: expected None for a transformers model, got {type(scheduler).__name__}")
    if not _supports_sdpa(model):
        raise NotImplementedError(
            f"{type(model).__name__}: expected a model that supports SDPA attention (_supports_sdpa is False)"
        )
    check_no_steps(policy)
    attentions = [(name, module) for name, module in model.named_modules() if _is_attention(module)]
    indices = {name: _index_in_list(model, name) for name, _ in attentions}
    checks.check_indices("dense_layers", policy.dense_layers, max((total for _, total in indices.values()), default=0))
    policy.check_layers([name for name, _ in attentions])
    own = _own_attentions(model, attentions, policy)
    if is_enabled(model):
        disable(model)
    if any(LAYER in vars(module) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__}: expected a model that neither contains an enabled model nor is part of one"
        )
    register_functions()
    undo: list[Callable[[], None]] = [
        functools.partial(setattr, config, IMPLEMENTATION, getattr(config, IMPLEMENTATION))
        for config in _configs(model)
    ]
    setattr(model, STATE, Enabled(undo))
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        disable(model)
        raise NotImplementedError(
            f"{type(model).__name__}: expected a model whose attention can be set (it calls SDPA directly; use "
            "`with sparge.replace_sdpa(policy):`)"
        )
    for name, module in attentions:
        dense = policy.is_dense_layer(*indices[name]) or policy.is_dense_by_budget(name)
        setattr(module, LAYER, Layer(name, policy.of_layer(name), dense, is_cross=is_cross(module, name)))
    undo.append(model.register_forward_pre_hook(_check_implementation).remove)
    undo += _hook_image_parts(model, attentions)
    undo += _hook_own_attentions(own)


def is_enabled(model: Any) -> bool:
    """Return whether `enable` was called for the model."""
    return STATE in vars(model)


def disable(model: Any) -> None:
    """Restore the attention that the model had before `enable`."""
    for action in vars(model).pop(STATE).undo:
        action()
    for module in model.modules():
        for name in (LAYER, BY_NAME, INPUTS):
            vars(module).pop(name, None)


def _check_implementation(model: Any, *_: Any) -> None:
    """Warn once if another attention was set after `enable`; a forward pre-hook."""
    implementation = model.config._attn_implementation
    if implementation != NAME and not torch.compiler.is_compiling():
        message = (
            f"the attention of {type(model).__name__} was set to {implementation!r} after sparge.enable, so nothing "
            "runs sparse (call sparge.enable again, or sparge.disable)"
        )
        warn_once(message, message, stacklevel=3)


def _hook_image_parts(model: nn.Module, attentions: Attentions) -> list[Callable[[], None]]:
    """Hook the parts that take images, so that their attention modules can read the grid; return undo functions.

    A module belongs to the innermost part that contains it and takes images.
    """
    parts: dict[nn.Module, ImageInputs] = {}
    for name, module in attentions:
        path = name.split(".")
        around = (model.get_submodule(".".join(path[:stop])) for stop in reversed(range(len(path))))
        part = next(filter(takes_images, around), None)
        if part is not None:
            setattr(module, INPUTS, parts.setdefault(part, ImageInputs(part)))
    return [add_hooks(part, inputs.read, inputs.forget) for part, inputs in parts.items()]


def _hook_own_attentions(own: Attentions) -> list[Callable[[], None]]:
    """Hook modules that compute attention themselves; return functions that remove the hooks.

    The hooks open a scope around a module that calls SDPA directly, and count the calls of any other module.
    """
    undo: list[Callable[[], None]] = [close_scopes]
    for _, module in own:
        hooks = _OwnAttentionHooks(vars(module)[LAYER], calls_sdpa=SDPA in _names_used(type(module)))
        undo.append(add_hooks(module, hooks.open, hooks.close))
    return undo


class _OwnAttentionHooks:
    """The two hooks of a module that computes attention itself, by SDPA or by its own matmuls and softmax."""

    def __init__(self, layer: Layer, *, calls_sdpa: bool) -> None:
        self.layer = layer
        self.calls_sdpa = calls_sdpa

    def open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        grid = tuple(hidden.shape[1:3]) if isinstance(hidden, Tensor) and hidden.ndim == 4 else None
        scope = Scope(self.layer, (UNKNOWN,), grid, module)
        open_scope(scope, has_mode=self.calls_sdpa, is_tracing=torch.compiler.is_compiling())

    def close(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        scope = close_scope()
        if scope.calls == 0 and output is not None:
            count(Reason.OWN_ATTENTION, self.layer.name)


def _supports_sdpa(model: nn.Module) -> bool:
    """Return whether a model supports SDPA, or would support it without attention sinks and soft-capped scores."""
    if getattr(model, "_supports_sdpa", False):
        return True
    kinds = {type(module) for module in model.modules() if _is_attention(module)}
    return bool(getattr(model, "_supports_flash_attn", False)) and any(map(eager.may_need_own_function, kinds))


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module may call transformers' attention interface."""
    return hasattr(module, "is_causal") or "Attention" in type(module).__name__


def _own_attentions(model: nn.Module, attentions: Attentions, policy: Policy) -> Attentions:
    """Return the modules that compute attention themselves. Modules among them that do not call SDPA stay dense.

    Raises:
        NotImplementedError: some modules stay dense, and there are no others or the policy has
            ``on_unsupported="raise"``.
    """
    names = {kind: _names_used(kind) for kind in {type(module) for _, module in attentions}}
    own = [
        (name, module)
        for name, module in attentions
        if not any(_is_attention(part) for part in module.modules() if part is not module)
        and REGISTRY not in names[type(module)]
        and not names[type(module)].isdisjoint(OWN)
    ]
    by_hand = {type(module) for _, module in own if SDPA not in names[type(module)]}
    if not by_hand:
        return own
    message = (
        f"{type(model).__name__}: expected modules that call transformers' attention functions or SDPA, got an own "
        f"implementation in {', '.join(sorted(kind.__name__ for kind in by_hand))}"
    )
    if any(SDPA in _names_used(other) for kind in by_hand for other in kind.__subclasses__()):
        message += " (another class calls SDPA: load the model with attn_implementation='sdpa')"
    if not any({REGISTRY, SDPA} & used for used in names.values()) or policy.on_unsupported == "raise":
        raise NotImplementedError(message)
    if policy.on_unsupported == "warn":
        warnings.warn(f"sparge: {message}; it runs unchanged", stacklevel=4)
    return own


def _names_used(kind: type) -> set[str]:
    """Return the names in the code of a class and its bases."""
    return {name for code in eager.code_of(kind) for name in code.co_names}


def _index_in_list(model: nn.Module, name: str) -> tuple[int, int]:
    """Return a module's index in the innermost list of layers that contains it, and the length of that list.

    "model.layers.3.self_attn" is number 3 in "model.layers". Outside of lists, the index matches no rule.
    """
    parts = name.split(".")
    position = next((position for position in reversed(range(len(parts))) if parts[position].isdigit()), None)
    if position is None:
        return sys.maxsize, 0
    layers: Any = model.get_submodule(".".join(parts[:position]))
    return int(parts[position]), len(layers)


def _configs(model: Any) -> list[Any]:
    """Return every config of a model and its parts."""
    from transformers import PreTrainedModel

    configs: dict[int, Any] = {}
    pending: list[Any] = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while pending:
        config = pending.pop()
        if config is not None and id(config) not in configs:
            configs[id(config)] = config
            pending += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return list(configs.values())
