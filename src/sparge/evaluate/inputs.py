"""Synthetic queries, keys and values with the structure of real models, generated from a seed on any device.

`text_tensors` and `video_tensors` define "text-like" and "video-like" for the bench, the demo, the benchmarks and the
tests.

text_like           causal, with an attention sink at token 0, local topics, and a channel offset on the keys
text_with_needles   `text_like` with a few distant "needles": sentences to which later questions attend
video_like          a smooth field over frames in row-major order, with a channel offset on the keys
random_like         independent Gaussians, in which no block is more important than another
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparge.masks.geometry import BLOCK_K, BLOCK_Q

Inputs = tuple[Tensor, Tensor, Tensor]
TensorShape = tuple[int, int, int, int]

TOPIC_TOKENS = 48
FRAME_TOKENS = 256
"""Number of tokens of the smallest frame."""
NEEDLE_STRENGTH = 11.0


@dataclass(frozen=True)
class Needle:
    """Keys ``key_start .. key_stop`` that the queries ``query_start .. query_stop`` attend to."""

    key_start: int
    key_stop: int
    query_start: int
    query_stop: int


@dataclass(frozen=True)
class Sample:
    """One attention problem: query, key, value (1, H, S, D) in float32."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    needles: tuple[Needle, ...] = ()


def text_like(
    tokens: int = 8192, heads: int = 8, head_dim: int = 64, seed: int = 0, device: torch.device | str = "cpu"
) -> Sample:
    """Return causal inputs with an attention sink at token 0, and topics that neighboring tokens share."""
    tensors = text_tensors((1, heads, tokens, head_dim), torch.Generator(device).manual_seed(seed))
    return Sample("text-like", *tensors, is_causal=True)


def text_with_needles(
    tokens: int = 8192, heads: int = 8, head_dim: int = 64, seed: int = 0, device: torch.device | str = "cpu"
) -> Sample:
    """Return `text_like` of the same seed with six needles."""
    generator = torch.Generator(device).manual_seed(seed)
    query, key, value = text_tensors((1, heads, tokens, head_dim), generator)
    needles = _place_needles(tokens)
    for needle in needles:
        # The cube concentrates a direction in a few channels, as in trained heads.
        direction = _unit(_normal((1, heads, 1, head_dim), generator) ** 3)
        key[:, :, needle.key_start : needle.key_stop] += NEEDLE_STRENGTH * direction
        query[:, :, needle.query_start : needle.query_stop] += NEEDLE_STRENGTH * direction
    return Sample("needles", query, key, value, True, needles)


def video_like(
    tokens: int = 8192, heads: int = 8, head_dim: int = 64, seed: int = 0, device: torch.device | str = "cpu"
) -> Sample:
    """Return a smooth field over frames of equal size (`frame_grid`) in row-major order, not causal."""
    tensors = video_tensors((1, heads, tokens, head_dim), torch.Generator(device).manual_seed(seed))
    return Sample("video-like", *tensors, is_causal=False)


def random_like(
    tokens: int = 8192, heads: int = 8, head_dim: int = 64, seed: int = 0, device: torch.device | str = "cpu"
) -> Sample:
    """Return independent Gaussians, not causal."""
    generator = torch.Generator(device).manual_seed(seed)
    query, key, value = (_normal((1, heads, tokens, head_dim), generator) for _ in range(3))
    return Sample("random", query, key, value, False)


def text_tensors(shape: TensorShape, generator: torch.Generator) -> Inputs:
    """Return query, key, value with a sink at token 0, topics of about 48 tokens and a channel offset on the keys."""
    _, heads, tokens, head_dim = shape
    coarse = _normal((heads, head_dim, tokens // TOPIC_TOKENS + 2), generator)
    topic = torch.nn.functional.interpolate(coarse, size=tokens, mode="linear").mT[None].contiguous()  # [1, H, S, D]
    topic = 0.9 * math.sqrt(1.5) * topic  # interpolation reduces the variance by a third
    query = topic + 0.8 * _normal(shape, generator)
    key = topic + 0.8 * _normal(shape, generator)
    sink = _unit(_normal((1, heads, 1, head_dim), generator))
    query += 6.0 * sink
    key[:, :, :1] += 10.0 * sink
    key += 2.0 * _normal((1, heads, 1, head_dim), generator)
    return query, key, _normal(shape, generator)


def video_tensors(
    shape: TensorShape,
    generator: torch.Generator,
    *,
    amplitude: float = 2.0,
    noise: float = 0.5,
    frequency: float = 5.0,
) -> Inputs:
    """Return query, key and value of a smooth field over frames in row-major order, with a channel offset on the keys.

    With a smaller amplitude, attention is spread more evenly over many blocks. With a smaller frequency, the field is
    smoother, and block means approximate it well.
    """
    _, heads, tokens, head_dim = shape
    device = generator.device
    axes = [torch.linspace(0, 1, size, device=device) for size in frame_grid(tokens)]
    points = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(1, 1, -1, 3)
    waves = frequency * _normal((1, heads, 3, head_dim), generator)
    phases = 2 * math.pi * torch.rand(1, heads, 1, head_dim, generator=generator, device=device)
    field = amplitude * torch.cos(points @ waves + phases)  # [1, H, S, D]
    query = field + noise * _normal(shape, generator)
    key = field + noise * _normal(shape, generator) + 2.0 * _normal((1, heads, 1, head_dim), generator)
    return query, key, field + _normal(shape, generator)


def frame_grid(tokens: int) -> tuple[int, int, int]:
    """Return frames, height and width of a grid of exactly ``tokens`` tokens, a multiple of 256."""
    side = 32 if tokens % 1024 == 0 and tokens >= 4096 else 16
    if tokens % (side * side):
        raise ValueError(f"tokens: expected a multiple of {side * side}, got {tokens}")
    return tokens // (side * side), side, side


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _unit(vectors: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vectors, dim=-1)


def _place_needles(tokens: int, count: int = 6, sentence: int = 16, question: int = 32) -> tuple[Needle, ...]:
    """Place the sentences in the first half, and their questions in the same order in the last third.

    From 2048 tokens on, each sentence is within one key block and each question within one query block. A needle that
    crosses a block border is harder to find, because it is a smaller part of the block or of the sampled queries.
    """
    needles = []
    for index in range(count):
        key_start = tokens * (2 * index + 1) // (4 * count)
        query_start = tokens * 2 // 3 + index * (tokens // 3 - question) // count
        if tokens >= 2048:
            key_start = _within_block(key_start, sentence, BLOCK_K)
            query_start = _within_block(query_start, question, BLOCK_Q)
        needles.append(Needle(key_start, key_start + sentence, query_start, query_start + question))
    return tuple(needles)


def _within_block(position: int, length: int, block: int) -> int:
    """Return the position, moved back if ``length`` tokens from it would cross a block border."""
    return position - max(0, position % block + length - block)
