"""ComfyUI: the attention of one model, sparse by a policy; the node in ``comfyui/`` is a thin form over `sparsify`.

At every attention call of a diffusion model ComfyUI looks for "optimized_attention_override" among the model's
``transformer_options`` and hands it the function it would have called, with all arguments. `attention_override` makes
such an override. It computes the sparse calls itself and passes all others on, arguments untouched. Nothing of ComfyUI
is imported: what is needed of it comes with the call.

What the options of a call say, and where models differ:

    sigmas                    noise level of the step, on the device. One tensor serves all calls of a step.
    block_type, block_index   transformers: "double" or "single", and the place in that list of blocks.
    total_blocks              length of that list.
    block                     UNets: ("input", 4), and block_index counts the transformer blocks within.
    img_slice                 [start, stop) of the picture among the tokens; the rest is text. Flux has it in its single
                              blocks only, many models never.
    minimax_h3_layout         MiniMax-H3's own: segments (start, stop, kind).
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
"""Relative; sigmas are float32, and a step may lie on the very start or end."""

Override = Callable[..., Tensor]
Ranges = Sequence[tuple[int, int]]

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
    """A clone of a ModelPatcher whose attention is sparse; the model itself stays as it is.

    Args:
        model: what ComfyUI's loaders return as MODEL.
        keep_percent: as in `attention_override`; so are ``dense_blocks``, ``min_tokens`` and ``backend``.
        start_percent: where in the model's noise schedule, from 0 to 1, sparse attention starts; dense before.
        end_percent: where it ends; dense behind.

    Raises:
        TypeError, ValueError: a value is not what was expected.
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
    """What to set as ``transformer_options["optimized_attention_override"]``.

    It is a function and not an object, because ComfyUI copies the options of a model deeply, over and over.

    Args:
        keep_percent: share of the blocks that a call keeps, in percent: (0, 100]. 100 is dense attention: in 8 bits
            where those are faster (GPUs), elsewhere what the model would do without.
        start_sigma: steps with more noise than this run dense.
        end_sigma: steps with less noise than this run dense.
        dense_blocks: blocks that run dense: "0, 1, -1" or "0-3, -1". A number counts within a list of blocks: 0 is the
            first of the double blocks and the first of the single blocks, -1 the last of each. In UNets it is the
            number of the input, middle or output block, and negative numbers have no meaning.
        min_tokens: calls with fewer tokens run dense; 0 leaves it to the measured crossover.
        previous: the override that was set before. It gets the dense calls.
        backend: as in `Policy`.

    Returns:
        A function (func, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False,
        **kwargs) -> output. q, k and v are (B, S, H * D), or (B, H, S, D) with ``skip_reshape``; so is the output,
        heads first with ``skip_output_reshape``.

    Raises:
        TypeError, ValueError: a value is not what was expected.

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
    policy = Policy(
        topk=keep_percent / 100,
        min_tokens=min_tokens,
        dense_layers=parse_blocks(dense_blocks),
        backend=backend,
    )
    sparse = _Sparse(policy, start_sigma, end_sigma)

    def override(func: Override, *args: Any, **kwargs: Any) -> Tensor:
        output = sparse(*args, **kwargs)
        if output is not None:
            return output
        return func(*args, **kwargs) if previous is None else previous(func, *args, **kwargs)

    return override


def parse_blocks(text: str) -> tuple[int, ...]:
    """Numbers of blocks from what a user wrote.

    Raises:
        ValueError: it is not a list of numbers and ranges.

    Example:
        >>> parse_blocks("0-3, -1"), parse_blocks("")
        ((0, 1, 2, 3, -1), ())
        >>> parse_blocks("first")
        Traceback (most recent call last):
        ...
        ValueError: dense_blocks: expected numbers and ranges such as '0, 1, -1' or '0-3, -1', got 'first'
    """
    found: list[int] = []
    for part in text.split(",") if text.strip() else ():
        match = _PART.fullmatch(part.strip())
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if last < first or (first < 0) != (last < 0):
            raise ValueError(f"dense_blocks: expected numbers and ranges such as '0, 1, -1' or '0-3, -1', got {text!r}")
        found += range(first, last + 1)
    return tuple(dict.fromkeys(found))


class _Sparse:
    """The sparse output of a call, or None: run it dense."""

    def __init__(self, policy: Policy, start_sigma: float, end_sigma: float) -> None:
        self.policy = policy
        self.unquantized = replace(policy, quantization="none")
        self.over_all = replace(policy, dense="8bit") if policy.topk == 1 else None
        self.sigmas = None if start_sigma == math.inf and end_sigma <= 0 else _SigmaRange(start_sigma, end_sigma)
        self.text = _TextTokens()
        self.told = False

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
        _inside_attn_wrapper: bool = True,  # for the functions that are wrapped
        **unknown: Any,
    ) -> Tensor | None:
        options = transformer_options or {}
        if not skip_reshape and q.shape[-1] % heads == 0:
            head_dim = q.shape[-1] // heads
            q, k, v = (_heads_first(tensor, head_dim) for tensor in (q, k, v))
        mask = _with_heads(mask)
        unsupported = next((f"argument {name}" for name, value in unknown.items() if value is not None), None)
        unsupported = unsupported or _why_misshapen(q, k, mask, heads)
        name, index, total = _block_of(options)
        is_dense_block, unknown_block = _is_dense_block(self.policy, index, total)
        is_inside = True if self.sigmas is None else self.sigmas.contain(options.get("sigmas"))
        unknown_step = "start_percent or end_percent, but the call has no sigmas" if is_inside is None else None
        exact = attn_precision == torch.float32 or not low_precision_attention
        layer = Layer(
            name,
            self.unquantized if exact else self.policy,
            is_dense_block,
            _DENSE_STEP if is_inside is False else None,
        )
        if self.over_all is not None and layer.steps is None and not is_dense_block:
            layer = Layer(name, self.unquantized if exact else self.over_all, dense=True)
        output = attend(
            layer,
            ModelCall(
                q,
                k,
                v,
                mask,
                scale=scale,
                enable_gqa=enable_gqa,
                text=self.text.among(options, k.shape[2]) if k.ndim == 4 else (),
                unsupported=unsupported or unknown_block or unknown_step,
            ),
        )
        if output is None:
            return None
        if not self.told and not torch.compiler.is_compiling():
            self.told = True
            kind = "sparse attention" if self.over_all is None else "attention in 8 bits"
            _log.info("sparge: %s is on, %d tokens, %s", kind, k.shape[2], name or "no name for the block")
        return output if skip_output_reshape else output.transpose(1, 2).flatten(2)


def _heads_first(tensor: Tensor, head_dim: int) -> Tensor:
    """(B, S, H * D) as (B, H, S, D); anything else as it is, for `attend` to refuse."""
    if tensor.ndim != 3 or tensor.shape[-1] % head_dim:
        return tensor
    return tensor.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _with_heads(mask: Tensor | None) -> Tensor | None:
    """Masks may come as (S_q, S_k) and (B, S_q, S_k), too."""
    if mask is not None and mask.ndim == 2:
        return mask[None, None]
    return mask[:, None] if mask is not None and mask.ndim == 3 else mask


def _why_misshapen(q: Tensor, k: Tensor, mask: Tensor | None, heads: int) -> str | None:
    """What ComfyUI's functions take in ways of their own, or raise their own errors about."""
    if q.ndim != 4 or k.ndim != 4:
        return None  # `attend` says so
    if q.shape[1] != heads:
        return "number of heads"
    if mask is None:
        return None
    sizes = (*q.shape[:3], k.shape[2])
    fits = mask.ndim == 4 and all(size in (1, full) for size, full in zip(mask.shape, sizes, strict=True))
    return None if fits else "shape of the mask"


def _block_of(options: dict[str, Any]) -> tuple[str, int | None, int | None]:
    """A block's name for statistics, its number, and how many there are; None: the model does not say."""
    index = options.get("block_index")
    kind, block = options.get("block_type"), options.get("block")
    if kind is None and block is not None:
        return f"{block[0]}_block.{block[1]}.{index or 0}", block[1], None
    if index is None:
        return "", None, None
    return f"{'' if kind is None else f'{kind}_'}block.{index}", index, options.get("total_blocks")


def _is_dense_block(policy: Policy, index: int | None, total: int | None) -> tuple[bool, str | None]:
    """Whether ``dense_blocks`` names a block, or why that cannot be told."""
    numbers = policy.dense_layers
    if not numbers or index in numbers:
        return bool(numbers), None
    if index is None:
        return False, "dense_blocks, but the model does not number its blocks"
    if total is None:
        return False, "negative dense_blocks, but the model does not say how many it has" if min(numbers) < 0 else None
    return policy.is_dense_layer(index, total), None


class _SigmaRange(threading.local):
    """Noise levels at which attention is sparse.

    Reading a sigma waits for the device. It is done once for each step: the tensor is known again by its identity.
    """

    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start * (1 + ROUNDING), end * (1 - ROUNDING)
        self.last: Callable[[], Tensor | None] = _nothing
        self.contains_last = False

    def contain(self, sigmas: Tensor | None) -> bool | None:
        """Whether a step is in the range; None: there is nothing to tell it by."""
        if sigmas is None:
            return None
        if self.last() is not sigmas:
            self.contains_last = self.end <= float(sigmas.flatten()[0]) <= self.start
            self.last = weakref.ref(sigmas)
        return self.contains_last


class _TextTokens(threading.local):
    """Where text lies among the tokens of joint attention.

    Flux says so in its single blocks, which come last. What they said holds for the double blocks of the passes that
    follow, in the same run of the sampler: a second run must not know more than the first, or one seed would give two
    pictures.
    """

    def __init__(self) -> None:
        self.run: Callable[[], Tensor | None] = _nothing
        self.pictures: dict[int, tuple[int, int]] = {}

    def among(self, options: dict[str, Any], kv_len: int) -> Ranges:
        """Key ranges that are not picture; empty where the model does not say."""
        layout = options.get("minimax_h3_layout")
        if layout is not None and layout.seq_len == kv_len:
            return [(start, stop) for start, stop, kind in layout.segments if kind != "video" and start < stop]
        picture = options.get("img_slice")
        if picture is not None and not 0 <= picture[0] < picture[1] <= kv_len:
            picture = None  # of other tokens than these
        run = options.get("sample_sigmas")
        if run is not None and not torch.compiler.is_compiling():
            if self.run() is not run:
                self.run, self.pictures = weakref.ref(run), {}
            if picture is not None:
                self.pictures[kv_len] = (picture[0], picture[1])
            picture = self.pictures.get(kv_len)
        if picture is None:
            return ()
        return [(start, stop) for start, stop in ((0, picture[0]), (picture[1], kv_len)) if start < stop]


def _nothing() -> None:
    """A reference to nothing, as `weakref.ref` gives it when its object is gone."""
