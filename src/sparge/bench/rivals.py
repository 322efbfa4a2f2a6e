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
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparge.bench.timing import TimedCall
from sparge.evaluate.inputs import Inputs

FA4_PACKAGE = "flash-attn-4"


@dataclass(frozen=True)
class Rival:
    """A dense kernel."""

    title: str
    """Name in text."""
    column: str
    """Name in tables."""
    call: Callable[[Inputs, bool], TimedCall]
    """Function that returns a call, given (query, key, value), each (B, H, S, D), and whether it is causal
    (aligned bottom-right)."""


def fastest(times: Mapping[str, Any], suffix: str = "_ms", names: Iterable[str] | None = None) -> str | None:
    """Return the kernel (of ``names``, all rivals by default) with the smallest time ``{name}{suffix}`` in a row.

    Kernels without a time are ignored. Return None if no kernel has a time.
    """
    measured = {name: times[name + suffix] for name in names or RIVALS if times.get(name + suffix) is not None}
    return min(measured, key=measured.__getitem__, default=None)


def _sdpa(kernel: SDPBackend, inputs: Inputs, is_causal: bool) -> TimedCall:
    """Return a call of SDPA with a kernel. It is not causal if there are fewer queries than keys.

    SDPA would align causality top-left. The queries are the last few of a sequence and see nearly all keys, so the
    times are comparable without causality.
    """
    square = inputs[0].shape[2] == inputs[1].shape[2]
    call = partial(F.scaled_dot_product_attention, *inputs, is_causal=is_causal and square)
    return TimedCall(call, partial(sdpa_kernel, kernel))


def _fa4(inputs: Inputs, is_causal: bool) -> TimedCall:
    @cache
    def tokens_first() -> list[Tensor]:
        return [tensor.transpose(1, 2).contiguous() for tensor in inputs]  # (B, S, H, D), outside the timed calls

    def run() -> Tensor:
        return output_of(import_fa4().flash_attn_func(*tokens_first(), causal=is_causal)).transpose(1, 2)

    return TimedCall(run)


RIVALS = {
    "fa4": Rival("FlashAttention-4", "FA4", _fa4),
    "cudnn": Rival("cuDNN", "cuDNN", partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
    "flash": Rival("FlashAttention-2", "FA2", partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
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
