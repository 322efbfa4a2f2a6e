"""A stand-in for ComfyUI: its attention calls, model copies, block numbers and sampler."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sparge

HEADS, HEAD_DIM = 2, 16
TOKENS = 1152
"""18 key blocks. A query block keeps at least 16, so calls are fast and still skip blocks."""

Tensors = tuple[Tensor, Tensor, Tensor]


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Stand in for ComfyUI's attention on SDPA."""
    del attn_precision
    if not skip_reshape:
        head_dim = q.shape[-1] // heads
        q, k, v = (tensor.unflatten(-1, (-1, head_dim)).transpose(1, 2) for tensor in (q, k, v))
    if mask is not None and mask.ndim == 2:
        mask = mask[None]
    if mask is not None and mask.ndim == 3:
        mask = mask[:, None]
    extra = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
    out = F.scaled_dot_product_attention(q, k, v, mask, **extra)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def wrapped(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Call the override in the options, as ComfyUI's wrapper does, unless the call comes from an override."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        if "_inside_attn_wrapper" not in kwargs:
            kwargs["_inside_attn_wrapper"] = True
            options = kwargs.get("transformer_options")
            if options is not None and "optimized_attention_override" in options:
                result: Tensor = options["optimized_attention_override"](func, *args, **kwargs)
                return result
        return func(*args, **kwargs)

    return wrapper


optimized_attention = wrapped(sdpa)


class FlowSampling:
    """Model sampling of flow models."""

    shift = 3.0

    def at(self, time: float) -> float:
        return self.shift * time / (1 + (self.shift - 1) * time)

    def percent_to_sigma(self, percent: float) -> float:
        return 1.0 if percent <= 0 else 0.0 if percent >= 1 else self.at(1 - percent)

    def sigmas(self, steps: int) -> Tensor:
        return torch.tensor([self.at(1 - step / steps) for step in range(steps + 1)])


class Patcher:
    """The value of a MODEL input: the part of ComfyUI's ModelPatcher that nodes use."""

    def __init__(self) -> None:
        self.model_options: dict[str, Any] = {"transformer_options": {"patches": {"some": [1]}}}
        self.objects = {"model_sampling": FlowSampling()}

    def clone(self) -> Patcher:
        other = Patcher()
        other.model_options = copy.deepcopy(self.model_options)
        other.objects = dict(self.objects)
        return other

    def get_model_object(self, name: str) -> Any:
        return self.objects[name]


class Flux:
    """Two double and three single blocks over the same tokens, with the options that ComfyUI's Flux sets."""

    def __init__(self, text: int, *tensors: Tensor) -> None:
        self.text = text
        self.tensors = tensors

    def __call__(self, options: dict[str, Any]) -> dict[str, Tensor]:
        outputs = {}
        options = options.copy()
        for kind, total in (("double", 2), ("single", 3)):
            options.update(block_type=kind, total_blocks=total)
            if kind == "single" and self.text:
                options["img_slice"] = [self.text, self.tensors[0].shape[2]]
            for index in range(total):
                options["block_index"] = index
                out = optimized_attention(*self.tensors, HEADS, skip_reshape=True, transformer_options=options)
                outputs[f"{kind}_block.{index}"] = out
        return outputs


def sample(patcher: Patcher, model: Callable[[dict[str, Any]], Any], steps: int = 5, passes: int = 1) -> list[Any]:
    """Run the sampler's loop; return the output of the model at each step."""
    schedule = patcher.get_model_object("model_sampling").sigmas(steps)
    outputs = []
    for sigma in schedule[:-1]:
        sigmas = sigma * torch.ones(1)
        for _ in range(passes):
            options = {**patcher.model_options["transformer_options"], "sigmas": sigmas, "sample_sigmas": schedule}
            outputs.append(model(options))
    return outputs


def flat(tensor: Tensor) -> Tensor:
    """Return (B, H, S, D) as (B, S, H * D)."""
    return tensor.transpose(1, 2).flatten(2)


def sparse_layers() -> dict[str, tuple[int, int]]:
    """Return the numbers of (sparse, dense) calls of each layer."""
    return {name: (layer.sparse, layer.dense) for name, layer in sparge.stats().layers.items()}


def run(override: Callable[..., Tensor], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Tensor:
    """Run an attention call with this override in its options."""
    options = {**(options or {}), "optimized_attention_override": override}
    return optimized_attention(*args, transformer_options=options, **kwargs)
