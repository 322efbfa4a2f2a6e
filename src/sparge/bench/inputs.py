"""Inputs of ``sparge bench``, created on the measured device: a CPU would take minutes for 131072 tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparge.bench.cases import Problem
from sparge.evaluate.inputs import Inputs, text_tensors, video_tensors


def make_inputs(problem: Problem, device: torch.device, seed: int = 0) -> Inputs:
    """Return query (1, H, queries, D), key and value (1, H, tokens, D) in bfloat16: text-like if causal, else
    video-like.

    Packed segments are a batch (segments, H, ...) with different values in each segment.
    """
    if problem.segments > 1:
        one = replace(problem, segments=1)
        parts = [make_inputs(one, device, seed + segment) for segment in range(problem.segments)]
        query, key, value = (torch.cat(side) for side in zip(*parts, strict=True))
        return query, key, value
    generator = torch.Generator(device).manual_seed(seed)
    make = text_tensors if problem.is_causal else video_tensors
    query, key, value = make((1, problem.heads, problem.tokens, problem.head_dim), generator)
    query, key, value = (tensor.bfloat16().contiguous() for tensor in (query[:, :, -problem.queries :], key, value))
    return query, key, value
