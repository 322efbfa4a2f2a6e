"""Create the inputs and masks of ``sparge bench`` on the measured device. A CPU takes minutes for 131072 tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparge.bench.cases import Problem
from sparge.evaluate.inputs import Inputs, text_tensors, video_tensors
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape

DOCUMENTS = 8
"""Number of equally long documents in the mask "documents". A "window" extends by the length of one to either side."""


def make_inputs(problem: Problem, device: torch.device, seed: int = 0) -> Inputs:
    """Return query (1, H, queries, D), key and value (1, H, tokens, D) in bfloat16: text-like if causal, else
    video-like.

    Packed segments form a batch (segments, H, ...) with different values in each segment.
    """
    if problem.segments > 1:
        single = replace(problem, segments=1)
        parts = [make_inputs(single, device, seed + segment) for segment in range(problem.segments)]
        query, key, value = (torch.cat(side) for side in zip(*parts, strict=True))
        return query, key, value
    generator = torch.Generator(device).manual_seed(seed)
    make = text_tensors if problem.is_causal else video_tensors
    query, key, value = make((1, problem.heads, problem.tokens, problem.head_dim), generator)
    query, key, value = (tensor.bfloat16().contiguous() for tensor in (query[:, :, -problem.queries :], key, value))
    return query, key, value


def make_mask(name: str, problem: Problem, device: torch.device) -> Tensor:
    """Return the mask "documents", "window" or "random", bool (1, 1, queries, tokens), or the bfloat16 mask "bias",
    (1, H, queries, tokens)."""
    generator = torch.Generator(device).manual_seed(1)
    size = (1, 1, problem.queries, problem.tokens)
    if name == "bias":
        size = (1, problem.heads, *size[2:])
        return torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator)
    if name == "random":
        return torch.randint(2, size, dtype=torch.uint8, device=device, generator=generator) == 1
    position = torch.arange(problem.tokens, device=device, dtype=torch.int32)
    if name == "window":
        return ((position[-problem.queries :, None] - position).abs() <= problem.tokens // DOCUMENTS)[None, None]
    document = position * DOCUMENTS // problem.tokens
    return (document[-problem.queries :, None] == document)[None, None]


def random_blocks(
    shape: Shape, density: float, device: torch.device, seed: int = 0, *, is_causal: bool = False
) -> Tensor:
    """Return a bool tensor (B, H, q_blocks, kv_blocks) that keeps a random ``density`` of each query block's visible
    blocks.

    The number of blocks is rounded. Causal masks keep the blocks on the diagonal, so that every query sees a key.
    """
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.batch, shape.heads, shape.q_blocks, shape.kv_blocks)
    rank = torch.rand(size, generator=generator, device=device)
    if not is_causal:
        return rank.argsort(-1) < round(density * shape.kv_blocks)
    first = torch.arange(shape.q_blocks, device=device)[:, None] * BLOCK_Q + shape.causal_offset
    last = (first + BLOCK_Q - 1).clamp(max=shape.kv_len - 1)
    starts = torch.arange(shape.kv_blocks, device=device) * BLOCK_K
    on_diagonal = (starts <= last) & (starts + BLOCK_K > first)
    rank = rank.masked_fill(starts > last, 2.0).masked_fill(on_diagonal, -1.0)
    kept = (density * (last // BLOCK_K + 1)).round()
    return rank.argsort(-1).argsort(-1) < torch.maximum(kept, on_diagonal.sum(-1, keepdim=True))
