"""transformers' packed sequences: compute attention within each segment instead of masking the whole sequence.

The segment bounds come from the keywords of FlashAttention's packed path, or from the mask function (`masks`):
documents found in ``position_ids``, chunks of Llama 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparge.dispatch import validation
from sparge.dispatch.reasons import Reason, count
from sparge.integrations.transformers.masks import bottom_right, parts_of
from sparge.masks.segments import Run, runs_of
from sparge.varlen import read_bounds

KEYWORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Keywords of FlashAttention's packed path; transformers passes all of them or none."""


@dataclass(frozen=True)
class Pack:
    """The segments of a call.

    Attributes:
        runs: the segments; neighbors of equal length form one run.
        is_masked: whether the call's mask is exactly causality within the segments; otherwise each segment also needs
            its part of the mask.
    """

    runs: list[Run]
    is_masked: bool


def pack_of(
    query: Tensor, key: Tensor, attention_mask: Tensor | None, causal: bool, keywords: Mapping[str, Any]
) -> Pack | None:
    """Return the segments of a call; None if its sequences are not packed.

    Args:
        keywords: keyword arguments of the attention function; `KEYWORDS` are those that describe the segments.

    Raises:
        ValueError: the segment bounds do not match the lengths of Q and K.
    """
    parts = parts_of(attention_mask) if causal else None
    if parts is not None and parts.segments is not None:
        return Pack(runs_of(*parts.segments), is_masked=True)
    if query.shape[0] != 1 or any(keywords.get(name) is None for name in KEYWORDS):
        return None
    if attention_mask is not None and torch.compiler.is_compiling():
        return None  # reading causes a graph break, and a mask that is made in the program contains the segments
    bounds_q, bounds_k = (read_bounds(name, keywords[name]) for name in KEYWORDS[:2])
    validation.check_segments(bounds_q, bounds_k, (query.shape[2], key.shape[2]), (None, None))
    return Pack(runs_of(bounds_q, bounds_k), is_masked=False) if len(bounds_q) > 2 else None


def attend_packed(
    pack: Pack,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    causal: bool,
    sparse: Callable[..., Tensor | None],
    dense: Callable[..., Tensor],
    layer: str,
) -> Tensor:
    """Return the output (B, S_q, H, D_v) of a call. Each run of segments is sparse or dense.

    If no run is sparse and the mask contains the segments, the whole call runs dense in one piece.

    Args:
        sparse: computes (B, H, S_q, D_v) from query, key, value (B, H, S, D) and a mask, or returns None.
        dense: computes (B, S_q, H, D_v) from the same arguments.
        layer: name of the layer, for counting segments without keys.
    """
    runs, window = pack.runs, None if pack.is_masked else _window_of(attention_mask, pack)
    masks: list[Tensor | None] = [None] * len(runs)
    if attention_mask is not None and not pack.is_masked and window is None:
        runs = [segment for run in runs for segment in run.batches(1)]
        masks = [_cut(attention_mask, run) for run in runs]
    elif causal:
        masks = [bottom_right(run.q_len, run.kv_len, query.device, window) for run in runs]
    parts = [(*_segments(run, query, key, value), mask) for run, mask in zip(runs, masks, strict=True)]
    outputs = [sparse(*part) if part[1].shape[2] else _without_keys(layer, part[0], part[2]) for part in parts]
    if pack.is_masked and all(output is None for output in outputs):
        return dense(query, key, value, attention_mask)
    tokens_first = [
        dense(*part) if output is None else output.transpose(1, 2) for part, output in zip(parts, outputs, strict=True)
    ]
    batch = query.shape[0]
    return torch.cat([output.unflatten(0, (batch, -1)).flatten(1, 2) for output in tokens_first], 1)


def _window_of(attention_mask: Tensor | None, pack: Pack) -> int | None:
    """Return the width of a sliding-window mask; None for other masks, or if query and key segments differ."""
    parts = parts_of(attention_mask)
    if parts is None or parts.padding is not None:
        return None
    same = all((run.q_start, run.q_len) == (run.kv_start, run.kv_len) for run in pack.runs)
    return parts.window if same else None


def _segments(run: Run, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the query, key and value of a run, whose segments form the batch."""
    q_tokens, kv_tokens = _slices(run)
    queries, keys, values = (
        tokens[:, :, part].unflatten(2, (run.count, -1)).transpose(1, 2).flatten(0, 1)
        for tokens, part in ((query, q_tokens), (key, kv_tokens), (value, kv_tokens))
    )
    return queries, keys, values


def _cut(attention_mask: Tensor, run: Run) -> Tensor:
    """Return the part of a mask that belongs to a run."""
    q_tokens, kv_tokens = _slices(run)
    return attention_mask[..., q_tokens if attention_mask.shape[-2] > 1 else slice(None), kv_tokens]


def _slices(run: Run) -> tuple[slice, slice]:
    q_stop, kv_stop = run.q_start + run.count * run.q_len, run.kv_start + run.count * run.kv_len
    return slice(run.q_start, q_stop), slice(run.kv_start, kv_stop)


def _without_keys(layer: str, query: Tensor, value: Tensor) -> Tensor:
    """Return the output of queries without visible keys, and count the call."""
    count(Reason.NOTHING_VISIBLE, layer)
    return query.new_zeros(*query.shape[:3], value.shape[3])
