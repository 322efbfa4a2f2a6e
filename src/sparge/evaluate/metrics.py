"""Metrics of sparse attention: error of the output, recall of the attention mass. Memory is linear in length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.evaluate.inputs import Needle
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q

CHUNK, CHUNK_CUDA = 2**22, 2**26
"""Number of probabilities that `block_mass` computes at once: few fit into a CPU's cache, many keep a GPU busy."""


def relative_l1(output: Tensor, exact: Tensor) -> float:
    """Return sum |output - exact| / sum |exact|."""
    return float((output.double() - exact.double()).abs().sum() / exact.double().abs().sum())


def block_mass(query: Tensor, key: Tensor, *, is_causal: bool = False, scale: float | None = None) -> Tensor:
    """Return the true attention mass of every block: (B, H, Sq, D), (B, H, Sk, D) -> (B, H, q_blocks, kv_blocks).

    Entry (i, j) is the probability that the queries of block i assign to the keys of block j, averaged over the
    queries. The entries of a query block sum to 1 (less if some queries see no key). Numbers of heads must be equal:
    repeat grouped keys first.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key = query.float(), key.float()
    q_len, kv_len = query.shape[2], key.shape[2]
    whole = q_len // BLOCK_Q * BLOCK_Q
    per_block = query.shape[0] * query.shape[1] * BLOCK_Q * kv_len  # probabilities of one query block
    step = BLOCK_Q * max(1, (CHUNK_CUDA if query.is_cuda else CHUNK) // per_block)
    starts = [*range(0, whole, step), *([whole] if whole < q_len else [])]
    mass = []
    for start, stop in zip(starts, [*starts[1:], q_len], strict=True):
        probabilities = _attention_rows(query, key, start, stop, is_causal, scale)
        padded = F.pad(probabilities, (0, -kv_len % BLOCK_K))
        query_mass = padded.unflatten(-1, (-1, BLOCK_K)).sum(-1)  # [B, H, queries, kv_blocks]
        mass.append(query_mass.unflatten(2, (-1, min(BLOCK_Q, stop - start))).mean(3))
    return torch.cat(mass, 2)


def mass_recall(mask: BlockMask, mass: Tensor) -> float:
    """Return the share of the attention mass in kept blocks."""
    return float((mass * mask.to_dense()).sum() / mass.sum())


def needle_recall(
    mask: BlockMask,
    query: Tensor,
    key: Tensor,
    needle: Needle,
    *,
    is_causal: bool = True,
    scale: float | None = None,
) -> float:
    """Return the share of the mass between a needle's queries and keys that is in kept blocks."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    probabilities = _attention_rows(query, key, needle.query_start, needle.query_stop, is_causal, scale)
    keys = torch.arange(needle.key_start, needle.key_stop)
    queries = torch.arange(needle.query_start, needle.query_stop)
    kept = mask.to_dense()[:, :, queries // BLOCK_Q][..., keys // BLOCK_K]  # [B, H, queries, keys]
    mass = probabilities[..., keys]
    return float((mass * kept).sum() / mass.sum())


def _attention_rows(query: Tensor, key: Tensor, start: int, stop: int, is_causal: bool, scale: float) -> Tensor:
    """Return exact probabilities of queries start..stop, (B, H, stop - start, Sk); 0 for queries that see no key."""
    scores = query[:, :, start:stop].float() @ key.float().mT * scale
    if is_causal:
        positions = torch.arange(start, stop, device=query.device)[:, None] + key.shape[2] - query.shape[2]
        scores = scores.masked_fill(torch.arange(key.shape[2], device=query.device) > positions, -torch.inf)
    return torch.where(scores.amax(-1, keepdim=True) == -torch.inf, 0.0, scores.softmax(-1))
