"""ComfyUI: sparse attention for one model. The node in ``comfyui/`` calls `sparsify`.

ComfyUI passes every attention call of a diffusion model to the "optimized_attention_override" in the model's
``transformer_options``, if there is one, with the function that would otherwise compute the call.
`attention_override` returns an override that computes the sparse calls itself and leaves all others to that function.
This module does not import ComfyUI.

``transformer_options`` also describe the call. Models set some of these:

    sigmas                    noise level of the step, on the device. All calls of a step share one tensor.
    block_type, block_index   transformers: "double" or "single", and the index in that list of blocks.
    total_blocks              length of that list.
    block                     UNets: such as ("input", 4); block_index is then the transformer block inside this block.
    img_slice                 [start, stop) of the image among the tokens; the rest is text. Flux sets it only in its
                              single blocks; many models never set it.
    minimax_h3_layout         MiniMax-H3 only: segments (start, stop, kind).
"""

from __future__ import annotations

import logging
import math
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparge.dispatch.reasons import Reason
from sparge.integrations.calls import attend
from sparge.integrations.layers import Layer, Steps
from sparge.integrations.model_call import ModelCall
from sparge.policy import Policy

OVERRIDE = "optimized_attention_override"
ROUNDING = 1e-6
"""Relative tolerance of sigmas: they are float32, and a step may be exactly at the start or end of the range."""

Override = Callable[..., Tensor]

_PART = re.compile(r"(-?\d{1,4})(?:\s*-\s*(-?\d{1,4}))?")
_DENSE_STEP = Steps(Policy())
_DENSE_STEP.dense = Reason.STEP
_log = logging.getLogger(__name__)


def sparsify(
    model: Any,
    *,
    keep_percent: float = 50.0,
    start_percent: float = 0.0,
    end_percent: float = 1.0,
    dense_blocks: str = "",
    min_tokens: int = 0,
    backend: str = "auto",
) -> Any:
    """Return a clone of a ModelPatcher whose attention is sparse; the model itself is not changed.

    Args:
        model: a MODEL, as ComfyUI's loaders return it.
        keep_percent: percentage of the blocks that a call keeps, in (0, 100]. 100 is dense attention, quantized where
            that is faster (GPUs), and unchanged elsewhere.
        start_percent: the start of sparse attention in the model's noise schedule, from 0 to 1; dense before.
        end_percent: the end of sparse attention in the schedule; dense after.
        dense_blocks: blocks that run dense: "0, 1, -1" or "0-3, -1". A number is an index in a list of blocks: 0 is the
            first double block and the first single block, -1 the last of each. In UNets it is the number of the input,
            middle or output block, and negative numbers are not supported.
        min_tokens: calls with fewer tokens run dense; with 0, only the measured crossover applies.
        backend: as in `Policy`.

    Raises:
        TypeError, ValueError: a value has the wrong type or is out of range.
    """
    if not 0 <= start_percent <= end_percent <= 1:
        raise ValueError(f"expected 0 <= start_percent <= end_percent <= 1, got {start_percent} and {end_percent}")
    sigma_at = model.get_model_object("model_sampling").percent_to_sigma
    patched = model.clone()
    options = dict(patched.model_options.get("transformer_options", {}))
    options[OVERRIDE] = attention_override(
        keep_percent,
        start_sigma=math.inf if start_percent == 0 else float(sigma_at(start_percent)),
        end_sigma=0.0 if end_percent == 1 else float(sigma_at(end_percent)),
        dense_blocks=dense_blocks,
        min_tokens=min_tokens,
        previous=options.get(OVERRIDE),
        backend=backend,
    )
    patched.model_options = {**patched.model_options, "transformer_options": options}
    return patched


def attention_override(
    keep_percent: float = 50.0,
    *,
    start_sigma: float = math.inf,
    end_sigma: float = 0.0,
    dense_blocks: str = "",
    min_tokens: int = 0,
    previous: Override | None = None,
    backend: str = "auto",
) -> Override:
    """Return a value for ``transformer_options["optimized_attention_override"]``.

    It is a function, not an object, because ComfyUI often makes deep copies of a model's options.

    Args:
        start_sigma: steps with more noise than this run dense.
        end_sigma: steps with less noise than this run dense.
        previous: an override that was set before; it computes the dense calls.

    The other arguments are those of `sparsify`.

    Returns:
        A function (func, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False,
        **kwargs) -> output. q, k and v are (B, S, H * D), or (B, H, S, D) with ``skip_reshape``. The output is
        (B, S, H * D), or (B, H, S, D) with ``skip_output_reshape``.

    Example:
        >>> import torch, sparge
        >>> import torch.nn.functional as F
        >>> def dense(q, k, v, heads, **kwargs):
        ...     q, k, v = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (q, k, v))
        ...     return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        >>> override = attention_override(25, dense_blocks="0-3, -1")
        >>> sparge.reset_stats()
        >>> q = torch.randn(1, 4096, 32)
        >>> for index in (0, 4):
        ...     options = {"block_type": "double", "block_index": index, "total_blocks": 19}
        ...     out = override(dense, q, q, q, 2, transformer_options=options)
        >>> {name: layer.sparse for name, layer in sparge.stats().layers.items()}
        {'double_block.0': 0, 'double_block.4': 1}
    """
    if isinstance(keep_percent, bool) or not isinstance(keep_percent, (int, float)):
        raise TypeError(f"keep_percent: expected a number, got {type(keep_percent).__name__}")
    if not 0 < keep_percent <= 100:
        raise ValueError(f"keep_percent: expected a number in (0, 100], got {keep_percent}")
    layers = parse_blocks(dense_blocks)
    policy = Policy(topk=keep_percent / 100, min_tokens=min_tokens, dense_layers=layers, backend=backend)
    sparse = _SparseCalls(policy, start_sigma, end_sigma)

    def override(func: Override, *args: Any, **kwargs: Any) -> Tensor:
        output = sparse(*args, **kwargs)
        if output is not None:
            return output
        return func(*args, **kwargs) if previous is None else previous(func, *args, **kwargs)

    return override


def parse_blocks(text: str) -> tuple[int, ...]:
    """Return the block numbers in a text.

    Raises:
        ValueError: the text is not a list of numbers and ranges.

    Example:
        >>> parse_blocks("0-3, -1"), parse_blocks("")
        ((0, 1, 2, 3, -1), ())
        >>> parse_blocks("first")
        Traceback (most recent call last):
        ...
        ValueError: dense_blocks: expected numbers and ranges such as '0, 1, -1' or '0-3, -1', got 'first'
    """
    blocks: list[int] = []
    for part in text.split(",") if text.strip() else ():
        match = _PART.fullmatch(part.strip())
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if last < first or (first < 0) != (last < 0):
            raise ValueError(f"dense_blocks: expected numbers and ranges such as '0, 1, -1' or '0-3, -1', got {text!r}")
        blocks += range(first, last + 1)
    return tuple(dict.fromkeys(blocks))


class _SparseCalls:
    """Computes sparse calls; returns None for calls that run dense."""

    def __init__(self, policy: Policy, start_sigma: float, end_sigma: float) -> None:
        self.policy = policy
        self.unquantized = replace(policy, quantization="none")
        self.quantized_dense = replace(policy, dense="8bit") if policy.topk == 1 else None
        highest, lowest = start_sigma * (1 + ROUNDING), end_sigma * (1 - ROUNDING)
        self.has_range = start_sigma != math.inf or end_sigma > 0
        # Reading a sigma synchronizes with the device. All calls of a step share one tensor, which is read once.
        self.is_inside = _OfTensor(lambda sigmas: lowest <= float(sigmas.flatten()[0]) <= highest)
        self.images = _OfTensor(lambda _: {})
        self.has_logged = False

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        *,
        transformer_options: dict[str, Any] | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        low_precision_attention: bool = True,
        _inside_attn_wrapper: bool = True,  # read by ComfyUI's own functions
        **unknown: Any,
    ) -> Tensor | None:
        options = transformer_options or {}
        if not skip_reshape and q.shape[-1] % heads == 0:
            q, k, v = (_heads_first(tensor, q.shape[-1] // heads) for tensor in (q, k, v))
        if mask is not None and mask.ndim in (2, 3):
            mask = mask[None, None] if mask.ndim == 2 else mask[:, None]
        is_exact = attn_precision == torch.float32 or not low_precision_attention
        layer, unknown_rule = self._layer(options, is_exact=is_exact)
        call = ModelCall(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
        if k.ndim == 4:
            call.text = self._text(options, k.shape[2])
        argument = next((f"argument {name}" for name, value in unknown.items() if value is not None), None)
        call.unsupported = argument or _why_unsupported_shape(call, heads) or unknown_rule
        output = attend(layer, call)
        if output is None:
            return None
        if not self.has_logged and not torch.compiler.is_compiling():
            self.has_logged = True
            kind = "sparse attention" if self.quantized_dense is None else "quantized attention"
            _log.info("sparge: %s is on, %d tokens, %s", kind, k.shape[2], layer.name or "no name for the block")
        return output if skip_output_reshape else output.transpose(1, 2).flatten(2)

    def _layer(self, options: dict[str, Any], *, is_exact: bool) -> tuple[Layer, str | None]:
        """Return the layer of a call, and a description of a rule that cannot be applied to the call, or None.

        Args:
            is_exact: whether the call must not be quantized.
        """
        name, index, total = _block_of(options)
        is_dense, unknown_rule = _is_dense_block(self.policy, index, total)
        steps, sigmas = None, options.get("sigmas")
        if self.has_range:
            if sigmas is None:
                unknown_rule = unknown_rule or "start_percent or end_percent, but the call has no sigmas"
            elif not self.is_inside(sigmas):
                steps = _DENSE_STEP
        policy = self.unquantized if is_exact else self.policy
        if self.quantized_dense is not None and steps is None and not is_dense:
            is_dense = True
            policy = policy if is_exact else self.quantized_dense
        return Layer(name, policy, is_dense, steps), unknown_rule

    def _text(self, options: dict[str, Any], kv_len: int) -> Sequence[tuple[int, int]]:
        """Return the key ranges outside the image; none if they are unknown.

        Flux provides the ranges only in its single blocks, which run last. They are kept for the double blocks of later
        passes in the same run of the sampler, and dropped before the next run, so that a seed always gives the same
        image.
        """
        layout = options.get("minimax_h3_layout")
        if layout is not None and layout.seq_len == kv_len:
            return [(start, stop) for start, stop, kind in layout.segments if kind != "video" and start < stop]
        image = options.get("img_slice")
        if image is not None and not 0 <= image[0] < image[1] <= kv_len:
            image = None  # the slice refers to other tokens
        run = options.get("sample_sigmas")
        if run is not None and not torch.compiler.is_compiling():
            images = self.images(run)
            if image is not None:
                images[kv_len] = (image[0], image[1])
            image = images.get(kv_len)
        ranges = () if image is None else ((0, image[0]), (image[1], kv_len))
        return [(start, stop) for start, stop in ranges if start < stop]


class _OfTensor(threading.local):
    """A value that is computed from a tensor and kept until this thread passes another tensor object."""

    def __init__(self, compute: Callable[[Tensor], Any]) -> None:
        self.compute = compute
        self.last: Callable[[], Tensor | None] = lambda: None
        self.value: Any = None

    def __call__(self, tensor: Tensor) -> Any:
        if self.last() is not tensor:
            self.last, self.value = weakref.ref(tensor), self.compute(tensor)
        return self.value


def _heads_first(tensor: Tensor, head_dim: int) -> Tensor:
    """Return (B, S, H * D) as (B, H, S, D). Return other shapes unchanged; `attend` rejects them."""
    if tensor.ndim != 3 or tensor.shape[-1] % head_dim:
        return tensor
    return tensor.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _why_unsupported_shape(call: ModelCall, heads: int) -> str | None:
    """Return why only ComfyUI's own functions can compute these shapes, or None."""
    query, key, mask = call.query, call.key, call.attn_mask
    if query.ndim != 4 or key.ndim != 4:
        return None  # `attend` finds the reason
    if query.shape[1] != heads:
        return "number of heads"
    if mask is None:
        return None
    sizes = (*query.shape[:3], key.shape[2])
    fits = mask.ndim == 4 and all(size in (1, full) for size, full in zip(mask.shape, sizes, strict=True))
    return None if fits else "shape of the mask"


def _block_of(options: dict[str, Any]) -> tuple[str, int | None, int | None]:
    """Return a block's name in `sparge.stats`, its number and the number of blocks; None for unknown numbers."""
    index = options.get("block_index")
    kind, block = options.get("block_type"), options.get("block")
    if kind is None and block is not None:
        return f"{block[0]}_block.{block[1]}.{index or 0}", block[1], None
    if index is None:
        return "", None, None
    return f"{'' if kind is None else f'{kind}_'}block.{index}", index, options.get("total_blocks")


def _is_dense_block(policy: Policy, index: int | None, total: int | None) -> tuple[bool, str | None]:
    """Return whether ``dense_blocks`` contains a block, and if this is unknown, the reason why (else None)."""
    numbers = policy.dense_layers
    if not numbers or index in numbers:
        return bool(numbers), None
    if index is None:
        return False, "dense_blocks, but the model does not number its blocks"
    if total is None:
        is_unknown = min(numbers) < 0
        return False, "negative dense_blocks, but the model does not give its number of blocks" if is_unknown else None
    return policy.is_dense_layer(index, total), None
