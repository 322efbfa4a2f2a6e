"""transformers: ``attn_implementation="sparge"``, in the attention registry and the mask registry.

The prefill of a language model is sparse. Decoding and all other dense calls run on transformers' own SDPA function,
so their results are bitwise equal to SDPA's. Masks have the format of SDPA. If a mask consists of causality, a sliding
window and padding, these parts are attached to it (`masks`). The kernels then read one row per sequence instead of a
full (S_q x S_k) mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparge.integrations.calls import attend
from sparge.integrations.decisions import runs_dense
from sparge.integrations.layers import Layer, warn_about_indices, warn_if_training
from sparge.integrations.model_call import ModelCall, aligned_top_left
from sparge.integrations.sdpa import run_unintercepted
from sparge.integrations.transformers import eager, masks, packing
from sparge.integrations.transformers.images import ImageInputs
from sparge.policy import Policy

NAME = "sparge"
LAYER = "_sparge_layer"
"""Attribute of an attention module of an enabled model: its `Layer`."""
BY_NAME = "_sparge_layer_by_name"
"""Attribute of an attention module of a model loaded with ``attn_implementation="sparge"``: its `Layer`."""
INPUTS = "_sparge_inputs"
"""Attribute of an attention module: the `ImageInputs` of the part of the model that contains it."""

MIN_VERSION = "5.17"

UNSUPPORTED = {"position_bias": "position bias", "cache": "paged cache", eager.CAP: "soft-capped scores"}
"""Arguments that only transformers' own functions support."""

CROSS_ATTENTION = ("encoder_attn", "cross_attn", "crossattention", "EncDecAttention")
"""Names of cross-attention modules within a layer."""

REFUSED = {
    "indices": "an index of keys",
    "block_indices": "an index of key blocks",
}
"""Arguments that raise an error. They change the result, but some of transformers' SDPA functions ignore them."""

_registered: dict[str, Policy] = {}
_stock: list[Callable[..., tuple[Tensor, None]]] = []  # transformers' SDPA function, which runs dense calls


def register(policy: Policy) -> None:
    """Register ``attn_implementation="sparge"``; models that are loaded with it follow the policy.

    Raises:
        ImportError: transformers is missing or too old.
        ValueError: the policy has step rules or per-layer budgets.
    """
    check_no_steps(policy)
    if policy.budgets is not None:
        raise ValueError("policy: expected no per-layer budgets (sparge.enable supports them), got budgets")
    register_functions()
    _registered[NAME] = policy


def check_no_steps(policy: Policy) -> None:
    """Raise ValueError for a policy with step rules."""
    if policy.has_step_rules:
        raise ValueError(f"policy: expected no rules about denoising steps for a language model, got {policy}")


def register_functions() -> None:
    """Register the attention function and the mask function with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface, __version__
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if tuple(int(part) for part in __version__.split(".")[:2]) < tuple(map(int, MIN_VERSION.split("."))):
        raise ImportError(f"transformers: expected version {MIN_VERSION} or newer, got {__version__}")
    _stock[:] = [ALL_ATTENTION_FUNCTIONS["sdpa"]]
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, masks.make_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a module for transformers.

    Args:
        query: (B, H, S_q, D); key and value: (B, H_kv, S_k, D).

    Returns:
        The output (B, S_q, H, D), and None in place of the probabilities.
    """
    for name, meaning in REFUSED.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{meaning} ({name}): expected None, got a value (SDPA cannot compute this model's attention)"
            )
    attributes = vars(module)
    layer = attributes.get(LAYER) or _layer_of(module)
    causal = is_causal
    if causal is None:  # vars() first: a module's __getattr__ searches parameters and buffers, which is slow
        causal = attributes["is_causal"] if "is_causal" in attributes else getattr(module, "is_causal", True)
    is_self = layer is not None and not layer.is_cross
    is_language = causal and is_self
    pack = None
    if is_self and (attention_mask is not None or packing.KEYWORDS[0] in kwargs):
        pack = packing.pack_of(query, key, attention_mask, causal, kwargs)
    run_dense = functools.partial(_dense, module, causal, is_causal, dropout, scaling, kwargs)
    if layer is None or (pack is None and runs_dense(layer, query, key, is_language=is_language)):
        return run_dense(query, key, value, attention_mask), None
    call = _ModuleCall(module, layer, is_language, dropout, scaling, kwargs)
    if pack is not None and call.why_unsupported(query) is None:
        functions = (call.sparse, run_dense, layer.name)
        output = packing.attend_packed(pack, query, key, value, attention_mask, causal, *functions)
        return output.contiguous(), None
    heads_first = call.sparse(query, key, value, attention_mask)
    if heads_first is None:
        return run_dense(query, key, value, attention_mask), None
    warn_if_training(module)
    return heads_first.transpose(1, 2).contiguous(), None


def _dense(
    module: nn.Module,
    causal: bool,
    is_causal: bool | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
) -> Tensor:
    """Return the output (B, S_q, H, D) of a call that runs exactly as in transformers.

    Args:
        causal: whether the call is causal.
        is_causal: the argument of `attention_forward`, which is passed on unchanged.
    """
    call = (module, query, key, value, attention_mask, dropout, scaling)
    if eager.needs_own_function(kwargs):
        return eager.attention_forward(*call, causal, **kwargs)
    output: Tensor = run_unintercepted(_stock[0], *call, is_causal, **kwargs)[0]
    return output


@dataclass(frozen=True)
class _ModuleCall:
    """A call that is not dense by policy, without its tensors. All segments of a packed call share it.

    Attributes:
        is_language: the tokens are text in order, and the call is causal.
    """

    module: nn.Module
    layer: Layer
    is_language: bool
    dropout: float
    scaling: float | None
    kwargs: dict[str, Any]

    def why_unsupported(self, query: Tensor) -> str | None:
        """Return the argument or property of the call that only transformers' own functions support, or None."""
        sinks = self.kwargs.get(eager.SINKS)
        if sinks is not None and sinks.shape != query.shape[1:2]:
            return "sinks of another shape than (heads,)"
        return next((UNSUPPORTED[name] for name in UNSUPPORTED if self.kwargs.get(name) is not None), None)

    def sparse(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """Return the output (B, H, S_q, D) of a call, or None if it runs dense."""
        unsupported = self.why_unsupported(query)
        is_causal = self.is_language and attention_mask is None and query.shape[2] > 1  # else the mask is causal
        if is_causal:  # the entries of a static cache after the queries are empty
            key, value, misaligned = aligned_top_left(query, key, value)
            unsupported = unsupported or misaligned
        call = ModelCall(query, key, value, attention_mask, self.dropout, is_causal, self.scaling, enable_gqa=True)
        call.is_language, call.sinks, call.unsupported = self.is_language, self.kwargs.get(eager.SINKS), unsupported
        parts = masks.parts_of(attention_mask) if self.is_language else None
        if parts is not None and parts.segments is None:
            call.attn_mask, call.is_causal = parts.padding, True
            call.window = None if parts.window is None else (parts.window - 1, 0)
        elif attention_mask is not None:
            call.max_keys = self.kwargs.get("sliding_window")
        inputs: ImageInputs | None = vars(self.module).get(INPUTS)
        if inputs is not None and query.shape[2] == key.shape[2]:
            if self.is_language:
                call.text = inputs.text(key.shape[2])
            else:
                call.grid, call.text = inputs.grid(key.shape[2])
        return attend(self.layer, call)


def _layer_of(module: nn.Module) -> Layer | None:
    """Return the layer of an attention module in a model loaded with ``attn_implementation="sparge"``.

    The layer has the registered policy. If no policy is registered, return None: the model itself was not enabled, but
    shares its config with a model that was.
    """
    policy = _registered.get(NAME)
    if policy is None:
        return None
    layer = vars(module).get(BY_NAME)
    if layer is not None and layer.policy is policy:
        return cast(Layer, layer)
    index = getattr(module, "layer_idx", None)
    name = "" if index is None else f"layers.{index}"
    total = getattr(getattr(module, "config", None), "num_hidden_layers", None)
    dense = index is not None and total is not None and policy.is_dense_layer(index, total)
    layer = Layer(name, policy, dense, is_cross=is_cross(module))
    if not torch.compiler.is_compiling():
        setattr(module, BY_NAME, layer)
        if index is not None and total is not None:  # another part of the model may have more layers
            warn_about_indices("dense_layers", policy.dense_layers, total)
    return layer


def is_cross(module: nn.Module, name: str = "") -> bool:
    """Return whether a module is cross-attention, by its class name, its name in the model or an attribute."""
    is_named = "Cross" in type(module).__name__ or name.rsplit(".", 1)[-1] in CROSS_ATTENTION
    return is_named or getattr(module, "is_cross_attention", False) is True
