"""Remove padding instead of masking it: kernels are fastest without a mask.

Models pad at one end of a sequence. If a mask hides keys only at the start and at the end, masked attention equals
attention over the keys in between. In causal calls, padded queries are removed too. Blocks then start at the first
token of a left-padded prompt, and the result equals the result of the prompt without padding. The mask is read once,
because models pass the same mask to all their layers. A compiled program cannot read the mask, so it masks the padding.
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
"""Attribute of a mask, or of the tensor that the mask is a view of: its `_Spans`."""


@dataclass
class _Spans:
    """The visible keys that were read from a mask.

    Attributes:
        spans: the result of `spans_of`.
        mask: sizes, strides, offset and version of the mask that was read; the version of inference tensors is None.
        layers: names of the layers that have used the result.
    """

    spans: tuple[Span, ...] | None
    mask: tuple[Any, ...]
    layers: set[str]


def spans_of(mask: Tensor, layer: str = "") -> tuple[Span, ...] | None:
    """Return the visible keys of each sequence of a mask (B | 1, 1, 1, S_k), or None if they are not contiguous.

    Also return None if the mask must not be read: in a compiled program, or while a CUDA graph is captured.

    The result is cached until the mask is modified. Inference tensors have no version counter: on a CPU they are read
    each time. On a GPU, where reading synchronizes, each layer uses the result once, so it is valid for one forward
    pass.

    Args:
        layer: the name of the layer that makes the call.
    """
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, 1) or torch.compiler.is_compiling():
        return None
    version = None if mask.is_inference() else mask._version
    description = (mask.shape, mask.stride(), mask.storage_offset(), version)
    holder = mask if mask._base is None else mask._base  # each layer may make a new view
    cached: _Spans | None = getattr(holder, _SPANS, None)
    if cached is not None and cached.mask == description:
        if version is not None:
            return cached.spans
        if layer and layer not in cached.layers and _reading_waits(mask):
            cached.layers.add(layer)
            return cached.spans
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    spans = _read(mask[:, 0, 0])
    setattr(holder, _SPANS, _Spans(spans, description, {layer}))
    return spans


def _reading_waits(mask: Tensor) -> bool:
    return mask.is_cuda


def _read(visible: Tensor) -> tuple[Span, ...] | None:
    """Return the spans of a bool mask (B, S_k), or None if the visible keys of a sequence are not contiguous."""
    kept = visible.sum(1)
    first = visible.int().argmax(1)
    stop = visible.shape[1] - visible.flip(1).int().argmax(1)
    bounds = torch.stack([first, stop, kept], 1).tolist()
    if any(kept and stop - first != kept for first, stop, kept in bounds):
        return None
    return tuple((first, stop) if kept else (0, 0) for first, stop, kept in bounds)


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
        call: other keywords of ``attention``. Token ranges are positions in the padded sequence.
    """

    def attend_to(span: Span, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        start, stop = span
        q_len, prefix = query.shape[2], key.shape[2] - query.shape[2]
        first, last = (max(start - prefix, 0), stop - prefix) if is_causal else (0, q_len)  # queries [first, last)
        if stop == start or last <= 0:
            count(Reason.NOTHING_VISIBLE)
            return query.new_zeros(*query.shape[:3], value.shape[3])
        ranges = {
            name: ranges_within(call[name], *bounds) or None
            for name, bounds in (("exact_queries", (first, last)), ("always_keep", span))
            if call.get(name)
        }
        visible = query[:, :, first:last], key[:, :, start:stop], value[:, :, start:stop]
        output = attention(*visible, is_causal=is_causal, **{**call, **ranges})
        return output if (first, last) == (0, q_len) else F.pad(output, (0, 0, first, q_len - last))

    if len(set(spans)) == 1:
        return attend_to(spans[0], query, key, value)
    with counters.as_one_call():
        parts = zip(spans, query.split(1), key.split(1), value.split(1), strict=True)
        return torch.cat([attend_to(*part) for part in parts])


def ranges_within(ranges: Sequence[Span], start: int, stop: int) -> list[Span]:
    """Clip ranges to [start, stop), make them relative to ``start``, and drop empty ranges."""
    inside = ((max(a, start) - start, min(b, stop) - start) for a, b in ranges)
    return [(a, b) for a, b in inside if a < b]
