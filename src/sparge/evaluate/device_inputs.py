"""Inputs of ``sparge bench``, made on the device that is measured, because a CPU would take minutes at 131072 tokens.

They follow `inputs.video_like` and `inputs.text_like` (the latter without its needles, which few queries see), with the
same amplitudes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparge.bench.cases import Problem

TOPIC_TOKENS = 48


def make_inputs(problem: Problem, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Query (1, H, queries, D), key and value (1, H, tokens, D) in bfloat16: text-like if causal, else video-like."""
    generator = torch.Generator(device).manual_seed(seed)
    make = text_like if problem.is_causal else video_like
    query, key, value = make((1, problem.heads, problem.tokens, problem.head_dim), generator)
    query, key, value = (tensor.bfloat16().contiguous() for tensor in (query[:, :, -problem.queries :], key, value))
    return query, key, value


def video_like(shape: tuple[int, int, int, int], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A smooth field over frames of equal size, row-major, with a channel offset on the keys."""
    _, heads, tokens, head_dim = shape
    device = generator.device
    axes = [torch.linspace(0, 1, size, device=device) for size in frame_grid(tokens)]
    points = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(1, 1, -1, 3)
    waves = 5.0 * _normal((1, heads, 3, head_dim), generator)
    phases = 2 * math.pi * torch.rand(1, heads, 1, head_dim, generator=generator, device=device)
    field = 2.0 * torch.cos(points @ waves + phases)  # [1, H, S, D]
    query = field + 0.5 * _normal(shape, generator)
    key = field + 0.5 * _normal(shape, generator) + 2.0 * _normal((1, heads, 1, head_dim), generator)
    return query, key, field + _normal(shape, generator)


def text_like(shape: tuple[int, int, int, int], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """An attention sink at token 0, topics of about 48 tokens, a channel offset on the keys."""
    _, heads, tokens, head_dim = shape
    coarse = _normal((heads, head_dim, tokens // TOPIC_TOKENS + 2), generator)
    topic = torch.nn.functional.interpolate(coarse, size=tokens, mode="linear").mT[None]  # [1, H, S, D]
    topic = 0.9 * math.sqrt(1.5) * topic  # interpolation takes a third of the variance
    query = topic + 0.8 * _normal(shape, generator)
    key = topic + 0.8 * _normal(shape, generator)
    sink = torch.nn.functional.normalize(_normal((1, heads, 1, head_dim), generator), dim=-1)
    query += 6.0 * sink
    key[:, :, :1] += 10.0 * sink
    key += 2.0 * _normal((1, heads, 1, head_dim), generator)
    return query, key, _normal(shape, generator)


def frame_grid(tokens: int) -> tuple[int, int, int]:
    """Frames x height x width that hold exactly ``tokens``, a multiple of 256."""
    side = 32 if tokens % 1024 == 0 and tokens >= 4096 else 16
    if tokens % (side * side):
        raise ValueError(f"tokens: expected a multiple of {side * side}, got {tokens}")
    return tokens // (side * side), side, side


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)
