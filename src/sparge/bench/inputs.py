"""The inputs of ``sparge bench``, made on the device that is measured: a CPU would take minutes at 131072 tokens."""

from __future__ import annotations

import torch

from sparge.bench.cases import Problem
from sparge.evaluate.inputs import Inputs, text_tensors, video_tensors


def make_inputs(problem: Problem, device: torch.device, seed: int = 0) -> Inputs:
    """Query (1, H, queries, D), key and value (1, H, tokens, D) in bfloat16: text-like if causal, else video-like."""
    generator = torch.Generator(device).manual_seed(seed)
    make = text_tensors if problem.is_causal else video_tensors
    query, key, value = make((1, problem.heads, problem.tokens, problem.head_dim), generator)
    query, key, value = (tensor.bfloat16().contiguous() for tensor in (query[:, :, -problem.queries :], key, value))
    return query, key, value
