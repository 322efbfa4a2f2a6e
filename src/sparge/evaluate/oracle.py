"""Exact attention on sampled queries, for sequences whose full score matrix is too large for memory.

By default, 256 queries per head are sampled evenly from the first to the last. Their output is computed in float64, for
one head and 32768 keys at a time, so the scores take 67 MB at any length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sparge.evaluate.metrics import relative_l1
from sparge.masks.geometry import BLOCK_K, BLOCK_Q

SAMPLED_QUERIES = 256
KEYS_AT_ONCE = 32768


class ExactRows(NamedTuple):
    """Output (B, H, rows, D_v) and natural-log LSE (B, H, rows) in float64; 0 and -inf for queries that see no key."""

    output: Tensor
    lse: Tensor


def sampled_queries(q_len: int, device: torch.device, count: int = SAMPLED_QUERIES) -> Tensor:
    """Return the positions of at most ``count`` queries, spread evenly from the first to the last: int64."""
    count = min(count, q_len)
    return torch.arange(count, device=device) * (q_len - 1) // max(count - 1, 1)


def exact_rows(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, *, is_causal: bool = False, kept: Tensor | None = None
) -> ExactRows:
    """Compute softmax attention of some queries in float64.

    Args:
        query: (B, H, S_q, D).
        key: (B, H_kv, S_k, D).
        value: (B, H_kv, S_k, D_v).
        rows: positions of the queries, int64.
        is_causal: aligned bottom-right.
        kept: bool (B, H, q_blocks, kv_blocks), the blocks to compute; all by default.
    """
    batches, heads = query.shape[:2]
    group = heads // key.shape[1]
    output = torch.empty(batches, heads, len(rows), value.shape[-1], dtype=torch.float64, device=query.device)
    lse = torch.empty(batches, heads, len(rows), dtype=torch.float64, device=query.device)
    last_visible = rows + key.shape[2] - query.shape[2] if is_causal else None
    for batch in range(batches):
        for head in range(heads):
            blocks = None if kept is None else kept[batch, head, rows // BLOCK_Q]
            operands = query[batch, head, rows], key[batch, head // group], value[batch, head // group]
            output[batch, head], lse[batch, head] = _head_rows(*operands, last_visible, blocks)
    return ExactRows(output, lse)


def score_chunks(
    query: Tensor, key: Tensor, last_visible: Tensor | None = None, kept: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield scores of one head's queries in float64, in chunks of keys: (rows, D), (S_k, D) -> keys, (rows, keys).

    Args:
        last_visible: (rows,) int64, position of the last visible key; scores of later keys are -inf.
        kept: bool (rows, kv_blocks); scores of keys in other blocks are -inf.
    """
    query = query.double() * query.shape[-1] ** -0.5
    for start in range(0, len(key), KEYS_AT_ONCE):
        chunk = slice(start, min(start + KEYS_AT_ONCE, len(key)))
        scores = query @ key[chunk].double().T
        positions = torch.arange(chunk.start, chunk.stop, device=key.device)
        if last_visible is not None:
            scores.masked_fill_(positions > last_visible[:, None], -math.inf)
        if kept is not None:
            scores.masked_fill_(~kept[:, positions // BLOCK_K], -math.inf)
        yield chunk, scores


def _head_rows(
    query: Tensor, key: Tensor, value: Tensor, last_visible: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the online softmax over chunks of keys: (rows, D), (S_k, D), (S_k, D_v) -> (rows, D_v), (rows,)."""
    running_max = torch.full((len(query), 1), -math.inf, dtype=torch.float64, device=query.device)
    total = torch.zeros_like(running_max)
    output = total.expand(-1, value.shape[-1])
    for chunk, scores in score_chunks(query, key, last_visible, kept):
        new_max = torch.maximum(running_max, scores.amax(1, keepdim=True))
        shift = new_max.masked_fill(new_max == -math.inf, 0.0)
        probabilities = (scores - shift).exp_()
        decay = (running_max - shift).exp()
        output = output * decay + probabilities @ value[chunk].double()
        total = total * decay + probabilities.sum(1, keepdim=True)
        running_max = new_max
    return output / total.masked_fill(total == 0, 1.0), (running_max + total.log()).squeeze(1)


def sampled_error(output: Tensor, rows: Tensor, exact: Tensor) -> float:
    """Return the relative L1 error of the sampled rows.

    Raises:
        ValueError: the output contains NaN or Inf.
    """
    error = relative_l1(output[:, :, rows], exact)
    if not math.isfinite(error):
        raise ValueError(f"expected a finite output, got a relative L1 error of {error}")
    return error
