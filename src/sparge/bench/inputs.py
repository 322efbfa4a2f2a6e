"""Create the inputs and random blocks of ``sparge bench`` on the measured device. A CPU takes minutes for 131072
tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from sparge.bench.cases import Problem
from sparge.evaluate.inputs import Inputs, text_tensors, video_tensors
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape


def make_inputs(problem: Problem, device: torch.device, seed: int = 0) -> Inputs:
    """Return query (1, H, queries, D), key and value (1, H, tokens, D) in bfloat16: text-like if causal, else
    video-like.
    """
    generator = torch.Generator(device).manual_seed(seed)
    make = text_tensors if problem.is_causal else video_tensors
    query, key, value = make((1, problem.heads, problem.tokens, problem.head_dim), generator)
    query, key, value = (tensor.bfloat16().contiguous() for tensor in (query[:, :, -problem.queries :], key, value))
    return query, key, value


def random_blocks(
    shape: Shape, density: float, device: torch.device, seed: int = 0, *, is_causal: bool = False
) -> Tensor:
    """Return a bool tensor (B, H, q_blocks, kv_blocks) that keeps a random share ``density`` of the visible blocks of
    each query block.

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
