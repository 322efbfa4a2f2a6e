"""Padding cut off instead of masked: kernels are fastest without a mask, and models pad at an end.

Where a mask hides a stretch of keys at the start, at the end or at both, attention over the keys between them is the
same thing. To know where they lie the mask is read once; models hand the same mask to all their layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparge.dispatch.reasons import Reason, count
from sparge.stats import counters

Span = tuple[int, int]
"""Visible keys [start, stop) of a sequence."""

_SPANS = "_sparge_spans"


def spans_of(mask: Tensor, layer: str = "") -> tuple[Span, ...] | None:
    """The visible keys of each sequence of a mask (B | 1, 1, 1, S_k), or None where they are not one stretch.

    None, too, where the mask must not be read: in a compiled program or a CUDA graph that is being captured.

    What was read holds as long as nobody has written to the mask. Tensors of inference mode do not say whether anybody
    has: theirs holds for one pass through the layers, until a layer asks again, where reading waits for a device.

    Args:
        layer: the name of who asks.
    """
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, 1) or torch.compiler.is_compiling():
        return None
    version = None if mask.is_inference() else mask._version
    view = (mask.shape, mask.stride(), mask.storage_offset())
    holder = mask if mask._base is None else mask._base  # each layer may make a view of its own
    known: _Known | None = getattr(holder, _SPANS, None)
    if known is not None and known.view == view and known.holds(version, layer, mask):
        return known.spans
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    found = _read(mask[:, 0, 0])
    setattr(holder, _SPANS, _Known(found, view, version, {layer}))
    return found


@dataclass
class _Known:
    """What was read of a mask.

    Attributes:
        view: sizes, strides and offset of what was read.
        version: of the mask, then; None: it has none.
        layers: names of those who have asked since, where it has none.
    """

    spans: tuple[Span, ...] | None
    view: tuple[Any, ...]
    version: int | None
    layers: set[str]

    def holds(self, version: int | None, layer: str, mask: Tensor) -> bool:
        if version is not None:
            return version == self.version
        if not layer or layer in self.layers or not _reading_waits(mask):
            return False
        self.layers.add(layer)
        return True


def _reading_waits(mask: Tensor) -> bool:
    return mask.is_cuda


def _read(visible: Tensor) -> tuple[Span, ...] | None:
    """The spans of a bool mask (B, S_k), or None where what a sequence sees is not contiguous."""
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
    keep: Sequence[Span],
    attention: Callable[..., Tensor],
    **call: Any,
) -> Tensor:
    """Attention over the visible keys of each sequence: one call, or one for each sequence where they differ.

    The latter are counted as one, which is sparse if any of them is.
    Causality is aligned bottom-right. Queries behind the last visible key, which are padding themselves, give 0.

    Args:
        keep: key ranges to keep, counted on all keys.
        attention: `sparge.attention`, called without a mask.
    """
    if len(set(spans)) == 1:
        return _within(spans[0], query, key, value, is_causal, keep, attention, call)
    parts = zip(spans, query.split(1), key.split(1), value.split(1), strict=True)
    with counters.as_one():
        return torch.cat([_within(span, q, k, v, is_causal, keep, attention, call) for span, q, k, v in parts])


def _within(
    span: Span,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    keep: Sequence[Span],
    attention: Callable[..., Tensor],
    call: dict[str, Any],
) -> Tensor:
    start, stop = span
    q_len, kv_len = query.shape[2], key.shape[2]
    rows = q_len - (kv_len - stop) if is_causal else q_len  # the queries up to the last visible key
    if stop == start or rows <= 0:
        count(Reason.NOTHING_VISIBLE)
        return query.new_zeros(*query.shape[:3], value.shape[3])
    kept = [(max(a, start) - start, min(b, stop) - start) for a, b in keep]
    if "exact_queries" in call:
        exact = [(a, min(b, rows)) for a, b in call["exact_queries"] if a < rows]
        call = {**call, "exact_queries": exact or None}
    output = attention(
        query[:, :, :rows],
        key[:, :, start:stop],
        value[:, :, start:stop],
        is_causal=is_causal,
        always_keep=[(a, b) for a, b in kept if a < b] or None,
        **call,
    )
    if rows == q_len:
        return output
    return torch.cat([output, output.new_zeros(*output.shape[:2], q_len - rows, output.shape[3])], 2)
