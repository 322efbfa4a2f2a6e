"""Exact attention on sampled queries: an error for sequences whose full score matrix fits into no memory.

256 queries per head, spread evenly from the first to the last, in float32, one head at a time: at 131072 tokens the
scores of one head are 134 MB.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparge.evaluate.metrics import relative_l1
from sparge.geometry import BLOCK_K, BLOCK_Q

SAMPLED_QUERIES = 256


def sampled_queries(q_len: int, device: torch.device, count: int = SAMPLED_QUERIES) -> Tensor:
    """Positions of at most ``count`` queries from first to last, int64."""
    count = min(count, q_len)
    return torch.arange(count, device=device) * (q_len - 1) // max(count - 1, 1)


def exact_rows(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, *, is_causal: bool = False, kept: Tensor | None = None
) -> Tensor:
    """Softmax attention of some queries in float32: (B, H, rows, D_v), 0 for a query that sees nothing.

    Args:
        query: (B, H, S_q, D).
        key: (B, H, S_k, D).
        value: (B, H, S_k, D_v).
        rows: positions of the queries, int64.
        is_causal: aligned bottom-right.
        kept: bool (B, H, q_blocks, kv_blocks); only these blocks are seen. All by default.
    """
    kv_len, offset = key.shape[2], key.shape[2] - query.shape[2]
    keys = torch.arange(kv_len, device=key.device)
    output = torch.empty(*query.shape[:2], len(rows), value.shape[-1], device=query.device)
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            scores = query[batch, head, rows].float() @ key[batch, head].float().T * query.shape[-1] ** -0.5
            if is_causal:
                scores.masked_fill_(keys > rows[:, None] + offset, -math.inf)
            if kept is not None:
                seen = kept[batch, head, rows // BLOCK_Q].repeat_interleave(BLOCK_K, -1)[:, :kv_len]
                scores.masked_fill_(~seen, -math.inf)
            probabilities = scores.softmax(-1).nan_to_num_(nan=0.0)
            output[batch, head] = probabilities @ value[batch, head].float()
    return output


def sampled_error(output: Tensor, rows: Tensor, exact: Tensor) -> float:
    """Relative L1 error of the sampled rows.

    Raises:
        ValueError: the output holds NaN or Inf.
    """
    error = relative_l1(output[:, :, rows], exact)
    if not math.isfinite(error):
        raise ValueError(f"expected a finite output, got a relative L1 error of {error}")
    return error
