"""Remove padding instead of masking it: kernels are fastest without a mask.

Models pad at one end of a sequence. If a mask hides keys at the start, at the end or at both, attention over the keys
between them is equal to masked attention. In causal calls, padded queries are removed too, so blocks start at the first
token of a left-padded prompt, and the result equals the result of the prompt without padding. The mask is read once to
find the padding; models pass the same mask to all their layers. A compiled program cannot read the mask. It masks the
padding instead, and blocks start at the first padded token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.dispatch.reasons import Reason, count
from sparge.stats import counters

Span = tuple[int, int]
"""Visible keys [start, stop) of a sequence."""

_SPANS = "_sparge_spans"


def spans_of(mask: Tensor, layer: str = "") -> tuple[Span, ...] | None:
    """Return the visible keys of each sequence of a mask (B | 1, 1, 1, S_k), or None if they are not contiguous.

    Also return None if the mask must not be read: in a compiled program, or while a CUDA graph is captured.

    The result is cached until the mask is modified. Inference tensors have no version counter: on a CPU they are read
    each time; on a GPU, where reading synchronizes, each layer uses the result once, so it is valid for one forward
    pass.

    Args:
        layer: the name of the layer that makes the call.
    """
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, 1) or torch.compiler.is_compiling():
        return None
    version = None if mask.is_inference() else mask._version
    view = (mask.shape, mask.stride(), mask.storage_offset())
    holder = mask if mask._base is None else mask._base  # each layer may make a new view
    known: _Known | None = getattr(holder, _SPANS, None)
    if known is not None and known.view == view and known.is_valid(version, layer, mask):
        return known.spans
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    found = _read(mask[:, 0, 0])
    setattr(holder, _SPANS, _Known(found, view, version, {layer}))
    return found


@dataclass
class _Known:
    """The result of reading a mask.

    Attributes:
        spans: the result of `spans_of`.
        view: sizes, strides and offset of the mask that was read.
        version: version counter of the mask; None for inference tensors.
        layers: names of the layers that have used the result; only updated if there is no version.
    """

    spans: tuple[Span, ...] | None
    view: tuple[Any, ...]
    version: int | None
    layers: set[str]

    def is_valid(self, version: int | None, layer: str, mask: Tensor) -> bool:
        if version is not None:
            return version == self.version
        if not layer or layer in self.layers or not _reading_waits(mask):
            return False
        self.layers.add(layer)
        return True


def _reading_waits(mask: Tensor) -> bool:
    return mask.is_cuda


def _read(visible: Tensor) -> tuple[Span, ...] | None:
    """Return the spans of a bool mask (B, S_k), or None if the visible keys of a sequence are not contiguous."""
    count = visible.sum(1)
    first = visible.int().argmax(1)
    last = visible.shape[1] - visible.flip(1).int().argmax(1)
    spans = [
        (start, stop) if kept else (0, 0)
        for start, stop, kept in torch.stack([first, last, count], 1).tolist()
        if not kept or stop - start == kept
    ]
    return tuple(spans) if len(spans) == len(visible) else None


def attend_within(
    spans: tuple[Span, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    attention: Callable[..., Tensor],
    **call: Any,
) -> Tensor:
    """Return attention over the visible keys of each sequence, (B, H, S_q, D_v).

    If all spans are equal, all sequences are one call. Otherwise each sequence is a call, and the statistics count them
    as one, which is sparse if any of them is. Causality is aligned bottom-right. In causal calls, queries outside the
    span are padding, and their output is 0.

    Args:
        attention: `sparge.attention`, called without a mask.
        call: other keywords of ``attention``. Ranges of tokens include the padding.
    """
    if len(set(spans)) == 1:
        return _within(spans[0], query, key, value, is_causal, attention, call)
    parts = zip(spans, query.split(1), key.split(1), value.split(1), strict=True)
    with counters.as_one_call():
        return torch.cat([_within(span, q, k, v, is_causal, attention, call) for span, q, k, v in parts])


def _within(
    span: Span,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    attention: Callable[..., Tensor],
    call: dict[str, Any],
) -> Tensor:
    start, stop = span
    q_len, prefix = query.shape[2], key.shape[2] - query.shape[2]
    first, last = (max(start - prefix, 0), stop - prefix) if is_causal else (0, q_len)  # queries [first, last)
    if stop == start or last <= 0:
        count(Reason.NOTHING_VISIBLE)
        return query.new_zeros(*query.shape[:3], value.shape[3])
    for name, bounds in (("exact_queries", (first, last)), ("always_keep", (start, stop))):
        if call.get(name):
            call = {**call, name: ranges_within(call[name], *bounds) or None}
    output = attention(
        query[:, :, first:last],
        key[:, :, start:stop],
        value[:, :, start:stop],
        is_causal=is_causal,
        **call,
    )
    return output if (first, last) == (0, q_len) else F.pad(output, (0, 0, first, q_len - last))


def ranges_within(ranges: Sequence[Span], start: int, stop: int) -> list[Span]:
    """Clip ranges to [start, stop), make them relative to ``start``, and drop empty ranges."""
    inside = ((max(a, start) - start, min(b, stop) - start) for a, b in ranges)
    return [(a, b) for a, b in inside if a < b]
