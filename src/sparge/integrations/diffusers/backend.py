"""The backend "sparge" of diffusers' attention dispatcher.

The dispatcher's names are a closed Enum and its registry is private, so this module modifies both directly. If that
fails, `enable` still works: the dispatcher then calls SDPA, which is intercepted as in other models.
"""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Any

from torch import Tensor, nn

from sparge.dispatch.gradients import needs_grad_of
from sparge.integrations.diffusers import context_parallel
from sparge.integrations.hooks import THREAD
from sparge.integrations.layers import Layer, refuse
from sparge.integrations.sdpa import Scope, next_sparse_call, run_unintercepted, sparse_sdpa
from sparge.policy import Policy

NAME = "sparge"
_IS_LIMITED = "_sparge_is_limited"
"""Attribute of the method that `_limit_to_own_model` installs."""
_log = logging.getLogger(__name__)

_unnamed = [Layer("", Policy())]  # the layer of calls outside enabled models
_native: list[Any] = []  # the dispatcher's SDPA backend, which runs dense calls


def register(policy: Policy | None = None) -> Any:
    """Register this backend once, and return its name in the dispatcher, or None if the dispatcher cannot be extended.

    Args:
        policy: the policy of calls outside enabled models, as after ``set_attention_backend("sparge")``.
    """
    if policy is not None:
        _unnamed[0] = Layer("", policy)
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

        names, backends = AttentionBackendName, _AttentionBackendRegistry._backends
        if NAME not in names._value2member_map_:
            member = str.__new__(names, NAME)
            member._name_, member._value_ = NAME.upper(), NAME
            member.__reduce_ex__ = _reduce  # a model may be unpickled where the name is not registered yet
            names._member_map_[NAME.upper()] = member
            names._value2member_map_[NAME] = member
            names._member_names_.append(NAME.upper())
        member = names(NAME)
        if not _native:
            _native.append(backends[names.NATIVE])
        if backends.get(member) is not attention:
            if member in backends:  # a later diffusers may have a backend of this name
                _log.warning("the attention backend %r of diffusers is replaced by this library's", NAME)
            _AttentionBackendRegistry.register(member, supports_context_parallel=True)(attention)
        _limit_to_own_model(_AttentionBackendRegistry)
        return member if backends[member] is attention else None
    except (ImportError, AttributeError, KeyError, TypeError, ValueError):
        return None


def _reduce(protocol: int) -> tuple[Any, ...]:  # noqa: ARG001
    """Pickle the dispatcher's name as a call of `register`."""
    return register, ()


def _limit_to_own_model(registry: Any) -> None:
    """Limit ``model.set_attention_backend("sparge")`` to that model, and warn about modules that it does not affect.

    In diffusers, this method also changes the default of all models whose processors have no backend. Only the context
    manager ``attention_backend`` should do that; it is not changed here.
    """
    from diffusers import ModelMixin

    original = ModelMixin.set_attention_backend
    if getattr(original, _IS_LIMITED, False):
        return

    @functools.wraps(original)
    def set_attention_backend(self: Any, backend: str) -> None:
        default = registry._active_backend
        original(self, backend)
        if backend.lower() == NAME:
            registry.set_active_backend(default)
            _warn_about_direct_calls(self)

    setattr(set_attention_backend, _IS_LIMITED, True)
    ModelMixin.set_attention_backend = set_attention_backend


def _warn_about_direct_calls(model: nn.Module) -> None:
    """Warn about attention modules that call SDPA directly, regardless of the backend."""
    processors = [module.processor for module in model.modules() if hasattr(module, "processor")]
    direct = sum(not hasattr(processor, "_attention_backend") for processor in processors)
    if direct:
        warnings.warn(
            f'sparge: set_attention_backend("{NAME}") does not affect {direct} of {len(processors)} attention modules '
            f"of {type(model).__name__}, which call SDPA directly; use sparge.enable(model)",
            stacklevel=3,
        )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """Compute attention for the dispatcher: query (B, S_q, H, D), key and value (B, S_k, H_kv, D) -> (B, S_q, H, D)."""
    scopes = THREAD.scopes
    scope = scopes[-1] if scopes else Scope(_unnamed[0])
    dense_call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, _parallel_config)
    mask = attn_mask
    if mask is not None and mask.ndim == 2 and mask.shape == (query.shape[0], key.shape[1]):
        mask = mask[:, None, None, :]  # the dispatcher's key padding
    mesh = None if _parallel_config is None else context_parallel.mesh_of(_parallel_config)
    tokens = None
    if scope.recorder is None:
        if mesh is not None:
            tokens = scope.next_call(key, tokens_first=True)
            if needs_grad_of(query, key, value, attn_mask):
                refuse(scope.layer, "gradients")
                return _dense(*dense_call)
            call = (mask, dropout_p, is_causal, scale, enable_gqa)
            return context_parallel.attention(scope, tokens, mesh, _dense, query, key, value, *call)
        if mask is None and not is_causal:  # before the tensors are transposed, which takes longer than the decision
            tokens = next_sparse_call(scope, query, key, tokens_first=True)
            if tokens is None:
                return _dense(*dense_call)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    output = sparse_sdpa(scope, q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa, tokens=tokens)
    return _dense(*dense_call) if output is None else output.transpose(1, 2)


def _dense(*call: Any) -> Tensor:
    """Run a call on the dispatcher's SDPA backend; the last argument may be ``_parallel_config``."""
    output: Tensor = run_unintercepted(_native[0], *call[:8], _parallel_config=call[8] if len(call) > 8 else None)
    return output
