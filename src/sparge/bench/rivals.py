"""Dense 16-bit attention kernels that ``sparge bench`` compares with: FlashAttention-4, cuDNN and FlashAttention-2.

Every speed-up is relative to the fastest of these kernels in the same run (`fastest`). cuDNN and FlashAttention-2 are
part of torch. FlashAttention-4 is the package ``flash-attn-4``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparge.bench.timing import Variant
from sparge.evaluate.inputs import Inputs

FA4_PACKAGE = "flash-attn-4"


@dataclass(frozen=True)
class Rival:
    """A dense kernel. ``call`` and ``packed`` take the inputs and ``is_causal``, which is aligned bottom-right."""

    title: str
    """Name in text."""
    column: str
    """Name in tables."""
    call: Callable[[Inputs, bool], Variant]
    """Return a call on query, key and value (B, H, S, D)."""
    packed: Callable[[list[Inputs], bool], Variant]
    """Return a call on the inputs (1, H, S, D) of several segments."""


def fastest(times: Mapping[str, Any], suffix: str = "_ms", names: Iterable[str] | None = None) -> str | None:
    """Return the kernel (of ``names``, all rivals by default) with the smallest time ``{name}{suffix}`` in a row.

    Kernels without a time are ignored. Return None if no kernel has a time.
    """
    measured = {name: times[name + suffix] for name in names or RIVALS if times.get(name + suffix) is not None}
    return min(measured, key=measured.__getitem__, default=None)


def _sdpa(kernel: SDPBackend, inputs: Inputs, is_causal: bool) -> Variant:
    """Return SDPA on a kernel as a variant. With fewer queries than keys it is not causal.

    SDPA aligns causality top-left. The last few queries of a sequence see nearly all keys, so the times are comparable.
    """
    square = inputs[0].shape[2] == inputs[1].shape[2]
    call = partial(F.scaled_dot_product_attention, *inputs, is_causal=is_causal and square)
    return Variant(call, partial(sdpa_kernel, kernel))


def _sdpa_rival(title: str, column: str, kernel: SDPBackend) -> Rival:
    """Return a kernel of SDPA as a rival. SDPA does not support packed segments, so it loops over them."""
    call = partial(_sdpa, kernel)

    def packed(segments: list[Inputs], is_causal: bool) -> Variant:
        return run_in_turn([call(segment, is_causal) for segment in segments])

    return Rival(title, column, call, packed)


def run_in_turn(variants: list[Variant]) -> Variant:
    """Return a variant that runs several calls of the same kernel one after another."""
    return Variant(lambda: [variant.run() for variant in variants], variants[0].context)


def _fa4(inputs: Inputs, is_causal: bool) -> Variant:
    @cache
    def tokens_first() -> list[Tensor]:
        return [tensor.transpose(1, 2).contiguous() for tensor in inputs]  # (B, S, H, D), outside the timed calls

    def run() -> Tensor:
        return output_of(import_fa4().flash_attn_func(*tokens_first(), causal=is_causal)).transpose(1, 2)

    return Variant(run)


def _fa4_packed(segments: list[Inputs], is_causal: bool) -> Variant:
    @cache
    def packed() -> tuple[list[Tensor], dict[str, Any]]:
        tokens = [torch.cat([part[0].transpose(0, 1) for part in side]) for side in zip(*segments, strict=True)]
        lengths = [segment[0].shape[2] for segment in segments]
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=tokens[0].device)
        longest = max(lengths)
        options = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return tokens, options

    def run() -> Tensor:
        tokens, options = packed()
        return output_of(import_fa4().flash_attn_varlen_func(*tokens, causal=is_causal, **options))

    return Variant(run)


RIVALS = {
    "fa4": Rival("FlashAttention-4", "FA4", _fa4, _fa4_packed),
    "cudnn": _sdpa_rival("cuDNN", "cuDNN", SDPBackend.CUDNN_ATTENTION),
    "flash": _sdpa_rival("FlashAttention-2", "FA2", SDPBackend.FLASH_ATTENTION),
}
"""Rivals, keyed by the prefix of their columns in rows."""


def output_of(result: Any) -> Tensor:
    """Return the output from a result, which is (output, LSE) in some releases."""
    return result[0] if isinstance(result, tuple) else result


def fa4_version() -> str | None:
    """Return the installed version of FlashAttention-4, or None if it is not installed."""
    try:
        return metadata.version(FA4_PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def describe_fa4() -> str:
    """Return the version of FlashAttention-4, or how to install it."""
    advice = f"missing (sparge bench compares only with cuDNN and FlashAttention-2): pip install {FA4_PACKAGE}"
    return fa4_version() or advice


def import_fa4() -> Any:
    """Import ``flash_attn.cute``, which takes seconds."""
    return importlib.import_module("flash_attn.cute")
