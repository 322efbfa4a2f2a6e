"""Calls of transformers over packed sequences: attention within segments instead of a mask over all of them.

Where segments begin is told by the keywords of FlashAttention's packed path, or by the function that a mask is made
with: documents found in ``position_ids``, chunks of Llama 4. A mask carries what was found of it along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparge.dispatch import validation
from sparge.dispatch.reasons import Reason, count
from sparge.integrations.transformers.mask_functions import captured
from sparge.masks.segments import Run, runs_of
from sparge.varlen import read

KEYWORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What transformers hands to FlashAttention's packed path, if all of them are there."""
BOUNDS = "_sparge_segments"
"""Attribute of a mask that is causality (aligned bottom-right) within segments: its version when that was so, and the
bounds of queries and of keys."""

Bounds = tuple[Sequence[int], Sequence[int]]
Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Any]
"""Of query, key, value (heads first) and a mask."""


def bounds_of_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
) -> Bounds | None:
    """The segments of a mask of transformers that is causality within them and nothing else, None for other masks.

    Reads what the mask is made from: the documents of a sequence, the left padding of chunks.
    """
    from transformers.masking_utils import causal_mask_function

    parts = captured(mask_function, "and_masks", causal_mask_function).get("mask_functions", ())
    if len(parts) != 2 or causal_mask_function not in parts:
        return None
    stop = kv_offset + kv_length
    if not isinstance(q_offset, int) or q_offset + q_length != stop:
        return None
    within = parts[0] if parts[1] is causal_mask_function else parts[1]
    packed = captured(within, "packed_sequence_mask_function", torch.empty(0))
    chunked = captured(within, "chunked_overlay", 1, torch.empty(0))
    if packed and batch_size == 1 and q_length == kv_length:
        counts = packed["packed_sequence_mask"][0].unique_consecutive(return_counts=True)[1]
        edges = [0, *counts.cumsum(0).tolist()]
    elif chunked and not bool(chunked["left_padding"].any()):
        edges = [*range(0, stop, chunked["chunk_size"]), stop]
    else:
        return None
    if attention_mask is not None and not bool(attention_mask.all()):
        return None
    bounds_q, bounds_k = ([max(edge - offset, 0) for edge in edges] for offset in (q_offset, kv_offset))
    return bounds_q, bounds_k


@dataclass(frozen=True)
class Pack:
    """How the segments of a call lie.

    Attributes:
        runs: the segments.
        is_masked: the mask of the call says all that there is to say; else the mask, if any, comes on top.
    """

    runs: list[Run]
    is_masked: bool


def pack_of(
    query: Tensor, key: Tensor, attention_mask: Tensor | None, causal: bool, keywords: Mapping[str, Any]
) -> Pack | None:
    """The segments that a call of transformers is about, None where it is about whole sequences.

    Raises:
        ValueError: bounds in the keywords that do not fit the call.
    """
    version, bounds = getattr(attention_mask, BOUNDS, (None, ([], [])))
    is_known = not torch.compiler.is_compiling() and version is not None  # a compiled program cannot ask for versions
    if is_known and causal and attention_mask is not None and version == attention_mask._version:
        return Pack(runs_of(*bounds), is_masked=True)
    if query.shape[0] != 1 or any(keywords.get(name) is None for name in KEYWORDS):
        return None
    if attention_mask is not None and torch.compiler.is_compiling():
        return None  # reading would break the graph, and a mask that was made with it has the segments in it
    bounds_q, bounds_k = (read(name, keywords[name]) for name in KEYWORDS[:2])
    validation.check_segments(bounds_q, bounds_k, (query.shape[2], key.shape[2]), (None, None))
    return Pack(runs_of(bounds_q, bounds_k), is_masked=False) if len(bounds_q) > 2 else None


def attend_within(
    pack: Pack,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sparse: Attention,
    dense: Attention,
    mask_of: Callable[[int, int], Tensor | None] | None,
    layer: str,
) -> Tensor:
    """The output (B, S_q, H, D_v) of a call, each run sparse where that gives something, else dense.

    Where no run is sparse and the mask says everything, the call is made as it came.

    Args:
        sparse: gives (B, H, S_q, D_v) or None.
        dense: gives (B, S_q, H, D_v).
        mask_of: the mask of a segment of so many queries and keys, where it needs one; None where none does.
        layer: where calls without keys are counted.
    """
    if pack.is_masked or attention_mask is None:
        parts = [_part(run, query, key, value, None, mask_of) for run in pack.runs]
    else:
        singles = [one for run in pack.runs for one in run.batches(1)]
        parts = [_part(one, query, key, value, attention_mask, None) for one in singles]
    outputs = [sparse(*part) if part[1].shape[2] else _nothing(layer, *part) for part in parts]
    if pack.is_masked and all(output is None for output in outputs):
        as_it_came: Tensor = dense(query, key, value, attention_mask)
        return as_it_came
    rows = [
        dense(*part) if output is None else output.transpose(1, 2) for part, output in zip(parts, outputs, strict=True)
    ]
    batch = query.shape[0]
    return torch.cat([row.unflatten(0, (batch, -1)).flatten(1, 2) for row in rows], 1)


def _part(
    run: Run,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    mask_of: Callable[[int, int], Tensor | None] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The arguments of a run's own call, its segments as a batch."""
    q_tokens = slice(run.q_start, run.q_start + run.count * run.q_len)
    kv_tokens = slice(run.kv_start, run.kv_start + run.count * run.kv_len)
    if attention_mask is not None:
        rows = q_tokens if attention_mask.shape[-2] > 1 else slice(None)
        attention_mask = attention_mask[..., rows, kv_tokens]
    elif mask_of is not None:
        attention_mask = mask_of(run.q_len, run.kv_len)
    queries, keys, values = (
        tokens[:, :, part].unflatten(2, (run.count, -1)).transpose(1, 2).flatten(0, 1)
        for tokens, part in ((query, q_tokens), (key, kv_tokens), (value, kv_tokens))
    )
    return queries, keys, values, attention_mask


def _nothing(layer: str, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:  # noqa: ARG001
    """The output of queries that see no key."""
    count(Reason.NOTHING_VISIBLE, layer)
    return query.new_zeros(*query.shape[:3], value.shape[3])
