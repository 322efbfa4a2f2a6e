"""Synthetic queries, keys and values with the structure real models show, made from a seed.

`text_like`: causal; an attention sink at token 0, local topics, a few far "needles" (a sentence that a later question
looks for), a channel offset on the keys. `video_like`: a smooth field over a T x H x W grid, row-major, with a channel
offset on the keys. `random_like`: independent Gaussians, where no block matters more than another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparge.geometry import BLOCK_K, BLOCK_Q


@dataclass(frozen=True)
class Needle:
    """Keys ``key_start .. key_stop`` that the queries ``query_start .. query_stop`` look for."""

    key_start: int
    key_stop: int
    query_start: int
    query_stop: int


@dataclass(frozen=True)
class Sample:
    """One attention problem: query, key, value (1, H, S, D)."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    needles: tuple[Needle, ...] = ()


def text_like(tokens: int = 8192, heads: int = 8, head_dim: int = 64, seed: int = 0) -> Sample:
    """Sink + local topics + needles, causal."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, heads, tokens, head_dim)
    topic = 0.9 * _smooth_walk(shape, memory=48, generator=generator)
    query = topic + 0.8 * torch.randn(shape, generator=generator)
    key = topic + 0.8 * torch.randn(shape, generator=generator)
    sink = _unit(1, heads, 1, head_dim, generator=generator)
    query += 6.0 * sink
    key[:, :, :1] += 10.0 * sink
    needles = _place_needles(tokens)
    for needle in needles:
        direction = _unit(1, heads, 1, head_dim, generator=generator, power=3)
        key[:, :, needle.key_start : needle.key_stop] += 11.0 * direction
        query[:, :, needle.query_start : needle.query_stop] += 11.0 * direction
    key += 2.0 * torch.randn(1, heads, 1, head_dim, generator=generator)
    return Sample("text-like", query, key, torch.randn(shape, generator=generator), True, needles)


def video_like(grid: tuple[int, int, int] = (8, 32, 32), heads: int = 8, head_dim: int = 64, seed: int = 0) -> Sample:
    """A smooth field over a T x H x W grid in row-major order, not causal."""
    generator = torch.Generator().manual_seed(seed)
    axes = [torch.linspace(0, 1, size) for size in grid]
    points = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(1, 1, -1, 3)
    waves = 5.0 * torch.randn(1, heads, 3, head_dim, generator=generator)
    phases = 2 * math.pi * torch.rand(1, heads, 1, head_dim, generator=generator)
    field = 2.0 * torch.cos(points @ waves + phases)  # [1, H, S, D]
    query = field + 0.5 * torch.randn(field.shape, generator=generator)
    key = field + 0.5 * torch.randn(field.shape, generator=generator)
    key += 2.0 * torch.randn(1, heads, 1, head_dim, generator=generator)
    value = field + torch.randn(field.shape, generator=generator)
    return Sample("video-like", query, key, value, False)


def random_like(tokens: int = 8192, heads: int = 8, head_dim: int = 64, seed: int = 0) -> Sample:
    """Independent Gaussians, not causal."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, heads, tokens, head_dim, generator=generator) for _ in range(3))
    return Sample("random", query, key, value, False)


def _smooth_walk(shape: tuple[int, ...], memory: int, generator: torch.Generator) -> Tensor:
    """Unit-variance noise along dimension 2 that forgets itself within about ``memory`` tokens."""
    batch, heads, tokens, head_dim = shape
    noise = torch.randn(batch * heads * head_dim, 1, tokens + 4 * memory, generator=generator)
    window = torch.exp(-torch.arange(4 * memory + 1) / memory)
    walk = torch.nn.functional.conv1d(noise, (window / window.norm()).view(1, 1, -1))
    return walk.view(batch, heads, head_dim, tokens).mT.contiguous()


def _unit(*shape: int, generator: torch.Generator, power: int = 1) -> Tensor:
    """A random unit vector; a higher (odd) power gathers its length in a few channels, as in trained heads."""
    vector = torch.randn(*shape, generator=generator) ** power
    return vector / vector.norm(dim=-1, keepdim=True)


def _place_needles(tokens: int, count: int = 6, sentence: int = 16, question: int = 32) -> tuple[Needle, ...]:
    """Sentences spread over the first half, their questions in the same order over the last third.

    From 2048 tokens on, each sentence lies within one key block and each question within one query block. A border
    through either makes a needle harder to find: its share of a block, and of the sampled queries, is smaller.
    """
    needles = []
    for index in range(count):
        start = tokens * (2 * index + 1) // (4 * count)
        ask = tokens * 2 // 3 + index * (tokens // 3 - question) // count
        if tokens >= 2048:
            start, ask = _within_block(start, sentence, BLOCK_K), _within_block(ask, question, BLOCK_Q)
        needles.append(Needle(start, start + sentence, ask, ask + question))
    return tuple(needles)


def _within_block(position: int, length: int, block: int) -> int:
    """The position, moved back if ``length`` tokens from there would cross a block border."""
    return position - max(0, position % block + length - block)
